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


def test_the_fleet_prints_its_golden_and_goes_on_where_it_stopped(
    root: Path, tmp_path: Path, golden: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(root / "examples" / "fleet.py"))["main"]
    asked = ["--out", str(tmp_path), "--scheduler", "none", "--layers", "2", "--limit"]
    assert main([*asked, "2"]).ran == 2
    capsys.readouterr()
    assert main([*asked, "8"]).ran == 6
    printed = capsys.readouterr().out
    golden("fleet.txt", printed.replace(str(tmp_path), "OUT"), ["transformers"])
