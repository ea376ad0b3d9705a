"""Equal layers and loop turns stand once, and nothing is lost: written out it is the flat graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec import structs
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Repeat
from rooftrace.tracer.inputs.calls import call_inputs
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.request import Options, Request
from rooftrace.tracer.targets.target import load_target
from tests.conftest import in_turn
from tests.releases import LIFETIMES_ARE_EXACT
from tests.tracer.conftest import DEEPSEEK, TEXT, Case, built, config, tokens

DEPTH = 6


class Block(nn.Module):
    """A pre-norm residual layer; `scale` is an attribute that its forward reads."""

    def __init__(self, width: int = 8, scale: float = 1.0, kind: str = "linear") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width) if kind == "linear" else nn.Conv1d(width, width, 1)
        self.scale = scale
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "conv":
            y = self.inner(y.transpose(1, 2)).transpose(1, 2)
        else:
            y = torch.relu(self.inner(y))
        scaled: Tensor = x + y * self.scale
        return scaled


class Stack(nn.Module):
    """Layers one after another; what else goes on between them is up to the arguments."""

    def __init__(
        self, blocks: list[nn.Module], collect: bool = False, shared: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(blocks)
        self.last = nn.Linear(8, 4)
        self.collect, self.shared = collect, shared

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        start, seen = x, []
        for layer in self.layers:
            x = layer(x)
            if self.shared:
                x = x + start
            seen.append(x)
        if self.collect:
            return self.last(torch.stack(seen).mean(0)), *seen
        return self.last(x)


class Scan(nn.Module):
    """A recurrence written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.ones(8))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        gated = torch.sigmoid(self.mix(x))
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in range(x.shape[1]):
            state = self.decay * state + gated[:, step]
            states.append(state)
        return x + torch.stack(states, dim=1)


def stack(*kinds: str, **settings: Any) -> Case:
    module = Stack([Block(kind=kind) for kind in kinds], **settings)
    return Case(module.eval(), (torch.randn(2, 5, 8),))


def scans(length: int = 12) -> Case:
    return Case(Stack([Scan() for _ in range(DEPTH)]).eval(), (torch.randn(2, length, 8),))


def language(name: str, kind: str, **settings: Any) -> Case:
    shape = config(kind, **{**TEXT, "num_hidden_layers": DEPTH, **settings})
    return Case(built(name, shape), (), {"input_ids": tokens(2, 9)})


def experts(implementation: str) -> Case:
    shape = config("DeepseekV3Config", **{**DEEPSEEK, "num_hidden_layers": 1 + DEPTH})
    model = built("DeepseekV3ForCausalLM", shape, experts_implementation=implementation)
    # Without weights, as with them every layer chooses other experts.
    return Case(model.to("meta"), (), {"input_ids": tokens(2, 8)})


def t5() -> Case:
    shape = dict(vocab_size=64, num_layers=DEPTH, d_model=32, d_ff=48, num_heads=4, d_kv=8)
    model = built("T5ForConditionalGeneration", config("T5Config", **shape))
    return Case(model, (), {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 7)})


