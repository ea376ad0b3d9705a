"""Names that would act: formulas, HTML, control characters and surrogates, on every output."""

from __future__ import annotations

import csv
import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace._escapes import to_csv
from rooftrace.measured.profiles import StepTime, read_steps
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.commands import Report
from rooftrace.reporting.figures import breakdown, roofline, style
from rooftrace.reporting.renderers import as_page, as_screen, units
from rooftrace.reporting.renderers.units import code_span, fenced, inline
from rooftrace.reporting.renderers.view import Column, Note, Section, Table, View
from tests.reporting.conftest import Run

pytestmark = pytest.mark.quick

EVIL = (
    "=cmd|' /C calc'!A0",
    "<img src=x onerror=alert(1)>",
    "\x1b[2Jescape\x00nul",
    "lone\udcffsurrogate",
    "a\nb|c`d`",
    "$\\frac{$",
    "[/bold]",
)
TITLE = "<b>\x1b[2J $\\frac{$ \udcff"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu()


@pytest.fixture(scope="module")
def report() -> Report:
    stack = type("<script>alert(1)</script>", (nn.Sequential,), {})()
    for name in EVIL:
        stack.add_module(name, Block())
    chip = replace(rt.load_chip("l4"), title=TITLE)
    x = torch.empty(2, 8)
    return rt.report(stack, x, phases=["forward"], chip=chip, execution="naive")


@pytest.fixture(scope="module")
def folder(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "report"
    report.write(out, ("md", "json", "csv", "trace"))
    return out


def seen(text: str) -> bool:
    """Whether every character is seen, and can be written."""
    return all(char == "\n" or char.isprintable() for char in text)


def test_every_file_is_text_that_is_seen(folder: Path) -> None:
    for name in ("report.md", "report.json", "ops.csv"):
        text = (folder / name).read_text(encoding="utf-8")
        assert seen(text) and "\\udcff" in text
    timeline = gzip.decompress((folder / "timeline_forward.json.gz").read_bytes()).decode()
    assert seen(timeline) and "\\udcff" in timeline


def test_json_has_the_names_as_they_are(folder: Path) -> None:
    document = (folder / "report.json").read_text(encoding="utf-8")
    assert all(any(name in str(path) for path in modules(json.loads(document))) for name in EVIL)


def modules(document: object) -> list[object]:
    """Every value under a key "module"."""
    if isinstance(document, list):
        return [found for item in document for found in modules(item)]
    if isinstance(document, dict):
        own = [document["module"]] if "module" in document else []
        return own + [found for item in document.values() for found in modules(item)]
    return []


def test_a_page_holds_no_html(folder: Path) -> None:
    from markdown_it import MarkdownIt

    page = (folder / "report.md").read_text()
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    every = [t for token in tokens for t in (token, *(token.children or ()))]
    assert not [t for t in every if t.type.startswith("html")]
    links = [t for t in every if t.type in ("image", "link_open")]
    assert all(str(link.attrs.get("href", "")).startswith("#") for link in links)
    assert page.startswith("# &lt;script>alert(1)&lt;/script>, ")


def test_a_figure_takes_names_literally(report: Report, tmp_path: Path) -> None:
    from matplotlib.text import Text

    for number, figure in enumerate((roofline.roofline(report), breakdown.time_figure(report))):
        style.save(lambda figure=figure: figure, tmp_path / f"{number}.png")
        texts = [text.get_text() for text in figure.findobj(Text)]
        assert all(seen(text) for text in texts)
        assert number == 0 or any("$\\frac{$ \\udcff" in text for text in texts)


def test_a_screen_has_no_commands_of_a_terminal(report: Report) -> None:
    shown = str(report)
    assert seen(shown) and "\\x1b[2J" in shown and "\\udcff" in shown


def test_text_of_a_cell_is_no_formula_and_numbers_stay() -> None:
    graph = rt.trace(nn.Linear(8, 8), torch.empty(2, 8))
    made = rt.report({"forward": graph}, chip="l4")
    records = [*made.records()][-1]
    records = [record | {"name": "=1+1", "margin": -2.5} for record in records]
    rows = list(csv.DictReader(io.StringIO(to_csv([*records, *records]))))
    assert {row["name"] for row in rows} == {"'=1+1"} and {row["margin"] for row in rows} == {
        "-2.5"
    }
    assert len(rows) == 2 * len(records)
    assert made.to_csv().splitlines()[0].startswith("phase,execution,chip,kernel,name")


def test_reading_takes_the_quote_away(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for written, name in (("'=x", "=x"), ("''=x", "'=x"), ("'x", "'x"), ("'-x", "-x")):
        path.write_text(f"model,ms,note\n{written},1,'@y\n")
        assert read_steps(path) == (
            StepTime(target=name, seconds=1e-3, line=2, extra={"note": "@y"}),
        )


def test_errors_are_seen_too(run: Run, tmp_path: Path) -> None:
    for name in ("\x1b[2J", "\x9b2J", "\u202e"):
        for command in (("report", f"{name}:x"), ("report", "a:b", "--format", name)):
            ran = run(*command)
            assert ran.code == 2 and seen(ran.err) and name not in ran.err
    (tmp_path / "chip.toml").write_text('name = "\\u001b[2J"\n')
    assert seen(run("chips", "lint", tmp_path / "chip.toml").out)


def test_heads_and_progress_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    column = Column("a", units.TEXT, "[/bold]")
    view = View((Section(parts=[Table(columns=[column], rows=[{"a": "[/red]"}])]),))
    console = Console(width=80, record=True, color_system=None)
    console.print(as_screen(view))
    assert "[/bold]" in console.export_text() and "| [/bold] |" in as_page(view)
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    with progress():
        from rooftrace._progress import tell

        tell("tracing [/bold]")


def test_a_newline_of_a_name_begins_no_line() -> None:
    page = as_page(
        View((Section(title="a\n# b", parts=[Note("x\n# y"), Note("c\nd", lines=True)]),))
    )
    assert page == "### a\\n# b\n\nx\\n# y\n\nc\nd\n"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("`a` of b|c", "`a` of b|c"),
        ("<1% and a < b", "<1% and a < b"),
        ("layers.*.mlp, bf16[8, 16]", "layers.*.mlp, bf16[8, 16]"),
        ("<b>", "&lt;b>"),
        ("`<b>`", "`<b>`"),
        ("` <b>", "&#96; &lt;b>"),
        (r"\`<b>`", r"\`&lt;b>&#96;"),
        ("[a](b)", "[a&#93;(b)"),
        ("[a]: b", "[a&#93;: b"),
        ("> ~~~", "> &#126;&#126;&#126;"),
    ],
)
def test_a_line_of_a_page(text: str, written: str) -> None:
    assert inline(text) == written


def test_a_cell_of_a_page() -> None:
    assert inline("`a|b`", cell=True) == r"`a\|b`"
    assert inline(r"a\|b", cell=True) == r"a\&#124;b"
    assert inline(r"`a\|<b>`", cell=True) == r"&#96;a\&#124;&lt;b>&#96;"


def test_code_of_a_page() -> None:
    assert code_span("a") == "`a`" and code_span("a`b") == "`` a`b ``" and code_span("") == ""
    assert fenced("a\n```\nb", "python") == ["````python", "a", "```", "b", "````"]
