"""What stays in another precision is listed with its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.estimates.moduletree import Island, islands

pytestmark = pytest.mark.quick


class Upcast(nn.Module):
    """Doubles in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * 2).to(x.dtype)


def test_an_explicit_upcast_is_an_island_wherever_the_model_is_priced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Upcast(), nn.Linear(8, 8), Upcast()).bfloat16()
    graph = rt.trace(model, torch.empty(4, 8, dtype=torch.bfloat16))
    # Each Upcast makes x.float() and its double: 2 tensors of 4 x 8 x 4 bytes.
    expected = (Island("fp32", "*", 4, 4 * (4 * 8 * 4)),)
    assert islands(graph) == expected
    assert islands(rt.tools.reprice(graph, dtype="fp8")) == expected


def test_what_was_asked_for_is_no_island() -> None:
    graph = rt.trace(nn.Linear(8, 8).bfloat16(), torch.empty(4, 8, dtype=torch.bfloat16))
    assert islands(graph) == ()
    assert islands(rt.tools.reprice(graph, weights_dtype="int4")) == ()


def test_the_optimizers_states_are_no_islands() -> None:
    linear = nn.Linear(8, 8).bfloat16()
    graph = rt.trace(linear, torch.empty(4, 8, dtype=torch.bfloat16), phase="training")
    assert islands(graph) == ()
