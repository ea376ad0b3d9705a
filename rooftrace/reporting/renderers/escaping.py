"""Text on a GitHub-flavoured page: code spans and emphasis of builders work, those in names do not.

Raw HTML, links, images, definitions of links and fences are escaped, because no builder writes
any; they can only come from names.  So is a line that would make the one before it the head of a
table, or a heading.  Emphasis ("**") may come through: it does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rooftrace._escapes import visible

_TOKEN = re.compile(r"\\[!-/:-@\[-`{-~]|`+")
_TAG = re.compile(r"<(?=[A-Za-z/!?])")
_LINK = re.compile(r"\](?=\()")
_DEFINITION = re.compile(r"^(\s*\[[^\]]*)\](?=:)")
_FENCE = re.compile(r"~{3,}")
_RULE = re.compile(r"^[\s|:]*-[\s|:-]*$")
_RUNS = re.compile(r"`+")
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")


def inline(text: str, *, cell: bool = False) -> str:
    """One line of text.  cell: of a table, where "|" is escaped too."""
    parts = list(spans(visible(text)))
    written = []
    for is_code, part in parts:
        if is_code and not (cell and "\\|" in part):
            written.append(part.replace("|", "\\|") if cell else part)
        else:
            plain = part.replace("`", "&#96;") if is_code else part
            written.append(_plain(plain, cell))
    line = _DEFINITION.sub(r"\1&#93;", "".join(written))
    return line.replace("-", "&#45;") if _RULE.match(line) else line


def spans(text: str) -> Iterator[tuple[bool, str]]:
    """(whether it is a code span, text), as CommonMark finds spans in one line.

    Backticks that open no span become entities, so that they open none with another line.
    """
    end, start = 0, 0
    while token := _TOKEN.search(text, end):
        end = token.end()
        if token[0][0] != "`":
            continue
        closing = next((run for run in _RUNS.finditer(text, end) if run[0] == token[0]), None)
        yield False, text[start : token.start()]
        if closing is None:
            yield False, "&#96;" * len(token[0])
        else:
            end = closing.end()
            yield True, text[token.start() : end]
        start = end
    yield False, text[start:]


def runs(text: str) -> Iterator[tuple[str, str]]:
    """("code", "strong" or "", text) of one line, for outputs other than a page of Markdown.

    The text is as it is read: without backticks and asterisks of builders, without backslashes
    before punctuation.  Characters that are not seen are visible escapes.
    """
    for is_code, part in spans(visible(text)):
        if is_code:
            yield "code", _inside(part)
            continue
        plain = _ESCAPED.sub(r"\1", part).replace("&#96;", "`")
        for place, piece in enumerate(_BOLD.split(plain)):
            if piece:
                yield "strong" if place % 2 else "", piece


def _inside(code: str) -> str:
    """The text between the backticks of a code span, as CommonMark reads it."""
    fence = len(code) - len(code.lstrip("`"))
    inner = code[fence : len(code) - fence]
    padded = inner.startswith(" ") and inner.endswith(" ") and inner.strip()
    return inner[1:-1] if padded else inner


def _plain(text: str, cell: bool) -> str:
    text = _LINK.sub("&#93;", _TAG.sub("&lt;", text))
    text = _FENCE.sub(lambda run: "&#126;" * len(run[0]), text)
    if cell:
        text = text.replace("\\|", "\\&#124;").replace("|", "\\|")
    return text


def fenced(code: str, language: str) -> list[str]:
    """A block of code, in a fence that no line of it ends."""
    longest = max((len(run) for run in _RUNS.findall(code)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *visible(code, lines=True).split("\n"), fence]


def code_span(text: str) -> str:
    """A name as a code span, also where it has backticks; "" for no name."""
    if not text:
        return ""
    longest = max((len(run) for run in _RUNS.findall(text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"`{text}`"
