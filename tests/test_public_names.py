"""The names that `import rooftrace` gives, where the others are, and that old ones still work."""

import re
import subprocess
import sys
import warnings
from collections import Counter
from operator import attrgetter
from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace import _face

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parents[1]
FORMER = """Access Breakdown Chip Column Cost Elasticities Estimate ExecutionModel Explanation Form
FusedStep GraphBreaks Guidance Headroom KernelView ModelInfo Note OpGraph OpView Plan Request
RequestError Rooflines Run RunFileError Saving ScriptCost Section Sweep SweepFleet Table TargetError
TraceError TurnCost Validation WhatIf Work best_mesh disaggregated dump_model_info execution_model
explore fake_mesh flop_count_table form fused fusion guidance headroom lightning_callback load_form
load_run phase plot_answer plot_roofline plot_sweep priced_graphs reports reprice rule save_chakra
save_form save_timeline scaling section source sweep_fleet telling trace_target trainer_callback
units"""
"""Names that the package itself had in release 0.1."""


def test_dir_shows_the_public_names_alone() -> None:
    for module in (rt, rt.extend, rt.tools, rt.types):
        extra = ["__version__"] if module is rt else []
        assert dir(module) == sorted([*module.__all__, *extra])
        assert not [name for name in module.__all__ if name.startswith("_")]
    assert len(rt.__all__) <= 32


def test_no_name_stands_in_two_public_modules() -> None:
    modules = [rt, *(getattr(rt, name) for name in _face.MODULES)]
    times = Counter(name for module in modules for name in module.__all__)
    assert {name for name, count in times.items() if count > 1} == set()


@pytest.mark.parametrize("name", FORMER.split())
def test_a_former_name_gives_the_object_and_says_the_new_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(rt), name, raising=False)
    with pytest.warns(DeprecationWarning) as told:
        value = getattr(rt, name)
    (warning,) = told
    assert warning.filename == __file__
    _, _, place = str(warning.message).partition(f"rooftrace.{name} is rooftrace.")
    assert value == attrgetter(place.partition(" ")[0])(rt)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(rt, name) is value  # without a second warning
    monkeypatch.delitem(vars(rt), name)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rooftrace' has no attribute 'estimates_of'"):
        rt.estimates_of  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'rooftrace\.types' has no attribute 'nope'"):
        rt.types.nope  # noqa: B018


def test_importing_a_former_name_warns_once() -> None:
    code = "from rooftrace import OpGraph, RequestError; OpGraph"
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stderr.count("DeprecationWarning") == 2


@pytest.mark.parametrize(
    "folder", ["rooftrace", "tests", "docs", "examples", "benchmarks", "site", "README.md"]
)
def test_all_code_and_all_pages_use_names_that_are_there(folder: str) -> None:
    former = re.compile(rf"\brooftrace\.(?:{'|'.join(FORMER.split())})\b(?!/\d)")
    used = re.compile(r"\brt\.(?:(extend|tools|types)\.)?([A-Za-z]\w*)")
    homes = {"": dir(rt), **{name: dir(getattr(rt, name)) for name in _face.MODULES}}
    paths = {ROOT / folder, *(ROOT / folder).rglob("*")}
    files = {path for path in paths if path.suffix in (".py", ".pyi", ".md")}
    assert files
    for path in files - {Path(__file__)}:
        text = path.read_text(encoding="utf-8")
        assert not former.findall(text), path
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
