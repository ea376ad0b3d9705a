"""Times at many sizes at once beside a loop of `time_plan` over plans: ratios of one run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import rooftrace as rt
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import evaluated

SIZES = [(256, 1000), (256, 3000), (512, 1000), (512, 3000)]
CHIPS = ("h200-sxm", "h100-sxm", "a100-sxm-80", "l4")
BATCHES, LENGTHS = np.arange(1, 501), np.linspace(1000, 131_072, 500).astype(int)


@cache
def form(target: str) -> rt.types.Form:
    return rt.tools.form(target, phase="decode", over={"batch": BATCHES, "kv": LENGTHS})


@cache
def plans(target: str, execution: str) -> list[Plan]:
    return [rt.plan(form(target).graph(batch=b, kv=kv), execution) for b, kv in SIZES]


@pytest.mark.benchmark(group="batch")
@pytest.mark.parametrize("execution", ["eager", "efficient", "serving"])
@pytest.mark.parametrize("target", ["llama-3.1-8b", "deepseek-v3"])
@pytest.mark.parametrize("how", ["loop over 4 plans", "250,000 points"])
def test_batch(benchmark: Any, how: str, target: str, execution: str) -> None:
    """A decode step on four chips."""
    chips = [rt.load_chip(name) for name in CHIPS]
    if how.startswith("loop"):
        benchmark(lambda: [time_plan(plan, c) for plan in plans(target, execution) for c in chips])
        return
    batch, kv = (grid.ravel() for grid in np.meshgrid(BATCHES, LENGTHS, indexing="ij"))
    points, conditions = Points({"batch": batch, "kv": kv}), Conditions.of(execution)
    some = points.where(np.arange(1))
    evaluated(form(target), some, chips, conditions)  # plans are fitted once
    benchmark.pedantic(lambda: evaluated(form(target), points, chips, conditions), rounds=1)
