"""The kernels whose prediction was furthest off, as a table: for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.hardware.units import MISSING, format_share, format_time
from rooftrace.measured.validate import Node, misses
from rooftrace.reporting.text.words import kernel_name, plural
from rooftrace.tracer.graph import pattern_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rooftrace.measured.alignment import Alignment, Stray

SHOWN = 20
HEADS = ("kernel", "module", "launches", "predicted", "measured", "off by", "likely reason")
_STRAY = "op missing in the graph"


def miss_rows(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> list[tuple[str, ...]]:
    """Cells of the worst kernels and of calls that the graph has not, most seconds off first."""
    rows = [(abs(node.miss), node_cells(node)) for node in misses.worst(tuple(nodes), count)]
    for stray in alignment.only_in_trace if alignment else ():
        rows.append((stray.seconds, stray_cells(stray)))
    rows.sort(key=lambda row: -row[0])
    return [cells for _, cells in rows[:count]]


def stray_cells(stray: Stray) -> tuple[str, ...]:
    """Cells of a call that the graph has not; they begin with its name and its shapes."""
    return (
        stray.name.removeprefix("aten::"),
        ", ".join(str(list(shape)) for shape in stray.shapes if shape)[:40],
        f"{stray.count:.3g}",
        MISSING,
        format_time(stray.seconds),
        f"+{format_time(stray.seconds)}",
        _STRAY,
    )


def node_cells(node: Node) -> tuple[str, ...]:
    """Cells of a kernel; they begin with its name and its module."""
    sign = "+" if node.miss >= 0 else "-"
    return (
        kernel_name(node.row.name),
        pattern_of(node.row.module) or "(root)",
        f"{node.row.count:,}",
        format_time(node.predicted),
        MISSING if node.measured is None else format_time(node.measured),
        f"{sign}{format_time(abs(node.miss))}",
        node.reason,
    )


def summary(nodes: Sequence[Node], alignment: Alignment | None = None) -> str:
    """One sentence: how much was matched, and how far the sums are apart."""
    both = [node for node in nodes if node.measured is not None]
    predicted = sum(node.predicted for node in both)
    measured = sum(node.measured or 0.0 for node in both)
    text = (
        f"{len(both):,} of {plural(len(nodes), 'kernel')} measured: predicted "
        f"{format_time(predicted)}, measured {format_time(measured)}"
    )
    if predicted:
        text += f" ({measured / predicted:.2f}x)"
    if alignment is not None:
        text += (
            f"; {format_share(alignment.coverage)} of the run's time is matched to the graph by "
            f"{alignment.how}"
        )
    return text


def render_misses(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> RenderableType:
    """The terminal view."""
    from rich.console import Group
    from rich.text import Text

    from rooftrace.reporting.text.grids import Column, grid

    columns = [
        Column(head, right=head not in ("kernel", "module", "likely reason")) for head in HEADS
    ]
    columns[1] = Column("module", right=False, flexible=True)
    columns[2] = Column("launches", drop=1)
    return Group(Text(summary(nodes, alignment)), grid(columns, miss_rows(nodes, alignment, count)))


def misses_markdown(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> str:
    """GitHub-flavoured markdown."""
    lines = [f"{summary(nodes, alignment)}.", "", f"| {' | '.join(HEADS)} |"]
    lines.append("|---|---|---:|---:|---:|---:|---|")
    for kernel, module, *numbers, reason in miss_rows(nodes, alignment, count):
        lines.append(f"| {kernel} | `{module}` | {' | '.join(numbers)} | {reason} |")
    return "\n".join([*lines, ""])
