"""Products fused with their exchange cost what the exchange and the product cost apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_group

import rooftrace as rt

pytestmark = pytest.mark.quick

ROWS, INNER, COLUMNS, RANKS = 24, 64, 40, 4
_symm_mem: Any = torch.ops.symm_mem


class Gathered(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            torch.zeros(INNER, n, dtype=torch.bfloat16) for n in (COLUMNS, 2 * COLUMNS)
        )
        self.fused = fused

    def forward(self, x: Tensor) -> list[Tensor]:
        group = _get_default_group()
        if self.fused:
            made = _symm_mem.fused_all_gather_matmul(x, list(self.weights), 0, group.group_name)
            return list(made[1])
        whole = funcol.all_gather_tensor(x, 0, group)
        return [whole @ weight for weight in self.weights]


class Scattered(Gathered):
    def forward(self, x: Tensor) -> list[Tensor]:
        group, weight = _get_default_group(), self.weights[0]
        if self.fused:
            name = group.group_name
            return [_symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)]
        return [funcol.reduce_scatter_tensor(x @ weight, "sum", 0, group)]


def costs(kind: type[Gathered], fused: bool) -> Any:
    with rt.tools.fake_mesh({"tp": RANKS}), torch.device("meta"):
        x = torch.zeros(ROWS, INNER, dtype=torch.bfloat16)
        graph = rt.trace(kind(fused), x)
    return rt.estimate(graph, execution="eager", system="dgx-h100")


@pytest.mark.parametrize("kind", [Gathered, Scattered])
def test_fused_products_have_the_flops_and_the_exchange_of_both(kind: type[Gathered]) -> None:
    fused, apart = costs(kind, fused=True), costs(kind, fused=False)
    assert not fused.unsupported_ops()
    assert fused.flops == apart.flops > 0
    assert fused.plan.total.bytes("link") == apart.plan.total.bytes("link") > 0
    sent = [(row.kind, row.ranks, row.calls, row.bytes) for row in fused.communication]
    assert sent == [(row.kind, row.ranks, row.calls, row.bytes) for row in apart.communication]
    assert fused.plan.total.bytes() < apart.plan.total.bytes()


@pytest.mark.parametrize("kind", [Gathered, Scattered])
def test_the_exchange_runs_beside_the_product(kind: type[Gathered]) -> None:
    fused, apart = costs(kind, fused=True), costs(kind, fused=False)
    assert fused.t_est < apart.t_est
