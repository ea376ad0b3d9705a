"""Traces whose values are of other kinds than expected, or that are almost JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles import Trace, read_trace
from rooftrace.measured.profiles.mending import decimal, whole, wholes
from rooftrace.measured.profiles.records import BESIDE, LAUNCH
from tests.measured.profiles_support import GpuTrace
from tests.measured.test_steps_of_trace import a_step, device_event, kernels_by_step, placed

KERNEL: dict[str, Any] = {
    "ph": "X", "cat": "kernel", "name": "Cijk_Ailk_Bljk_BBS_BH", "pid": 0, "tid": 7, "ts": 60.0,
    "dur": 30.0,
    "args": {"device": 0, "stream": 7, "correlation": 11, "grid": [4, 1, 1], "block": [256, 1, 1]},
}  # fmt: skip


def read(folder: Path, *events: str) -> Trace:
    path = folder / "trace.json"
    path.write_text('{"schemaVersion": 1,\n"traceEvents": [\n' + ",\n".join(events) + "\n]}")
    return read_trace(path)


def with_fact(name: str, value: Any) -> str:
    return json.dumps({**KERNEL, "args": {**KERNEL["args"], name: value}})


# -- values ----------------------------------------------------------------------------------------


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_numbers_in_texts_are_numbers(number: int) -> None:
    assert (
        whole(number) == whole(str(number)) == whole(f" {number} ") == whole(hex(number)) == number
    )


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=4))
def test_lists_in_texts_are_lists(numbers: list[int]) -> None:
    listed = ", ".join(map(str, numbers))
    for text in (
        numbers,
        [str(n) for n in numbers],
        f"[{listed}]",
        f"({listed})",
        f"grid({listed},)",
    ):
        assert wholes(text) == tuple(numbers)


@pytest.mark.parametrize("value", [None, True, "many", "", "inf", "9" * 5000, 1 << 64, 0.5, [], {}])
def test_what_is_no_whole_number(value: Any) -> None:
    assert whole(value) is None


def test_numbers_with_an_exponent() -> None:
    assert whole("1e3") == 1000 and decimal("1e3") == 1000.0 and decimal("nan") is None


@pytest.mark.parametrize("name", ["bytes", "correlation", "stream", "device", "grid", "block"])
@pytest.mark.parametrize("value", ["many", None, [None], {"a": 1}, True, "0x", "inf", "grid(s0,)"])
def test_a_value_that_no_step_needs_never_loses_a_file(
    tmp_path: Path, name: str, value: Any
) -> None:
    profile = read(tmp_path, with_fact(name, value))
    assert len(profile.kernels) == 1
    assert bool(profile.left_out) == (value is not None)
    assert (f"args.{name}=" in profile.damage) == (value is not None)


def test_rocm_writes_numbers_as_texts(tmp_path: Path) -> None:
    facts = {
        "device": "2",
        "stream": "0x1",
        "correlation": "11",
        "grid": "grid(100,)",
        "bytes": "256",
    }
    profile = read(tmp_path, json.dumps({**KERNEL, "ts": "60.5", "dur": "1e1", "args": facts}))
    (kernel,) = profile.kernels
    assert (kernel.device, kernel.stream, kernel.correlation, kernel.bytes) == (2, 1, 11, 256)
    assert (
        kernel.grid == (100,) and kernel.duration == pytest.approx(10e-6) and not profile.left_out
    )


@pytest.mark.parametrize("name", ["ts", "dur"])
@pytest.mark.parametrize("value", ["soon", None, "nan", True, []])
def test_a_kernel_without_its_time_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ProfileError, match=rf"event 2 .*{name}="):
        read(tmp_path, json.dumps(KERNEL), json.dumps({**KERNEL, name: value}))


@pytest.mark.parametrize("shapes", [7, "[[4", [[None]], [["x"]], [4]])
def test_shapes_that_are_none_are_left_out(tmp_path: Path, shapes: Any) -> None:
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    profile = read(tmp_path, json.dumps({**op, "args": {"Input Dims": shapes}}), json.dumps(KERNEL))
    assert profile.ops[0].inputs is None and len(profile.left_out) == 1


# -- almost JSON -----------------------------------------------------------------------------------

PYTHON = (
    '{"ph":"X","cat":"python_function","name":"NAME","pid":1,"tid":1,"ts":9.0,"dur":1.0,"args":{}}'
)


@pytest.mark.parametrize(
    "name",
    [
        '{"device": "cpu"}(12): run', 'a "b" c', r"C:\Users\x\model.py(3): run", "C:\\dir\\",
        "tab\there", "bell\x07", "line\nbreak", '""', 'f("a", "b")', "[inf, nan]", '"', 'x": 1',
    ],
)  # fmt: skip
def test_names_without_escapes(tmp_path: Path, name: str) -> None:
    events = PYTHON.replace("NAME", name), json.dumps(KERNEL)
    assert len(read(tmp_path, *events).kernels) == len(read(tmp_path, *events[::-1]).kernels) == 1


def test_the_name_of_a_kernel_without_escapes_stays(tmp_path: Path) -> None:
    damaged = json.dumps(KERNEL).replace("Cijk_Ailk", r'k<"a", inf>C:\kernels')
    profile = read(tmp_path, damaged)
    assert profile.kernels[0].name == 'k<"a", inf>C:\\kernels_Bljk_BBS_BH'
    assert profile.kernels[0].grid == (4, 1, 1)


@pytest.mark.parametrize(
    "bare", ["inf", "-inf", "nan", "-nan(ind)", "NaN", "Infinity", "-Infinity"]
)
def test_numbers_that_json_lacks(tmp_path: Path, bare: str) -> None:
    damaged = json.dumps({**KERNEL, "args": {**KERNEL["args"], "bandwidth": 3.5}}).replace(
        "3.5", bare
    )
    assert len(read(tmp_path, damaged, json.dumps(KERNEL)).kernels) == 2
    with pytest.raises(ProfileError, match=r"dur=(None|nan|-?inf)"):
        read(tmp_path, json.dumps(KERNEL).replace('"dur": 30.0', f'"dur": {bare}'))


def test_a_comma_behind_the_last_event(tmp_path: Path) -> None:
    assert len(read(tmp_path, json.dumps(KERNEL), json.dumps(KERNEL) + ",").kernels) == 2


def test_an_event_beyond_repair_is_named_if_a_step_needs_it(tmp_path: Path) -> None:
    broken = '"ts": 1.0, "dur": }'
    spare = f'{{"ph": "X", "cat": "python_function", {broken}'
    profile = read(tmp_path, json.dumps(KERNEL), spare, json.dumps(KERNEL))
    assert len(profile.kernels) == 2 and "python_function" in profile.left_out[0][0]
    with pytest.raises(ProfileError, match="event 2 is not one"):
        read(tmp_path, json.dumps(KERNEL), f'{{"ph": "X", "cat": "kernel", {broken}')


def test_a_damaged_trace_that_is_truncated_too(tmp_path: Path) -> None:
    path = tmp_path / "short.json"
    text = (
        '{"traceEvents": [' + json.dumps(KERNEL).replace("30.0", "inf") + "," + json.dumps(KERNEL)
    )
    for length in (len(text), len(text) - 20):
        path.write_text(text[:length].replace('"dur": inf', '"dur": 1, "x": inf'))
        with pytest.raises(ProfileError, match="truncated"):
            read_trace(path)


# -- kernels without a number ----------------------------------------------------------------------


def test_communication_with_correlation_0_is_kept(tmp_path: Path) -> None:
    """Such kernels have no launch: they run in the step of the kernel that began before them."""
    trace = GpuTrace()
    for _ in range(2):
        trace.step(a_step(trace))
        device_event(trace, "ncclDevKernel_AllReduce", trace.free - 1, 40.0, correlation=0)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    names = [sorted(step) for step in kernels_by_step(profile)]
    assert names == [["gemm", "ncclDevKernel_AllReduce"]] * 2
    assert placed(profile) == {LAUNCH: (2, 0), BESIDE: (2, 0)}
    assert [p.names for p in profile.placements if p.how == BESIDE] == [
        ("ncclDevKernel_AllReduce",)
    ]
