"""The interval in which a measured step should lie, by the errors that knobs come with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rooftrace.costmodels.estimating.rows import Row
from rooftrace.costmodels.intervals.residuals import LEVEL
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.timings import StepTimes


def interval_of(
    planned: Plan,
    rows: Sequence[Row],
    times: StepTimes,
    knobs: Knobs | None,
    level: float = LEVEL,
) -> tuple[float, float] | None:
    """Seconds between which this share of such steps are; None without knobs, or any spread.

    Its ends are those of `Knobs.ends` times the standard deviation of the step's logarithm, and the
    estimate is inside.  No step is faster than the bound.  Raises ResidualsError for a share that
    the knobs have no ends for.
    """
    if knobs is None or not times.t_serial:
        return None
    low, high = knobs.ends(level)
    deviation = deviation_of(planned, rows, times, knobs)
    if not deviation:
        return None
    ends = times.t_est * math.exp(low * deviation), times.t_est * math.exp(high * deviation)
    return max(times.t_bound, ends[0]), ends[1]


def deviation_of(planned: Plan, rows: Sequence[Row], times: StepTimes, knobs: Knobs) -> float:
    """The standard deviation of log(measured / predicted) of such a step.

    Relative errors of kernels of a class go together, so that a step has the mean of their
    variances, each with its share of the time.
    """
    variance = 0.0
    for row in rows:
        kind = group_class(planned.graph, row.ops, costs=planned.op_costs)
        spread = knobs.share(kind).spread or knobs.spread
        variance += row.timing.t_device / times.t_serial * spread**2
    return math.sqrt(variance)
