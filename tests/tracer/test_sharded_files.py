"""Graphs of sharded steps as files, and rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.graph import GraphError, OpGraph, marks
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.values import torch_dtype
from tests.conftest import mostly_heavy
from tests.tracer.test_sharded import WAYS, sharded

BY_NAME = ("tp", "tp-again", "sp")
"""Ways whose collectives name their groups; those of the others are objects."""


@pytest.mark.parametrize("way", mostly_heavy(WAYS, ("fsdp-bf16", "hsdp", "tp-again", "sp", "ddp")))
def test_a_sharded_graph_is_the_same_after_a_file(way: str, tmp_path: Path) -> None:
    graph = sharded(way, layers=5) if way in BY_NAME else sharded(way)
    assert graph.groups and graph.mesh
    rt.save(graph, tmp_path / "graph.json.gz")
    read = rt.load(tmp_path / "graph.json.gz")
    assert read == graph
    assert read.groups == graph.groups and list(read.mesh.items()) == list(graph.mesh.items())
    assert [op.stream for op in read.ops] == [op.stream for op in graph.ops]
    assert [op.collective for op in read.ops] == [op.collective for op in graph.ops]
    rt.save(read, tmp_path / "again.json.gz")
    assert (tmp_path / "again.json.gz").read_bytes() == (tmp_path / "graph.json.gz").read_bytes()
    estimates = [rt.estimate(each, system="dgx-h200") for each in (graph, read)]
    assert estimates[0].t_est == estimates[1].t_est
    assert estimates[0].communication == estimates[1].communication


def test_marks_of_streams_are_in_the_file(tmp_path: Path) -> None:
    graph = sharded("fsdp")
    rt.save(graph, tmp_path / "graph.json")
    names = {op.name for op in rt.load(tmp_path / "graph.json").ops}
    assert names >= marks.STREAM_MARKS | {marks.RESIZE_STORAGE}


def state_of(graph: OpGraph) -> dict[str, torch.Tensor]:
    flat = graph.expand()
    held = [flat.values[value] for value in flat.external if value not in flat.inputs]
    return {
        each.name: torch.ones(each.shape, dtype=torch_dtype(each.dtype))
        for each in held
        if each.name
    }


@pytest.mark.parametrize("way", BY_NAME)
def test_collectives_that_name_their_group_are_rebuilt_inside_a_mesh(way: str) -> None:
    graph = sharded(way, phase="forward")
    inputs = [torch.zeros(graph.values[value].shape, dtype=torch.long) for value in graph.inputs]
    with rt.tools.fake_mesh(graph.mesh):
        (made,) = to_fx(graph, state_of(graph))(*inputs)
    assert made.shape == graph.values[graph.outputs[0]].shape
    with pytest.raises(GraphError, match=r"inside rt\.tools\.fake_mesh\(\{'tp': 4\}\)"):
        to_fx(graph)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in BY_NAME])
def test_collectives_of_groups_that_are_objects_are_refused(way: str) -> None:
    graph: Any = sharded(way)
    with (
        rt.tools.fake_mesh(graph.mesh),
        pytest.raises(GraphError, match="trace the module before it is"),
    ):
        to_fx(graph)
