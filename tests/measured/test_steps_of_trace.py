"""Which step of a trace a kernel belongs to, and where steps begin that nobody marked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.errors import ProfileError
from rooftrace.graph.graph import OpGraph
from rooftrace.measured.alignment.aligning import Period, align, periods
from rooftrace.measured.alignment.keys import key_of_call, looser, paired
from rooftrace.measured.profiles.kineto import read_trace
from rooftrace.measured.profiles.records import DEVICE, EARLIER, LAUNCH, ORDER, OUTSIDE, Trace
from tests.measured.profiles_support import GpuTrace, Stack

pytestmark = pytest.mark.quick

US = 1e-6
SHAPE = [(8, 64), (64, 64)]


@pytest.fixture(scope="module")
def stack() -> OpGraph:
    return rt.trace(Stack(), torch.empty(4, 32))


def a_step(trace: GpuTrace, duration: float = 30.0) -> Callable[[], None]:
    """One op with one kernel."""
    return lambda: trace.op("aten::mm", SHAPE, [("gemm", duration)])


def kernels_by_step(profile: Trace) -> list[list[str]]:
    return [[profile.kernels[i].name for i in step.kernels] for step in profile.steps]


def placed(profile: Trace) -> dict[str, tuple[int, int]]:
    return {one.how: (one.kernels, one.copies) for one in profile.placements}


def device_event(
    trace: GpuTrace, name: str, start: float, duration: float, correlation: int, **more: int
) -> None:
    """A kernel without a launch in the trace."""
    facts = {"device": 0, "stream": 7, "correlation": correlation, **more}
    kind = "gpu_memset" if name == "Memset" else "kernel"
    trace.event(kind, name, start, duration, tid=facts["stream"], **facts)


# -- by launch -------------------------------------------------------------------------------------


def test_what_was_launched_before_the_trace_begins_is_in_no_step(tmp_path: Path) -> None:
    """The device still works for the steps before it when the step begins at 1000."""
    trace = GpuTrace()
    trace.number = 100
    trace.step(a_step(trace))
    device_event(trace, "warm_up", 990.0, 5.0, correlation=7)
    device_event(trace, "warm_up", 1001.0, 3.0, correlation=8)
    device_event(trace, "Memset", 1004.0, 1.0, correlation=9)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm"]]
    assert profile.steps[0].busy == pytest.approx(30 * US)
    assert placed(profile) == {LAUNCH: (1, 0), EARLIER: (2, 1)}


def test_without_marks_it_is_in_no_step_either(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.number = 100
    a_step(trace)()
    device_event(trace, "warm_up", 990.0, 5.0, correlation=7)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm"]]


def test_waiting_for_it_is_no_time_of_the_step(tmp_path: Path) -> None:
    """The host waits from 1000 to 1400 for what runs until 1400; its own work takes 12 us."""
    trace = GpuTrace()
    trace.number = 100
    device_event(trace, "warm_up", 600.0, 800.0, correlation=7)

    def work() -> None:
        trace.event("cuda_runtime", "cudaDeviceSynchronize", 1002.0, 398.0, correlation=99)
        trace.clock = trace.free = 1400.0
        a_step(trace, 4.0)()

    trace.step(work)
    (step,) = read_trace(trace.write(tmp_path / "gpu.json")).steps
    assert step.duration == pytest.approx(410 * US)
    assert step.waited == pytest.approx(398 * US)
    assert step.seconds == pytest.approx((410 - 398) * US)


def test_the_tail_belongs_to_the_step_that_launched_it(tmp_path: Path) -> None:
    """Each step takes the host 12 us and the device 300: the first runs while others begin."""
    trace = GpuTrace()
    for _ in range(3):
        trace.step(a_step(trace, 300.0))
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm"]] * 3
    assert [step.busy for step in profile.steps] == pytest.approx([300 * US] * 3)


def test_other_threads_launch_for_the_step_too(tmp_path: Path) -> None:
    """Autograd's thread launches while the main one waits in backward()."""
    trace = GpuTrace()

    def work() -> None:
        a_step(trace)()
        first = len(trace.events)
        trace.op("aten::mm", SHAPE, [("gemm_backward", 40.0)])
        for event in trace.events[first:]:
            if event["pid"] == 1:
                event["tid"] = 2

    for _ in range(2):
        trace.step(work)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm", "gemm_backward"]] * 2
    assert placed(profile) == {LAUNCH: (4, 0)}


