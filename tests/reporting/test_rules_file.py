"""--rules FILE.py: what the file adds is there for every command that could use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rooftrace.costmodels.ops.opview import own_rules
from tests.reporting.conftest import Run

ADDS = """
import rooftrace
from rooftrace.measured.profiles import StepTime
from rooftrace.reporting.renderers.view import Note, Section

@rooftrace.extend.phase("evaluation")
def evaluation(runner, recorder):
    return runner.forward(recorder)

@rooftrace.extend.section("advice")
def advice(results):
    return Section(title="Advice", parts=[Note(f"Advice on {results.phases[0]}.")])

@rooftrace.extend.source("log", about="a log", begins=lambda head: head.startswith(b"log"))
def read(path):
    return [StepTime(target="build", seconds=1e-3, phase="evaluation")]
"""
MODEL = """
import torch

def build():
    return torch.nn.Linear(8, 8), torch.empty(4, 8)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for name, text in (("adds.py", ADDS), ("models.py", MODEL), ("log", "log of a step")):
        (tmp_path / name).write_text(text)
    with own_rules():
        yield tmp_path


def test_a_file_brings_a_phase_and_a_section(folder: Path, run: Run) -> None:
    target, rules = f"{folder}/models.py:build", ("--rules", folder / "adds.py")
    ran = run("report", target, "--chip", "h100-sxm", "--phase", "evaluation", *rules)
    assert ran.code == 0 and "Advice on evaluation." in ran.out
    traced = run("trace", target, "--phase", "evaluation", *rules, "--out", folder / "graph.json")
    assert traced.code == 0 and "evaluation 2 ops" in traced.out


def test_a_file_brings_a_source_of_measurements(folder: Path, run: Run) -> None:
    template = f"{folder}/models.py:{{target}}"
    said = ("--chip", "h100-sxm", "--target", template, "--rules", folder / "adds.py")
    ran = run("validate", folder / "log", *said)
    assert ran.code == 0 and "1 ms" in ran.out.replace("1.00 ms", "1 ms")
    few = run("calibrate", folder / "log", *said, "--out", folder / "knobs.toml")
    assert few.code == 0 and "1 of 1 measured steps" in few.out  # one factor, near the typical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import rooftrace\n1 / 0\n", "wrong.py:2: ZeroDivisionError: division by zero"),
        ("def f(:\n", "wrong.py:1: SyntaxError: invalid syntax"),
        ("import sys\n\nsys.exit(0)", "wrong.py:3: SystemExit: 0"),
        ("import nowhere_to_be_found", "wrong.py:1: ModuleNotFoundError: No module named"),
        ("\0", "Error: source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_fails_is_one_line_before_any_work(
    text: str, message: str, folder: Path, run: Run
) -> None:
    (folder / "wrong.py").write_text(text)
    for command in (("report",), ("trace", "--out", folder / "graph.json")):
        ran = run(*command, f"{folder}/models.py:build", "--rules", folder / "wrong.py")
        assert ran.code == 2 and message in ran.err
        assert len(ran.err.splitlines()) == 1
