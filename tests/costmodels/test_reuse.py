"""Bytes that a cache still holds: a cache that is gone through line by line says between what."""

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rooftrace.costmodels.fusion.plans import Plan, plan
from rooftrace.costmodels.kernels.works import warm_bytes, warm_columns, warm_parts
from rooftrace.costmodels.ops.cost import Access, Cost
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.stacks import roll_stacks
from tests.conftest import in_turn
from tests.costmodels.batch_support import decode
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


@settings(deadline=None, max_examples=50)
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


@settings(deadline=None, max_examples=40)
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


# -- at many sizes ---------------------------------------------------------------------------------


CORNERS = [(8, 64), (8, 512), (32, 64), (32, 512)]
CAPACITIES = (0, 50_000, 300_000, 2e6, 1e8)


@pytest.mark.parametrize(
    ("execution", "cold"), in_turn(["eager", "naive", "efficient"], [False, True])
)
def test_the_parts_of_one_plan_tell_what_a_cache_holds_at_every_size(execution, cold):
    """Coefficients of 1, batch, kv and batch x kv from four sizes hold at others."""
    corners = [plan(decode(*size), execution) for size in CORNERS]
    matrix = np.array([[1, b, k, b * k] for b, k in CORNERS], dtype=float)

    def coefficients(group: int, access: Access) -> np.ndarray:
        known = [corner.costs[group].traffic[access] for corner in corners]
        return np.linalg.solve(matrix, np.array(known, dtype=float))

    parts = warm_parts(corners[0], coefficients, cold)
    for batch, kv in [(8, 64), (16, 100), (40, 1000), (90, 7)]:  # the table has 96 rows
        terms = np.array([1, batch, kv, batch * kv], dtype=float)
        alone = plan(decode(batch, kv), execution)
        for capacity in CAPACITIES:
            told = [warm_columns(part, capacity, terms.dot) for part in parts]
            expected = warm_bytes(alone, capacity, cold)
            assert told == pytest.approx(expected, rel=1e-9, abs=1e-6)
        assert any(told)


@pytest.mark.parametrize("execution", ["eager", "efficient"])
def test_amounts_may_be_arrays_over_points(execution):
    plans = [plan(decode(*size), execution) for size in [(1, 8), (3, 700), (64, 64)]]
    parts = warm_parts(
        plans[0], lambda i, access: np.array([float(p.costs[i].traffic[access]) for p in plans])
    )
    for capacity in CAPACITIES:
        told = [np.broadcast_to(warm_columns(part, capacity), 3) for part in parts]
        expected = [warm_bytes(p, capacity) for p in plans]
        assert np.transpose(told) == pytest.approx(np.array(expected), rel=1e-12)
    assert np.max(told) > 0
