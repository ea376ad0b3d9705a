"""A call is repeated only where running it could not have recorded anything else."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.inputs.calls import call_inputs
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.phases.steps import trace_step
from rooftrace.tracer.repeats.arguments import Beginning
from rooftrace.tracer.request import Options, Request
from rooftrace.tracer.targets.target import load_target
from tests.tracer.conftest import TEXT, config

F = nn.functional
DEPTH = 6


class Runs(logging.Logger):
    """The modules that ran.  What a logger keeps is not seen as state of the code that logs."""

    def __init__(self) -> None:
        super().__init__("runs")
        self.modules: list[nn.Module] = []

    def append(self, module: nn.Module) -> None:
        self.modules.append(module)


RUNS = Runs()
"""The layers whose Python ran."""
Code = Callable[..., Any]


class Layer(nn.Module):
    """A layer with code and attributes of its own."""

    def __init__(self, code: Code, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.code = code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        RUNS.append(self)
        return self.code(self, *args, **kwargs)


class Stack(nn.Module):
    """Layers, which `between(layer, number, x)` calls one by one, or `whole(stack, x)` at once."""

    def __init__(
        self, layers: list[Any], between: Code | None = None, whole: Code | None = None
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)
        self.between, self.whole = between, whole

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.whole is not None:
            return self.whole(self, x)
        for number, layer in enumerate(self.layers):
            x = layer(x) if self.between is None else self.between(layer, number, x)
        return x


def stack(
    code: Code,
    between: Code | None = None,
    whole: Code | None = None,
    **attributes: Callable[[int], Any],
) -> Stack:
    layers = [
        Layer(code, **{name: made(number) for name, made in attributes.items()})
        for number in range(DEPTH)
    ]
    return Stack(layers, between, whole).eval()


def graphs(module: nn.Module, phase: str = "forward") -> tuple[OpGraph, OpGraph, int]:
    """The graph with repeats written out, that of what runs, and how many layers ran for it."""
    inputs = call_inputs(module, (torch.randn(2, 8),), {})
    RUNS.modules.clear()
    found = trace_phases(module, inputs, (phase,), Options())[phase].expand()
    runs = len(RUNS.modules)
    flat = trace_phases(module, inputs, (phase,), Options(repeats=False))[phase]
    return found, flat, runs


def runs_of(module: nn.Module, phase: str = "forward") -> int:
    """How many layers run; the graph is that of all of them."""
    found, flat, runs = graphs(module, phase)
    assert without_holds(found) == without_holds(flat)
    return runs


def without_holds(graph: OpGraph) -> OpGraph:
    """Which op is the last that a variable keeps a tensor for may differ by one, where calls are
    not run."""
    return graph.replace(ops=tuple(replace(op, holds=()) for op in graph.ops))


def without_empty_holds(graph: OpGraph) -> OpGraph:
    """Tensors of no bytes, of which the checkpoint of torch 2.11 keeps two that nothing reads, take
    no room: which op holds them last says nothing."""
    values = graph.values
    ops = (
        replace(op, holds=tuple(ref for ref in op.holds if values[ref.id].nbytes))
        for op in graph.ops
    )
    return graph.replace(ops=tuple(ops))


def linear(layer: Any, x: Tensor) -> Tensor:
    return torch.relu(layer.linear(x))


def scaled(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.linear(x) * layer.scale
    return y


# -- attributes ------------------------------------------------------------------------------------


def test_of_layers_that_are_alike_one_runs() -> None:
    assert runs_of(stack(linear)) == 1


def test_an_attribute_that_is_not_read_may_differ() -> None:
    assert runs_of(stack(linear, number=lambda i: i, table=lambda i: np.arange(i + 2))) == 1


def by_table(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.linear(x) * float(layer.table[0])
    return y


@pytest.mark.parametrize(
    ("code", "attributes"),
    [
        (scaled, {"scale": lambda i: i / 4}),
        (by_table, {"table": lambda i: [i, 2]}),
        (by_table, {"table": lambda i: {0: i}}),
        (by_table, {"table": lambda i: np.arange(3) + i}),
        (
            lambda m, x: getattr(torch, m.kind)(m.linear(x)),
            {"kind": lambda i: ["relu", "tanh", "exp", "sin", "cos", "neg"][i]},
        ),
        (
            lambda m, x: m.act(m.linear(x)),
            {"act": lambda i: partial(F.leaky_relu, negative_slope=i)},
        ),
        (lambda m, x: m.linear(x) * m.config.scale, {"config": lambda i: SimpleNamespace(scale=i)}),
        (lambda m, x: m.linear(x) * m.random.random(), {"random": random.Random}),
        (lambda m, x: m.linear(x) * m.table["a"], {"table": lambda i: {"a": torch.ones(8)}}),
    ],
)
def test_a_layer_runs_where_it_reads_an_attribute_that_differs(
    code: Code, attributes: dict[str, Callable[[int], Any]]
) -> None:
    assert runs_of(stack(code, **attributes)) == DEPTH


class Derived(Layer):
    """Attributes that are computed from others."""

    extent: Any

    @property
    def scale(self) -> Any:
        return self.extent * 2

    def __getattr__(self, name: str) -> Any:
        return self.extent + 1 if name == "shift" else super().__getattr__(name)


def test_an_attribute_read_by_a_property_or_getattr_is_read() -> None:
    codes: list[Code] = [scaled, lambda m, x: m.linear(x) + m.shift]
    for code in codes:
        layers = [Derived(code, extent=number / 4) for number in range(DEPTH)]
        assert runs_of(Stack(layers).eval()) == DEPTH


class Pair(nn.Module):
    """Two layers inside of one."""

    def __init__(self, *scales: float) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Layer(scaled, scale=scale) for scale in scales])

    def forward(self, x: Tensor) -> Any:
        RUNS.append(self)
        return self.inner[1](self.inner[0](x))


def test_what_a_layer_inside_reads_is_read_by_the_outer_one_too() -> None:
    pairs = [(1, 1), (1, 1), (1, 2), (1, 1), (2, 1), (1, 2)]
    kinds = 3 + 2  # of pairs, and of the layers inside of them
    assert runs_of(Stack([Pair(*pair) for pair in pairs]).eval()) == kinds


class Wrapped(nn.Module):
    """Layers inside of one that reads a number of its own."""

    def __init__(self, *inner: nn.Module, scale: int = 1) -> None:
        super().__init__()
        self.inner, self.scale = nn.ModuleList(inner), scale

    def forward(self, x: Tensor) -> Any:
        RUNS.append(self)
        for layer in self.inner:
            x = layer(x) * self.scale
        return x


def test_a_layer_inside_repeats_where_the_outer_ones_run() -> None:
    twins = [Wrapped(*(Layer(linear) for _ in range(3))) for _ in range(DEPTH)]
    assert runs_of(Stack(twins).eval()) == 1 + 1
    differ = [Wrapped(Layer(linear), scale=number) for number in range(DEPTH)]
    assert runs_of(Stack(differ).eval()) == DEPTH + 2  # inside of the first two


def test_known_values_of_buffers_decide_what_runs() -> None:
    def by_buffer(layer: Any, x: Tensor) -> Any:
        return layer.linear(x) * 2 if layer.index.item() > 2 else layer.linear(x)

    assert runs_of(stack(by_buffer, index=lambda i: torch.tensor(i))) == DEPTH
    assert runs_of(stack(by_buffer, index=lambda i: torch.tensor(i // 3))) == 2


def test_an_attribute_may_be_set_before_every_call() -> None:
    def numbered(layer: Any, number: int, x: Tensor) -> Any:
        layer.scale = number / 4
        return layer(x)

    def masked(layer: Any, number: int, x: Tensor) -> Any:
        layer.scale = x * 2
        y = layer(x)
        layer.scale = x * 3
        return y

    assert runs_of(stack(scaled, numbered, scale=lambda i: 0.0)) == DEPTH
    assert runs_of(stack(scaled, masked, scale=lambda i: None)) == DEPTH


def test_methods_patched_on_some_layers_are_called() -> None:
    patched = stack(linear)
    layers: Any = patched.layers
    layers[2].forward = lambda x: x * 2
    layers[3].linear.forward = lambda x: x * 3
    assert runs_of(patched) == 2  # those that stay as they are, before and after

    def twice(layer: Any, x: Tensor) -> Any:
        return layer.other(layer.linear(x))

    all_patched = stack(twice, other=lambda i: nn.Linear(8, 8))
    for number, layer in enumerate(all_patched.layers):
        layer.linear.forward = partial(torch.mul, other=number)  # type: ignore[union-attr]
    assert runs_of(all_patched) == DEPTH


# -- weights ---------------------------------------------------------------------------------------


def test_tied_weights_are_those_of_each_layer() -> None:
    everywhere = stack(linear)
    for layer in everywhere.layers[1:]:
        layer.linear.weight = everywhere.layers[0].linear.weight  # type: ignore[union-attr]
    assert runs_of(everywhere) == 1

    pairs = stack(linear)
    for number in (1, 3, 5):
        pairs.layers[number].linear = pairs.layers[number - 1].linear
    runs_of(pairs)

    inside = stack(lambda m, x: m.other(m.linear(x)), other=lambda i: nn.Linear(8, 8))
    for layer in inside.layers[::2]:
        layer.other.weight = layer.linear.weight  # type: ignore[union-attr]
    assert runs_of(inside) == 2

    children = stack(lambda m, x: m.other(m.linear(x)), other=lambda i: nn.Linear(8, 8))
    for layer in children.layers[::2]:
        layer.other = layer.linear
    assert runs_of(children) == 2


def test_a_module_of_all_layers_counts_its_calls() -> None:
    shared = Layer(linear)
    assert runs_of(stack(lambda m, x: m.shared(m.linear(x)), shared=lambda i: shared)) == 2 * DEPTH


def test_a_layer_inside_may_have_been_called_from_elsewhere() -> None:
    def whole(module: Any, x: Tensor) -> Tensor:
        x = module.layers[3].inner(x)
        for layer in module.layers:
            x = layer(x)
        return x

    made = stack(lambda m, x: m.inner(m.linear(x)), whole=whole, inner=lambda i: Layer(linear))
    assert runs_of(made) < 2 * DEPTH


def test_a_layer_that_calls_a_module_of_the_outside_runs() -> None:
    made = stack(lambda m, x: m.linear(x) + m.outer[0](x), outer=lambda i: [])
    made.norm = Layer(linear)
    for layer in made.layers:
        layer.outer.append(made.norm)  # type: ignore[union-attr, operator]
    assert runs_of(made) == 2 * DEPTH


def test_the_second_call_of_a_layer_is_recorded_apart_from_its_first() -> None:
    def twice(module: Any, x: Tensor) -> Tensor:
        for layer in (*module.layers, *module.layers):
            x = layer(x)
        return x

    assert runs_of(stack(linear, whole=twice)) == 2


class Experts(nn.Module):
    """Experts with as many tokens as are known to be theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: Layer(linear) for name in "abcd"})

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(self)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts.values()):
            mine = (torch.arange(2) < number).nonzero().squeeze(-1)
            out.index_add_(0, mine, expert(x[mine]))
        return out


