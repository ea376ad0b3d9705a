"""What watching a loop costs it: steps alone, timed and noted, and under the profiler, in one run.

The steps are short, so that the cost shows: it is a fixed time a step, whatever the model.  "events
alone" is the least that a step between two readings of a clock can take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rooftrace as rt

MODELS = {"tiny": (32, 2), "small": (512, 8)}  # width, layers
BATCH = 64


def loop(size: str) -> tuple[nn.Module, Callable[[], None]]:
    """A model, and one step of its training."""
    width, layers = MODELS[size]
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(BATCH, width), torch.randint(0, width, (BATCH,))

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.benchmark(group="step", max_time=3)
@pytest.mark.parametrize("size", MODELS)
def test_a_step_alone(benchmark: Any, size: str) -> None:
    """The floor: nothing watches."""
    benchmark(loop(size)[1])


@pytest.mark.benchmark(group="step", max_time=3)
@pytest.mark.parametrize("size", MODELS)
def test_a_step_between_two_clocks(benchmark: Any, size: str) -> None:
    """Two readings of the clock, and nothing else."""
    _, step = loop(size)

    def timed() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    benchmark(timed)


@pytest.mark.benchmark(group="step", max_time=3)
@pytest.mark.parametrize("size", MODELS)
def test_a_watched_step(benchmark: Any, size: str) -> None:
    """As all steps are watched but a few: two clocks, hooks on one call and on the optimizer."""
    model, step = loop(size)
    live = rt.live(model, chip="l4", warmup=0, profile=0)

    def watched() -> None:
        with live.step():
            step()

    benchmark(watched)
    assert live.figures.uncounted == 0


@pytest.mark.benchmark(group="step", max_time=3)
@pytest.mark.parametrize("size", MODELS)
def test_a_profiled_step(benchmark: Any, size: str) -> None:
    """As the few steps after the warm-up, with the profiler running all the time."""
    model, step = loop(size)
    live = rt.live(model, chip="l4", warmup=0, profile=200)

    def profiled() -> None:
        with live.step():
            step()

    benchmark.pedantic(profiled, rounds=100, warmup_rounds=5)
    live.close()
