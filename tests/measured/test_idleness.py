"""How long the device of a trace is idle, and what the host did then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rooftrace.measured.fit.idleness import LATE, LOADED, QUEUED, WAITED, Idleness, idleness_of
from rooftrace.measured.profiles import read_trace
from rooftrace.reporting.views.rundiffs import _LABELS
from tests.measured.profiles_support import GpuTrace

pytestmark = pytest.mark.quick
US = 1e-6
SHAPES = [(8, 64), (64, 64)]


def idle(path: Path, step: Callable[[GpuTrace], None]) -> Idleness:
    """Of a trace with three equal steps."""
    trace = GpuTrace()
    for _ in range(3):
        trace.clock = max(trace.clock, trace.free)

        def work() -> None:
            step(trace)
            trace.clock = max(trace.clock, trace.free)

        trace.step(work)
    found = idleness_of(read_trace(trace.write(path / "trace.json")))
    assert found is not None
    return found


def test_of_a_host_that_is_slower_than_its_kernels_the_launches_are_the_reason(
    tmp_path: Path,
) -> None:
    def step(trace: GpuTrace) -> None:
        for _ in range(10):
            trace.op("aten::mm", SHAPES, [("gemm", 2.0)])  # 10 us on the host

    found = idle(tmp_path, step)
    assert found.busy == pytest.approx(20 * US)
    assert found.share == pytest.approx(1 - found.busy / found.seconds) and found.share > 0.7
    assert next(iter(found.reasons)) == LATE and next(iter(found.filled)) == "aten::mm"
    idle_seconds = found.seconds - found.busy
    assert sum(found.reasons.values()) == pytest.approx(idle_seconds)
    assert sum(found.filled.values()) <= idle_seconds * (1 + 1e-9)
    words = found.words(predicted=10 * US, wall=found.seconds)
    assert words.startswith(f"device idle {found.share:.1%}".replace("%", " %"))
    assert "(-50.0%)" in words and LATE in words and "aten::mm" in words


def test_of_a_host_that_is_ahead_the_device_is_hardly_idle(tmp_path: Path) -> None:
    def step(trace: GpuTrace) -> None:
        for _ in range(10):
            trace.op("aten::mm", SHAPES, [("gemm", 100.0)])

    assert idle(tmp_path, step).share < 0.05


def test_a_loop_that_waits_for_its_results_is_told_from_a_slow_host(tmp_path: Path) -> None:
    def step(trace: GpuTrace) -> None:
        for _ in range(5):
            trace.op("aten::mm", SHAPES, [("gemm", 100.0)])
            begin, trace.clock = trace.clock, trace.free + 3
            waited = {"correlation": 900 + int(begin)}
            trace.event(
                "cuda_runtime", "cudaStreamSynchronize", begin, trace.clock - begin, **waited
            )
            trace.clock += 40

    found = idle(tmp_path, step)
    assert next(iter(found.reasons)) == WAITED
    assert found.reasons[WAITED] > 4 * 40 * US


def test_the_time_of_a_data_loader_is_named(tmp_path: Path) -> None:
    def step(trace: GpuTrace) -> None:
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        trace.event("user_annotation", name, trace.clock, 500.0)
        trace.clock += 500
        trace.op("aten::mm", SHAPES, [("gemm", 100.0)])

    found = idle(tmp_path, step)
    assert next(iter(found.reasons)) == LOADED
    assert found.reasons[LOADED] == pytest.approx(500 * US)


def test_kernels_that_start_late_though_launched_are_queued(tmp_path: Path) -> None:
    def step(trace: GpuTrace) -> None:
        for _ in range(4):
            trace.op("aten::mm", SHAPES, [("gemm", 30.0)])
            trace.free += 25  # another stream holds the next one up

    found = idle(tmp_path, step)
    assert found.reasons[QUEUED] > 3 * 20 * US and next(iter(found.reasons)) == QUEUED


def test_a_kernel_that_starts_long_after_a_late_launch_waited_for_more_than_the_host(
    tmp_path: Path,
) -> None:
    def step(trace: GpuTrace) -> None:
        trace.op("aten::mm", SHAPES, [("gemm", 2.0)])
        trace.clock = trace.free + 20  # 20 us late
        trace.free += 1000  # and held up by another stream
        trace.op("aten::mm", SHAPES, [("gemm", 2.0)])

    found = idle(tmp_path, step)
    assert found.reasons[QUEUED] > 900 * US
    assert found.reasons[LATE] < 100 * US


def test_a_trace_without_kernels_has_none(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.step(lambda: trace.op("aten::mm", SHAPES))
    assert idleness_of(read_trace(trace.write(tmp_path / "trace.json"))) is None


def test_reasons_have_the_words_of_the_parts_of_a_diff() -> None:
    words = {name: _LABELS[name].strip() for name in ("waiting", "queued")}
    assert all(reason.startswith(words["waiting"]) for reason in (LATE, WAITED, LOADED))
    assert words["queued"] == QUEUED
