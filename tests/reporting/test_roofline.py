"""Rooflines and bars: no point above its roof, no label over another."""

import itertools
import math
import random

import numpy as np
import pytest

from rooftrace.reporting.commands.reportfolder import figures
from rooftrace.reporting.figures import breakdown, roofline, style
from rooftrace.reporting.figures.printing import SCREEN
from rooftrace.reporting.figures.style import Box, Label
from tests.conftest import mostly_heavy
from tests.reporting.report_support import made_report

REPORTS = {
    "experts": lambda: made_report(chips=("h200-sxm", "b200-sxm")),
    "one chip": lambda: made_report(),
    "tiny": lambda: made_report("tiny", phases=("forward",)),
    "one point": lambda: made_report("tiny", phases=("forward",), executions=("naive",)),
    "many executions": lambda: made_report(
        executions=("naive", "eager", "compiled", "efficient", "seed-naive")
    ),
}


@pytest.fixture(params=list(REPORTS))
def report(request):
    return REPORTS[request.param]()


def test_no_point_is_above_its_roof(report):
    by_chip = {roof.chip.name: roof for roof in roofline.roofs(report)}
    for phase in report.phases:
        for execution in report.executions:
            for name, one in report.estimates[phase][execution].items():
                rate = one.flops_causal / one.t_est
                assert rate <= by_chip[name].at(one.ai_hbm) * (1 + 1e-9), (phase, execution, name)


def test_no_family_is_above_the_first_roof(report):
    first = roofline.roofs(report)[0]
    for phase in report.phases:
        for point in roofline.family_points(report, phase)[0]:
            assert point.y <= first.at(point.x) * (1 + 1e-9), point.label


def drawn(report, monkeypatch):
    """Boxes of all labels of every roofline, with the boxes of the points, as drawn."""
    seen, place = [], style.place

    def spy(wanted, frame, **others):
        boxes = place(wanted, frame, **others)
        seen.append((boxes, others["points"], frame))
        return boxes

    monkeypatch.setattr(style, "place", spy)
    for name, draw in figures(report, SCREEN):
        if name.startswith("roofline"):
            draw()
    return seen


def overlap(one: Box, other: Box) -> bool:
    return all(min(one[2:][i], other[2:][i]) > max(one[i], other[i]) for i in range(2))


def test_labels_do_not_overlap_and_stay_inside(report, monkeypatch):
    for boxes, points, frame in drawn(report, monkeypatch):
        for one, other in itertools.combinations(boxes, 2):
            assert not overlap(one, other)
        for box in boxes:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1
            assert frame.y0 <= box.y0 and box.y1 <= frame.y1
            assert not any(overlap(box, point) for point in points)


def test_families_that_compute_nothing_are_named_instead(monkeypatch):
    points, idle = roofline.family_points(made_report(phases=("prefill",)), "prefill")
    assert not any("embedding" in point.label for point in points)
    assert idle == "" or "embedding" in idle


def test_roofs_hold_the_rates_that_are_used_and_the_vector_rate():
    (roof,) = roofline.roofs(made_report())
    assert [name for name, _ in roof.ceilings] == ["matrix fp8", "vector fp32"]
    assert roof.at(1e9) == roof.top
    assert roof.at(1.0) == roof.bandwidth


def test_small_marks_of_log_axes_look_as_ticks_of_matplotlib_do():
    from matplotlib import ticker

    pixels = []
    for with_ticks in (False, True):
        sheet = style.sheet(3.0, "")
        axes = sheet.add_axes((0.1, 0.2, 0.8, 0.7))
        style.log_axes(axes, (3, 2e3), (0.7, 400))
        for axis in (axes.xaxis, axes.yaxis):
            style.log_ticks(axis)
            if with_ticks:
                steps = [k * 10.0**n for n in range(-1, 4) for k in range(2, 10)]
                own = axis.get_major_locator()()
                axis.set_minor_locator(ticker.FixedLocator([v for v in steps if v not in own]))
        axes.tick_params(which="minor", length=2.5, width=0.6, color=style.GREY)
        for marks in axes.lines if with_ticks else ():
            marks.set_visible(False)
        sheet.canvas.draw()
        pixels.append(bytes(sheet.canvas.buffer_rgba()))
        assert with_ticks or len(axes.lines) == 2
    assert pixels[0] == pixels[1]


def test_place_is_deterministic_and_keeps_labels_apart():
    chance = random.Random(7)
    frame = Box(0, 0, 1600, 900)
    wanted = [Label(chance.uniform(700, 900), chance.uniform(400, 500), 180, 40) for _ in range(20)]
    boxes = style.place(wanted, frame)
    assert boxes == style.place(wanted, frame)
    assert not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))


