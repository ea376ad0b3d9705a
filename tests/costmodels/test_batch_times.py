"""Times at many points at once: at each of them those of `time_plan`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import rooftrace as rt
from rooftrace.costmodels.batchtiming import BatchTimes, stack, time_columns
from rooftrace.costmodels.estimating.intervals import interval_of
from rooftrace.costmodels.estimating.rows import row_of
from rooftrace.costmodels.execution.executions import PRESETS
from rooftrace.costmodels.planning.plans import Plan
from rooftrace.costmodels.timing.plan_times import time_plan
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.hardware.chip import Chip
from rooftrace.tracer.graph.graph import OpGraph
from tests.costmodels.batch_support import decode, planned

CHIPS = ("h200-sxm", "h100-sxm", "a100-sxm-80", "l4", "rtx-4090", "mi300x")
SIZES = [(1, 8), (3, 500), (3, 8), (16, 4096), (17, 130), (64, 1000), (200, 8), (200, 20_000)]


@cache
def steps(waits: bool = False) -> list[OpGraph]:
    return [decode(batch, kv, waits=waits) for batch, kv in SIZES]


def assert_equal(times: BatchTimes, plans: list[Plan], chip: Chip) -> None:
    """Every number of every point is that of the plan alone."""
    for point, plan in enumerate(plans):
        alone = time_plan(plan, chip)
        step = alone.step
        for name in ("t_comp", "t_hbm", "t_net", "t_bound", "t_serial", "t_est"):
            expected = pytest.approx(getattr(step, name), rel=1e-12, abs=0)
            assert getattr(times, name)[point] == expected, (name, point)
        for name in REGIMES:
            expected = pytest.approx(step.regime_seconds[name], rel=1e-11, abs=1e-12 * step.t_est)
            assert times.regime_seconds[name][point] == expected, (name, point)
        assert times.peak[point] == alone.peak
        assert times.peak_precisions[times.peak_place[point]] == alone.peak_precision
        rows = [row_of(plan, i, timing) for i, timing in enumerate(alone.groups)]
        interval = interval_of(plan, rows, step, alone.knobs)
        if interval is None:
            assert times.interval is None or np.isnan(times.interval[0][point])
        else:
            assert times.interval is not None
            told = [bound[point] for bound in times.interval]
            assert told == pytest.approx(interval, rel=1e-12)
        assert_kernels(times, alone.groups, point)


def assert_kernels(times: BatchTimes, groups: Any, point: int) -> None:
    """The kernels of each entry of the columns together take what its groups take."""
    for place in range(len(times.columns.kernels)):
        ours = [t for t, k in zip(groups, times.columns.order, strict=True) if k == place]
        device = sum(t.t_device for t in ours)
        assert times.device(place)[point] == pytest.approx(device, rel=1e-12)
        for name, seconds in times.terms(place).items():
            assert seconds[point] == pytest.approx(sum(t.terms[name] for t in ours), rel=1e-12)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("execution", PRESETS)
def test_a_decode_step_at_many_sizes(execution: str, chip: str) -> None:
    plans = planned(steps(), execution)
    on = rt.load_chip(chip)
    columns = stack(plans, on)
    assert len(columns.kernels) < len(plans[0].groups) and columns.counts  # equal ones stand once
    assert_equal(time_columns(columns, on), plans, on)
