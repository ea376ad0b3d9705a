"""Traces of compiled steps: validated and calibrated kernel by kernel, with their counters."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rooftrace as rt
from rooftrace.errors import ProfileError
from rooftrace.measured.alignment import is_compiled
from rooftrace.measured.alignment.compiled_steps import join_checks
from rooftrace.measured.profiles import read_trace

from .profiles_support import GpuTrace

SIZE = 4096
LAYERS = 6
SLOW = 1.25


def chain(x: Tensor, weights: Tensor) -> Tensor:
    for _ in range(LAYERS):
        x = ((x @ weights) + 1.0).relu() * 2.0
    return x


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    with torch.device("meta"):
        return rt.trace(chain, torch.empty(SIZE, SIZE), torch.empty(SIZE, SIZE))


def kernels_of(graph: rt.types.OpGraph) -> list[tuple[str, str, float]]:
    """Name of the call, name of the kernel and seconds, of each kernel in its order."""
    listed = []
    for number, row in enumerate(rt.estimate(graph, "h100-sxm", "compiled").rows):
        product = row.name == "aten.mm"
        name = "sm90_gemm_f32" if product else f"triton_poi_fused_add_mul_relu_{number}"
        listed.append(("aten::mm" if product else "", name, SLOW * row.timing.t_device))
    return listed


def written(folder: Path, graph: rt.types.OpGraph) -> Path:
    """The trace of a step whose kernels take SLOW times as long as predicted."""
    trace, listed = GpuTrace(), kernels_of(graph)

    def work() -> None:
        region = trace.op_event("Torch-Compiled Region: 0/0", [], trace.clock, 9000.0)
        for call, name, seconds in listed:
            if call:
                trace.op(call, [(SIZE, SIZE), (SIZE, SIZE)], [(name, 1e6 * seconds)])
            else:
                trace.launch(name, 1e6 * seconds, trace.clock + 1, region)
                trace.clock += 4

    trace.step(work)
    trace.clock += 1
    return trace.write(folder / "step.json")


def counters(folder: Path, names: list[str], size: float) -> Path:
    head = '"Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum"'
    lines = [f'{head},"gpu__time_duration.sum"', '"","","byte","byte","nsecond"']
    lines += [f'"{name}","(8, 1, 1)","{size:.0f}","0","5000"' for name in names]
    path = folder / "ncu.csv"
    path.write_text("\n".join(lines))
    return path


def test_a_compiled_trace_is_validated_kernel_by_kernel(graph, tmp_path):
    path = written(tmp_path, graph)
    assert is_compiled(read_trace(path))
    result = rt.validate(path, "h100-sxm", "compiled", graph)
    assert result.coverage == pytest.approx(1.0)
    assert len(result.nodes) == 2 * LAYERS
    for check in result.nodes:
        assert check.node.measured == pytest.approx(SLOW * check.node.predicted, rel=0.01)
        assert check.node.measured_ops == len(check.node.row.ops)
    assert "inferred by their names" in str(result)
    assert result.write(tmp_path / "out")


def test_its_counters_stand_beside_its_kernels(graph, tmp_path):
    path = written(tmp_path, graph)
    names = [name for _, name, _ in kernels_of(graph)]
    moved = 2.0 * 4 * SIZE * SIZE  # the pointwise kernels read one matrix and write one
    found = rt.validate(
        path, "h100-sxm", "compiled", graph, counters=counters(tmp_path, names, moved)
    )
    for check in found.nodes:
        assert check.dram == pytest.approx(moved)
    assert "counters of 12 kernels" in str(found).replace("\n", " ")
    with pytest.raises(ProfileError, match="count the step that was measured"):
        rt.validate(path, "h100-sxm", "compiled", graph, counters=counters(tmp_path, ["a"], 1.0))


def test_it_is_calibrated_with_factors_by_its_counters(graph, tmp_path):
    path = written(tmp_path, graph)
    names = [name for _, name, _ in kernels_of(graph)]
    by_rule = {row.name: row.bytes for row in rt.estimate(graph, "h100-sxm", "compiled").rows}
    assert len(by_rule) == 2
    size = 0.8 * 2 * 4 * SIZE * SIZE
    found = rt.calibrate(
        path, "h100-sxm", "compiled", graph, counters=counters(tmp_path, names, size)
    )
    factor = found.traffic.factors.factors["activations"]
    # Products read three matrices by rule and pointwise kernels two: between 0.8 and 0.53.
    assert factor.by == "counters" and 0.5 < factor.factor < 0.85
    assert math.isfinite(factor.error)
    assert found.execution == "compiled"
    assert found.fit.errors.mean < 0.7 * found.before.mean  # two kinds of kernels: one factor


def test_an_eager_execution_still_refuses_it(graph, tmp_path):
    with pytest.raises(ProfileError):
        rt.validate(written(tmp_path, graph), "h100-sxm", "eager", graph)


def test_each_join_is_set_beside_what_the_compiler_made(graph, tmp_path):
    step = rt.tools.fused(written(tmp_path, graph), graph)
    (check,) = step.joins
    # In each layer two ops came to the first: the compiler has all three in one kernel.
    assert (check.join, check.ours, check.made) == ("same elements", 2 * LAYERS, 2 * LAYERS)
    assert "same elements" not in str(step)  # nothing differs


def test_a_join_that_the_compiler_did_not_make_is_named(graph):
    groups = rt.plan(graph.expand(), "compiled").groups
    alone = {op: number for number, op in enumerate(op for g in groups for op in g.ops)}
    (check,) = join_checks(groups, alone)
    assert (check.ours, check.made) == (2 * LAYERS, 0)
    assert str(check) == "same elements: the compiler made 0 of 12 steps"
    both = {op: number for number, g in enumerate(groups) for op in g.ops[:2]}
    (check,) = join_checks(groups, both)
    assert (check.ours, check.made) == (LAYERS, LAYERS)
