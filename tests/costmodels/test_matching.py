"""Kernels of two graphs matched: every run once, the same both ways; rows add up to the totals."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.estimates.estimates import estimate
from rooftrace.diffs.costs.differences import diff_estimates
from rooftrace.diffs.costs.sides import Flow, match
from rooftrace.graph.graph import OpGraph
from tests.costmodels.random_graphs import programs


def compared(before: OpGraph, after: OpGraph):
    sides = [
        {graph.phase: estimate(graph, "h200-sxm", name)}
        for name in ("efficient", "eager")
        for graph in (before, after)
    ]
    diff = diff_estimates(sides[0], sides[1], eager=(sides[2], sides[3]))
    (phase,) = diff.phases
    return diff, phase


@settings(max_examples=60, deadline=None)
@given(programs(), programs())
def test_rows_add_up_and_the_way_back_is_the_negative(first, second):
    (before, _), (after, _) = first, second
    _, there = compared(before, after)
    _, back = compared(after, before)
    for name in ("time", "bytes", "flops", "kernels"):
        total = there.totals[name]
        rows = sum(getattr(row, name).delta for row in there.rows)
        assert rows == pytest.approx(total.delta, abs=1e-9 * max(total.before, total.after))
        assert back.totals[name].delta == -total.delta
    assert sum(held.bytes.delta for held in there.held) == there.totals["memory"].delta
    assert sum(held.bytes.delta for held in back.held) == -there.totals["memory"].delta


@settings(max_examples=60, deadline=None)
@given(programs(), programs())
def test_every_run_is_in_one_pair_or_left_over(first, second):
    graphs = first[0], second[0]
    flows = [Flow(graph) for graph in graphs]
    matching = match(*flows)
    for number, left in enumerate(matching.left):
        runs = Counter(left)
        for pair in matching.pairs:
            runs[(pair.before, pair.after)[number]] += pair.times
        graph = graphs[number]
        assert runs == {op.id: graph.times(op) for op in graph.kernels()}
    for pair in matching.pairs:
        assert graphs[0].ops[pair.before].name == graphs[1].ops[pair.after].name


@settings(max_examples=40, deadline=None)
@given(programs())
def test_a_graph_is_equal_to_itself(made):
    graph, _ = made
    diff, phase = compared(graph, graph)
    assert diff.unchanged and phase.rows == ()


@settings(max_examples=40, deadline=None)
@given(programs())
def test_kernels_that_do_not_read_each_other_may_change_places(made):
    """The order of the ops is no part of what they are: two neighbours swapped are the same."""
    graph, _ = made
    for at in range(len(graph.ops) - 1):
        a, b = graph.ops[at : at + 2]
        storages = [{graph.values[i].storage for i in (*op.inputs, *op.outputs)} for op in (a, b)]
        if "kernel" == a.kind == b.kind and not storages[0] & storages[1]:
            break
    else:
        return
    ops = list(graph.ops)
    ops[at : at + 2] = replace(b, id=at), replace(a, id=at + 1)
    matching = match(Flow(graph), Flow(graph.replace(ops=tuple(ops)).verify()))
    assert matching.left == ({}, {})


def test_a_layer_more_leaves_the_others_matched():
    def traced(layers: int) -> OpGraph:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))
        return rt.trace(model, torch.zeros(4, 8))

    matching = match(Flow(traced(3)), Flow(traced(5)))
    removed, added = matching.left
    assert removed == {}
    assert sum(added.values()) == 2 * 2
