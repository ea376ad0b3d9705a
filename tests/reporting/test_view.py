"""The view model: one function is a section on every output, and the schema is made from keys."""

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Annotated, Any, Literal

import jsonschema
import pytest

import rooftrace as rt
from rooftrace._plain import Plain
from rooftrace.costmodels.ops.opview import own_rules
from rooftrace.errors import RequestError
from rooftrace.reporting.renderers import as_page, units, view
from rooftrace.reporting.renderers.view import Cell, Column, Note, Section, Table, View
from rooftrace.reporting.sections.report_json import report_schema, schema_of
from rooftrace.reporting.sections.results import Results
from rooftrace.reporting.views.results import VIEWS, as_markdown, as_text, view_of
from tests.reporting.report_support import made_report

JOULE = units.Unit("J", "number", lambda energy: f"{energy:.1f} J")


@pytest.fixture
def energy() -> Iterator[None]:
    """A section from outside: what a step takes from the wall at 700 W."""

    with own_rules():

        @rt.extend.section("energy")
        def build(results: Results) -> Section:
            columns = (Column("phase", units.TEXT, "energy"), Column("joule", JOULE, "at 700 W"))
            rows = [{"phase": e.phase, "joule": 700 * e.t_est} for e in results.broken_down()]
            note = Note("Idle power is left out.")
            return Section(title="Energy", parts=[Table(columns=columns, rows=rows, key="w"), note])

        yield


def test_a_section_from_outside_stands_on_every_output(energy: None) -> None:
    report = made_report()
    joules = {phase: 700 * report.estimate(phase).t_est for phase in report.phases}

    screen = str(report)
    assert "\nenergy   at 700 W\n" in screen and "Idle power is left out." in screen
    page = as_markdown(report)
    assert "\n## Energy\n\n| energy   | at 700 W |\n" in page and "Idle power is left out." in page
    for phase, joule in joules.items():
        assert f"{phase:8} {joule:6.1f} J" in screen
        assert f"| {phase:8} | {joule:6.1f} J |" in page

    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    jsonschema.validate(document, json.loads(report_schema()))
    added = document["sections"]["energy"]
    assert added["title"] == "Energy" and added["notes"] == ["Idle power is left out."]
    assert added["tables"]["w"]["units"] == {"phase": "", "joule": "J"}
    assert {row["phase"]: row["joule"] for row in added["tables"]["w"]["rows"]} == joules


def a_table(*rows: object, on: str = "both") -> Section:
    columns = (
        rt.extend.Column("name", rt.extend.units.TEXT, "Name"),
        rt.extend.Column("moved", rt.extend.units.BYTE, "HBM"),
    )
    return rt.extend.Section(
        title="Mine", parts=[rt.extend.Table(columns=columns, rows=rows, on=on)]
    )


SECTIONS_THAT_CANNOT_BE_SHOWN = {
    "nothing": (lambda r: None, "it returned None; expected a rooftrace.extend.Section"),
    "an error": (lambda r: {}["joule"], "KeyError: 'joule'"),
    "text for bytes": (
        lambda r: a_table({"name": "a", "moved": 2}, {"name": "b", "moved": "2 GB"}),
        "table 0, column 'moved', row 1: '2 GB': expected a number in byte",
    ),
    "no such key": (
        lambda r: a_table({"name": "a", "move": 2}),
        "table 0, column 'moved', row 0: the row has no such key, only 'name', 'move'; expected",
    ),
    "no such field": (
        lambda r: a_table(Cell("a")),
        "table 0, column 'name', row 0: AttributeError: 'Cell' object has no attribute 'name'",
    ),
    "an output that is none": (
        lambda r: a_table(on="paper"),
        "on='paper': expected one of both, page, screen",
    ),
    "text for a part": (lambda r: Section(parts=["text"]), "part 0 is 'text'; expected a Table"),
    "inside another one": (
        lambda r: Section(parts=[a_table({"name": "a"})]),
        "table 0, column 'moved', row 0: the row has no such key",
    ),
    "rows that can be read once": (
        lambda r: Section(parts=[Table(columns=(), rows=iter(()))]),
        "expected a list of rows",
    ),
}


