"""The words of the house: names say what they hold, and a docstring can be read alone."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rooftrace"
SAYS_NOTHING = {"found", "one", "given"}
LEANS = re.compile(r"(The same|As)\b")
"""How a docstring begins that cannot be read without the one before it."""

# How many are left today, by layer: never more.
NAMES_LEFT = {"hardware": 0, "tracer": 31, "costmodels": 9, "measured": 0, "reporting": 0}
LEANING_LEFT = {"hardware": 0, "tracer": 2, "costmodels": 0, "measured": 0, "reporting": 0}


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


@pytest.mark.parametrize(
    ("count", "left"),
    [(names_that_say_nothing, NAMES_LEFT), (docstrings_that_lean, LEANING_LEFT)],
)
def test_fewer_with_every_change(count, left) -> None:
    numbers: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        numbers[layer] += len(count(tree))
    more = {layer: n for layer, n in numbers.items() if n > left.get(layer, 0)}
    assert not more, f"expected at most {left}: say what the name holds, or a full sentence"
