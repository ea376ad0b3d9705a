"""Results in a notebook: one short line each, and HTML in which no name acts."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace._escapes import visible
from rooftrace.measured.profiles import StepTime
from rooftrace.reporting.figures.breakdown import Bar
from rooftrace.reporting.figures.inline import bar_svg, image, point_svg
from rooftrace.reporting.figures.parity import ParityPoint
from rooftrace.reporting.html import as_cell
from rooftrace.reporting.renderers import units
from rooftrace.reporting.renderers.view import Column, Note, Section, Table, View

NAMES = (Path(__file__).parents[1] / "corpus" / "names" / "names.txt").read_text().splitlines()
X = torch.ones(2, 8)
WRITTEN = {"div", "b", "table", "thead", "tbody", "tr", "th", "td", "img"}
"""Every tag that our HTML has."""


def test_an_error_of_a_user_is_shown_under_the_call_that_made_it() -> None:
    def cell() -> None:
        rt.trace(nn.Linear(8, 4), torch.ones(2, 5))  # a wrong shape

    with pytest.raises(RuntimeError, match="forward of Linear failed") as caught:
        cell()
    shown = caught.value._render_traceback_()
    assert len(caught.traceback) > len(shown) and "cell()" in shown[-3]
    assert shown[-2].endswith(
        "in cell: rt.trace(nn.Linear(8, 4), torch.ones(2, 5))  # a wrong shape"
    )
    assert shown[-1] == f"TraceError: {caught.value}"
    with pytest.raises(LookupError, match="did you mean") as caught:
        rt.load_chip("h100-smx")
    assert 'rt.load_chip("h100-smx")' in caught.value._render_traceback_()[-2]
    with pytest.raises(AttributeError, match="did you mean 'report'"):
        getattr(rt, "reprot")  # noqa: B009


class Page(HTMLParser):
    """The tags, attributes and text of HTML; every tag must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    @property
    def images(self) -> list[ElementTree.Element]:
        """The SVG inside of each image."""
        sources = [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]
        start = "data:image/svg+xml;base64,"
        assert all(source.startswith(start) for source in sources)
        return [
            ElementTree.fromstring(base64.b64decode(source[len(start) :])) for source in sources
        ]


def check(page: Page) -> None:
    """Nothing in a page acts: only our tags, with a style, a tooltip, a span or a picture."""
    assert {tag for tag, _ in page.tags} <= WRITTEN
    for _, attributes in page.tags:
        assert set(attributes) <= {"style", "title", "colspan", "src", "alt"}
    for svg in page.images:
        assert {part.tag.rpartition("}")[2] for part in svg.iter()} <= {
            "svg", "rect", "text", "line", "circle",
        }  # fmt: skip
        assert not any(
            "href" in name or name[:2] == "on" for part in svg.iter() for name in part.attrib
        )


class Stack(nn.Module):
    """Three equal layers and a head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for _ in range(3)]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A result of each kind that a notebook shows."""
    graph = rt.trace(Stack(), X)
    wide = rt.trace(Stack(16), X)
    estimate = rt.estimate(graph)
    return {
        "OpGraph": graph,
        "Estimate": estimate,
        "Report": rt.report(Stack(), X, chip="l4"),
        "Diff": rt.diff(graph, wide),
        "Summary": rt.summary(graph),
        "Breakdown": estimate.by_module(),
        "Chip": estimate.chip,
        "Plan": estimate.plan,
        "Headroom": estimate.headroom(),
        "Memory": estimate.memory,
        "Timeline": estimate.memory.timeline,
        "Knobs": estimate.knobs,
        **measured(tmp_path_factory.mktemp("models")),
    }


