"""Where torch.compile ends a graph, and which ops of a trace run in which one.  Torch is asked."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.tracer.asking.job import Job
from rooftrace.tracer.dynamo import records
from rooftrace.tracer.dynamo.functions import UNKNOWN, DynamoFunctions
from rooftrace.tracer.dynamo.placing import PlacedStep, placed
from rooftrace.tracer.dynamo.reasons import guard_words, hints_of, plain_reason
from rooftrace.tracer.dynamo.running import traced_with_dynamo
from rooftrace.tracer.graph.graph import OpGraph
from rooftrace.tracer.tensors import tensors_in
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


def explained(module: nn.Module, *args: Any) -> tuple[int, int, int]:
    """By torch itself, on numbers: graphs, reasons of graphs that end early, counted breaks."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        told = torch._dynamo.explain(module.eval())(*args)
    counted = sum(counters["graph_break"].values())
    torch._dynamo.reset()
    counters.clear()
    return told.graph_count, len(told.break_reasons), counted


CASES = (*models.BREAKING, models.Whole)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_graphs_and_breaks_are_those_that_torch_explains(kind: type[models.Layer]) -> None:
    module = kind()
    _, run = run_of(module, x())
    graphs, _, counted = explained(module, x())
    assert run.graphs == graphs
    assert run.graph_breaks == counted
    assert not run.real
    assert bool(run.causes) == (kind is not models.Whole)


@pytest.mark.parametrize(
    "kind", mostly_heavy([models.Printing, models.Asked, models.Disabled], [models.Asked])
)
def test_a_break_in_a_layer_is_one_cause_as_often_as_the_layer_is_called(
    kind: type[models.Layer],
) -> None:
    _, run = run_of(models.Stack(kind, 5), x())
    (cause,) = run.causes
    assert cause.times == 5
    assert cause.kind == records.BREAK
    assert cause.module == "layers.*"
    assert cause.source.startswith("tests/tracer/broken_models.py:")
    assert run.graphs == explained(models.Stack(kind, 5), x())[0]


def test_a_line_that_gives_no_reason_has_that_of_what_it_calls() -> None:
    _, run = run_of(models.Property(), x())
    (cause,) = run.causes
    assert "print" in cause.reason
    first = models.Property.doubled.fget.__code__.co_firstlineno
    assert cause.source == f"tests/tracer/broken_models.py:{first + 2}"


def test_huggingface_models_are_as_torch_says() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    mixtral = MixtralForCausalLM(
        MixtralConfig(**sizes, vocab_size=32, num_hidden_layers=2, num_key_value_heads=2)
    )
    ids = torch.arange(6)[None]
    for model in (gpt2, mixtral):
        _, run = run_of(model, ids)
        assert (run.graphs, run.graph_breaks) == explained(model, ids)[::2]
        assert run.calls == 1


# -- which op runs where ---------------------------------------------------------------------------


def flops_of_graphs(module: nn.Module, *args: Any) -> list[int]:
    """FLOPs of each call of a compiled graph in order, counted by torch on numbers."""
    counts: list[int] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        def run(*inputs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = graph(*inputs)
            counts.append(counter.get_total_flops())
            return result

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(module.eval(), backend=backend)(*args)
    return counts


def flops_of_stretches(placement: PlacedStep, *parts: str) -> list[int]:
    sums: Counter[int] = Counter()
    for op, place in zip(placement.flat.ops, placement.stretch_of, strict=True):
        if op.part in parts:
            assert place is not None
            sums[place] += op.flops_torch or 0
    return [sums[place] for place, stretch in enumerate(placement.stretches) if not stretch.eager]


@pytest.mark.parametrize(
    "module",
    [
        *(kind() for kind in CASES),
        models.Stack(models.Printing, 6),
        models.Stack(models.Item, 4),
        models.Numbers(12),
    ],
    ids=lambda module: type(module).__name__,
)
def test_flops_of_a_stretch_are_those_of_its_graph(module: nn.Module) -> None:
    graph, run = run_of(module, x())
    placement = placed(graph, run)
    assert placement.unplaced == 0
    assert flops_of_stretches(placement, "forward") == flops_of_graphs(module, x())


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
        records.without(run.stretches), records.without(run.stretches, [0])
    )
    assert not any("graph_break" in op.target for op in whole.ops)
    cuts = Counter(op.part for op in marked.ops if "graph_break" in op.target)
    assert cuts["forward"] and cuts["backward"]


