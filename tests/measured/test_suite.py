"""The measurement suite and the profiler hooks, on a CPU and small."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn
from torch._C._autograd import DeviceType

import rooftrace as rt
from rooftrace.errors import ProfileError, RequestError, TargetError
from rooftrace.measured import __main__ as command
from rooftrace.measured.__main__ import main
from rooftrace.measured.bench import (
    measurement,
    models as suite_models,
    operations,
    operations as microcases,
    operations as products,
    replay as attribute,
    session as session_module,
    suite,
)
from rooftrace.measured.bench.clock import Bench, MeasureError
from rooftrace.measured.bench.machine import device_facts
from rooftrace.measured.bench.models import MODELS, Make
from rooftrace.measured.bench.operations import MicroCase, NotOfferedError, micro_cases
from rooftrace.measured.bench.replay import attributed
from rooftrace.measured.bench.runfile import MicroRow, ModelRow, Run
from rooftrace.measured.bench.session import Session, SuitePlan
from rooftrace.measured.bench.steps import (
    Stepped,
    by_op,
    profiled,
    real_inputs,
    real_step,
    realized,
    timed,
)
from rooftrace.measured.bench.suite import measure_suite
from rooftrace.tracer.request import Request
from tests.conftest import in_turn, mostly_heavy
from tests.releases import CPU_ATTENTION_TAKES_GROUPS

pytestmark = pytest.mark.slow  # its budgets are real seconds, in which it computes

CPU = torch.device("cpu")


def bench(seconds: float = 0.05) -> Bench:
    return Bench(CPU, seconds, lambda line: None)


@pytest.fixture
def plan(tmp_path: Path) -> SuitePlan:
    return SuitePlan(out=tmp_path / "run.json.gz", device="cpu", budget_s=60.0, quick=True)


class FakeClock:
    """Goes on by `tick` seconds when it is looked at, however long anything takes."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def session(plan: SuitePlan) -> Session:
    return Session(plan, bench(), Run(device={}, versions={}), 60.0, None, FakeClock())


# -- operations ------------------------------------------------------------------------------------


def test_the_cases_of_both_kinds_of_device_have_names_of_their_own() -> None:
    for on_cuda in (True, False):
        cases = micro_cases(on_cuda)
        assert len({case.key for case in cases}) == len(cases) > 500
    kinds = Counter(case.kind for case in micro_cases(True))
    assert {
        "matmul",
        "grouped_matmul",
        "batched_matmul",
        "convolution",
        "attention_prefill",
    } <= set(kinds)
    dtypes = {c.sizes["dtype"] for c in micro_cases(True) if c.kind == "matmul"}
    assert dtypes == {"bf16", "fp16", "fp32", "tf32", "fp8"}


def test_what_a_case_says_it_computes_and_moves() -> None:
    cases = {case.key: case for case in micro_cases(False)}
    product = cases["matmul dtype=fp32 m=64 n=768 k=3072"]
    assert product.flops == 2 * 64 * 768 * 3072
    assert product.bytes == 4 * (64 * 3072 + 768 * 3072 + 64 * 768)
    causal = cases["attention_prefill dtype=fp32 b=1 h=12 hk=12 q=128 kv=128 d=64 causal=True"]
    seen = sum(query + 1 for query in range(128))  # keys that each query sees
    assert causal.flops == 2 * (2 * 12 * 64) * seen
    depthwise = next(c for k, c in cases.items() if "groups=144" in k and "b=1 " in k)
    assert depthwise.flops == 2 * (144 * 56 * 56) * (3 * 3)
    add = cases["elementwise op=add dtype=fp32 shape=4096"]
    assert add.bytes == 3 * 4 * 4096  # two read, one written
    cat = cases["copy op=cat dtype=fp32 shape=64x64"]
    assert cat.bytes == (64 * 64 + 2 * 64 * 64) * 4  # one read, and written twice


