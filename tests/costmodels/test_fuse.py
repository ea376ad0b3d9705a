"""Groups: a partition in an order that every dependency allows, and what belongs together."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx
import pytest
from hypothesis import given, settings

from rooftrace.costmodels.fusion import (
    grouping,
    index_space,
    joins,
    kernels,
    partition,
)
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.grouping import fuse
from rooftrace.costmodels.fusion.index_space import (
    FEW_ROWS,
    LONG_CHAIN,
    LONGEST_ROW,
    SPLIT_ROW,
)
from rooftrace.costmodels.fusion.kernels import MAX_GROUP, SMALL
from rooftrace.costmodels.fusion.partition import FusionGroup
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.opview import find_rule
from rooftrace.costmodels.rewrites.rewrites import rewrite
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op, Ref
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs

EFFICIENT = execution_model("efficient")
TRACED = [
    ("gpt2", "forward"), ("gpt2", "training"), ("gpt2", "decode"), ("llama", "training"),
    ("llama", "decode"), ("deepseek", "training"), ("deepseek", "decode"), ("resnet", "training"),
    ("lstm", "forward"), ("lstm", "training"),
]  # fmt: skip


def groups_of(graph: OpGraph) -> list[tuple[int, ...]]:
    return [group.ops for group in fuse(graph, EFFICIENT)]


def is_launched(op: Op) -> bool:
    rule = find_rule(op.target)
    return op.kind == "kernel" and (rule is None or rule.fusion != "free")


def hazards(graph: OpGraph) -> Iterator[tuple[int, int]]:
    """Every pair of ops of which the first has to run before the second, by brute force.

    Read after write, write after read and write after write, on whole storages.
    """
    storage = [t.storage for t in graph.values]
    seen: list[tuple[int, set[int], set[int]]] = []
    for op in graph.ops:
        if op.kind == "view" or (op.kind == "kernel" and not is_launched(op)):
            continue
        reads = {storage[i] for i in op.inputs}
        writes = {storage[i] for i in op.outputs} if op.kind == "kernel" else set()
        for earlier, was_read, was_written in seen:
            if was_written & (reads | writes) or was_read & writes:
                yield earlier, op.id
        seen.append((op.id, reads, writes))


def check(graph: OpGraph, groups: Sequence[FusionGroup]) -> None:
    """What every execution model promises about its kernels."""
    placed = sorted(op for group in groups for op in group.ops)
    assert placed == [op.id for op in graph.ops if is_launched(op)]
    position = {op: index for index, group in enumerate(groups) for op in group.ops}
    contracted = networkx.DiGraph()
    for first, second in hazards(graph):
        if first in position and second in position:
            assert position[first] <= position[second], (first, second)
            if position[first] != position[second]:
                contracted.add_edge(position[first], position[second])
    assert networkx.is_directed_acyclic_graph(contracted)
    assert all(list(group.ops) == sorted(group.ops) for group in groups)


@settings(deadline=None, max_examples=150)
@given(programs())
def test_groups_of_random_programs_are_a_partition_in_an_order_that_works(program):
    graph, _ = program
    check(graph, fuse(graph, EFFICIENT))
    check(graph, fuse(graph, execution_model("eager")))


@settings(deadline=None, max_examples=150)
@given(programs())
def test_so_they_are_where_every_limit_is_reached(program):
    graph, _ = program
    limits = {"MAX_GROUP": 4, "SMALL": 4, "UNROLLED": 3, "SPLIT_ROW": 4, "FEW_ROWS": 6, "NEAR": 2}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            for module in (grouping, index_space, joins, kernels, partition):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        check(graph, fuse(graph, EFFICIENT))
        planned = plan(graph, EFFICIENT)
    assert planned.bytes.total >= planned.compulsory


@pytest.mark.parametrize("model, phase", TRACED)
def test_groups_of_real_models_are_a_partition_in_an_order_that_works(traced, model, phase):
    for name in ("naive", "efficient"):
        execution = execution_model(name)
        graph, _ = rewrite(traced(model, phase), execution)
        check(graph, fuse(graph, execution))


@settings(deadline=None, max_examples=150)
@given(programs())
def test_a_wait_stands_after_what_it_needs_and_before_what_follows(program):
    graph, _ = program
    planned = plan(graph, "efficient")
    position = {op: i for i, group in enumerate(planned.groups) for op in group.ops}
    waits = [i for i, launch in enumerate(planned.launches) if launch.sync]
    syncs = [op.id for op in planned.graph.ops if op.kind == "sync"]
    assert len(waits) == len(syncs)
    launched = [sum(x.on_device for x in planned.launches[:wait]) for wait in waits]
    for sync, before in zip(syncs, launched, strict=True):
        for first, second in hazards(planned.graph):
            if second == sync and first in position:
                assert position[first] < before
        assert all(max(group.ops) < sync for group in planned.groups[:before])


def test_a_chain_between_products_is_one_kernel():
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    y = b.binary("add", b.unary("relu", b.mm(x, w)), x)
    z = b.mm(y, w)
    assert groups_of(b.graph(z)) == [(0,), (1, 2), (3,)]


def test_a_softmax_takes_its_scale_and_what_follows():
    b = Builder()
    x = b.input(64, 64)
    y = b.unary("exp", b.softmax(b.binary("mul", x, 0.5)))
    assert groups_of(b.graph(y)) == [(0, 1, 2)]


def test_an_op_without_a_rule_is_a_kernel_of_its_own():
    b = Builder()
    x = b.unary("relu", b.input(64, 64))
    y = b.value((64, 64))
    b.op("nobody.knows", {"x": Ref(x)}, [y])
    graph = b.graph(b.unary("relu", y))
    assert [g.ops for g in fuse(graph, EFFICIENT)] == [(0,), (1,), (2,)]
    assert [g.known for g in fuse(graph, EFFICIENT)] == [True, False, True]


def test_what_overwrites_a_tensor_waits_for_those_who_read_it():
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    y = b.unary("exp", x)  # a compiler would like to do this last
    b.op("aten.sort", {"self": Ref(x)}, [b.value((64, 64)), b.value((64, 64), dtype="int64")])
    b.copy_into(x, w)  # but here x goes
    z = b.mm(w, x)
    position = {op: i for i, ops in enumerate(groups_of(b.graph(y, z))) for op in ops}
    assert position[0] <= position[2] and position[1] <= position[2] <= position[3]


def test_what_a_long_reduction_leaves_is_used_by_the_next_kernel():
    def groups(rows: int, row: int) -> list[tuple[int, ...]]:
        b = Builder()
        x = b.input(rows, row)
        total = b.unary("sqrt", b.sum(b.unary("exp", x)))
        return groups_of(b.graph(b.binary("div", x, total)))

    assert groups(FEW_ROWS, LONGEST_ROW) == [(0, 1, 2, 3)]
    assert groups(FEW_ROWS, 2 * LONGEST_ROW) == [(0, 1, 2), (3,)]
    assert groups(FEW_ROWS - 1, SPLIT_ROW) == [(0, 1, 2, 3)]
    assert groups(FEW_ROWS - 1, 2 * SPLIT_ROW) == [(0, 1, 2), (3,)]


def test_a_norm_of_few_long_rows_is_a_kernel_after_the_one_that_makes_them():
    def groups(rows: int) -> list[tuple[int, ...]]:
        b = Builder()
        x = b.unary("exp", b.input(rows, 2 * SPLIT_ROW))
        return groups_of(b.graph(b.unary("silu", b.softmax(x))))

    assert groups(FEW_ROWS) == [(0, 1, 2)]
    assert groups(1) == [(0,), (1, 2)]


def test_a_table_is_made_in_the_first_kernel_that_uses_it():
    b = Builder()
    table = b.unary("cos", b.input(2 * SMALL))
    x, y, w = b.input(64, 2 * SMALL), b.input(32, 2 * SMALL), b.weight(2 * SMALL, 64)
    first = b.mm(b.binary("mul", x, table), w)
    second = b.mm(b.binary("mul", y, table), w)
    assert groups_of(b.graph(first, second)) == [(0, 1), (2,), (3,), (4,)]


def test_a_gain_made_from_weights_joins_the_norm_that_it_scales():
    b = Builder()
    y = b.softmax(b.input(64, 8192))
    gain = b.binary("add", b.weight(8192), 1.0)
    assert groups_of(b.graph(b.binary("mul", y, gain))) == [(0, 1, 2)]


def test_kernels_over_the_same_space_that_read_the_same_tensor_are_one():
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    y, z = b.mm(x, w), b.mm(w, x)
    first, second = b.binary("mul", y, x), b.binary("mul", z, x)
    assert groups_of(b.graph(b.mm(first, w), b.mm(second, w))) == [(0,), (1,), (2, 3), (4,), (5,)]


def test_a_sum_of_few_is_pointwise_and_goes_into_the_reduction_after_it():
    b = Builder()
    x = b.sum(b.unary("exp", b.input(64, 4, 512)))
    y = b.value((64, 512), like=x)
    b.op("aten.squeeze", {"self": Ref(x)}, [y], kind="view")
    assert groups_of(b.graph(b.softmax(b.unary("silu", y)))) == [(0, 1, 3, 4)]


def test_what_follows_a_reduction_goes_with_the_next_one_if_that_needs_it():
    b = Builder()
    x = b.sum(b.unary("exp", b.input(64, 16, 512)))
    y = b.value((64, 512), like=x)
    b.op("aten.squeeze", {"self": Ref(x)}, [y], kind="view")
    assert groups_of(b.graph(b.softmax(b.unary("silu", y)))) == [(0, 1), (3, 4)]


def test_a_batch_norm_in_evaluation_is_pointwise():
    def groups(training: bool) -> list[tuple[int, ...]]:
        b = Builder()
        x = b.unary("exp", b.input(8, 64, 64, 64))
        y, *saved = [b.value(shape) for shape in ((8, 64, 64, 64), (64,), (64,))]
        arguments = {"input": Ref(x), "training": training, "momentum": 0.1, "eps": 1e-5}
        b.op("aten.native_batch_norm", arguments, [y, *saved])
        return groups_of(b.graph(b.unary("relu", y)))

    assert groups(training=False) == [(0, 1, 2)]
    assert groups(training=True) == [(0,), (1, 2)]


def test_after_a_wait_a_new_kernel_begins():
    def chain(wait: bool) -> OpGraph:
        b = Builder()
        x = b.unary("exp", b.input(64, 64))
        if wait:
            b.item(x)
        return b.graph(b.unary("relu", x))

    assert groups_of(chain(wait=False)) == [(0, 1)]
    assert groups_of(chain(wait=True)) == [(0,), (2,)]


def test_no_group_is_larger_than_inductors():
    b = Builder()
    x = b.input(64, 64)
    for _ in range(3 * MAX_GROUP):
        x = b.unary("exp", x)
    sizes = [len(ops) for ops in groups_of(b.graph(x))]
    assert max(sizes) == MAX_GROUP and len(sizes) == 3


def test_groups_stay_when_nothing_is_detected(traced):
    graph = traced("gpt2", "forward")
    groups = fuse(graph, execution_model("eager"))
    assert [g.ops for g in groups] == [(op.id,) for op in graph.ops if is_launched(op)]
    assert all(a.ops < b.ops for a, b in pairwise(groups))


def test_names_of_groups(traced):
    names = {row.name for row in fuse(traced("llama", "forward"), EFFICIENT)}
    assert {"flash attention", "aten.mm", "rms norm (fused)", "gated activation (fused)"} <= names


def test_a_group_that_moves_keeps_what_else_it_waits_for():
    """Found by the random programs, once in some ten thousand: the last kernel, moved twice towards
    the first, forgot the product between them."""
    build = Builder()
    x, counts, weights = build.input(6, 8), build.input(6, 1), build.weight(8, 8)

    def count(value: int) -> None:
        both = (value, counts)
        outputs = [build.value(build.places[i], like=i) for i in both]
        arguments = {"self": tuple(map(Ref, both)), "scalar": 1.0}
        build.op("aten._foreach_add_.NonTensor", arguments, outputs)

    shifted = build.binary("add", x, counts)
    kept = build.unary("relu", x)
    product = build.mm(x, weights)
    count(product)
    second = build.mm(product, weights)
    count(second)
    build.binary("add", kept, second)
    rest = build.unary("relu", shifted)
    changed = build.value(build.places[kept], like=kept)
    build.op("aten.add_.Tensor", {"self": Ref(kept), "other": Ref(rest)}, [changed])
    graph = build.graph()
    check(graph, fuse(graph, EFFICIENT))


def test_what_a_concatenation_takes_is_computed_into_its_place():
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.unary("exp", b.mm(x, w))
    graph = b.graph(b.cat(y, b.mm(x, w)))
    assert groups_of(graph) == [(0,), (2,), (1, 3)]
    assert plan(graph).costs[2].bytes() == 2 * (2 * 64 * 512 + 2 * 64 * 512)  # both in, all out


def test_what_something_else_needs_too_is_not_put_into_a_concatenation_only():
    b = Builder()
    x, w = b.input(64, 512), b.weight(512, 512)
    y = b.unary("exp", x)
    product = b.mm(y, w)
    assert groups_of(b.graph(b.cat(y, x), product)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("length, kernels", [(LONG_CHAIN - 2, 1), (LONG_CHAIN, 2)])
def test_a_long_chain_is_not_computed_again_for_each_part_that_is_read(length, kernels):
    b = Builder()
    x = b.input(128, 512)
    for _ in range(length):
        x = b.unary("exp", x)
    upper, lower = (b.view(x, b.places[x][rows]) for rows in (slice(0, 64), slice(64, 128)))
    graph = b.graph(b.cat(lower, upper))
    assert len(groups_of(graph)) == kernels


def test_a_sum_down_the_columns_takes_nothing_that_others_need():
    b = Builder()
    x, w = b.input(256, 512), b.weight(512, 512)
    y = b.unary("exp", x)
    graph = b.graph(b.mm(y, w), b.sum(y, dim=0))
    assert groups_of(graph) == [(0,), (1,), (2,)]
    alone = b.sum(b.unary("relu", y), dim=0)
    assert groups_of(b.graph(alone))[-1] == (3, 4)
