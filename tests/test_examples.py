"""Every example script runs and prints what tests/golden remembers."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_example_prints_its_golden(
    script: Path, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(script), run_name="__main__")
    golden(f"{script.stem}.txt", capsys.readouterr().out)
