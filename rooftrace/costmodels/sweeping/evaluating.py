"""A form at many points on many chips: a table of totals and times, a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rooftrace.costmodels.costs import MATRIX
from rooftrace.costmodels.planforms import Conditions, PlanForm, Points
from rooftrace.costmodels.sweeping.stepforms import Form
from rooftrace.costmodels.timing.steps import StepAmounts, time_step
from rooftrace.costmodels.timing.timings import REGIMES, TimesOverPoints
from rooftrace.hardware import Chip

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]

TOTALS = ("flops", "flops_causal", "flops_matrix", "bytes_hbm", "bytes_net", "peak_memory",
          "weights_memory", "kv_memory", "items")  # fmt: skip
"""Whole numbers that no chip changes: FLOP, byte, tokens or samples."""
SECONDS = ("t_est", "t_low", "t_high", "t_bound", "t_serial", "t_comp", "t_hbm", "t_net")
"""Seconds on a chip; t_low and t_high: between which 90 % of such steps are, nan without knobs."""
_AT_ONCE = 1 << 18
_BESIDE = 1 << 12
"""Points that are timed at once where a cache holds bytes: then no two kernels are equal."""


def evaluated(form: Form, points: Points, chips: Sequence[Chip], conditions: Conditions) -> Columns:
    """The table: sizes, chip (place among `chips`), TOTALS, SECONDS, regime (place in REGIMES).

    One line for each point on each chip; all points on the first chip stand first.  t_exposed:
    seconds that wait for other chips.  regime_share: of t_est, of the largest regime.  peak:
    FLOP/s of the engine with most matrix FLOPs.  Raises what `Form.plans` and `time_step` raise.
    """
    count, lines = len(points), len(chips)
    totals: Columns = {name: np.zeros(count, dtype=np.int64) for name in TOTALS}
    names = (*SECONDS, "t_exposed", "regime_share", "peak") if chips else ()
    whole: Columns = {name: np.full((lines, count), np.nan) for name in names}
    whole |= {"regime": np.zeros((lines, count), dtype=np.int8)} if chips else {}
    times = [{name: column[line] for name, column in whole.items()} for line in range(lines)]
    for plan, places in form.plans(points, conditions):
        for start in range(0, len(places), _AT_ONCE):
            part = places[start : start + _AT_ONCE]
            _fill(plan, points.where(part), part, chips, totals, times)
    table: Columns = {
        name: np.tile(column, lines)
        for name, column in zip(points.names, points.columns, strict=True)
    }
    table["chip"] = np.repeat(np.arange(lines, dtype=np.int16), count)
    table |= {name: np.tile(totals.pop(name), lines) for name in TOTALS}
    return table | {name: column.ravel() for name, column in whole.items()}


def _fill(
    plan: PlanForm,
    points: Points,
    places: Array,
    chips: Sequence[Chip],
    totals: Columns,
    times: Sequence[Columns],
) -> None:
    for name, column in _totals(plan, points).items():
        totals[name] = _wide(totals[name], column)
        totals[name][places] = column
    step: StepAmounts | None = None
    for chip, filled in zip(chips, times, strict=True):
        cache = plan.cache_of(chip)
        if cache is not None:
            for start in range(0, len(places), _BESIDE):
                here = slice(start, start + _BESIDE)
                some = points.where(np.arange(len(places))[here])
                timed = time_step(plan.step(some, cache), chip)
                _fill_times(timed, places[here], filled)
            continue
        step = step or plan.step(points)
        _fill_times(time_step(step, chip), places, filled)


def _fill_times(timed: TimesOverPoints, places: Array, filled: Columns) -> None:
    for name in (*SECONDS, "t_exposed"):
        if not name.endswith(("low", "high")):
            filled[name][places] = getattr(timed, name)
    interval = timed.interval
    if interval is not None:
        filled["t_low"][places], filled["t_high"][places] = interval
    shares = np.stack([timed.regime_seconds[name] for name in REGIMES])
    regime = shares.argmax(axis=0)
    filled["regime"][places] = regime
    with np.errstate(invalid="ignore"):
        filled["regime_share"][places] = shares.max(axis=0) / timed.t_est
    filled["peak"][places] = timed.heads.peak


def _wide(column: Array, numbers: Array) -> Array:
    """The column, with room for numbers beyond 64 bits where there are any."""
    return column.astype(object) if numbers.dtype == object != column.dtype else column


def _totals(plan: PlanForm, points: Points) -> Mapping[str, Array]:
    return {
        "flops": plan.flops(points),
        "flops_causal": plan.flops(points, lambda _, work: work.count == "useful"),
        "flops_matrix": plan.flops(
            points,
            lambda _, work: work.operation in MATRIX and work.count in ("useful",),
        ),
        "bytes_hbm": plan.bytes(points),
        "bytes_net": plan.bytes(points, lambda _, access: access.wire == "link"),
        "peak_memory": plan.peak(points),
        "weights_memory": plan.number("weights", points),
        "kv_memory": plan.number("kv", points),
        "items": plan.number("items", points),
    }
