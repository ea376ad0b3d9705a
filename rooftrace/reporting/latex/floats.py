"""Tables as floats of a paper: booktabs rules, a caption and a label each, at most a page long."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rooftrace.errors import RequestError, hint
from rooftrace.reporting.latex.columns import LETTER, Set, columns_of, pieces
from rooftrace.reporting.latex.escaping import latex
from rooftrace.reporting.view.model import Table

MOST_LINES = 46
"""Lines of the body of a float; a longer table has several."""
_APART = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Sheet:
    """What tables are printed on: points of their width, and the environment of a float."""

    width: float
    float: str = "table"


SHEETS: Mapping[str, Sheet] = {
    "screen": Sheet(468.0),
    "paper": Sheet(505.0, "table*"),
    "paper-column": Sheet(240.0),
}
"""By the style of figures: a page of one column (6.5 in), both columns of a paper, one of them."""


def sheet_of(style: str) -> Sheet:
    """The sheet of a style.  Raises RequestError for one that is none of SHEETS."""
    if style not in SHEETS:
        raise RequestError(
            f"style {style!r}: expected one of {', '.join(SHEETS)}{hint(style, SHEETS)}"
        )
    return SHEETS[style]


@dataclass(frozen=True, slots=True)
class Float:
    """A table that a paper takes in: its name in files and labels, and its LaTeX."""

    name: str
    text: str


@dataclass(slots=True)
class Floats:
    """Makes the floats of a result, each with a name of its own.  of: whose tables these are."""

    sheet: Sheet
    of: str = ""
    _names: Counter[str] = field(default_factory=Counter)

    def of_table(self, table: Table, caption: str) -> Iterator[Float]:
        """A table as one float, or as many as its columns and rows take."""
        columns = columns_of(table)
        if not table.rows or not columns:
            return
        cut = [
            (piece, rows)
            for piece in pieces(columns, table, self.sheet.width)
            for rows in _pages(piece, len(table.rows))
        ]
        for number, (piece, rows) in enumerate(cut, 1):
            part = f" ({number} of {len(cut)})" if len(cut) > 1 else ""
            yield self._float(piece, rows, caption, part)

    def _float(self, columns: Sequence[Set], rows: range, caption: str, part: str) -> Float:
        name = self._name(caption)
        about = ", ".join(filter(None, (caption, self.of))) or "Totals"
        kind = self.sheet.float
        lines = [
            rf"\begin{{{kind}}}[htbp]",
            r"\centering",
            r"\setlength{\belowcaptionskip}{4pt}",
            rf"\caption{{{latex(about)}{part}}}",
            rf"\label{{tab:{name}}}",
            r"\footnotesize",
            r"\setlength{\tabcolsep}{4pt}",
            *tabular(columns, rows),
            rf"\end{{{kind}}}",
        ]
        return Float(name, "\n".join(lines) + "\n")

    def _name(self, caption: str) -> str:
        words = f"{self.of.partition(',')[0][:24]} {caption}"
        name = _APART.sub("-", words.lower()).strip("-")[:64].strip("-") or "table"
        self._names[name] += 1
        number = self._names[name]
        return name if number == 1 else self._name_of(name, number)

    def _name_of(self, name: str, number: int) -> str:
        while self._names[f"{name}-{number}"]:
            number += 1
        self._names[f"{name}-{number}"] = 1
        return f"{name}-{number}"


def tabular(columns: Sequence[Set], rows: range) -> list[str]:
    """The rows of a table between rules of booktabs."""
    kinds = "".join(map(_kind, columns))
    heads = " & ".join(map(_head, columns))
    body = [" & ".join(column.cells[row] for column in columns) + r" \\" for row in rows]
    return [
        rf"\begin{{tabular}}{{@{{}}{kinds}@{{}}}}",
        r"\toprule",
        rf"{heads} \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _kind(column: Set) -> str:
    if not column.wraps:
        return "l" if column.left else "r"
    points = f"{column.width * LETTER:.0f}pt"
    return rf">{{\raggedright\arraybackslash\hangindent=1em}}p{{{points}}}"


def _head(column: Set) -> str:
    if len(column.head) == 1:
        return column.head[0]
    side = "l" if column.left else "r"
    lines = r"\\".join(column.head)
    return rf"\begin{{tabular}}[b]{{@{{}}{side}@{{}}}}{lines}\end{{tabular}}"


def _pages(columns: Sequence[Set], count: int) -> Iterator[range]:
    """Ranges of rows that each fill at most a page."""
    start = lines = 0
    for row in range(count):
        high = max(column.lines(row) if column.wraps else 1 for column in columns)
        if row > start and lines + high > MOST_LINES:
            yield range(start, row)
            start, lines = row, 0
        lines += high
    yield range(start, count)
