"""A third-party package: what it brings is there, and what is broken is named."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace import _extensions
from rooftrace.costmodels.ops.opview import find_rule, own_rules
from rooftrace.graph.records import Ref
from rooftrace.hardware.chipfile import reading
from rooftrace.reporting.views.results import as_markdown
from tests.costmodels.graph_support import Builder
from tests.reporting.report_support import made_report

RULES = """
import rooftrace

@rooftrace.extend.rule("acme::rope", fusion="pointwise", label="acme rope", source="acme")
def rope(op):
    return rooftrace.extend.Cost.of(vector=6 * op.outputs[0].elements) + op.streamed()
"""
JOINS = """
import rooftrace

@rooftrace.extend.fusion("acme epilogue", source="acme")
def epilogue(first, second):
    "The library's product applies what follows it."
    return first.is_product
"""
SECTIONS = """
import rooftrace

@rooftrace.extend.section("acme price")
def price(results):
    note = rooftrace.extend.Note(f"{len(results.phases)} phase for 2 EUR")
    return rooftrace.extend.Section(title="Price", parts=[note])
"""
SOURCES = """
import rooftrace
from rooftrace.measured.profiles import StepTime

@rooftrace.extend.source("acme log", about="a log", begins=lambda head: head.startswith(b"acme"))
def read(path):
    return [StepTime(target="mlp", seconds=2e-3)]
"""
PHASES = """
import rooftrace

@rooftrace.extend.phase("acme twice")
def twice(runner, recorder):
    runner.forward(recorder)
    return runner.forward(recorder)
"""
CACHES = (_extensions.load, reading.chip_files, reading.bundled_aliases, reading._bundled)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install(rules=..., joins=...)`: puts a package with these files beside rooftrace."""
    find_rule("aten.mm.default")  # the rules of rooftrace are there before

    def forget() -> None:
        for cached in CACHES:
            cached.cache_clear()
        for failures in _extensions._FAILURES.values():
            failures.clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "acme_rooftrace"]:
            del sys.modules[name]

    def put(**files: str) -> None:
        package, info = tmp_path / "acme_rooftrace", tmp_path / "acme-1.2.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").write_text("")
        lines = []
        for kind, text in files.items():
            if kind == "chips":
                (package / "chips").mkdir()
                (package / "chips" / "__init__.py").write_text("")
                (package / "chips" / "acme-x1.toml").write_text(text)
            else:
                (package / f"{kind}.py").write_text(text)
            lines.append(f"[rooftrace.{kind}]\nacme = acme_rooftrace.{kind}\n")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    with own_rules():
        yield put
    forget()


def rope_after_a_product() -> rt.types.OpGraph:
    b = Builder()
    y = b.mm(b.input(64, 64), b.weight(64, 64))
    out = b.value((64, 64))
    b.op("acme.rope", {"x": Ref(y)}, [out])
    return b.graph(out)


def test_rules_joins_and_chips_of_a_package_are_there_without_a_word(install, root):
    chip = (root / "rooftrace/hardware/chips/h100-sxm.toml").read_text()
    chip = chip.replace('name = "h100-sxm"', 'name = "acme-x1"')
    aliases = next(line for line in chip.splitlines() if line.startswith("aliases"))
    install(rules=RULES, joins=JOINS, chips=chip.replace(aliases, 'aliases = ["x1"]'))
    assert "acme-x1" in rt.available_chips() and rt.load_chip("x1").name == "acme-x1"
    estimate = rt.estimate(rope_after_a_product(), "acme-x1")
    assert [row.name for row in estimate.rows] == ["mm + acme rope"]
    assert estimate.flops == 2 * 64**3 + 6 * 64 * 64
    assert estimate.coverage.ops == estimate.coverage.ops_with_rule == 2
    assert estimate.notes == (
        "kernels joined as registered with rooftrace.extend.fusion: acme epilogue x1",
    )


def test_a_package_that_is_broken_is_named_and_nothing_else_breaks(install):
    install(rules="import no_such_thing", joins=JOINS)
    estimate = rt.estimate(rope_after_a_product(), "h100-sxm")
    assert estimate.coverage.ops_with_rule == 1
    assert estimate.notes[-1] == (
        'package acme 1.2: entry point "acme" of rooftrace.rules (acme_rooftrace.rules) cannot be '
        "loaded, so nothing of it is used: ModuleNotFoundError: No module named 'no_such_thing'"
    )


def test_a_section_of_a_package_stands_in_reports(install):
    install(sections=SECTIONS)
    report = made_report("tiny", phases=("forward",))
    assert "1 phase for 2 EUR" in str(report)
    assert list(report.to_dict()["sections"]) == ["acme price"]


def test_a_source_of_a_package_is_read(install, tmp_path):
    install(sources=SOURCES)
    (tmp_path / "log").write_text("acme 1.2")
    result = rt.validate(tmp_path / "log", "h100-sxm", target=rope_after_a_product())
    assert [step.measured for step in result.steps] == [2e-3]


def test_a_package_whose_sources_cannot_be_loaded_is_named_where_a_file_is_of_no_kind(
    install, tmp_path
):
    install(sources="import no_such_thing")
    (tmp_path / "log").write_text("acme 1.2")
    with pytest.raises(ValueError, match=r"model,batch,ms\); package acme 1\.2: entry point"):
        rt.validate(tmp_path / "log", "h100-sxm")


def test_a_phase_of_a_package_is_traced(install):
    install(phases=PHASES)
    model, x = nn.Linear(8, 8), torch.empty(4, 8)
    once, twice = (rt.trace(model, x, phase=name) for name in ("forward", "acme twice"))
    assert twice.flops_torch == 2 * once.flops_torch


def test_a_package_whose_phases_cannot_be_loaded_is_named_where_one_is_asked_for(install):
    install(phases="import no_such_thing")
    with pytest.raises(rt.types.RequestError, match=r"requests; package acme 1\.2: entry point"):
        rt.trace(nn.Linear(8, 8), torch.empty(4, 8), phase="acme twice")


def test_a_package_whose_sections_cannot_be_loaded_is_named_in_the_report(install):
    install(sections="import no_such_thing")
    report = made_report("tiny", phases=("forward",))
    assert "package acme 1.2: entry point" in as_markdown(report)
    assert "sections" not in report.to_dict()


def test_a_package_whose_chips_cannot_be_loaded_is_named_where_one_is_asked_for(install):
    install(chips="")
    (Path(sys.path[0]) / "acme_rooftrace" / "chips" / "__init__.py").write_text("1 / 0")
    assert rt.load_chip("h100-sxm").name == "h100-sxm"
    with pytest.raises(LookupError, match=r"package acme 1\.2: .*ZeroDivisionError"):
        rt.load_chip("acme-x1")


def test_what_is_registered_inside_is_gone_afterwards():
    with own_rules():
        rt.extend.rule("acme::thing")(lambda op: op.streamed())
        rt.extend.fusion("acme thing")(lambda first, second: True)
        assert find_rule("acme.thing.default") is not None
    assert find_rule("acme.thing.default") is None
    rt.extend.fusion("acme thing")  # is free again
