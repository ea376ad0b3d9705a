"""Text for LaTeX: what builders emphasise is set so, and no name is ever a command.

The source is ASCII and needs no package: it compiles under pdfLaTeX, XeLaTeX and LuaLaTeX, in the
font encodings OT1 and T1.  A letter that these cannot set is a visible escape.
"""

from __future__ import annotations

import re
import unicodedata

from rooftrace._escapes import visible
from rooftrace.reporting.view import runs

_ASCII = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",
    "`": r"\`{}",
    # With another letter these are a dash, a quote, a star of \\* or an argument of \\[...].
    "-": "-{}",
    "'": "'{}",
    ",": ",{}",
    "*": "{*}",
    "[": "{[}",
    "]": "{]}",
}
_SYMBOLS = {
    "\xa0": "~",
    "×": r"$\times$",
    "÷": r"$\div$",
    "·": r"$\cdot$",
    "•": r"$\bullet$",
    "±": r"$\pm$",
    "−": "$-$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "∞": r"$\infty$",
    "√": r"$\surd$",
    "∑": r"$\sum$",
    "∂": r"$\partial$",
    "→": r"$\rightarrow$",
    "←": r"$\leftarrow$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "°": r"$^{\circ}$",
    "–": "--{}",
    "—": "---{}",
    "…": r"\dots{}",
    "‘": "`{}",
    "’": "'{}",
    "“": "``{}",
    "”": "''{}",
    "§": r"\S{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "µ": r"$\mu$",
}

_GREEK = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"),
    *("lambda", "mu", "nu", "xi", ".", "pi", "rho", ".", "sigma", "tau", "upsilon", "phi", "chi"),
    *("psi", "omega"),
)
_CAPITALS = {"Γ", "Δ", "Θ", "Λ", "Ξ", "Π", "Σ", "Υ", "Φ", "Ψ", "Ω"}
_ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "=",
    "\u0306": "u",
    "\u0307": ".",
    "\u0308": '"',
    "\u030a": "r",
    "\u030b": "H",
    "\u030c": "v",
    "\u0327": "c",
}
_BREAKS = re.compile(r"(?<=[./_:\\])")
_LONGEST = 12
"""Letters of a word in which no line breaks."""
_MOST = 24
"""Letters of a longer word in which no line breaks."""


def latex(text: str) -> str:
    """One line of text with the code spans and the emphasis of builders."""
    commands = {"code": code, "strong": strong, "": _words}
    return "".join(commands[mark](part) for mark, part in runs(text))


def strong(text: str) -> str:
    """Plain text in bold."""
    return rf"\textbf{{{_words(text)}}}"


def code(text: str) -> str:
    """A name in letters of equal width."""
    return rf"\texttt{{{_words(text)}}}"


def _words(text: str) -> str:
    """Plain text; a line may break behind the dots and underscores of a long word."""
    return " ".join(map(_word, visible(text).split(" ")))


def _word(word: str) -> str:
    if len(word) <= _LONGEST:
        return plain(word)
    pieces = []
    for part in filter(None, _BREAKS.split(word)):
        pieces += [part[i : i + _MOST] for i in range(0, len(part), _MOST)]
    return "\\allowbreak{}".join(map(plain, pieces))


def plain(text: str) -> str:
    """Text as LaTeX sets it, whatever it holds."""
    return "".join(map(_letter, visible(text)))


def width_of(text: str) -> int:
    """About how many letters wide a line of text is as it is set."""
    return sum(
        max(1, len(_unset(c)) if not c.isascii() else 1) for _, part in runs(text) for c in part
    )


def _letter(letter: str) -> str:
    if letter.isascii():
        return _ASCII.get(letter, letter)
    known = _SYMBOLS.get(letter) or _greek(letter) or _script(letter) or _accented(letter)
    return known or "".join(_ASCII.get(c, c) for c in _unset(letter))


def _unset(letter: str) -> str:
    r"""What stands for a letter that is not set: `\u4e2d`; "" for one that is."""
    if _SYMBOLS.get(letter) or _greek(letter) or _script(letter) or _accented(letter):
        return ""
    return letter.encode("ascii", "backslashreplace").decode()


def _greek(letter: str) -> str:
    if letter in _CAPITALS:
        name = unicodedata.name(letter).rpartition(" ")[2].replace("LAMDA", "LAMBDA")
        return rf"$\{name.capitalize()}$"
    place = ord(letter) - ord("α")
    name = _GREEK[place] if 0 <= place < len(_GREEK) else "."
    return "" if name == "." else rf"$\{name}$"


def _script(letter: str) -> str:
    """Raised and lowered digits."""
    kind, _, digit = unicodedata.decomposition(letter).partition(" ")
    sign = {"<super>": "^", "<sub>": "_"}.get(kind)
    shown = chr(int(digit, 16)) if sign and " " not in digit else ""
    return f"${sign}{{{shown}}}$" if shown.isdigit() and shown.isascii() else ""


def _accented(letter: str) -> str:
    base, *marks = list(unicodedata.normalize("NFD", letter))
    if len(marks) != 1 or not (base.isascii() and base.isalpha()) or marks[0] not in _ACCENTS:
        return ""
    over = marks[0] != "\u0327" and base in "ij"
    under = f"\\{base}{{}}" if over else base
    return rf"\{_ACCENTS[marks[0]]}{{{under}}}"
