"""Pieces of markdown: pipe tables, shares and images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rooftrace.hardware.units import MISSING, format_share


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A pipe table, padded so that it can be read as text; all but the first `left` columns are
    flush right."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = ["-" * width if i < left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    text = [
        [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (text[0], rule, *text[1:])]


def share(part: float, whole: float) -> str:
    """A part of a whole in percent; a dash where there is no whole."""
    return format_share(part / whole) if whole else MISSING


def image(name: str, figures: Sequence[str]) -> list[str]:
    """A figure where it was written, else nothing."""
    return ["", f"![{name.removesuffix('.png')}]({name})"] if name in figures else []