@pytest.mark.parametrize("case", SECTIONS_THAT_CANNOT_BE_SHOWN)
def test_a_section_that_cannot_be_shown_is_named_with_its_function(case: str) -> None:
    build, said = SECTIONS_THAT_CANNOT_BE_SHOWN[case]
    with own_rules():
        rt.extend.section("mine")(build)
        with pytest.raises(RequestError) as error:
            str(made_report())
    owner = f"(tests.reporting.test_view.<lambda>:{build.__code__.co_firstlineno})"
    assert str(error.value).startswith(f"section 'mine' {owner}: ") and said in str(error.value)


def test_a_blank_cell_and_a_dash_are_asked_for() -> None:
    with own_rules():
        rt.extend.section("mine")(
            lambda r: a_table({"name": "", "moved": None}, {"name": 3, "moved": ""})
        )
        page = as_markdown(made_report())
    assert page.count("|      |   – |\n| 3    |     |\n") == 1, page[page.index("## Mine") :][:150]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("mine", "paper"), r"section\('mine'\): on='paper': expected one of both, page, screen"),
        (("",), r"section\(''\): expected a name"),
        ((lambda r: None,), r"section\(<function .*\): expected a name"),
    ],
)
def test_a_section_that_would_stand_nowhere_is_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rt.extend.section(*arguments)


def test_a_report_without_added_sections_has_no_such_key() -> None:
    assert "sections" not in made_report("tiny", phases=("forward",)).to_dict()


def test_two_sections_of_one_name_are_refused(energy: None) -> None:
    twice = r"section 'energy' already is there, tests\.reporting\.test_view\.energy.*second one"
    with pytest.raises(ValueError, match=twice):
        rt.extend.section("energy")(lambda results: Section())
    rt.extend.section("energy", override=True)(lambda results: Section(title="None"))
    assert "\n## Energy\n" not in as_markdown(made_report())


def test_the_schema_in_the_package_is_the_one_of_the_keys(golden) -> None:
    golden("../../rooftrace/reporting/report.schema.json", report_schema())


def test_a_type_without_a_view_is_named() -> None:
    with pytest.raises(TypeError, match="complex: VIEWS names no view of this class"):
        as_text(1j)


def test_a_new_output_is_one_function_of_a_view() -> None:
    def as_html(shown: View) -> str:
        lines = [f"<h1>{html.escape(shown.title)}</h1>"]
        for part in [part for each in shown.sections for part in each.parts]:
            if isinstance(part, Table) and part.on != "screen":
                heads = [c.name("page") for c in part.columns if c.shown_on("page")]
                lines += [f"<th>{html.escape(head)}" for head in heads]
        return "\n".join(lines)

    report = made_report()
    page = as_html(view_of(report, "page"))
    assert page.startswith("<h1>DeepSeek-V3, 671.0 B parameters, fp8</h1>")
    assert "<th>FLOP/byte" in page and "<th>FLOP/B\n" not in page


@pytest.mark.parametrize(("kind", "where"), VIEWS.items())
def test_the_function_of_each_view_takes_what_it_stands_for(kind: str, where: str) -> None:
    module, _, name = where.partition(":")
    function = getattr(import_module(f"rooftrace.reporting.{module}"), name)
    result, output = signature(function).parameters.values()
    assert str(result.annotation).rpartition(".")[2] == kind and output.name == "output"


def test_a_result_without_a_view_is_named() -> None:
    with pytest.raises(TypeError, match="int: VIEWS names no view of this class"):
        view_of(3, "page")


# -- columns and cells -----------------------------------------------------------------------------


def printed(column: Column, value: object) -> tuple[str, str]:
    """The cell on a page and on a screen."""
    shown = View((Section(parts=[Table(columns=(column,), rows=[{column.key: value}])]),))
    page, screen = as_page(shown), as_text(shown)
    return page.splitlines()[2].strip("| "), screen.partition("\n")[2].strip()


@pytest.mark.parametrize(
    ("unit", "value", "page", "screen"),
    [
        (units.FLOP, 2 * 10**12, "2.00 TFLOP", "2.00 T"),  # a screen's head says FLOP
        (units.BYTE, 3 * 10**9, "3.00 GB", "3.00 GB"),
        (units.CAPACITY, 3 * 2**30, "3.00 GiB", "3.00 GiB"),
        (units.SHARE, 0.5, "50.0 %", "50%"),
        (units.SECOND, None, "–", "–"),
        (units.MODULE, "", "`(root)`", "(root)"),
        (units.CODE, "", "", ""),
        (units.signed(units.SECOND), -0.001, "-1.00 ms", "-1.00 ms"),
        (units.signed(units.BYTE), 0, "0", "0"),
        (units.SECOND, Cell(0.002, "strong"), "**2.00 ms**", "2.00 ms"),
        (units.SECOND, Cell(7, unit=units.COUNT), "7", "7"),
        (units.SECOND, Cell("3 more", "plain"), "3 more", "3 more"),
        (units.BYTE, Cell(1000, before="≥ "), "≥ 1.00 kB", "≥ 1.00 kB"),
    ],
)
def test_a_unit_writes_its_numbers(unit, value, page, screen) -> None:
    assert printed(Column("x", unit, "x"), value) == (page, screen)


