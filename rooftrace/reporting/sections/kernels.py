"""The kernels that take the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.reporting.sections.tallies import ratio, tally
from rooftrace.reporting.view import model as view, units, words
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.reporting.sections.results import Results

ON_A_PAGE = 15  # kernels of each phase
ON_A_SCREEN = 9  # over all phases: what keeps a report of three phases on one screen
LEAST_WAITING = 0.005  # of t_est: less time in which the device waits has no row

NAME = view.Column("kernel", units.KERNEL, "Kernel")
LIMIT = view.Column("limit", units.TEXT, "Limited by", short="limit")
MODULE = view.Column("module", units.MODULE, "Module", short="module", flexible=True)
WORK = (
    view.Column("calls", units.COUNT, "Calls", short="calls", drop=1),
    view.Column("flops", units.FLOP, "FLOP", drop=2),
    view.Column("bytes", units.BYTE, "HBM"),
    view.Column("intensity", units.INTENSITY, "FLOP/byte", short="FLOP/B", drop=3),
)


def _time(estimates: Sequence[Estimate]) -> tuple[view.Column, ...]:
    head = words.time_word(estimates)
    return (
        view.Column("seconds", units.SECOND, head.capitalize(), short=head),
        view.Column("share", units.SHARE, "Share of step", short="share"),
    )


def kernels_on_screen(results: Results) -> view.Section:
    """The few kernels of each phase that take most time, and waiting for the host."""
    lines = max(3, ON_A_SCREEN // len(results.phases))
    rows: list[dict[str, Any]] = []
    for estimate in results.broken_down():
        mine, rest = _rows(estimate, lines, spare=1)
        if rest:
            mine.append({key: rest[key] for key in ("kernel", "calls", "seconds", "share")})
        waiting = estimate.times.t_launch
        if waiting > LEAST_WAITING * estimate.t_est:
            mine.append(
                {
                    "kernel": view.Cell("waiting for the host", "plain"),
                    "limit": view.Cell(words.LIMITS["launch"], "launch"),
                    "seconds": waiting,
                    "share": ratio(waiting, estimate.t_est),
                }
            )
        rows += [{"phase": estimate.step, **row} for row in mine]
    name = replace(NAME, short=f"kernels, {results.main}")
    table = view.Table(
        columns=(name, LIMIT, *_time(results.broken_down()), *WORK, MODULE),
        rows=rows,
        group=lambda row: row["phase"],
        on="screen",
    )
    return view.Section(place=5, parts=[table])


def kernels_of(estimate: Estimate) -> view.Section:
    """The kernels of one phase, most time first; the others are summed up in the last row."""
    rows, rest = _rows(estimate, ON_A_PAGE)
    table = view.Table(
        columns=(NAME, LIMIT, MODULE, *WORK, *_time([estimate])),
        rows=[*rows, rest] if rest else rows,
    )
    return view.Section(title=f"Kernels, {estimate.execution.name}", parts=[table])


def _rows(
    estimate: Estimate, most: int, spare: int = 0
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Kernels by name, module pattern and regime, so that one operator that is compute-bound here
    and memory-bound there has two rows; and the sums of those beyond `most`.

    spare: how many more may be shown instead of a row that sums them up.
    """
    keys = tally(estimate.rows, lambda row: (row.name, row.timing.regime, pattern_of(row.module)))
    shown = keys[:most] if len(keys) > most + spare else keys
    rows = [
        {
            "kernel": entry.key[0],
            "limit": view.Cell(words.LIMITS[entry.key[1]], entry.key[1]),
            "module": entry.key[2],
            "calls": entry.calls,
            "flops": entry.flops,
            "bytes": entry.bytes,
            "intensity": entry.intensity,
            "seconds": entry.seconds,
            "share": ratio(entry.seconds, estimate.t_est),
        }
        for entry in shown
    ]
    rest = keys[len(shown) :]
    if not rest:
        return rows, None
    seconds = sum(entry.seconds for entry in rest)
    return rows, {
        "kernel": view.Cell(f"{len(rest):,} more", "plain"),
        "calls": sum(entry.calls for entry in rest),
        "flops": sum(entry.flops for entry in rest),
        "bytes": sum(entry.bytes for entry in rest),
        "seconds": seconds,
        "share": ratio(seconds, estimate.t_est),
    }