@pytest.mark.parametrize("kind", sorted({case.kind for case in micro_cases(False)}))
def test_an_operation_of_every_sort_is_timed(kind: str) -> None:
    sorts: dict[Any, MicroCase] = {}
    for case in sorted(micro_cases(False), key=lambda c: c.flops / 1e11 + c.bytes / 1e10):
        if case.kind == kind and case.sizes.get("what") != "eager op":
            sorts.setdefault(tuple(case.sizes.get(n) for n in ("op", "dtype", "what")), case)
    for case in sorts.values():
        times = microcases.measured(case, bench(), 0.0)
        assert len(times) == 5
        assert all(0 < t < math.inf for t in times)


def test_fp8_is_refused_on_a_cpu() -> None:
    case = next(c for c in micro_cases(True) if c.sizes.get("dtype") == "fp8")
    with pytest.raises(NotOfferedError, match=r"8\.9"):
        microcases.measured(case, bench(), 0.0)


def test_kinds_take_turns_and_the_cheap_come_first() -> None:
    speed = suite.Speed(1e11, 1e10, 2.0**32)
    cases = micro_cases(False)
    ordered = suite.in_order(cases, speed)
    assert sorted(c.key for c in ordered) == sorted(c.key for c in cases)
    kinds = {case.kind for case in cases}
    assert {case.kind for case in ordered[: len(kinds)]} == kinds
    products = [speed.floor(case) for case in ordered if case.kind == "matmul"]
    quarter = -(-len(products) // 4)
    assert products[:quarter] == sorted(products[:quarter])
    assert products[quarter - 1] > 100 * products[0]  # the first quarter spreads over all sizes


def test_random_data_is_random_and_as_large_as_asked() -> None:
    drawn = bench().random(3000, 2000)
    assert drawn.shape == (3000, 2000)
    assert abs(float(drawn.std()) - 1) < 0.01
    assert bench().random(0, 4).shape == (0, 4)
    assert bench().random(4, dtype=torch.bfloat16).dtype == torch.bfloat16


# -- a GPU, as far as there is none ----------------------------------------------------------------


class FakeEvent:
    """What torch.cuda.Event does, with the clock of the host."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "FakeEvent") -> float:
        return (later.at - self.at) * 1e3


class PretendedGpu(Bench):
    """A bench that takes every branch for CUDA, on tensors of the CPU."""

    on_cuda = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    chip = SimpleNamespace(
        name="NVIDIA H200", total_memory=2**37, multi_processor_count=132, L2_cache_size=2**24
    )
    fakes = {
        "Event": FakeEvent,
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "get_device_properties": lambda device: chip,
        "get_device_capability": lambda device: (9, 0),
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: 1000,
        "max_memory_allocated": lambda device: 3000,
        "mem_get_info": lambda device: (2**36, 2**37),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return PretendedGpu(CPU, 0.05, lambda line: None)


def test_kernels_are_timed_between_events(gpu: PretendedGpu) -> None:
    seen = set()
    for case in sorted(micro_cases(True), key=lambda c: c.flops / 1e11 + c.bytes / 1e10):
        graph = str(case.sizes.get("what", "")).startswith(("graph", "eager"))
        if case.kind in seen or graph or case.sizes.get("dtype") == "fp16":
            continue
        if case.kind == "grouped_matmul" and not products._grouped_runs(on_cuda=False):
            continue
        seen.add(case.kind)
        assert all(t > 0 for t in microcases.measured(case, gpu, 0.0))
    assert len(seen) >= 11


def test_a_step_on_a_gpu_has_its_memory(gpu: PretendedGpu) -> None:
    module, x = nn.Linear(8, 8), torch.ones(2, 8)
    step = real_step(module, real_inputs(module, (x,), {}), "training")
    times = timed(gpu, step, 0.0)
    assert (times.peak_bytes, times.resident_bytes) == (3000, 1000)
    assert len(times.seconds) == 3


def test_a_gpu_says_what_it_is(gpu: PretendedGpu) -> None:
    facts = device_facts(torch.device("cuda"))
    assert facts["name"] == "NVIDIA H200" and facts["capability"] == "9.0"
    assert facts["multiprocessors"] == 132
    json.dumps(facts)


def gpu_events() -> list[Any]:
    """A matmul inside of range "op 3", a fill that nothing claims, and the range on the device."""

    def event(name: str, host: bool, micros: float = 0.0, **more: Any) -> Any:
        return SimpleNamespace(
            name=name,
            device_type=DeviceType.CPU if host else DeviceType.CUDA,
            time_range=SimpleNamespace(elapsed_us=lambda: micros),
            input_shapes=[[2, 3], []],
            **{"kernels": [], "cpu_children": [], "is_user_annotation": False, **more},
        )

    kernels = [SimpleNamespace(name="gemm", duration=10.0), SimpleNamespace(name="add", duration=2)]
    product = event("aten::mm", True, kernels=kernels)
    return [
        event("op 3", True, cpu_children=[product], is_user_annotation=True),
        product,
        event("gemm", False, 10.0),
        event("add", False, 2.0),
        event("Memset (Device)", False, 1.0),
        event("op 3", False, 40.0, is_user_annotation=True),  # gaps included
    ]


def test_kernels_belong_to_the_op_that_launched_them() -> None:
    profile = by_op(gpu_events(), on_cuda=True)
    (product,) = profile.ops
    assert product.target == "aten::mm" and product.kernels == ("add", "gemm")
    assert product.seconds == pytest.approx((10 + 2) * 1e-6)
    assert profile.seconds == pytest.approx((10 + 2 + 1) * 1e-6)
    assert profile.unattributed == pytest.approx(1e-6)


def test_kernels_belong_to_the_node_whose_range_they_were_launched_in() -> None:
    flat = rt.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(1, 2))
    ops = tuple(structs.replace(op, facts={"_op": 10 + op.id}) for op in flat.ops)
    times = attribute._ReplayTimes.of(gpu_events(), flat.replace(ops=ops), True, wall=1.0)
    assert times.seconds == {13: pytest.approx(12e-6)}
    assert times.kernels == {13: ("add", "gemm")}
    assert times.total == pytest.approx(13e-6)


# -- a session -------------------------------------------------------------------------------------


def row(key: str) -> MicroRow:
    return MicroRow(key=key, kind="test", sizes={}, seconds=(1.0,))


def raising(error: Exception) -> Callable[[], MicroRow]:
    def work() -> MicroRow:
        raise error

    return work


def test_a_case_that_fails_is_written_down_and_the_next_one_runs(session: Session) -> None:
    session.attempt("memory", 5, raising(torch.OutOfMemoryError("CUDA out of memory.\nTried ...")))
    session.attempt("dtype", 5, raising(NotImplementedError('"mm" not implemented for Half')))
    session.attempt("offer", 5, raising(NotOfferedError("no such kernel here")))
    assert session.attempt("good", 5, lambda: row("good"))
    session.flush()  # a slow disk is not written to after every case
    found = Run.load(session.plan.out)
    assert {t.key: t.reason for t in found.errors} == {
        "memory": "OutOfMemoryError: CUDA out of memory.",
        "dtype": 'NotImplementedError: "mm" not implemented for Half',
    }
    assert [t.key for t in found.skipped] == ["offer"]
    assert [r.key for r in found.micro] == ["good"]


def test_a_case_that_does_not_end_is_ended(session: Session) -> None:
    waited: list[bool] = []

    def waits() -> MicroRow:
        waited.append(threading.Event().wait(300))
        return row("slow")

    assert not session.attempt("slow", 0.3, waits)
    assert not waited
    (trouble,) = session.run.errors
    assert "did not end" in trouble.reason


def test_a_case_at_the_end_of_the_budget_is_left_out_and_not_an_error(session: Session) -> None:
    session.deadline = session.now()
    session.attempt("late", 0.3, lambda: (threading.Event().wait(300), row("late"))[1])
    assert [t.reason for t in session.run.skipped] == ["the budget ended"]


def test_what_cannot_be_interrupted_calls_for_help() -> None:
    called = threading.Event()
    watch = session_module._Watch(called.set)
    with watch.over(3600):
        pass
    assert not called.is_set()
    with watch.over(0):
        assert called.wait(300)  # it looks every second
    watch.stop()


def test_a_case_that_hangs_is_left_behind_by_a_new_process(
    session: Session, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(session_module.os, "execve", lambda _, *told: started.append(told))
    session.current = "endless"
    session_module.start_again(session)
    ((arguments, environment),) = started
    # rooftrace comes from where it is now; nothing comes from the working folder
    assert environment["PYTHONSAFEPATH"] == "1"
    first, *_ = environment["PYTHONPATH"].split(os.pathsep)
    assert Path(first, "rooftrace", "__init__.py").samefile(rt.__file__)
    assert arguments[:3] == [sys.executable, "-m", "rooftrace.measured"]
    assert arguments[arguments.index("--budget") + 1] == "60"  # what is left of it
    assert [t.key for t in Run.load(session.plan.out).errors] == ["endless"]
    assert "endless hangs; starting again after it" in capfd.readouterr().err


def test_a_lost_device_leaves_a_whole_file(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.attempt("good", 5, lambda: row("good"))
    monkeypatch.setattr(Session, "_alive", lambda self: False)
    with pytest.raises(MeasureError, match=r"after 'bad' .*illegal.*same command goes on"):
        session.attempt("bad", 5, raising(RuntimeError("CUDA error: an illegal address")))
    found = Run.load(session.plan.out)
    assert [r.key for r in found.micro] == ["good"]
    assert [t.key for t in found.errors] == ["bad"]


def test_what_was_tried_is_not_tried_again(session: Session) -> None:
    calls: list[str] = []

    def work() -> MicroRow:
        calls.append("called")
        raise ValueError("no")

    session.attempt("case", 5, work)
    session.flush()
    again = Session(session.plan, bench(), Run.load(session.plan.out), 9.0, None, FakeClock())
    again.attempt("case", 5, work)
    assert calls == ["called"]


def test_a_file_of_another_device_or_kind_is_refused(plan: SuitePlan) -> None:
    other = Run(device={"type": "cuda", "name": "NVIDIA H200"}, versions={"torch": "2.11.0"})
    other.save(plan.out)
    with pytest.raises(
        MeasureError, match=r"NVIDIA H200 \(cuda, torch 2\.11\.0\); this is .*--out"
    ):
        measure_suite(plan)
    plan.out.write_bytes(b"{}")
    with pytest.raises(ProfileError, match="schema is None"):
        measure_suite(plan)
    assert plan.out.read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_s": 0.0}, "--budget 0.0: expected"),
        ({"budget_s": math.nan}, "--budget nan: expected"),
        ({"device": "abacus"}, 'device "abacus"'),
        ({"names": ("resnet-51",)}, "'resnet-51' is no model of the suite"),
        ({"phases": ("inference",)}, "'inference': expected one of forward"),
    ],
)
def test_a_wrong_plan_is_quoted(plan: SuitePlan, changes: Any, message: str) -> None:
    with pytest.raises((MeasureError, TargetError, RequestError), match=message):
        measure_suite(replace(plan, **changes))
    assert not plan.out.exists()


# -- the suite -------------------------------------------------------------------------------------


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some operations of each kind, two models, and a compiler that takes no time."""
    cases = micro_cases(False)[::23]
    assert {case.kind for case in cases} == {case.kind for case in micro_cases(False)}
    monkeypatch.setattr(operations, "micro_cases", lambda on_cuda: cases)
    kept = tuple(m for m in MODELS if m.name in ("decoder", "lstm"))
    monkeypatch.setattr(suite, "MODELS", kept)
    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr(suite, "probed", lambda bench: suite.Speed(1e11, 1e10, 2.0**32))


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The cases that are tried, and when."""
    tried: list[tuple[str, float]] = []
    attempt = Session.attempt

    def noted(self: Session, key: str, limit_s: float, work: Callable[[], Any]) -> bool:
        assert isinstance(self.now, FakeClock)
        tried.append((key, self.now.now))
        return attempt(self, key, limit_s, work)

    monkeypatch.setattr(Session, "attempt", noted)
    return tried


def test_the_suite_runs_and_goes_on(
    plan: SuitePlan, small_suite: None, attempts: list[tuple[str, float]]
) -> None:
    lines: list[str] = []
    run = measure_suite(plan, lines.append, clock=FakeClock())
    assert {key for key, _ in attempts} == {r.key for r in (*run.micro, *run.models)}
    assert Run.load(plan.out) == run
    assert not run.errors, run.errors
    assert {r.kind for r in run.micro} > {"matmul", "convolution", "norm"}
    steps = {(r.model, r.phase, r.mode) for r in run.models}
    assert {("decoder", p, "eager") for p in ("prefill", "decode", "training")} <= steps
    assert ("decoder", "decode", "compiled") in steps and ("lstm", "training", "eager") in steps
    for measured in run.models:
        assert len(measured.seconds) >= 3 and measured.ops and measured.parameters
        assert measured.peak_bytes is None  # a CPU does not tell
    assert run.device["type"] == "cpu" and run.versions["torch"] == torch.__version__
    assert any("load average" in note for note in run.notes)

    attempts.clear()
    again = measure_suite(plan, lines.append, clock=FakeClock())
    assert not attempts
    assert (again.micro, again.models) == (run.micro, run.models)


def test_a_budget_is_kept(
    plan: SuitePlan, small_suite: None, attempts: list[tuple[str, float]]
) -> None:
    """A clock that goes on by 0.1 s at each look: there are 30 of them in the budget."""
    run = measure_suite(replace(plan, budget_s=3.0), clock=FakeClock(0.1))
    assert attempts and all(start < 3.0 for _, start in attempts)
    assert run.skipped and all("budget" in t.reason for t in run.skipped)


def test_a_missing_library_is_said(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(suite_models.named("llama-1b"), library="a_library_that_is_not_there")
    suite._models(session, [model], "tiny", slice(None), False, 0.0)
    assert {t.reason for t in session.run.skipped} == {
        "needs a_library_that_is_not_there, which is not installed"
    }


def test_models_by_name_and_targets_of_the_users_own(plan: SuitePlan, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(8, 16), nn.ReLU()), torch.randn(4, 8)\n"
    )
    target = f"{file}:build"
    wanted = replace(plan, names=("ls*", target), phases=("forward", "training"))
    run = measure_suite(wanted, clock=FakeClock())
    assert not run.errors
    assert {r.model for r in run.models} == {"lstm", target}
    mine = [r for r in run.models if r.model == target]
    assert [(r.phase, r.source) for r in mine] == [("forward", "replay"), ("training", "replay")]
    assert all(op.id is not None for r in mine for op in r.ops)


def test_the_model_of_a_config_is_made_with_its_weights_tied(root: Path) -> None:
    pytest.importorskip("transformers")
    target = str(root / "examples" / "configs" / "gpt2.json")
    module, _, kwargs = realized(target, bench(), Request(batch=2, seq=8))
    assert module.lm_head.weight is module.transformer.wte.weight
    assert all(t.device == CPU for t in (*module.parameters(), *module.buffers()))
    assert 0.01 < float(module.lm_head.weight.detach().std()) < 0.03
    assert kwargs["input_ids"].shape == (2, 8)


def test_a_target_that_is_not_there_is_an_error_at_once(plan: SuitePlan) -> None:
    with pytest.raises(TargetError, match=r"there is no file 'nowhere\.py'"):
        measure_suite(replace(plan, names=("nowhere.py:build",)))
    assert not plan.out.exists()


def test_the_arguments_of_a_plan_give_the_plan(
    plan: SuitePlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[SuitePlan] = []

    def measured(found: SuitePlan, *others: Any) -> Run:
        seen.append(found)
        return Run(device={}, versions={})

    monkeypatch.setattr(command, "measure_suite", measured)
    wanted = replace(plan, names=("gpt2",), phases=("decode",), batch=2, seq=8, budget_s=33.0)
    assert main(wanted.arguments(33.0)) == 0
    assert seen == [wanted]
    assert "0 errors" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "abacus"]) == 2
    assert 'rooftrace: device "abacus"' in capsys.readouterr().err


WITH_TORCH_ALONE = """
import sys
from importlib.machinery import ModuleSpec

class Blocked:
    def find_spec(self, name, path=None, target=None):
        blocked = {"rich", "click", "scipy", "pandas", "matplotlib", "transformers", "fvcore",
                   "ijson", "rapidfuzz", "tomli"}
        if name.partition(".")[0] in blocked:
            return ModuleSpec(name, self)

    def create_module(self, spec):
        raise ModuleNotFoundError(f"{spec.name} is blocked", name=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Blocked())
from rooftrace.measured.bench import runfile
assert "torch" not in sys.modules, "reading a run file needs no torch"
from rooftrace.measured.__main__ import main
import torch
torch.compile = lambda module: module  # takes long, and is not what this is about
arguments = ["lstm", "mobile", "--device", "cpu", "--quick", "--budget", "900"]
sys.exit(main([*arguments, "--out", sys.argv[1]]))
"""


@pytest.mark.subprocess
def test_it_runs_with_torch_alone(tmp_path: Path) -> None:
    out = tmp_path / "run.json.gz"
    done = subprocess.run(
        [sys.executable, "-c", WITH_TORCH_ALONE, str(out)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr  # of ours, or of how we call torch
    run = Run.load(out)
    assert {r.model for r in run.models if r.mode == "eager"} == {"lstm", "mobile"}


# -- the models of the suite -----------------------------------------------------------------------

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "native_layer_norm", "embedding")


TINY = [m.name for m in MODELS if "tiny" in m.settings]
RUN_ALWAYS = ("gpt2", "unet", "bert-large", "deepseek-v3-cut", "mixture")
"""One of a kind: a decoder, convolutions, an encoder, latent attention, experts written by hand."""


@pytest.mark.parametrize("name", mostly_heavy(TINY, RUN_ALWAYS))
def test_a_row_can_be_traced_and_has_the_ops_that_ran(name: str) -> None:
    model = suite_models.named(name)
    if not model.there():
        pytest.skip(f"needs {model.library}")
    module = model.made("tiny", "cpu", torch.float32)
    for phase, sizes in model.steps["tiny"]:
        key = f"{name} {phase}"
        session = Session(
            SuitePlan(out=Path("unused"), device="cpu"),
            bench(),
            Run(device={}, versions={}),
            60.0,
            None,
            FakeClock(),
        )
        measured = suite._model_row(session, module, model, "tiny", phase, sizes, False, key)
        graph = suite_models.traced_model(measured)
        if name == "mixture" and phase == "training":
            continue  # experts without a token are left out of the real backward
        if name == "lstm":
            continue  # one op in the graph, many on a CPU
        # A CPU makes products of a grouped one, and of attention with dropout.
        grouped = {"mm", "bmm"} if model.kind == "experts" else {"bmm"}
        inside = grouped if model.library or not CPU_ATTENTION_TAKES_GROUPS else set()
        ran: Counter[str] = Counter()
        for op in measured.ops:
            short = op.target.removeprefix("aten::")
            if short in PRODUCTS and short not in inside:
                ran[short] += op.count
        recorded: Counter[str] = Counter()
        for op in graph.ops:
            short = op.name.removeprefix("aten.")
            if short in PRODUCTS and short not in inside:
                recorded[short] += graph.times(op)
        assert recorded == ran, f"{name} {phase}"


def test_a_row_of_another_model_cannot_be_traced() -> None:
    found = ModelRow(
        key="mine", model="mine", phase="forward", mode="eager", sizes={}, seconds=(1.0,)
    )
    with pytest.raises(ProfileError, match="the suite has no model 'mine'; it has decoder"):
        suite_models.traced_model(found)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_random_state() -> None:
    before = torch.random.get_rng_state()
    model = suite_models.named("lstm")
    first, second = (model.made("tiny", "cpu", torch.float32) for _ in range(2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert next(model.made("tiny", "cpu", torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_low_precision_weights_are_stepped_as_fp32_masters() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 8).bfloat16()
    master = [p.detach().float().requires_grad_() for p in module.parameters()]
    reference = torch.optim.AdamW(master, lr=1e-3, foreach=True)
    stepped = Stepped.of(module, "adamw")
    for _ in range(3):
        for mine, theirs in zip(module.parameters(), master, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.float()
        stepped.step()
        reference.step()
    for mine, theirs in zip(module.parameters(), master, strict=True):
        assert torch.equal(mine.detach(), theirs.detach().bfloat16())
        assert mine.grad is None


# -- a module of the user's own --------------------------------------------------------------------


def kernels_of(graph: Any) -> list[Any]:
    return [op for op in graph.ops if op.kind == "kernel"]


def check_ops(found: ModelRow, graph: Any) -> None:
    """Ids are those of the graph, every kernel has a time, and all fit into the whole."""
    by_id = {op.id: op for op in found.ops}
    assert len(by_id) == len(found.ops)
    for op in kernels_of(graph):
        timed = by_id[op.id]
        assert timed.seconds > 0
        assert (timed.target, timed.module) == (op.target, op.module)
        assert timed.count == graph.times(op)
    assert set(by_id) <= {op.id for op in graph.ops}
    assert found.device_seconds is not None and found.unattributed is not None
    assert 0 < found.attributed <= found.device_seconds
    assert found.unattributed >= 0


@pytest.mark.parametrize(
    ("phase", "name"),
    in_turn(["training", "forward"], ["resnet", "unet", "bert", "perceptron"]),
)
def test_every_op_of_the_graph_has_a_time(name: str, phase: str, model: Callable[..., Any]) -> None:
    case = model(name)
    weights = {k: v.clone() for k, v in case.module.state_dict().items()}
    run = rt.measure(case.module, *case.args, phase=phase, budget_s=0.05, **case.kwargs)
    (found,) = run.models
    graph = rt.trace(case.module, *case.args, phase=phase, **case.kwargs)
    check_ops(found, graph)
    if phase == "training":
        parts = {graph.ops[op.id].part for op in found.ops if op.id is not None}
        assert {"forward", "backward", "optimizer"} <= parts
    assert len(found.seconds) >= 3 and statistics.median(found.seconds) == found.median
    assert not case.module.training
    for key, value in case.module.state_dict().items():
        assert torch.equal(value, weights[key]), key
    assert all(p.grad is None for p in case.module.parameters())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_language_model_with_its_cache(phase: str, model: Callable[..., Any]) -> None:
    case = model("llama")
    (found,) = rt.measure(case.module, phase=phase, budget_s=0.05, **case.kwargs).models
    check_ops(found, rt.trace(case.module, phase=phase, **case.kwargs))
    assert found.sizes["batch"] == 2


def test_equal_layers_share_the_entry_of_the_op_that_stands_for_them() -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6)))
    x = torch.randn(4, 16)
    graph = rt.trace(layers, x)
    assert graph.repeats
    found = attributed(bench(), graph, dict(layers.named_parameters()), repetitions=3)
    counts = {op.id: op.count for op in found.ops}
    for op in kernels_of(graph):
        assert counts[op.id] == graph.times(op)
    assert sum(counts[op.id] for op in kernels_of(graph)) == 6 * 2  # addmm and relu, six times


def test_each_op_takes_what_ran_inside_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real replay, in which a product takes a microsecond for each of its multiplications."""

    def by_work(bench: Bench, run: Callable[[], object], shapes: bool) -> tuple[list[Any], float]:
        events, ranges = profiled(bench, run)[0], []
        for event in events:
            took = 0
            for child in event.cpu_children:
                if event.name.startswith("op ") and child.name == "aten::addmm":
                    _, (rows, inner), (_, columns) = child.input_shapes[:3]
                    took += rows * inner * columns
            named = {"name": event.name, "device_type": event.device_type}
            ranges.append(SimpleNamespace(**named, cpu_time_total=took))
        return ranges, 1.0

    monkeypatch.setattr(attribute, "profiled", by_work)
    module = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 64), nn.Linear(64, 8))
    (found,) = rt.measure(module, torch.randn(16, 4), budget_s=0.05).models
    seconds = {op.module: op.seconds for op in found.ops if "addmm" in op.target}
    products = {"0": 16 * 4 * 32, "1": 16 * 32 * 64, "2": 16 * 64 * 8}
    assert seconds == {name: pytest.approx(n * 1e-6) for name, n in products.items()}


