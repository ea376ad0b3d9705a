"""The first lines: fit, each phase, what executions change, how far to trust it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rooftrace.hardware.units import (
    format_count,
    format_flops,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.sections.tallies import tally
from rooftrace.reporting.text import words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.reporting.pages import Report


def summary(report: Report) -> list[str]:
    """Fit, each phase, what executions change, and how far to trust it; one line each."""
    lines = []
    if report.memory:
        fits, sentence = words.fit_words(report.memory, report.chips[0])
        lines.append(sentence if fits else f"**{sentence}**")
    for phase in report.phases:
        lines.append(_phase_sentence(report.estimate(phase)))
    if len(report.executions) > 1:
        lines.append(_speed_sentence(report))
    main = [report.estimate(phase).coverage for phase in report.phases]
    assumed = words.assumption_words(assumption for _, assumption in report.assumptions)
    gaps = [item for graph in report.graphs.values() for item in graph.unrecorded]
    coverage = words.coverage_words(main, gaps)[1]
    lines.append(
        f"Coverage: {f'**{coverage}**' if gaps else coverage}. Assumptions: {assumed}. "
        f"Chip facts that are guesses: {words.guess_words(report.chips[0])}."
    )
    below = [
        f"{phase}, {execution}"
        for phase, execution, one in report.of_first_chip()
        if one.below_floor
    ]
    if below:
        lines.append(
            f"**Below the compulsory floor: {words.listed(below)}**: the knobs promise "
            "fewer bytes than the step has to move at least."
        )
    return [f"- {line}" for line in lines]


def _phase_sentence(one: Estimate) -> str:
    rate = f", {format_count(one.items_per_s)} {one.item}s/s" if one.items_per_s else ""
    top = tally(one.rows, lambda row: row.family)[:1]
    most = (
        f" Most time goes to {top[0].key}, {format_share(top[0].seconds / one.t_est)}."
        if (top and one.t_est)
        else ""
    )
    roles = Counter(one.bytes.to_dict()).most_common(1)
    largest = ""
    if one.bytes_hbm:
        role, size = roles[0]
        largest = f", {format_share(size / one.bytes_hbm)} of it {role}"
    return (
        f"**{one.phase.capitalize()}** ({one.execution.name}): {format_time(one.t_est)} on one "
        f"{one.chip.title}{rate}; limited by {words.regime_words(one.times)}; "
        f"{format_flops(one.flops)} and {format_traffic(one.bytes_hbm)} of HBM traffic"
        f"{largest}.{most}"
    )


def _speed_sentence(report: Report) -> str:
    other = next(name for name in report.executions if name != report.main)
    ratios = []
    for phase in report.phases:
        slow, fast = report.estimate(phase, other).t_est, report.estimate(phase).t_est
        if fast:
            ratios.append(f"{phase} {slow / fast:.2f}x")
    return f"Time of {other} over {report.main}: {', '.join(ratios)}."
