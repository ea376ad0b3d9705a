"""From a run to a report: measured here, counted or timed, fitted, kept in a file, and used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion import execution_model
from rooftrace.costmodels.kernels import Knobs, load_knobs
from rooftrace.costmodels.ops import bytes_by_kind, kinds_of
from rooftrace.errors import ProfileError, RequestError, UnusedError
from rooftrace.measured.alignment import KernelTime, steps_of
from rooftrace.measured.bench import MicroRow, ModelRow, Run
from rooftrace.measured.fit.cases import ByteSources, Counts, stepped

pytestmark = pytest.mark.usefixtures("kept_targets")

COPY = MicroRow(key="copy", kind="copy", sizes={}, seconds=(1e-3,), bytes=1e-3 * 3e12)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def graph_of(layers: int = 4, width: int = 2048) -> rt.types.OpGraph:
    with torch.device("meta"):
        return rt.trace(nn.Sequential(*[Mlp(width) for _ in range(layers)]), torch.empty(4, width))


def run_on_a_gpu(
    graph: rt.types.OpGraph, weights: float = 1.0, ops: float = 1.0, slow: float = 1.0
) -> tuple[rt.types.Run, list[tuple[str, float]]]:
    """A compiled run that was made up, and the bytes of each of its kernels, by name.

    weights, ops: how many bytes of weights and of all else are moved for each by rule.
    """
    plan = rt.plan(graph.expand(), "compiled")
    kernels, counted = [], []
    for number, (group, cost) in enumerate(zip(plan.groups, plan.costs, strict=True)):
        kind = kinds_of(plan.graph, group.ops, plan.op_costs)
        moved = sum(
            size * (weights if name.endswith("weights") else ops)
            for name, size in bytes_by_kind(cost.traffic, kind).items()
        )
        product = any(plan.graph.ops[op].target.startswith("aten.addmm") for op in group.ops)
        name = "aten::addmm" if product else f"triton_poi_fused_gelu_{number}"
        kernels.append(
            KernelTime(
                name=name,
                seconds=slow * moved / 3e12 + 3e-6,
                ops=group.ops,
                targets=tuple(plan.graph.ops[op].target for op in group.ops),
                compiled=True,
            )
        )
        counted.append(("void cutlass::gemm<float>(Params)" if product else name, moved))
    row = ModelRow(
        key="mlp forward compiled",
        model="mlp",
        phase="forward",
        mode="compiled",
        sizes={},
        seconds=(sum(kernel.seconds for kernel in kernels),),
        kernels=tuple(kernels),
    )
    device = {"type": "cuda", "name": "NVIDIA H100", "capability": "9.0"}
    run = rt.types.Run(
        device=device,
        versions={},
        dates=("2026-11-20",),
        models=(row,),
        micro=(COPY,),
        graphs={row.key: graph},
    )
    return run, counted


def ncu(folder: Path, kernels: Sequence[tuple[str, float]], capability: str = "9.0") -> Path:
    """The raw page of Nsight Compute with these kernels."""
    head = ["ID", "Kernel Name", "Block Size", "Grid Size", "Device", "CC",
            "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"]  # fmt: skip
    lines = [head, ["", "", "", "", "", "", "byte", "byte", "nsecond"]]
    lines += [
        [str(i), name, "(128, 1, 1)", "(8, 1, 1)", "0", capability, f"{0.9 * size:.0f}",
         f"{0.1 * size:.0f}", "5000"]
        for i, (name, size) in enumerate(kernels)
    ]  # fmt: skip
    path = folder / "ncu.csv"
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in line) for line in lines))
    return path


def test_counters_of_kernels_give_the_factors_of_a_compiled_run(tmp_path):
    run, counted = run_on_a_gpu(graph_of(), weights=0.5, ops=0.9)
    result = rt.calibrate(run, "h100-sxm", counters=ncu(tmp_path, counted))
    factors = result.traffic.factors.identified
    assert factors["dense weights"].factor == pytest.approx(0.5, rel=0.02)
    assert factors["dense weights"].residency == pytest.approx(2.0, rel=0.05)
    assert factors["dense weights"].by == "counters"
    assert factors["dense weights"].cache == 1.0  # ncu empties the caches
    assert result.execution == "compiled"
    assert "calibrated on NVIDIA H100, 2026-11-20: WRF dense 2.0" in str(result)


def test_counters_of_rocprof_see_what_a_cache_holds(tmp_path):
    """It leaves the caches as they are, and ncu empties them: 34 MB of weights stay in 50 MB."""
    run, counted = run_on_a_gpu(graph_of(layers=1))
    lines = ["Index,KernelName,FETCH_SIZE,WRITE_SIZE"]
    lines += [f"{i},{name},{size / 1024:.3f},0" for i, (name, size) in enumerate(counted)]
    path = tmp_path / "results.csv"
    path.write_text("\n".join(lines).replace("<float>(Params)", ""))
    for counters, held in ((path, True), (ncu(tmp_path, counted), False)):
        (measured,) = steps_of(run, execution_model("compiled"), None)
        graph = measured.graph()
        step = stepped(measured, graph, rt.plan(graph, "compiled"))
        ground = ByteSources(rt.load_chip("h100-sxm"), Knobs("plain"), 3e12, Counts.of(counters))
        found = step.bytes(ground)
        assert bool(found.kernels[0].held) is held and found.flushed is not held


def test_seconds_give_the_factors_without_counters():
    run, _ = run_on_a_gpu(graph_of(), weights=0.5)
    weights = rt.calibrate(run, "h100-sxm").traffic.factors.factors["dense weights"]
    # 537 MB of weights pass the cache of 50 MB: nothing of them stays.
    assert weights.by == "seconds" and weights.factor == pytest.approx(0.5, rel=0.15)


def test_the_knobs_of_a_calibration_price_the_step_that_was_measured(tmp_path):
    graph = graph_of()
    run, _ = run_on_a_gpu(graph, weights=0.7, slow=1.5)
    result = rt.calibrate(run, "h100-sxm")
    path = result.save(tmp_path / "mine.toml")
    for knobs in (result, result.knobs, path, str(path)):
        report = rt.report(graph, chip="h100-sxm", knobs=knobs)
        kernels = report.estimate("forward", "efficient").times.t_serial
        assert kernels == pytest.approx(run.models[0].median, rel=0.15)
    kept = load_knobs(path).traffic
    assert kept.factors.keys() == result.knobs.traffic.factors.keys()
    assert kept.scale("dense weights") == pytest.approx(result.knobs.traffic.scale("dense weights"))


def test_counters_of_something_else_are_refused_in_one_line(tmp_path):
    run, counted = run_on_a_gpu(graph_of())
    cases = [
        (ncu(tmp_path, counted, "8.0"), "compute capability 8.0, and NVIDIA H100 has 9.0"),
        (ncu(tmp_path, [("other", 5.0)] * 4), "0 % of the"),
        (ncu(tmp_path, counted[:3]), "count the step that was measured"),
    ]
    for (path, message), kernels, capability in zip(
        cases, (counted, [("other", 5.0)] * 4, counted[:3]), ("8.0", "9.0", "9.0"), strict=True
    ):
        ncu(path.parent, kernels, capability)
        with pytest.raises((ProfileError, ValueError)) as caught:
            rt.calibrate(run, "h100-sxm", counters=path)
        assert message in str(caught.value) and "\n" not in str(caught.value)
    on_cpu = replace(run, device={"type": "cpu", "name": "EPYC"})
    with pytest.raises(ValueError, match="kernels of a GPU, and the run is of a CPU"):
        rt.calibrate(on_cpu, "h100-sxm", counters=ncu(tmp_path, counted))
    two = replace(run, models=(run.models[0], replace(run.models[0], key="second")))
    two = replace(two, graphs=dict.fromkeys(("mlp forward compiled", "second"), graph_of()))
    with pytest.raises(ValueError, match="counters are of one step, and the run has 2"):
        rt.calibrate(two, "h100-sxm", counters=ncu(tmp_path, counted))
    with pytest.raises(UnusedError, match="there are no counters"):
        rt.calibrate(run, "h100-sxm", counted_steps=3)


def test_totals_of_memory_controllers_need_a_number_of_steps(tmp_path):
    run, counted = run_on_a_gpu(graph_of())
    run = replace(run, device={"type": "cpu", "name": "EPYC"})
    path = tmp_path / "perf.csv"
    mib = sum(size for _, size in counted) / 2**20
    path.write_text(
        f"{20 * mib:.2f},MiB,uncore_imc/cas_count_read/,100,100.00,,\n"
        f"{5 * mib:.2f},MiB,uncore_imc/cas_count_write/,100,100.00,,\n"
    )
    with pytest.raises(ValueError, match="it does not say how many steps it counts"):
        rt.calibrate(run, "h100-sxm", counters=path)
    for steps in (0, -2, True):
        with pytest.raises(ValueError, match="counted_steps="):
            rt.calibrate(run, "h100-sxm", counters=path, counted_steps=steps)
    result = rt.calibrate(run, "h100-sxm", counters=path, counted_steps=50)
    # 25 times the bytes of a step in 50 steps: half of what rules count.
    weights = result.traffic.factors.factors["dense weights"]
    assert weights.by == "counters"
    assert weights.factor == pytest.approx(0.5, rel=0.2) or not weights.identified


def test_a_chip_is_asked_for_where_the_run_is_of_another_machine(tmp_path):
    run, _ = run_on_a_gpu(graph_of())
    with pytest.raises(RequestError, match="expected the chip that the steps were measured on"):
        rt.calibrate(replace(run, graphs={}))


def test_a_file_of_a_run_has_no_graphs(tmp_path):
    run, _ = run_on_a_gpu(graph_of())
    path = run.save(tmp_path / "run.json")
    assert Run.load(path) == run
    assert not Run.load(path).graphs


def test_an_eager_run_of_this_machine_needs_nothing_else():
    model, x = nn.Sequential(*[Mlp(512) for _ in range(3)]), torch.randn(2, 512)
    with rt.measure(model, x, budget_s=0.3) as run:
        assert run.graphs and run.micro[0].kind == "copy"
    result = rt.calibrate(run, rt.load_chip("h100-sxm"), by_layer=True)
    assert result.execution == "eager"
    assert result.traffic.factors.fusion == "none"
    assert "dense weights" in result.traffic.factors.factors
    # What ran eagerly says nothing of fused kernels.
    assert rt.tools.execution_model("efficient", knobs=result).traffic is None
    assert rt.tools.execution_model("eager", knobs=result).traffic is not None


def test_a_compiled_run_is_validated_by_the_kernels_that_ran():
    run, _ = run_on_a_gpu(graph_of(), slow=1.2)
    found = rt.validate(run, "h100-sxm", "compiled")
    assert found.coverage == pytest.approx(1.0)
    assert len(found.nodes) == len(run.models[0].kernels)
    assert all(check.node.measured is not None for check in found.nodes)
    assert "are those that ran" in " ".join(found.notes)
