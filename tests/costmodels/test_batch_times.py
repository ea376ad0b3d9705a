"""Times at many points at once: at each of them those of `time_plan`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import PRESETS, execution_model
from rooftrace.costmodels.fusion.plans import Launch, Plan
from rooftrace.costmodels.kernels.engines import group_class
from rooftrace.costmodels.kernels.intervals import Behind, IntervalTable
from rooftrace.costmodels.kernels.knobs import Knobs, Share, Tiling
from rooftrace.costmodels.kernels.works import Works
from rooftrace.costmodels.ops.cost import Work
from rooftrace.costmodels.timing.steps import PlanTimes, time_plan, time_step
from rooftrace.costmodels.timing.timings import REGIMES, TimesOverPoints
from rooftrace.graph.graph import OpGraph
from rooftrace.hardware.chip import Chip, MissingPeakError
from tests.conftest import in_turn, mostly_heavy
from tests.costmodels.batch_support import bare_step, decode, images, planned, stack

CHIPS = ("h200-sxm", "h100-sxm", "a100-sxm-80", "l4", "rtx-4090", "mi300x")
SIZES = [(1, 8), (3, 500), (3, 8), (16, 4096), (17, 130), (64, 1000), (200, 8), (200, 20_000)]


@cache
def steps(waits: bool = False, dtype: torch.dtype = torch.bfloat16) -> list[OpGraph]:
    return [decode(batch, kv, waits=waits, dtype=dtype) for batch, kv in SIZES]


def interval_by_hand(plan: Plan, alone: PlanTimes) -> tuple[float, float] | None:
    """The mean of the variances of kernels, each with its share of the time; or by the table."""
    knobs, step = alone.knobs, alone.step
    if knobs is None:
        return None
    if knobs.residuals == "usual":
        counts = [group.times for group in plan.groups]
        squares = sum(
            timing.t_device**2 / n for timing, n in zip(alone.groups, counts, strict=True)
        )
        behind = Behind((step.t_host - step.t_serial) / step.t_est, 0.5)  # of the typical host
        errors = IntervalTable.shipped().errors(step.cell, math.sqrt(squares) / step.t_est, behind)
        low, high = (step.t_est * math.exp(end) for end in errors.within())
        return max(step.t_bound, low), high
    variance = 0.0
    for group, timing in zip(plan.groups, alone.groups, strict=True):
        spread = knobs.share(group_class(plan.graph, group.ops, costs=plan.op_costs)).spread
        variance += timing.t_device / step.t_serial * (spread or knobs.spread) ** 2
    low, high = (step.t_est * math.exp(end * math.sqrt(variance)) for end in knobs.ends())
    return (max(step.t_bound, low), high) if variance else None


def assert_equal(times: TimesOverPoints, plans: list[Plan], chip: Chip) -> None:
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
        assert times.heads.peak[point] == alone.peak
        assert times.at(point).cell == step.cell
        assert times.heads.precisions[times.heads.place[point]] == alone.peak_precision
        interval = interval_by_hand(plan, alone)
        if interval is None:
            assert times.interval is None or np.isnan(times.interval[0][point])
        else:
            assert times.interval is not None
            told = [bound[point] for bound in times.interval]
            assert told == pytest.approx(interval, rel=1e-12)


@pytest.mark.parametrize(("execution", "chip"), in_turn(PRESETS, CHIPS))
def test_a_decode_step_at_many_sizes(execution: str, chip: str) -> None:
    plans = planned(steps(), execution)
    on = rt.load_chip(chip)
    step = stack(plans, on)
    assert len(step.kernels) < len(step.row) and step.counts  # equal ones stand once
    assert_equal(time_step(step, on), plans, on)


OWN = Knobs(
    "own", compute=0.8, memory=0.9, cache=4, overlap=2.5, launch=1e-6, spread=0.1, dispatch=5e-6,
    view=1e-6, call=2e-6, attention="usual", tiling=Tiling(2.0, 1e-6, 0.9, 0.6),
    shares={"mm": Share(0.7, 0.8, spread=0.3), "attention": Share(spread=0.05)},
)  # fmt: skip
"""Knobs with all that those which come with rooftrace leave out: a cache, tiles, own spreads."""


@pytest.mark.parametrize(
    ("execution", "knobs", "chip"),
    in_turn(
        ["naive", "eager", "compiled", "efficient"],
        [None, OWN, Knobs("no spread", overlap=2)],
        ["h100-sxm", "l4"],
        keep=[("efficient", OWN, "h100-sxm")],
    ),
)
def test_without_knobs_and_with_all_of_them(knobs: Any, execution: str, chip: str) -> None:
    on = rt.load_chip(chip)
    plans = planned(steps(), execution_model(execution, knobs=knobs))
    step = stack(plans, on)
    assert (step.kernels.warm > 0).any()
    times = time_step(step, on)
    assert (times.interval is None) == (knobs is None)
    assert_equal(times, plans, on)


@pytest.mark.parametrize("execution", mostly_heavy(PRESETS, ["eager", "compiled", "efficient"]))
def test_a_host_that_waits_in_every_layer(execution: str) -> None:
    on = rt.load_chip("h200-sxm")
    plans = planned(steps(waits=True), execution)
    assert any(launch.sync and launch.repeats for launch in plans[0].launches)
    assert_equal(time_step(stack(plans), on), plans, on)


CPU = replace(rt.load_chip("l4"), name="cpu", kind="cpu", sm_count=None, l2_capacity=None)
"""A chip that computes in the thread that calls: the host waits after every launch."""


@pytest.mark.parametrize(
    ("dtype", "execution"),
    in_turn([torch.float32, torch.bfloat16], ["eager", "compiled", "seed-efficient"]),
)
def test_on_a_cpu_and_in_single_precision(dtype: torch.dtype, execution: str) -> None:
    plans = planned(steps(dtype=dtype), execution)
    for chip in (CPU, rt.load_chip("rtx-4090")):
        assert_equal(time_step(stack(plans, chip), chip), plans, chip)


@pytest.mark.parametrize(
    ("execution", "chip"),
    in_turn(["eager", "compiled", "seed-naive", "seed-efficient"], ["h200-sxm", "rtx-4090"]),
)
def test_images_whose_most_work_is_in_convolutions_or_not(execution: str, chip: str) -> None:
    on = rt.load_chip(chip)
    sizes = [(1, 16), (4, 33), (32, 64), (100, 16)]
    plans = planned([images(batch, size) for batch, size in sizes], execution)
    assert_equal(time_step(stack(plans, on), on), plans, on)


@pytest.mark.parametrize(
    ("execution", "waits"), in_turn(["eager", "compiled", "efficient"], [True, False])
)
def test_stacks_of_different_depth(waits: bool, execution: str) -> None:
    on = rt.load_chip("a100-sxm-80")
    sizes = [(2, 30, 9), (2, 30, 40), (64, 900, 6), (2, 900, 17), (64, 900, 32)]
    plans = planned([decode(*size, waits=waits) for size in sizes], execution)
    step = stack(plans)
    assert [list(count) for count in step.counts] == [[6, 37, 3, 14, 29]]
    assert_equal(time_step(step, on), plans, on)


@pytest.mark.parametrize("execution", ["seed-efficient", "efficient"])
def test_the_engine_of_the_headline_may_follow_the_point(execution: str) -> None:
    """A product in bf16 and one in fp32, of which now one and now the other is larger."""
    on = rt.load_chip("h100-sxm")

    class Both(nn.Module):
        def forward(self, x: Any, y: Any, u: Any, v: Any) -> Any:
            return (x @ y).relu(), (u @ v).relu()

    def graph(rows: int, others: int) -> OpGraph:
        with torch.device("meta"):
            narrow = [torch.empty(n, 64, dtype=torch.bfloat16) for n in (rows, 64)]
            return rt.trace(Both(), *narrow, torch.empty(others, 64), torch.empty(64, 64))

    plans = planned([graph(8, 100), graph(100, 8), graph(300, 200), graph(8, 200)], execution)
    times = time_step(stack(plans), on)
    assert set(times.heads.precisions) == {"bf16", "fp32"}
    assert_equal(times, plans, on)


# -- what is refused -------------------------------------------------------------------------------


def test_steps_that_contradict_themselves_are_refused() -> None:
    step = bare_step(1, [Launch(1, True)], points=3)
    with pytest.raises(ValueError, match=r"kernel 0 has 3 sizes for 4 points"):
        replace(step, points=4)
    with pytest.raises(ValueError, match="order has 2 kernels, launches have 1"):
        replace(step, order=(0, 0))
    with pytest.raises(ValueError, match=r"at has shape \(4,\)"):
        replace(step, parts=[replace(step.parts[0], at=np.zeros(4, dtype=int))])


def test_a_chip_without_the_rate_or_the_link_says_so() -> None:
    work = Works(key=Work("matmul", "fp8"), row=slice(0, 1), flop=np.array([1e9]))
    step = bare_step(1, [Launch(1, True)])
    step = replace(step, kernels=replace(step.kernels, works=(work,), link=np.array([5.0])))
    with pytest.raises(MissingPeakError, match=r"no \(matrix, fp8\)"):
        time_step(step, rt.load_chip("a100-sxm-80"))
    without = replace(rt.load_chip("h100-sxm"), links=())
    with pytest.raises(MissingPeakError, match="has no link"):
        time_step(step, without)
