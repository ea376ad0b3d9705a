"""A notebook as a program: its cells of code in order, in one namespace, without its kernel."""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from rooftrace.errors import RequestError

SUFFIX = ".ipynb"
_KERNELS = frozenset({"jupyter", "jupyter-nbconvert", "jupyter-execute", "nbconvert", "papermill"})
"""Programs and modules that run a notebook."""
_AROUND = ("time", "timeit", "capture", "prun", "memit", "mprun", "scalene")
"""Magics that run the code behind them."""
_MAGIC = re.compile(r"(?P<indent>\s*)(?P<name>[\w ,.]+=)?\s*(?P<magic>%%?\w+|!!?)(?P<rest>.*)")
_HELP = re.compile(r"(?P<indent>\s*)\??[\w.]+\?{1,2}\s*")


def check_runner(program: str, words: list[str]) -> None:
    """Raises RequestError for a program that has a kernel run a notebook, in another process."""
    if program in _KERNELS:
        notebook = next((word for word in words if word.endswith(SUFFIX)), f"notebook{SUFFIX}")
        raise RequestError(
            f"{program}: runs a notebook in a process of its own, which sees no device; name the "
            f"notebook itself, as in rooftrace run {notebook}"
        )


class NotebookCells:
    """The cells of a notebook, compiled, in their order.

    left_out: its magics and shell lines, which do not run.

    Raises RequestError for a file that is no notebook, and for a cell that is no Python.
    """

    def __init__(self, path: str) -> None:
        self.left_out: list[str] = []
        self.cells = [self._compiled(path, number, text) for number, text in _code(path)]

    def _compiled(self, path: str, number: int, text: str) -> CodeType:
        where = f"{path}[cell {number}]"
        try:
            code = compile(text, where, "exec", dont_inherit=True)
        except SyntaxError:
            text = "\n".join(self._plain(text.splitlines()))
            try:
                code = compile(text, where, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", None)
                raise RequestError(
                    f"{path}: cell {number}, line {line}: no Python: {getattr(error, 'msg', error)}"
                ) from error
        lines = [f"{line}\n" for line in text.splitlines()]
        linecache.cache[where] = (len(text), None, lines, where)
        return code

    def _plain(self, lines: list[str]) -> Iterator[str]:
        """The lines of a cell, with `pass` or None where a magic or a line for the shell stood."""
        for place, line in enumerate(lines):
            matched = _MAGIC.fullmatch(line)
            if matched is None:
                help_ = _HELP.fullmatch(line)
                yield line if help_ is None else f"{help_['indent']}pass"
                continue
            magic, rest = matched["magic"], matched["rest"].strip()
            runs = magic.lstrip("%") in _AROUND
            if runs and not magic.startswith("%%") and not rest.startswith("-"):
                yield f"{matched['indent']}{matched['name'] or ''}{rest or 'pass'}"
                continue
            if not runs:
                self.left_out.append(f"{magic}{'' if magic[0] == '%' else rest.partition(' ')[0]}")
            yield f"{matched['indent']}{matched['name'] + ' None' if matched['name'] else 'pass'}"
            if magic.startswith("%%") and not runs:  # the cell is in another language
                yield from [""] * (len(lines) - place - 1)
                return


def _code(path: str) -> Iterator[tuple[int, str]]:
    """The cells of code of a notebook: the number of each among all cells, from 1, and its text."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        for number, cell in enumerate(cells, 1):
            if cell["cell_type"] == "code":
                source = cell["source"]
                yield number, source if isinstance(source, str) else "".join(source)
    except OSError as error:
        raise RequestError(f"{path}: it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path}: no notebook of Jupyter (version 4): {error!r:.80}") from error
