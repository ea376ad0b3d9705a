"""docs/security.md names the test of each of its boundaries, and each of these tests is there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
ABOVE, _, BELOW = PAGE.partition("## How it is tested")
ROWS = [line.strip("| ").split(" | ") for line in BELOW.splitlines() if line.startswith("| ")][1:]
NAMED = [name for row in ROWS for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", row[2])]


def names_of(path: Path) -> set[str]:
    """Names of the tests of a file."""
    tree = ast.parse(path.read_text("utf-8"))
    return {
        f"{path.relative_to(ROOT).as_posix()}::{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_each_test_that_the_page_names_is_there() -> None:
    files = {ROOT / name.partition("::")[0] for name in NAMED}
    there = set().union(*map(names_of, files))
    assert [name for name in NAMED if name not in there] == []
    assert all(re.search(r"`tests/.*`", row[2]) for row in ROWS)
    assert len(NAMED) == len(set(NAMED))


def test_each_section_of_the_page_has_a_test() -> None:
    assert {row[0] for row in ROWS} == set(re.findall(r"^###? (.+)$", ABOVE, re.MULTILINE))


def test_each_attacker_is_on_the_page() -> None:
    attackers = {f"tests/fuzz/{path.name}" for path in (ROOT / "tests/fuzz").glob("test_*.py")}
    assert attackers - {name.partition("::")[0] for name in NAMED} == set()


def test_each_package_that_is_installed_says_what_it_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    with_extra = {name: extras[name] for name in extras if name not in ("test", "docs", "dev")}
    wanted = {
        (re.match(r"[\w-]+", package)[0], extra)  # type: ignore[index]
        for extra, packages in {"": project["dependencies"], **with_extra}.items()
        for package in packages
    }
    table = ABOVE.partition("## Installed packages")[2]
    rows = re.findall(r"^\| ([\w, ]+) \| (.+?) \| .+ \|$", table, re.MULTILINE)[1:]
    told = {
        (name, extra)
        for names, where in rows
        for name in names.split(", ")
        for extra in re.findall(r"\[(\w+)\]", where) or [""]
    }
    assert told == wanted
    code = "".join(path.read_text("utf-8") for path in (ROOT / "rooftrace").rglob("*.py"))
    for name in {name for name, _ in told}:
        module = {"pillow": "PIL"}.get(name, name)
        assert re.search(rf"(?:from|import) {module}\b", code), name