def test_streams_that_run_side_by_side_are_busy_once(tmp_path: Path) -> None:
    """A reduction of NCCL on its own stream runs 50 us, beside a product of 30 us."""
    trace = GpuTrace()

    def work() -> None:
        a_step(trace)()
        trace.launch("ncclDevKernel_AllReduce", 50.0, trace.clock - 6, None)
        trace.events[-2].update(ts=trace.clock - 1)
        trace.events[-2]["args"]["stream"] = 20

    trace.step(work)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    (step,) = profile.steps
    assert kernels_by_step(profile) == [["gemm", "ncclDevKernel_AllReduce"]]
    assert {profile.kernels[i].stream for i in step.kernels} == {7, 20}
    # 1009 to 1039 on one, 1011 to 1061 on the other
    assert step.busy == pytest.approx((1061 - 1009) * US)


def test_kernels_of_a_cuda_graph_are_launched_by_one_call(tmp_path: Path) -> None:
    trace = GpuTrace()

    def work() -> None:
        trace.number += 1
        start, number = trace.clock, trace.number
        trace.event("cuda_runtime", "cudaGraphLaunch", start, 5.0, correlation=number)
        for place in range(3):
            device_event(trace, f"k{place}", start + 100 + 20 * place, 20.0, number)
        trace.clock += 10

    for _ in range(2):
        trace.step(work)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["k0", "k1", "k2"]] * 2
    assert placed(profile) == {LAUNCH: (6, 0)}


def test_a_launch_that_is_not_in_the_trace_is_between_its_neighbours(tmp_path: Path) -> None:
    """Old profilers do not write the driver's launches (of Triton); their numbers remain."""
    trace = GpuTrace()
    missing = []

    def work() -> None:
        a_step(trace)()
        trace.number += 1
        missing.append(trace.number)
        a_step(trace)()

    for _ in range(2):
        trace.step(work)
    for number in missing:  # far behind, in the time of no step
        device_event(trace, "triton", 5000.0, 3.0, number)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm", "triton", "gemm"]] * 2
    assert placed(profile) == {LAUNCH: (4, 0), ORDER: (2, 0)}


def test_without_any_launch_the_steps_of_the_device_are_taken(tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(2):
        trace.step(lambda: None)
    for number, start in enumerate((1500.0, 1700.0)):
        trace.event("gpu_user_annotation", f"ProfilerStep#{number}", start, 100.0, tid=7)
        device_event(trace, f"k{number}", start, 100.0, correlation=number + 1)
    device_event(trace, "between", 1650.0, 10.0, correlation=9)
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["k0"], ["k1"]]
    assert placed(profile) == {DEVICE: (2, 0), OUTSIDE: (1, 0)}


