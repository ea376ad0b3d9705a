"""Kernels beside what was measured, and the reasons that the numbers give."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.estimates.estimates import Estimate
from rooftrace.measured.alignment.aligning import align
from rooftrace.measured.fit.misses import Node, nodes, worst
from rooftrace.measured.profiles.kineto import read_trace
from tests.measured.profiles_support import GpuTrace, Stack


def priced(module: nn.Module, x: torch.Tensor, execution: str = "eager") -> Estimate:
    return rt.estimate(rt.trace(module.to("meta"), x.to("meta")), "h200-sxm", execution)


def only(one: Estimate, seconds: float) -> Node:
    """The one kernel of an estimate, measured at so many seconds."""
    (row,) = one.rows
    (node,) = nodes(one, {row.ops[0]: seconds})
    return node


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def linear(rows: int, width: int = 8192) -> Estimate:
    module = nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device="meta")
    return priced(module, bf16(rows, width))


def test_as_predicted_needs_no_reason() -> None:
    one = priced(nn.GELU(), bf16(8192, 8192))
    predicted = one.rows[0].timing.t_device
    assert only(one, 1.1 * predicted).reason == ""
    assert only(one, 1.1 * predicted).miss == pytest.approx(0.1 * predicted)


def test_a_kernel_that_moves_bytes_names_its_share_of_the_bandwidth() -> None:
    one = priced(nn.GELU(), bf16(8192, 8192))
    seconds = one.rows[0].bytes / (0.35 * 4.8e12)  # 35 % of 4.8 TB/s
    assert only(one, seconds).reason == "predicted HBM-bound, achieved 35.0 % of bandwidth"
    faster = only(one, one.rows[0].bytes / (1.5 * 4.8e12)).reason
    assert faster.startswith("150.0 % of HBM bandwidth: caches")


def test_a_large_product_names_its_share_of_the_peak() -> None:
    one = linear(8192)
    seconds = 2 * 8192**3 / (0.5 * one.peak)
    assert only(one, seconds).reason == "predicted compute-bound, achieved 50.0 % of the peak"
    assert "skips work" in only(one, 2 * 8192**3 / (1.5 * one.peak)).reason


def test_a_short_product_names_its_shape() -> None:
    module = nn.Conv2d(2048, 16, 1, bias=False, dtype=torch.bfloat16, device="meta")
    found = [
        only(one, 3 * one.rows[0].timing.t_device).reason
        for one in (priced(module, bf16(16, 2048, 28, 28)), linear(8192, 64))
        if one.rows[0].timing.regime == "compute"
    ]
    assert all(reason.startswith(("small", "launch")) for reason in found)


def test_a_short_kernel_is_bound_by_its_launch() -> None:
    one = priced(nn.ReLU(), bf16(4, 8))
    assert only(one, 4e-6).reason.startswith("launch bound: 4.00 us kernel with ")


def test_what_the_run_has_not() -> None:
    one = priced(nn.Sequential(nn.GELU(), nn.ReLU()), bf16(64, 64))
    gelu, relu = nodes(one, {one.rows[0].ops[0]: 1e-3})
    assert relu.measured is None and relu.reason == "not in the run"
    assert relu.miss == -relu.predicted
    assert worst((gelu, relu), 1) == (gelu,)


def test_a_group_that_ran_as_several_kernels(tmp_path: Path) -> None:
    graph = rt.trace(Stack(), torch.empty(4, 32))
    trace = GpuTrace()
    trace.run(graph, duration=lambda op: 50.0)
    one = rt.estimate(graph, "h200-sxm", "efficient")
    found = nodes(one, align(read_trace(trace.write(tmp_path / "gpu.json")), one.graph))
    fused = [node for node in found if len(node.row.ops) > 1]
    assert fused
    for node in fused:
        kernels = sum(one.graph.ops[op].kind == "kernel" for op in node.row.ops)
        assert node.reason == f"not fused in the run: {kernels} kernels for one"


@pytest.mark.parametrize("execution", ["eager", "efficient"])
def test_measured_seconds_are_shared_out_once(execution: str) -> None:
    graph = rt.trace(Stack(12), torch.empty(4, 32), phase="training")
    one = rt.estimate(graph, "h200-sxm", execution)
    seconds: Mapping[int, float] = {op.id: 1e-5 * one.graph.times(op) for op in one.graph.kernels()}
    found = nodes(one, seconds)
    assert sum(node.measured or 0.0 for node in found) == pytest.approx(sum(seconds.values()))


def test_a_cpu_gives_no_reason_for_a_gpu(tmp_path: Path) -> None:
    graph = rt.trace(Stack(), torch.empty(4, 32))
    with torch.profiler.profile(record_shapes=True) as run:
        Stack()(torch.zeros(4, 32))
    run.export_chrome_trace(str(tmp_path / "cpu.json"))
    trace = read_trace(tmp_path / "cpu.json")
    found = nodes(rt.estimate(graph, "h200-sxm", "eager"), align(trace, graph))
    assert any(node.measured for node in found)
    assert {node.reason for node in found} <= {"", "not in the run"}
