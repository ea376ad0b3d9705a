"""Two run files beside each other, and what was predicted beside what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.diffs.runs.comparing import chip_for
from rooftrace.diffs.runs.diffing import RunQuestion, diff_runs
from rooftrace.errors import RequestError
from rooftrace.graph.graph import OpGraph
from rooftrace.measured.bench.runfile import MicroRow, ModelRow, OpTime, Run
from tests.measured.profiles_support import GpuTrace, Stack
from tests.reporting.conftest import Run as RunCommand

US = 1e-6


def row(
    key: str = "net forward eager", seconds: tuple[float, ...] = (1e-3,), **more: object
) -> ModelRow:
    """A measured step of 1 ms with the ops of two equal layers."""
    ops = (
        OpTime(target="aten.mm.default", seconds=600 * US, count=2, id=0, module="layers.0.up"),
        OpTime(target="aten.gelu.default", seconds=200 * US, count=2, id=1, module="layers.0.act"),
    )
    values = {"ops": ops, "device_seconds": 900 * US, "unattributed": 100 * US, "source": "replay"}
    return ModelRow(
        key=key, model="net", phase="forward", mode="eager", sizes={"batch": 1}, seconds=seconds,
        **{**values, **more},
    )  # fmt: skip


def run_of(*rows: ModelRow, name: str = "NVIDIA L4", **more: object) -> Run:
    return Run(device={"type": "cuda", "name": name}, versions={}, models=rows, **more)


def test_rows_of_two_runs_pair_by_key_and_the_rest_is_said() -> None:
    a = run_of(row("a"), row("b"), row("only"))
    b = run_of(row("b", (2e-3,)), row("a"), replace(row("late"), phase="decode"))
    result = diff_runs(a, b)
    assert [step.label for step in result.steps] == ["a", "b"]
    assert result.only_before == ("only",) and result.only_after == ("late",)
    assert result.steps[1].totals["time"].delta == pytest.approx(1e-3)
    assert "only before has only" in str(result)


def test_models_of_other_names_pair_when_they_are_the_only_ones() -> None:
    result = diff_runs(run_of(row("a")), run_of(replace(row("b"), model="other", mode="compiled")))
    assert len(result.steps) == 1


def test_layers_that_stand_once_have_their_counterpart_where_they_stand_alone() -> None:
    """One side found its layers equal, the other did not."""
    each = [
        OpTime(target=op.target, seconds=op.seconds / 2, count=1, id=n, module=path)
        for op in row().ops
        for n, path in enumerate((op.module, op.module.replace("0", "1")))
    ]
    step = diff_runs(run_of(row()), run_of(replace(row(), ops=tuple(each)))).steps[0]
    assert {change.status for change in step.rows} == {"same"}
    assert {change.module for change in step.rows} == {"", "layers.*.up", "layers.*.act"}


def test_rows_and_what_is_outside_of_them_add_up() -> None:
    step = diff_runs(run_of(row()), run_of(row(unattributed=400 * US))).steps[0]
    assert step.totals["work"].before == pytest.approx((600 + 200 + 100) * US)
    assert sum(change.time.after for change in step.rows) == pytest.approx((600 + 200 + 400) * US)
    assert step.rows[0].kernels[1] == ("outside of its ops",)
    assert step.totals["kernels"].after == 4  # two calls in each of two layers


def test_the_wall_time_of_a_run_is_a_median_with_noise() -> None:
    quiet = run_of(row(seconds=(1e-3, 1.01e-3, 0.99e-3, 1e-3, 9e-3)))
    assert diff_runs(quiet, quiet).steps[0].totals["time"].before == 1e-3
    near = run_of(row(seconds=(1.02e-3, 1.0e-3, 1.01e-3, 1.03e-3)))
    far = run_of(row(seconds=(2.02e-3, 2.0e-3, 2.01e-3, 2.03e-3)))
    steady = run_of(row(seconds=(1e-3, 1.02e-3, 0.99e-3, 1.01e-3)))
    assert "within the noise" in str(diff_runs(steady, near))
    assert "beyond the noise" in str(diff_runs(steady, far))


def test_a_run_file_gives_what_the_run_gives(tmp_path: Path) -> None:
    a, b = run_of(row()), run_of(row(seconds=(2e-3,)))
    a.save(tmp_path / "a.json.gz")
    b.save(tmp_path / "b.json")
    from_files = rt.diff(tmp_path / "a.json.gz", tmp_path / "b.json")
    assert from_files.steps == rt.diff(a, b, names=("x", "y")).steps
    assert Run.load(tmp_path / "b.json") == b


def test_operations_alone_tell_of_the_machine() -> None:
    def copied(seconds: float) -> Run:
        micro = MicroRow(key="copy", kind="copy", sizes={}, seconds=(seconds, seconds * 1.01))
        return run_of(row(), micro=(micro,))

    result = diff_runs(copied(1e-3), copied(1.5e-3))
    assert result.operations is not None
    assert result.operations["copy"].relative == pytest.approx(0.5)
    assert "copy" in str(result) and not result.unchanged


def test_a_trace_beside_a_run_takes_one_row(tmp_path: Path) -> None:
    trace = GpuTrace()
    trace.step(lambda: trace.op("aten::mm", [(8, 8)], [("gemm", 10.0)]))
    path = trace.write(tmp_path / "a.json")
    result = diff_runs(path, run_of(row()))
    assert result.kinds == ("trace", "run")
    mm = next(change for change in result.steps[0].rows if change.call == ("aten::mm", "aten::mm"))
    assert mm.time.after == pytest.approx(600 * US)
    with pytest.raises(RequestError, match="the run beside it has 2"):
        diff_runs(path, run_of(row("a"), row("b")))
    with pytest.raises(RequestError, match="phase decode: the run has forward"):
        diff_runs(path, run_of(row()), RunQuestion(phases=["decode"]))


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD EPYC", None),
        ("", None),
    ],
)
def test_a_chip_is_known_by_the_name_of_its_device(device: str, chip: str | None) -> None:
    name, reason = chip_for(device)
    assert name == chip
    assert ("--chip" in reason) == (chip is None)


# -- predictions -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graphs() -> tuple[OpGraph, OpGraph]:
    """Four and six equal blocks."""
    x = torch.empty(4, 32)
    return rt.trace(Stack(4), x), rt.trace(Stack(6), x)


def traced(path: Path, graph: OpGraph, us: float = 20.0) -> Path:
    trace = GpuTrace()
    for _ in range(2):
        trace.run(graph, lambda op: us)
    return trace.write(path)


def test_the_predicted_difference_stands_beside_the_measured_one(
    tmp_path: Path, graphs: tuple[OpGraph, OpGraph]
) -> None:
    a, b = (traced(tmp_path / f"{n}.json", graph) for n, graph in enumerate(graphs))
    result = rt.diff(a, b, graphs=graphs)
    step = result.steps[0]
    assert step.prediction is not None and step.prediction.diff.chips == ("h200-sxm", "h200-sxm")
    estimates = [rt.estimate(graph, "h200-sxm", "eager") for graph in graphs]
    times = [estimate.t_est for estimate in estimates]
    assert step.prediction.totals["time"].delta == pytest.approx(times[1] - times[0])
    assert step.prediction.totals["kernels"].delta == step.totals["kernels"].delta
    assert step.ratio("kernels") == 1
    # Six blocks in place of four, in every module of a block half as much again.
    for group in step.modules:
        if group.name.startswith("blocks.*"):
            assert group.time.before and group.predicted is not None
            assert group.time.relative == pytest.approx(0.5)
            assert group.predicted.relative == pytest.approx(0.5)
    predicted = sum(group.predicted.delta for group in step.modules if group.predicted)
    serial = [estimate.times.t_serial for estimate in estimates]
    assert predicted == pytest.approx(serial[1] - serial[0])
    assert step.prediction.diff.phases[0].totals["time"].delta == pytest.approx(times[1] - times[0])
    assert "predicted" in str(result) and "h200-sxm" in str(result)


def test_where_the_two_disagree_it_is_said(tmp_path: Path, graphs: tuple[OpGraph, OpGraph]) -> None:
    same, deeper = graphs
    a = traced(tmp_path / "a.json", same)
    slow = traced(tmp_path / "slow.json", same, 60.0)
    step = rt.diff(a, slow, graphs=same).steps[0]
    assert step.prediction is not None
    assert any("how it ran, not what is computed" in note for note in step.prediction.notes)
    faster = traced(tmp_path / "faster.json", deeper, 5.0)
    step = rt.diff(a, faster, graphs=(same, deeper)).steps[0]
    assert step.prediction is not None
    assert any("device: predicted +" in n and "the other way" in n for n in step.prediction.notes)


def test_two_devices_are_predicted_each_on_its_own(
    tmp_path: Path, graphs: tuple[OpGraph, OpGraph]
) -> None:
    a = traced(tmp_path / "a.json", graphs[0])
    b = tmp_path / "b.json"
    b.write_text(a.read_text().replace("NVIDIA H200", "NVIDIA L4"))
    step = rt.diff(a, b, graphs=graphs[0]).steps[0]
    assert step.prediction is not None and step.prediction.diff.chips == ("h200-sxm", "l4")
    assert (
        step.prediction.totals["time"].before == rt.estimate(graphs[0], "h200-sxm", "eager").t_est
    )
    assert step.prediction.totals["time"].after == rt.estimate(graphs[0], "l4", "eager").t_est
    assert any("two devices: NVIDIA H200 before, NVIDIA L4 after" in note for note in step.notes)
    other = rt.diff(a, a, graphs=graphs[0], chip="l4").steps[0]
    assert other.prediction is not None
    assert any("measured on NVIDIA H200" in note for note in other.prediction.notes)


def test_a_trace_of_another_graph_is_refused(
    tmp_path: Path, graphs: tuple[OpGraph, OpGraph]
) -> None:
    a = traced(tmp_path / "a.json", graphs[0])
    other = rt.trace(nn.Conv2d(3, 8, 3), torch.empty(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"a\.json: not a run of this graph"):
        rt.diff(a, a, graphs=other)


def test_a_run_in_memory_has_its_graphs() -> None:
    x = torch.randn(8, 32)
    before = rt.measure(Stack(2), x, budget_s=0.05)
    after = rt.measure(Stack(3), x, budget_s=0.05)
    result = rt.diff(before, after, chip="l4")
    step = result.steps[0]
    assert step.prediction is not None and step.ratio("kernels") is not None
    norm = next(group for group in step.modules if group.name == "blocks.*.norm")
    assert (norm.count.before, norm.count.after) == (2, 3)
    assert norm.predicted is not None and norm.predicted.relative == pytest.approx(0.5)
    bare = rt.diff(before, after).steps[0]
    assert bare.prediction is None and any("--chip" in note for note in bare.notes)
    assert rt.diff(before, before, chip="l4").unchanged


# -- the command line ------------------------------------------------------------------------------

CODE = """
import torch
class Net(torch.nn.Module):
    def __init__(self, copies):
        super().__init__()
        self.copies = copies
        self.fc = torch.nn.Linear(64, 64)
    def forward(self, x):
        x = self.fc(x)
        return x.t().contiguous() if self.copies else x
