"""calibrate on the command line: times made with known knobs, in a table, and back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.kernels.knobs import Knobs, load_knobs
from rooftrace.errors import RequestError
from rooftrace.measured.profiles.tables import StepTime
from rooftrace.tracer.request import Request
from tests.measured.profiles_support import run_on_cpu
from tests.reporting.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("resnet", "vit", "lstm_tagger")

pytestmark = pytest.mark.usefixtures("kept_targets")


def target(name: str) -> str:
    return str(ROOT / "examples" / "models" / f"{name}.py:build")


@cache
def forward(name: str, batch: int) -> rt.types.OpGraph:
    return rt.tools.trace_target(target(name), ["forward"], Request(batch))["forward"]


def measured(compute: float, memory: float) -> dict[tuple[str, int], float]:
    """Seconds of a step on an RTX 3090 that sustains these shares."""
    knobs = replace(load_knobs("typical-eager"), compute=compute, memory=memory)
    model = execution_model("eager", knobs=knobs)
    return {
        (name, batch): rt.estimate(forward(name, batch), "rtx-3090", model).t_est
        for name in MODELS
        for batch in (64, 256)
    }


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "steps.csv"
    lines = [f"{n},{b},forward,{s * 1e3}" for (n, b), s in measured(0.8, 0.7).items()]
    path.write_text("\n".join(["model,batch,phase,ms", *lines, ""]))
    return path


def test_knobs_come_back_from_a_table_and_price_a_report(
    table: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "mine.toml"
    code, shown, _ = run(
        "calibrate", table, "--chip", "rtx-3090", "--target", target("{target}"), "-o", out
    )
    assert code == 0 and "6 of 6 measured steps" in shown and "models that were left out" in shown
    knobs = load_knobs(out)
    assert knobs.compute == pytest.approx(0.8, rel=0.05)
    assert knobs.memory == pytest.approx(0.7, rel=0.05)
    assert knobs.source["chip"] == "rtx-3090" and knobs.source["cases"] == 6
    code, shown, _ = run(
        "report", target("resnet"), "--batch", "64", "--phase", "forward",
        "--chip", "rtx-3090", "--execution", "eager", "--knobs", out,
    )  # fmt: skip
    assert code == 0 and "expected by: rtx-3090, eager" in shown


def test_a_model_that_does_not_trace_is_left_out_and_named() -> None:
    chip = rt.load_chip("rtx-3090")
    good = [
        StepTime(target=n, seconds=s, batch=b, phase="forward")
        for (n, b), s in measured(1, 1).items()
    ]
    found = rt.calibrate(
        [*good, StepTime(target="nothing", seconds=1.0, line=9)], chip, target=target("{target}")
    )
    assert list(found.failures) == ["line 9"]
    assert "there is no file" in found.failures["line 9"]
    assert found.fit.errors.count == 6 and found.fit.errors.mean <= found.before.mean
    # Three models leave little to tell a gain from chance by: what was tried is said.
    assert list(found.tried) == ["nothing", "pace", "compute, memory"]


def test_nothing_that_traces_is_an_error() -> None:
    chip = rt.load_chip("rtx-3090")
    with pytest.raises(RequestError, match="none of 1 measured steps could be traced"):
        rt.calibrate([StepTime(target="nothing", seconds=1.0)], chip, trust_targets=True)
    with pytest.raises(RequestError, match="expected some of"):
        rt.calibrate([StepTime(target="x", seconds=1.0)], chip, target="{size}")


def test_a_run_of_the_suite_is_fitted_to_by_its_models() -> None:
    run = rt.types.Run.load(next((ROOT / "benchmarks" / "measurements").glob("*.json.gz")))
    eager = [row for row in run.models if row.mode == "eager"]
    few = [row for row in eager if row.model in ("decoder", "gpt2")][:6]
    chip = rt.load_chip("rtx-3090")  # of which a CPU is a small share
    start = Knobs("a CPU", compute=0.004, memory=0.05)
    found = rt.calibrate(
        replace(run, models=tuple(few)), chip, start=start, free=["compute", "memory"]
    )
    assert not found.failures and found.measured == len(few) and not found.kernels
    assert found.fit.errors.count == len(few)
    with pytest.raises(RequestError, match="no compiled steps of models, only eager"):
        rt.calibrate(replace(run, models=tuple(few)), chip, "compiled")


@pytest.mark.slow
def test_a_run_chooses_how_much_to_fit_by_what_was_left_out() -> None:
    run = rt.types.Run.load(next((ROOT / "benchmarks" / "measurements").glob("*.json.gz")))
    models = [r for r in run.models if r.mode == "eager" and r.phase in ("prefill", "forward")]
    micro = [row for row in run.micro if row.kind in ("matmul", "softmax")][:60]
    few = replace(run, models=tuple(models[:8]), micro=tuple(micro))
    found = rt.calibrate(few, next((ROOT / "benchmarks" / "measurements").glob("*.toml")))
    assert found.what == "steps" and found.kernels > 20
    assert len(found.tried) == 6 and "compute, memory" in found.tried
    assert found.fit.left_out is not None
    assert found.fit.left_out.mean <= found.tried["nothing"].mean
    shown = str(found)
    assert "chosen: " in shown and "off on what was left out, against" in " ".join(shown.split())
    assert "families that no fit had seen: so few that it is made wider" in " ".join(shown.split())


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(768, 768) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x), -1)
        return x.sum(0)


@pytest.fixture(scope="module")
def cpu() -> Path:
    return next((ROOT / "benchmarks" / "measurements").glob("*.toml"))


def test_one_profiled_module_is_fitted_to_by_its_kernels(cpu: Path, tmp_path: Path) -> None:
    model, x = Wide(), torch.randn(512, 768)
    found = rt.calibrate(rt.measure(model, x, budget_s=0.2), cpu, target=rt.trace(model, x))
    assert found.what == "kernels" and found.measured >= 2
    # a step of the same model tells little more
    assert found.next is None and "measure next: steps of other models" in str(found)
    assert found.fit.errors.mean <= found.before.mean + 0.05
    assert load_knobs(found.save(tmp_path / "k.toml")).compute == pytest.approx(
        found.knobs.compute, rel=1e-4
    )


def test_a_trace_is_fitted_to_by_its_kernels(cpu: Path, tmp_path: Path, run: Run) -> None:
    model, x = Wide(), torch.randn(512, 768)
    path = run_on_cpu(lambda: model(x), tmp_path / "trace.json")
    out = tmp_path / "k.toml"
    place = f"{Path(__file__)}:wide"
    code, shown, _ = run("calibrate", path, "--chip", cpu, "--target", place, "-o", out)
    assert code == 0 and "measured kernels" in shown and load_knobs(out).source["cases"] >= 2
    code, _, err = run("calibrate", path, "--chip", cpu, "-o", out)
    assert code == 2 and "a trace does not say what ran" in err
    place = target("lstm_tagger")
    code, _, err = run("calibrate", path, "--chip", cpu, "--target", place, "-o", tmp_path / "no")
    assert code == 2 and "not a run of this graph" in err and not (tmp_path / "no").exists()


def wide() -> tuple[nn.Module, torch.Tensor]:
    return Wide(), torch.randn(512, 768)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model,batch\nresnet,8\n", "steps.csv"),
        ("model,batch,ms\nresnet,8,nan\n", "line 2"),
    ],
    ids=["no time", "nan"],
)
def test_a_bad_table_gets_one_clear_message(
    text: str, words: str, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    out = tmp_path / "k.toml"
    code, _, err = run(
        "calibrate", path, "--chip", "rtx-3090", "--target", target("{target}"), "-o", out
    )
    assert code == 2 and words in err and not out.exists()
