"""How values are written: a unit for each kind of cell, on a page and on a screen; escaped text.

SECOND = Unit("s", "number", format_time)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rooftrace._escapes import visible
from rooftrace.hardware.units import (
    MISSING,
    format_capacity,
    format_count,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.renderers import words

# -- text on a page --------------------------------------------------------------------------------
# Text on a GitHub-flavoured page: code spans and emphasis of builders work, those in names do not.
#
# Raw HTML, links, images, definitions of links and fences are escaped, because no builder writes
# any; they can only come from names.  So is a line that would make the one before it the head of a
# table, or a heading.  Emphasis ("**") may come through: it does no harm.

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


# -- units -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a column's numbers, and their text.  Words are a unit too."""

    symbol: str  # of the numbers as they are stored: "s", "byte"
    type: str  # "integer", "number" or "string"
    page: Callable[[Any], str]
    screen: Callable[[Any], str] | None = None  # where that is shorter than on a page
    left: Literal["both", "page", "screen", ""] = ""  # where it is flush left

    def written(self, value: Any, *, page: bool) -> str:
        """The text of a value; "" stays blank, and None is a dash."""
        if isinstance(value, str) and self.type != "string":
            return value
        if value is None:
            return MISSING
        return (self.page if page or self.screen is None else self.screen)(value)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _kernel(name: str) -> str:
    return words.short_text(words.kernel_name(name), KERNEL_WIDTH)


def full(unit: Unit) -> Unit:
    """A unit whose numbers are written in full on screens too."""
    return replace(unit, screen=None)


def signed(unit: Unit) -> Unit:
    """A unit whose numbers have a sign: "+2.10 GB", "0"."""

    def written(value: float) -> str:
        return f"{'+' if value > 0 else '-'}{unit.page(abs(value))}" if value else "0"

    return replace(unit, page=written, screen=None)


KERNEL_WIDTH = 26  # of a kernel's name on a screen

TEXT = Unit("", "string", str, left="both")
WORDS = Unit("", "string", str)
"""A few words in a column of numbers: flush right."""
LIMITS = Unit("", "string", words.limit, left="screen")
CODE = Unit("", "string", code_span, str, left="both")
MODULE = Unit("", "string", lambda p: code_span(p or "(root)"), lambda p: p or "(root)", "both")
KERNEL = Unit("", "string", lambda name: code_span(words.kernel_name(name)), _kernel, "both")
COUNT = Unit("", "integer", _count)
EXACT = Unit("", "integer", lambda number: f"{number:,}")
"""An integer of any size: COUNT rounds beyond 53 bits, and also takes means."""
INDEX = Unit("", "integer", str)
FLOP = Unit("FLOP", "integer", format_flops, lambda n: words.bare(format_flops(n), "FLOP"))
BYTE = Unit("byte", "integer", format_traffic)
CAPACITY = Unit("byte", "integer", format_capacity)
SECOND = Unit("s", "number", format_time)
RATE = Unit("1/s", "number", format_count)
FLOP_RATE = Unit("FLOP/s", "number", format_flop_rate)
NUMBER = Unit("", "number", format_count)
SHARE = Unit("", "number", format_share, words.percent)
ERROR = Unit("", "number", lambda error: f"{error:+.1%}")
SPREAD = Unit("", "number", lambda error: f"{error:.1%}")
INTENSITY = Unit(
    "FLOP/byte", "number", lambda ratio: words.bare(format_intensity(ratio), "FLOP/byte")
)
TOTALS: Mapping[str, Unit] = {
    "time": SECOND,
    "flops": full(FLOP),
    "bytes": BYTE,
    "memory": CAPACITY,
    "params": NUMBER,
    "kernels": COUNT,
}
"""The units of the totals of a step, by the names that diffs and budgets have for them."""