def test_a_key_that_a_row_lacks_leaves_its_cell_blank() -> None:
    columns = (Column("a", units.TEXT, "a"), Column("b", units.SECOND, "b"))
    shown = View((Section(parts=[Table(columns=columns, rows=[{"a": "x"}], padded=False)]),))
    assert as_page(shown).splitlines()[-1] == "| x | |"


def test_parts_stand_where_they_say() -> None:
    columns = (Column("a", units.TEXT, "a"), Column("b", units.TEXT, "b", on="page"))
    table = Table(columns=columns, rows=[{"a": "1", "b": "2"}], padded=False)
    notes = [Note("long", on="page"), Note("short", on="screen"), view.Image("plot.png")]
    shown = View((Section(title="T", parts=[table, *notes]),))
    assert as_text(shown) == "a\n1\nshort"
    assert as_page(shown) == "### T\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nlong\n"
    assert as_page(shown, ["plot.png"]).endswith("long\n\n![plot](plot.png)\n")


def test_places_order_a_screen_and_a_group_heads_its_rows() -> None:
    columns = (Column("a", units.TEXT, "a"),)
    rows = [{"a": "1", "g": "x"}, {"a": "2", "g": "x"}, {"a": "3", "g": "y"}]
    grouped = Table(columns=columns, rows=rows, group=lambda row: row["g"])
    shown = View((Section(parts=[Note("last")]), Section(parts=[grouped], place=1)))
    assert as_text(shown) == "a\nx\n  1\n  2\ny\n  3\n\nlast"
    assert as_page(shown).startswith("last\n\n|")


def test_a_folded_column_is_never_cut_and_has_its_room_before_a_less_important_one() -> None:
    reason = "launch bound: 6.34 us kernel with 1.13 us of work"
    columns = (
        Column("a", units.TEXT, "a"),
        Column("b", units.TEXT, "b", drop=1),
        Column("why", units.TEXT, "why", folded=True, clipped=38),
    )
    rows = [{"a": "x" * 30, "b": "y" * 10, "why": reason}]
    shown = as_text(View((Section(parts=[Table(columns=columns, rows=rows)]),)), width=70)
    assert " ".join(shown.split()) == f"a why {'x' * 30} {reason}"
    assert shown.splitlines()[1].endswith("launch bound: 6.34 us kernel with 1.13")


# -- the schema of a record ------------------------------------------------------------------------


@dataclass(frozen=True)
class Part(Plain):
    of: Mapping[str, int]
    word: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Made(Plain):
    t: float  # s of all kernels
    n: tuple[int, ...] | None
    part: Part
    x: str = ""

    KEYS = "t n count x? **part"

    @property
    def count(self) -> Annotated[int, ("minimum", 1)]:
        """How many.  There is one at least."""
        return 1


def test_a_key_that_is_written_is_a_key_that_the_schema_knows() -> None:
    schema = schema_of(Made, {"title": "a test"})
    assert schema["properties"]["t"]["description"] == "s of all kernels"
    assert schema["properties"]["count"]["description"] == "How many"
    right: dict[str, Any] = {"t": 1.5, "n": [1, 2], "count": 1, "of": {"y": 1}, "word": "b"}
    for made in (Made(1.5, (1, 2), Part({"y": 1}, "b")), Made(0.0, None, Part({}), "x")):
        document = json.loads(json.dumps(made.to_dict()))
        jsonschema.validate(document, schema)
        assert ("x" in document) == bool(made.x)
    jsonschema.validate(right, schema)
    for wrong in ({"t": -1.0}, {"count": 0}, {"n": ["a"]}, {"surprise": 1}, {"word": "c"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**right, **wrong}, schema)
    for key in right:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in right.items() if k != key}, schema)
