"""A program runs as `__main__`, as if Python had been started with it."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.notebooks import SUFFIX, NotebookCells
from rooftrace.tracer.launching.records import CommandLine


def prepared(
    launch: CommandLine, arguments: tuple[str, ...]
) -> tuple[Callable[[], None], Sequence[str]]:
    """Make `__main__`, `sys.argv` and `sys.path` of this process those of a program.

    Gives the function that runs it, and what of a notebook does not run.  Raises RequestError for a
    module that is not there, and for a file that is no program of Python.
    """
    program = Path(launch.program)
    if launch.module:
        first = launch.folder
    else:
        first = str(program if program.is_dir() else program.resolve().parent)
    sys.path.insert(0, os.path.realpath(first))
    module = ModuleType("__main__")
    names = vars(module)
    left_out: Sequence[str] = ()
    names["__builtins__"] = builtins
    if launch.module or program.is_dir():
        spec, code = _of_module(launch.program if launch.module else "")
        codes = [code]
        origin = str(spec.origin)
        names.update(
            __spec__=spec,
            __loader__=spec.loader,
            __package__=spec.parent,
            __file__=origin,
            __cached__=spec.cached,
        )
        shown = origin if launch.module else launch.written
    elif program.suffix == SUFFIX:
        shown, notebook = launch.written or launch.program, NotebookCells(launch.program)
        codes, left_out = notebook.cells, notebook.left_out
        names["display"] = print
    else:
        shown = launch.written or launch.program
        loader = SourceFileLoader("__main__", launch.program)
        codes = [_compiled(program)]
        names.update(__file__=launch.program, __loader__=loader, __cached__=None)
    sys.argv = [shown, *arguments]
    sys.modules["__main__"] = module

    def run() -> None:
        if names.get("__package__"):  # code of the program, too
            importlib.import_module(names["__package__"])
        for code in codes:  # of a notebook, that of each cell
            exec(code, names)

    return run, left_out


def _compiled(path: Path) -> CodeType:
    try:
        with io.open_code(str(path)) as file:
            return compile(file.read(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise RequestError(f"{path}: no program of Python: {error}") from error
    except OSError as error:
        raise RequestError(f"{path}: it cannot be read: {error.strerror}") from error


def _of_module(name: str) -> tuple[ModuleSpec, CodeType]:
    """The spec and the code of a module that is run; of a package it is `__main__`."""
    wanted = name or "__main__"
    try:
        if name:
            spec = _found(name)
        else:  # that of the folder which comes first; `__main__` in sys.modules is another
            spec = importlib.machinery.PathFinder.find_spec("__main__", sys.path[:1])
    except (ModuleNotFoundError, ValueError) as error:
        raise RequestError(f"-m {name}: {error}") from error
    if spec is not None and spec.submodule_search_locations is not None:
        wanted = f"{name}.__main__"
        spec = _found(wanted)
    if spec is None:
        raise RequestError(
            f"-m {name}: no module {wanted} in the working directory or among those installed"
        )
    loader: Any = spec.loader
    code = loader.get_code(spec.name) if hasattr(loader, "get_code") else None
    if code is None:
        raise RequestError(f"-m {name}: {spec.origin} has no code of Python")
    return spec, code


def _found(name: str) -> ModuleSpec | None:
    """The spec of a module; the packages that hold it are not imported for it if that can be."""
    first, *parts = name.split(".")
    spec = importlib.util.find_spec(first)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        inner = f"{spec.name}.{part}"
        known = sys.modules.get(spec.name)
        places = getattr(known, "__path__", spec.submodule_search_locations)
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        specs = (find(inner, places) for find in finders if find is not None)
        spec = next((where for where in specs if where is not None), None)
        if spec is None:  # a package may say when it is imported where its modules are
            return importlib.util.find_spec(name)
    return spec
