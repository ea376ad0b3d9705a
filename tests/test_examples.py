"""Every example script runs and prints what tests/golden remembers."""

import runpy
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftrace.costmodels.ops.opview import own_rules
from tests.conftest import pinned

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))
TEXT = "".join(script.read_text() for script in EXAMPLES)


@pytest.fixture(autouse=True)
def no_ops_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules and op libraries of an example go with it: the process may run it again."""
    made: list[torch.library.Library] = []
    init = torch.library.Library.__init__

    def noted(library: torch.library.Library, *args: Any, **kwargs: Any) -> None:
        init(library, *args, **kwargs)
        if f'"{library.ns}::' in TEXT:  # others stay: what made them is imported once
            made.append(library)

    monkeypatch.setattr(torch.library.Library, "__init__", noted)
    with own_rules():
        yield
    for library in made:
        library._destroy()


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
