"""docs/limits.md has every number of the code that decides something by a size, with its value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "limits.md"
WORDS = re.compile(
    r"(^|_)(MAX|MOST|LEAST|FEW|FEWEST|LONG|LONGEST|LARGE|LARGEST|SMALL|SMALLEST|SHORTEST|LIMIT|DEEP"
    r"|DEEPEST|DEPTH|MIN|WIDEST|FARTHEST|AT_ONCE|WRITTEN_OUT|UNROLLED|DOWN|IN_SHARED_MEMORY|ON_CHIP"
    r"|WALK|NEAR|WORTH|ATTEMPTS|REACH|FAR|SPARSE|DRAWS|SPLIT_ROW|STEPS_AFTER_HEAD|STEPS_TO_SOFTMAX"
    r"|VISITED|TRIES|TRIED|LOOKED|PATIENCE|WINDOW)(_|$)"
)
"""Names that say that a number is a bound."""
FREE = re.compile(r"(?<![\w.])(\d[\d_]{5,}|\d+ \*\* \d+|1 << [1-5]\d)(?![\w.])")
"""A large number in a comparison, which should have a name; torch itself counts up to 2^63."""


def named(path: Path) -> Iterator[tuple[str, str]]:
    """The bounds of a module, with the text of their values."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        for name, item in zip(target.elts, value.elts, strict=True) if both else [(target, value)]:
            plain = isinstance(item, (ast.Constant, ast.BinOp, ast.Call, ast.UnaryOp))
            if isinstance(name, ast.Name) and name.id.isupper() and WORDS.search(name.id) and plain:
                shown = ast.get_source_segment(text, item) or ""
                if re.fullmatch(r"""[-\d._e*<()" +]+|(float|Decimal)\(.*\)""", shown):
                    yield name.id, shown


def in_code() -> dict[tuple[str, str], str]:
    package = ROOT / "rooftrace"
    return {
        (path.relative_to(package).as_posix(), name): value
        for path in sorted(package.rglob("*.py"))
        for name, value in named(path)
    }


def test_every_bound_is_listed_with_its_value_and_a_reason() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line[:3] == "| `"]
    listed = {tuple(re.findall("`([^`]+)`", row[0])): row[1].strip("`") for row in rows}
    assert len(listed) == len(rows)  # each once
    assert listed == in_code()
    assert all(len(row[2].strip(" |")) > 5 for row in rows)


def test_comparisons_have_no_large_numbers_without_a_name() -> None:
    package, unnamed = ROOT / "rooftrace", []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = {n for n, line in enumerate(text.splitlines(), 1) if FREE.search(line)}
        for node in ast.walk(ast.parse(text)) if lines else ():
            if isinstance(node, ast.Compare) and lines & {node.lineno, node.end_lineno}:
                shown = ast.get_source_segment(text, node) or ""
                if FREE.search(shown):
                    unnamed.append(f"{path.relative_to(package)}:{node.lineno}: {shown[:80]}")
    assert not unnamed
