"""Ops that nobody knows: what they draw, choose and write follows from tags and schemas."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.rewrites import waste
from rooftrace.graph import Op
from rooftrace.tracer.lowering.inline import made_role
from rooftrace.tracer.recording.ops import index_output, is_random

pytestmark = pytest.mark.quick

SEEDED = (torch.Tag.nondeterministic_seeded,)


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    made: Any = torch.library.Library("nobody", "DEF")
    made.define("noise(Tensor x) -> Tensor", tags=SEEDED)
    made.define("randomly_named(Tensor x) -> Tensor")
    made.define("gate(Tensor scores, int k) -> (Tensor, Tensor)")
    made.define("store(Tensor(a!) cache, Tensor new, Tensor slots) -> ()")
    made.define("attend(Tensor q, Tensor(a!) cache, Tensor new) -> Tensor")

    def chosen(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shape = (*scores.shape[:-1], k)
        return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int32)

    made.impl("noise", torch.empty_like, "Meta")
    made.impl("noise", torch.rand_like, "CPU")
    made.impl("randomly_named", torch.empty_like, "Meta")
    made.impl("randomly_named", torch.clone, "CPU")
    made.impl("gate", chosen, "Meta")
    made.impl("store", lambda cache, new, slots: None, "Meta")
    made.impl("attend", lambda q, cache, new: torch.empty_like(q), "Meta")
    yield made
    made._destroy()


def test_randomness_is_a_tag_and_no_word(library: Any) -> None:
    ours: Any = torch.ops.nobody
    aten = torch.ops.aten
    assert is_random(ours.noise.default) and is_random(aten.rand.default)
    assert is_random(aten._sample_dirichlet.default)  # untagged, but it takes a generator
    assert not is_random(ours.randomly_named.default)
    assert not is_random(aten.native_dropout_backward.default)
    assert made_role("nobody.noise.default", "forward", ["constants"]) == "activations"
    assert made_role("nobody.randomly_named.default", "forward", ["constants"]) == "constants"


def test_pricing_knows_what_draws_without_torch(library: Any) -> None:
    """By a table, which says what torch says, and by a fact of the graph for all other ops."""
    names = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name[:6] == "aten::"]
    wrong = {}
    for name, _, overload in (name.partition(".") for name in names):
        func = getattr(getattr(torch.ops.aten, name), overload or "default")
        op = Op(0, f"aten.{name}.{overload}", {}, (), ())
        if waste.is_random(op) != is_random(func):
            wrong[str(func)] = is_random(func)
    assert len(names) > 2000 and not wrong

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.nobody.noise(x) + torch.ops.nobody.randomly_named(x)

    ops = {op.name: op for op in rt.trace(Noisy(), torch.ones(4)).ops}
    assert waste.is_random(ops["nobody.noise"])
    assert not waste.is_random(ops["nobody.randomly_named"])


def test_what_is_drawn_is_not_known(library: Any) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ops.nobody.noise(torch.ones(4, device=x.device)) > 2
            return x * 2 if mask.any() else x

    graph = rt.trace(Branches(), torch.ones(4))
    assert [a.kind for a in graph.assumptions] == ["branch"]


@pytest.mark.parametrize(
    ("call", "position"),
    [
        (lambda x: (torch.ops.aten.topk.default, torch.topk(x, 2)), 1),
        (lambda x: (torch.ops.aten.max.dim, torch.max(x, 1)), 1),
        (lambda x: (torch.ops.aten.mode.default, torch.mode(x, 1)), 1),
        (lambda x: (torch.ops.aten.argmax.default, (torch.argmax(x, 1),)), 0),
        (lambda x: (torch.ops.aten.count_nonzero.default, (torch.count_nonzero(x),)), None),
        (lambda x: (torch.ops.aten.max.default, (torch.max(x),)), None),
        (lambda x: (torch.ops.nobody.gate.default, torch.ops.nobody.gate(x, 2)), 1),
        (
            lambda x: (
                torch.ops.aten.max_pool2d_with_indices.default,
                torch.ops.aten.max_pool2d_with_indices(x[None], 2),
            ),
            None,
        ),
    ],
)
def test_indices_that_floats_choose(library: Any, call: Any, position: int | None) -> None:
    scores = torch.empty(4, 8, device="meta")
    func, outputs = call(scores)
    assert index_output(func, scores, tuple(outputs)) == position


def test_a_gate_that_nobody_knows_routes_in_balance(library: Any) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = torch.ops.nobody.gate(self.gate(x), 1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen[:, 0] == index).nonzero()[:, 0]
                out[rows] = expert(x[rows]) * weight[rows]
            return out

    graph = rt.trace(Experts(), torch.ones(16, 8))
    assert {a.kind for a in graph.assumptions} == {"routing"}
    products = [op for op in graph.expand().ops if op.module.startswith("experts")]
    rows = [graph.expand().values[op.outputs[0]].shape for op in products if "mm" in op.name]
    assert rows == [(4, 8)] * 4


class Paged(nn.Module):
    """A store of 16 KiB into a cache of 64 MiB, by an op that nobody knows."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.register_buffer("cache", torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta"))

    def forward(self, new: Tensor, slots: Tensor) -> Tensor:
        if self.attends:
            return torch.ops.nobody.attend(new, self.cache, new) + 1
        torch.ops.nobody.store(self.cache, new, slots)
        return new + 1


ROWS, CACHE = 2 * 8192, 2 * 4096 * 8192


def test_a_store_into_a_paged_cache_is_no_copy_of_it(library: Any) -> None:
    new, slots = torch.ones(1, 8192, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long)
    estimate = rt.estimate(rt.trace(Paged(False), new, slots), execution="eager")
    (entry,) = estimate.unsupported_ops()
    assert entry.bytes == 2 * (ROWS + 8)  # new and slots read, as much written
    assert entry.bytes_least <= 2 * ROWS <= entry.bytes
    assert entry.bytes_most == 2 * CACHE + ROWS + 8  # if it read and wrote the whole cache


def test_what_is_written_beside_a_result_is_bounded_and_kept(library: Any) -> None:
    new, slots = torch.ones(1, 8192, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.long)
    graph = rt.trace(Paged(True), new, slots)
    (entry,) = rt.estimate(graph, execution="eager").unsupported_ops()
    assert entry.bytes_least == ROWS  # the result
    assert entry.bytes_most == 2 * CACHE + 2 * ROWS
    assert "nobody.attend.default" in [op.target for op in rt.plan(graph, "efficient").graph.ops]