def test_what_is_launched_between_steps_is_in_none(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.step(a_step(trace))
    trace.op("aten::mm", SHAPE, [("between", 30.0)])
    trace.step(a_step(trace))
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm"]] * 2
    assert placed(profile) == {LAUNCH: (2, 0), OUTSIDE: (1, 0)}


def test_the_order_of_events_in_the_file_is_no_order_in_time(tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(2):
        trace.step(a_step(trace))
    trace.events.reverse()
    profile = read_trace(trace.write(tmp_path / "gpu.json"))
    assert kernels_by_step(profile) == [["gemm"]] * 2
    assert placed(profile) == {LAUNCH: (2, 0)}
    assert min(op.start for op in profile.ops) >= 0


def test_validate_says_where_kernels_were_put(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.number = 100
    trace.run(stack)
    for number in range(3):
        device_event(trace, "warm_up", 600.0 + 150 * number, 150.0, correlation=number + 1)
    path = trace.write(tmp_path / "gpu.json")
    found = rt.validate(path, "h200-sxm", target={"forward": stack})
    assert found.coverage == pytest.approx(1) and not found.strays
    assert "3 kernels of the trace (450.0 us) are in no step" in " ".join(found.notes)


# -- without marks ---------------------------------------------------------------------------------


def without_marks(trace: GpuTrace) -> None:
    trace.events = [e for e in trace.events if not e["name"].startswith("ProfilerStep")]


def test_six_equal_steps_without_marks_are_told_apart(stack: OpGraph, tmp_path: Path) -> None:
    """Layers come again inside of the step as well: one of them is no step."""
    trace = GpuTrace()
    trace.op("aten::copy_", [(4, 32), (4, 32)], [("copy", 5.0)])  # what the program begins with
    for step in range(6):
        trace.run(stack, duration=lambda op, step=step: 20.0 + op + step)
    without_marks(trace)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert len(found.trace.steps) == 6
    assert found.coverage == pytest.approx(1) and not found.only_in_graph
    for op in stack.kernels():  # the median of 0, 1 ... 5 more
        assert found.measured[op.id].seconds == pytest.approx(
            [(22.5 + op.id) * US] * stack.times(op)
        )
    kernels = sum(stack.times(op) for op in stack.kernels())
    assert [len(step.kernels) for step in found.trace.steps] == [kernels] * 6
    assert found.outside == pytest.approx(5 / sum(k.duration / US for k in found.trace.kernels))


def test_two_equal_steps_are_not_one_with_half_of_it_missing(
    stack: OpGraph, tmp_path: Path
) -> None:
    trace = GpuTrace()
    for _ in range(2):
        trace.run(stack)
    without_marks(trace)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert len(found.trace.steps) == 2 and found.coverage == pytest.approx(1)


def test_one_step_of_equal_layers_is_one_step(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.run(stack)
    without_marks(trace)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert len(found.trace.steps) == 1 and found.outside is None
    assert found.coverage == pytest.approx(1)


def test_equal_layers_alone_are_cut_by_the_graph(tmp_path: Path) -> None:
    """Three steps of four equal layers are twelve equal layers: the graph says where to cut."""
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    graph = rt.trace(layers, torch.empty(8, 16))
    trace = GpuTrace()
    for _ in range(3):
        trace.run(graph)
    without_marks(trace)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), graph)
    assert len(found.trace.steps) == 3
    assert found.coverage == pytest.approx(1) and found.ops_matched_share == 1


def test_a_trace_that_begins_and_ends_inside_of_a_step(stack: OpGraph, tmp_path: Path) -> None:
    trace = GpuTrace()
    for _ in range(5):
        trace.run(stack)
    without_marks(trace)
    starts = sorted(e["ts"] for e in trace.events if e.get("cat") == "cpu_op")
    begin, end = starts[len(starts) // 10 + 1], starts[-len(starts) // 10]
    trace.events = [
        e for e in trace.events if e.get("cat") != "cpu_op" or begin < e["ts"] < end
    ]  # launches without an op remain, too
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert len(found.trace.steps) in (3, 4) and found.ops_matched_share == 1


def test_a_step_that_differs_is_left_out(stack: OpGraph, tmp_path: Path) -> None:
    """The optimizer's first step makes its states; a log is written between the third and next."""
    trace = GpuTrace()
    for step in range(6):
        trace.run(stack)
        if step in (0, 2):
            trace.op("aten::gelu", [(4, 64)], [("one_more", 100.0)])
    without_marks(trace)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert len(found.trace.steps) >= 5 and found.coverage > 0.95
    assert found.ops_matched_share == 1


def test_ranges_of_the_program_named_step_are_steps(stack: OpGraph, tmp_path: Path) -> None:
    for name in ("step", "train_step {}", "iteration {}", "Step#{}"):
        trace = GpuTrace()
        for _ in range(3):
            trace.run(stack)
        for event in trace.events:
            if event["name"].startswith("ProfilerStep"):
                event["name"] = name.format(event["name"][-1])
        profile = read_trace(trace.write(tmp_path / "gpu.json"))
        assert len(profile.steps) == 3 and profile.marked_by == name.split("{")[0].rstrip(" #")
        assert align(profile, stack).coverage == pytest.approx(1)


def test_ranges_named_step_inside_of_a_step_are_none(stack: OpGraph, tmp_path: Path) -> None:
    """A loop over time calls its turns steps, too."""
    trace = GpuTrace()
    trace.run(stack)
    without_marks(trace)
    for turn in range(4):
        trace.event("user_annotation", f"step {turn}", 1002.0 + 20 * turn, 15.0)
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert len(found.trace.steps) == 1 and found.coverage == pytest.approx(1)


def test_where_nothing_comes_again_the_error_says_what_is_missing(
    stack: OpGraph, tmp_path: Path
) -> None:
    trace = GpuTrace()
    for size in range(3):  # other work, longer than the step, before and after it
        trace.op("aten::mm", [(64, 64 + size), (64 + size, 64)], [("gemm", 900.0)])
    trace.run(stack)
    for size in range(3, 6):
        trace.op("aten::mm", [(64, 64 + size), (64 + size, 64)], [("gemm", 900.0)])
    without_marks(trace)
    with pytest.raises(ProfileError, match="says not where a step begins") as caught:
        align(read_trace(trace.write(tmp_path / "gpu.json")), stack)
    assert "prof.step()" in str(caught.value) and "record_function" in str(caught.value)
    assert "trace the model" not in str(caught.value)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.integers(2, 7),
    st.lists(st.integers(5, 9), max_size=6),
    st.lists(st.integers(10, 14), max_size=6),
)
def test_a_sequence_that_comes_again_is_seen(
    step: list[int], count: int, before: list[int], after: list[int]
) -> None:
    found = periods([*before, *step * count, *after], step)
    assert found[0] == Period(len(step), ((len(before), count),))


def test_nothing_comes_again_in_different_calls() -> None:
    assert periods([1, 2, 3, 4, 5], [1, 2]) == []
    assert periods([], []) == []


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (("aten::gelu", ((559, 64),)), ("aten::gelu", ((1, 559, 64),))),  # a leading 1
        (("aten::bmm", ((1, 8, 16), (1, 16, 4))), ("aten::mm", ((8, 16), (16, 4)))),
        (("aten::mul", ((8, 64, 1), (64,))), ("aten::mul", ((8, 64), (64,)))),  # a trailing 1
        (("aten::gelu", ((4, 559, 64),)), ("aten::gelu", ((4 * 559, 64),))),  # as linear does
        (("aten::mm", ((8, 16), (16, 4))), ("aten::mm", ((8, 16), (4, 16)))),  # a weight's layout
    ],
)
def test_harmless_differences_of_shapes_pair(
    ours: tuple[str, tuple], theirs: tuple[str, tuple]
) -> None:
    assert key_of_call(*ours) != key_of_call(*theirs)
    pairs, loosely = paired([key_of_call(*theirs)], [key_of_call(*ours)])
    assert (pairs, loosely) == ([(0, 0)], 1)


