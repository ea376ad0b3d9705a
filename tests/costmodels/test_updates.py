"""Updates of optimizers by ops of libraries and of the user's: bytes by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.ops import price_ops

SIDE = 1024
N = SIDE * SIDE
BLOCKS = N // 256
EIGHT_BITS = 4 * N + 2 * 4 * N + 2 * 2 * N + 2 * 2 * 4 * BLOCKS
"""A gradient read, a weight and two states of a byte read and written, and a scale per block."""

BLOCKWISE = (
    "optimizer_update_8bit_blockwise(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) "
    "state1, Tensor(a3!)? state2, float beta1, float beta2, float beta3, float alpha, float eps, "
    "int step, float lr, Tensor(a4!) qmap1, Tensor(a5!)? qmap2, Tensor(a6!) absmax1, Tensor(a7!)? "
    "absmax2, float weight_decay, float gnorm_scale, bool skip_zeros=False) -> ()"
)
WIDE = (
    "optimizer_update_32bit(str optimizer_name, Tensor(a0!) g, Tensor(a1!) p, Tensor(a2!) state1, "
    "Tensor(a3!)? state2, Tensor(a4!)? unorm_vec, float max_unorm, float param_norm, float beta1, "
    "float beta2, float beta3, float alpha, float eps, float weight_decay, int step, float lr, "
    "float gnorm_scale, bool skip_zeros=False) -> ()"
)
OWN = "adam8(Tensor(a!) p, Tensor g, Tensor(b!) m, Tensor(c!) v, Tensor(d!) a, Tensor(e!) b) -> ()"
ROWS = "rows(Tensor(a!) table, Tensor rows, Tensor g) -> ()"


@pytest.fixture(autouse=True)
def _libraries() -> Iterator[None]:
    """The ops of bitsandbytes as it defines them (_ops.py), and two of nobody's."""
    libraries = []
    for name, schemas in (("bitsandbytes", (BLOCKWISE, WIDE)), ("ours_alone", (OWN, ROWS))):
        library: Any = torch.library.Library(name, "FRAGMENT")
        libraries.append(library)
        for schema in schemas:
            op = schema.partition("(")[0]
            if not hasattr(getattr(torch.ops, name), op):
                library.define(schema)
                library.impl(op, lambda *_: None, "CompositeExplicitAutograd")
    yield
    for library in libraries:
        library._destroy()


class Eight(torch.optim.Optimizer):
    """Two states of 8 bits for each weight, in blocks of 256."""

    def __init__(self, parameters: Any, update: Callable[[nn.Parameter, Any], None]) -> None:
        super().__init__(parameters, {})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    for name in ("m", "v"):
                        state[name] = torch.zeros_like(p, dtype=torch.uint8)
                        state[f"{name}_scales"] = torch.zeros(BLOCKS, device=p.device)
                    state["codes"] = torch.zeros(256, device=p.device)
                self.update(p, state)


def blockwise(name: str) -> Callable[[nn.Parameter, Any], None]:
    two = name == "adam"

    def update(p: nn.Parameter, s: Any) -> None:
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            name, p.grad, p, s["m"], s["v"] if two else None, 0.9, 0.99, 0.0, 0.0, 1e-8, 1, 0.1,
            s["codes"], s["codes"] if two else None, s["m_scales"],
            s["v_scales"] if two else None, 0.0, 1.0, False,
        )  # fmt: skip

    return update


def own(p: nn.Parameter, s: Any) -> None:
    torch.ops.ours_alone.adam8(p, p.grad, s["m"], s["v"], s["m_scales"], s["v_scales"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def stepped(update: Callable[[nn.Parameter, Any], None]) -> rt.types.OpGraph:
    model = nn.Linear(SIDE, SIDE, bias=False)
    return rt.trace(step, model, Eight(model.parameters(), update), torch.ones(4, SIDE))


def bytes_of_optimizer(graph: rt.types.OpGraph) -> int:
    costs = zip(graph.ops, price_ops(graph)[0], strict=True)
    return sum(cost.bytes() for op, cost in costs if op.part == "optimizer")


def test_an_update_of_bitsandbytes_moves_what_it_changes_once() -> None:
    graph = stepped(blockwise("adam"))
    assert bytes_of_optimizer(graph) == EIGHT_BITS + 4 * 256  # and the codes
    estimate = rt.estimate(graph, chip="l4", execution="eager")
    assert not estimate.unsupported_ops()
    assert estimate.memory.optimizer == 2 * N + 2 * 4 * BLOCKS + 4 * 256
    once = stepped(blockwise("momentum"))
    assert bytes_of_optimizer(once) == EIGHT_BITS - 2 * N - 2 * 4 * BLOCKS + 4 * 256


def test_an_update_in_32_bits_has_no_codes() -> None:
    def update(p: nn.Parameter, s: Any) -> None:
        wide = [s.setdefault(n, torch.zeros_like(p)) for n in ("wide_m", "wide_v")]
        torch.ops.bitsandbytes.optimizer_update_32bit(
            "adam", p.grad, p, *wide, None, 0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.0, 1, 0.1, 1.0,
        )  # fmt: skip

    graph = stepped(update)
    (op,) = (op for op in graph.ops if "bitsandbytes" in op.name)
    cost = price_ops(graph)[0][graph.ops.index(op)]
    assert cost.bytes() == 4 * (N + 3 * 2 * N)
    assert cost.flops() == 13 * N  # of Adam, without decay: 3 + 4 + 3 + 3


def test_an_update_that_nobody_knows_moves_no_less_than_what_it_changes() -> None:
    graph = stepped(own)
    assert bytes_of_optimizer(graph) == EIGHT_BITS
    estimate = rt.estimate(graph, chip="l4", execution="eager")
    (unknown,) = estimate.unsupported_ops()
    assert unknown.bytes == unknown.most == EIGHT_BITS
    assert unknown.bytes_least == EIGHT_BITS - 2 * 2 * 4 * BLOCKS  # what has no gradient's size


def test_an_update_of_rows_may_leave_the_table_alone() -> None:
    class Rows(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    ids = torch.zeros(4, dtype=torch.int64)
                    torch.ops.ours_alone.rows(p, ids, p.grad[:4])

    model = nn.Linear(SIDE, SIDE, bias=False)
    graph = rt.trace(step, model, Rows(model.parameters(), {}), torch.ones(4, SIDE))
    (unknown,) = rt.estimate(graph, chip="l4", execution="eager").unsupported_ops()
    assert unknown.bytes_least == 0 < unknown.bytes
