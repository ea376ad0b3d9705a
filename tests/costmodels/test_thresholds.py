"""Sizes walked across thresholds of kernels: on the other side stand whole passes over the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion import index_space, kernels, plan
from rooftrace.costmodels.rules import norm, reduction

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1) * 2,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]) * 2,
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), device=x.device).long()),
    "cumsum": lambda x: x.cumsum(-1),
    "columns": lambda x: x.exp().sum(0) * x,
    "sum": lambda x: x.exp().sum(-1, keepdim=True) + x,
    "variance": lambda x: (x - x.mean(-1, keepdim=True)).square().mean(-1),
    "sort": lambda x: x.sort(-1).values,
}


@cache
def bytes_of(name: str, rows: int, size: int, execution: str) -> float:
    """Bytes for each element of [rows, size]."""
    graph = rt.trace(OPS[name], torch.empty(rows, size, device="meta"))
    return plan(graph, execution).bytes.total / (rows * size)


EDGES = (
    32, 1024, reduction.IN_SHARED_MEMORY, index_space.SPLIT_ROW, norm.ON_CHIP // 4, kernels.SMALL,
    index_space.LONGEST_ROW,
)  # fmt: skip
PASSES: dict[tuple[str, int, int], float] = {
    # Few long rows are split over SMs: what adds the result to the row reads it again.
    ("sum", 64, index_space.SPLIT_ROW): 3 / 2,
    ("sum", 512, index_space.LONGEST_ROW): 3 / 2,
    ("variance", 64, index_space.SPLIT_ROW): 2,
    ("variance", 512, index_space.LONGEST_ROW): 2,
}
"""Bytes on the other side of a threshold, over those before it."""


@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("name", [name for name in OPS if name != "sort"])
def test_a_step_across_a_threshold_is_whole_passes_over_the_data(name: str, rows: int) -> None:
    for edge in dict.fromkeys(EDGES):
        before, after = (bytes_of(name, rows, size, "efficient") for size in (edge, edge + 8))
        assert after / before == pytest.approx(PASSES.get((name, rows, edge), 1), rel=0.02), edge
        eager = [bytes_of(name, rows, size, "eager") for size in (edge, edge + 8)]
        assert eager[1] == pytest.approx(eager[0], rel=0.02)


def test_rows_that_are_too_long_for_shared_memory_are_sorted_digit_by_digit() -> None:
    low, high = (bytes_of("sort", 64, size, "eager") for size in (4096, 4096 + 8))
    assert low == pytest.approx(4 + 4 + 8, rel=0.01)  # read; numbers and places written
    assert high / low == pytest.approx(5.5, rel=0.01)  # 32 bits in digits of 8, keys and places
