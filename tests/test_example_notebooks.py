"""The examples as notebooks: made from the scripts, run cell by cell, they say what goldens say."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import GOLDEN, pinned, unlike

pytest.importorskip("jupytext")
pytest.importorskip("IPython")

from docsite import notebooks
from rooftrace.reporting.views.results import as_markdown
from tests.test_examples import no_ops_stay as no_ops_stay

SCRIPTS = notebooks.scripts()
HELD = {"01_first_minute": 2, "02_language_model": 0, "03_own_rule": 0, "04_diff": 1,
        "05_precision": 0, "06_compare": 1, "07_many_chips": 0}  # fmt: skip
"""How many results of each example are shown, and not printed, where its golden has them."""


def golden_of(script: Path) -> str:
    """What a notebook must say: a cell has no file, so no line of one."""
    text = (GOLDEN / f"{script.stem}.txt").read_text(encoding="utf-8")
    return re.sub(r" `examples/\w+\.py:\d+` \|", " |", text)


def held(cell: notebooks.Cell, rest: str) -> str | None:
    """The text of a cell's result with which `rest` begins, in one of the forms it prints in."""
    if "text/markdown" in cell.shown:
        forms = [cell.shown["text/markdown"]]
    else:
        forms = [f"{cell.value}\n", f"{as_markdown(cell.value)}\n"]
    counter = f"**flopcounter** {version('torch').partition('+')[0]}"
    forms = [form.replace(counter, f"**flopcounter** {pinned('torch')}") for form in forms]
    return next((form for form in forms if form and rest.startswith(form)), None)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_runs_and_says_what_the_golden_says(script: Path) -> None:
    rest, results = golden_of(script), 0
    if unlike("transformers") and "trace_target" in script.read_text(encoding="utf-8"):
        pytest.skip("the golden is made with another transformers")
    for cell in notebooks.run(notebooks.notebook(script)):
        assert rest.startswith(cell.printed), f"{cell.source}\nprinted\n{cell.printed}"
        rest = rest[len(cell.printed) :]
        if cell.value is None:
            continue
        html = cell.shown.get("text/html", "")
        assert "text/markdown" in cell.shown or ("<table" in html and "<img" in html)
        if (text := held(cell, rest)) is not None:
            rest, results = rest[len(text) :], results + 1
    assert not rest.strip()
    assert results == HELD[script.stem]


def test_notebooks_are_the_same_each_time_and_have_no_outputs(tmp_path: Path) -> None:
    import nbformat

    first = [path.read_bytes() for path in notebooks.write_notebooks(tmp_path / "a")]
    assert first == [path.read_bytes() for path in notebooks.write_notebooks(tmp_path / "b")]
    for text in first:
        made = nbformat.reads(text.decode(), as_version=4)
        nbformat.validate(made)
        assert not any(cell.get("outputs") for cell in made.cells)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(estimate)", "estimate"),
        ("a = 1\nprint(f(\n    a\n))", "a = 1\nf(\n    a\n)"),
        ("print(a, b)", "print(a, b)"),
        ("print(f'{a}')", "print(f'{a}')"),
        ("print('text')", "print('text')"),
        ("print(a, end='')", "print(a, end='')"),
        ("for a in b:\n    print(a)", "for a in b:\n    print(a)"),
        ("", ""),
    ],
)
def test_a_print_at_the_end_of_a_cell_becomes_its_value(code: str, expected: str) -> None:
    assert notebooks.with_value_last(code) == expected


def test_a_script_without_cells_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "01_bare.py"
    script.write_text('"""About."""\nprint(1)\n')
    with pytest.raises(ValueError, match=r"01_bare\.py: expected a docstring, and cells"):
        notebooks.notebook(script)


def state() -> tuple[object, ...]:
    hooks = sys.displayhook, sys.excepthook, sys.modules["__main__"]
    return (*hooks, Path.cwd(), dict(os.environ), list(sys.path))


def test_an_error_of_a_cell_is_raised_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "01_bad.py"
    script.write_text('"""About."""\n\n# %%\nprint("before")\n\n# %%\n1 / 0\n')
    before = state()
    with pytest.raises(ZeroDivisionError):
        notebooks.run(notebooks.notebook(script))
    assert state() == before
