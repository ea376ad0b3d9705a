"""Every example script runs and prints what tests/golden remembers."""

import runpy
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import pinned

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_example_prints_its_golden(
    script: Path, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    counter = "**flopcounter** "  # it has the version of torch
    printed = printed.replace(
        counter + version("torch").partition("+")[0], counter + pinned("torch")
    )
    golden(
        f"{script.stem}.txt", printed, ["transformers"] if "config" in script.read_text() else ()
    )
