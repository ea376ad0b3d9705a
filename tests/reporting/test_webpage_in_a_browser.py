"""A report's page in headless Chromium: each control does what it says, and nothing goes wrong.

Tests are skipped where no Chromium is installed; ROOFTRACE_CHROMIUM names one.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.hardware.units import format_capacity, format_time
from rooftrace.reporting.html import report_page, result_page
from rooftrace.reporting.renderers import units, view
from rooftrace.reporting.views import file_of

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = os.environ.get("ROOFTRACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed"),
]
playwright = pytest.importorskip("playwright.sync_api")

HOSTILE = "</script><img src=x onerror=alert(1)>`**\x1b"
CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => {
      const c = v / 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const under = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = rgba(getComputedStyle(e).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll('main *, header *, nav *')) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || element.closest('svg, script, noscript, .dim') || !element.offsetParent) continue;
    const style = getComputedStyle(element);
    const [a, b] = [light(rgba(style.color)), light(under(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push([element.textContent.slice(0, 40), ratio]);
  }
  return poor;
}"""


class Block(nn.Module):
    """A layer under a given name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(getattr(self, self.name)(x))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self, name: str = "inner") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(name) for _ in range(3))
        self.head = nn.Linear(64, 4096)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def report() -> rt.types.Report:
    return rt.report(Stack(), torch.randn(256, 64), chip=["h200-sxm", "l4"])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the text of a page; at the end the console must be empty."""
    complaints: list[str] = []
    contexts = []

    def open_page(text: str, place: str = "", **how: Any) -> Any:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **how})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.goto(f"{file.as_uri()}{place}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def lines_of(page: Any, selector: str) -> list[int]:
    """How many lines the text of each of these elements takes."""
    lines: list[int] = page.evaluate(
        """(selector) => [...document.querySelectorAll(selector)].map((element) => {
          const range = document.createRange();
          range.selectNodeContents(element);
          return new Set([...range.getClientRects()].map((box) => box.top)).size;
        })""",
        selector,
    )
    return lines


def verdict(page: Any) -> str:
    return str(page.inner_text('[data-testid="verdict"]'))


def test_switches_show_the_step_that_they_name(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report))
    for phase in report.phases:
        page.check(f'input[value="{phase}"]', force=True)
        for execution in report.executions:
            page.check(f'input[value="{execution}"]', force=True)
            for place, chip in enumerate(report.chips):
                page.check(f'fieldset:has-text("chip") input[value="{place}"]', force=True)
                estimate = report.estimate(phase, execution, chip.name)
                assert format_time(estimate.t_est) in verdict(page)
                assert format_time(estimate.t_bound) in verdict(page)
                assert format_capacity(estimate.memory.peak) in verdict(page)


def test_a_price_of_a_chip_becomes_one_of_a_million_items(
    report: rt.types.Report, opened: Open
) -> None:
    page = opened(report_page(report), "#phase=forward")
    step = report.estimate("forward")
    hours = 1_000_000 / step.items * step.t_est / 3600
    page.fill('input[type="number"]', str(25 / hours))
    assert "$25\n" in verdict(page)


def test_the_first_screen_is_the_picture(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), viewport={"width": 1366, "height": 768})
    for part in ('[data-testid="verdict"]', ".picture figure svg"):
        box = page.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 768, part
    for link in page.locator("nav.contents a").all():  # all are reachable without scrolling
        box = link.bounding_box()
        assert box["x"] + box["width"] <= 1366


def test_a_link_opens_what_it_was_made_of(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), "#phase=training&execution=naive&chip=l4&by=bytes")
    assert format_time(report.estimate("training", "naive", "l4").t_est) in verdict(page)
    assert page.is_checked('input[value="bytes"]')
    page.check('input[value="forward"]', force=True)
    assert "phase=forward" in page.evaluate("location.hash")


def test_a_box_is_as_wide_as_its_share_and_zooms(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), "#phase=forward&by=parameters")
    box = page.locator('[data-path="head"]').bounding_box()
    whole = page.locator('[role="tree"]').bounding_box()
    sizes = {name: p.numel() for name, p in Stack().named_parameters()}
    share = sum(n for name, n in sizes.items() if name.startswith("head")) / sum(sizes.values())
    assert box["width"] / whole["width"] == pytest.approx(share, rel=0.01)
    page.click('[data-path="blocks.*"]')
    assert page.locator('[data-path="head"]').count() == 0
    assert page.locator('[data-path="blocks.*"]').bounding_box()["width"] == whole["width"]
    modules = page.locator("table.kernels td.path").all_inner_texts()
    assert modules
    assert all(module.startswith("blocks.*") for module in modules)
    page.click(".crumbs button")
    assert page.locator('[data-path="head"]').count() == 1


