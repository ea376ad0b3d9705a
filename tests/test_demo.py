"""The demo: DeepSeek-V3 from its config to a folder of files, in a process of its own."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import rotary_product

CONFIG = "deepseek-v3"
PROGRAM = """
import sys
from pathlib import Path
from rooftrace.reporting.cli import main
try:
    main(sys.argv[2:])
finally:
    Path(sys.argv[1]).write_text(Path("/proc/self/status").read_text())
"""
"""The command line, leaving what Linux says of the process.

The peak that a parent is told of its child counts what the parent itself had when it forked.
"""


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_demo_reports_deepseek_within_a_gibibyte(
    root: Path, tmp_path: Path, golden: Callable[..., None]
) -> None:
    out, status = tmp_path / "report", tmp_path / "status"
    sizes = ["--batch", "8", "--seq", "255", "--kv", "255", "--dtype", "fp8"]
    options = [*sizes, "--chip", "h200-sxm", "--out", str(out)]
    options += ["--format", "html,md,json,csv,png,svg"]
    command = [sys.executable, "-c", PROGRAM, str(status), "report", CONFIG, *options]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    screen, _, files = ran.stdout.partition("\nwritten to ")
    assert "report.md" in files
    (peak,) = re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())
    assert int(peak) <= 2**20, f"{int(peak) / 1024:.0f} MiB"
    check_the_floors(json.loads((out / "report.json").read_text()))
    golden("demo.txt", screen, ["transformers"])
    golden("demo.svg", (out / "roofline.svg").read_text(), ["transformers", "matplotlib"])


def check_the_floors(report: dict[str, object]) -> None:
    """Figures that are known from elsewhere."""
    model, phases = report["model"], report["phases"]
    assert isinstance(model, dict) and isinstance(phases, dict)
    parameters = 671_026_404_352
    assert model["params"] == parameters
    prefill = phases["prefill"]
    # FlopCounterMode on the same model with experts as batched products.
    products = 152_027_857_551_360 + rotary_product(255, 64)
    assert prefill["efficient"]["flops_matrix"] == products
    assert prefill["naive"]["flops_matrix"] == products
    # A lookup of 2040 tokens reads at most 2040 rows of the embedding (129280 x 7168, a byte each).
    unread = (129_280 - 2_040) * 7_168
    read = prefill["naive"]["bytes"]["weights"]
    assert abs(read - (parameters - unread)) <= 0.005 * parameters
    # The cache is latent and expanded again at every step: eight times an absorbed decode.
    assert 4.7e12 < phases["decode"]["efficient"]["flops"] < 4.8e12
