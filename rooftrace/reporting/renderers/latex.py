"""A view as a LaTeX document, and its tables as separate files for a paper."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rooftrace.errors import RequestError, one_of
from rooftrace.reporting.renderers.latex_columns import (
    LETTER,
    Set,
    columns_of,
    latex,
    pieces,
    plain,
)
from rooftrace.reporting.renderers.view import Image, Note, Part, Section, Table, View

PREAMBLE = r"""% made_by: rooftrace
% Tables of rooftrace.  They need \usepackage{array,booktabs} and nothing else.
% Take in one of them: copy it, or \input its file (table-NAME.tex beside report.tex).
\documentclass[10pt]{article}
\usepackage[margin=1in]{geometry}
\usepackage{array,booktabs,float,graphicx}
\renewcommand{\labelitemi}{$\bullet$}
\setlength{\emergencystretch}{3em}
\setlength{\parindent}{0pt}
\setlength{\parskip}{4pt plus 1pt}
\begin{document}
"""
_TITLES = ("section*", "subsection*", "subsubsection*", "paragraph*")
_DRAWN = (".pdf", ".png")
"""Endings of figures that pdfLaTeX takes in, the best first."""
_BOLD = ("strong", "bad")
_LEADS = 60
"""Letters of a note that is taken into a caption."""


def as_latex(view: View, figures: Collection[str] = (), style: str = "screen") -> str:
    """The view as a complete document.

    figures: names of the files that it may show.  style: the width of its tables ("screen",
    "paper", "paper-column").
    """
    writer = _LatexWriter(view.title, figures, style)
    lines = [rf"\section*{{{latex(view.title)}}}", ""] if view.title else []
    for section in view.sections:
        lines += writer.section(section, 0, "")
    body = "\n".join(lines)
    preamble = PREAMBLE.replace("1in", ".65in") if style == "paper" else PREAMBLE
    return f"{preamble}{body}\n\\end{{document}}\n"


def table_files(view: View, style: str = "screen") -> dict[str, str]:
    """Each table as a file that a paper takes in with \\input, by the name of the file.

    A table that is cut has all its floats in one file.
    """
    writer = _LatexWriter(view.title, (), style)
    for section in view.sections:
        for _ in writer.section(section, 0, ""):
            pass
    need = "% needs \\usepackage{array,booktabs}\n"
    return {
        f"table-{cut[0].name}.tex": need + "\n".join(made.text for made in cut)
        for cut in writer.tables
    }


class _LatexWriter:
    """Writes sections, and keeps the floats that it made of each table."""

    def __init__(self, title: str, figures: Collection[str], style: str) -> None:
        self._make = Floats(sheet_of(style), title)
        self._figures = figures
        self.tables: list[list[Float]] = []

    def section(self, section: Section, level: int, above: str) -> Iterator[str]:
        """A section under its title; nothing of one without parts.  above: titles above it."""
        if section.contents:
            return
        named = ": ".join(filter(None, (above, section.title)))
        lines = [*self._parts(section, level, named)]
        if lines and section.title:
            kind = _TITLES[min(level + 1, len(_TITLES) - 1)]
            yield from ("", rf"\{kind}{{{latex(section.title)}}}", "")
        yield from lines

    def _parts(self, section: Section, level: int, named: str) -> Iterator[str]:
        listing = ""
        lead = ""  # of a note that announces the table below it: "On l4:"
        for part in section.parts:
            kind = _kind_of(part)
            if listing and kind != listing:
                yield rf"\end{{{listing}}}"
            if kind and kind != listing:
                yield rf"\begin{{{kind}}}"
            listing = kind
            yield from self._part(part, level, f"{named}{lead}".strip(", "))
            lead = _lead(part)
        if listing:
            yield rf"\end{{{listing}}}"

    def _part(self, part: Part, level: int, caption: str) -> Iterator[str]:
        if isinstance(part, Section):
            yield from self.section(part, level + 1, caption)
        elif part.on == "screen":
            return
        elif isinstance(part, Table):
            cut = [*self._make.of_table(part, caption)]
            self.tables += [cut] if cut else []
            for made in cut:
                here = made.text.replace("[htbp]", "[H]", 1)  # below its heading, wherever that is
                yield from ("", here)
        elif isinstance(part, Image):
            yield from self._figure(part)
        else:
            yield from _note(part)

    def _figure(self, image: Image) -> Iterator[str]:
        file = image.file(_DRAWN, self._figures)
        if file is not None:
            size = r"width=\linewidth,height=0.85\textheight,keepaspectratio"
            yield rf"""
\begin{{figure}}[H]
\centering
\includegraphics[{size}]{{{file}}}
\caption{{{latex(image.caption)}}}
\end{{figure}}
"""


def _kind_of(part: Part) -> str:
    """The list that a part is an item of; "" for one that is none."""
    if not isinstance(part, Note) or part.on == "screen" or part.code or not part.text.strip():
        return ""
    return "itemize" if part.bullet else "enumerate" if part.number else ""


def _note(note: Note) -> Iterator[str]:
    if note.code == "mermaid":
        text = "The Mermaid diagram stands in the Markdown and the HTML of this result."
        yield from ("", text, "")
        return
    if note.code:
        lines = note.text.split("\n")
        yield from (r"\begin{flushleft}\footnotesize", *map(_code_line, lines), r"\end{flushleft}")
        return
    text = "\\\\\n".join(latex(line.strip()) for line in note.text_lines if line.strip())
    if not text:
        return
    text = rf"\textbf{{{text}}}" if note.mark in _BOLD else text
    if note.bullet:
        yield rf"\item {text}"
    elif note.number:
        yield rf"\item[{note.number}.] {text}"
    else:
        yield from ("", text, "")


def _code_line(line: str) -> str:
    indent = len(line) - len(line.lstrip(" "))
    return rf"\texttt{{{'~' * indent}{plain(line.lstrip(' '))}}}\\"


def _lead(part: Part) -> str:
    """The caption that a short note gives to the table below it: ", on l4" of "On l4:"."""
    if not isinstance(part, Note) or part.on == "screen" or len(part.text) > _LEADS:
        return ""
    return f", {_lowered(part.text[:-1])}" if part.text.endswith(":") else ""


def _lowered(text: str) -> str:
    """The first word in lower case, where it is no name."""
    word, space, rest = text.partition(" ")
    return f"{word.lower() if word.istitle() else word}{space}{rest}"


# -- floats ----------------------------------------------------------------------------------------

MOST_LINES = 46
"""Lines of the body of a float; a longer table has several."""
_APART = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Sheet:
    """The paper of tables: points of their width, and the environment of a float."""

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
        raise RequestError(f"style {style!r}: {one_of(style, SHEETS)}")
    return SHEETS[style]


@dataclass(frozen=True, slots=True)
class Float:
    """A table that a paper takes in: its name in files and labels, and its LaTeX."""

    name: str
    text: str


@dataclass(slots=True)
class Floats:
    """Makes the floats of a result, each with a unique name.  of: the title of the result."""

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
        if number == 1:
            return name
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