def test_equal_layers_stay_one_where_all_are_cut_alike() -> None:
    graph, run = run_of(models.Stack(models.Printing, 8), x())
    placement = placed(graph, run)
    (short,) = placement.marked(records.without(run.stretches))
    (flat,) = placement.marked(records.without(run.stretches), folded=False)
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
    stretches = (records.Stretch(0, -1), records.Stretch(1, 0))
    cause = records.Cause(records.BREAK, "why", "a.py:1")
    some = [op for op in graph.ops if op.kind == "kernel"]
    first, last = some[0], some[-1]
    ops = (
        records.RanOp(first.name, first.source, 0),
        records.RanOp(last.name, last.source, 1),
    )
    run = records.DynamoRun(causes=(cause,), stretches=stretches, ops=ops, graphs=2, graph_breaks=1)
    placement = placed(graph, run)
    (between,) = [op for op in some if op.source not in (first.source, last.source)]
    assert placement.unplaced == 1
    assert placement.stretch_of[between.id] == 0


# -- removing a cause ------------------------------------------------------------------------------


def test_without_a_cause_what_it_parts_is_one_graph() -> None:
    eager, S = -1, records.Stretch
    stretches = (S(0, -1), S(eager, 0), S(1, 0), S(2, 1))
    assert records.without(stretches).stretches == stretches
    assert records.without(stretches, [0]) == records.Joined((S(0, -1), S(2, 1)), (0, 0, 0, 1))
    assert records.without(stretches, [1]).place_of == (0, 1, 2, 2)
    assert records.without(stretches, [0, 1]).place_of == (0, 0, 0, 0)


def test_behind_code_in_python_a_graph_stays_one_of_its_own() -> None:
    eager, S = -1, records.Stretch
    joined = records.without((S(eager, 0), S(3, 1), S(4, 0)), [1])
    assert joined.stretches == (S(eager, 0), S(3, 0), S(4, 0))


def test_what_is_compiled_too_often_goes_with_the_break_that_parts_it() -> None:
    _, run = run_of(models.Numbers(12), x())
    kinds = [cause.kind for cause in run.causes]
    assert sorted(kinds) == [records.BREAK, records.LIMIT]
    asked, limit = kinds.index(records.BREAK), kinds.index(records.LIMIT)
    assert run.causes[limit].times == 12 - 8  # torch._dynamo.config.recompile_limit
    assert run.causes[asked].times == 8
    left = records.without(run.stretches, [asked]).stretches
    assert not any(stretch.eager for stretch in left)
    assert any(s.eager for s in records.without(run.stretches, [limit]).stretches) is False
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
    assert (cause.kind, cause.reason, cause.times) == (records.SKIP, UNKNOWN, 2)
    assert cause.source == f"tests/tracer/test_dynamo.py:{outer.__code__.co_firstlineno}"


# -- the process -----------------------------------------------------------------------------------


def test_the_process_is_as_before() -> None:
    compiled: list[int] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    mine, value = models.Printing().eval(), x()
    fast = torch.compile(mine, backend=backend)
    with torch.no_grad():
        expected = fast(value)
    made, told = len(compiled), {key: dict(found) for key, found in counters.items()}
    reasons = list(torch._dynamo.utils.graph_break_reasons)
    threads, parameters = threading.enumerate(), [id(p) for p in mine.parameters()]
    filters = [list(handler.filters) for handler in logging.getLogger("torch").handlers]

    rt.graph_breaks(models.Stack(models.Printing, 3), x())
    rt.graph_breaks(mine, x(), phase="training")

    assert {key: dict(found) for key, found in counters.items()} == told
    assert torch._dynamo.utils.graph_break_reasons == reasons
    assert threading.enumerate() == threads
    assert [id(p) for p in mine.parameters()] == parameters
    assert all(p.grad is None and p.device.type == "cpu" for p in mine.parameters())
    assert [list(h.filters) for h in logging.getLogger("torch").handlers] == filters
    with torch.no_grad():
        assert torch.equal(fast(value), expected)
    assert len(compiled) == made, "what was compiled before is still there"
    gc.collect()
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
    first, second = (run_of(models.Stack(models.Item, 3), x())[1] for _ in range(2))
    assert first == second


def test_an_error_of_dynamo_names_the_line() -> None:
    with pytest.raises(records.DynamoError, match=r"broken_models\.py:\d+"):
        run_of(models.Refuses(), x())
    assert not list(tensors_in(torch._dynamo.utils.graph_break_reasons))


def test_what_cannot_be_run_is_refused() -> None:
    graph = rt.trace(models.Whole(), x())
    with pytest.raises(rt.RequestError, match="a graph has no code"):
        rt.graph_breaks(graph)
    with pytest.raises(rt.RequestError, match="nothing is compiled"):
        rt.graph_breaks(models.Whole(), x(), execution="eager")
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(rt.RequestError, match="switched off"),
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
