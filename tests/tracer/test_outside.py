"""State outside of modules that layers read or change: layers that it tells apart are all run."""

import contextvars
import gc
import itertools
import logging
import random
import sys
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.inputs.calls import call_inputs
from rooftrace.tracer.phases.running import trace_phases
from rooftrace.tracer.recording.running import Runner
from rooftrace.tracer.request import Options

LAYERS = 7


class Log(logging.Logger):
    """What ran, and what it drew.  What a logger keeps is no state of the code that logs."""

    def __init__(self) -> None:
        super().__init__("runs")
        self.modules: list[nn.Module] = []
        self.numbers: list[int] = []

    def append(self, module: nn.Module) -> None:
        self.modules.append(module)


LOG = Log()
COUNTER = {"calls": 0}
QUEUE: deque[int] = deque()
SETTINGS = SimpleNamespace(deep=SimpleNamespace(calls=0))
CONTEXT = contextvars.ContextVar("calls", default=0)
TICKS = itertools.count()
LOTTERY = random.Random(0)
MODULE = ModuleType("settings_of_a_project")
MODULE.calls = 0  # type: ignore[attr-defined]


class Tally:
    """A callable with a number of its own, and one that all share."""

    shared = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


TALLY = Tally()


def in_a_dictionary() -> int:
    COUNTER["calls"] += 1
    return COUNTER["calls"]


def in_a_queue() -> int:
    QUEUE.append(1)
    return len(QUEUE)


def in_an_object() -> int:
    SETTINGS.deep.calls += 1
    return SETTINGS.deep.calls


def in_a_class() -> int:
    Tally.shared += 1
    return Tally.shared


def in_a_callable() -> int:
    return TALLY()


def in_a_module() -> int:
    MODULE.calls += 1
    return MODULE.calls


def in_a_context() -> int:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def in_an_iterator() -> int:
    return next(TICKS)


def in_a_lottery() -> int:
    return LOTTERY.randrange(1000)


def in_a_default(calls: list[int] = []) -> int:  # noqa: B006  what is tested
    calls.append(1)
    return len(calls)


def in_an_attribute() -> int:
    in_an_attribute.calls += 1  # type: ignore[attr-defined]
    return in_an_attribute.calls  # type: ignore[attr-defined, no-any-return]


in_an_attribute.calls = 0  # type: ignore[attr-defined]


def nonlocally() -> Callable[[], int]:
    calls = 0

    def tick() -> int:
        nonlocal calls
        calls += 1
        return calls

    return tick


class Layer(nn.Module):
    """Two products in every third call, else one; `tick` counts the calls."""

    def __init__(self, tick: Callable[[], int]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.tick = tick

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return torch.relu(self.second(x)) if self.tick() % 3 == 0 else x


def announced() -> nn.Module:
    """Layers that know their number from a variable that the code around them changes."""
    number = 0

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return torch.relu(self.second(x)) if number == 4 else x

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Inner() for _ in range(LAYERS))

        def forward(self, x: Tensor) -> Tensor:
            nonlocal number
            for number, layer in enumerate(self.layers):  # noqa: B007  the layer reads it
                x = layer(x)
            return x

    return Outer().eval()


def flops(graph: rt.types.OpGraph) -> int:
    return rt.plan(graph, "eager").total.flops(("matmul",))


def counted(module: nn.Module, x: Tensor) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(x)
    return counter.get_total_flops()


TICKERS = (
    in_a_dictionary,
    in_a_queue,
    in_an_object,
    in_a_class,
    in_a_callable,
    in_a_module,
    in_a_context,
    in_a_default,
    in_an_attribute,
    nonlocally(),
)


