"""The names that `import rooftrace` gives, and where the others are."""

import re
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest

import rooftrace as rt

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("extend", "tools", "types")


def test_dir_shows_the_public_names_alone() -> None:
    for module in (rt, rt.extend, rt.tools, rt.types):
        extra = ["__version__"] if module is rt else []
        assert dir(module) == sorted([*module.__all__, *extra])
        assert not [name for name in module.__all__ if name.startswith("_")]
    assert len(rt.__all__) <= 32


def test_no_name_stands_in_two_public_modules() -> None:
    modules = [rt, *(getattr(rt, name) for name in MODULES)]
    times = Counter(name for module in modules for name in module.__all__)
    assert {name for name, count in times.items() if count > 1} == set()


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rooftrace' has no attribute 'estimates_of'"):
        rt.estimates_of  # noqa: B018
    with pytest.raises(AttributeError, match=r"; it is rooftrace\.tools\.dump_model_info"):
        rt.dump_model_info  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'rooftrace\.types' has no attribute 'nope'"):
        rt.types.nope  # noqa: B018


@pytest.mark.parametrize(
    "folder", ["rooftrace", "tests", "docs", "examples", "benchmarks", "site", "README.md"]
)
def test_all_code_and_all_pages_use_names_that_are_there(folder: str) -> None:
    used = re.compile(r"\brt\.(?:(extend|tools|types)\.)?([A-Za-z]\w*)")
    homes = {"": dir(rt), **{name: dir(getattr(rt, name)) for name in MODULES}}
    paths = {ROOT / folder, *(ROOT / folder).rglob("*")}
    files = {path for path in paths if path.suffix in (".py", ".pyi", ".md")}
    assert files
    for path in files - {Path(__file__)}:
        text = path.read_text(encoding="utf-8")
        unknown = {name for home, name in used.findall(text) if name not in homes[home]}
        assert not unknown, path


def test_editors_are_led_to_the_function_that_does_the_work() -> None:
    """By stubs and imports alone, as an editor follows them; nothing is called."""
    jedi = pytest.importorskip("jedi")
    here = {
        "project": jedi.Project(ROOT, smart_sys_path=False, added_sys_path=[str(ROOT)]),
        "environment": jedi.InterpreterEnvironment(),
    }
    for name in ("estimate", "report", "diff", "tools.form", "load", "extend.rule", "types.Plan"):
        script = jedi.Script(f"import rooftrace as rt\nrt.{name}", **here)
        (place,) = script.goto(2, len(f"rt.{name}"), follow_imports=True)
        value = attrgetter(name)(rt)
        if place.full_name != f"{value.__module__}.{value.__qualname__}":
            (place,) = jedi.Script(path=place.module_path, **here).goto(
                place.line, place.column, follow_imports=True
            )
        assert place.full_name == f"{value.__module__}.{value.__qualname__}", name
        assert place.module_path.suffix == ".py"
