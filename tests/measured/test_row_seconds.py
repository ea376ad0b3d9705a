"""Which op of a graph the measured seconds of a profiled step belong to."""

from __future__ import annotations

import pytest
import torch

import rooftrace as rt
from rooftrace.measured.bench.runfile import ModelRow, OpTime
from rooftrace.measured.fit.misses import RowSeconds, seconds_of_row

pytestmark = pytest.mark.quick

ADDMM = ((8,), (3, 8), (8, 8))
SQUARE = ((3, 8),)


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    """Two products of equal sizes among other things, forward, backward and AdamW."""
    linear = (torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), *linear)
    return rt.trace(model, torch.zeros(3, dtype=torch.long), phase="training")


def found(graph: rt.types.OpGraph, *ops: OpTime, unattributed: float = 0.0) -> RowSeconds:
    row = ModelRow(
        key="a step", model="model", phase="training", mode="eager", sizes={}, seconds=(1.0,),
        ops=ops, source="profiler",
        device_seconds=sum(op.seconds for op in ops), unattributed=unattributed,
    )  # fmt: skip
    result = seconds_of_row(row, rt.estimate(graph, "h200-sxm", "eager"))
    strays = sum(stray.seconds for stray in result.strays)
    assert sum(result.seconds.values()) + strays == pytest.approx(row.attributed)  # none is lost
    assert result.coverage == pytest.approx(
        sum(result.seconds.values()) / (row.attributed + unattributed)
    )
    return result


def names(graph: rt.types.OpGraph, result: RowSeconds) -> set[str]:
    return {graph.ops[op].name for op in result.seconds}


@pytest.mark.parametrize(
    ("name", "shapes", "count", "expected"),
    [
        ("aten::addmm", ADDMM, 2, "aten.addmm"),
        ("aten::index_select", ((10, 8), (3,)), 1, "aten.embedding"),  # which calls it
        ("aten::clamp_min_", SQUARE, 1, "aten.relu"),
        ("aten::_foreach_sqrt", (), 1, "aten._foreach_sqrt"),  # lists of tensors have no shapes
        ("aten::sqrt", ((10, 8),), 1, "aten._foreach_sqrt"),  # one parameter after the other
        ("aten::addmm", ((8,), (4, 8), (8, 8)), 2, None),  # of other sizes
        ("aten::sort", SQUARE, 1, None),
    ],
)
def test_a_call_is_found_by_what_it_stands_for(
    name: str, shapes: tuple[tuple[int, ...], ...], count: int, expected: str | None,
    graph: rt.types.OpGraph,
) -> None:  # fmt: skip
    result = found(
        graph, OpTime(target=name, seconds=0.25, count=count, shapes=shapes), unattributed=0.05
    )
    assert names(graph, result) == ({expected} if expected else set())
    assert sum(result.seconds.values()) == (pytest.approx(0.25) if expected else 0)
    assert [stray.name for stray in result.strays] == ([] if expected else [name])


def test_alike_calls_are_shared_by_the_ops_that_are_so(graph: rt.types.OpGraph) -> None:
    result = found(graph, OpTime(target="aten::addmm", seconds=0.5, count=2, shapes=ADDMM))
    assert list(result.seconds.values()) == pytest.approx([0.25, 0.25])


def test_of_more_calls_than_the_graph_has_only_so_many_are_its_own(graph: rt.types.OpGraph) -> None:
    result = found(graph, OpTime(target="aten::addmm", seconds=0.8, count=8, shapes=ADDMM))
    assert sum(result.seconds.values()) == pytest.approx(0.2)  # 2 of 8
    ((stray,),) = (result.strays,)
    assert (stray.count, stray.seconds) == (pytest.approx(6), pytest.approx(0.6))


def test_fewer_calls_than_the_graph_has_are_of_something_else(graph: rt.types.OpGraph) -> None:
    result = found(graph, OpTime(target="aten::addmm", seconds=0.1, count=1, shapes=ADDMM))
    assert not result.seconds and result.strays[0].seconds == 0.1


def test_a_wrapper_and_what_it_calls_are_one_op_not_two_calls(graph: rt.types.OpGraph) -> None:
    relu = OpTime(target="aten::relu", seconds=0.1, count=1, shapes=SQUARE)
    inside = OpTime(target="aten::relu_", seconds=0.2, count=1, shapes=SQUARE)  # of the same key
    result = found(graph, relu, inside)
    assert names(graph, result) == {"aten.relu"}
    assert sum(result.seconds.values()) == pytest.approx(0.3) and not result.strays


def test_what_ran_inside_of_an_op_is_its_own_where_the_run_says_so(graph: rt.types.OpGraph) -> None:
    product = OpTime(target="aten::addmm", seconds=0.1, count=2, shapes=ADDMM, total=0.4)
    ops = (
        product,
        OpTime(target="mkl::gemm", seconds=0.3, count=2),
        OpTime(target="aten::sort", seconds=0.3, count=1, shapes=SQUARE),
    )
    result = found(graph, *ops)
    assert sum(result.seconds.values()) == pytest.approx(0.4)
    # Which of the others ran inside is not said: each has its share of the rest.
    assert {stray.name: stray.seconds for stray in result.strays} == {
        "mkl::gemm": pytest.approx(0.15), "aten::sort": pytest.approx(0.15),
    }  # fmt: skip
    hidden = OpTime(
        target="aten::addmm", seconds=0.0, count=2, shapes=ADDMM, total=0.3
    )  # nothing of its own
    result = found(graph, hidden, OpTime(target="mkl::gemm", seconds=0.3, count=2))
    assert sum(result.seconds.values()) == pytest.approx(0.3) and not result.strays


def test_a_replay_names_its_ops(graph: rt.types.OpGraph) -> None:
    (relu,) = [op for op in graph.ops if op.name == "aten.relu"]
    ops = (
        OpTime(target=relu.target, seconds=0.25, count=1, id=relu.id),
        OpTime(target="aten.sort.default", seconds=0.5, count=1, id=relu.id),  # of another graph
        OpTime(target="aten.relu.default", seconds=0.25, count=1, id=10_000),
    )
    row = ModelRow(
        key="a step",
        model="m",
        phase="training",
        mode="eager",
        sizes={},
        seconds=(1.0,),
        ops=ops,
        source="replay",
    )
    result = seconds_of_row(row, rt.estimate(graph, "h200-sxm", "eager"))
    assert result.seconds == {relu.id: 0.25}
    assert [stray.seconds for stray in result.strays] == [0.5, 0.25]
