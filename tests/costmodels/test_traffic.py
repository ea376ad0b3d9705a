"""Bytes of groups: never below what has to move, never above what the ops move one by one."""

from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from rooftrace.costmodels.fusion.executions import PRESETS, ExecutionModel, WeightResidency
from rooftrace.costmodels.fusion.grouping import fuse
from rooftrace.costmodels.fusion.partition import FusionGroup
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.fusion.traffic import bytes_by_role, compulsory_bytes, group_costs
from rooftrace.costmodels.ops.cost import MATRIX, Access, Cost
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import ROLES, Ref, Repeat
from tests.conftest import mostly_heavy
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs

DETECTED = ExecutionModel(fusion="detected")
BF16 = 2  # bytes
TRACED = [
    ("gpt2", "forward"), ("gpt2", "training"), ("llama", "decode"), ("llama", "training"),
    ("deepseek", "training"), ("deepseek", "decode"), ("resnet", "training"), ("lstm", "training"),
]  # fmt: skip


def moved_by_hand(graph: OpGraph, groups: Sequence[FusionGroup], builder: Builder) -> int:
    """Bytes through HBM if each group keeps exactly the elements that it touches.

    A group reads what it has not written itself, and writes what a later group or the caller reads.
    """
    kept = {e for i in (*graph.outputs, *graph.external) for e in builder.elements(i)}
    needed = [{e for op in group.ops for e in builder.reads(op)} for group in groups]
    waits = {e for op in graph.ops if op.kind == "sync" for e in builder.reads(op.id)}

    def size(elements: set[tuple[int, int]]) -> int:
        return sum(8 if graph.values[storage].dtype == "int64" else 2 for storage, _ in elements)

    moved = 0
    for index, group in enumerate(groups):
        written: set[tuple[int, int]] = set()
        read: set[tuple[int, int]] = set()
        for op in group.ops:
            read |= builder.reads(op) - written
            written |= builder.writes(op)
        later = set().union(kept, waits, *needed[index + 1 :])
        moved += size(read) + size(written & later)
    return moved


@settings(deadline=None, max_examples=100)
@given(programs())
def test_a_group_moves_at_least_the_elements_it_needs(program):
    graph, builder = program
    groups = fuse(graph, DETECTED)
    costs = group_costs(graph, groups, price_ops(graph)[0], DETECTED)
    assert sum(cost.bytes() for cost in costs) >= moved_by_hand(graph, groups, builder)


def check(graph: OpGraph) -> None:
    """What holds between the execution models of any graph."""
    plans = {name: plan(graph, name) for name in PRESETS}
    for name, planned in plans.items():
        by_role = bytes_by_role(planned.graph, planned.total)
        assert set(by_role) == set(ROLES) and sum(by_role.values()) == planned.total.bytes()
        alone = sum(cost.bytes() for cost in planned.op_costs)
        assert planned.total.bytes() <= alone
        work: dict[object, int] = defaultdict(int)
        for cost in planned.op_costs:
            for key, flop in cost.work.items():
                work[key] += flop
        assert dict(planned.total.work) == dict(work)
        if not name.startswith("seed-e"):
            assert planned.total.bytes() >= planned.compulsory
    for name in ("compiled", "efficient"):
        assert plans[name].total.bytes() <= plans["eager"].total.bytes()
        assert len(plans[name].groups) <= len(plans["eager"].groups)
        assert plans[name].total.flops(MATRIX) == plans["eager"].total.flops(MATRIX)
    assert plans["eager"].total.bytes() <= plans["naive"].total.bytes()


@settings(deadline=None, max_examples=60)
@given(programs())
def test_bytes_of_random_programs(program):
    graph, _ = program
    plans = {name: plan(graph, name) for name in ("eager", "efficient")}
    for planned in plans.values():
        assert planned.compulsory <= planned.total.bytes()
        assert planned.total.bytes() <= sum(cost.bytes() for cost in planned.op_costs)
    assert plans["efficient"].total.bytes() <= plans["eager"].total.bytes()


@pytest.mark.parametrize("model, phase", mostly_heavy(TRACED, TRACED[::2] + TRACED[-1:]))
def test_bytes_of_real_models(traced, model, phase):
    check(traced(model, phase))


