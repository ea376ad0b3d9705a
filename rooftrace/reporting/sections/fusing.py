"""What fusing saves in a phase, group by group, and what larger kernels could save beyond that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_time, format_traffic
from rooftrace.reporting.sections.tallies import ratio
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.costmodels.findings import Headroom, Saving

FUSED_SHOWN, LEFT_SHOWN, NAMES_SHOWN = 10, 5, 6
COLUMNS = (
    view.Column("name", units.KERNEL, "Kernel"),
    view.Column("ops", units.TEXT, "Ops"),
    view.Column("module", units.MODULE, "Module"),
    view.Column("count", units.COUNT, "Kernels"),
    view.Column("launches", units.COUNT, "Launches less"),
    view.Column("bytes", units.BYTE, "HBM less"),
)
SHARE = view.Column("share", units.SHARE, "Share of step")
SUMMED = ("count", "launches", "bytes", "seconds")


def _columns(estimate: Estimate) -> tuple[view.Column, ...]:
    return (*COLUMNS, view.Column("seconds", units.SECOND, _less(estimate)), SHARE)


def _less(estimate: Estimate) -> str:
    return "Expected time less" if estimate.expected else "Bound less"


def fusing(headroom: Headroom) -> view.Section:
    """Savings, most time first: of the groups, then beyond them; empty where there are none."""
    before, after, beyond = headroom.before, headroom.after, headroom.beyond
    parts: list[view.Part] = []
    if headroom.fused:
        size, seconds = before.bytes_hbm - after.bytes_hbm, before.times.t_serial
        parts += [
            view.Note(
                f"Every op a kernel of its own would move {format_traffic(size)} more and keep the "
                f"device busy {format_time(seconds - after.times.t_serial)} longer ("
                f"{words.time_word([after])} {format_time(seconds)} instead of "
                f"{format_time(after.times.t_serial)}). "
                "By group:"
            ),
            _table(headroom.fused, FUSED_SHOWN, before),
        ]
    if headroom.left:
        size = after.bytes_hbm - beyond.bytes_hbm
        seconds = after.times.t_serial - beyond.times.t_serial
        parts += [
            view.Note(
                f"Left: at most {format_traffic(size)} and {format_time(seconds)} of the device, "
                "with larger kernels than the groups found (epilogues of matrix products, "
                "attention written by hand, groups that only one other reads):"
            ),
            _table(headroom.left, LEFT_SHOWN, after),
        ]
    return view.Section(title=f"What fusing saves, {after.execution.name}", parts=parts)


def _table(savings: Sequence[Saving], shown: int, estimate: Estimate) -> view.Table:
    t_est = estimate.t_est
    rows: list[dict[str, Any]] = [
        {
            "name": saving.name,
            "ops": _ops(saving.ops),
            "module": saving.module,
            "share": ratio(saving.seconds, t_est),
            **{key: getattr(saving, key) for key in SUMMED},
        }
        for saving in savings[:shown]
    ]
    rest = savings[shown:]
    if rest:
        sums: dict[str, Any] = {key: sum(getattr(s, key) for s in rest) for key in SUMMED}
        name = view.Cell(f"{len(rest):,} more", "plain")
        rows.append({"name": name, "share": ratio(sums["seconds"], t_est), **sums})
    return view.Table(columns=_columns(estimate), rows=rows)


def _ops(ops: Sequence[str]) -> str:
    """Names of ops in order of appearance, how often, the first few."""
    counts = Counter(words.kernel_name(name) for name in ops)
    names = [f"{name} x{count}" if count > 1 else name for name, count in counts.items()]
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f", {more} more" if more > 0 else "")
