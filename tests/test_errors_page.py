"""The tree of errors that a user can meet fits on one page, and the page is true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rooftrace.errors import hint, naming

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
# Caught where they are raised for: no user meets them.
CAUGHT_INSIDE = {
    "CannotCountError": "a counter cannot count such a thing: its count says so",
    "CaseTimeoutError": "a case of the suite took too long: its row says so",
    "ChoiceNeededError": "code needs choices that were left out: it is run with them",
    "ExpressionError": "a size in a file is no arithmetic: the file is refused",
    "NoPatternError": "a mask is too large to look at each pair: an assumption says so",
    "NotImpliedError": "a value follows from no ranges: it is unknown",
    "NotAlikeError": "a shortened trace does not hold: everything is run",
    "UnlikeLayersError": "layers that were repeated may differ: each is run",
    "NotOfferedError": "an operation that this device has not: its row says so",
    "StdoutError": "stdout takes no more: the command line says so and ends",
    "StructureError": "graphs at two sizes differ in more than numbers: each is traced",
    "UnfitError": "no formula gives a number at all sizes: each is traced",
    "UnfollowableError": "state outside of modules that is not followed: calls are run",
}


def errors() -> dict[str, str]:
    """{error: its first base} of the classes of the package whose names end in Error."""
    return {
        node.name: ast.unparse(node.bases[0]).rpartition(".")[2]
        for path in (ROOT / "rooftrace").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and node.name.endswith("Error")
        and not node.name.startswith("_")
    }


def test_the_page_has_every_error_and_what_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    expected = {name: base for name, base in errors().items() if name not in CAUGHT_INSIDE}
    assert dict(rows) == expected
    assert len(rows) == len(expected), "an error stands twice"


def test_what_is_caught_inside_is_there() -> None:
    assert errors().keys() >= CAUGHT_INSIDE.keys()


def test_a_hint_shows_the_name_that_another_spelling_stands_for() -> None:
    assert hint("bacth", ["batch", "seq"]) == "; did you mean 'batch'?"
    assert hint("float8", {"float8_e4m3": "fp8", "bf16": "bf16"}) == "; did you mean 'fp8'?"
    assert hint("something else", ["batch"]) == ""


def test_an_error_names_its_side_once() -> None:
    from rooftrace.errors import TargetError

    for text in ("no such file", "left: no such file"):
        try:
            with naming("left"):
                raise TargetError(text)
        except TargetError as error:
            assert str(error) == "left: no such file"
