"""Formulas that a user registered with torch.utils.flop_counter stand above our rules."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import rooftrace as rt
from rooftrace.costmodels.ops.opview import RULES

pytestmark = pytest.mark.quick

library = torch.library.Library("given", "DEF")
library.define("blend(Tensor x, Tensor y) -> Tensor")
library.impl("blend", lambda x, y: torch.empty_like(x), "Meta")


class Blend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.given.blend(self.up(x), x)


@pytest.fixture
def registered() -> Iterator[None]:
    """A formula for the op above, and one that doubles aten.mm."""
    before = dict(flop_registry)

    @register_flop_formula(torch.ops.given.blend)
    def blend(x_shape, y_shape, out_shape=None, **kwargs):
        return 1000 * x_shape[0]

    flop_registry.pop(torch.ops.aten.mm)

    @register_flop_formula(torch.ops.aten.mm)
    def mm(a_shape, b_shape, out_shape=None, **kwargs):
        return 4 * a_shape[0] * a_shape[1] * b_shape[1]

    yield
    flop_registry.clear()
    flop_registry.update(before)


def traced() -> rt.types.OpGraph:
    with torch.device("meta"):
        return rt.trace(Blend(), torch.empty(5, 8))


def test_they_count_as_flop_counter_mode_counts_them(registered: None) -> None:
    with torch.device("meta"):
        model, x = Blend(), torch.empty(5, 8)
    with FlopCounterMode(display=False) as counter:
        model(x)
    estimate = rt.estimate(rt.trace(model, x), execution="eager")
    assert estimate.flops_matrix == counter.get_total_flops() == 5000 + 4 * 5 * 8 * 8
    assert estimate.coverage.bytes_with_rule_share == 1 and not estimate.unsupported_ops()
    assert estimate.notes == (
        "FLOPs by a formula registered with torch: aten.mm x1, given.blend x1",
    )


def test_bytes_stay_those_of_the_rule_or_of_the_tensors(registered: None) -> None:
    given = rt.estimate(traced(), execution="eager")
    flop_registry.clear()
    assert given.bytes_hbm == rt.estimate(traced(), execution="eager").bytes_hbm


def test_they_travel_with_a_saved_graph(registered: None, tmp_path) -> None:
    rt.save(traced(), tmp_path / "graph.json")
    flop_registry.clear()
    loaded = rt.load(tmp_path / "graph.json")
    assert rt.estimate(loaded, execution="eager").flops_matrix == 5000 + 4 * 5 * 8 * 8


def test_a_whole_rule_of_the_users_stands_above_them(registered: None) -> None:
    @rt.extend.rule("given::blend")
    def blend(op: rt.extend.OpView) -> rt.extend.Cost:
        return rt.extend.Cost.of(vector=7) + op.streamed()

    try:
        estimate = rt.estimate(traced(), execution="eager")
    finally:
        del RULES["given.blend"]
    assert estimate.flops - estimate.flops_matrix == 7
    assert "given.blend" not in "".join(estimate.notes)


def test_torchs_own_formulas_are_not_taken_for_somebodys() -> None:
    graph = traced()
    assert all("flops_given" not in op.facts for op in graph.ops)
    assert any(op.flops_torch for op in graph.ops)
