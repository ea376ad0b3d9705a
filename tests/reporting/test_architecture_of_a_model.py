"""The sections on what a model is made of, on indicators, and on one kernel worked out by hand."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.reporting.cli import cli
from rooftrace.reporting.html.document import as_hypertext
from rooftrace.reporting.renderers.markdown import as_page
from rooftrace.reporting.renderers.view import Section, View
from rooftrace.reporting.sections.architecture import architecture, elsewhere
from rooftrace.reporting.sections.phase import INDICATORS, indicators, worked_example

HOSTILE = 'a"] --> b; <script>alert(1)</script> %% `x` #quot; \u202e|end'


def page(section: Section) -> str:
    return as_page(View((section,)))


@pytest.fixture(scope="module")
def report() -> rt.types.Report:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).bfloat16()
        x = torch.empty(64, 1024, dtype=torch.bfloat16)
    return rt.report(
        model, x, chip="h200-sxm", execution=["eager", "efficient"], phases=["forward"]
    )


def test_indicators_follow_from_each_other_as_their_formulas_say(report: rt.types.Report) -> None:
    for execution in ("eager", "efficient"):
        e = report.estimate("forward", execution)
        value = {name: of(e) for name, _, of, _ in INDICATORS}
        assert value["F_theory"] == 2 * 2 * 64 * 1024 * 4096 + (
            value["F_theory"] - value["F_matrix"]
        )
        assert value["F_matrix"] == 2 * 2 * 64 * 1024 * 4096
        assert value["P_effective"] == pytest.approx(value["F_theory"] / value["T_comp"])
        assert value["F_realizable"] == pytest.approx(value["T_comp"] * e.peak)
        assert value["eta"] == pytest.approx(value["P_effective"] / e.peak)
        assert value["AI_hbm"] == pytest.approx(value["F_useful"] / e.bytes_hbm)
        assert value["AI_weights_only"] == pytest.approx(
            value["F_useful"] / (2 * (2 * 1024 * 4096 + 4096 + 1024))
        )
        assert value["OI_knee"] == pytest.approx(e.peak / 4.8e12)
        assert value["TF_est"] == pytest.approx(value["F_theory"] / value["T_est"])
        assert value["MFU"] == pytest.approx(value["F_matrix"] / value["T_est"] / e.peak)


def test_indicators_stand_under_each_execution(report: rt.types.Report) -> None:
    text = page(indicators([report.estimate("forward", name) for name in ("eager", "efficient")]))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows] == [name for name, *_ in INDICATORS]
    assert "| eager" in text and "| efficient" in text
    assert f"| {report.estimate('forward').ridge:.1f} FLOP/byte" in rows[9]


def test_the_worked_example_comes_to_the_time_of_its_kernel(report: rt.types.Report) -> None:
    estimate = report.estimate("forward", "eager")
    text = page(worked_example(estimate))
    assert "2 x 64 x 1,024 x 4,096 = 536.9 MFLOP" in text
    (moved,) = re.findall(r"takes ([\d.]+) MB / 4800 GB/s = ([\d.]+) us", text)
    assert float(moved[0]) * 1e6 / 4.8e12 == pytest.approx(float(moved[1]) * 1e-6, rel=0.01)
    largest = max(row.timing.t_device for row in estimate.rows)
    assert f"{largest / estimate.t_est:.1%}".replace("%", " % of the step") in text
    assert worked_example(rt.estimate(nn.Identity(), torch.ones(2))).parts == ()


def test_settings_of_a_configuration_stand_in_the_report() -> None:
    @dataclasses.dataclass
    class Config:
        width: int = 8
        act: str = "relu"
        inner: object = None

    model = nn.Linear(8, 8)
    model.config = Config(inner=object())
    plain = page(architecture(rt.report(model, torch.ones(2, 8), phases=["forward"])))
    rows = re.findall(r"^\| `(\w+)`\s+\| (\w+)\s+\|$", plain, re.MULTILINE)
    assert rows == [("width", "8"), ("act", "relu")]
    assert '  "head" : 72' in plain  # the pie: 8 x 8 weights and 8 of the bias


def test_commands_for_other_questions_are_ones_that_there_are() -> None:
    section = elsewhere(rt.report(nn.ReLU(), torch.ones(8)))
    for line in re.findall(r"`rooftrace (.*?)`", page(section)):
        command, *words = shlex.split(line)
        options = cli.commands[command].params
        known = {name for option in options for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_what_does_not_apply_says_so() -> None:
    plain = page(architecture(rt.report(nn.ReLU(), torch.ones(8), phases=["forward"])))
    assert "No attention kernel runs in this step." in plain
    assert "No module has parameters that the step touches." in plain
    assert "```mermaid\nflowchart TD\n" in plain


def test_names_cannot_break_a_diagram_or_a_page() -> None:
    model = nn.Sequential()
    Bad = type(HOSTILE, (nn.Linear,), {})
    model.add_module(HOSTILE.replace(".", ""), Bad(8, 8))
    section = architecture(rt.report(model, torch.ones(4, 8), phases=["forward"]))
    text = page(section)
    (diagram,) = re.findall(r"```mermaid\n(flow.*?)\n```", text, re.DOTALL)
    lines = diagram.splitlines()
    assert lines[0] == "flowchart TD"
    for line in lines[1:]:
        label = r'"[^"`<>]*(<br/>[^"`<>]*)*"'
        assert re.fullmatch(rf"  n\d+(\[{label}\]|\(\[{label}\]\)| --> n\d+)", line), line
    assert "<script" not in as_hypertext(View((section,))).body


def test_sections_that_are_not_there_are_named(report: rt.types.Report) -> None:
    text = page(architecture(report))
    (line,) = [line for line in text.splitlines() if line.startswith("Not in this report")]
    for reason in ("no layer chooses among experts", "one process runs", "no step trains"):
        assert reason in line
    mixed = rt.report("mixtral-8x22b", phase="decode", kv=64, mesh={"tp": 2}, settings=SMALL)
    text = page(architecture(mixed))
    (line,) = [line for line in text.splitlines() if line.startswith("Not in this report")]
    assert line == "Not in this report: gradients and optimizer, since no step trains."


SMALL = {
    "config.num_hidden_layers": 2,
    "config.hidden_size": 64,
    "config.intermediate_size": 64,
    "config.num_attention_heads": 4,
    "config.num_key_value_heads": 2,
    "config.head_dim": 16,
}
