"""Kernels and launches of a step that is cut into compiled graphs."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from rooftrace.costmodels.estimates.estimates import estimate
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.grouping import fuse
from rooftrace.costmodels.fusion.partition import beyond
from rooftrace.costmodels.fusion.plans import Launch, Plan, plan
from rooftrace.costmodels.timing.queue import HostSeconds
from rooftrace.graph import marks
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op
from rooftrace.hardware import load_host
from rooftrace.hardware.chip import Fact
from rooftrace.hardware.chipfile.reading import load_chip
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs

FUSED = ("compiled", "efficient")
COMPILED = execution_model("compiled")
H200 = load_chip("h200-sxm")


def cut(graph: OpGraph, places: dict[int, bool]) -> OpGraph:
    """The graph with a mark before each of these ops; whether what follows is eager."""
    ops: list[Op] = []
    for op in graph.ops:
        if op.id in places:
            facts = {"eager": True} if places[op.id] else {}
            ops.append(Op(0, f"{marks.GRAPH_BREAK}.default", {}, (), (), kind="view", facts=facts))
        ops.append(op)
    return graph.with_ops(ops).verify()


@st.composite
def cut_programs(draw: st.DrawFn, eager: bool = True) -> tuple[OpGraph, dict[int, bool]]:
    """A random program, and where it is cut; a stretch that is eager ends at the next mark."""
    graph, _ = draw(programs())
    kinds = st.booleans() if eager else st.just(False)
    places = draw(st.dictionaries(st.integers(0, len(graph.ops) - 1), kinds, max_size=4))
    return graph, places


def segments(graph: OpGraph) -> list[list[int]]:
    """Numbers of the kernel ops between marks, by a walk over the ops."""
    parts: list[list[int]] = [[]]
    for op in graph.ops:
        if op.name == marks.GRAPH_BREAK:
            parts.append([])
        elif op.kind == "kernel":
            parts[-1].append(op.id)
    return parts


@settings(max_examples=50)
@given(cut_programs())
def test_every_kernel_lies_in_one_segment_and_every_op_in_one_kernel(
    program: tuple[OpGraph, dict[int, bool]],
) -> None:
    graph = cut(*program)
    parts = segments(graph)
    groups = fuse(graph, COMPILED)
    launched = [op for group in groups for op in group.ops]
    assert len(launched) == len(set(launched))
    for group in groups:
        assert sum(not set(part).isdisjoint(group.ops) for part in parts) == 1
    alone = {op for group in fuse(graph, execution_model("eager")) for op in group.ops}
    assert set(launched) == alone


def only(graph: OpGraph, members: list[int]) -> OpGraph:
    """The ops of one segment as a graph of their own, which makes what others read."""
    values = graph.values
    later = {values[i].storage for op in graph.ops[members[-1] + 1 :] for i in op.inputs} | {
        values[i].storage for i in graph.outputs
    }
    ops = [graph.ops[number] for number in members]
    made = [i for op in ops for i in op.outputs if values[i].storage in later]
    return graph.with_ops(ops, outputs=tuple(dict.fromkeys(made)))


@settings(max_examples=50)
@given(cut_programs(eager=False))
def test_the_kernels_of_a_segment_are_those_of_its_ops_as_a_graph_of_their_own(
    program: tuple[OpGraph, dict[int, bool]],
) -> None:
    graph = cut(*program)
    together = {frozenset(group.ops) for group in fuse(graph, COMPILED)}
    apart: set[frozenset[int]] = set()
    part: list[int] = []
    for op in (*graph.ops, None):
        if op is not None and op.name != marks.GRAPH_BREAK:
            part.append(op.id)
            continue
        if part:
            for group in fuse(only(graph, part), COMPILED):
                apart.add(frozenset(part[number] for number in group.ops))
        part = []
    assert together == apart


@settings(max_examples=50)
@given(cut_programs(), st.data())
def test_more_breaks_never_make_a_step_faster(
    program: tuple[OpGraph, dict[int, bool]], data: st.DataObject
) -> None:
    graph, places = program
    order = data.draw(st.permutations(sorted(places)))
    for execution in FUSED:
        steps = [cut(graph, {p: False for p in order[:n]}) for n in range(len(order) + 1)]
        seconds = [estimate(step, H200, execution).t_est for step in steps]
        assert all(more >= less * (1 - 1e-12) for less, more in pairwise(seconds)), execution


def step(length: int = 6) -> OpGraph:
    """Ops one behind the other that a compiler makes one kernel."""
    b = Builder()
    last = b.input(64, 64)
    for _ in range(length):
        last = b.unary("exp", last)
    return b.graph(last)


def test_a_break_in_a_chain_stores_what_crosses_it_and_loads_it_again() -> None:
    whole, broken = step(), cut(step(), {3: False})
    assert estimate(whole, H200, "compiled").kernels == 1
    broken_step = estimate(broken, H200, "compiled")
    assert broken_step.kernels == 2
    more = broken_step.bytes_hbm - estimate(whole, H200, "compiled").bytes_hbm
    assert more == 2 * (64 * 64) * 2  # write + read of one bf16 value


def host(planned: Plan) -> list[tuple[int, int, int]]:
    return [(one.dispatches, one.singles, one.entries) for one in planned.launches]


def test_the_host_enters_a_graph_behind_a_break() -> None:
    broken = cut(step(), {3: False})
    assert host(plan(broken, "compiled")) == [(0, 0, 1), (1, 0, 0), (0, 0, 1), (1, 0, 0)]
    assert host(plan(broken, "efficient")) == [(1, 0, 0), (1, 0, 1), (0, 0, 0)]


def test_between_graphs_python_runs_op_by_op() -> None:
    broken = plan(cut(step(), {2: True, 4: False}), "compiled")
    assert [len(group.ops) for group in broken.groups] == [2, 1, 1, 2]
    assert sum(one.singles for one in broken.launches) == 2
    assert sum(one.entries for one in broken.launches) == 2
    assert sum(one.dispatches for one in broken.launches) == 2


def test_the_seconds_of_an_entry_are_a_fact_of_the_chip() -> None:
    facts = ("dispatch_eager", "dispatch_view", "module_call", "graph_entry")
    units = {name: Fact(10.0**n, "", "made up", "guess") for n, name in enumerate(facts)}
    times = HostSeconds(2.0, chip=replace(H200, **units))
    launch = Launch(4, on_device=True, singles=1, views=2, calls=3, entries=5)
    assert times.of(launch) == 4 * 2.0 + 5321  # compiled launches, then each digit its own fact
    assert HostSeconds(2.0, chip=H200).of(Launch(4, on_device=True)) == 8.0
    whole, broken = step(), cut(step(), {3: False})
    less, more = (estimate(graph, H200, "compiled").t_est for graph in (whole, broken))
    entry = load_host("typical").facts["graph_entry"]
    assert more - less >= entry.value
    assert H200.graph_entry is entry


def test_eager_steps_know_no_breaks() -> None:
    whole, broken = step(), cut(step(), {2: True, 4: False})
    assert estimate(broken, H200, "eager").t_est == estimate(whole, H200, "eager").t_est


@pytest.mark.parametrize("execution", FUSED)
def test_own_joins_do_not_reach_across_a_break(execution: str) -> None:
    graph = cut(step(), {3: False})
    model = execution_model(execution)
    planned = plan(graph, model)
    groups = beyond(planned.graph, planned.groups, planned.op_costs, planned.costs)
    assert [group.ops for group in groups] == [group.ops for group in planned.groups]
