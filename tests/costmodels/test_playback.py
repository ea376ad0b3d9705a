"""The queue written out launch by launch ends when the estimate says, folded or not."""

from collections import Counter

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates import play
from rooftrace.graph.graph import OpGraph
from tests.measured.profiles_support import Stack


@pytest.fixture(scope="module")
def stack() -> OpGraph:
    return rt.trace(Stack(12), torch.empty(4, 32), phase="training")


@pytest.mark.parametrize("execution", ["naive", "eager", "compiled", "efficient"])
@pytest.mark.parametrize("limit", [50_000, 10])
def test_the_end_is_t_est(stack: OpGraph, execution: str, limit: int) -> None:
    one = rt.estimate(stack, "h200-sxm", execution)
    played = play(one, limit)
    assert played.end == pytest.approx(one.t_est, rel=1e-9)
    assert bool(played.folded) == (limit == 10)


@pytest.mark.parametrize("execution", ["eager", "efficient"])
def test_every_kind_of_kernel_runs_as_often_as_its_rows_say(stack: OpGraph, execution: str) -> None:
    one = rt.estimate(stack, "h200-sxm", execution)
    kinds = [tuple(one.graph.ops[op].target for op in row.ops) for row in one.rows]
    ran: Counter[tuple[str, ...]] = Counter()
    starts: dict[int, float] = {}
    for launch in play(one).launches:
        if launch.row is not None and launch.start is not None:
            ran[kinds[launch.row]] += 1
            starts.setdefault(launch.row, launch.start)
    said: Counter[tuple[str, ...]] = Counter()
    for kind, row in zip(kinds, one.rows, strict=True):
        said[kind] += row.count
        assert starts[row.index] == pytest.approx(row.timing.start, abs=1e-12)
    assert ran == said


def test_kernels_run_in_the_modules_of_their_rows(stack: OpGraph) -> None:
    one = rt.estimate(stack, "h200-sxm", "eager")
    launches = play(one).launches
    for row in one.rows:
        assert {x.module for x in launches if x.row == row.index} == set(row.modules)


def test_forward_goes_through_the_layers_and_backward_returns(stack: OpGraph) -> None:
    one = rt.estimate(stack, "h200-sxm", "eager")
    paths: dict[str, list[str]] = {"forward": [], "backward": []}
    for launch in play(one).launches:
        if launch.row is not None and launch.module.endswith(".up"):
            paths[one.rows[launch.row].part].append(launch.module)
    forward = list(dict.fromkeys(paths["forward"]))
    assert forward == [f"blocks.{i}.up" for i in range(12)]
    assert list(dict.fromkeys(paths["backward"])) == forward[::-1]


def test_the_device_runs_one_kernel_at_a_time_after_its_dispatch(stack: OpGraph) -> None:
    free = 0.0
    for launch in play(rt.estimate(stack, "h200-sxm", "eager")).launches:
        if launch.start is not None and launch.end is not None:
            assert launch.start >= launch.host_end - 1e-15
            assert launch.start >= free - 1e-15
            free = launch.end


def test_folded_iterations_fill_the_time_that_they_take() -> None:
    graph = rt.trace(Stack(12), torch.empty(4, 32))
    one = rt.estimate(graph, "h200-sxm", "efficient")
    assert graph.repeats
    played = play(one, limit=1)
    (folded,) = played.folded
    assert folded.count == graph.repeats[0].count - 1
    inside = [row for row in one.rows if row.count == graph.repeats[0].count]
    turn = sum(row.timing.t_device / row.count for row in inside)
    assert folded.end - folded.start == pytest.approx(folded.count * turn, rel=1e-6)