def test_the_tree_of_modules_is_walked_by_keys(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), "#phase=forward&by=parameters")
    page.focus('[role="treeitem"][tabindex="0"]')
    focused = "document.activeElement.dataset.path"
    walked = []
    for key in ("ArrowDown", "ArrowRight", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        walked.append(page.evaluate(focused))
    assert walked[0] == "head"
    assert walked[1].startswith("blocks")
    assert walked[2].startswith(f"{walked[1]}.")
    assert walked[3] == walked[1]
    page.keyboard.press("Enter")
    playwright.expect(page).to_have_url(re.compile("module=blocks"))
    page.keyboard.press("Escape")
    # Not by page.wait_for_function: the page's own policy forbids to evaluate a string.
    playwright.expect(page).not_to_have_url(re.compile("module="))


def test_a_search_marks_modules_and_leaves_rows_that_match(
    report: rt.types.Report, opened: Open
) -> None:
    page = opened(report_page(report), "#phase=forward")
    page.fill('input[placeholder="module, kernel, family"]', "HEAD")
    assert page.locator(".box.found").count() == 1
    assert set(page.locator("table.kernels td.path").all_inner_texts()) == {"head"}
    page.fill('input[placeholder="module, kernel, family"]', "no such thing")
    assert page.locator("table.kernels tbody tr").count() == 0


@pytest.mark.parametrize("head", ["FLOP", "Time", "Calls"])
def test_rows_of_kernels_are_sorted_by_the_head_that_is_clicked(
    report: rt.types.Report, opened: Open, head: str
) -> None:
    page = opened(report_page(report), "#phase=training&execution=naive")
    page.click(f'table.kernels th button:text-is("{head}")')
    button = page.locator(f'table.kernels th:has(button:text-is("{head}"))')
    first = button.get_attribute("aria-sort")
    before = page.locator("table.kernels tbody tr td:first-child").all_inner_texts()
    page.click(f'table.kernels th button:text-is("{head}")')
    after = page.locator("table.kernels tbody tr td:first-child").all_inner_texts()
    assert {first, button.get_attribute("aria-sort")} == {"ascending", "descending"}
    assert before != after


def test_a_mark_of_the_roofline_opens_its_row(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), "#phase=forward&execution=naive")
    mark = page.locator(".figure svg g[aria-label=dot] path").first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector('.figure svg g[aria-label="tip"] text')
    assert "FLOP/byte" in page.text_content('.figure svg g[aria-label="tip"]')
    page.mouse.down()
    page.mouse.up()
    assert page.locator("tr.picked").count() == 1
    assert "2 M K N flop" in page.inner_text("tr.opened")


@pytest.mark.parametrize("width", [1200, 375])
def test_names_of_ceilings_lie_over_no_mark_and_no_other_name(opened: Open, width: int) -> None:
    model = nn.Sequential(nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU())
    made = rt.report(
        model, torch.empty(16, 256, 32, 32, device="meta"), chip=["l4", "h100-sxm", "h200-sxm"]
    )
    for chip in ("l4", "h100-sxm"):
        page = opened(report_page(made), f"#chip={chip}", viewport={"width": width, "height": 900})
        names, marks = page.evaluate(
            """() => {
              const chart = document.querySelector('[aria-label^="roofline"]');
              const boxes = (all) => [...all].map((one) => one.getBoundingClientRect())
                .map(({left, right, top, bottom}) => [left, top, right, bottom]);
              const texts = [...chart.querySelectorAll('text')];
              return [boxes(texts.filter((one) => /^[^↑]*(matrix|vector) /.test(one.textContent))),
                boxes(chart.querySelectorAll('[aria-label="dot"] path'))];
            }"""
        )
        assert len(names) >= 2 and len(marks) >= 2
        for one, other in [*itertools.product(names, marks), *itertools.combinations(names, 2)]:
            apart = (one[0] - other[2], other[0] - one[2], one[1] - other[3], other[1] - one[3])
            assert max(apart) > -2, (chip, one, other)  # pixels


def test_memory_says_what_is_alive_at_the_cursor(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), "#phase=training")
    need = report.memory["training"]
    alive = '[data-testid="alive"]'
    assert page.inner_text(alive).startswith(format_capacity(need.peak))
    page.locator(".cursor input").fill("0")
    first = need.timeline.moments[0]
    assert page.inner_text(alive).startswith(format_capacity(first.total))
    assert f"after {first.time}" in page.inner_text(alive)


