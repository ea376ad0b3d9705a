"""Where torch.compile ends a graph, and which ops of a trace run in which one.  Torch is asked."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from rooftrace.studies.breaks import placing
from rooftrace.studies.breaks.functions import (
    UNKNOWN,
    DynamoFunctions,
    guard_words,
    hints_of,
    plain_reason,
)
from rooftrace.studies.breaks.placing import PlacedStep, placed
from rooftrace.studies.breaks.running import traced_with_dynamo
from rooftrace.tracer.job import Job
from rooftrace.tracer.values import tensors_in
from tests.conftest import mostly_heavy
from tests.releases import needs_torch
from tests.tracer import broken_models as models

pytestmark = needs_torch(2, 11, "the Dynamo whose inner parts are read")


@pytest.fixture(autouse=True)
def compiled_code_of_this_test_alone() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def x() -> Tensor:
    return torch.randn(4, models.WIDTH)


def run_of(module: nn.Module, *args: Any, phase: str = "forward") -> tuple[OpGraph, Any]:
    return traced_with_dynamo(Job.of(rt.graph_breaks, module, args, {}, phase=phase))


KINDS = {kind.__name__: kind for kind in (*models.BREAKING, models.Whole)}
MODULES = {
    **KINDS,
    "Stack of Printing": lambda: models.Stack(models.Printing, 6),
    "Stack of Item": lambda: models.Stack(models.Item, 3),
    "Numbers": lambda: models.Numbers(12),
}


@cache
def ran(name: str) -> tuple[OpGraph, Any]:
    return run_of(MODULES[name](), x())


def explained(module: nn.Module, *args: Any) -> tuple[int, int]:
    """By torch itself, on numbers: graphs, and counted breaks."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        told = torch._dynamo.explain(module.eval())(*args)
    counted = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    return told.graph_count, counted


@dataclass(frozen=True)
class Compiled:
    """Graphs and breaks of torch.compile, and the FLOPs of each call of a graph, on numbers."""

    graphs: int
    breaks: int
    flops: list[int]


@cache
def compiled(name: str) -> Compiled:
    flops: list[int] = []
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = graph(*inputs)
            flops.append(counter.get_total_flops())
            return result

        graphs.append(graph)
        return run

    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        torch.compile(MODULES[name]().eval(), backend=backend)(x())
    return Compiled(len(graphs), sum(counters["graph_break"].values()), flops)


@pytest.mark.parametrize("name", KINDS, scope="module")
def test_graphs_and_breaks_are_those_that_torch_compiles(name: str) -> None:
    _, run = ran(name)
    told = compiled(name)
    assert run.graphs == told.graphs
    assert run.graph_breaks == told.breaks
    assert not run.real
    assert bool(run.causes) == (name != "Whole")


@pytest.mark.parametrize(
    "kind", mostly_heavy([models.Printing, models.Asked, models.Disabled], [models.Asked])
)
def test_a_break_in_a_layer_is_one_cause_as_often_as_the_layer_is_called(
    kind: type[models.Layer],
) -> None:
    _, run = run_of(models.Stack(kind, 5), x())
    (cause,) = run.causes
    assert cause.times == 5
    assert cause.kind == placing.BREAK
    assert cause.module == "layers.*"
    assert cause.source.startswith("tests/tracer/broken_models.py:")
    assert run.graphs == explained(models.Stack(kind, 5), x())[0]


def test_a_line_that_gives_no_reason_has_that_of_what_it_calls() -> None:
    _, run = ran("Property")
    (cause,) = run.causes
    assert "print" in cause.reason
    first = models.Property.doubled.fget.__code__.co_firstlineno
    assert cause.source == f"tests/tracer/broken_models.py:{first + 2}"


@pytest.mark.slow
@pytest.mark.parametrize("family", mostly_heavy(["GPT2", "Mixtral"], ["Mixtral"]))
def test_huggingface_models_are_as_torch_says(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        "GPT2": {"n_layer": 1, "n_embd": 16, "n_head": 2},
        "Mixtral": {
            "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
            "num_hidden_layers": 1, "num_key_value_heads": 2, "num_local_experts": 2,
        },
    }[family]  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**settings, vocab_size=32)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    model, ids = getattr(transformers, kind)(config), torch.arange(6)[None]
    _, run = run_of(model, ids)
    assert (run.graphs, run.graph_breaks) == explained(model, ids)
    assert run.calls == 1


# -- which op runs where ---------------------------------------------------------------------------


def flops_of_stretches(placement: PlacedStep, *parts: str) -> list[int]:
    sums: Counter[int] = Counter()
    for op, place in zip(placement.flat.ops, placement.stretch_of, strict=True):
        if op.part in parts:
            assert place is not None
            sums[place] += op.flops_torch or 0
    return [sums[place] for place, stretch in enumerate(placement.stretches) if not stretch.eager]