def way(label: Label, box: Box) -> list[tuple[float, float]]:
    """Spots of the straight line from a point to its label, without its ends."""
    x, y = box.nearest(label.x, label.y)
    parts = [i / 100 for i in range(2, 99)]
    return [(label.x + (x - label.x) * part, label.y + (y - label.y) * part) for part in parts]


@pytest.mark.parametrize("seed", [2, 3])  # the order of the points leaves a crossing there
def test_no_leader_crosses_a_label_where_another_order_of_places_avoids_it(seed):
    chance = random.Random(seed)
    wanted = [Label(chance.uniform(400, 460), chance.uniform(280, 320), 150, 36) for _ in range(8)]
    marks = [Box.around(label.x, label.y, 20, 20) for label in wanted]
    boxes = style.place(wanted, Box(0, 0, 900, 600), points=marks)
    for label, own in zip(wanted, boxes, strict=True):
        assert not any(box.contains(*s) for s in way(label, own) for box in boxes if box is not own)


@pytest.mark.parametrize("seed", range(4))
def test_no_two_leaders_cross_among_many_labels(seed):
    chance = random.Random(seed)
    wanted = [Label(chance.uniform(500, 640), chance.uniform(330, 430), 110, 30) for _ in range(18)]
    marks = [Box.around(label.x, label.y, 16, 16) for label in wanted]
    boxes = style.place(wanted, Box(0, 0, 1200, 800), points=marks)
    for one, other in itertools.combinations(map(way, wanted, boxes), 2):
        (a, b), (c, d) = (np.array([w[0], w[-1]]) for w in (one, other))
        if abs(np.linalg.det([b - a, c - d])) > 1e-9:  # they meet at a + t (b - a) = c + s (d - c)
            meeting = np.linalg.solve(np.array([b - a, c - d]).T, c - a)
            assert not all(0 < part < 1 for part in meeting)


def test_no_leader_crosses_a_line_where_a_place_a_little_farther_avoids_it():
    line = [(x, 216.0) for x in range(0, 600, 8)]
    mark = Box(140, 100, 260, 185)
    (box,) = style.place([Label(200, 200, 60, 20)], Box(0, 0, 600, 600), taken=[mark], line=line)
    assert box.y1 < 216


def test_place_keeps_a_lone_label_next_to_its_point():
    (box,) = style.place([Label(100, 100, 50, 10)], Box(0, 0, 500, 500))
    x, y = box.nearest(100, 100)
    assert math.hypot(x - 100, y - 100) <= style.REACHES[0]
    assert box.x0 > 100


def test_a_sliding_label_stays_on_its_line():
    (box,) = style.place(
        [Label(400, 100, 80, 10, slide=300)], Box(0, 0, 500, 500), points=[Box(330, 90, 400, 120)]
    )
    assert box.x1 <= 330
    assert min(abs(box.y0 - 100), abs(box.y1 - 100)) <= 24


# -- bars -------------------------------------------------------------------------------------


def test_bars_are_as_long_as_the_totals(report):
    for bars, total in ((breakdown.byte_bars(report), "bytes_hbm"),
                        (breakdown.family_bars(report), "t_est"),
                        (breakdown.regime_bars(report), "t_est")):  # fmt: skip
        for bar, (phase, execution, one) in zip(bars, report.of_first_chip(), strict=True):
            assert (bar.group, bar.name) == (phase, execution)
            assert bar.length == pytest.approx(getattr(one, total))


def test_memory_bars_are_as_long_as_the_peak():
    report = made_report()
    for bar, need in zip(breakdown.memory_bars(report), report.memory.values(), strict=True):
        assert bar.length == need.peak


@pytest.mark.parametrize("report", mostly_heavy(REPORTS, ["experts", "one point"]), indirect=True)
def test_every_figure_is_drawn_1800_wide(report, tmp_path):
    for name, draw in figures(report, SCREEN):
        style.save(draw, tmp_path / f"{name}.png")
        header = (tmp_path / f"{name}.png").read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(header[16:20], "big") == 1800


def test_every_role_and_regime_has_a_colour():
    from rooftrace.costmodels.timing.timings import REGIMES
    from rooftrace.graph.records import ROLES

    assert set(style.ROLES) == set(ROLES)
    assert set(style.REGIMES) == set(REGIMES)
    assert len(set(style.colours(map(str, range(8))).values())) == 8
