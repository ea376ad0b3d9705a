"""validate: what was measured, in each kind of file, beside what is predicted for it."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.ops.opview import own_rules
from rooftrace.errors import ProfileError, RequestError
from rooftrace.measured.alignment.keys import base_name, written_out
from rooftrace.measured.bench.models import traced_model as traced
from rooftrace.measured.bench.runfile import ModelRow, OpTime, Run
from rooftrace.measured.fit.misses import nodes
from rooftrace.measured.fit.validation import alike, dram_by_row, node_checks, other_device
from rooftrace.measured.profiles import source_of
from rooftrace.measured.profiles.kineto import read_trace
from rooftrace.measured.profiles.tables import StepTime
from tests.measured.profiles_support import GpuTrace, Stack, run_on_cpu
from tests.reporting.conftest import Run as Command

pytestmark = pytest.mark.usefixtures("kept_targets")

ROOT = Path(__file__).resolve().parents[2]
CHIP = "h200-sxm"
LENGTHS = {"mm": 40.0, "gelu": 7.0}
"""us of the kernels of made traces, by the name of their op; others take 3."""


def microseconds(graph: rt.types.OpGraph, op: int) -> float:
    name = graph.ops[op].name.removeprefix("aten.").replace("addmm", "mm")
    return LENGTHS.get(name, 3.0)


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    return rt.trace(Stack(12), torch.empty(4, 32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def gpu(graph: rt.types.OpGraph, folder: Path) -> Path:
    """Three steps of the stack on a GPU."""
    trace = GpuTrace()
    for _ in range(3):
        trace.run(graph, duration=lambda op: microseconds(graph, op))
    return trace.write(folder / "gpu.json")


@pytest.fixture(scope="module")
def suite() -> Run:
    """Ten steps of a real run: of an LSTM, and of GPT-2."""
    run = rt.types.Run.load(next((ROOT / "benchmarks" / "measurements").glob("*.json.gz")))
    return replace(run, models=tuple(r for r in run.models if r.model in ("lstm", "gpt2")))


@pytest.fixture(scope="module")
def compared(suite: Run) -> rt.types.Validation:
    return rt.validate(suite, CHIP)


# -- what a file is --------------------------------------------------------------------------------

NCU = '==PROF== Profiling "gemm": 0%....100% - 3 passes\n"ID","Kernel Name"\n'


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"schema": "rooftrace.run/1", "models": []}', "run"),
        ('{"schema":"rooftrace.run/9"}', "run"),
        ('{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "trace"),
        ('\n[{"ph": "X", "name": "aten::mm"}]', "trace"),
        ('{"schemaVersion": 1, "deviceProperties": [], "traceEv', "trace"),
        ("model,batch,ms\nresnet,8,5\n", "steps"),
        ("\ufeffmodel,phase\n", "steps"),
        (NCU, "counters"),
        ('"ID","Kernel Name"\n', "counters"),
        ("{'loss': 0.5}\n" + NCU, "counters"),
        ('Index,KernelName,gpu-id,queue-id\n0,"a(Kernel Name)",0,0\n', "counters"),
        ('"Correlation_Id","Dispatch_Id","Kernel_Name","Counter_Name"\n', "counters"),
        ("# started on Sat Jul 18 10:02:11 2026\n\n", "totals"),
        ("16.28;MiB;uncore_imc/cas_count_read/;1610869735;100.00;;\n", "totals"),
        ("<not supported>,,cycles,0,100.00,,\n", "totals"),
        ("the output of a program, and\nSTRUCT,Info,3,\nCPU name:,A CPU,,\n", "totals"),
        ("TABLE,Region step,Group 1 Raw,MEM,17,\n", "totals"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_is_told_by_its_contents(text: str, kind: str, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "measured.of.any.name"
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    assert source_of(path).gives == kind


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty; expected a run file of `rooftrace measure`, a trace"),
        (b"# Title\n", "begins with '# Title'; expected"),
        (b'{"schema": "rooftrace.graph/3"}', "of schema 'rooftrace.graph/3'; expected a run"),
        (b'{"a": 1}', "JSON that begins with '{\"a\": 1}', without a schema"),
        (b"\x89PNG\r\n\xff", "not text in UTF-8"),
        (b"\x1f\x8b\x08\x00nonsense nonsense", "a damaged gzip file"),
    ],
    ids=["empty", "prose", "a graph", "other JSON", "a picture", "damaged"],
)
def test_a_file_of_no_kind_says_what_was_expected(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(ProfileError) as error:
        source_of(path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_a_source_from_outside_is_read_by_validate_and_calibrate(tmp_path: Path) -> None:
    path = tmp_path / "log"
    sizes = (16, 64, 256, 1024, 4096)
    path.write_text("".join(f'{{"step": {n}, "seconds": {n * 1e-6}}}\n' for n in sizes))
    with pytest.raises(ProfileError, match="JSON that begins with"):
        rt.validate(path, CHIP)
    with own_rules():

        @rt.extend.source(
            "step log", about="a log of steps", begins=lambda b: b.startswith(b'{"step"')
        )
        def read(path: str) -> list[StepTime]:
            lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
            return [StepTime(target="mlp", seconds=x["seconds"], batch=x["step"]) for x in lines]

        graph = rt.trace(nn.Linear(64, 64), torch.empty(8, 64))
        result = rt.validate(path, CHIP, target=graph)
        assert [step.measured for step in result.steps] == [n * 1e-6 for n in sizes]
        assert {step.predicted for step in result.steps} == {
            rt.estimate(graph, CHIP, "eager").t_est
        }
        assert rt.calibrate(path, CHIP, target=graph, free=["memory"]).measured == len(sizes)

        other = tmp_path / "other"
        other.write_text("# Title\n")
        with pytest.raises(ProfileError, match=r"step times \(model,batch,ms\) or a log of steps"):
            source_of(other)


def test_a_source_that_does_not_do_what_it_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "database"
    path.write_bytes(b"SQLite format 3\0\xff")
    with pytest.raises(ValueError, match="gives='rows'; expected"):
        rt.extend.source("rows", about="rows", begins=bool, gives="rows")
    with pytest.raises(ValueError, match="gives='totals'; expected"):
        rt.extend.source("totals", about="totals", begins=bool, gives="totals")
    with pytest.raises(ValueError, match="'run' is a source of rooftrace's own"):
        rt.extend.source("run", about="mine", begins=bool)
    with own_rules():
        add = rt.extend.source("sql", about="a database", begins=lambda b: b.startswith(b"SQLite"))
        add(lambda path: [{"ms": 1}])
        with pytest.raises(ValueError, match=r"'sql' already is a source, tests.*override=True"):
            add(lambda path: [])
        with pytest.raises(ProfileError, match=r"returned \[\{'ms': 1\}\] for it; expected a seq"):
            rt.validate(path, CHIP)


# -- a run -----------------------------------------------------------------------------------------


def test_every_row_of_the_mode_stands_beside_its_estimate(
    suite: Run, compared: rt.types.Validation
) -> None:
    rows = {row.key: row for row in suite.models if row.mode == "eager"}
    assert {step.label: step.measured for step in compared.steps} == {
        key: row.median for key, row in rows.items()
    }
    label = next(key for key in rows if "gpt2" in key and "decode" in key)
    (step,) = [one for one in compared.steps if one.label == label]
    one = rt.estimate(traced(rows[label]), CHIP, "eager")
    assert step.predicted == one.t_est and step.device_predicted == one.times.t_serial
    assert step.shares == one.times.regime_shares and step.regime == one.times.regime
    assert step.error == one.t_est / rows[label].median - 1


def test_errors_are_summed_up_by_phase(compared: rt.types.Validation) -> None:
    found = compared.to_dict()["errors"]
    assert list(found) == ["prefill, forward", "training", "decode", "all"]
    decode = [one.error for one in compared.steps if one.phase == "decode"]
    assert found["decode"]["count"] == len(decode)
    assert found["decode"]["bias"] == pytest.approx(sum(decode) / len(decode))
    assert found["decode"]["mean"] == pytest.approx(sum(map(abs, decode)) / len(decode))
    assert found["all"]["count"] == len(compared.steps)
    assert abs(found["all"]["worst"]) == max(abs(one.error) for one in compared.steps)


def test_no_measured_second_of_an_op_is_lost(suite: Run, compared: rt.types.Validation) -> None:
    measured = sum(row.attributed for row in suite.models if row.mode == "eager")
    in_nodes = sum(check.node.measured or 0.0 for check in compared.nodes)
    in_strays = sum(stray.seconds for _, stray in compared.strays)
    assert in_nodes + in_strays == pytest.approx(measured)
    assert compared.op_matched == pytest.approx(in_nodes)
    assert compared.coverage == pytest.approx(in_nodes / measured) and in_nodes / measured > 0.8
    classes = compared.to_dict()["ops"]["classes"]
    assert sum(one["measured_s"] for one in classes.values()) == pytest.approx(in_nodes)
    assert classes["rnn"]["measured_s"] > 0 and classes["attention"]["measured_s"] > 0


def test_a_phase_can_be_chosen(suite: Run) -> None:
    found = rt.validate(suite, CHIP, phases=["decode"])
    assert {step.phase for step in found.steps} == {"decode"}
    with pytest.raises(RequestError, match="step: no such steps were measured, only dec"):
        rt.validate(suite, CHIP, phases=["step"])


def row(graph: rt.types.OpGraph, seconds: float, **changes: object) -> ModelRow:
    base = ModelRow(
        key="Stack forward batch=4 eager",
        model="Stack",
        phase="forward",
        mode="eager",
        sizes={},
        seconds=(seconds,),
    )
    return replace(base, **changes)


def run_of(*rows: ModelRow, kind: str = "cuda", name: str = "NVIDIA H200") -> Run:
    return Run(device={"type": kind, "name": name}, versions={}, models=rows)


def test_a_row_of_the_users_own_model_is_compared_with_the_graph_that_is_given(
    graph: rt.types.OpGraph,
) -> None:
    one = rt.estimate(graph, CHIP, "eager")
    found = rt.validate(run_of(row(graph, one.t_est)), CHIP, target=graph)
    assert found.steps[0].error == 0 and not found.nodes and found.coverage is None
    assert found.to_dict()["ops"] is None
    with pytest.raises(RequestError, match="'Stack' is no model of the suite"):
        rt.validate(run_of(row(graph, 1.0)), CHIP)


def test_ops_that_were_measured_one_by_one_are_those_of_the_graph() -> None:
    model, x = Stack(3), torch.randn(4, 32)
    run = rt.measure(model, x, budget_s=0.05)
    found = rt.validate(run, CHIP, target=rt.trace(model, x))
    seconds = {op.id: op.seconds for op in run.models[0].ops}
    assert seconds and not found.strays
    for check in found.nodes:
        assert check.node.measured == pytest.approx(sum(seconds[i] for i in check.node.row.ops))
    whole = run.models[0].attributed + (run.models[0].unattributed or 0.0)
    assert found.coverage == pytest.approx(run.models[0].attributed / whole)


def test_a_kernel_that_is_measured_in_part_is_of_no_class() -> None:
    graph = rt.trace(torch.nn.Sequential(torch.nn.GELU(), torch.nn.Tanh()), torch.empty(3, 8))
    one = OpTime(target="aten::gelu", seconds=0.25, count=1, shapes=((3, 8),))
    measured = row(graph, 1.0, mode="compiled", ops=(one,), device_seconds=0.25)
    found = rt.validate(run_of(measured), CHIP, "compiled", target=graph)
    (check,) = found.nodes
    assert len(check.node.row.ops) == 2 and check.node.measured == 0.25
    assert "1 of its 2 ops are in the run" in check.node.reason
    assert found.to_dict()["ops"]["classes"] == {}
    assert "predicted kernels are fused" in str(found)


def test_memory_is_compared_where_the_device_told_it(graph: rt.types.OpGraph) -> None:
    peak = rt.memory(graph).peak
    rows = [row(graph, 1.0, key=f"{part}", peak_bytes=int(part * peak)) for part in (1, 2)]
    found = rt.validate(run_of(*rows, row(graph, 1.0, key="unknown")), CHIP, target=graph)
    assert [step.peak_error for step in found.steps] == [0.0, -0.5, None]
    errors = found.to_dict()["peak_memory_errors"]
    assert errors["count"] == 2 and errors["bias"] == -0.25
    assert "memory at the peak" in str(found)


def test_with_knobs_a_step_has_an_interval(graph: rt.types.OpGraph) -> None:
    knobs = Knobs("mine", spread=0.1)
    predicted = rt.validate(run_of(row(graph, 1.0)), CHIP, target=graph, knobs=knobs).steps[0]
    times = (predicted.predicted, 1.3 * predicted.predicted)
    rows = [row(graph, seconds, key=f"step {seconds}") for seconds in times]
    found = rt.validate(run_of(*rows), CHIP, target=graph, knobs=knobs)
    assert [step.inside for step in found.steps] == [True, False] and found.inside == (1, 2)
    low, high = found.steps[0].interval or (0, 0)
    assert low < times[0] < high < times[1]
    assert "1 of 2 steps (50.0 %) is inside the predicted interval" in str(found)
    assert "90 % between" in str(found) and "no --knobs" not in str(found)


def test_a_row_that_does_not_trace_is_left_out_and_named(graph: rt.types.OpGraph) -> None:
    rows = [row(graph, 1.0), row(graph, 1.0, key="other", phase="decode"), row(graph, 0.0, key="0")]
    found = rt.validate(run_of(*rows), CHIP, target=graph)
    assert len(found.steps) == 1 and found.planned == 3
    assert "the target has forward" in found.failures["other"]
    assert "expected a time above 0" in found.failures["0"]
    assert "left out, other" in str(found)


def test_measurements_of_another_device_get_a_note(graph: rt.types.OpGraph) -> None:
    same = rt.validate(run_of(row(graph, 1.0)), CHIP, target=graph)
    assert not any("two devices" in note for note in same.notes)
    cpu = run_of(row(graph, 1.0), kind="cpu", name="AMD EPYC")
    assert "measured on AMD EPYC, a CPU; predicted for NVIDIA H200" in str(
        rt.validate(cpu, CHIP, target=graph)
    )


@pytest.mark.parametrize(
    ("name", "chip", "same"),
    [
        ("NVIDIA H200", "h200-sxm", True),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80", True),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", True),
        ("AMD Instinct MI300X", "mi300x", True),
        ("", "l4", True),  # who knows
        ("NVIDIA L40S", "l4", False),
        ("NVIDIA H100 80GB HBM3", "h200-sxm", False),
    ],
)
def test_the_name_of_a_device_tells_the_chip(name: str, chip: str, same: bool) -> None:
    assert (other_device(name, "gpu", rt.load_chip(chip)) == "") is same


# -- a trace ---------------------------------------------------------------------------------------


def test_a_trace_stands_beside_the_graph_kernel_by_kernel(
    gpu: Path, graph: rt.types.OpGraph
) -> None:
    found = rt.validate(gpu, CHIP, target=graph)
    assert found.kind == "trace" and found.coverage == pytest.approx(1.0) and not found.strays
    for check in found.nodes:
        each = sum(microseconds(graph, op) for op in check.node.row.ops) * 1e-6
        assert check.node.measured == pytest.approx(each * check.node.row.count)
    norms = [check.node for check in found.nodes if "layer_norm" in check.node.row.name]
    one = found.to_dict()["ops"]["classes"]["layer norm"]
    off = sum(abs(node.predicted - 3e-6 * node.row.count) for node in norms)
    assert one["launches"] == 12 and one["mean"] == pytest.approx(off / (12 * 3e-6))
    assert one["bias"] == pytest.approx(sum(node.predicted for node in norms) / (12 * 3e-6) - 1)
    (step,) = found.steps
    assert step.predicted == rt.estimate(graph, CHIP, "eager").t_est
    assert step.device == pytest.approx(
        sum(microseconds(graph, op.id) * 1e-6 * graph.times(op) for op in graph.kernels())
    )
    assert step.measured == pytest.approx(read_trace(gpu).step_time)


def test_of_several_phases_the_one_that_was_run_is_taken(folder: Path) -> None:
    model, x = Stack(4), torch.randn(4, 32)
    with torch.no_grad():
        path = run_on_cpu(lambda: model(x), folder / "cpu.json")
    graphs = {phase: rt.trace(model, x, phase=phase) for phase in ("training", "forward")}
    found = rt.validate(read_trace(path), CHIP, target=graphs)
    assert found.steps[0].phase == "forward" and found.coverage == 1.0
    text = str(found)
    assert "the trace matches forward best of training and forward" in text
    assert "seconds of ops are the host's own" in text
    assert "measured on a CPU; predicted for NVIDIA H200" in text


def test_of_two_graphs_that_match_the_better_one_is_taken(
    gpu: Path, graph: rt.types.OpGraph
) -> None:
    longer = rt.trace(Stack(16), torch.empty(4, 32))
    found = rt.validate(gpu, CHIP, target={"prefill": longer, "forward": graph})
    assert found.estimate is not None and found.estimate.plan.source is graph
    assert rt.validate(gpu, CHIP, target=longer).planned == 1  # which matches, too


def step_of(graph: rt.types.OpGraph, more: int = 0) -> GpuTrace:
    """One step of a graph, each kernel of 2 us, and so many sorts of 25 us that it has not."""
    trace = GpuTrace()

    def work() -> None:
        for index, _ in written_out(graph):
            op = graph.ops[index]
            shapes = [graph.values[value].shape for value in op.inputs]
            kernels = [(f"{op.name}_kernel", 2.0)] if op.kind == "kernel" else []
            trace.op(op.name.replace(".", "::", 1), shapes, kernels)
        for _ in range(more):
            trace.op("aten::sort", [(7, 7)], [("sort_kernel", 25.0)])

    trace.step(work)
    return trace


def test_what_the_graph_has_not_is_shown_with_its_share(
    graph: rt.types.OpGraph, folder: Path
) -> None:
    found = rt.validate(step_of(graph, 2).write(folder / "stray.json"), CHIP, target=graph)
    kernels = sum(graph.times(op) for op in graph.kernels())
    share = 2 * 25 / (2 * 25 + 2 * kernels)
    assert found.coverage == pytest.approx(1 - share)
    ((_, stray),) = found.strays
    assert (stray.name, stray.count) == ("aten::sort", 2)
    assert stray.seconds == pytest.approx(2 * 25e-6)
    text = str(found)
    assert f"{100 * (1 - share):.1f} % of the measured op time belongs to a predicted" in text
    assert f"the most of the rest: sort {100 * share:.1f} %" in text
    assert "op missing in the graph" in text


# -- counters --------------------------------------------------------------------------------------

UNITS = '"","","","byte","byte","ns"'
HEADER = (
    '"ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum",'
    '"gpu__time_duration.sum"'
)


def ncu(graph: rt.types.OpGraph, path: Path, skip: str = "", steps: int = 1) -> Path:
    """Counters of steps: an op reads 1000 bytes times its id, and writes one."""
    lines = [HEADER, UNITS]
    for index, _ in steps * written_out(graph):
        op = graph.ops[index]
        if op.kind == "kernel" and op.name != skip:
            name = f"void at::{op.name}_kernel<float, (int)4>(float *)"
            lines.append(f'"{len(lines)}","{name}","(66, 2, 1)","{1000 * index}","1","500"')
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("steps", [1, 2])
def test_counted_bytes_stand_beside_the_predicted_ones(
    steps: int, graph: rt.types.OpGraph, gpu: Path, folder: Path
) -> None:
    counters = ncu(graph, folder / "ncu.csv", steps=steps)
    found = rt.validate(gpu, CHIP, target=graph, counters=counters)
    for check in found.nodes:
        (op,) = check.node.row.ops
        assert check.dram == check.node.row.count * (1000 * op + 1)  # of all launches
    total = sum(graph.times(op) * (1000 * op.id + 1) for op in graph.kernels())
    assert sum(check.dram or 0 for check in found.nodes) == total
    assert "counters of 61 of 61 kernels" in str(found) and "counted" in str(found)


def test_a_kernel_without_counters_is_unknown(
    graph: rt.types.OpGraph, gpu: Path, folder: Path
) -> None:
    counters = ncu(graph, folder / "part.csv", skip="aten.gelu")
    found = rt.validate(gpu, CHIP, target=graph, counters=counters)
    unknown = {check.node.row.name for check in found.nodes if check.dram is None}
    assert unknown == {"aten.gelu"}
    assert "counters of 49 of 61 kernels" in str(found)
    lines = counters.read_text().splitlines()
    lines.remove([line for line in lines if "layer_norm" in line][6])  # of one of equal blocks
    counters.write_text("\n".join(lines))
    found = rt.validate(gpu, CHIP, target=graph, counters=counters)
    norms = [check for check in found.nodes if "layer_norm" in check.node.row.name]
    assert [check.node.row.count for check in norms if check.dram is None] == [8]
    assert "counters of 48 of 61 kernels" in str(found)


def test_bytes_of_an_op_are_shared_by_the_rows_that_it_stands_in(graph: rt.types.OpGraph) -> None:
    one = rt.estimate(graph, CHIP, "eager")
    (op,) = one.rows[0].ops
    edge = tuple(replace(one.rows[0], index=i, count=n) for i, n in enumerate((3, 1)))
    assert dram_by_row(replace(one, rows=edge), {op: 400.0}) == {0: 300.0, 1: 100.0}
    assert dram_by_row(replace(one, rows=edge), {op + 1: 400.0}) == {}


def test_counters_of_something_else_are_refused(
    graph: rt.types.OpGraph, gpu: Path, folder: Path
) -> None:
    other = ncu(rt.trace(torch.nn.Linear(3, 3), torch.empty(2, 3)), folder / "other.csv")
    with pytest.raises(ProfileError, match="kernels of 'ProfilerStep#2' are there in order; the"):
        rt.validate(gpu, CHIP, target=graph, counters=other)
    with torch.no_grad():
        model, x = Stack(2), torch.randn(4, 32)
        cpu = run_on_cpu(lambda: model(x), folder / "host.json")
    with pytest.raises(ProfileError, match="no kernels in the trace to set counters beside"):
        rt.validate(cpu, CHIP, target=rt.trace(model, x), counters=other)
    with pytest.raises(RequestError, match="counters stand beside the kernels of a trace"):
        rt.validate(run_of(row(graph, 1.0)), CHIP, target=graph, counters=other)


def rocprof(graph: rt.types.OpGraph, path: Path) -> Path:
    """What `ncu` above counts, as rocprofv3 writes it: in work items of 64, and 4 KiB for each."""
    columns = "Dispatch_Id,Agent_Id,Grid_Size,Kernel_Name,Workgroup_Size,Counter_Name,Counter_Value"
    lines = [columns]
    for number, (index, _) in enumerate(written_out(graph)):
        op = graph.ops[index]
        if op.kind == "kernel":
            begin = f'{number},4,{66 * 2 * 64},"at::{op.name}_kernel<float>(float*) [clone .kd]",64'
            lines += [f"{begin},FETCH_SIZE,{4 * index}", f"{begin},WRITE_SIZE,0.5"]
    path.write_text("\n".join(lines))
    return path


def test_counters_of_rocprof_stand_there_too(
    graph: rt.types.OpGraph, gpu: Path, folder: Path
) -> None:
    counters = rocprof(graph, folder / "rocprof.csv")
    found = rt.validate(gpu, CHIP, target=graph, counters=counters)
    for check in found.nodes:
        (op,) = check.node.row.ops
        assert check.dram == check.node.row.count * (4096 * op + 512)
    assert "counters of 61 of 61 kernels" in str(found)


def test_only_counters_of_kernels_stand_beside_a_trace(
    graph: rt.types.OpGraph, gpu: Path, folder: Path
) -> None:
    totals = folder / "perf.csv"
    totals.write_text("16.28,MiB,uncore_imc/cas_count_read/,1610869735,100.00,,\n")
    words = (
        "counts of `perf stat -x,`, expected a CSV of Nsight Compute or a CSV of AMD's rocprof; it "
        f"counts a whole command or region, for `rooftrace calibrate --counters {totals}`"
    )
    with pytest.raises(ProfileError) as caught:
        rt.validate(gpu, CHIP, target=graph, counters=totals)
    assert str(caught.value) == f"{totals}: {words}"
    with pytest.raises(ProfileError, match=r"a trace of torch\.profiler, expected a CSV of Nsight"):
        rt.validate(gpu, CHIP, target=graph, counters=gpu)
    with pytest.raises(RequestError, match="not enough for a comparison: it counts a whole"):
        rt.validate(totals, CHIP, target=graph)


@pytest.mark.parametrize(
    "name",
    [
        "gemm",
        "void gemm<128, 128>(float *)",
        "void cutlass::gemm<cutlass::Shape<64, 32>, true>(Params<float>)",
        "void (anonymous namespace)::gemm<float>(float*, int)",
        "<unnamed>::gemm(float *, int)",
    ],
)
def test_a_function_is_the_same_however_it_is_written(name: str) -> None:
    assert base_name(name) == "gemm"


# -- a table ---------------------------------------------------------------------------------------


def test_a_table_of_steps_is_traced_by_its_template(folder: Path) -> None:
    target = str(ROOT / "examples" / "models" / "{target}.py:build")
    steps = (
        StepTime(
            target="lstm_tagger", seconds=0.002, batch=4, phase="forward", line=2, chip="a100"
        ),
        StepTime(target="nothing", seconds=0.001, line=3),
    )
    found = rt.validate(steps, "l4", target=target)
    name = target.format(target="lstm_tagger")
    one = rt.estimate(
        rt.tools.trace_target(name, ["forward"], rt.types.Request(4))["forward"], "l4", "eager"
    )
    assert [(step.measured, step.predicted) for step in found.steps] == [(0.002, one.t_est)]
    assert found.kind == "steps" and "there is no file" in found.failures["line 3"]
    assert "the table says chip 'a100'; predicted for 'l4'" in found.notes


# -- what comes out --------------------------------------------------------------------------------


def test_the_folder_has_what_applies(
    gpu: Path, graph: rt.types.OpGraph, compared: rt.types.Validation, tmp_path: Path
) -> None:
    found = rt.validate(gpu, CHIP, target=graph)
    written = {path.name: path for path in found.write(tmp_path / "trace")}
    assert set(written) == {
        "validation.html", "validation.md", "validation.json", "parity.png", "nodes.csv",
        "timeline.json.gz",
    }  # fmt: skip
    there = {path.name for path in (tmp_path / "trace").iterdir()}
    assert there == {*written, "_validation.json"}
    assert written["parity.png"].read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader(written["nodes.csv"].open()))
    assert len(rows) == len(found.nodes) == len(nodes(found.estimate, {}))
    assert [float(r["measured_s"]) for r in rows] == [c.node.measured for c in found.nodes]
    assert {r["dram_bytes"] for r in rows} == {""}  # not counted is not zero
    timeline = json.loads(gzip.decompress(written["timeline.json.gz"].read_bytes()))
    slices = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {1, 2}  # predicted and measured
    assert sum(event["ph"] == "s" for event in timeline["traceEvents"]) == 61
    of_run = {path.name for path in compared.write(tmp_path / "run")}
    assert of_run == {
        "validation.html", "validation.md", "validation.json", "parity.png", "nodes.csv",
    }  # fmt: skip


def test_the_page_has_every_step_and_the_json_the_same_numbers(
    compared: rt.types.Validation, tmp_path: Path
) -> None:
    compared.write(tmp_path)
    data = json.loads((tmp_path / "validation.json").read_text())
    assert data["schema"] == "rooftrace.validation/1" and data == compared.to_dict()
    assert len(data["steps"]) == len(compared.steps) == data["compared_steps"]
    page = (tmp_path / "validation.md").read_text()
    assert "![predicted and measured](parity.png)" in page
    for name in ("### Prefill, forward", "### Training", "### Decode", "### Kernels"):
        assert name in page
    assert "| `_foreach_sqrt` |" in page  # whose underscores are no emphasis
    steps = page.partition("### Prefill")[2].partition("### Kernels")[0]
    assert sum(line.startswith(("| lstm", "| gpt2")) for line in steps.splitlines()) == len(
        compared.steps
    )


def test_kernels_that_are_alike_are_one_line_with_the_sums_of_all(
    compared: rt.types.Validation, gpu: Path, graph: rt.types.OpGraph
) -> None:
    found = rt.validate(gpu, CHIP, target=graph)
    lines = alike(found.nodes)
    # Of a block the norm, two products, gelu and the sum; and the head.
    assert len(lines) == 6 and sum(line.node.row.count for line in lines) == 61
    (up,) = [line for line in lines if line.node.row.module.endswith("up")]
    assert up.node.row.count == 12 and up.node.measured == pytest.approx(12 * 40e-6)
    for nodes_ in (found.nodes, compared.nodes):
        for number in ("predicted", "measured"):
            sums = [
                sum(getattr(check.node, number) or 0.0 for check in checks)
                for checks in (nodes_, alike(nodes_))
            ]
            assert sums[0] == pytest.approx(sums[1])
    assert str(found).count("blocks.*.up") == 1
    wider = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 32))
    one = rt.estimate(rt.trace(wider, torch.empty(4, 8)), CHIP, "eager")
    assert len(alike(node_checks("step", one, nodes(one, {})))) == 2  # alike by name only


def test_the_terminal_view_is_one_screen(compared: rt.types.Validation) -> None:
    lines = str(compared).splitlines()
    assert len(lines) <= 58 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert lines[0].startswith("validation  NVIDIA H200 SXM5 141 GB, eager, knobs typical Hopper")
    assert "decode is predicted to be bound by launches for" in text
    assert "typical knobs: nothing was fitted to this chip" in text


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_writes_and_says_where(gpu: Path, run: Command, tmp_path: Path) -> None:
    out = tmp_path / "made"
    arguments = ["validate", gpu, "--chip", CHIP, "--target", f"{SHARED}:stack"]
    code, shown, err = run(*arguments, "--out", out)
    assert code == 0 and not err
    assert "validation  gpu.json on NVIDIA H200" in shown
    assert (
        f"written to {out}/: validation.html, validation.md, validation.json, parity.png" in shown
    )
    code, shown, _ = run(*arguments, "--format", "json")
    assert code == 0 and json.loads(shown) == json.loads((out / "validation.json").read_text())
    code, shown, _ = run(*arguments, "--format", "md")
    assert code == 0 and shown.startswith("## Predicted and measured")


SHARED = "tests/measured/test_validate.py"


def stack() -> tuple[torch.nn.Module, torch.Tensor]:
    """The target of the commands here."""
    return Stack(12), torch.empty(4, 32)


def wide() -> tuple[torch.nn.Module, torch.Tensor]:
    """The same in other sizes."""
    return Stack(12, 64), torch.empty(4, 64)


def bad_files(
    folder: Path, gpu: Path, suite: Run, graph: rt.types.OpGraph
) -> Iterator[tuple[str, Path]]:
    text = gpu.read_text()
    yield "truncated", folder / "truncated.json"
    (folder / "truncated.json").write_text(text[: len(text) // 2])
    yield "compiled", folder / "compiled.json"
    eager = replace(suite, models=tuple(r for r in suite.models if r.mode == "eager"))
    eager.save(folder / "compiled.json")
    yield "no time", folder / "no-time.csv"
    (folder / "no-time.csv").write_text("model,batch\nresnet,8\n")
    yield "nan", folder / "nan.csv"
    (folder / "nan.csv").write_text("model,batch,ms\nresnet,8,nan\n")
    yield "counters", ncu(graph, folder / "counters.csv")
    yield "damaged run", folder / "damaged.json"
    (folder / "damaged.json").write_text('{"schema": "rooftrace.run/1", "models": [{}]}')


@pytest.fixture(scope="module")
def bad(folder: Path, gpu: Path, suite: Run, graph: rt.types.OpGraph) -> dict[str, Path]:
    return {"trace": gpu, "gone": folder / "gone", **dict(bad_files(folder, gpu, suite, graph))}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("trace", [], "a trace does not say what ran: name it with --target"),
        ("trace", ["--target", f"{SHARED}:wide"], "the names agree and the sizes do not"),
        ("trace", ["--target", "examples/models/lstm_tagger.py:build"], "not a run of this graph"),
        ("truncated", ["--target", f"{SHARED}:stack"], "the trace is truncated: it ends after"),
        ("compiled", ["--execution", "compiled"], "no compiled steps of models, only eager"),
        ("compiled", ["--seq", "8"], "--seq 8: this is for a trace; "),
        ("compiled", ["--input", "x=1:fp32"], "this is for a trace; "),
        ("compiled", ["--phase", "step"], "phase step: no such steps were measured"),
        ("no time", [], "line 1: no column for the time"),
        ("nan", [], "line 2, column 'ms': 'nan': expected a number above 0"),
        ("counters", [], "it stands beside a trace, as in `rooftrace validate TRACE --counters"),
        ("damaged run", [], "damaged.json: micro is missing"),
        ("gone", [], "gone: No such file or directory"),
        ("trace", ["--target", f"{SHARED}:stack", "--out", "README.md"], "it is a file"),
        ("trace", ["--target", f"{SHARED}:stack", "--counters", "gone.csv"], "gone.csv: No such"),
    ],
)
def test_a_wrong_request_gets_one_clear_message(
    name: str, arguments: list[str], words: str, bad: dict[str, Path], run: Command
) -> None:
    code, shown, err = run("validate", bad[name], "--chip", CHIP, *arguments)
    assert code == 2 and not shown and words in " ".join(err.split())
