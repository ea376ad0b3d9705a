"""Pages: what stands first, links that lead somewhere, and tables that can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

import rooftrace as rt
from rooftrace.reporting.renderers import as_page, units
from rooftrace.reporting.renderers.markdown import MOST_COLUMNS
from rooftrace.reporting.renderers.view import Column, Note, Section, Table, View
from rooftrace.reporting.views.results import as_markdown
from tests.reporting.report_support import made_report

pytestmark = pytest.mark.quick


def widths(page: str) -> list[int]:
    """Columns of each table of a page, as a reader of CommonMark finds them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    heads: list[int] = []
    for token in tokens:
        if token.type == "thead_open":
            heads.append(0)
        if token.type == "th_open":
            heads[-1] += 1
    return heads


def block(width: int = 64) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())


def x(batch: int = 8, width: int = 64) -> torch.Tensor:
    return torch.empty(batch, width, device="meta")


MANY = ("naive", "eager", "compiled", "efficient", "serving", "seed-efficient")
CHIPS = ("h200-sxm", "b200-sxm", "l4", "mi300x", "rtx-4090", "a100-sxm-80", "h100-sxm", "l40s")
RESULTS = {
    "a report": lambda: rt.report(block(), x()),
    "six executions on eight chips": lambda: rt.report(
        block(), x(), chip=CHIPS, execution=MANY, phases=["forward", "training"]
    ),
    "bounds": lambda: rt.report(block(), x(), knobs=None),
    "an estimate": lambda: rt.estimate(block(), x()),
    "three phases of experts": lambda: made_report(chips=("h200-sxm", "b200-sxm", "l4")),
    "a diff": lambda: rt.diff(rt.trace(block(), x(8)), rt.trace(block(), x(64))),
    "a summary": lambda: rt.summary(block(), input_data=x()),
    "an inventory": lambda: rt.inventory(block()),
    "a graph": lambda: rt.trace(block(), x()),
    "a chip": lambda: rt.load_chip("h200-sxm"),
    "a breakdown": lambda: rt.estimate(block(), x()).by_module(),
}


@pytest.mark.parametrize("name", RESULTS)
def test_no_table_of_a_page_is_wider_than_nine_columns(name: str) -> None:
    assert max(widths(as_markdown(RESULTS[name]())), default=0) <= MOST_COLUMNS == 9


@pytest.mark.parametrize("count", [1, 8, 9, 10, 11, 16, 18, 26, 40])
@pytest.mark.parametrize(("leading", "sets"), [(1, 1), (2, 1), (1, 2), (1, 3), (2, 5), (9, 12)])
def test_a_wide_table_is_cut_and_loses_nothing(count: int, leading: int, sets: int) -> None:
    columns = [Column(f"c{i}", units.TEXT, f"c{i}") for i in range(count)]
    row = {column.key: f"v{i}" for i, column in enumerate(columns)}
    table = Table(columns=columns, rows=[row, row], leading=leading, sets=sets)
    page = as_page(View((Section(parts=[table]),)))
    assert max(widths(page)) <= 9
    pieces = [re.findall(r"c\d+", line) for line in page.splitlines() if line.startswith("| c")]
    kept = min(leading, 8) if count > 9 else count
    assert all(piece[:kept] == pieces[0][:kept] for piece in pieces)
    rest = [name for piece in pieces for name in piece[kept:]]
    assert [*pieces[0][:kept], *rest] == [column.key for column in columns]
    if count > 9 and sets <= 9 - kept:
        assert all(len(piece[kept:]) % sets == 0 for piece in pieces[:-1])
    assert page.count("v0 ") >= 2 * len(pieces)


# -- the order of report.md ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> str:
    return as_markdown(rt.report(block(), x(), execution=["compiled", "eager"]))


def test_verdict_guidance_and_contents_stand_before_any_table(page: str) -> None:
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert titles[:3] == ["Verdict", "What would help, in order", "Contents"]
    before, _, after = page.partition("\n## Contents\n")
    assert "\n|" not in before and "\n|" in after
    assert after.index("\n- [") < after.index("\n|")


def test_the_verdict_says_fit_time_and_limit(page: str) -> None:
    told = page.partition("## Verdict\n\n")[2].partition("\n## ")[0]
    assert told.startswith("Fits one h200-sxm")
    line = next(line for line in told.splitlines() if line.startswith("- **Forward**"))
    assert "limited by launch" in line
    assert told.count(line.partition("expected ")[2].partition(" (")[0]) == 1  # the time, once


def test_guidance_is_a_numbered_list_of_gains(page: str) -> None:
    told = page.partition("## What would help, in order\n")[2].partition("\n## ")[0]
    lines = re.findall(
        r"^(\d+)\. \*\*(.+?)\*\*(?: at `\S+:\d+`)?: (?:at most )?\S+ \S+ less", told, re.MULTILINE
    )
    report = rt.report(block(), x(), execution=["compiled", "eager"])
    options = [told for each in report.guidance.values() for told in each.options]
    assert [action for _, action in lines] == [what_if.action for what_if in options]
    priced = [each.option for each in options if each.option]
    assert lines[0][0] == "1" and all(f"Priced as `{option}`." in told for option in priced)


def test_every_link_of_the_contents_leads_to_a_heading(page: str) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    heads = [body.content for head, body in pairwise(tokens) if head.type == "heading_open"]
    # As GitHub does: lower case, words and hyphens only, spaces become hyphens.
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    links = re.findall(r"^- \[.*\]\(#(.*)\)$", page, re.MULTILINE)
    assert len(links) > 5 and set(links) <= anchors
    assert "does-it-fit" in links and "what-would-help-in-order" not in links


def test_headings_of_one_name_have_anchors_of_their_own() -> None:
    parts = [Note("x")]
    twice = (
        Section(title="Contents", contents=True),
        Section(title="Same", parts=[Section(title="Same", parts=parts)]),
        Section(title="Same", parts=parts),
        Section(title="Not shown"),
    )
    page = as_page(View(twice, "Same"))
    assert "- [Same](#same-1)\n- [Same](#same-3)\n" in page and "Not shown" not in page


def test_a_report_on_a_screen_says_what_would_help_in_four_lines_a_phase() -> None:
    report = rt.report(block(), x(), execution="eager")
    lines = str(report).splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("suggestion"))
    shown = lines[start + 1 : lines.index("", start)]
    assert len(shown) <= 4 * len(report.phases)
    assert [line.split()[0] for line in shown if not line.startswith(" ")] == list(report.phases)
    told = report.guidance["forward"]
    assert f"1. {told.options[0].action}" in shown[0]
    assert told.together is not None and told.together.action in "\n".join(shown)
    assert "suggestion" not in str(report.estimate("forward"))


def test_a_screen_numbers_no_change_that_it_leaves_out() -> None:
    report = rt.report(block(), x(), execution="eager", phase="forward")
    told = report.guidance["forward"]
    assert told.together is not None and told.together.action == "1 and 2 together"
    for ranks, words in (((1, 2, 5, 6), "1, 2 and 2 others together"), ((1, 5), "1 and another")):
        many = replace(told, options=told.options * 3, ranks=ranks)
        vars(report)["guidance"] = {"forward": many}
        assert words in str(report)
