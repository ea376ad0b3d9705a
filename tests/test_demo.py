"""The demo: DeepSeek-V3 from its config to a folder of files, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = "examples/configs/deepseek-v3.json"


@pytest.mark.slow
@pytest.mark.subprocess
def test_demo_reports_deepseek_within_a_gibibyte(
    root: Path, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    out = tmp_path / "report"
    command = [
        sys.executable, "-m", "rooftrace", "report", CONFIG, "--batch", "8", "--seq", "255",
        "--kv", "255", "--dtype", "fp8", "--chip", "h200-sxm", "--out", str(out),
    ]  # fmt: skip
    with (tmp_path / "stdout").open("w") as stdout, (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=root, stdout=stdout, stderr=stderr)
        _, status, usage = os.wait4(process.pid, 0)  # of this child alone
    assert os.waitstatus_to_exitcode(status) == 0, (tmp_path / "stderr").read_text()
    screen, _, files = (tmp_path / "stdout").read_text().partition("\nwritten to ")
    golden("demo.txt", screen)
    assert "report.md" in files
    peak = usage.ru_maxrss * 1024
    assert peak <= 2**30, f"{peak / 2**20:.0f} MiB"
    check_the_floors(json.loads((out / "report.json").read_text()))


def check_the_floors(report: dict[str, object]) -> None:
    """Figures that are known from elsewhere."""
    model, phases = report["model"], report["phases"]
    assert isinstance(model, dict) and isinstance(phases, dict)
    parameters = 671_026_404_352
    assert model["params"] == parameters
    prefill = phases["prefill"]
    # FlopCounterMode on the same model with experts as batched products.
    assert prefill["efficient"]["flops_matrix"] == 152_027_857_551_360
    assert prefill["naive"]["flops_matrix"] == 152_027_857_551_360
    # A lookup of 2040 tokens reads at most 2040 rows of the embedding (129280 x 7168, a byte each).
    unread = (129_280 - 2_040) * 7_168
    read = prefill["naive"]["bytes"]["weights"]
    assert abs(read - (parameters - unread)) <= 0.005 * parameters
    # The cache is latent and expanded again at every step: eight times an absorbed decode.
    assert 4.7e12 < phases["decode"]["efficient"]["flops"] < 4.8e12
