"""Traces of torch.profiler as records: real ones of the CPU, made ones of a GPU, broken ones."""

import gzip
import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles.kineto import read_trace
from rooftrace.measured.profiles.records import Trace, busy_and_gaps
from tests.measured.profiles_support import GpuTrace, run_on_cpu

US = 1e-6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of forward and backward, with module calls."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(8, 64)
    path = tmp_path_factory.mktemp("trace") / "cpu.json"
    return run_on_cpu(
        lambda: model(x).sum().backward(), path, steps=3, with_stack=True, with_modules=True
    )


@pytest.fixture(scope="module")
def profile(trained: Path) -> Trace:
    return read_trace(trained)


def two_kernels() -> GpuTrace:
    trace = GpuTrace()
    trace.step(
        lambda: (
            trace.op("aten::mm", [(8, 64), (64, 64)], [("gemm", 30.0)], wrapper="aten::linear"),
            trace.op("aten::gelu", [(8, 64)], [("gelu_kernel", 2.0)]),
        )
    )
    return trace


# -- a real trace of the CPU ---------------------------------------------------------------------


def test_ops_have_names_shapes_types_and_strides(profile: Trace) -> None:
    (first, *_) = [op for op in profile.ops if op.name == "aten::addmm"]
    assert first.inputs is not None
    assert first.inputs.shapes[:3] == ((128,), (8, 64), (64, 128))
    assert first.inputs.types[:3] == ("float",) * 3
    assert first.inputs.strides[2] == (1, 64)  # a transposed weight
    assert first.sequence is not None and not first.backward


def test_steps_are_the_active_ones(profile: Trace) -> None:
    assert [step.name for step in profile.steps] == [f"ProfilerStep#{n}" for n in (1, 2, 3)]
    calls = [[profile.ops[i].name for i in step.ops] for step in profile.steps]
    assert calls[0] == calls[1] == calls[2]
    assert calls[0].count("aten::addmm") == 2
    assert not profile.on_device and profile.steps[0].busy is None
    assert profile.step_time == sorted(step.duration for step in profile.steps)[1]


def test_ops_nest(profile: Trace) -> None:
    linear = next(op for op in profile.ops if op.name == "aten::linear")
    inside = [profile.ops[i] for i in profile.calls[linear.index]]
    assert [op.name for op in inside][-1] == "aten::addmm"
    assert linear.parent is None and all(op.parent == linear.index for op in inside)
    assert linear.self_duration == pytest.approx(
        linear.duration - sum(op.duration for op in inside), abs=1e-12
    )


def test_ops_know_their_modules_and_backward_has_those_of_forward(profile: Trace) -> None:
    products = [op for op in profile.ops if op.name in ("aten::addmm", "aten::mm")][:5]
    first = ("Sequential_0", "Linear_0")
    second = ("Sequential_0", "Linear_1")
    assert [op.modules for op in products] == [first, second, second, second, first]
    assert profile.ops[products[2].parent or 0].backward


def test_self_times_add_up_to_the_time_of_outermost_ops(profile: Trace) -> None:
    outermost = sum(op.duration for op in profile.ops if op.parent is None)
    assert sum(op.self_duration for op in profile.ops) == pytest.approx(outermost, rel=1e-6)
    sums = profile.by_op()
    assert sum(entry.count for entry in sums) == len(profile.ops)
    assert sum(entry.seconds for entry in sums) == pytest.approx(outermost, rel=1e-6)
    assert all(entry.device_seconds is None for entry in sums)


def test_gzip_reads_the_same(trained: Path, profile: Trace, tmp_path: Path) -> None:
    packed = tmp_path / "trace.pt.trace.json.gz"
    with trained.open("rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    assert list(read_trace(packed).ops) == list(profile.ops)


def test_a_bare_list_of_events_reads_too(trained: Path, profile: Trace, tmp_path: Path) -> None:
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(json.loads(trained.read_text())["traceEvents"]))
    assert list(read_trace(bare).ops) == list(profile.ops)


# -- a made trace of a GPU -----------------------------------------------------------------------


def test_kernels_belong_to_the_innermost_op(tmp_path: Path) -> None:
    profile = read_trace(two_kernels().write(tmp_path / "gpu.json"))
    gemm, gelu = profile.kernels
    assert (gemm.name, gemm.device, gemm.stream, gemm.kind) == ("gemm", 0, 7, "kernel")
    assert gemm.duration == pytest.approx(30 * US) and gemm.grid == (132, 1, 1)
    assert gemm.op is not None and profile.ops[gemm.op].name == "aten::mm"  # not aten::linear
    assert gelu.op is not None and profile.ops[gelu.op].name == "aten::gelu"
    assert profile.devices == {0: "NVIDIA H200"}


