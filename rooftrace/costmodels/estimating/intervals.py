"""The interval in which a measured step should lie, by the errors that knobs come with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rooftrace.costmodels.estimating.rows import Row
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing import StepTimes, timings


def interval_of(
    planned: Plan, rows: Sequence[Row], times: StepTimes, knobs: Knobs | None
) -> tuple[float, float] | None:
    """Seconds between which 90 % of such steps are; None without knobs, or if they have no spread.

    Relative errors of kernels of a class go together, so that a step has the mean of their
    variances, each with its share of the time.  No step is faster than the bound.
    """
    if knobs is None or not times.t_serial:
        return None
    variance = 0.0
    for row in rows:
        kind = group_class(planned.graph, row.ops, costs=planned.op_costs)
        spread = knobs.share(kind).spread or knobs.spread
        variance += row.timing.t_device / times.t_serial * spread**2
    if not variance:
        return None
    factor = math.exp(timings.NINETY_PERCENT * math.sqrt(variance))
    return max(times.t_bound, times.t_est / factor), times.t_est * factor