def measured(folder: Path) -> dict[str, object]:
    """A calibration on made-up step times of three small models, and a validation of them."""
    (folder / "models.py").write_text(
        "import torch\nfrom torch import nn\n"
        + "".join(
            f"def m{n}(): return nn.Linear({n}, {n}), (torch.ones(2, {n}),)\n" for n in (512, 2048)
        )
    )
    steps = [
        StepTime(target=f"{folder}/models.py:m{n}", seconds=s, batch=batch, phase="forward")
        for n, batch, s in ((512, 4096, 1e-4), (2048, 4096, 8e-4), (2048, 8192, 16e-4))
    ]
    fitted = rt.calibrate(steps, "l4", execution="eager", trust_targets=True)
    checked = rt.validate(steps, "l4", execution="eager", knobs=fitted.knobs, trust_targets=True)
    return {"Calibration": fitted, "Validation": checked}


def test_a_bare_result_is_one_short_line(results: dict[str, object]) -> None:
    for name, result in results.items():
        line = repr(result)
        assert line.startswith(f"{name}(") and line.endswith(")")
        assert "\n" not in line and len(line) <= 260, name
    for name in ("Estimate", "Report", "Diff"):
        assert re.search(r"expected \d", repr(results[name]))
    bound = rt.estimate(results["OpGraph"], "l4", rt.tools.execution_model("eager", knobs=None))
    assert "bound" in repr(bound) and "expected" not in repr(bound)


@pytest.mark.parametrize(
    "name",
    ["OpGraph", "Estimate", "Report", "Diff", "Summary", "Breakdown", "Calibration", "Validation"],
)
def test_a_notebook_shows_a_table_and_one_figure(results: dict[str, object], name: str) -> None:
    html = results[name]._repr_html_()
    page = Page(html)
    check(page)
    assert len(html) < 200_000
    assert len(page.images) == 1
    assert any(tag == "table" for tag, _ in page.tags)
    for word in re.findall(r"[a-z]{4,}", str(results[name]))[:20] if name != "OpGraph" else ():
        assert word in page.text  # what print() says stands there too


def test_names_that_would_act_are_text() -> None:
    for name in NAMES:
        table = Table(columns=[Column(name, units.TEXT, name)], rows=[{name: name}], group=str)
        note = Note(name, label=name)
        html = as_cell(View((Section(parts=[table, note]),)))
        bars = [Bar(name, name, {name: 1.0, "x": 2.0}, name)]
        points = [ParityPoint(name, 1.0, 2.0, name, 1.0)]
        for figure in ("", image(bar_svg(name, bars), name), image(point_svg(name, points), name)):
            page = Page(html + figure)
            check(page)
            assert page.text.count(visible(name)) >= 2


def test_a_module_with_hostile_names_shows_them_as_text() -> None:
    stack = nn.Sequential()
    names = [name for name in NAMES if name and "." not in name and name not in vars(nn.Module)]
    for name in names[:12]:
        stack.add_module(name, type(name, (nn.Linear,), {})(8, 8))
    graph = rt.trace(stack, X)
    for result in (graph, rt.estimate(graph, "l4"), rt.summary(graph), rt.report(graph)):
        page = Page(result._repr_html_())
        check(page)
        assert "\n" not in repr(result)
    assert "<script>" in Page(graph._repr_html_()).text


def test_a_long_table_is_cut_and_says_so() -> None:
    table = Table(columns=[Column("n", units.COUNT, "n")], rows=[{"n": n} for n in range(500)])
    page = Page(as_cell(View((Section(parts=[table]),))))
    assert sum(tag == "tr" for tag, _ in page.tags) == 1 + 40  # the head and the rows
    assert page.text.endswith("460 more rows")


def test_points_of_a_large_validation_are_those_that_matter() -> None:
    points = [ParityPoint("x", 1e-6 * n, 1e-6 * n, "g", float(n)) for n in range(1, 5001)]
    html = image(point_svg("title", points), "title")
    assert len(html) < 200_000
    (svg,) = Page(html).images
    assert sum(part.tag.endswith("circle") for part in svg.iter()) == 600


def test_print_is_text_in_jupyter_too(
    results: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich.console

    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    assert str(results["Estimate"]).startswith("Stack, ")