def test_other_sizes_do_not_pair() -> None:
    for ours, theirs in (((8, 64), (64, 8)), ((4, 8, 64), (2, 8, 64)), ((8, 2), (16,))):
        assert not paired([key_of_call("aten::add", (ours,))], [("aten::add", (theirs,))])[0]
    assert not paired([("aten::mm", ((8, 16), (16, 4)))], [("aten::mm", ((16, 8), (16, 4)))])[0]


def test_equal_shapes_pair_before_others() -> None:
    """Of two that could be meant the one with the same shape is."""
    wanted = [("aten::relu", ((1, 8),)), ("aten::relu", ((8,),))]
    assert paired([("aten::relu", ((8,),))], wanted) == ([(0, 1)], 0)


def test_looser_keys_of_keys_stay_what_they_are() -> None:
    key = ("aten::bmm", ((1, 8, 1, 16),))
    for way in (1, 2, 3):
        assert looser(looser(key, way), way) == looser(key, way)


def test_a_run_of_one_sample_matches_a_graph_without_a_batch(tmp_path: Path) -> None:
    graph = rt.trace(Stack(), torch.empty(6, 32))
    trace = GpuTrace()
    for _ in range(2):
        trace.run(graph)
    for event in trace.events:
        if event.get("cat") == "cpu_op" and not event["name"].endswith("mm"):
            shapes = event["args"]["Input Dims"]
            event["args"]["Input Dims"] = [[1, *s] if len(s) == 2 else s for s in shapes]
    found = align(read_trace(trace.write(tmp_path / "gpu.json")), graph)
    assert found.coverage == pytest.approx(1) and not found.only_in_graph
    assert found.reshaped > 0