def test_values_that_the_graph_did_not_foresee_name_the_op(
    module: Callable[..., nn.Module],
) -> None:
    picked = module(lambda self, x, at: self.lin(x)[at])
    x, at = torch.randn(4, 8), torch.tensor([0, 2])
    graph = rt.trace(picked, x, at)
    outside = {name: torch.tensor([0, 9]) for name in ("at", "input_1")}
    with pytest.raises(MeasureError, match=r"op \d+ .*fails on real tensors: IndexError"):
        attributed(bench(), graph, {**dict(picked.named_parameters()), **outside})


def test_a_module_that_cannot_be_measured_is_said_to_be() -> None:
    with pytest.raises(RequestError, match=r"Linear is on meta: expected .*to_empty"):
        rt.measure(nn.Linear(2, 2, device="meta"), torch.ones(2))
    with pytest.raises(RequestError, match=r"expected a torch\.nn\.Module"):
        rt.measure(torch.relu, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="decode of Linear"):
        rt.measure(nn.Linear(2, 2), torch.ones(2), phase="decode")


def test_steps_of_the_users_own_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(
        measurement, "time", SimpleNamespace(**{**vars(time), "perf_counter": clock})
    )
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with rt.measuring("mine", device="cpu") as steps:
        for number in range(6):
            with steps.step():
                model(torch.randn(8, 64)).sum().backward()
                optimizer.step()
                clock.now += 1 + number
    (found,) = steps.run.models
    assert (found.model, found.phase, found.source) == ("mine", "step", "profiler")
    assert found.seconds == (4, 5, 6)  # of six, two warm up and one is profiled
    assert found.median == 5
    assert "aten::addmm" in {op.target for op in found.ops}