def test_experts_with_equally_many_tokens_are_alike() -> None:
    assert runs_of(Stack([Experts() for _ in range(DEPTH)]).eval()) == 1 + 3  # 0, 1 and 2 tokens


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "between",
    [
        lambda layer, i, x: layer(x) if i % 2 else layer(x[:1]).expand(2, 8),
        lambda layer, i, x: layer(x.t().contiguous().t() if i % 2 else x),
        lambda layer, i, x: layer(x.double() if i % 2 else x).float(),
        lambda layer, i, x: layer(x, x) if i % 2 else layer(x, other=x),
        lambda layer, i, x: layer(x, x if i % 2 else x.view(2, 8)),
        lambda layer, i, x: layer(x, x if i % 2 else x.detach()),
        lambda layer, i, x: layer(x, torch.arange(8) < i % 2),
        lambda layer, i, x: layer(x, layer.linear.weight if i % 2 else layer.linear.bias),
        lambda layer, i, x: layer(x, i % 2),
    ],
)
def test_arguments_that_look_otherwise_are_another_call(between: Code) -> None:
    def code(layer: Any, x: Tensor, other: Any = None) -> Tensor:
        y: Tensor = layer.linear(x.float())
        if other is x:
            return y + other
        return y if other is None else y * other[0] if isinstance(other, Tensor) else y * other

    assert 2 <= runs_of(stack(code, between)) <= 4


