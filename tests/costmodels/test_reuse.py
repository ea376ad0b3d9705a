"""Bytes that a cache still holds: a cache that is gone through line by line says between what."""

from collections import OrderedDict
from dataclasses import replace

from hypothesis import given, settings, strategies as st

from rooftrace.costmodels.costs.cost import Cost
from rooftrace.costmodels.kernels.reuse import warm_bytes
from rooftrace.costmodels.planning.plans import Plan, plan
from rooftrace.tracer.graph.graph import OpGraph
from rooftrace.tracer.lower.stacks import roll_stacks
from tests.costmodels.graph_support import Builder
from tests.costmodels.random_graphs import programs
from tests.costmodels.repeat_support import stacks

LINE = 4


def read_only(planned: Plan) -> Plan:
    """The same without its writes, which are not looked up."""
    costs = [
        Cost(cost.work, {access: size for access, size in cost.traffic.items() if not access.write})
        for cost in planned.costs
    ]
    return replace(planned, costs=tuple(costs))


def simulated(planned: Plan, capacity: int) -> float:
    """Bytes of reads in a second step that are among the `capacity` bytes touched last."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for measured in (False, True):
        for cost in planned.costs:
            lines = [
                (at / -(-size // LINE), access.storage, at)
                for access, size in cost.traffic.items()
                for at in range(-(-size // LINE))
            ]
            for _, storage, at in sorted(lines):  # all storages go forward together
                if (storage, at) in held:
                    held.move_to_end((storage, at))
                    hits += LINE * measured
                held[storage, at] = None
                if len(held) * LINE > capacity:
                    held.popitem(last=False)
    return hits


@settings(deadline=None)
@given(programs(), st.integers(16, 4000))
def test_a_cache_gone_through_line_by_line_holds_about_as_much(program, capacity):
    planned = read_only(plan(program[0], "eager"))
    hits = simulated(planned, capacity)
    edges = 2 * LINE * sum(len(cost.traffic) for cost in planned.costs)  # lines are whole
    assert sum(warm_bytes(planned, capacity / 4)) <= hits + edges
    assert hits <= sum(warm_bytes(planned, capacity * 4)) + edges


@settings(deadline=None)
@given(programs(), st.integers(0, 2000))
def test_a_larger_cache_holds_no_less_and_none_more_than_there_is(program, capacity):
    planned = plan(program[0], "compiled")
    small, large = warm_bytes(planned, capacity), warm_bytes(planned, 2 * capacity)
    for less, more, cost in zip(small, large, planned.costs, strict=True):
        assert 0 <= less <= more + 1e-9
        assert more <= cost.bytes() + 1e-9


@settings(deadline=None)
@given(stacks(), st.sampled_from([64, 256, 1024, 10**4, 10**6]))
def test_repeats_stand_for_their_iterations(graph, capacity):
    flat = plan(graph, "eager")
    short = plan(roll_stacks(graph), "eager")

    def total(planned: Plan) -> float:
        found = warm_bytes(planned, capacity)
        return sum(g.times * w for g, w in zip(planned.groups, found, strict=True))

    size = sum(g.times * c.bytes() for g, c in zip(flat.groups, flat.costs, strict=True))
    assert abs(total(short) - total(flat)) <= 0.15 * size  # edges are not like the middle


def chain(*widths: int) -> OpGraph:
    """exp(exp(... x)): each of so many bf16 numbers."""
    b = Builder()
    x = b.input(*widths)
    for _ in range(3):
        x = b.unary("exp", x)
    return b.graph(x)


def test_what_was_just_written_is_there_and_what_is_long_ago_is_not():
    graph = chain(1000)  # 2,000 bytes, and a step moves 12,000
    first, second, third = warm_bytes(plan(graph, "eager"), 5_000)
    assert first == 2000  # it writes what is dead soon; x was read long ago
    assert second == 4000  # it reads what the first wrote
    assert third == 2000  # the result stays, and was written a step ago
    assert warm_bytes(plan(graph, "eager"), 0) == [0, 0, 0]
    assert warm_bytes(plan(graph, "eager"), 10**6) == [4000, 4000, 4000]


def test_a_cold_cache_has_nothing_of_what_comes_from_outside():
    graph = chain(1000)
    first, second, third = warm_bytes(plan(graph, "eager"), 10**6, cold=True)
    assert (first, second, third) == (2000, 4000, 2000)