def test_too_few_steps_are_an_error_and_those_of_the_user_pass_through() -> None:
    with (
        pytest.raises(RequestError, match=r"2 steps ran: .* at least 4"),
        rt.measuring(device="cpu") as steps,
    ):
        for _ in range(2):
            with steps.step():
                pass
    with contextlib.suppress(KeyError), rt.measuring(device="cpu") as steps:
        raise KeyError
    with pytest.raises(RequestError, match="after their block"):
        steps.run  # noqa: B018


def test_a_step_starts_from_the_same_cache_each_time(model: Callable[..., Any]) -> None:
    case = model("llama")
    step = real_step(case.module, real_inputs(case.module, (), case.kwargs), "decode")
    lengths = [step.run(step.ready()).past_key_values.get_seq_length() for _ in range(3)]
    assert lengths == [10, 10, 10]  # nine in the prompt and one more


def test_a_compiled_step_is_measured() -> None:
    module, x = nn.Sequential(nn.Linear(16, 16), nn.GELU()), torch.randn(4, 16)
    try:
        torch.compile(module)(x)
    except Exception as error:  # no compiler on this machine
        pytest.skip(str(error).splitlines()[0])
    (found,) = rt.measure(module, x, compiled=True, budget_s=0.1).models
    assert found.mode == "compiled" and found.source == "replay"


def test_inputs_of_a_model_are_random_and_channels_last_where_asked() -> None:
    made = Make.on("cpu", torch.float32, channels_last=True)
    image = made.floats(2, 3, 4, 4)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert float(image.std()) > 0.5
    assert made.floats(5).shape == (5,)
    assert int(made.ids(7, 100).max()) == 6
