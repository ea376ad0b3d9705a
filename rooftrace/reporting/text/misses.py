"""The kernels with the largest errors of prediction, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.validate import Node, misses
from rooftrace.reporting.view import model as view, units, words
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.measured.alignment import Alignment, Stray

SHOWN = 20
_OFF = units.Unit("s", "number", lambda s: f"{'+' if s >= 0 else '-'}{format_time(abs(s))}")
COLUMNS = (
    view.Column("kernel", units.TEXT, "kernel"),
    view.Column("module", units.CODE, "module", flexible=True),
    view.Column("launches", units.COUNT, "launches", drop=1),
    view.Column("predicted", units.SECOND, "predicted"),
    view.Column("measured", units.SECOND, "measured"),
    view.Column("miss", _OFF, "off by"),
    view.Column("reason", units.TEXT, "likely reason", folded=True),
)


def miss_rows(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> list[dict[str, Any]]:
    """The worst kernels, and calls that the graph lacks; the largest error in seconds first."""
    rows = [node_row(node) for node in misses.worst(tuple(nodes), count)]
    rows += [stray_row(stray) for stray in (alignment.only_in_trace if alignment else ())]
    return sorted(rows, key=lambda row: -abs(row["miss"]))[:count]


def stray_row(stray: Stray) -> dict[str, Any]:
    """A call that the graph lacks; the row has its shapes in place of a module."""
    shapes = ", ".join(str(list(shape)) for shape in stray.shapes if shape)
    return {
        "kernel": stray.name.removeprefix("aten::"),
        "module": shapes[:40],
        "launches": f"{stray.count:.3g}",
        "predicted": None,
        "measured": stray.seconds,
        "miss": stray.seconds,
        "reason": "op missing in the graph",
    }


def node_row(node: Node) -> dict[str, Any]:
    """The row of a kernel: its predicted and measured seconds."""
    return {
        "kernel": words.kernel_name(node.row.name),
        "module": pattern_of(node.row.module) or "(root)",
        "launches": node.row.count,
        "predicted": node.predicted,
        "measured": node.measured,
        "miss": node.miss,
        "reason": node.reason,
    }


def matched_words(nodes: Sequence[Node], alignment: Alignment | None = None) -> str:
    """One sentence: how much was matched, and how far the sums are apart."""
    both = [node for node in nodes if node.measured is not None]
    predicted = sum(node.predicted for node in both)
    measured = sum(node.measured or 0.0 for node in both)
    text = (
        f"{len(both):,} of {words.plural(len(nodes), 'kernel')} measured: predicted "
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


def misses_view(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> view.View:
    """What was matched, and the worst kernels."""
    text = matched_words(nodes, alignment)
    rows = miss_rows(nodes, alignment, count)
    parts: list[view.Part] = [
        view.Note(text, on="screen"),
        view.Note(f"{text}.", on="page"),
        view.Table(columns=COLUMNS, rows=rows, padded=False),
    ]
    return view.View((view.Section(parts=parts),))
