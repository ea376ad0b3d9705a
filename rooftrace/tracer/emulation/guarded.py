"""Whether code that imports a module goes on without it: the import stands in a `try`."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).resolve().parents[2]) + os.sep
_NAMED = frozenset({"ImportError", "ModuleNotFoundError"})
_BROAD = frozenset({"Exception", "BaseException"})
_LOADERS = ("exec_module", "load_module", "create_module")
"""Methods of import hooks, which stand between a module and who imports it."""
_PLAIN = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
"""Statements of a `try` that tries imports and nothing else."""


def import_is_guarded(frame: FrameType | None) -> bool:
    """Whether an import may fail: its code, or code whose import led to it, catches that.

    frame: the innermost frame, of the import statement or below it.  Handlers that name
    ImportError count, and broad ones around imports alone; those that raise do not.
    """
    return any(_caught(place) for place in _importing(frame))


def _importing(frame: FrameType | None) -> Iterator[FrameType]:
    """Frames that import: of modules, one imported by the next, up to a function."""
    while frame is not None:
        code = frame.f_code
        if not _plumbing(code.co_filename) and code.co_name not in _LOADERS:
            yield frame
            if code.co_flags & inspect.CO_OPTIMIZED:  # a function, no body of a module or a class
                return
        frame = frame.f_back


def _plumbing(filename: str) -> bool:
    return filename.startswith(("<frozen importlib", _HERE)) or filename == _IMPORTLIB


_IMPORTLIB = str(inspect.getsourcefile(__import__("importlib")))


def _caught(frame: FrameType) -> bool:
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return False  # no source to read
    return any(_tries(node) for node in ast.walk(tree) if _inside(node, frame.f_lineno) is not None)


def _inside(node: ast.AST, line: int) -> ast.stmt | None:
    """The statement at a line in the body of a `try` or a `with`."""
    if not isinstance(node, ast.Try | ast.With):
        return None
    for step in node.body:
        if step.lineno <= line <= (step.end_lineno or step.lineno):
            return step
    return None


def _tries(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        calls = [
            item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)
        ]
        return any(
            _last(call.func) == "suppress"
            and any(_last(kind) in _NAMED | _BROAD for kind in call.args)
            for call in calls
        )
    if not isinstance(node, ast.Try):
        return False
    tried_alone = all(isinstance(step, _PLAIN) for step in node.body)
    return any(_goes_on(handler, tried_alone) for handler in node.handlers)


def _goes_on(handler: ast.ExceptHandler, broad_counts: bool) -> bool:
    """Whether a handler catches that a module is missing, and does not raise."""
    if isinstance(handler.body[-1], ast.Raise):
        return False
    kind = handler.type
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [] if kind is None else [kind]
    names = {_last(item) for item in kinds}
    return bool(names & _NAMED) or (broad_counts and (kind is None or bool(names & _BROAD)))


def _last(node: ast.expr) -> str:
    """The last name of a dotted one."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
