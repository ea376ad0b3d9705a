"""Figures on paper: real sizes, text as text, nothing cut or covered, the same bytes every time."""

import itertools
import re
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from rooftrace._formats import FIGURES
from rooftrace.errors import RequestError
from rooftrace.hardware import load_chip
from rooftrace.reporting.commands.reportfolder import Report, figures
from rooftrace.reporting.figures import printing, roofplot, style
from tests.reporting.report_support import made_report

INCHES = {"screen": 12.0, "paper": 7.2, "paper-column": 3.5}


@pytest.fixture(scope="module")
def report() -> Report:
    return made_report(chips=("h200-sxm", "b200-sxm"))


@pytest.fixture(params=["paper", "paper-column"])
def written(request, tmp_path_factory) -> tuple[str, Path]:
    """The files of a report, written once in each style, in whatever order tests run."""
    out = tmp_path_factory.getbasetemp() / f"printed-{request.param}"
    if not out.exists():
        made_report(phases=("decode",)).write(out, ("svg", "pdf", "md"), style=request.param)
    return request.param, out


def test_sizes_are_real(written: tuple[str, Path]) -> None:
    name, out = written
    for path in out.glob("*.svg"):
        root = ElementTree.parse(path).getroot()
        assert float(root.attrib["width"].removesuffix("in")) == pytest.approx(INCHES[name])
        wide, high = map(float, root.attrib["viewBox"].split()[2:])
        seen = float(root.attrib["height"].removesuffix("in")) / INCHES[name]
        assert seen == pytest.approx(high / wide, rel=1e-3)
    for path in out.glob("*.pdf"):
        box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+)", path.read_bytes())
        assert box is not None
        assert float(box[1]) / 72 == pytest.approx(INCHES[name])


def streams(pdf: bytes) -> list[bytes]:
    """The unpacked streams of a PDF."""
    found = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    unpacked = []
    for stream in found:
        try:
            unpacked.append(zlib.decompress(stream))
        except zlib.error:
            unpacked.append(stream)
    return unpacked


def test_type_of_a_paper_has_seven_to_nine_points_in_a_font_that_comes_along(written) -> None:
    _, out = written
    for path in out.glob("*.pdf"):
        pdf = path.read_bytes()
        assert b"/FontFile2" in pdf and b"/Type3" not in pdf
        (page,) = [stream for stream in streams(pdf) if b" Tf" in stream]
        scale = float(re.search(rb"([\d.]+) 0 0 [\d.]+ 0 0 cm", page)[1])
        sizes = {float(size) * scale for size in re.findall(rb"/F\S+ ([\d.]+) Tf", page)}
        assert sizes and min(sizes) > 6.99 and max(sizes) < 9.01, path.name


def test_text_of_an_svg_is_text(written: tuple[str, Path]) -> None:
    _, out = written
    for path in out.glob("*.svg"):
        texts = ["".join(node.itertext()) for node in ElementTree.parse(path).iter()
                 if node.tag.endswith("}text")]  # fmt: skip
        phases = ("prefill", "decode", "training")
        assert any(name in text.lower() for text in texts for name in phases), path.name
        assert any("8 x" in text for text in texts), path.name  # the workload


def test_a_page_shows_svg_where_there_is_no_png(written: tuple[str, Path]) -> None:
    _, out = written
    assert "](roofline.svg)" in (out / "report.md").read_text()


@pytest.mark.parametrize("ending", FIGURES)
def test_files_are_the_same_every_time(ending: str, tmp_path: Path) -> None:
    report = made_report("tiny", phases=("forward",))
    for name in ("a", "b"):
        for which, draw in itertools.islice(figures(report, printing.MEDIA["paper"]), 2):
            path = tmp_path / name / f"{which}.{ending}"
            printing.save(draw, path, medium=printing.MEDIA["paper"])
    for path in (tmp_path / "a").iterdir():
        again = (tmp_path / "b" / path.name).read_bytes()
        assert path.read_bytes() == again
        assert b"Date" not in again and b"<dc:date" not in again


def texts_of(figure: Figure) -> list[tuple[str, object]]:
    figure.canvas.draw()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    return [(text.get_text(), text.get_window_extent()) for text in shown]


@pytest.mark.parametrize("name", list(INCHES))
def test_no_text_is_cut_or_covers_another(report: Report, name: str) -> None:
    for which, draw in figures(report, printing.MEDIA[name]):
        figure = draw()
        texts = texts_of(figure)
        for text, box in texts:
            assert box.x0 >= -1 and box.y0 >= -1, (which, text)
            assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, (which, text)
        for (one, a), (other, b) in itertools.combinations(texts, 2):
            wide = min(a.x1, b.x1) - max(a.x0, b.x0)
            high = min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(wide, high) < 3, (which, one, other)  # pixels


def test_points_in_one_place_are_all_seen() -> None:
    chip = load_chip("h200-sxm")
    tones = ("#ff0000", "#00aa00", "#0000ff", "#aa00aa")
    points = [
        roofplot.Point(10.0, 1e12, f"p{i}", tone, filled=i != 1) for i, tone in enumerate(tones)
    ]
    roofs = [roofplot.Roof(chip, (("matrix bf16", 9e14),), style.INK)]
    figure = roofplot.draw(roofs, points, roofplot.Words("t"))
    for text in figure.texts:
        text.set_visible(False)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    for tone in tones:
        rgb = np.array([round(255 * part) for part in to_rgb(tone)])
        assert (abs(pixels - rgb).max(axis=2) < 30).sum() > 60, tone


def test_a_limit_has_one_tone_and_nothing_else_has_it() -> None:
    limits = {"compute": printing.GREEN, "HBM": printing.BLUE, "launch": printing.ORANGE}
    assert style.colours([*limits, "conv1", "attention"]) == limits | {
        "conv1": style.MANY[0],
        "attention": printing.FAMILIES["attention"],
    }
    assert not {*printing.LIMITS.values()} & {*style.MANY, *style.CHIPS}


def test_tones_are_told_apart_across_meanings() -> None:
    tones = [*printing.LIMITS.values(), *printing.PHASES.values()]
    every = [*tones, *printing.FAMILIES.values(), *printing.KINDS.values()]
    assert len({tone.lower() for tone in every}) == len(every)
    for one, other in itertools.combinations(tones, 2):
        assert np.linalg.norm(np.subtract(to_rgb(one), to_rgb(other))) > 0.2, (one, other)


@pytest.mark.parametrize(
    ("low", "high", "named"),
    [
        (0.05, 2e4, ["0.1", "1", "10", "100", "1,000", "10,000"]),
        (2e6, 3e9, ["$10^{7}$", "$10^{8}$", "$10^{9}$"]),
        (15.0, 90.0, ["20", "50"]),
    ],
)
def test_decades_are_named_once(low: float, high: float, named: list[str]) -> None:
    figure = style.sheet(5.0, "t")
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    style.log_ticks(axes.xaxis)
    assert [label.get_text() for label in axes.get_xticklabels()] == named
    assert [
        label.get_text() for label in axes.get_xticklabels(minor=True) if label.get_text()
    ] == []


def test_wrong_names_end_in_one_line(report: Report, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"style 'papr': expected one of .*paper"):
        report.write(tmp_path, ("svg",), style="papr")
    with pytest.raises(RequestError, match=r"a\.jpg: a figure is written as png, svg, pdf"):
        printing.save(lambda: style.sheet(2.0, "t"), tmp_path / "a.jpg")