@pytest.mark.parametrize("name", MODULES, scope="module")
def test_flops_of_a_stretch_are_those_of_its_graph(name: str) -> None:
    placement = placed(*ran(name))
    assert placement.unplaced == 0
    assert flops_of_stretches(placement, "forward") == compiled(name).flops


def test_every_forward_op_is_in_one_stretch_and_stretches_follow_one_another() -> None:
    graph, run = run_of(models.Stack(models.Disabled, 4), x())
    placement = placed(graph, run)
    order = list(placement.stretch_of)
    assert None not in order
    assert order == sorted(order)
    assert set(order) == set(range(len(run.stretches)))
    eager = [i for i, stretch in enumerate(run.stretches) if stretch.eager]
    assert len(eager) >= 4
    sines = [placement.stretch_of[op.id] for op in placement.flat.ops if op.name == "aten.sin"]
    assert set(sines) <= set(eager)
    assert len(sines) == 4


def test_backward_is_cut_where_forward_is() -> None:
    module = models.Stack(models.Printing, 3)
    graph, run = run_of(module, x(), phase="training")
    placement = placed(graph, run)
    forward = flops_of_stretches(placement, "forward")
    # The gradient of a product is two of its size; the input of the first product needs none.
    backward = [2 * flops for flops in forward]
    backward[0] //= 2
    assert flops_of_stretches(placement, "backward") == backward
    assert placement.shared == 0
    marked, whole = placement.marked(
        placing.without(run.stretches), placing.without(run.stretches, [0])
    )
    assert not any("graph_break" in op.target for op in whole.ops)
    cuts = Counter(op.part for op in marked.ops if "graph_break" in op.target)
    assert cuts["forward"] and cuts["backward"]


def test_equal_layers_stay_one_where_all_are_cut_alike() -> None:
    graph, run = ran("Stack of Printing")
    placement = placed(graph, run)
    (short,) = placement.marked(placing.without(run.stretches))
    (flat,) = placement.marked(placing.without(run.stretches), folded=False)
    assert short.repeats
    assert not flat.repeats
    targets = [op.target for op in short.expand().ops]
    assert targets == [op.target for op in flat.ops]
    for execution in ("compiled", "efficient"):
        one, other = (rt.estimate(graph, "h200-sxm", execution) for graph in (short, flat))
        assert one.t_est == pytest.approx(other.t_est, rel=1e-9)
        assert (one.kernels, one.bytes_hbm) == (other.kernels, other.bytes_hbm)


def test_an_op_that_no_line_places_is_counted() -> None:
    graph = rt.trace(models.Printing(), x())
    stretches = (placing.Stretch(0, -1), placing.Stretch(1, 0))
    cause = placing.Cause(placing.BREAK, "why", "a.py:1")
    some = [op for op in graph.ops if op.kind == "kernel"]
    first, last = some[0], some[-1]
    ops = (
        placing.RanOp(first.name, first.source, 0),
        placing.RanOp(last.name, last.source, 1),
    )
    run = placing.DynamoRun(causes=(cause,), stretches=stretches, ops=ops, graphs=2, graph_breaks=1)
    placement = placed(graph, run)
    (between,) = [op for op in some if op.source not in (first.source, last.source)]
    assert placement.unplaced == 1
    assert placement.stretch_of[between.id] == 0


# -- removing a cause ------------------------------------------------------------------------------


def test_without_a_cause_what_it_parts_is_one_graph() -> None:
    eager, S = -1, placing.Stretch
    stretches = (S(0, -1), S(eager, 0), S(1, 0), S(2, 1))
    assert placing.without(stretches).stretches == stretches
    assert placing.without(stretches, [0]) == placing.Joined((S(0, -1), S(2, 1)), (0, 0, 0, 1))
    assert placing.without(stretches, [1]).place_of == (0, 1, 2, 2)
    assert placing.without(stretches, [0, 1]).place_of == (0, 0, 0, 0)


def test_behind_code_in_python_a_graph_stays_one_of_its_own() -> None:
    eager, S = -1, placing.Stretch
    joined = placing.without((S(eager, 0), S(3, 1), S(4, 0)), [1])
    assert joined.stretches == (S(eager, 0), S(3, 0), S(4, 0))


