"""What fusing saves in a phase, group by group, and what could be saved beyond the groups found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.hardware.units import format_time, format_traffic
from rooftrace.reporting.sections.pipes import share, table
from rooftrace.reporting.text import words

if TYPE_CHECKING:
    from rooftrace.costmodels.findings import Headroom, Saving

FUSED_SHOWN, LEFT_SHOWN, NAMES_SHOWN = 10, 5, 6


def fusion_lines(found: Headroom) -> list[str]:
    """Savings, most time first: of groups that were found, then beyond them; none of no groups."""
    lines: list[str] = []
    if found.fused:
        times = found.before.times, found.after.times
        size = found.before.bytes_hbm - found.after.bytes_hbm
        seconds = times[0].t_serial - times[1].t_serial
        lines += [
            f"Every op a kernel of its own would move {format_traffic(size)} more and keep the "
            f"device busy {format_time(seconds)} longer (t_serial "
            f"{format_time(times[0].t_serial)} instead of {format_time(times[1].t_serial)}). "
            "By group:",
            "",
            *_table(found.fused, FUSED_SHOWN, found.before.t_est),
        ]
    if found.left:
        size = found.after.bytes_hbm - found.beyond.bytes_hbm
        seconds = found.after.times.t_serial - found.beyond.times.t_serial
        lines += [
            "",
            f"Left: at most {format_traffic(size)} and {format_time(seconds)} of the device, with "
            "larger kernels than the groups found (epilogues of matrix products, attention written "
            "by hand, groups that only one other reads):",
            "",
            *_table(found.left, LEFT_SHOWN, found.after.t_est),
        ]
    return lines[1:] if lines and not lines[0] else lines


def _table(savings: Sequence[Saving], shown: int, t_est: float) -> list[str]:
    rows = [
        [
            f"`{words.kernel_name(saving.name)}`",
            _ops(saving.ops),
            f"`{saving.module or '(root)'}`",
            f"{saving.count:,}",
            f"{saving.launches:,}",
            format_traffic(saving.bytes),
            format_time(saving.seconds),
            share(saving.seconds, t_est),
        ]
        for saving in savings[:shown]
    ]
    rest = savings[shown:]
    if rest:
        seconds = sum(saving.seconds for saving in rest)
        rows.append(
            [
                f"{len(rest):,} more",
                "",
                "",
                f"{sum(saving.count for saving in rest):,}",
                f"{sum(saving.launches for saving in rest):,}",
                format_traffic(sum(saving.bytes for saving in rest)),
                format_time(seconds),
                share(seconds, t_est),
            ]
        )
    head = ["Kernel", "Ops", "Module", "Kernels", "Launches less", "HBM less", "Time less"]
    return table([*head, "Share of t_est"], rows, left=3)


def _ops(ops: Sequence[str]) -> str:
    """Names of ops in order of appearance, how often, the first few."""
    counts = Counter(words.kernel_name(name) for name in ops)
    names = [f"{name} x{count}" if count > 1 else name for name, count in counts.items()]
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f", {more} more" if more > 0 else "")
