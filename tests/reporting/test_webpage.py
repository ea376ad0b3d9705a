"""The page of a report: its numbers are those of the report, and no name can script or break it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.reporting.html import (
    contents as contents_module,
    contents as kernelgroups,
    report_page,
    result_page,
)
from rooftrace.reporting.html.contents import contents
from rooftrace.reporting.renderers import units, view
from rooftrace.reporting.sections import report_view

pytestmark = pytest.mark.quick

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[31m`**a**`|\u202e"
WEB = Path(__file__).parents[2] / "site" / "app"


class Named(nn.Module):
    """A layer under a name that attacks pages, in a block of two."""

    def __init__(self, name: str = "inner") -> None:
        super().__init__()
        self.name = name
        self.norm = nn.LayerNorm(32)
        self.add_module(name, nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(getattr(self, self.name)(self.norm(x)))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self, name: str = "inner") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Named(name) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def report() -> rt.types.Report:
    return rt.report(Stack(), torch.randn(16, 32), chip=["h200-sxm", "l4"])


class _Parsed(HTMLParser):
    """Elements of a page, its attributes and the text of its cells."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.cells: list[str] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("td", "th"):
            self._open = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.cells[-1] += data


def tables_of(part: Any) -> Iterator[view.Table]:
    for inner in part.parts:
        if isinstance(inner, view.Section):
            yield from tables_of(inner)
        elif isinstance(inner, view.Table) and inner.on != "screen" and inner.rows:
            yield inner


def plain(text: str) -> str:
    """A cell of a Markdown page as it is read: without code spans and emphasis."""
    return text.replace("`", "").replace("**", "")


def test_tables_of_a_page_are_those_of_the_report(report: rt.types.Report) -> None:
    expected = []
    for section in report_view(report, "page").sections:
        for table in tables_of(section):
            columns = [column for column in table.columns if column.shown_on("page")]
            expected += [column.name("page") for column in columns]
            for row in table.rows:
                expected += [plain(column.written(row, page=True)[0]) for column in columns]
    assert _Parsed(report_page(report)).cells == expected


def test_sums_of_what_is_explored_are_those_of_the_estimates(report: rt.types.Report) -> None:
    data = contents(report)
    for phase in report.phases:
        for execution in report.executions:
            groups = data["steps"][phase][execution]["groups"]
            for place, chip in enumerate(report.chips):
                estimate = report.estimate(phase, execution, chip.name)
                assert sum(groups["seconds"][place]) == pytest.approx(estimate.times.t_serial)
                limits = {data["texts"][limit] for limit in groups["limit"][place]}
                assert limits <= set(estimate.times.regime_shares)
            assert sum(groups["flops"]) == estimate.flops
            assert sum(groups["bytes"]) == estimate.bytes_hbm
            assert sum(groups["calls"]) == estimate.kernels


def test_fp32_work_without_tf32_is_under_the_roof_of_the_engine_that_runs_it(
    report: rt.types.Report,
) -> None:
    for chip, shown in zip(report.chips, contents(report)["chips"], strict=True):
        expected = {"name": "vector fp32", "rate": chip.peak("vector", "fp32")}
        assert shown["ceilings"] == [expected]


def test_what_is_too_much_for_a_page_is_summed_up_and_nothing_is_lost(
    report: rt.types.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernelgroups, "MOST_GROUPS", 3)
    data = contents(report)
    groups = data["steps"]["training"]["naive"]["groups"]
    estimate = report.estimate("training", "naive")
    names = [data["texts"][name] for name in groups["name"]]
    assert "smaller kernels" in names
    assert len(names) < 20
    assert sum(groups["flops"]) == estimate.flops
    assert sum(groups["bytes"]) == estimate.bytes_hbm
    modules = {data["texts"][module] for module in groups["module"]}
    assert any(module.startswith("blocks.*") for module in modules)


