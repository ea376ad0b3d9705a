"""Diffs of steps over many processes: the mesh, the groups, and the time of the network."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch

import rooftrace as rt
from rooftrace.graph import Group
from rooftrace.reporting.views.results import as_markdown, as_text
from tests.tracer.sharded_models import BATCH, SEQ, Net, ddp, fsdp, sp, tp

SPREADS = {"tp": tp, "sp": sp, "dp": fsdp, "ddp": ddp}


@cache
def traced(way: str, size: int, phase: str = "training") -> Any:
    axis = "dp" if way == "ddp" else way.replace("sp", "tp")
    with rt.tools.fake_mesh({axis: size}) as mesh, torch.device("meta"):
        net = SPREADS[way](Net(), mesh)
        return rt.trace(net, torch.zeros(BATCH, SEQ, dtype=torch.long), phase=phase)


def only(result: Any) -> Any:
    (phase,) = result.phases
    return phase


@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("tp", {"all_reduce over tp"}),
        ("sp", {"reduce_scatter, all_gather, all_reduce over tp"}),
        ("dp", {"all_gather, reduce_scatter over dp"}),
        ("ddp", {"all_reduce over dp"}),
    ],
)
def test_a_group_of_another_size_is_a_change_with_its_cause(way: str, kinds: set[str]) -> None:
    before, after = traced(way, 4), traced(way, 8)
    result = rt.diff(before, after)
    assert not result.unchanged
    phase = only(result)
    axis = next(iter(before.mesh))
    causes = [row.cause for row in phase.rows]
    assert f"mesh {axis}=8 instead of {axis}=4" in causes[0]
    assert kinds <= {
        part.removesuffix(": group of 8 instead of 4")
        for cause in causes
        for part in cause.split("; ")
    }
    assert phase.meshes == ({axis: 4}, {axis: 8})

    estimates = [rt.estimate(graph) for graph in (before, after)]
    for number, step in enumerate(estimates):
        sides = [phase.totals[name] for name in ("time", "communication", "exposed")]
        time, together, exposed = ((side.before, side.after)[number] for side in sides)
        assert time == pytest.approx(step.t_est)
        assert together == pytest.approx(sum(row.seconds for row in step.communication))
        assert exposed == pytest.approx(sum(row.exposed for row in step.communication))
    # The rows add up to the change of the step.
    rows = sum(row.time.delta for row in phase.rows)
    assert rows == pytest.approx(phase.totals["time"].delta, abs=1e-9 * estimates[0].t_est)
    for text in (as_text(result), as_markdown(result)):
        assert f"mesh {axis}=4 -> {axis}=8" in text
        assert "communication" in text


@pytest.mark.parametrize("way", SPREADS)
def test_equal_sharded_steps_are_no_change(way: str) -> None:
    result = rt.diff(traced(way, 4), traced.__wrapped__(way, 4))  # traced once more
    assert result.unchanged
    assert "no change in any phase" in as_text(result)


def regrouped(graph: Any, ranks: tuple[int, ...], axis: str) -> Any:
    return graph.replace(groups=dict.fromkeys(graph.groups, Group(ranks, axis)))


@pytest.mark.parametrize(
    ("ranks", "axis", "cause"),
    [
        ((0, 1, 2, 3), "cp", "all_gather, all_reduce over cp instead of tp"),
        (
            (0, 8, 16, 24),
            "tp",
            "all_gather, all_reduce over tp: ranks +0, +8, +16, +24 instead of +0, +1, +2, +3",
        ),
        ((0, 1), "tp", "all_gather, all_reduce over tp: group of 2 instead of 4"),
    ],
)
def test_other_processes_at_equal_sizes_are_a_change(
    ranks: tuple[int, ...], axis: str, cause: str
) -> None:
    graph = traced("tp", 4, "forward")
    result = rt.diff(graph, regrouped(graph, ranks, axis))
    assert not result.unchanged
    texts = " | ".join(row.cause for row in only(result).rows)
    assert cause.partition(" over ")[2] in texts
    assert "group_size" not in texts


def test_more_bytes_in_an_exchange_are_a_change() -> None:
    graph = traced("tp", 4, "forward")

    def doubled(op: Any) -> Any:
        if op.collective is None:
            return op
        twice = msgspec.structs.replace(op.collective, bytes=2 * op.collective.bytes)
        return msgspec.structs.replace(op, collective=twice)

    result = rt.diff(graph, graph.with_ops(map(doubled, graph.ops)))
    assert any("all_reduce over tp: " in row.cause for row in only(result).rows)
    assert only(result).totals["communication"].delta > 0


def test_another_mesh_alone_is_a_change() -> None:
    graph = traced("tp", 4, "forward")
    result = rt.diff(graph, graph.replace(mesh={"dp": 2, "tp": 4}))
    assert not result.unchanged
    assert "mesh tp=4 -> dp=2,tp=4" in as_text(result)
    assert result.to_dict()["phases"]["forward"]["meshes"] == [{"tp": 4}, {"dp": 2, "tp": 4}]


def test_a_step_of_one_process_has_no_totals_of_a_network() -> None:
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long, device="meta")
    graph = rt.trace(Net().to("meta"), ids)
    phase = only(rt.diff(graph, graph.replace(values=graph.values)))
    assert "communication" not in phase.totals
    assert "meshes" not in rt.diff(graph, graph).to_dict()["phases"]["forward"]
