"""Patterns of ops: what they find in a traced step, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.rewrites.dataflow import ValueFlow
from rooftrace.costmodels.rewrites.patterns import LAST, Along, NonTensor, Number, Pat, match

GATED = Pat("mul", Pat("silu", "gate"), "up")


def read(function: Callable[..., Tensor], pattern: Any, *shapes: tuple[int, ...]) -> Any:
    """What a pattern names of the result of a function of tensors; inputs by their places."""

    class Step(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return function(*tensors)

    graph = rt.trace(Step(), *(torch.zeros(shape or (2, 3)) for shape in shapes or ((), ())))
    bound = match(ValueFlow(graph), graph.outputs[0], pattern)
    places = {value: place for place, value in enumerate(graph.inputs)}
    return bound and {word: places.get(item, item) for word, item in bound.items()}


@pytest.mark.parametrize(
    "function",
    (
        lambda a, b: torch.nn.functional.silu(a) * b,
        lambda a, b: b * torch.nn.functional.silu(a),
        lambda a, b: (b.view(6) * torch.nn.functional.silu(a).flatten()).view(3, 2).clone(),
        lambda a, b: (torch.nn.functional.silu(a).double() * b.double()).float(),
    ),
    ids=("as it stands", "the other way round", "through views", "through casts"),
)
def test_a_product_is_found_however_it_is_written(function: Callable[..., Tensor]) -> None:
    assert read(function, GATED)["gate"] == 0


def test_a_pattern_says_nothing_of_another_op() -> None:
    assert read(lambda a, b: torch.nn.functional.silu(a) + b, GATED) is None
    assert read(lambda a, b: torch.nn.functional.silu(a.t()).t() * b, GATED) is None


def test_a_word_is_the_same_value_wherever_it_stands() -> None:
    shares = Pat("div", "x", Pat("sum", "x", dim=LAST, keepdim=True))
    assert read(lambda a, b: a / a.sum(-1, keepdim=True), shares) == {"x": 0}
    assert read(lambda a, b: a / b.sum(-1, keepdim=True), shares) is None


def test_an_argument_without_a_pattern_is_at_its_default() -> None:
    total = Pat("sum", "x", dim=Along(-2))
    assert read(lambda a, b: a.sum(0), total) == {"x": 0}
    assert read(lambda a, b: a.sum(-2), total) == {"x": 0}
    assert read(lambda a, b: a.sum(0, keepdim=True), total) is None
    assert read(lambda a, b: a.sum(1), total) is None


def test_numbers_lists_results_and_alternatives() -> None:
    scaled = (Pat("mul", "x", Number("by")), Pat("div", "x", Number("over")))
    assert read(lambda a, b: a * 2, scaled) == {"x": 0, "by": 2.0}
    assert read(lambda a, b: a / 4, scaled) == {"x": 0, "over": 4.0}
    assert read(lambda a, b: a * b, scaled) is None
    joined = Pat("cat", ["first", "second"], dim=LAST)
    assert read(lambda a, b: torch.cat([b, a], 1), joined) == {"first": 1, "second": 0}
    best = Pat("topk", "x", k=NonTensor("k"), dim=Along(-1, default=-1), out=1)
    assert read(lambda a, b: a.topk(2)[1], best) == {"x": 0, "k": 2}
    assert read(lambda a, b: a.topk(2)[0], best) is None
    assert read(lambda a, b: a.topk(2, largest=False)[1], best) is None