CASES: dict[str, Callable[[], Case]] = {
    "stack": lambda: stack(*["linear"] * DEPTH),
    "alternating": lambda: stack(*["linear", "conv"] * DEPTH),
    "collected": lambda: stack(*["linear"] * DEPTH, collect=True),
    "shared": lambda: stack(*["linear"] * DEPTH, shared=True),
    "scans": scans,
    "llama": lambda: language("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2),
    "bert": lambda: language("BertForMaskedLM", "BertConfig"),
    "grouped": lambda: experts("grouped_mm"),
    "eager": lambda: experts("eager"),
    "t5": t5,
}


UNROLLED = {("collected", "training"), ("t5", "training")}
"""Backward does something else for too many of the layers: one gradient each, the bias of the
first."""


def graphs(case: Case, phase: str, **options: Any) -> tuple[OpGraph, OpGraph]:
    """The graph of one phase as it is traced, and with everything run and written out."""
    inputs = call_inputs(case.module, case.args, dict(case.kwargs))
    found = [
        trace_phases(case.module, inputs, (phase,), Options(repeats=repeats, **options))[phase]
        for repeats in (True, False)
    ]
    return found[0], found[1]


@cache
def of_case(name: str, phase: str) -> tuple[OpGraph, OpGraph]:
    return graphs(CASES[name](), phase)


def timeless(graph: OpGraph) -> OpGraph:
    """The graph; without how long its values are held, where Python holds them for longer."""
    if LIFETIMES_ARE_EXACT:
        return graph
    return replace(graph, ops=tuple(structs.replace(op, holds=()) for op in graph.ops))


@pytest.mark.parametrize(
    ("name", "phase"),
    in_turn(CASES, ["training", "forward"], keep=[("stack", "forward"), ("shared", "forward")]),
)
def test_written_out_it_is_what_was_run(name: str, phase: str) -> None:
    rolled, flat = of_case(name, phase)
    assert flat.repeats == ()
    written = rolled.expand()
    if name == "scans" and phase == "training":
        # The gradient of a stack is taken apart turn by turn, not all at once.
        assert written.values == flat.values
        assert contents(written) == contents(flat)
    else:
        assert timeless(written) == timeless(flat)
    if (name, phase) not in UNROLLED:
        assert rolled.repeats
        assert len(rolled.ops) < len(flat.ops)
    assert sum(rolled.times(op) for op in rolled.ops) == len(flat.ops)
    assert sum(rolled.times(value) for value in rolled.values) == len(flat.values)
    assert rolled.flops_torch == flat.flops_torch


def contents(graph: OpGraph) -> Counter[Any]:
    """The ops of a graph, each with what it reads, whatever the order and the ids."""
    made = {value: op for op in graph.ops for value in op.outputs}

    def described(value: int, depth: int) -> Any:
        tensor, op = graph.values[value], made.get(value)
        shown = (tensor.name, tensor.shape, tensor.role)
        if op is None or not depth:
            return shown
        numbers = [(k, v) for k, v in op.arguments.items() if isinstance(v, (int, float, bool))]
        reads = [described(i, depth - 1) for i in op.inputs[:4]]
        return *shown, op.target, op.module, op.part, op.function, repr(numbers), tuple(reads)

    return Counter(
        (op.source, op.kind, op.family, op.call, described(value, 5))
        for op in graph.ops
        for value in op.outputs
    )


def from_config(phase: str, folder: Path) -> tuple[OpGraph, OpGraph]:
    shape = config("LlamaConfig", **{**TEXT, "num_hidden_layers": DEPTH})
    shape.architectures = ["LlamaForCausalLM"]
    shape.to_json_file(folder / "config.json")
    target = load_target(str(folder / "config.json"), Request(batch=2, seq=9))
    found = [
        trace_phases(target.module, target.inputs, (phase,), Options(repeats=repeats))[phase]
        for repeats in (True, False)
    ]
    return found[0], found[1]


@pytest.mark.parametrize("phase", ["prefill", "decode", "training"])
def test_layers_with_a_cache_or_a_loss_stand_once_too(phase: str, tmp_path: Path) -> None:
    rolled, flat = from_config(phase, tmp_path)
    assert [repeat.container for repeat in rolled.repeats] == ["model.layers"]
    assert timeless(rolled.expand()) == timeless(flat)


class Reading(Block):
    """A layer that reads a tensor among the arguments, as of a filled cache."""

    def forward(self, x: Tensor, own: Tensor | None = None) -> Tensor:
        return super().forward(x if own is None else x + own)


class Given(Stack):
    """Layers that each have a tensor of their own among the arguments, in order or in reverse."""

    order = 1

    def forward(self, x: Tensor, *own: Tensor) -> Tensor:
        for layer, mine in zip(self.layers, own[:: self.order], strict=True):
            x = layer(x, mine)
        return x


@pytest.mark.parametrize("order", [1, -1])
def test_layers_that_read_arguments_of_their_own_stand_once(order: int) -> None:
    layers = Given([Reading() for _ in range(DEPTH)]).eval()
    layers.order = order
    x, *own = torch.randn(DEPTH + 1, 2, 5, 8)
    rolled, flat = graphs(Case(layers, (x, *own)), "forward")
    assert len(flat.inputs) == 1 + DEPTH
    assert len(rolled.inputs) == 1 + DEPTH - sum(repeat.count - 1 for repeat in rolled.repeats)
    assert bool(rolled.repeats) == (order == 1)
    assert timeless(rolled.expand()) == timeless(flat)
    state: Mapping[str, Tensor] = dict(layers.named_parameters())
    (result,) = to_fx(rolled, state)(x, *own)
    assert torch.equal(result, layers(x, *own))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adagrad", "none"])
def test_the_optimizer_updates_the_weights_of_every_layer(optimizer: str) -> None:
    rolled, flat = graphs(stack(*["linear"] * DEPTH), "training", optimizer=optimizer)
    assert rolled.repeats
    assert timeless(rolled.expand()) == timeless(flat)


def test_low_precision_weights_have_masters_in_every_layer() -> None:
    case = stack(*["linear"] * DEPTH)
    case.module.bfloat16()
    rolled, flat = graphs(case._replace(args=(case.args[0].bfloat16(),)), "training")
    assert rolled.repeats
    assert timeless(rolled.expand()) == timeless(flat)


def test_two_layers_side_by_side_are_one_iteration_where_they_alternate() -> None:
    rolled, _ = of_case("alternating", "forward")
    (repeat,) = rolled.repeats
    assert (repeat.container, repeat.step) == ("layers", 2)
    assert len(repeat.paths) == repeat.count


def test_layers_that_do_something_else_stand_for_themselves() -> None:
    blocks: list[nn.Module] = [Block(scale=number / 4) for number in range(DEPTH)]
    rolled, flat = graphs(Case(Stack(blocks).eval(), (torch.randn(2, 5, 8),)), "forward")
    assert timeless(rolled) == timeless(flat)


def test_a_loop_has_as_many_turns_as_it_was_asked_for() -> None:
    counts = []
    for length in (12, 40):
        rolled, flat = graphs(scans(length), "forward")
        counts.append(len(rolled.ops))
        loops = [repeat for repeat in rolled.repeats if repeat.container is None]
        assert {loop.count for loop in loops} == {length - 3}
        assert loops[0].source.rpartition(":")[0].endswith("test_repeats.py")
        assert timeless(rolled.expand()) == timeless(flat)
    assert counts[0] == counts[1]


def test_a_saved_graph_has_its_repeats(tmp_path: Path) -> None:
    rolled, _ = of_case("scans", "training")
    path = tmp_path / "scans.json.gz"
    rt.save(rolled, path)
    loaded = rt.load(path)
    assert isinstance(loaded, OpGraph)
    assert loaded == rolled
    assert loaded.expand() == rolled.expand()


def test_a_repeat_names_the_modules_that_it_stands_for() -> None:
    repeat = Repeat(0, 3, "model.layers", 2, 2)
    assert repeat.paths == ("model.layers.2", "model.layers.4", "model.layers.6")
    assert repeat.path("model.layers.3.mlp", 2) == "model.layers.7.mlp"
    assert repeat.path("model.norm", 2) == "model.norm"
    assert Repeat(0, 2, "", 1).path("1.weight", 1) == "2.weight"
    assert Repeat(0, 2, None).paths == ()


@settings(max_examples=20)
@given(
    kinds=st.lists(st.sampled_from(["linear", "conv", "scaled"]), min_size=4, max_size=8),
    collect=st.booleans(),
    shared=st.booleans(),
    phase=st.sampled_from(["forward", "training"]),
)
def test_any_stack_can_be_written_out(
    kinds: list[str], collect: bool, shared: bool, phase: str
) -> None:
    blocks: list[nn.Module] = [
        Block(kind="linear", scale=2.0) if kind == "scaled" else Block(kind=kind) for kind in kinds
    ]
    module = Stack(blocks, collect=collect, shared=shared).eval()
    rolled, flat = graphs(Case(module, (torch.randn(2, 5, 8),)), phase)
    assert timeless(rolled.expand()) == timeless(flat)


def test_a_graph_with_repeats_runs_on_real_tensors() -> None:
    case = stack(*["linear"] * DEPTH)
    rolled, _ = graphs(case, "forward")
    assert rolled.repeats
    state: Mapping[str, Tensor] = dict(case.module.named_parameters())
    (result,) = to_fx(rolled, state)(*case.args)
    assert torch.equal(result, case.module(*case.args))