def test_tables_below_are_sorted_and_filtered(opened: Open) -> None:
    columns = (view.Column("name", units.TEXT, "Name"), view.Column("size", units.BYTE, "Size"))
    rows = [{"name": f"row {i}", "size": (i * 7 % 15) * 10**9} for i in range(15)]
    section = view.Section(title="T", parts=[view.Table(columns=columns, rows=rows)])
    page = opened(result_page(view.View((section,), "x")))
    page.click('th button:text-is("Size")')
    largest = sorted(rows, key=lambda row: -row["size"])
    names = page.locator("tbody td:first-child").all_inner_texts()
    assert names == [row["name"] for row in largest]
    page.click('th button:text-is("Size")')
    assert page.locator("tbody td:first-child").all_inner_texts() == names[::-1]
    page.fill('input[type="search"]', "row 1")
    shown = [name for name in names if name.startswith("row 1")]
    assert page.locator("tbody tr:visible").count() == len(shown)


def test_sliders_over_a_sweep_show_the_estimate_of_their_place(opened: Open) -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU()), torch.empty(8, 64)
    chips = ["h200-sxm", "l4"]
    swept = rt.sweep(model, x, over={"batch": (8, 64, 512)}, chip=chips)
    page = opened(file_of(swept, "html").decode())
    for place, batch in ((2, 512), (0, 8)):
        for chip in chips:
            page.locator('.live input[type="range"]').fill(str(place))
            page.select_option(".live select", label=chip)
            alone = rt.estimate(model, torch.empty(batch, 64), chip=chip)
            told = page.inner_text(".live dl")
            assert format_time(alone.t_est) in told and format_time(alone.t_bound) in told
            assert page.locator("tr.picked").count() == 1
    assert set(lines_of(page, ".live dd")) == {1}  # no number is cut from its unit


def test_sliders_move_to_the_nearest_line_where_none_has_all_that_is_chosen(opened: Open) -> None:
    rows = [
        {"chip": chip, "batch": batch, "kv": kv, "time": f"{chip} {batch} {kv}"}
        for chip, batch, kv in (("a", 1, 9), ("a", 8, 9), ("a", 8, 99), ("a", 64, 9), ("b", 64, 99))
    ]
    units_of = {"chip": units.TEXT, "batch": units.EXACT, "kv": units.EXACT, "time": units.TEXT}
    columns = [view.Column(name, unit, name) for name, unit in units_of.items()]
    table = view.Table(columns=columns, rows=rows, axes=3)
    page = opened(result_page(view.View((view.Section(title="T", parts=[table]),), "x")))
    batch, kv = (page.locator('.live input[type="range"]').nth(place) for place in (0, 1))
    told = page.locator(".live p")
    assert page.inner_text(".live dd") == "a 1 9"
    kv.fill("1")  # 99, which batch 1 does not have
    assert page.inner_text(".live dd") == "a 8 99" and batch.input_value() == "1"
    assert told.inner_text() == "No line has chip a, batch 1, kv 99: the nearest has batch 8."
    batch.fill("2")  # 64: a size moves before the chip does
    assert page.inner_text(".live dd") == "a 64 9" and kv.input_value() == "0"
    page.select_option(".live select", label="b")
    assert page.inner_text(".live dd") == "b 64 99" and "kv 99." in told.inner_text()
    batch.fill("0")
    assert page.inner_text(".live dd") == page.locator("tr.picked td").last.inner_text() == "a 1 9"
    kv.fill("0")  # where it is
    assert told.inner_text() == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(report: rt.types.Report, opened: Open, scheme: str) -> None:
    page = opened(report_page(report), color_scheme=scheme)
    assert page.evaluate(CONTRAST) == []


def test_a_phone_shows_the_page_without_scrolling_sideways(
    report: rt.types.Report, opened: Open
) -> None:
    page = opened(report_page(report), viewport={"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert set(lines_of(page, ".inspected > span")) == {1}


def test_paper_has_no_controls(report: rt.types.Report, opened: Open) -> None:
    page = opened(report_page(report), "#phase=training")
    page.emulate_media(media="print")
    assert not page.is_visible(".search input")
    assert not page.is_visible("nav.contents")
    assert page.is_visible('[data-testid="verdict"]')
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_names_run_nothing(opened: Open) -> None:
    page = opened(report_page(rt.report(Stack(HOSTILE), torch.randn(8, 64), phases=["forward"])))
    assert page.locator("img").count() == 0
    assert page.locator("text=onerror=alert").count() > 0
    page.locator(".box >> nth=-1").hover()


def test_the_page_reads_without_a_script(
    report: rt.types.Report, browser: Any, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    file.write_text(report_page(report), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert "needs JavaScript" in page.inner_text("#explorer")
    assert page.locator("table").count() > 5
    context.close()
