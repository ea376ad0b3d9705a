"""Tables for LaTeX: escaped text, numbers aligned in one unit, and columns with heads and widths.

The source is ASCII and needs no package: it compiles under pdfLaTeX, XeLaTeX and LuaLaTeX, in the
font encodings OT1 and T1.  A letter that these cannot set is a visible escape.
"""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import NamedTuple

from rooftrace._escapes import visible
from rooftrace.hardware.units import CAPACITY_STEPS, COUNT_STEPS, DECIMAL_STEPS, MISSING, TIME_STEPS
from rooftrace.reporting.renderers.units import runs
from rooftrace.reporting.renderers.view import Cell, Column, Table

# -- text ------------------------------------------------------------------------------------------

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

_GREEK = frozenset("αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΥΦΨΩ")
"""Letters that LaTeX has commands for: other capitals look like Latin ones."""
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
    """Text with every character escaped for LaTeX."""
    return "".join(map(_letter, visible(text)))


def width_of(text: str) -> int:
    """About how many letters wide a line of text is as it is set."""
    return sum(
        max(1, len(_unset(c)) if not c.isascii() else 1) for _, part in runs(text) for c in part
    )


def _letter(letter: str) -> str:
    if letter.isascii():
        return _ASCII.get(letter, letter)
    return _command(letter) or "".join(_ASCII.get(c, c) for c in _unset(letter))


def _command(letter: str) -> str:
    """The LaTeX for a letter outside of ASCII; "" where there is none."""
    return _SYMBOLS.get(letter) or _greek(letter) or _script(letter) or _accented(letter)


def _unset(letter: str) -> str:
    r"""The escape for a letter that LaTeX cannot set: `\u4e2d`; "" for one that it can."""
    return "" if _command(letter) else letter.encode("ascii", "backslashreplace").decode()


def _greek(letter: str) -> str:
    if letter not in _GREEK:
        return ""
    name = unicodedata.name(letter).rpartition(" ")[2].replace("LAMDA", "LAMBDA")
    return rf"$\{name.capitalize() if letter.isupper() else name.lower()}$"


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


# -- aligning --------------------------------------------------------------------------------------
# Cells of a column in one unit, which moves into the head; decimal points line up.  Works on the
# texts that other pages print, so the digits are the same.

_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_UNIT = r"[A-Za-z%][A-Za-z/%]*"
_CELL = re.compile(
    rf"(?P<sign>(?:[≥≤<>±~+\-−] ?)*)(?P<number>{_NUMBER})(?: ?(?P<unit>{_UNIT}))?"
    rf"(?:–(?P<most>{_NUMBER}) ?(?P<most_unit>{_UNIT})?)?"
)


def _steps(steps: Sequence[tuple[float, str]], unit: str) -> dict[str, Decimal]:
    return {f"{prefix}{unit}": Decimal(scale) for scale, prefix in steps}


_TIMES = {name: Decimal(str(scale)) for scale, name in TIME_STEPS}
_COUNTS = _steps(COUNT_STEPS, "")
_BYTES = _steps(DECIMAL_STEPS, "B")
_FAMILIES: tuple[Mapping[str, Decimal], ...] = (
    _TIMES,
    _BYTES,
    _steps(CAPACITY_STEPS, ""),
    _steps(DECIMAL_STEPS, "FLOP"),
    _steps(DECIMAL_STEPS, "FLOP/s"),
    _steps(DECIMAL_STEPS, "B/s"),
    _COUNTS,
)
"""Units that convert into each other, and the value of one of each."""
_POWERS = {"K": "$10^3$", "M": "$10^6$", "B": "$10^9$", "T": "$10^{12}$"}
_LARGEST = 10**6
"""Numbers of a column with a shared unit are below this."""
_LEAST = Decimal("0.1")


class InOneUnit(NamedTuple):
    """The unit of a column as LaTeX, and its cells: (text, decimals that it lacks)."""

    unit: str
    cells: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Quantity:
    sign: str
    numbers: tuple[tuple[Decimal, str], ...]  # one, or the ends of an interval, each with its unit