@pytest.mark.parametrize("tick", TICKERS, ids=lambda tick: tick.__name__)
def test_layers_that_count_their_calls_outside_of_modules_all_run(tick: Callable[[], int]) -> None:
    while tick() % 3:  # begin where a count of all calls so far would
        pass
    model = nn.Sequential(*(Layer(tick) for _ in range(LAYERS))).eval()
    graph = rt.trace(model, torch.zeros(2, 8))
    per_product = 2 * 2 * 8 * 8
    assert flops(graph) == (LAYERS + LAYERS // 3) * per_product


@pytest.mark.parametrize("tick", [in_an_iterator, in_a_lottery], ids=lambda tick: tick.__name__)
def test_layers_that_draw_from_outside_all_run(tick: Callable[[], int]) -> None:
    LOG.numbers.clear()

    def noted() -> int:
        LOG.numbers.append(tick())  # a list in a closure would afterwards be what it was
        return LOG.numbers[-1]

    model = nn.Sequential(*(Layer(noted) for _ in range(LAYERS))).eval()
    graph = rt.trace(model, torch.zeros(2, 8))
    assert len(LOG.numbers) == LAYERS
    products = LAYERS + sum(number % 3 == 0 for number in LOG.numbers)
    assert flops(graph) == products * 2 * 2 * 8 * 8


@pytest.mark.slow
def test_a_variable_that_the_code_around_layers_changes_tells_them_apart() -> None:
    model, x = announced(), torch.zeros(2, 8)
    assert flops(rt.trace(model, x)) == counted(model, x)


def test_layers_that_read_what_does_not_change_run_once() -> None:
    LOG.modules.clear()
    sizes: dict[str, int] = {"wide": 8}

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            LOG.append(self)
            y: Tensor = self.linear(x)[:, : sizes["wide"]] + COUNTER["calls"]
            return y

    model = nn.Sequential(*(Reader() for _ in range(LAYERS))).eval()
    graph = rt.trace(model, torch.zeros(2, 8))
    assert len(LOG.modules) == 2  # the first of all knows the values of its input
    assert flops(graph) == counted(model, torch.zeros(2, 8))


def test_a_profiler_of_the_user_is_left_alone() -> None:
    events = 0

    def profiler(*arguments: object) -> None:
        nonlocal events
        events += 1

    model = nn.Sequential(*(Layer(in_a_dictionary) for _ in range(LAYERS))).eval()
    sys.setprofile(profiler)
    try:
        rt.trace(model, torch.zeros(2, 8))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert events
    rt.trace(model, torch.zeros(2, 8))
    assert sys.getprofile() is None


@torch.library.custom_op("layers::turn_", mutates_args={"x"})
def turn_(x: Tensor) -> None:
    x.neg_()


@turn_.register_fake
def _(x: Tensor) -> None:
    COUNTER["calls"] += 1


def test_what_an_op_of_the_user_changes_outside_is_seen() -> None:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            LOG.append(self)
            y: Tensor = self.linear(x)
            turn_(y)
            return y

    LOG.modules.clear()
    before = COUNTER["calls"]
    rt.trace(nn.Sequential(*(Turning() for _ in range(LAYERS))).eval(), torch.zeros(2, 8))
    assert len(LOG.modules) == COUNTER["calls"] - before == LAYERS


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it stays on: see `Unwatched`")
def test_functions_inside_of_an_op_of_torch_are_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_layers, in_ops, run = set[tuple[bool, bool]](), set[bool](), Runner.run

    def noted(runner: Runner, *arguments: Any) -> Any:
        in_ops.add(sys.getprofile() is not None)
        return run(runner, *arguments)

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            before = sys.getprofile() is not None
            y: Tensor = self.linear(x)
            with pytest.raises(RuntimeError):
                y @ x  # an op that fails
            in_layers.add((before, sys.getprofile() is not None))
            return y

    monkeypatch.setattr(Runner, "run", noted)
    rt.trace(nn.Sequential(*(Watching() for _ in range(LAYERS))).eval(), torch.zeros(2, 8))
    assert (True, True) in in_layers
    assert in_layers <= {(True, True), (False, False)}  # the second are of layers past all attempts
    assert in_ops == {False}


def test_what_the_garbage_collector_calls_is_no_code_of_a_layer() -> None:
    def collected(phase: str, info: object) -> None:
        COUNTER["calls"] += 1

    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            LOG.append(self)
            [[] for _ in range(5_000)]
            y: Tensor = self.linear(x)
            return y

    LOG.modules.clear()
    model = nn.Sequential(*(Wasteful() for _ in range(LAYERS))).eval()
    inputs = call_inputs(model, (torch.zeros(2, 8),), {})
    gc.callbacks.append(collected)
    try:
        trace_phases(model, inputs, ("forward",))
    finally:
        gc.callbacks.remove(collected)
    assert len(LOG.modules) == 2  # the first of all knows the values of its input


class Attending(nn.Module):
    """A layer with a place in a cache of transformers; `use` is what else its code does there."""

    def __init__(self, number: int, use: Callable[[Any, Any, Tensor], Any]) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer_idx, self.use = number, use

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        LOG.append(self)
        keys, values = self.keys(x)[:, None], self.values(x)[:, None]
        keys, values = self.use(self, cache, keys) or cache.update(keys, values, self.layer_idx)
        read: Tensor = F.scaled_dot_product_attention(x[:, None], keys, values)
        return torch.relu(x + read[:, 0])


class Attention(nn.Module):
    """Layers with a cache that is there before the first of them."""

    def __init__(self, use: Callable[[Any, Any, Tensor], Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Attending(number, use) for number in range(LAYERS))

    def forward(self, ids: Tensor, memory: Any = None) -> Any:
        library = pytest.importorskip("transformers.cache_utils")
        if memory is None:
            memory = library.DynamicCache()
            memory.layers = [library.DynamicLayer() for _ in range(LAYERS)]
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, memory)
        return {"x": x, "memory": memory}


def nothing_else(layer: Any, cache: Any, x: Tensor) -> None:
    pass


def its_parity(layer: Any, cache: Any, x: Tensor) -> None:
    layer.keys(x) if layer.layer_idx % 2 else None


def its_number_in_a_variable(layer: Any, cache: Any, x: Tensor) -> Any:
    number = layer.layer_idx
    part = x[:, :, : 1 + number % 2]
    return cache.update(part, part, number)


def its_number_for_another_call(layer: Any, cache: Any, x: Tensor) -> None:
    parity(layer, x, layer.layer_idx)


def parity(layer: Any, x: Tensor, number: int) -> None:
    layer.keys(x) if number % 2 else None


def another_layers_place(layer: Any, cache: Any, x: Tensor) -> Any:
    return cache.update(x, x, 0)


def how_long_the_first_is(layer: Any, cache: Any, x: Tensor) -> None:
    layer.keys(x) if cache.get_seq_length(0) else None


def how_many_are_filled(layer: Any, cache: Any, x: Tensor) -> None:
    layer.keys(x) if sum(place.is_initialized for place in cache.layers) % 2 else None


USES = (
    its_parity,
    its_number_in_a_variable,
    its_number_for_another_call,
    another_layers_place,
    how_long_the_first_is,
    how_many_are_filled,
)


def with_caches(use: Callable[..., Any], phase: str) -> tuple[set[nn.Module], OpGraph, OpGraph]:
    """Layers that ran in the trace, its graph written out, and that of layers that all run."""
    model = Attention(use).eval()
    inputs = call_inputs(model, (torch.ones(2, 3, dtype=torch.long),), {})
    every = trace_phases(model, inputs, (phase,), Options(repeats=False))[phase]
    LOG.modules.clear()
    graph = trace_phases(model, inputs, (phase,))[phase].expand()
    ran, graphs = set(LOG.modules), [graph, every]
    if phase == "training":  # what is held there is that of one layer for all
        ops = ([structs.replace(op, holds=()) for op in graph.ops] for graph in graphs)
        graphs = [graph.replace(ops=tuple(of)) for graph, of in zip(graphs, ops, strict=True)]
    return ran, graphs[0], graphs[1]


@pytest.mark.parametrize("phase", ["forward", "decode", "training"])
def test_a_layer_passes_its_number_to_a_cache_and_does_nothing_else_with_it(phase: str) -> None:
    ran, graph, every = with_caches(nothing_else, phase)
    assert len(ran) <= 3  # the first of all knows the values of its input
    assert graph == every


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_layers_that_use_their_number_or_a_cache_otherwise_all_run(use: Callable[..., Any]) -> None:
    ran, graph, every = with_caches(use, "forward")
    assert len(ran) == LAYERS
    assert graph == every
