"""Times at many sizes at once beside a loop of `time_plan` over plans: ratios of one run.

A step of decode at four sizes tells the amounts of every kernel at all others, because they are
bilinear in the batch and in the length of the cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from rooftrace.costmodels.kernels.columns import Amount, KernelColumns, WorkColumns

import rooftrace as rt
from rooftrace.costmodels.batchtiming import PlanColumns, stack, time_columns
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing import time_plan

CORNERS = [(256, 1000), (256, 3000), (512, 1000), (512, 3000)]
CHIPS = ("h200-sxm", "h100-sxm", "a100-sxm-80", "l4")


@cache
def plans(target: str, execution: str) -> list[Plan]:
    graphs = [
        rt.trace_target(target, ["decode"], batch=batch, kv=kv)["decode"] for batch, kv in CORNERS
    ]
    return [rt.plan(graph, execution) for graph in graphs]


def at_sizes(corners: PlanColumns, batch: np.ndarray, kv: np.ndarray) -> PlanColumns:
    """The columns at every pair of a batch and a length of the cache."""
    places = np.arange(len(batch) * len(kv)) // len(kv)

    def terms(amount: Amount) -> np.ndarray:
        """The four terms of 1, batch, kv and batch x kv, by the four corners."""
        known = np.broadcast_to(np.asarray(amount, dtype=float), (4,))
        matrix = np.array([[1, b, k, b * k] for b, k in CORNERS], dtype=float)
        solved: np.ndarray = np.linalg.solve(matrix, known)
        least = 1e-9 * np.abs(solved * matrix[-1]).max()
        return np.where(np.abs(solved * matrix[-1]) > least, solved, 0.0)

    def kernel(known: KernelColumns) -> KernelColumns:
        known = known.written_out()
        amounts = [known.bytes, known.moved, known.link, known.warm, known.times]
        amounts += [amount for work in known.works for amount in work.amounts()]
        wide = any(terms(amount)[2:].any() for amount in amounts)

        def change(amount: Amount) -> Amount:
            one, by_batch, by_kv, both = terms(amount)
            if not (by_batch or by_kv or both):
                return float(one)
            if not wide:
                return np.asarray(one + by_batch * batch)
            grid = one + by_batch * batch[:, None] + (by_kv + both * batch[:, None]) * kv
            return np.asarray(grid).ravel()

        def work(columns: WorkColumns) -> WorkColumns:
            return columns.each(change)

        return replace(
            known,
            works=tuple(map(work, known.works)),
            bytes=change(known.bytes),
            moved=change(known.moved),
            link=change(known.link),
            at=None if wide else places,
        )

    kernels = tuple(map(kernel, corners.kernels))
    return replace(corners, points=len(places), kernels=kernels)


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
    batch, kv = np.arange(1.0, 501), np.linspace(1000, 131_072, 500).round()
    step = at_sizes(stack(plans(target, execution)), batch, kv)
    benchmark.pedantic(lambda: [time_columns(step, chip) for chip in chips], rounds=1)