def test_what_is_compiled_too_often_goes_with_the_break_that_parts_it() -> None:
    _, run = ran("Numbers")
    kinds = [cause.kind for cause in run.causes]
    assert sorted(kinds) == [placing.BREAK, placing.LIMIT]
    asked, limit = kinds.index(placing.BREAK), kinds.index(placing.LIMIT)
    assert run.causes[limit].times == 12 - 8  # torch._dynamo.config.recompile_limit
    assert run.causes[asked].times == 8
    left = placing.without(run.stretches, [asked]).stretches
    assert not any(stretch.eager for stretch in left)
    assert any(s.eager for s in placing.without(run.stretches, [limit]).stretches) is False
    (again,) = run.recompiled
    assert again.times == 8
    assert "number" in again.reason


def test_a_function_that_is_left_out_without_a_reason_is_a_cause() -> None:
    functions = DynamoFunctions(models.Whole())

    def outer() -> tuple[int, int]:
        return functions.why(sys._getframe())

    assert outer() == (-1, -1)
    functions._left.add(outer.__code__)
    assert [outer(), outer()] == [(0, -1), (0, -1)]
    (cause,) = functions.told()
    assert (cause.kind, cause.reason, cause.times) == (placing.SKIP, UNKNOWN, 2)
    assert cause.source == f"tests/tracer/test_dynamo.py:{outer.__code__.co_firstlineno}"


# -- the process -----------------------------------------------------------------------------------


def test_the_process_is_as_before() -> None:
    gc.freeze()  # what is collected below is of this test
    made_here: list[int] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        made_here.append(1)
        return graph.forward

    mine, value = models.Printing().eval(), x()
    fast = torch.compile(mine, backend=backend)
    with torch.no_grad():
        expected = fast(value)
    made, told = len(made_here), {key: dict(found) for key, found in counters.items()}
    reasons = list(torch._dynamo.utils.graph_break_reasons)
    threads, parameters = threading.enumerate(), [id(p) for p in mine.parameters()]
    filters = [list(handler.filters) for handler in logging.getLogger("torch").handlers]

    rt.graph_breaks(models.Stack(models.Printing, 2), x())
    rt.graph_breaks(mine, x(), phase="training")

    assert {key: dict(found) for key, found in counters.items()} == told
    assert torch._dynamo.utils.graph_break_reasons == reasons
    assert threading.enumerate() == threads
    assert [id(p) for p in mine.parameters()] == parameters
    assert all(p.grad is None and p.device.type == "cpu" for p in mine.parameters())
    assert [list(h.filters) for h in logging.getLogger("torch").handlers] == filters
    with torch.no_grad():
        assert torch.equal(fast(value), expected)
    assert len(made_here) == made, "what was compiled before is still there"
    gc.collect()
    gc.unfreeze()
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert len(entries(models.Stack.forward.__code__)) == 0
    others: list[int] = []
    again = torch.compile(
        models.Stack(models.Printing, 2).eval(),
        backend=lambda graph, _: others.append(1) or graph.forward,
    )
    with torch.no_grad():
        again(value)
    assert others, "what a run of ours skipped is compiled for others"


def test_two_runs_say_the_same() -> None:
    name = "Stack of Item"
    assert ran(name)[1] == run_of(MODULES[name](), x())[1]


def test_an_error_of_dynamo_names_the_line() -> None:
    with pytest.raises(placing.DynamoError, match=r"broken_models\.py:\d+"):
        run_of(models.Refuses(), x())
    assert not list(tensors_in(torch._dynamo.utils.graph_break_reasons))


def test_what_cannot_be_run_is_refused() -> None:
    graph = rt.trace(models.Whole(), x())
    with pytest.raises(rt.types.RequestError, match="a graph has no code"):
        rt.graph_breaks(graph)
    with pytest.raises(rt.types.RequestError, match="nothing is compiled"):
        rt.graph_breaks(models.Whole(), x(), execution="eager")
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(rt.types.RequestError, match="switched off"),
    ):
        rt.graph_breaks(models.Whole(), x())


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("generic_jump TensorVariable()", "if or while asks for the value of a tensor"),
        ("Unsupported Tensor.item() call with ...", "item() takes a number out of a tensor"),
        (
            "Failed to trace it\n  Explanation: Dynamo does not know `f`. Sorry.\n  Hint: no\n",
            "Dynamo does not know `f`",
        ),
        ("something new", "something new"),
        ("", "no reason is given"),
    ],
)
def test_reasons_are_plain_words(said: str, words: str) -> None:
    assert plain_reason(said) == words


def test_hints_are_listed_once_and_without_those_to_report() -> None:
    text = "a\n  Hint: do this\n  Hint: do this\n  Hint: Please report an issue to PyTorch.\n"
    assert hints_of(text) == ("do this",)


def test_a_guard_is_shown_without_its_number_and_place() -> None:
    assert guard_words("1/0: s.i == 0     # y = s.i  # a.py:3 in forward (HINT: x)") == "s.i == 0"
