"""Joins: why ops are one kernel, those that users register, and what says so afterwards."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings

import rooftrace as rt
from rooftrace.costmodels.fusion import joins as table, partition
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.grouping import fuse
from rooftrace.costmodels.fusion.joins import JOINS
from rooftrace.costmodels.fusion.partition import FusionGroup, Merge
from rooftrace.costmodels.ops.opview import own_rules
from rooftrace.errors import RequestError
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs
from tests.costmodels.test_fuse import check

EFFICIENT = execution_model("efficient")
BF16 = 2  # bytes


@pytest.fixture(autouse=True)
def joins_made_here_go_away() -> Iterator[None]:
    with own_rules():
        yield


def came_by_none(group: FusionGroup) -> set[int]:
    """The ops of a group that no join brought: the one that it began with."""
    return set(group.ops) - {op for merge in group.merges for op in merge.ops}


@settings(deadline=None, max_examples=150)
@given(programs())
def test_every_op_of_a_kernel_but_one_came_by_a_join(program):
    names = {join.name for join in JOINS if join.on}
    for group in fuse(program[0], EFFICIENT):
        assert len(came_by_none(group)) == 1
        assert set(group.joins) <= names
        assert {op for merge in group.merges for op in merge.ops} <= set(group.ops)


@pytest.mark.parametrize("model, phase", [("llama", "training"), ("deepseek", "decode")])
def test_every_kernel_of_a_real_model_says_why(traced, model, phase):
    planned = rt.plan(traced(model, phase))
    for number, group in enumerate(planned.groups):
        assert len(came_by_none(group)) == 1
        assert len(planned.why(number).splitlines()) == max(1, len(group.merges))


def test_what_is_taken_out_of_a_kernel_leaves_one_op_that_came_by_no_join():
    merges = [Merge("b", (2,)), Merge("c", (4,)), Merge("d", (3, 4))]
    left = partition.left_over([2, 3, 4], merges)  # without 1, with which it began
    assert left == [Merge("c", (4,)), Merge("d", (3, 4))]
    assert partition.left_over([1, 2, 4], merges) == [*merges[:2], Merge("d", (4,))]


def joins_of(*results: int, builder: Builder) -> list[tuple[str, ...]]:
    return [group.joins for group in fuse(builder.graph(*results), EFFICIENT)]


def test_each_kernel_names_the_join_that_made_it():
    b = Builder()
    x = b.input(64, 8192)
    assert joins_of(b.unary("relu", b.unary("exp", x)), builder=b) == [("same elements",)]
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    first, second = b.binary("mul", b.mm(x, w), x), b.binary("mul", b.mm(w, x), x)
    assert ("shared tensor",) in joins_of(b.mm(first, w), b.mm(second, w), builder=b)
    b = Builder()
    gain = b.binary("add", b.weight(8192), 1.0)
    y = b.binary("mul", b.softmax(b.input(64, 8192)), gain)
    assert "few reads" in joins_of(y, builder=b)[0]
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.unary("exp", b.mm(x, w))
    assert ("placed",) in joins_of(b.cat(y, b.mm(b.input(32, 512), w)), builder=b)


def test_without_a_join_its_kernels_stay_apart(monkeypatch):
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    first, second = b.binary("mul", b.mm(x, w), x), b.binary("mul", b.mm(w, x), x)
    graph = b.graph(b.mm(first, w), b.mm(second, w))
    assert len(fuse(graph, EFFICIENT)) == 5
    off = tuple(replace(join, on=join.name != "shared tensor" and join.on) for join in JOINS)
    monkeypatch.setattr(table, "JOINS", off)
    assert len(fuse(graph, EFFICIENT)) == 6


@pytest.mark.parametrize("name", [join.name for join in JOINS if join.on])
@settings(deadline=None, max_examples=25)
@given(program=programs())
def test_each_join_can_be_switched_off(name, program):
    off = tuple(replace(join, on=join.on and join.name != name) for join in JOINS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "JOINS", off)
        groups = fuse(program[0], EFFICIENT)
    check(program[0], groups)
    assert all(name not in group.joins for group in groups)


# -- joins of users --------------------------------------------------------------------------------


def epilogue(first: rt.extend.KernelView, second: rt.extend.KernelView) -> bool:
    """A product and what follows it."""
    return first.kinds == {"mm"} and second.classes == {"pointwise"}


def product_and_relu(reads: int = 1) -> rt.types.OpGraph:
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.mm(x, w)
    results = [b.unary("relu", y), *(b.mm(y, w) for _ in range(reads - 1))]
    return b.graph(*results)


def test_a_join_of_a_user_makes_one_kernel_and_saves_what_lies_between():
    graph = product_and_relu()
    before = rt.estimate(graph, "h100-sxm")
    rt.extend.fusion("gemm epilogue")(epilogue)
    after = rt.estimate(graph, "h100-sxm")
    assert before.bytes_hbm - after.bytes_hbm == BF16 * 2 * 64 * 512  # written once, read once
    assert [row.name for row in after.rows] == ["mm + relu"]
    assert list(after.to_frame()["joins"]) == ["gemm epilogue"]
    assert after.plan.why(0) == "aten.relu (op 1): gemm epilogue: A product and what follows it."
    (note,) = after.plan.notes
    assert note == "kernels joined as registered with rooftrace.extend.fusion: gemm epilogue x1"
    assert rt.plan(graph, "eager").bytes == rt.plan(graph, "eager").bytes
    assert len(rt.plan(graph, "eager").groups) == 2


def test_headroom_counts_what_a_users_join_saves_as_saved_already():
    graph = product_and_relu()
    assert [s.kind for s in rt.tools.headroom(graph).left] == ["epilogue"]
    rt.extend.fusion("gemm epilogue")(epilogue)
    found = rt.tools.headroom(graph)
    assert not found.left
    assert [s.bytes for s in found.fused] == [BF16 * 2 * 64 * 512]


def test_what_something_else_reads_too_is_joined_by_no_one():
    rt.extend.fusion("gemm epilogue")(epilogue)
    planned = rt.plan(product_and_relu(reads=2))
    assert len(planned.groups) == 3
    reason = "stays apart, though gemm epilogue fits: something else reads the first"
    assert planned.why(0) == f"one op, joined by nothing\naten.relu (op 1): {reason}"
    assert planned.why(2) == f"one op, joined by nothing\naten.mm (op 0): {reason}"
    assert planned.why(1) == "one op, joined by nothing"  # the product that reads the first too


def notes_of(graph: rt.types.OpGraph) -> tuple[str, ...]:
    return rt.plan(graph).own_notes


def test_where_a_join_fits_and_joins_nothing_is_in_the_notes_and_on_the_screen():
    rt.extend.fusion("gemm epilogue")(epilogue)
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y, z = b.mm(x, w), b.mm(x, w)
    once, twice = b.unary("relu", b.mm(x, w)), [b.unary("relu", y), b.mm(y, w)]
    graph = b.graph(once, *twice, b.unary("relu", z), b.mm(z, w))
    where = "where the kernels stay apart: something else reads the first"
    expected = (
        "kernels joined as registered with rooftrace.extend.fusion: gemm epilogue x1",
        f'the join "gemm epilogue" fits in 2 more places {where}',
    )
    assert notes_of(graph) == expected
    assert rt.plan(graph, "eager").own_notes == ()
    shown = " ".join(str(rt.estimate(graph, "h100-sxm")).split())
    assert all(note in shown for note in expected)


def test_each_reason_to_stay_apart_is_counted():
    rt.extend.fusion("gemm epilogue")(epilogue)
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y, z = b.mm(x, w), b.mm(x, w)
    b.item(b.input(1))
    graph = b.graph(b.unary("relu", y), b.unary("relu", z), b.mm(z, w))
    assert notes_of(graph) == (
        'the join "gemm epilogue" fits in 2 places where the kernels stay apart: the host waits '
        "between them (1), something else reads the first (1)",
    )


def test_of_two_products_one_takes_the_sum_and_the_other_says_so():
    rt.extend.fusion("gemm epilogue")(epilogue)
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    graph = b.graph(b.binary("add", b.mm(x, w), b.mm(x, w)))
    assert notes_of(graph)[1] == (
        'the join "gemm epilogue" fits in 1 more place where the kernels stay apart: one of them '
        "is joined with another kernel"
    )


def test_three_in_a_row_stay_apart_where_something_else_reads_one():
    rt.extend.fusion("by hand")(lambda first, second, third: first.is_product and third.is_product)
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.unary("relu", b.mm(x, w))
    assert notes_of(b.graph(b.mm(y, w), b.mm(y, w))) == (
        'the join "by hand" fits in 2 places where the kernels stay apart: something else reads '
        "the first",
    )


def test_it_is_asked_again_of_what_comes_out_and_of_three_in_a_row():
    b = Builder()
    q, k, v = b.input(256, 64), b.input(64, 256), b.input(256, 64)
    graph = b.graph(b.mm(b.softmax(b.mm(q, k)), v))
    with own_rules():
        rt.extend.fusion("everything")(lambda first, second: True)
        (group,) = rt.plan(graph).groups
        assert group.joins == ("everything",) and len(group.merges) == 2
    rt.extend.fusion("attention of mine", label="my attention")(
        lambda first, second, third: first.is_product and "softmax" in second.kinds
    )
    assert [group.name for group in rt.plan(graph).groups] == ["my attention"]


@settings(deadline=None, max_examples=60)
@given(programs())
def test_a_join_that_takes_all_leaves_an_order_that_works(program):
    with own_rules():
        rt.extend.fusion("everything")(lambda first, second: True)
        planned = rt.plan(program[0])
    check(planned.graph, planned.groups)


def test_a_condition_sees_ops_tensors_and_sizes():
    seen = []
    rt.extend.fusion("looks only")(lambda first, second: seen.append((first, second)))
    rt.plan(product_and_relu())
    ((first, second),) = seen
    assert (first.names, first.kinds, first.classes) == ({"aten.mm"}, {"mm"}, {"opaque"})
    assert (second.names, second.labels) == ({"aten.relu"}, {"activation"})
    assert [t.shape for t in first.inputs] == [(64, 512), (512, 512)]
    assert [t.shape for t in first.results] == [t.shape for t in second.inputs] == [(64, 512)]
    assert first.size == second.size == 64 * 512 and second.reduced is None


def test_a_second_join_of_one_name_is_refused():
    rt.extend.fusion("mine")(epilogue)
    rt.extend.fusion("mine")(epilogue)  # the same function, defined again
    with pytest.raises(RequestError, match=r"'mine' already is a join, .*epilogue:\d+; .*"):
        rt.extend.fusion("mine")(lambda first, second: True)
    rt.extend.fusion("mine", override=True)(lambda first, second: False)
    with pytest.raises(RequestError, match="'chain' is a join of rooftrace's own"):
        rt.extend.fusion("chain")(epilogue)


@pytest.mark.parametrize("name", ["", 3])
def test_a_join_needs_a_name(name):
    with pytest.raises(ValueError, match=r'expected a name, for example "gemm epilogue"'):
        rt.extend.fusion(name)


def test_a_condition_takes_two_or_three_kernels():
    with pytest.raises(ValueError, match=r"takes 1 kernels; expected when\(first, second\)"):
        rt.extend.fusion("mine")(lambda first: True)