def before():
    return Net(False), (torch.empty(64, 64),)
def after():
    return Net(True), (torch.empty(64, 64),)
"""


def test_the_command_line_says_what_is_slower(tmp_path: Path, run: RunCommand) -> None:
    (tmp_path / "net.py").write_text(CODE)
    targets = [f"{tmp_path}/net.py:{name}" for name in ("before", "after")]
    paths = []
    for target in targets:
        graph = rt.tools.trace_target(target)["forward"]
        paths.append(traced(tmp_path / f"{target[-5:]}.json", graph))
    plain = run("diff", *paths)
    assert plain.code == 0 and "new" in plain.out and "2 steps" in plain.out
    told = run("diff", *paths, "--target", ",".join(targets), "--format", "json")
    document = json.loads(told.out)
    assert told.code == 0 and document["schema"] == "rooftrace.rundiff/1"
    (step,) = document["steps"]
    assert (
        step["prediction"]["totals"]["kernels"]["delta"] == step["totals"]["kernels"]["delta"] == 1
    )
    assert [r["status"] for r in step["rows"] if r["time"]["delta"]] == ["new"]
    failed = run("diff", *paths, "--fail-on", "device>5%", "--fail-on", "kernels>0")
    assert failed.code == 1 and "measured device grew" in failed.err and "kernels" in failed.err
    assert run("diff", paths[1], paths[0], "--fail-on", "device>5%").code == 0
    page = run("diff", *paths, "--format", "md", "--names", "main,branch")
    assert "`main` -> `branch`" in page.out and "| **slower** |" not in page.out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--target", "a,b,c"), "expected one target, or two"),
        (("--knobs", "none"), "--execution"),
        (("--batch", "3"), "--batch 3"),
        (("--chip", "l4"), "--target"),
        (("--fail-on", "flops>3%"), "METRIC one of time"),
        (("--fail-on", "memory>3%"), "was not measured in both"),
    ],
)
def test_an_option_that_does_not_fit_is_answered(
    more: tuple[str, ...], said: str, tmp_path: Path, run: RunCommand
) -> None:
    trace = GpuTrace()
    trace.step(lambda: trace.op("aten::mm", [(8, 8)], [("gemm", 10.0)]))
    path = trace.write(tmp_path / "a.json")
    ran = run("diff", path, path, *more)
    assert ran.code == 2 and said in ran.err and "Traceback" not in ran.err


def test_of_graphs_target_is_refused(run: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CODE)
    target = f"{tmp_path}/net.py:before"
    ran = run("diff", target, target, "--target", target)
    assert ran.code == 2 and "--target" in ran.err
