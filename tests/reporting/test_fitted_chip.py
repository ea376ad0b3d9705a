"""Knobs that were fitted on one chip: it is the default, and another is said to borrow them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion import ExecutionError
from rooftrace.costmodels.kernels import Knobs
from tests.reporting.conftest import run

__all__ = ["run"]

FIT = """schema = "rooftrace.knobs/1"
title = "my fit"
compute = 0.5
memory = 0.5
[source]
chip = "{chip}"
cases = 7
[share]
"""
MODEL = "from torch import nn\ndef net(): return nn.Sequential(nn.Linear(64, 64), nn.ReLU())\n"
BORROWED = "my fit was fitted on rtx-4090, and is used for l4"


@pytest.fixture
def fit(tmp_path: Path) -> str:
    path = tmp_path / "fit.toml"
    path.write_text(FIT.format(chip="rtx-4090"))
    (tmp_path / "net.py").write_text(MODEL)
    return str(path)


@pytest.fixture(scope="module")
def graph() -> Any:
    return rt.trace(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(8, 64))


# -- the default -----------------------------------------------------------------------------------


def test_without_a_chip_it_is_the_one_of_the_fit(fit: str, graph: Any) -> None:
    model = rt.tools.execution_model("efficient", knobs=fit)
    assert rt.estimate(graph, execution=model).chip.name == "rtx-4090"
    assert rt.estimate(graph).chip.name == "h200-sxm"
    assert [c.name for c in rt.report(graph, knobs=fit).chips] == ["rtx-4090"]
    assert [c.name for c in rt.report(graph).chips] == ["h200-sxm"]
    assert rt.tools.guidance(graph, execution=model).step.chip.name == "rtx-4090"
    assert rt.tools.headroom(graph, execution=model).after.chip.name == "rtx-4090"
    assert rt.roofline(graph, execution=model).rows[0].estimate.chip.name == "rtx-4090"


def test_a_chip_that_is_asked_for_is_taken(fit: str, graph: Any) -> None:
    model = rt.tools.execution_model("efficient", knobs=fit)
    assert rt.estimate(graph, "l4", model).chip.name == "l4"
    assert [c.name for c in rt.report(graph, chip=["l4"], knobs=fit).chips] == ["l4"]


def test_sweeps_take_it_too(fit: str) -> None:
    model = rt.tools.execution_model("efficient", knobs=fit)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    swept = rt.sweep(module, torch.randn(8, 64), over={"batch": [8, 16]}, execution=model)
    assert set(swept.frame()["chip"]) == {"rtx-4090"}
    answer = rt.solve(
        module, torch.randn(8, 64), find="batch", step="1 s", execution=model, phase="forward"
    )
    assert "rtx-4090" in str(answer)


@pytest.mark.parametrize(
    "command",
    [
        ["report", "TARGET", "--input", "input=8,64:fp32"],
        ["sweep", "TARGET", "--input", "input=batch,64:fp32", "--over", "batch=1,2"],
        ["explain", "TARGET", "--input", "input=8,64:fp32", "--op", "0"],
        ["report", "TARGET", "--table", "nodes", "--input", "input=8,64:fp32"],
        ["roofline", "TARGET", "--input", "input=8,64:fp32"],
        ["sensitivity", "TARGET", "--input", "input=8,64:fp32"],
        ["diff", "TARGET", "TARGET", "--input", "input=8,64:fp32"],
    ],
    ids=" ".join,
)
def test_every_command_takes_it(fit: str, command: list[str], run: Any) -> None:
    target = f"{Path(fit).parent / 'net.py'}:net"
    words = [target if word == "TARGET" else word for word in command]
    own = run(*words, "--knobs", fit)
    asked = run(*words, "--knobs", fit, "--chip", "rtx-4090")
    other = run(*words, "--knobs", fit, "--chip", "l4")
    assert own.code == asked.code == other.code == 0, own.err
    assert own.out == asked.out != other.out
    assert "was fitted on" not in own.out + own.err
    assert BORROWED in " ".join((other.out + other.err).split())


def test_a_lock_is_of_the_chip_of_the_fit(fit: str, run: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(fit).parent)
    for words, chip in (((), "rtx-4090"), (("--chip", "l4"), "l4")):
        made = run("lock", "net.py:net", "--input", "input=8,64:fp32", "--knobs", fit, *words)
        assert made.code == 0, made.err
        assert f"[made_from.chips]\n{chip} = " in Path("costs.lock").read_text()


def test_a_fit_of_a_chip_that_is_not_here_says_so(tmp_path: Path, graph: Any) -> None:
    path = tmp_path / "fit.toml"
    path.write_text(FIT.format(chip="amd-epyc-measured"))
    model = rt.tools.execution_model("efficient", knobs=path)
    with pytest.raises(ExecutionError, match=r'fitted on "amd-epyc-measured".*say chip='):
        rt.estimate(graph, execution=model)
    assert "used for l4" in rt.estimate(graph, "l4", model).borrowed


# -- the warning, and the assumption -----------------------------------------------------------


def test_another_chip_is_a_warning_and_an_assumption(fit: str, graph: Any) -> None:
    model = rt.tools.execution_model("efficient", knobs=fit)
    assert rt.estimate(graph, execution=model).borrowed == ""
    step = rt.estimate(graph, "l4", model)
    assert step.borrowed.startswith(BORROWED)
    assert BORROWED in " ".join(str(step).split())
    result = rt.report(graph, chip="l4", knobs=fit)
    assert BORROWED in " ".join(str(result).split())
    made = [each for each in result.to_dict()["assumptions"] if each["kind"] == "knobs"]
    assert [(each["value"], each["time_share"]) for each in made] == [("rtx-4090", 1.0)]
    assert made[0]["text"].startswith(BORROWED)
    assert json.dumps(result.to_dict())


def test_typical_knobs_of_other_chips_are_an_assumption_that_names_them(graph: Any) -> None:
    """No kernel was measured on B300, V100 or T4: whose shares their times have is told."""
    for name, of in (
        ("b300-sxm", "b200-sxm"),
        ("h20", "h100-sxm, h200-sxm"),
        ("a30", "a100-sxm-80"),
        ("v100-sxm2-32", "rtx-3090, rtx-4090, rtx-5090"),
        ("t4", "rtx-3090, rtx-4090, rtx-5090"),
        ("mi325x", "mi300x"),
        ("mi355x", "mi300x, mi355x (products)"),
    ):
        step = rt.estimate(graph, name)
        assert step.borrowed.endswith(f", not on {name}") and of in step.borrowed
        kinds = [each["kind"] for each in rt.report(graph, chip=name).to_dict()["assumptions"]]
        assert kinds.count("knobs") == 1
    for name in ("h100-sxm", "h200-sxm", "a100-sxm-80", "rtx-4090", "mi300x"):
        assert rt.estimate(graph, name).borrowed == ""
    assert (
        rt.estimate(graph, "t4", rt.tools.execution_model("efficient", knobs=None)).borrowed == ""
    )


def test_a_fit_keeps_its_chip_through_its_file(fit: str) -> None:
    knobs = rt.tools.execution_model("eager", knobs=fit).knobs
    assert isinstance(knobs, Knobs) and knobs.fitted_on == ("rtx-4090",)
    again = Knobs.from_dict(knobs.to_dict())
    assert again.fitted_on == ("rtx-4090",) and Knobs("plain").fitted_on == ()
