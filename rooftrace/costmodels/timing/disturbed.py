"""What-ifs of many processes: uneven experts, and chips that are slower than others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.exchanges import Communication
from rooftrace.costmodels.timing.streams import Walk
from rooftrace.costmodels.timing.timings import Timing

_OF_EXPERTS = ("all_to_all", "dispatch", "combine")


def unevenly(network: Mapping[int, Communication], factor: float) -> dict[int, Communication]:
    """Exchanges with experts as the busiest process sees them: all others wait for it.

    factor: its tokens over the mean of all.
    """
    return {
        number: replace(exchange, seconds=factor * exchange.seconds)
        if factor != 1 and any(word in exchange.kind for word in _OF_EXPERTS)
        else exchange
        for number, exchange in network.items()
    }


def with_busiest_experts(
    planned: Plan, timings: Sequence[Timing], network: Mapping[int, Communication]
) -> list[Timing]:
    """Kernels of experts take as much longer as the busiest process has more tokens."""
    factor = planned.execution.disturbances.expert_imbalance
    if factor == 1 or not network:
        return list(timings)
    ops = planned.graph.ops
    return [
        timing.slowed(factor)
        if number not in network and any(ops[op].family == "moe" for op in group.ops)
        else timing
        for number, (group, timing) in enumerate(zip(planned.groups, timings, strict=True))
    ]


def wait_for_stragglers(walked: Walk, planned: Plan, network: Mapping[int, Communication]) -> None:
    """Add what all processes wait for the slowest of them, evenly over the exchanges.

    The slowest of n is expected as many standard deviations above the mean as the largest of n
    normal numbers (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    spread = planned.execution.disturbances.stragglers
    groups = planned.graph.groups
    together = [n for n, exchange in network.items() if exchange.ranks > 1]
    if not spread or not together:
        return
    processes = 1 + max(rank for group in groups.values() for rank in group.ranks)
    more = walked.busy * spread * slowest_of(processes)
    walked.end += more
    calls = sum(network[n].calls for n in together)
    for number in together:
        walked.exposed[number] += more * network[number].calls / calls


def slowest_of(processes: int) -> float:
    """How many standard deviations the largest of so many normal numbers lies above the mean."""
    if processes < 2:
        return 0.0
    return NormalDist().inv_cdf((processes - 0.375) / (processes + 0.25))