def aligned(texts: Sequence[str], symbol: str = "") -> InOneUnit | None:
    """Cells of a column in one unit; None where they are no numbers, or of too different sizes.

    symbol: the unit of the stored numbers ("byte", "s"), since "B" is billions too.
    """
    quantities = [_quantity(text) for text in texts]
    numbers = [item for item in quantities if item is not None]
    if not numbers or any(
        item is None and text not in ("", MISSING, "∞")
        for item, text in zip(quantities, texts, strict=True)
    ):
        return None
    used = {unit for item in numbers for number, unit in item.numbers if number or unit}
    family = _family(used, symbol)
    if family is None:
        return None
    sizes = [number * family[unit] for item in numbers for number, unit in item.numbers if number]
    unit = _common(used, family, sizes)
    if unit is None:
        return None
    written = [
        text
        if item is None
        else item.sign + "–".join(_in(part, unit, family) for part in item.numbers)
        for item, text in zip(quantities, texts, strict=True)
    ]
    places = [len(text.rpartition(".")[2]) if "." in text else 0 for text in written]
    most = max(places)
    lacks = [
        most - place if item is not None else 0
        for place, item in zip(places, quantities, strict=True)
    ]
    shown = _POWERS.get(unit, unit) if family is _COUNTS else _shown(unit)
    return InOneUnit(shown, tuple(zip(written, lacks, strict=True)))


def _quantity(text: str) -> _Quantity | None:
    match = _CELL.fullmatch(text)
    if match is None:
        return None
    last = match["most_unit"] or ""
    numbers = [(_decimal(match["number"]), match["unit"] or last)]
    if match["most"]:
        numbers.append((_decimal(match["most"]), last))
    return _Quantity(match["sign"], tuple(numbers))


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _family(used: set[str], symbol: str) -> Mapping[str, Decimal] | None:
    """The units that hold all of these; of one unit, that one."""
    if not used - {""}:
        return {"": Decimal(1)}
    if used == {"B"} and symbol != "byte":
        return _COUNTS
    if len(used) == 1 and not any(used <= set(family) for family in _FAMILIES):
        return {unit: Decimal(1) for unit in used}
    fitting = (family for family in _FAMILIES if used <= set(family))
    return next(fitting, None)


def _common(used: set[str], family: Mapping[str, Decimal], sizes: Sequence[Decimal]) -> str | None:
    """The largest of the units in which no number is tiny; None where one is then too long."""
    if not sizes:
        return next(iter(used), next(iter(family)))
    fitting = [unit for unit in used if min(sizes) / family[unit] >= _LEAST]
    unit = max(fitting, key=lambda name: family[name], default=min(used, key=lambda n: family[n]))
    return unit if max(sizes) / family[unit] < _LARGEST else None


def _in(part: tuple[Decimal, str], unit: str, family: Mapping[str, Decimal]) -> str:
    """A number in another unit, with as many digits as it has."""
    number, before = part
    if not number:
        return "0"
    if before == unit:
        return f"{number:,}"
    factor = family[before] / family[unit]
    digits = len(number.as_tuple().digits)
    changed = number * factor
    places = max(0, digits - 1 - changed.adjusted())
    return f"{changed:,.{places}f}"


_SHOWN = {"us": r"$\mu$s", "%": r"\%", "x": r"$\times$"}


def _shown(unit: str) -> str:
    return _SHOWN.get(unit, plain(unit))


# -- columns ---------------------------------------------------------------------------------------

_BOLD = ("strong", "bad")
LETTER = 4.3
"""Points of a letter of \\footnotesize, figures and typewriter."""
GAP = 8.0
"""Points between two columns: twice \\tabcolsep."""
_WRAPPED = 22
"""Letters beyond which the lines of a column of words may break."""
_NARROW = 14
"""Letters that such a column keeps where the table else would be cut in two."""