def test_an_argument_may_be_the_weight_of_some_layer() -> None:
    def whole(module: Any, x: Tensor) -> Tensor:
        for layer in module.layers:
            x = layer(x, module.layers[0].linear.weight)
        return x

    assert runs_of(stack(lambda m, x, weight: m.linear(x) @ weight, whole=whole)) == 2


def test_known_values_of_arguments_decide_what_runs() -> None:
    def code(layer: Any, x: Tensor, position: Tensor) -> Any:
        return layer.linear(x) * 2 if position.item() else layer.linear(x)

    def between(layer: Any, i: int, x: Tensor) -> Any:
        return layer(x, torch.ones(1, dtype=torch.long).mul(i // 3))

    assert runs_of(stack(code, between)) == 2


@dataclass
class Cache:
    """An object that a layer is given."""

    value: Any


def test_containers_and_objects_that_a_call_writes_are_written() -> None:
    def write(layer: Any, x: Tensor, place: Any) -> Any:
        y = layer.linear(x)
        if isinstance(place, Cache):
            place.value = y * 2
        else:
            place[0] = y * 2
        return y

    for made in (Cache, lambda x: [x], lambda x: {0: x}):

        def whole(module: Any, x: Tensor, made: Any = made) -> Tensor:
            place = made(x)
            for layer in module.layers:
                x = layer(x, place)
                x = x + (place.value if isinstance(place, Cache) else place[0])
            return x

        assert runs_of(stack(write, whole=whole)) == DEPTH


def test_under_vmap_every_layer_runs() -> None:
    assert runs_of(stack(linear, lambda layer, i, x: torch.vmap(layer)(x))) == DEPTH


# -- what a call does besides ----------------------------------------------------------------------


def count(layer: Any, x: Tensor) -> Any:
    layer.counter += 1
    return layer.linear(x) * layer.counter


def remember(layer: Any, x: Tensor) -> Any:
    layer.seen.append(x)
    return layer.linear(x)


def keep(layer: Any, x: Tensor) -> Any:
    layer.box.deep["a"]["b"] = layer.linear(x)
    return layer.box.deep["a"]["b"] * 2


def fill(layer: Any, x: Tensor) -> Any:
    if not hasattr(layer, "table"):
        layer.table = x.new_ones(8)
    return layer.linear(x) * layer.table


def write_input(layer: Any, x: Tensor) -> Any:
    x.add_(1)
    return layer.linear(x)


def write_bias(layer: Any, x: Tensor) -> Any:
    with torch.no_grad():
        layer.linear.bias.mul_(0.9)
    return layer.linear(x)


@pytest.mark.parametrize("code", [count, remember, keep, fill, write_input, write_bias])
def test_a_call_that_changes_something_runs(code: Code) -> None:
    box = SimpleNamespace(deep={"a": {}})
    made = stack(code, counter=lambda i: i % 2, seen=lambda i: [], box=lambda i: box)
    assert runs_of(made) == DEPTH


@pytest.mark.parametrize(
    "draw",
    [lambda: random.random(), lambda: np.random.rand(), lambda: torch.rand(1, device="cpu").item()],
)
def test_a_call_that_draws_a_number_runs(draw: Callable[[], float]) -> None:
    def dropped(layer: Any, x: Tensor) -> Any:
        return layer.linear(x) if draw() < 0.5 else x + 1

    assert runs_of(stack(dropped)) == DEPTH


def test_running_statistics_are_written_in_every_layer() -> None:
    def whole(module: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = x
            for layer in module.layers:
                y = layer(y)
        return x * y

    made = stack(lambda m, x: m.norm(m.linear(x)), whole=whole, norm=lambda i: nn.BatchNorm1d(8))
    with mock.patch.object(Beginning, "unchanged", autospec=True, return_value=False) as recorded:
        assert runs_of(made.train(), "training") == DEPTH
    assert recorded.call_count == 1  # which shows that all of them write
    assert runs_of(made.eval()) == 1


def test_a_branch_on_an_unknown_value_is_taken_in_every_layer() -> None:
    def branching(layer: Any, x: Tensor) -> Any:
        return layer.linear(x) if x.sum() > 0 else x + 1

    assert runs_of(stack(branching)) == DEPTH


def test_assumptions_are_made_in_every_layer() -> None:
    def routed(layer: Any, x: Tensor) -> Any:
        return layer.linear(x) * x.topk(2).indices.sum().item()

    assert runs_of(stack(routed)) == DEPTH, "each layer computes its own from the real data"
    assert runs_of(stack(routed).to("meta")) == 1


def test_an_exception_comes_from_every_layer() -> None:
    def failing(layer: Any, x: Tensor) -> Any:
        y = layer.linear(x)
        if layer.bad:
            raise ValueError("bad")
        return y

    def caught(layer: Any, i: int, x: Tensor) -> Any:
        with contextlib.suppress(ValueError):
            return layer(x)
        return x + 1

    assert runs_of(stack(failing, caught, bad=lambda i: True)) == DEPTH
    assert runs_of(stack(failing, caught, bad=lambda i: i % 2 == 0)) == 3 + 1


# -- hooks -----------------------------------------------------------------------------------------


def test_hooks_of_some_layers_are_called() -> None:
    made = stack(linear)
    layers: Any = made.layers
    layers[3].register_forward_hook(lambda module, args, output: output * 2)
    layers[4].linear.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    assert runs_of(made) == 1 + 2


@pytest.mark.parametrize("where", ["layer", "inner", "all modules"])
def test_hooks_set_while_it_runs_are_called(where: str) -> None:
    def whole(module: Any, x: Tensor) -> Any:
        seen: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            if isinstance(module, Layer) or where == "inner":
                seen.append(output)

        if where == "all modules":
            handles = [nn.modules.module.register_module_forward_hook(hook)]
        else:
            watched = [layer.linear if where == "inner" else layer for layer in module.layers]
            handles = [part.register_forward_hook(hook) for part in watched]
        for layer in module.layers:
            x = layer(x)
        for handle in handles:
            handle.remove()
        return x + torch.stack(seen).sum(0)

    assert runs_of(stack(linear, whole=whole)) == DEPTH


# -- what it returns -------------------------------------------------------------------------------


def test_results_may_be_nested_and_be_inputs() -> None:
    def code(layer: Any, x: Tensor) -> Any:
        return {"y": (layer.linear(x), None), "x": x, "times": 3}

    def between(layer: Any, i: int, x: Tensor) -> Any:
        found = layer(x)
        assert found["x"] is x
        return found["y"][0] * found["times"]

    assert runs_of(stack(code, between)) == 1


@pytest.mark.parametrize(
    ("code", "between"),
    [
        (lambda m, x: (m.linear(x), x.t()), lambda m, i, x: (p := m(x))[0] + p[1].t()),
        (lambda m, x: Cache(m.linear(x)), lambda m, i, x: m(x).value),
    ],
)
def test_a_call_that_returns_views_of_inputs_or_objects_runs(code: Code, between: Code) -> None:
    assert runs_of(stack(code, between)) == DEPTH


def test_a_call_that_returns_what_was_there_runs() -> None:
    def whole(module: Any, x: Tensor) -> Any:
        for layer in module.layers:
            layer.kept = x * 2
            y, kept = layer(x)
            x = y + kept
        return x

    assert runs_of(stack(lambda m, x: (m.linear(x), m.kept), whole=whole)) == DEPTH


def test_results_that_are_one_or_share_memory_still_do() -> None:
    def between(layer: Any, i: int, x: Tensor) -> Any:
        one, same, view = layer(x)
        assert one is same
        one.add_(1)
        return one * same * view

    def code(layer: Any, x: Tensor) -> Any:
        y = layer.linear(x)
        return y, y, y.view(2, 8)

    assert runs_of(stack(code, between)) == 1


def test_results_may_be_changed_in_place() -> None:
    def between(layer: Any, i: int, x: Tensor) -> Any:
        y, positions = layer(x)
        positions += 1
        y.unsqueeze_(0)
        return y[0] * (2 if positions[0].item() == 1 else 3)

    assert runs_of(stack(lambda m, x: (m.linear(x) * 1, torch.arange(4)), between)) == 1


def test_results_have_the_offset_of_what_they_are_cut_from() -> None:
    def between(layer: Any, i: int, x: Tensor) -> Any:
        y = layer(x)
        assert y.storage_offset() == 8
        return y.as_strided((2, 8), (16, 1))

    assert runs_of(stack(lambda m, x: torch.cat([m.linear(x), x], 1)[:, 8:], between)) == 2


class Same(nn.Module):
    """Does nothing."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(self)
        return x


def test_a_module_that_does_nothing_has_no_ops() -> None:
    assert runs_of(stack(lambda m, x: m.same(m.linear(m.same(x))), same=lambda i: Same())) == 3


# -- what stands outside ---------------------------------------------------------------------------

KNOWN_TABLE = torch.arange(8.0)
UNKNOWN_TABLE = torch.ones(8, device="meta")


def test_a_tensor_of_nobody_is_the_same_for_all() -> None:
    assert runs_of(stack(lambda m, x: m.linear(x) * UNKNOWN_TABLE)) <= 2
    assert runs_of(stack(lambda m, x: m.linear(x) * KNOWN_TABLE.to(x.device))) <= 2


def test_a_tensor_made_from_numbers_is_another_one_in_every_call() -> None:
    assert runs_of(stack(lambda m, x: m.linear(x) * torch.tensor([1.0, 2.0] * 4))) == DEPTH


def test_a_tensor_that_was_computed_elsewhere_is_read_where_it_is() -> None:
    def whole(module: Any, x: Tensor) -> Any:
        for number, layer in enumerate(module.layers):
            if number % 2 == 0:
                box.value = x * 2
            x = layer(x)
        return x

    box = SimpleNamespace(value=None)
    assert runs_of(stack(lambda m, x: m.linear(x) * box.value, whole=whole)) == DEPTH


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def attention(layer: Any, x: Tensor) -> Tensor:
    y = layer.linear(x)[None, None]
    return F.scaled_dot_product_attention(y, y, y)[0, 0]


@pytest.mark.parametrize(
    ("code", "mode"),
    [
        (linear, lambda i: torch.autocast("cuda", torch.bfloat16, enabled=i % 2 == 0)),
        (
            lambda m, x: m.linear(x) + torch.ones(8),
            lambda i: default_dtype((torch.float32, torch.float64)[i % 2]),
        ),
        (attention, lambda i: sdpa_kernel((SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)[i % 2])),
    ],
)
def test_layers_under_other_modes_are_not_alike(code: Code, mode: Callable[[int], Any]) -> None:
    def between(layer: Any, i: int, x: Tensor) -> Any:
        with mode(i):
            return layer(x).float()

    assert runs_of(stack(code, between)) in (2, 3)


def test_under_autocast_a_tied_weight_is_cast_once() -> None:
    def whole(module: Any, x: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            for layer in module.layers:
                x = layer(x)
        return x

    made = stack(linear, whole=whole)
    for number in (2, 4):
        made.layers[number].linear.weight = made.layers[0].linear.weight  # type: ignore[union-attr]
    assert runs_of(made) < DEPTH


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_without_gradients_repeat_and_with_them_run_again(reentrant: bool) -> None:
    def between(layer: Any, i: int, x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=reentrant)

    runs = runs_of(stack(linear, between).train(), "training")
    assert runs == DEPTH + (1 if reentrant else DEPTH)


def test_without_gradients_inside_of_training_layers_repeat() -> None:
    def whole(module: Any, x: Tensor) -> Any:
        with torch.no_grad():
            for layer in module.layers[:-1]:
                x = layer(x)
        return module.layers[-1](x)

    assert runs_of(stack(linear, whole=whole), "training") == 3


def test_in_a_step_of_the_users_every_op_keeps_its_part() -> None:
    def step(module: Any, x: Tensor) -> None:
        with torch.no_grad():
            target = module.layers[1](x)
        (module.layers[0](x) - target).sum().backward()
        with torch.no_grad():
            after = module.layers[2](x)
            after.mul(2)

    def in_backward(module: Any, x: Tensor) -> None:
        with torch.no_grad():
            x = module.layers[1](x)
        y = module.layers[0](x)
        y.register_hook(torch.no_grad()(lambda gradient: module.layers[2](gradient)))
        y.sum().backward()

    for written in (step, in_backward):
        found, flat = (
            trace_step(written, (stack(linear), torch.randn(2, 8)), {}, Options(repeats=repeats))
            for repeats in (True, False)
        )
        assert found.expand() == flat


def test_compiled_layers_and_functions_are_those_that_they_compile() -> None:
    made = Stack([torch.compile(Layer(linear)) for _ in range(DEPTH)]).eval()
    assert runs_of(made) <= DEPTH


@pytest.mark.parametrize("kind", ["Mamba", "Llama"])
def test_loops_and_calls_repeat_too_where_a_prompt_is_run_before_the_step(
    kind: str, tmp_path: Path
) -> None:
    shape = config(f"{kind}Config", **{**TEXT, "num_hidden_layers": DEPTH})
    shape.architectures = [f"{kind}ForCausalLM"]
    shape.to_json_file(tmp_path / "config.json")
    target = load_target(str(tmp_path / "config.json"), Request(batch=2, seq=9))
    found, flat = (
        trace_phases(target.module, target.inputs, ("decode",), Options(repeats=repeats))["decode"]
        for repeats in (True, False)
    )
    assert len(found.ops) < len(flat.ops)
    assert found.expand() == flat


class OwnNorm(nn.LayerNorm):
    """Has no line of the user's inside."""


def test_an_op_in_a_class_of_torch_has_the_line_that_called_it() -> None:
    def code(layer: Any, x: Tensor) -> Any:
        y = layer.norms[0](x)
        z = layer.norms[1](y)
        return layer.linear(z)

    def norms(i: int) -> nn.ModuleList:
        return nn.ModuleList([OwnNorm(8), OwnNorm(8)])

    found, flat, _ = graphs(stack(code, norms=norms))
    assert found == flat
    lines = {op.source for op in found.ops if "norms" in op.module}
    assert len(lines) == 2


def test_a_call_holds_nothing_that_is_used_after_it() -> None:
    layers = [Layer(TRAITS[kind], inner=Layer(scaled, scale=1)) for kind in ("pair", "frozen")]
    made = Stack(layers).eval()  # the first one's input is gone when its inner call has ended
    found, flat, _ = graphs(made)
    assert found == flat


# -- any of these together -------------------------------------------------------------------------

TRAITS: dict[str, Code] = {
    "linear": linear,
    "scaled": scaled,
    "count": count,
    "remember": remember,
    "fill": fill,
    "write": write_bias,
    "pair": lambda m, x: m.inner(m.linear(x)) + x,
    "outer": lambda m, x: m.linear(x) + m.shared(x),
    "routed": lambda m, x: m.linear(x) * x.topk(2).indices.sum(),
    "known": lambda m, x: m.linear(x) * (torch.arange(8) + int(m.scale)),
    "drawn": lambda m, x: m.linear(x) if random.random() < 0.5 else m.linear(x + 1),
    "frozen": lambda m, x: x + torch.no_grad()(m.inner)(x),
    "recomputed": lambda m, x: checkpoint(m.inner, x, use_reentrant=False) + x,
    "view": lambda m, x: m.linear(x).t().contiguous().t(),
    "branch": lambda m, x: m.linear(x) if x.sum() > 0 else m.linear(x) * 2,
}


def any_stack(plan: list[tuple[str, int]], tied: list[int], hooked: int, again: bool) -> Stack:
    """A stack of layers with these traits and scales."""
    shared = Layer(linear)
    layers: list[Any] = [
        Layer(TRAITS[kind], scale=scale, counter=scale, seen=[], shared=shared, inner=Layer(scaled))
        for kind, scale in plan
    ]
    for layer, (_, scale) in zip(layers, plan, strict=True):
        layer.inner.scale = scale
    for number in tied:
        if number < len(layers):
            layers[number].linear.weight = layers[0].linear.weight
    if hooked < len(layers):
        layers[hooked].register_forward_hook(lambda module, args, output: output * 2)

    def whole(module: Any, x: Tensor) -> Tensor:
        for layer in (*module.layers, *(module.layers[:2] if again else ())):
            x = layer(x) + x
        return x

    return Stack(layers, whole=whole)


PLANS = st.lists(
    st.tuples(st.sampled_from(sorted(TRAITS)), st.integers(1, 2)), min_size=1, max_size=3
)


@settings(max_examples=12, deadline=None)
@given(
    plan=PLANS,
    times=st.integers(1, 4),
    tied=st.lists(st.integers(1, 8), max_size=2),
    hooked=st.integers(0, 12),
    again=st.booleans(),
    train=st.booleans(),
)
def test_any_stack_has_the_graph_of_what_it_runs(
    plan: list[tuple[str, int]], times: int, tied: list[int], hooked: int, again: bool, train: bool
) -> None:
    made = any_stack(plan * times, tied, hooked, again).train(train)
    found, flat, _ = graphs(made, "training" if train else "forward")
    assert without_empty_holds(found) == without_empty_holds(flat)
