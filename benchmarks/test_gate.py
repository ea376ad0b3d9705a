"""A check of five models beside tracing the same five, both in one run: at most 1.5 times as long.

Each is a process of its own, with all its imports.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples" / "models"
TARGETS = {
    "resnet": ("resnet.py:build", {}),
    "vit": ("vit.py:build", {}),
    "lstm": ("lstm_tagger.py:build", {}),
    "gpt2": ("gpt2", {"batch": 2, "seq": 64}),
    "llama": ("llama-3.1-8b", {"batch": 2, "seq": 64}),
}
TRACE = f"""
import rooftrace as rt
for target, sizes in {list(TARGETS.values())!r}:
    rt.tools.priced_graphs(target, **sizes)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with five models and their lock."""
    folder = tmp_path_factory.mktemp("repository")
    lines = ["[tool.rooftrace]", 'chips = ["h200-sxm", "l4"]', "[tool.rooftrace.targets]"]
    for name, (target, sizes) in TARGETS.items():
        keys = ", ".join(f"{key} = {value}" for key, value in {**sizes}.items())
        lines.append(f'{name} = {{ target = "{target}"{keys and f", {keys}"} }}')
        if ".py" in target:
            file = target.partition(":")[0]
            (folder / file).write_text((EXAMPLES / file).read_text())
    (folder / "pyproject.toml").write_text("\n".join(lines) + "\n")
    subprocess.run([sys.executable, "-m", "rooftrace", "lock"], cwd=folder, check=True)
    return folder


@pytest.mark.benchmark(group="gate")
@pytest.mark.parametrize("what", ["trace", "check"])
def test_gate(benchmark: Any, repository: Path, what: str) -> None:
    """`trace`: one process traces one model after the other."""
    command = ["-c", TRACE] if what == "trace" else ["-m", "rooftrace", "check", "--strict"]

    def run() -> None:
        subprocess.run([sys.executable, *command], cwd=repository, check=True, capture_output=True)

    benchmark.pedantic(run, rounds=3, iterations=1)
