"""What-ifs of many processes: uneven experts, and chips that are slower than others."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.timing.steps import StepAmounts
from rooftrace.costmodels.timing.streams import Walk

if TYPE_CHECKING:
    from rooftrace._amounts import Array


def expert_factors(step: StepAmounts) -> Array | None:
    """How much longer each entry takes on the busiest process, whose experts have more tokens.

    None where that makes no difference.
    """
    factor = step.execution.disturbances.expert_imbalance
    if factor == 1 or all(part.exchange is None for part in step.parts):
        return None
    factors = np.ones(len(step.row))
    for part in step.parts:
        if part.of_experts and part.exchange is None:
            factors[part.where] = factor
    return factors


def wait_for_stragglers(walked: Walk, step: StepAmounts) -> None:
    """Add what all processes wait for the slowest of them, evenly over the exchanges.

    The slowest of n is expected as many standard deviations above the mean as the largest of n
    normal numbers (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    spread = step.execution.disturbances.stragglers
    members = {n: part.exchange.members for n, part in enumerate(step.parts) if part.exchange}
    together = [number for number, group in members.items() if group.size > 1]
    if not spread or not together or step.structure is None:
        return
    groups = step.structure().graph.groups
    processes = 1 + max(rank for group in groups.values() for rank in group.ranks)
    more = walked.busy * spread * slowest_of(processes)
    walked.end = walked.end + more
    if step.points > 1:
        walked.exposed.append(more)
        return
    calls = sum(step.times[number] for number in together)
    for number in together:
        walked.exposed[number] += float(more * step.times[number] / calls)


def slowest_of(processes: int) -> float:
    """How many standard deviations the largest of so many normal numbers lies above the mean."""
    if processes < 2:
        return 0.0
    return NormalDist().inv_cdf((processes - 0.375) / (processes + 0.25))
