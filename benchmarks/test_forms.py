"""Places by a form, with plans kept and made: ratios of one run, and seconds."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pytest

import rooftrace as rt
from rooftrace.studies.explaining.decode_forms import explore_form
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import Form, evaluated

CHIPS = ("h200-sxm", "h100-sxm", "a100-sxm-80", "l4")
RANGES = {
    "llama-3.1-8b": ({"batch": range(1, 1025), "kv": range(16, 131_072)}, None),
    "deepseek-v3": ({"batch": range(2, 257), "kv": range(256, 16_385)}, "fp8"),
}


@cache
def form(target: str) -> Form:
    return rt.tools.form(target, phase="decode", over=RANGES[target][0])


def points(target: str, count: int) -> Points:
    draw = np.random.default_rng(0)
    over = RANGES[target][0]
    return Points({name: draw.integers(v[0], v[-1] + 1, count) for name, v in over.items()})


@pytest.mark.parametrize("kept", [True, False])
def test_plans_of_a_second_command(kept: bool, benchmark: Any, monkeypatch: Any) -> None:
    """Thirty places of DeepSeek-V3 whose plans lie on disk, or are made again."""
    known, places = form("deepseek-v3"), points("deepseek-v3", 30)
    if not kept:
        monkeypatch.setenv("ROOFTRACE_CACHE", "off")

    def run() -> Any:
        fresh = Form(known.title, known.phase, known.names, known.regimes)
        return evaluated(fresh, places, [rt.load_chip("h200-sxm")], Conditions.of("efficient"))

    assert len(benchmark.pedantic(run, rounds=2, iterations=1, warmup_rounds=1)["t_est"]) == 30


def test_the_least_batches_of_six_cells(benchmark: Any) -> None:
    """Devices and lengths beside one trace that is priced (its seconds are in the extra)."""
    started = time.perf_counter()
    rt.estimate(rt.trace("deepseek-v3", phase="decode", batch=64, kv=4096), chip="h200-sxm")
    benchmark.extra_info["estimate"] = time.perf_counter() - started
    known = form("deepseek-v3")

    def run() -> Any:
        fresh = Form(known.title, known.phase, known.names, known.regimes)
        sizes: Any = {"devices": [1, 2], "kv": [1024, 4096, 16_384], "batches": [2, 8, 32, 64]}
        return explore_form(fresh, Conditions.of("serving"), rt.load_chip("h200-sxm"), **sizes)

    assert len(benchmark.pedantic(run, rounds=2, iterations=1).cells) == 6