class Many(nn.Module):
    """Blocks that all have names of their own, so that no two kernels are alike."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(40):
            self.add_module(f"part{i}x", Named(f"inner{i}x"))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


def test_modules_that_are_all_different_are_summed_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernelgroups, "MOST_GROUPS", 20)
    monkeypatch.setattr(kernelgroups, "MOST_OTHERS", 10)
    monkeypatch.setattr(contents_module, "MOST_MODULES", 30)
    many = rt.report(Many(), torch.randn(16, 32), phases=["forward"], execution="efficient")
    page, estimate = contents(many), many.estimate("forward")
    step = page["steps"]["forward"]["efficient"]["groups"]
    assert len(step["name"]) <= 30
    assert sum(step["calls"]) == estimate.kernels and sum(step["flops"]) == estimate.flops
    assert sum(step["seconds"][0]) == pytest.approx(estimate.times.t_serial)
    modules = page["modules"]["forward"]
    assert len(modules) <= 60 and "" in modules
    assert {page["texts"][place] for place in step["module"]} <= set(modules)
    parameters = sum(p.numel() for p in Many().parameters())
    assert sum(entry["parameters"] for entry in modules.values()) == parameters
    memory = page["memory"]["forward"]
    assert set(memory["modules"]) <= set(modules)
    held = sum(tensor.bytes for tensor in many.memory["forward"].tensors)
    assert sum(memory["modules"].values()) == held


def test_memory_of_a_page_is_that_of_the_timeline(report: rt.types.Report) -> None:
    data = contents(report)["memory"]["training"]
    need = report.memory["training"]
    assert data["peak"] == need.peak
    totals = [sum(sizes) for sizes in zip(*data["sizes"].values(), strict=True)]
    assert max(totals) == need.peak
    assert sum(data["modules"].values()) == sum(tensor.bytes for tensor in need.tensors)


def test_the_peak_of_a_step_is_that_of_its_execution() -> None:
    model = Stack()
    report = rt.report(model, torch.randn(8, 32), execution=["efficient", "naive"])
    steps = contents(report)["steps"]
    for phase in report.phases:
        for execution in ("efficient", "naive"):
            alone = rt.estimate(model, torch.randn(8, 32), phase=phase, execution=execution)
            assert steps[phase][execution]["peak"] == alone.memory.peak
        assert report.memory[phase].peak == steps[phase][report.main]["peak"]


def test_the_picture_stands_before_the_words(report: rt.types.Report) -> None:
    page = report_page(report)
    assert page.index('id="explorer"') < page.index('<section id="verdict">')
    assert page.index('href="#explore"') < page.index('href="#verdict"')


def test_a_kernel_says_its_shapes_and_the_formula_of_its_rule(report: rt.types.Report) -> None:
    data = contents(report)
    groups = data["steps"]["forward"]["naive"]["groups"]
    texts = data["texts"]
    names = [texts[name] for name in groups["name"]]
    place = next(i for i, module in enumerate(groups["module"]) if texts[module] == "head")
    assert names[place] == "addmm"
    shapes = "fp32[8], fp32[16, 32], fp32[32, 8] -> fp32[16, 8]"
    assert texts[groups["shapes"][place]] == shapes
    assert "2 M K N flop" in texts[groups["formula"][place]]


def test_parameters_of_modules_are_those_of_the_module(report: rt.types.Report) -> None:
    modules = contents(report)["modules"]["forward"]
    whole = sum(parameter.numel() for parameter in Stack().parameters())
    assert sum(module["parameters"] for module in modules.values()) == whole
    assert modules[""]["class"] == ""  # the title of the page is its class
    assert modules["blocks.*.inner"] | {"parameters": 3 * (32 * 32 + 32)} == {
        "class": "Linear",
        "count": 3,
        "parameters": 3 * (32 * 32 + 32),
    }


# -- what names may say ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_page() -> str:
    name = HOSTILE.replace(".", "")
    return report_page(rt.report(Stack(name), torch.randn(16, 32), phases=["forward"]))


def test_names_bring_no_elements_and_no_attributes(
    hostile_page: str, report: rt.types.Report
) -> None:
    allowed = set(_Parsed(report_page(report)).tags)
    parsed = _Parsed(hostile_page)
    assert set(parsed.tags) <= allowed
    assert "img" not in parsed.tags
    assert not {name for name, _ in parsed.attributes if name.startswith("on")}
    assert "\x1b" not in hostile_page
    assert "\u202e" not in hostile_page


def test_the_data_of_a_page_ends_no_element(hostile_page: str) -> None:
    island = re.search(
        r'<script type="application/json" id="contents">(.*?)</script>', hostile_page
    )
    assert island is not None
    assert any("onerror=alert(1)" in text for text in json.loads(island[1])["texts"])


def test_a_page_lets_its_own_script_run_and_loads_nothing(report: rt.types.Report) -> None:
    page = report_page(report)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    loaded = {"src", "srcset", "data", "action", "poster"}
    parsed = _Parsed(page.replace(script[1], ""))
    assert not loaded & {name for name, _ in parsed.attributes}
    links = [value for name, value in parsed.attributes if name == "href"]
    assert all(str(link).startswith("#") for link in links)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`a<b>`", "<code>a&lt;b&gt;</code>"),
        ("``a`b``", "<code>a`b</code>"),
        ("`` `a` ``", "<code>`a`</code>"),
        ("**x** & y", "<strong>x</strong> &amp; y"),
        ("a ` b", "a ` b"),
        ("<script>", "&lt;script&gt;"),
        ('"\x07', "&quot;\\x07"),
        (r"\*\*a", "**a"),
        ("3.65 K items/s, 4 %, 2 ops", "3.65\u00a0K items/s, 4\u00a0%, 2 ops"),
        ("439.5 samples/s in 2 steps", "439.5\u00a0samples/s in 2 steps"),
        ("`--step 4 ms`, 4 ms", "<code>--step 4 ms</code>, 4\u00a0ms"),
    ],
)
def test_text_of_builders_is_marked_up_and_nothing_else_is(text: str, expected: str) -> None:
    page = result_page(view.View((view.Section(title="T", parts=[view.Note(text)]),), "x"))
    assert f"<p>{expected}</p>" in page


def test_numbers_stand_beside_their_text_so_that_tables_can_be_sorted() -> None:
    column = view.Column("size", units.BYTE, "Size")
    table = view.Table(columns=(column,), rows=[{"size": 1_500_000}, {"size": None}])
    page = result_page(view.View((view.Section(title="T", parts=[table]),), "x"))
    assert '<td class="number" data-value="1500000">1.50 MB</td>' in page
    assert '<td class="number">–</td>' in page


def test_headings_are_listed_once_each() -> None:
    sections = tuple(
        view.Section(title=title, parts=[view.Note("text")]) for title in ("A b", "A b", "c")
    )
    page = result_page(view.View(sections, "x"))
    assert re.findall(r'<a href="#([^"]*)">', page) == ["a-b", "a-b-2", "c"]
    assert re.findall(r'<section id="([^"]*)">', page) == ["a-b", "a-b-2", "c"]


# -- files -----------------------------------------------------------------------------------------


def test_a_report_writes_its_page(report: rt.types.Report, tmp_path: Path) -> None:
    (written,) = report.write(tmp_path / "out", ["html"])
    assert written.name == "report.html"
    assert written.read_text(encoding="utf-8") == report_page(report)


@pytest.mark.skipif(not WEB.exists(), reason="the sources of the script are not here")
def test_the_script_of_the_page_is_made_of_its_sources() -> None:
    names = sorted(path.name for path in (WEB / "src").iterdir())
    digest = hashlib.sha256()
    for name in [*(f"src/{name}" for name in names), "package-lock.json"]:
        digest.update(name.encode() + b"\0" + (WEB / name).read_bytes() + b"\0")
    script = Path(kernelgroups.__file__).with_name("page.js").read_text(encoding="utf-8")
    assert digest.hexdigest() in script.partition("\n")[0], "run `make page`"