def test_without_external_ids_the_runtime_call_says_which_op(tmp_path: Path) -> None:
    trace = two_kernels()
    for event in trace.events:
        if event.get("cat") in ("kernel", "cuda_runtime"):
            del event["args"]["External id"]
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert [profile.ops[k.op].name for k in profile.kernels if k.op is not None] == [
        "aten::mm",
        "aten::gelu",
    ]


def test_a_kernel_that_no_op_launched_has_none(tmp_path: Path) -> None:
    trace = two_kernels()
    trace.launch("triton_poi_fused", 4.0, trace.clock, None)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert profile.kernels[2].op is None


def test_a_copy_has_bytes(tmp_path: Path) -> None:
    trace = two_kernels()
    trace.event("gpu_memcpy", "Memcpy HtoD", 2000.0, 3.0, tid=7, bytes=4096, device=0, stream=7)
    kernel = read_trace(trace.write(tmp_path / "gpu.json")).kernels[-1]
    assert (kernel.kind, kernel.bytes, kernel.grid) == ("memcpy", 4096, None)


def test_busy_idle_and_gaps_of_a_step(tmp_path: Path) -> None:
    """Step of 22 us; gemm launched at 4, runs 9 to 39, gelu right behind it to 41: 32 us busy."""
    (step,) = read_trace(two_kernels().write(tmp_path / "gpu.json")).steps
    assert step.duration == pytest.approx(22 * US)
    assert step.busy == pytest.approx(32 * US) and step.gaps == ()
    assert step.seconds == step.busy  # the device sets the pace
    assert step.busy_share == 1.0 and step.idle_share == 0.0


def test_overlapping_kernels_count_once() -> None:
    assert busy_and_gaps([(0, 4), (2, 6), (9, 10)]) == (4 + 2 + 1, (9 - 6,))


def test_sums_by_op_have_device_seconds(tmp_path: Path) -> None:
    sums = read_trace(two_kernels().write(tmp_path / "gpu.json")).by_op()
    assert [(s.name, s.count) for s in sums[:2]] == [("aten::mm", 1), ("aten::gelu", 1)]
    assert sums[0].seconds == pytest.approx(30 * US)


# -- what is no trace ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("hello", "not JSON"),
        ('{"schemaVersion": 1}', "no events"),
        ('{"traceEvents": []}', "no events"),
        ('{"traceEvents": [{"ph": "M", "name": "x"}]}', "none of its 1 events is a CPU op"),
        ('{"traceEvents": [{"ph": "M", "name": "x"} oops]}', "not JSON, after 1 events"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}', "event 1 is not one of"),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=words) as caught:
        read_trace(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_trace(trained: Path, tmp_path: Path, packed: bool) -> None:
    content = trained.read_bytes()
    if packed:
        content = gzip.compress(content)
    path = tmp_path / "short"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ProfileError, match="truncated"):
        read_trace(path)


def test_a_damaged_gzip_file(trained: Path, tmp_path: Path) -> None:
    content = bytearray(gzip.compress(trained.read_bytes()))
    content[len(content) // 2] ^= 0xFF
    path = tmp_path / "damaged.gz"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"damaged|not JSON|truncated"):
        read_trace(path)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing.json")


def test_memory_does_not_follow_the_size_of_the_file(tmp_path: Path) -> None:
    trace = two_kernels()
    for number in range(20_000):  # Python's own functions, of which nothing is kept
        trace.event("python_function", f"torch/nn/module.py({number}): _call_impl", number, 1.0)
    path = trace.write(tmp_path / "large.json")
    read_trace(path)  # imports, and what is made once
    tracemalloc.start()
    read_trace(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 2_500_000 and peak < 1_000_000  # byte


def test_modules_that_nest_without_end_are_refused(tmp_path: Path) -> None:
    trace = two_kernels()
    for depth in range(1200):
        trace.event("python_function", f"nn.Module: M_{depth}", depth * 1e-3, 1e4 - depth)
    with pytest.raises(ProfileError, match="more than 1,000 deep"):
        read_trace(trace.write(tmp_path / "deep.json"))
