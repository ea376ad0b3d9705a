"""Notebooks: made from the scripts in examples/, and run, each result as a notebook shows it.

A script in the percent format is the only copy: `# %%` begins a cell, `# %% [markdown]` one of
text, and a tag says which cells only the script (active-py) or only the notebook (active-ipynb)
has.  A notebook shows results by itself: a print() of one value that ends a cell becomes the
value.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._writing import write_bytes
from rooftrace.costmodels.ops.opview import own_rules

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]


def scripts() -> list[Path]:
    """The numbered examples, in their order."""
    return sorted((ROOT / "examples").glob("[0-9]*.py"))


def title_of(script: Path) -> str:
    """ "Many chips" of 07_many_chips.py."""
    return script.stem.partition("_")[2].replace("_", " ").capitalize()


# --- from a script to a notebook --------------------------------------------------------------


def notebook(script: Path) -> NotebookNode:
    """The notebook of a script: not run, the same whenever it is made.

    Raises ValueError for a script without a docstring, or without cells.
    """
    import jupytext
    import nbformat

    text = script.read_text(encoding="utf-8")
    about = ast.get_docstring(ast.parse(text))
    if about is None or "\n# %%" not in text:
        raise ValueError(f"{script}: expected a docstring, and cells that begin with `# %%`")
    cells = jupytext.reads(text[text.index("\n# %%") + 1 :], fmt="py:percent").cells
    made = nbformat.v4.new_notebook()
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made.cells = [nbformat.v4.new_markdown_cell(f"# {title_of(script)}\n\n{about}")]
    for cell in cells:
        if cell.cell_type == "code":
            made.cells.append(nbformat.v4.new_code_cell(with_value_last(cell.source)))
        elif cell.cell_type == "markdown":
            made.cells.append(nbformat.v4.new_markdown_cell(cell.source))
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # nbformat's own ids are drawn by lot
    return made


def with_value_last(code: str) -> str:
    """A cell's code; a print() of one value at its end becomes the value, a text stays printed."""
    body = ast.parse(code).body
    match body[-1] if body else None:
        case ast.Expr(ast.Call(ast.Name("print"), [value], [])) as last:
            if not isinstance(value, ast.Constant | ast.JoinedStr):
                lines = code.splitlines()[: last.lineno - 1]
                return "\n".join([*lines, ast.get_source_segment(code, value) or ""])
    return code


def write_notebooks(out: Path) -> list[Path]:
    """Write the notebook of every example into a folder, each whole or not at all."""
    import nbformat

    written = []
    for script in scripts():
        path = out / f"{script.stem}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, nbformat.writes(notebook(script)).encode())
        written.append(path)
    return written


# --- running one ------------------------------------------------------------------------------


@dataclass
class Cell:
    """A cell that ran: its text, what it printed, and its value in every form that it has."""

    kind: str  # "markdown", "code"
    source: str
    printed: str = ""
    value: Any = None
    shown: dict[str, Any] = field(default_factory=dict)  # "text/html": "<div>..."


def run(made: NotebookNode) -> list[Cell]:
    """Run the cells of a notebook in this process, by IPython, in a folder of its own.

    Raises what a cell raises.
    """
    cells = []
    with own_rules(), _shell() as shell:
        for cell in made.cells:
            ran = Cell(cell.cell_type, cell.source)
            cells.append(ran)
            if cell.cell_type == "code":
                _run(shell, ran)
    return cells


def _run(shell: InteractiveShell, cell: Cell) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = shell.run_cell(cell.source, store_history=True)
    result.raise_error()
    cell.printed, cell.value = printed.getvalue(), result.result
    if cell.value is not None:
        assert shell.display_formatter is not None
        cell.shown, _ = shell.display_formatter.format(cell.value)


@contextlib.contextmanager
def _shell() -> Iterator[InteractiveShell]:
    """A shell of IPython that keeps no history, and leaves this process as it was."""
    from traitlets.config import Config

    before = dict(os.environ)
    hooks = sys.displayhook, sys.excepthook, sys.modules["__main__"], list(sys.path)
    with tempfile.TemporaryDirectory() as folder, working_in(folder):
        os.environ["IPYTHONDIR"] = folder
        from IPython.core.displayhook import DisplayHook
        from IPython.core.interactiveshell import InteractiveShell

        class Silent(DisplayHook):
            """The value of a cell is taken from its result; nothing is printed for it."""

            def __call__(self, result: Any = None) -> None:
                self.exec_result.result = result

        class Shell(InteractiveShell):
            displayhook_class = Silent

            def showtraceback(self, *args: Any, **kwargs: Any) -> None:
                """An error is raised where the cell was run."""

        settings = Config()
        settings.HistoryManager.enabled = False
        settings.InteractiveShell.colors = "nocolor"
        try:
            with warnings.catch_warnings():
                yield Shell(config=settings)
        finally:
            sys.displayhook, sys.excepthook, sys.modules["__main__"], sys.path[:] = hooks
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def working_in(folder: str | Path) -> Iterator[None]:
    """A folder as the working folder, for what writes into it."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --- as a page --------------------------------------------------------------------------------


def page(script: Path, cells: list[Cell]) -> str:
    """The Markdown of a notebook that ran: text, code, and below it what it showed."""
    first, *others = cells
    parts = ["---\nhide: [toc]\n---", first.source]  # no headings: its room is for the tables
    parts.append(f"Download it: [the notebook]({script.stem}.ipynb), [the script]({script.name}).")
    for cell in others:
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        if "text/markdown" in cell.shown:
            parts.append(f'<div class="shown" markdown>\n\n{cell.shown["text/markdown"]}\n\n</div>')
        elif "text/html" in cell.shown:
            parts.append(f'<div class="shown">{cell.shown["text/html"]}</div>')
        elif "text/plain" in cell.shown:
            parts.append(f"```text\n{cell.shown['text/plain']}\n```")
    return "\n\n".join(parts) + "\n"