@dataclass(frozen=True, slots=True)
class Set:
    """A typeset column: width in letters; `wraps` where its lines may break."""

    head: tuple[str, ...]  # lines
    cells: tuple[str, ...]
    widths: tuple[int, ...]  # letters of each cell
    width: int
    left: bool
    wraps: bool

    def points(self, wrapped: int) -> float:
        """Points that it takes, where lines that may break have so many letters at most."""
        return (min(self.width, wrapped) if self.wraps else self.width) * LETTER + GAP

    def lines(self, row: int) -> int:
        """How many lines a cell takes."""
        return max(1, -(-self.widths[row] // max(self.width, 1)))


def columns_of(table: Table) -> list[Set]:
    """The columns of a table that stand on a page."""
    return [_set(column, table.rows) for column in table.columns if column.shown_on("page")]


def _set(column: Column, rows: Sequence[object]) -> Set:
    written = [column.written(row, page=True) for row in rows]
    texts = [text for text, _ in written]
    left = column.is_left("page")
    in_unit = None if left else aligned(texts, _symbol(column, rows))
    unit = in_unit.unit if in_unit else ""
    if in_unit is None:
        cells = [latex(text) for text in texts]
    else:
        texts = [text + "0" * lacks + "." * (lacks > 0) for text, lacks in in_unit.cells]
        cells = [_number(text, lacks) for text, lacks in in_unit.cells]
    widths = tuple(map(width_of, texts))
    marked = (mark in _BOLD and bool(text) for text, mark in written)
    shown = tuple(
        rf"\textbf{{{cell}}}" if bold else cell for cell, bold in zip(cells, marked, strict=True)
    )
    body = max(widths, default=0)
    head = _head(column.name("page"), unit, body)
    wraps = left and body > _WRAPPED
    width = max([body, *(len(line) for line in head[1])])
    return Set(head[0], shown, widths, width, left, wraps)


def _symbol(column: Column, rows: Sequence[object]) -> str:
    """The unit of the stored numbers of a column."""
    values = (column.read(row) for row in rows)
    units = {v.unit.symbol for v in values if isinstance(v, Cell) and v.unit is not None}
    return next(iter(units)) if len(units) == 1 else column.unit.symbol


def _number(text: str, lacks: int) -> str:
    missing = ("" if "." in text else ".") + "0" * lacks
    return plain(text) + (rf"\phantom{{{missing}}}" if lacks else "")


def _head(name: str, unit: str, body: int) -> tuple[tuple[str, ...], list[str]]:
    """The lines of a head with the unit of its numbers, as LaTeX and about as they look."""
    bare = "".join(c for c in unit if c.isalnum() or c in "/%")
    if unit and bare.endswith(name) and name.isupper():  # FLOP in GFLOP
        name = ""
    lines = textwrap.wrap(name, max(body, 8, *map(len, name.split()), 0)) or ([""] * (not unit))
    shown = [latex(line) for line in lines]
    if unit:
        text, look = (f"({unit})", f"({bare})") if name else (unit, bare)
        if lines and len(lines[-1]) + 1 + len(look) <= max(body, *map(len, lines)):
            shown[-1], lines[-1] = f"{shown[-1]} {text}", f"{lines[-1]} {look}"
        else:
            shown, lines = [*shown, text], [*lines, look]
    return tuple(shown), lines


def pieces(columns: Sequence[Set], table: Table, width: float) -> list[list[Set]]:
    """The columns, cut into pieces that are at most so many points wide.

    Each begins with the leading columns of the table, and with the words after them that tell rows
    apart, in up to half of the width; columns that belong together stay together where they fit.
    Pieces are about equally wide.
    """
    if _points(columns, _NARROW) <= width:
        return [fitted(columns, width)]
    rows = range(len(table.rows))
    keys = table.leading
    while (
        len({tuple(column.cells[row] for column in columns[:keys]) for row in rows}) < len(rows)
        and columns[keys].left
        and _points(columns[: keys + 1]) <= width / 2
    ):
        keys += 1
    leading, rest = columns[:keys], columns[keys:]
    groups = [rest[i : i + table.sets] for i in range(0, len(rest), table.sets)]
    room = width - _points(leading)
    if any(_points(group) > room for group in groups):
        groups = [[column] for column in rest]
    made = _cut(groups, room)
    for share in range(1, 10):  # as many pieces, the widest as narrow as they get
        even = _cut(groups, room * share / 10)
        if len(even) == len(made):
            made = even
            break
    return [fitted([*leading, *piece], width) for piece in made]


def _cut(groups: Sequence[Sequence[Set]], room: float) -> list[list[Set]]:
    made: list[list[Set]] = [[]]
    for group in groups:
        if made[-1] and _points([*made[-1], *group]) > room:
            made.append([])
        made[-1] += group
    return made


def _points(columns: Sequence[Set], wrapped: int = _WRAPPED) -> float:
    return sum(column.points(wrapped) for column in columns)


def fitted(columns: Sequence[Set], width: float) -> list[Set]:
    """The columns, with the remaining room shared among those whose lines break."""
    wrapped = _WRAPPED if _points(columns) <= width else _NARROW
    room = width - _points(columns, wrapped)
    made = []
    for column in columns:
        if not column.wraps:
            made.append(column)
            continue
        least = column.points(wrapped)
        wants = max(0.0, column.width * LETTER + GAP - least)
        more = min(wants, max(room, 0.0))
        room -= more
        letters = int((least + more - GAP) / LETTER)
        made.append(replace(column, width=max(letters, 1), wraps=more < wants))
    return made