# -- by hand ---------------------------------------------------------------------------------------


def fused(graph: OpGraph) -> Cost:
    """The cost of all kernels of a graph in one group."""
    costs, _ = price_ops(graph)
    ops = tuple(op.id for op in graph.ops if op.kind == "kernel")
    (cost,) = group_costs(graph, [FusionGroup(ops, "all", "all")], costs, DETECTED)
    return cost


def test_what_stays_inside_does_not_move():
    b = Builder()
    x = b.input(64, 64)
    y = b.unary("relu", b.unary("exp", x))
    assert fused(b.graph(y)).bytes() == BF16 * 64 * 64 * 2  # x in, y out


def test_what_two_ops_read_is_read_once():
    b = Builder()
    x = b.input(64, 64)
    y = b.binary("mul", b.unary("exp", x), b.unary("sqrt", x))
    assert fused(b.graph(y)).bytes() == BF16 * 64 * 64 * 2


def test_two_halves_of_a_tensor_are_both_read_and_one_half_twice_is_read_once():
    b = Builder()
    x = b.input(64, 64)
    upper, lower = (b.view(x, b.places[x][rows]) for rows in (slice(0, 16), slice(16, 32)))
    y = b.binary("mul", b.unary("exp", upper), b.unary("sqrt", upper))
    z = b.binary("mul", y, lower)
    cost = fused(b.graph(z))
    assert cost.traffic == {
        Access(x, False): BF16 * 2 * 16 * 64, Access(z, True): BF16 * 16 * 64
    }  # fmt: skip


def test_what_writes_both_halves_of_a_tensor_writes_all_of_it():
    b = Builder()
    x, whole = b.input(64, 64), b.input(128, 64)
    for rows in (slice(0, 64), slice(64, 128)):
        b.copy_into(b.view(whole, b.places[whole][rows]), x)
    cost = fused(b.graph(whole))
    assert cost.traffic == {
        Access(x, False): BF16 * 64 * 64, Access(whole, True): BF16 * 128 * 64
    }  # fmt: skip


def test_in_place_twice_reads_once_and_writes_once():
    b = Builder()
    x = b.input(64, 64)
    part = b.view(x, b.places[x][:16])
    b.in_place("exp_", b.in_place("relu_", part))
    cost = fused(b.graph(x))
    assert cost.traffic == {
        Access(x, False): BF16 * 16 * 64, Access(x, True): BF16 * 16 * 64
    }  # fmt: skip


def test_after_one_half_is_written_the_other_half_still_has_to_be_read():
    b = Builder()
    source, x = b.input(32, 64), b.input(64, 64)
    upper, lower = (b.view(x, b.places[x][rows]) for rows in (slice(0, 32), slice(32, 64)))
    b.copy_into(upper, source)
    y = b.unary("exp", lower)
    assert fused(b.graph(y)).traffic[Access(x, False)] == BF16 * 32 * 64


def test_what_the_host_waits_for_is_written():
    b = Builder()
    x = b.input(64, 64)
    total = b.sum(b.unary("exp", x))
    b.item(total)
    assert fused(b.graph()).traffic[Access(total, True)] == BF16 * 64


def test_a_result_that_only_earlier_groups_read_is_not_written():
    b = Builder()
    x = b.unary("exp", b.input(64, 64))
    y = b.unary("relu", x)
    squashed = b.in_place("tanh_", x)
    z = b.binary("mul", squashed, y)
    graph = b.graph(z)
    costs, _ = price_ops(graph)
    groups = [FusionGroup(ops, "", "") for ops in ((0,), (1,), (2, 3))]
    last = group_costs(graph, groups, costs, DETECTED)[2]
    assert last.traffic == {
        Access(x, False): BF16 * 64 * 64, Access(y, False): BF16 * 64 * 64,
        Access(z, True): BF16 * 64 * 64,
    }  # fmt: skip


# -- factors and the floor -------------------------------------------------------------------------


