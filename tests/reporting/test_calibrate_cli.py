"""`rooftrace calibrate --run`: one command from a target to a knob file, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooftrace.costmodels.kernels import load_knobs
from tests.reporting.conftest import Run

MODEL = """
import torch
from torch import nn


def net():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]), torch.zeros(1, 1024)
"""
CHIP = "h100-sxm"


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return f"{path}:net"


def test_one_command_measures_fits_and_writes_knobs(run: Run, target: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    done = run("calibrate", "--run", target, "--phase", "forward", "--chip", CHIP, "-o", out)
    assert done.code == 0, done.err
    assert "bytes of" in done.out and "dense weights" in done.out
    knobs = load_knobs(out)
    assert knobs.traffic is not None and "dense weights" in knobs.traffic.factors
    shown = run("report", target, "--phase", "forward", "--execution", "eager", "--knobs", out)
    assert shown.code == 0 and "calibrated on" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "x.toml"), "expected either MEASURED"),
        (("a.json", "--run", "TARGET", "-o", "x.toml"), "expected either MEASURED"),
        (("a.csv", "-o", "x.toml"), "--chip: say which chip"),
        (("--run", "TARGET", "--dtype", "fp8", "-o", "x.toml"), "leave out dtype"),
        (("--run", "TARGET", "--target", "a.py:b", "-o", "x.toml"), "leave out --target"),
        (
            ("--run", "TARGET", "--chip", CHIP, "--phase", "prefil", "-o", "x.toml"),
            "phase 'prefil': expected one of",
        ),
        (("--run", "TARGET", "--chip", "h10", "-o", "x.toml"), "h10"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: tuple[str, ...], message: str, run: Run, target: str
) -> None:
    done = run("calibrate", *(target if a == "TARGET" else a for a in arguments))
    assert done.code != 0 and message in done.err
    assert not Path("x.toml").exists()
