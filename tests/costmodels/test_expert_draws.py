"""Tokens over experts, as the benchmark of measured layers draws them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def routed() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "routed.py"
    spec = importlib.util.spec_from_file_location("routed", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["routed"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_balanced_tokens_give_every_expert_as_many_rows(routed: ModuleType) -> None:
    draw = routed.drawn(256, 128, 8, 1, "balanced", True)
    assert (draw.rows, draw.hit, draw.tokens) == (256 * 8, 128, 256)
    half = routed.drawn(256, 128, 8, 2, "balanced", True)
    assert (half.rows, half.hit) == (256 * 4, 64)


@pytest.mark.parametrize("evenly", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 300, 5000])
def test_drawn_rows_are_those_of_all_tokens(routed: ModuleType, tokens: int, evenly: bool) -> None:
    all_ = routed.drawn(tokens, 64, 6, 1, "power_law_1.2", evenly)
    assert all_.rows == tokens * 6
    assert 6 <= all_.hit <= 64
    busiest = routed.drawn(tokens, 64, 6, 8, "power_law_1.2", evenly)
    assert all_.rows / 8 <= busiest.rows <= tokens * 6
    assert busiest.tokens <= tokens


def test_tokens_have_each_expert_once(routed: ModuleType) -> None:
    counts = np.array([5, 1, 4, 2])  # of 6 tokens with two experts each
    dealt = routed._dealt(counts, 6, 2)
    assert all(len(set(experts)) == 2 for experts in dealt.tolist())
    assert np.bincount(dealt.ravel()).tolist() == counts.tolist()


def test_a_router_of_groups_keeps_four_of_eight(routed: ModuleType) -> None:
    chosen = np.array([[0, 9, 17, 25, 33, 41, 49, 57]])  # one expert of each group of 8
    kept = routed._of_groups(chosen, 64)[0]
    assert {int(e) // 8 for e in kept} == {0, 1, 2, 3}
    assert {0, 9, 17, 25} <= set(kept.tolist())
