"""The words of the house: names say what they hold, and a docstring can be read alone."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rooftrace"
SAYS_NOTHING = {"found", "one", "given"}
LEANS = re.compile(r"(The same|As|What)\b")
"""Beginnings of a docstring without a subject, or of one that needs the docstring before it."""


def names_that_say_nothing(tree: ast.AST) -> list[str]:
    """Names among SAYS_NOTHING that are assigned to, loop variables and parameters."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    return [name for name in names if name in SAYS_NOTHING]


def docstrings_that_lean(tree: ast.AST) -> list[str]:
    """Docstrings of a module, its classes and functions that begin with a reference to another."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return [text for text in texts if text and LEANS.match(text)]


def test_both_are_seen() -> None:
    tree = ast.parse(
        'def f(given, x):\n    """The same of x."""\n    for one in x:\n        found: int = one\n'
    )
    assert sorted(names_that_say_nothing(tree)) == ["found", "given", "one"]
    assert docstrings_that_lean(tree) == ["The same of x."]


@pytest.mark.parametrize("bad", [names_that_say_nothing, docstrings_that_lean])
def test_every_file_says_what_it_means(bad: Callable[[ast.AST], list[str]]) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    lists = {path.relative_to(PACKAGE): bad(ast.parse(text)) for path, text in texts.items()}
    assert not {str(path): names for path, names in lists.items() if names}
