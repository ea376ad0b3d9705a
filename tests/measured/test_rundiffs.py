"""Two measured traces beside each other: rows, totals, noise, and what does not fit together."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import rooftrace as rt
from rooftrace.diffs.runs.comparing import noise_of
from rooftrace.diffs.runs.diffing import diff_runs
from rooftrace.diffs.runs.rundiff import PARTS, KernelChange, RunDiff, StepDiff
from rooftrace.diffs.runs.traceside import module_paths
from rooftrace.errors import ProfileError, RequestError, UnusedError
from tests.measured.profiles_support import GpuTrace, Stack, run_on_cpu
from tests.measured.rundiffs_support import (
    COPY,
    CUTLASS,
    XMMA,
    LayeredTrace,
    Step,
    layered,
    rewritten,
    written,
)

US = 1e-6


def compared(folder: Path, before: Step, after: Step, steps: int = 3) -> StepDiff:
    """The comparison of two made-up traces."""
    first = written(folder / "a.json", before, steps)
    second = written(folder / "b.json", after, steps)
    return diff_runs(first, second).steps[0]


def only(step: StepDiff, status: str) -> KernelChange:
    (row,) = [row for row in step.rows if row.status == status]
    return row


# -- rows ------------------------------------------------------------------------------------------


def test_a_slower_kernel_of_every_layer_is_one_row_and_the_first(tmp_path: Path) -> None:
    step = compared(tmp_path, layered(), layered(gelu=20.0))
    row = step.rows[0]
    assert (row.status, row.call) == ("slower", ("aten::gelu", "aten::gelu"))
    assert row.module == "Net/Layer.*" and row.places == 4
    assert row.time.delta == pytest.approx(4 * (20 - 8) * US)  # four layers, 12 us each
    assert [other.status for other in step.rows[1:]] == ["same"]


def test_a_copy_that_was_not_there_is_new(tmp_path: Path) -> None:
    row = only(compared(tmp_path, layered(), layered(copy=True)), "new")
    assert row.kernels == ((), (COPY,)) and row.call == ("", "aten::contiguous")
    assert (row.count.before, row.count.after) == (0, 4)
    assert row.time.after == pytest.approx(4 * 5 * US)


def test_a_library_in_place_of_another_is_said_with_both_names(tmp_path: Path) -> None:
    step = compared(tmp_path, layered(), layered(gemm=(XMMA, 20.0)))
    row = only(step, "replaced")
    assert row.kernels == ((CUTLASS.format("64x64"),), (XMMA,))
    assert row.time.delta == pytest.approx(-4 * 10 * US)


def test_a_later_start_of_the_clock_is_no_difference(tmp_path: Path) -> None:
    """Floats of stamps this large (25 days in us) are 0.5 ns apart; a trace has nanoseconds."""
    first = written(tmp_path / "a.json", layered(gelu=8.003))

    def later(by: str) -> Callable[[list[dict[str, object]]], None]:
        def change(events: list[dict[str, object]]) -> None:
            for event in events:
                stamp = Decimal(str(event["ts"])).quantize(Decimal("0.001"))
                event["ts"] = float(stamp + Decimal(by))

        return change

    sides = [
        rewritten(first, later(by), tmp_path / f"{by}.json")
        for by in ("2204338329420.671", "2204338567189.246")
    ]
    step = diff_runs(*sides).steps[0]
    assert step.unchanged and not any(change.delta for change in step.totals.values())


def test_other_tiles_are_the_same_kernel(tmp_path: Path) -> None:
    step = compared(tmp_path, layered(), layered(gemm=(CUTLASS.format("128x64"), 40.0)))
    assert step.rows[0].status == "slower" and step.rows[0].places == 4


GEMM = "volta_sgemm_128x64_tn"


def test_kernels_of_a_call_without_a_rule_have_each_their_family(tmp_path: Path) -> None:
    def eager(trace: LayeredTrace) -> None:
        trace.op("aten::copy_", [(8, 64)], [(COPY, 10.0)], "aten::contiguous")
        trace.op("aten::mm", [(8, 64), (64, 64)], [(GEMM, 50.0)])

    def compiled(trace: LayeredTrace) -> None:
        kernels = [(COPY, 10.0), (GEMM, 80.0), ("triton_poi_fused_add_0", 5.0)]
        trace.op("CompiledFunction", [(8, 64)], kernels)
        trace.op("CompiledFunction", [(8, 64)], [("triton_tem_fused_mm_3", 20.0)])

    step = compared(tmp_path, eager, compiled)
    times = {group.name: (group.time.before, group.time.after) for group in step.families}
    assert times["dense"] == pytest.approx((50 * US, 100 * US))
    assert times["elementwise"][1] == pytest.approx(15 * US)
    assert sum(after for _, after in times.values()) == pytest.approx(115 * US)


def test_a_kernel_in_place_of_one_of_another_family_leaves_that(tmp_path: Path) -> None:
    def one(kernel: str) -> Step:
        return lambda trace: trace.op("CompiledFunction", [(8, 64)], [(kernel, 30.0)])

    step = compared(tmp_path, one(GEMM), one("triton_poi_fused_add_0"))
    times = {group.name: (group.time.before, group.time.after) for group in step.families}
    assert times["dense"] == pytest.approx((30 * US, 0))
    assert times["elementwise"] == pytest.approx((0, 30 * US))


def test_other_sizes_of_one_call_are_said(tmp_path: Path) -> None:
    step = compared(tmp_path, layered(), layered(shapes=[(16, 64), (64, 64)], gelu=9.0))
    row = next(row for row in step.rows if row.call[1] == "aten::gelu")
    assert row.sizes == ("bf16[8, 64]", "bf16[16, 64]")


def test_one_more_module_does_not_rename_those_after_it(tmp_path: Path) -> None:
    """The profiler numbers linears through the model, so that all of them get other numbers."""
    step = compared(tmp_path, layered(), layered(first=True))
    assert {row.status for row in step.rows} == {"same", "new"}
    new = only(step, "new")
    assert (new.count.after, new.module) == (1, "Net/Layer.*/Linear.1")


@pytest.mark.parametrize("modules", [True, False])
def test_kernels_of_two_devices_pair_by_their_calls(tmp_path: Path, modules: bool) -> None:
    """Names of kernels have nothing in common; the calls that launch them do."""
    before = layered(modules=modules)
    after = layered(modules=modules, gemm=("Cijk_Alik_Bljk_BBS_BH_MT64x64x64", 12.0))
    step = compared(tmp_path, before, after)
    assert Counter(row.status for row in step.rows) == {"same": 1, "replaced": 1}


def test_one_kernel_in_place_of_several_of_a_call_is_one_row(tmp_path: Path) -> None:
    def attention(*kernels: tuple[str, float]) -> Step:
        call = "aten::scaled_dot_product_attention"
        return lambda trace: trace.op("aten::_attention", [(1, 2, 8, 4)] * 3, kernels, call)

    flash = attention(("flash_fwd_kernel", 10.0))
    by_hand = attention(("gemm_a", 9.0), ("softmax_b", 6.0), ("gemm_c", 9.0))
    (row,) = compared(tmp_path, flash, by_hand).rows
    assert row.status == "replaced" and len(row.kernels[1]) == 3
    assert row.time.delta == pytest.approx((9 + 6 + 9 - 10) * US)
    assert row.family == "attention"


def test_kernels_of_a_cuda_graph_pair_by_name_and_order(tmp_path: Path) -> None:
    """They have no op, no sizes and no module."""

    def replay(*kernels: tuple[str, float]) -> Step:
        def step(trace: LayeredTrace) -> None:
            for name, duration in kernels:
                trace.launch(name, duration, trace.clock, None)
            trace.clock += 1

        return step

    before = replay(("gemm_64x64", 10.0), ("relu_k", 3.0), ("gemm_64x64", 10.0))
    after = replay(("gemm_64x64", 10.0), ("relu_k", 5.0), ("gemm_64x64", 10.0), ("copy_k", 1.0))
    step = compared(tmp_path, before, after)
    assert {(row.kernels[1][0], row.status) for row in step.rows} == {
        ("relu_k", "slower"),
        ("copy_k", "new"),
        ("gemm_64x64", "same"),
    }


def test_a_call_in_some_steps_only_counts_for_its_share(tmp_path: Path) -> None:
    steps = iter([False, True, False, True])

    def sometimes(trace: LayeredTrace) -> None:
        layered(2, copy=next(steps))(trace)

    step = compared(tmp_path, layered(2), sometimes, steps=2)
    # layered() takes nothing of the iterator: the two steps of the second trace are False, True.
    assert only(step, "new").count.after == 2 / 2
    assert step.totals["work"].after == pytest.approx(sum(row.time.after for row in step.rows))


def test_torch_compile_and_ddp_around_a_model_make_no_other_paths() -> None:
    stack = ("Net_0", "Layer_1", "Linear_5")
    plain = module_paths([stack, ("Net_0", "Layer_0", "Linear_2"), ("Net_0",)])
    wrapped = {
        ("DistributedDataParallel_0", "OptimizedModule_0", *path): path for path in plain if path
    }
    assert plain[stack] == ("Net.0/Layer.1/Linear.0", "Net/Layer.*/Linear")
    assert {wrapped[path]: named for path, named in module_paths(wrapped).items() if path} == {
        path: named for path, named in plain.items() if path
    }


# -- totals ----------------------------------------------------------------------------------------


def overlapping(compute: tuple[float, float], communicate: tuple[float, float]) -> Step:
    def step(trace: LayeredTrace) -> None:
        start = trace.clock
        trace.at("gemm", start + compute[0], compute[1] - compute[0])
        begin, end = communicate
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        trace.at(name, start + begin, end - begin, stream=20)
        trace.clock = start + 100
        trace.free = 0.0

    return step


def test_lost_overlap_is_seen(tmp_path: Path) -> None:
    """40 us of an all-reduce under a kernel of 60 us; then behind it."""
    step = compared(tmp_path, overlapping((10, 70), (20, 60)), overlapping((10, 70), (70, 110)))
    totals = step.totals
    assert (totals["hidden"].before, totals["hidden"].after) == (pytest.approx(40 * US), 0)
    assert (totals["exposed"].before, totals["exposed"].after) == (0, pytest.approx(40 * US))
    assert totals["communication"].delta == pytest.approx(0, abs=1e-12)
    assert {row.family for row in step.rows} == {"dense", "communication"}


def test_a_device_that_waits_for_the_host_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    def two(launch: float) -> Step:
        """The second kernel begins 30 us after the first has ended, launched at `launch`."""

        def step(trace: LayeredTrace) -> None:
            start = trace.clock
            trace.at("gemm", start + 10, 20)
            trace.at("gemm", start + 60, 20)
            trace.events[-2]["ts"] = start + launch
            trace.clock = start + 90

        return step

    step = compared(tmp_path, two(5), two(55))
    assert step.totals["waiting"].before == 0
    assert step.totals["queued"].before == pytest.approx(30 * US)
    assert step.totals["waiting"].after == pytest.approx(25 * US)  # from 30 to 55
    assert step.totals["queued"].after == pytest.approx(5 * US)


def test_one_trace_alone_says_where_its_time_goes(tmp_path: Path) -> None:
    """Four layers of 30 us and 8 us: 152 us a step, each kernel with its share of them."""
    path = written(tmp_path / "a.json", layered())
    result = rt.diff(path)
    (step,) = result.steps
    assert result.alone and step.totals["work"].after == pytest.approx(152 * US)
    shown = str(result)
    assert "where its time goes" in shown and "slower" not in shown and "noise" not in shown
    assert re.search(r"linear: .* 4 +120.0 us +79%", shown)
    assert re.search(r"gelu.* 4 +32.0 us +21%", shown)
    other = written(tmp_path / "b.json", layered(gelu=9.0))
    assert not rt.diff(path, other).alone


KERNEL = st.tuples(st.sampled_from(["gemm_a", "gemm_b", "relu", "copy"]), st.integers(1, 40))
CALL = st.tuples(st.sampled_from(["mm", "relu", "copy_", "add"]), st.lists(KERNEL, max_size=3))
STEPS = st.lists(st.lists(CALL, min_size=1, max_size=6), min_size=1, max_size=3)


def made(path: Path, steps: list[list[tuple[str, list[tuple[str, int]]]]]) -> Path:
    trace = LayeredTrace()
    for calls in steps:

        def work(calls: list[tuple[str, list[tuple[str, int]]]] = calls) -> None:
            for number, (name, kernels) in enumerate(calls):
                with trace.module(f"Layer_{number % 2}"):
                    timed = [(kernel, float(us)) for kernel, us in kernels]
                    trace.op(f"aten::{name}", [(8, 8)], timed)
            trace.launch("nccl_AllReduce", 3.0, trace.clock, None)
            trace.clock += 1

        trace.step(work)
    return trace.write(path)


@given(before=STEPS, after=STEPS)
@settings(deadline=None, max_examples=60)
def test_sums_are_totals_and_the_other_way_round_is_the_negative(
    before: list[list[tuple[str, list[tuple[str, int]]]]],
    after: list[list[tuple[str, list[tuple[str, int]]]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("made")
    first, second = made(folder / "a.json", before), made(folder / "b.json", after)
    there, back = diff_runs(first, second).steps[0], diff_runs(second, first).steps[0]
    for side in ("before", "after"):
        of = {name: getattr(change, side) for name, change in there.totals.items()}
        assert bool(there.modules) == any(row.module for row in there.rows)
        for groups in (there.rows, there.families, there.modules or there.rows):
            assert sum(getattr(g.time, side) for g in groups) == pytest.approx(of["work"])
            counted = sum(getattr(g.count, side) for g in groups)
            assert counted == pytest.approx(of["kernels"] + of["copies"])
        assert sum(of[part] for part in PARTS) == pytest.approx(of["time"])
        assert of["computing"] + of["exposed"] + of["copying"] == pytest.approx(of["device"])
        assert of["hidden"] + of["exposed"] == pytest.approx(of["communication"])
    # The seconds of kernels in the files themselves, steps on the mean.
    for side, steps in (("before", before), ("after", after)):
        us = [3 + sum(us for _, kernels in calls for _, us in kernels) for calls in steps]
        mean = sum(us) / len(steps) * US
        assert getattr(there.totals["work"], side) == pytest.approx(mean, rel=1e-6)
    assert {n: c.delta for n, c in back.totals.items()} == {
        n: -c.delta for n, c in there.totals.items()
    }
    assert Counter((r.time.before, r.time.after) for r in there.rows) == Counter(
        (r.time.after, r.time.before) for r in back.rows
    )
    mirror = {"new": "gone", "gone": "new", "slower": "faster", "faster": "slower"}
    assert Counter(mirror.get(r.status, r.status) for r in there.rows) == Counter(
        r.status for r in back.rows
    )
    itself = diff_runs(first, first)
    assert itself.unchanged and itself.steps[0].changes == ()


# -- noise -----------------------------------------------------------------------------------------


TIMES = st.lists(st.integers(1, 9), min_size=2, max_size=40).filter(lambda v: len(set(v)) > 1)


@given(TIMES, TIMES)
def test_noise_is_the_interval_of_welch(before: list[int], after: list[int]) -> None:
    stats = pytest.importorskip("scipy.stats")
    noise = noise_of(before, after)
    assert noise is not None
    interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    exact = (interval.high - interval.low) / 2
    # Degrees of freedom are rounded down where they are few.
    assert exact * 0.99 <= noise <= exact * 3 + 1e-12


def test_a_difference_within_the_spread_of_steps_is_said_to_be(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", layered(), 4, jitter=(1.0, 1.3, 0.8, 1.1))
    b = written(tmp_path / "b.json", layered(), 4, jitter=(1.2, 1.0, 1.2, 0.9))
    step = diff_runs(a, b).steps[0]
    assert step.totals["work"].within_noise
    assert {row.status for row in step.rows} == {"unclear"}
    c = written(tmp_path / "c.json", layered(gelu=80.0), 4, jitter=(1.1, 1.0, 1.2, 0.9))
    assert diff_runs(a, c).steps[0].totals["work"].within_noise is False
    assert "in noise" in str(diff_runs(a, b)) and "in noise" not in str(diff_runs(a, c))


def test_of_a_single_step_noise_is_not_known(tmp_path: Path) -> None:
    step = compared(tmp_path, layered(), layered(gelu=20.0), steps=1)
    assert step.totals["time"].noise is None and step.totals["time"].within_noise is None
    assert any("noise is not known" in note for note in step.notes)


# -- a host ----------------------------------------------------------------------------------------


def test_a_real_run_on_a_host_shows_the_call_that_was_added(tmp_path: Path) -> None:
    model, x = Stack(4), torch.randn(16, 32)
    plain = run_on_cpu(lambda: model(x), tmp_path / "a.json", 4, with_stack=True)
    wide = torch.randn(2048, 2048)  # takes longer than noise

    def copied() -> None:
        model(x)
        for _ in range(3):
            wide.t().contiguous()

    more = run_on_cpu(copied, tmp_path / "b.json", 4, with_stack=True)
    step = diff_runs(plain, more).steps[0]
    assert not step.on_device
    row = next(row for row in step.rows if row.call[1] == "aten::contiguous")
    assert (row.status, row.count.after, row.kind) == ("new", 3, "op")
    assert row == step.rows[0]
    for side in ("before", "after"):
        summed = sum(getattr(row.time, side) for row in step.rows)
        assert summed == pytest.approx(getattr(step.totals["work"], side))
        parts = getattr(step.totals["device"], side) + getattr(step.totals["idle"], side)
        assert parts == pytest.approx(getattr(step.totals["time"], side))


# -- what does not fit -----------------------------------------------------------------------------


def test_kernels_beside_a_host_alone_are_refused(tmp_path: Path) -> None:
    host = run_on_cpu(lambda: torch.ones(8) + 1, tmp_path / "host.json")
    gpu = written(tmp_path / "gpu.json", layered())
    with pytest.raises(ProfileError, match=r"host\.json: no kernels in it.*ProfilerActivity\.CUDA"):
        diff_runs(gpu, host)


def test_several_ranks_in_a_file_are_refused(tmp_path: Path) -> None:
    def second_rank(events: list[dict[str, object]]) -> None:
        events += [{**event, "pid": 2} for event in events if event.get("cat") == "cpu_op"]

    a = written(tmp_path / "a.json", layered())
    b = rewritten(a, second_rank, tmp_path / "b.json")
    with pytest.raises(ProfileError, match=r"2 processes in one file.*one rank"):
        diff_runs(a, b)


def test_a_truncated_file_is_refused_and_a_gzip_read(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", layered())
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(a.read_bytes()))
    assert diff_runs(a, packed).unchanged
    cut = tmp_path / "cut.json"
    cut.write_bytes(a.read_bytes()[:3000])
    with pytest.raises(ProfileError, match="truncated"):
        diff_runs(a, cut)


def test_a_trace_without_steps_is_one_step_and_says_so(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.op("aten::mm", [(8, 8)], [("gemm", 10.0)])
    bare = trace.write(tmp_path / "bare.json")
    step = diff_runs(bare, written(tmp_path / "b.json", layered())).steps[0]
    assert step.steps == (1, 3)
    assert any("no steps are marked" in note and "before" in note for note in step.notes)


def test_a_graph_beside_a_run_is_answered_with_validate(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", layered())
    graph = rt.trace(torch.nn.Linear(2, 2), torch.empty(1, 2))
    for before, after in ((a, graph), (graph, a)):
        with pytest.raises(RequestError, match=r"rooftrace validate .*a\.json --target"):
            rt.diff(before, after)
    with pytest.raises(RequestError, match="no such file"):
        rt.diff(a, "nothing.json")


def test_what_only_predictions_need_is_refused_without_any(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", layered())
    for name, value in (("chip", "l4"), ("execution", "eager"), ("phases", ["decode"])):
        with pytest.raises(UnusedError, match=name):
            rt.diff(a, a, **{name: value})
    with pytest.raises(UnusedError, match="batch"):
        rt.diff(a, a, batch=3)


# -- limits ----------------------------------------------------------------------------------------


def test_limits_hold_for_measured_metrics(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", layered())
    b = written(tmp_path / "b.json", layered(gelu=20.0))
    result = diff_runs(a, b)
    assert result.violations(["device>5%", "work>40 us", "kernels>0"]) == [
        # 8 of 38 us in four layers are 20 now; the device idles between them as it did.
        result.violations(["device>5%"])[0],
        result.violations(["work>40 us"])[0],
    ]
    assert result.violations(["work>50 us", "kernels>0"]) == []
    assert diff_runs(b, a).violations(["time>0%", "work>0 s"]) == []
    with pytest.raises(RequestError, match="memory was not measured in both"):
        result.violations(["memory>1 GiB"])


@pytest.mark.parametrize("text", ["time", "flops>5%", "time>5", "kernels>1 ms", "time>x%"])
def test_a_limit_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--fail-on"):
        RunDiff.limits([text])
