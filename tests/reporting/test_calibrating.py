"""calibrate on the command line: times made with known knobs, in a table, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace.costmodels.execution import execution_model
from rooftrace.costmodels.knobs import Knobs, load_knobs
from rooftrace.costmodels.profiles.steps import StepTime
from rooftrace.reporting.calibrating import calibrate_run, calibrate_steps
from rooftrace.reporting.measured import MeasuredRequestError
from rooftrace.tracer.request import Request
from tests.reporting.conftest import Run

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("resnet", "vit", "lstm_tagger")


def target(name: str) -> str:
    return str(ROOT / "examples" / "models" / f"{name}.py:build")


def measured(compute: float, memory: float) -> dict[tuple[str, int], float]:
    """Seconds of a step on an RTX 3090 that sustains these shares."""
    knobs = replace(load_knobs("typical-eager"), compute=compute, memory=memory)
    model = execution_model("eager", knobs=knobs)
    found = {}
    for name in MODELS:
        for batch in (64, 256):
            graph = rt.trace_target(target(name), ["forward"], Request(batch))["forward"]
            found[name, batch] = rt.estimate(graph, "rtx-3090", model).t_est
    return found


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
    assert code == 0 and "times by knobs: rtx-3090, eager" in shown


def test_a_model_that_does_not_trace_is_left_out_and_named() -> None:
    chip = rt.load_chip("rtx-3090")
    good = [StepTime(n, s, b, phase="forward") for (n, b), s in measured(1, 1).items()]
    found = calibrate_steps(
        [*good, StepTime("nothing", 1.0, line=9)], chip, target=target("{target}")
    )
    assert list(found.failures) == ["line 9"]
    assert "there is no file" in found.failures["line 9"]
    assert found.fit.errors.mean < 0.01


def test_nothing_that_traces_is_an_error() -> None:
    chip = rt.load_chip("rtx-3090")
    with pytest.raises(MeasuredRequestError, match="none of 1 measured steps could be traced"):
        calibrate_steps([StepTime("nothing", 1.0)], chip)
    with pytest.raises(MeasuredRequestError, match="expected some of"):
        calibrate_steps([StepTime("x", 1.0)], chip, target="{size}")


def test_a_run_of_the_suite_is_fitted_to_by_its_models() -> None:
    run = rt.load_run(next((ROOT / "measurements").glob("*.json.gz")))
    eager = [row for row in run.models if row.mode == "eager"]
    few = [row for row in eager if row.model in ("lstm", "gpt2")][:6]
    chip = rt.load_chip("rtx-3090")  # of which a CPU is a small share
    start = Knobs("a CPU", compute=0.004, memory=0.05)
    found = calibrate_run(replace(run, models=tuple(few)), chip, start=start)
    assert not found.failures and found.steps == len(few)
    assert found.fit.errors.mean < found.before.mean
    with pytest.raises(MeasuredRequestError, match="no compiled steps of models, only eager"):
        calibrate_run(replace(run, models=tuple(few)), chip, "compiled")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model,batch\nresnet,8\n", "steps.csv"),
        ("model,batch,ms\nresnet,8,nan\n", "line 2"),
        ("model,batch,ms\nresnet,8,5\n", "1 measurements for 2 knobs"),
    ],
    ids=["no time", "nan", "too few"],
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