def test_weight_residency_divides_weight_reads_by_family():
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    y = b.mm(b.mm(x, w, family="attention"), w, family="norm")
    residency = WeightResidency(attention=4.0, dense=2.0, moe=8.0)
    costs = plan(b.graph(y), ExecutionModel(weight_residency=residency)).costs
    whole = BF16 * 64 * 64
    assert [cost.traffic[Access(w, False)] for cost in costs] == [whole // 4, whole // 2]
    assert costs[0].traffic[Access(x, False)] == whole


def test_the_floor_is_inputs_and_weights_in_and_results_out():
    b = Builder()
    x, w = b.input(64, 64), b.weight(64, 64)
    y = b.mm(b.unary("relu", b.mm(x, w)), w)
    graph = b.graph(y)
    assert compulsory_bytes(graph, price_ops(graph)[0]) == BF16 * 3 * 64 * 64  # x, w, y


def test_the_floor_does_not_hold_what_the_step_writes_before_it_reads_it():
    b = Builder()
    x, state = b.input(64, 64), b.input(64, 64)
    b.copy_into(state, x)
    y = b.unary("exp", state)
    graph = b.graph(y)
    assert compulsory_bytes(graph, price_ops(graph)[0]) == BF16 * 3 * 64 * 64  # x in; state, y out


def test_the_floor_of_decode_holds_the_cache(traced):
    graph = traced("llama", "decode")
    cache = sum(graph.values[i].nbytes for i in graph.external if graph.values[i].role == "kv")
    weights = sum(
        graph.values[i].nbytes for i in graph.external
        if graph.values[i].role == "weights" and len(graph.values[i].shape) == 2
        and graph.values[i].shape[0] != 96
    )  # fmt: skip
    for name in ("eager", "efficient"):
        assert plan(graph, name).compulsory >= cache + weights


def read_of(*cuts: tuple[str, dict[str, int], tuple[int, int]]) -> tuple[OpGraph, Builder]:
    """Each cut of one input read by an op of its own: (op, its arguments, rows from and to)."""
    b = Builder()
    x, outputs = b.input(16, 64), []
    for name, arguments, (start, stop) in cuts:
        part = b.value(b.places[x][start:stop], like=x)
        b.op(name, {"self": Ref(x), **arguments}, [part], kind="view")
        outputs.append(b.unary("exp", part))
    return b.graph(*outputs), b


def floor_of(graph: OpGraph) -> int:
    return compulsory_bytes(graph, price_ops(graph)[0])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1, max_size=6))
def test_the_floor_is_at_most_the_union_of_the_slices_that_are_read(ends):
    cuts = [
        ("aten.slice.Tensor", {"dim": 0, "start": start, "end": stop}, (start, stop))
        for start, stop in ((min(pair), max(pair) + 1) for pair in ends)
    ]
    graph, b = read_of(*cuts)
    written = sum(graph.values[i].nbytes for i in graph.outputs)
    touched = BF16 * len(set().union(*(b.reads(op.id) for op in graph.kernels())))
    largest = max(stop - start for _, _, (start, stop) in cuts)
    assert BF16 * 64 * largest <= floor_of(graph) - written <= touched


def test_disjoint_slices_of_an_input_are_all_in_the_floor():
    graph, _ = read_of(
        ("aten.select.int", {"dim": 0, "index": 3}, (3, 4)),
        ("aten.select.int", {"dim": 0, "index": -1}, (15, 16)),
        ("aten.slice.Tensor", {"dim": 0, "start": 4, "end": 8}, (4, 8)),
    )
    assert floor_of(graph) == BF16 * 2 * 64 * (1 + 1 + 4)  # read and written


def test_what_a_loop_takes_turn_by_turn_is_in_the_floor_once_each():
    b = Builder()
    x = b.input(100, 64)
    inside = {"repeats": (0,)}
    part = b.value(b.places[x][:1], like=x)
    arguments = {"self": Ref(x), "dim": 0, "index": 0}
    b.op("aten.select.int", arguments, [part], kind="view", steps={"index": 1}, **inside)
    y = b.unary("exp", part, **inside)
    for value in (part, y):
        b.values[value] = replace(b.values[value], repeats=(0,))
    graph = b.graph(y, repeats=(Repeat(0, 100),))
    assert floor_of(graph) == floor_of(graph.expand()) == BF16 * 2 * 100 * 64
