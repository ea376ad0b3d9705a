"""Intervals by where a step is: on sources that were made up, in the table, and in answers."""

from __future__ import annotations

import math
import random
import re
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.kernels.intervals import (
    LEVELS,
    Behind,
    CellSteps,
    IntervalTable,
    Residuals,
    ResidualsError,
    StepCell,
    StepErrors,
)
from rooftrace.costmodels.kernels.knobs import Knobs, dump_knobs, load_knobs
from rooftrace.measured.fit.cases import step_case
from tests.costmodels.script_support import loaded

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "accuracy"


@pytest.fixture(scope="module")
def coverage() -> Any:
    """The script that makes the table."""
    with loaded(ACCURACY / "coverage.py", "coverage_of_intervals") as module:
        yield module


# -- made-up sources -------------------------------------------------------------------------------

WORKS = ("product", "attention", "convolution")
OF_CELL, OF_SOURCE = 0.15, 0.1
ROWS = {"product": 0.05, "attention": 0.1, "convolution": 0.3}
"""Standard deviations: of means of cells, of sources in a cell, of steps in a source."""


def drawn(coverage: Any, draw: random.Random, sources: int, cells: dict[Any, float]) -> list[Any]:
    """Steps of so many sources, each in a work on a generation, of few or of many steps."""
    points = []
    for number in range(sources):
        where = draw.choice(("ampere", "hopper", "geforce")), draw.choice(WORKS)
        middle = cells.setdefault(where, draw.gauss(0, OF_CELL)) + draw.gauss(0, OF_SOURCE)
        for step in range(draw.choice((5, 20, 60))):
            off = middle + draw.gauss(0, ROWS[where[1]])
            points.append(
                coverage.Point(
                    f"model{step}",
                    1.0,
                    math.exp(off),
                    "",
                    source=f"source {number}",
                    generation=where[0],
                    work=where[1],
                    phase="forward",
                    precision="half",
                    execution="eager",
                    limit=draw.choice(("compute", "memory")),
                )
            )
    return points


def test_a_new_source_is_inside_as_often_as_the_level_says(coverage: Any) -> None:
    draw, inside, widths = random.Random(5), {work: [] for work in WORKS}, {}
    for _ in range(12):
        cells: dict[Any, float] = {}
        seen = drawn(coverage, draw, 24, cells)
        by = coverage.LeftOut(seen)
        for point in drawn(coverage, draw, 12, cells):
            low, high = by.interval(point, None)
            inside[point.work].append(low <= coverage.error(point) <= high)
            widths.setdefault(point.work, []).append(high - low)
    every = [held for work in WORKS for held in inside[work]]
    assert 0.86 <= statistics.fmean(every) <= 0.96
    for work in WORKS:  # each of them, though their steps scatter by a factor of six
        assert 0.8 <= statistics.fmean(inside[work]) <= 0.99
    assert statistics.fmean(widths["convolution"]) > 1.5 * statistics.fmean(widths["product"])


def test_more_steps_of_a_source_are_never_more_than_one_source(coverage: Any) -> None:
    def mean(copies: int) -> float:
        hierarchy = coverage.Hierarchy([*points, *far * copies])
        return float(hierarchy.mean(hierarchy.path(points[0].cell))[0])

    points = agreeing(coverage, random.Random(1), 6, 0.05)
    far = [replace(p, measured=p.measured * 2, source="far") for p in points[:3]]
    means = [mean(copies) for copies in (1, 4, 16, 64)]
    assert means == sorted(means)
    assert means[1] - means[0] > 4 * (means[3] - means[2]) > 0
    assert means[-1] < 2 * math.log(2) / 7


def agreeing(coverage: Any, draw: random.Random, sources: int, scatter: float) -> list[Any]:
    """So many sources in one cell with the same steps, beside others that scatter widely."""
    cell = dict(phase="training", generation="hopper", work="product", precision="half",
                execution="eager", limit="compute")  # fmt: skip
    steps = [math.exp(draw.gauss(0, scatter)) for _ in range(12)]
    return drawn(coverage, random.Random(11), 5, {}) + [
        coverage.Point(f"m{n}", 1.0, step, "", f"own {source}", **cell)
        for source in range(sources)
        for n, step in enumerate(steps)
    ]


@given(st.integers(0, 1000), st.integers(2, 5), st.floats(0.01, 0.05))
@settings(max_examples=8, deadline=None)
def test_sources_that_agree_narrow_a_cell_and_one_that_is_far_off_widens_it(
    coverage: Any, seed: int, sources: int, scatter: float
) -> None:
    def width(points: list[Any]) -> float:
        hierarchy = coverage.Hierarchy(points)
        return float(hierarchy.scale(hierarchy.path(points[-1].cell)))

    one, some, more = (
        agreeing(coverage, random.Random(seed), count, scatter) for count in (1, sources, 9)
    )
    assert width(one) > width(some) > width(more)
    far = [replace(p, measured=p.measured * 2) if p.source == "own 1" else p for p in some]
    assert width(far) > width(some)


def test_intervals_of_few_sources_hold_their_share_of_the_next_one(coverage: Any) -> None:
    draw, cells, points = random.Random(4), {}, []
    for phase in ("forward", "training"):
        made = drawn(coverage, draw, 6, cells)
        points += [replace(point, phase=phase, source=phase + point.source) for point in made]
    lines = coverage.few(points, draws=1).splitlines()
    found = [re.fullmatch(r"\w+ steps of (\d) sources: (\d+)% of 6 inside", x) for x in lines]
    for count in "1235":
        shares = [int(line[2]) for line in found if line and line[1] == count]
        assert len(shares) == 2 and 75 <= statistics.fmean(shares) <= 96


def test_fields_across_which_sources_are_apart_come_first(coverage: Any) -> None:
    points = drawn(coverage, random.Random(6), 40, {})
    hierarchy = coverage.Hierarchy(points)
    scatter, means = hierarchy.apart("scatter"), hierarchy.apart("mean")
    assert scatter["work"] > 2 * scatter["generation"]  # as `ROWS` has it, the same for all chips
    assert means[""] == pytest.approx(OF_SOURCE, rel=0.4)
    assert means["generation"] == pytest.approx(math.hypot(OF_SOURCE, OF_CELL), rel=0.4)


def test_sources_of_unequal_size_are_effectively_fewer(coverage: Any) -> None:
    points = drawn(coverage, random.Random(1), 1, {})[:5]
    other = [replace(point, source="other") for point in points]
    assert coverage.effective(points) == "1 (1.0)"
    assert coverage.effective([*points, *other]) == "2 (2.0)"
    assert coverage.effective([*points * 9, *other]) == "2 (1.2)"


def test_what_is_left_out_makes_nothing_of_its_interval(coverage: Any) -> None:
    points = drawn(coverage, random.Random(2), 12, {})
    source = points[0].source
    far = [replace(p, measured=p.measured * 50) if p.source == source else p for p in points]
    means = [coverage.Hierarchy(chosen).mean(
        coverage.Hierarchy(chosen).path(points[0].cell), source) for chosen in (points, far)
    ]  # fmt: skip
    assert means[0] == means[1]


def test_a_table_comes_back_from_its_file(coverage: Any, tmp_path: Path) -> None:
    points = drawn(coverage, random.Random(3), 10, {})
    path = tmp_path / "intervals.toml"
    coverage.write(points, path)
    hierarchy = coverage.Hierarchy(points)
    made, read = hierarchy.table(coverage.uses_of(points, hierarchy)), IntervalTable.load(path)
    for name in ("title", "order", "levels", "low", "high", "scatter", "hosts", "cells", "uses"):
        assert getattr(made, name) == getattr(read, name), name
    path.write_text(path.read_text().replace("scatter", "scattered"))
    with pytest.raises(ResidualsError, match=r"intervals\.toml.*unknown key 'scattered'"):
        IntervalTable.load(path)


# -- cells of the table ----------------------------------------------------------------------------

HERE = StepCell(
    generation="hopper", precision="half", phase="forward", execution="eager", work="product",
    limit="compute",
)  # fmt: skip
ORDER = ("phase", "generation", "work", "precision", "execution", "limit")
SCATTER = (0.2, 0.1, 0.05, 0.04, 0.03, 0.02)
PATH = HERE.values(ORDER)
TABLE = IntervalTable(
    title="made up", order=ORDER, levels=LEVELS, low=(-0.4, -0.8, -1.0, -1.3),
    high=(0.4, 0.8, 1.2, 1.5), scatter=SCATTER, hosts=0.5,
    cells={
        **{", ".join(PATH[:depth]): CellSteps(0.1, 0.2, 7, 900) for depth in range(7)},
        **{", ".join(("kernel", *PATH[1:4], "-", "compute")[:depth]): CellSteps(0.0, 0.4, 3, 500)
           for depth in range(1, 7)},
    },
)  # fmt: skip


def test_a_measured_cell_has_the_ends_of_its_steps() -> None:
    low, high = TABLE.errors(HERE, 0.0).within()
    assert (low, high) == pytest.approx((0.1 - 1.0 * 0.2, 0.1 + 1.2 * 0.2))
    assert TABLE.grounds(HERE).startswith("interval by 900 measured steps of 7 sources like it")


def test_a_cell_that_nobody_measured_is_wider_and_says_so() -> None:
    widths = []
    for name, value in (("limit", "memory"), ("execution", "graph"), ("precision", "fp8"),
                        ("work", "moe"), ("generation", "cdna3")):  # fmt: skip
        other = replace(HERE, **{name: value})
        low, high = TABLE.errors(other, 0.0).within()
        widths.append(high - low)
        said = TABLE.grounds(other)
        assert "extrapolated" in said and f"{getattr(HERE, name)} (here {value})" in said
    low, high = TABLE.errors(HERE, 0.0).within()
    assert [high - low, *widths] == sorted([high - low, *widths]) and widths[0] > high - low


def test_one_kernel_has_the_interval_of_kernels_and_many_that_of_steps() -> None:
    kernel, step = TABLE.errors(HERE.of_kernel, 0.0), TABLE.errors(HERE, 0.0)
    assert TABLE.errors(HERE, 1.0).within() == pytest.approx(kernel.within())
    lows = [TABLE.errors(HERE, share / 20).within()[0] for share in range(21)]
    assert lows == sorted(lows, reverse=True) and lows[0] == pytest.approx(step.within()[0])


# -- host and device -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [-0.9, -0.3, 0.0, 0.2, 0.8])
@pytest.mark.parametrize(("spread", "within"), [(0.5, 0.3), (0.0, 0.4)])
def test_a_step_scatters_as_the_longer_of_two_times_that_are_drawn(
    share: float, spread: float, within: float
) -> None:
    draw, device, host = random.Random(7), min(1.0, 1 - share), min(1.0, 1 + share)
    apart = max(math.sqrt(math.log(1 + spread**2)), within)
    drawn = [
        math.log(
            max(
                device * math.exp(draw.gauss(0.02, 0.1)),
                host * math.exp(draw.gauss(0, apart)),
            )
        )
        for _ in range(20_000)
    ]
    mean, scale = Behind(share, spread).later(0.02, 1.645 * 0.1, 1.645 * within)
    assert mean == pytest.approx(statistics.fmean(drawn), abs=0.012)
    assert scale == pytest.approx(1.645 * statistics.stdev(drawn), rel=0.03)


def test_near_the_switch_from_device_to_host_an_interval_grows_without_a_jump() -> None:
    def width(share: float, spread: float = 0.5) -> float:
        low, high = TABLE.errors(HERE, 0.0, Behind(share, spread)).within()
        return high - low

    widths = [width(step / 100) for step in range(-100, 101)]
    plain = TABLE.errors(HERE, 0.0).within()
    assert widths[0] == pytest.approx(plain[1] - plain[0])
    assert all(abs(after - before) < 0.03 for before, after in pairwise(widths))
    assert max(widths) > 3 * widths[0]
    assert width(0.8, 0.0) == pytest.approx(2.2 * TABLE.hosts, rel=1e-3)  # as within a run
    assert width(0.8, 0.1) == width(0.8, 0.0) < width(0.8, 0.5) < width(0.8, 1.0)
    on_cpu = replace(HERE, generation="cpu")
    assert TABLE.errors(on_cpu, 0.0, Behind(0.8, 0.5)).within() == pytest.approx(
        TABLE.errors(on_cpu, 0.0).within()
    )


def test_a_step_that_waits_for_a_typical_host_says_so(tmp_path: Path) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    tiny = rt.trace(net, torch.zeros(2, 8))
    typical = rt.estimate(tiny, "h200-sxm", "eager")
    own = tmp_path / "own.toml"
    own.write_text(
        'name = "own"\ntitle = "Own"\n[dispatch_eager]\nvalue = "8 us"\nkind = "measured"\n'
        'source = "a loop over tiny ops"\n'
    )
    measured = rt.estimate(tiny, "h200-sxm", "eager", host=own)
    assert typical.times.t_host == pytest.approx(typical.t_est, rel=0.05)
    assert "hosts lie 50% apart" in typical.interval_grounds
    assert "the host was measured" in measured.interval_grounds
    assert typical.t_interval is not None and measured.t_interval is not None
    own.write_text(
        own.read_text() + '[spread]\nvalue = "20 %"\nkind = "guess"\nsource = "three such hosts"\n'
    )
    named = rt.estimate(tiny, "h200-sxm", "eager", host=own)
    assert "hosts lie 20% apart" in named.interval_grounds
    wide, narrow = (ends[1] / ends[0] for ends in (typical.t_interval, measured.t_interval))
    assert wide >= narrow
    whole = rt.estimate(tiny, "h200-sxm", "efficient")
    assert whole.times.t_host < 0.5 * typical.times.t_host


def test_a_measured_step_is_a_point_that_knows_its_host(coverage: Any) -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    tiny = rt.trace(net, torch.zeros(2, 8))
    step = step_case("tiny", tiny, rt.load_chip("h200-sxm"), "eager", 1e-3)
    times = rt.estimate(tiny, "h200-sxm", "eager").times
    point = coverage.Point("tiny", 1.0, 1.0, "").of("one", step)
    late = (times.t_host - times.t_serial) / times.t_est
    assert (point.behind, point.hosts) == (pytest.approx(late), 0.5) and late > 0.5
    assert point.cell == times.cell
    kernels = coverage.Point("tiny", 1.0, 1.0, "").of("one", times.cell)
    assert kernels.behind == -1  # nothing in it waits for a host


def test_one_step_of_a_source_says_nothing_of_how_steps_scatter(coverage: Any) -> None:
    points = drawn(coverage, random.Random(8), 12, {})
    path = coverage.Hierarchy(points).path(points[0].cell)
    one = replace(points[0], source="one step", measured=points[0].predicted)
    before, after = (coverage.Hierarchy(p).scale(path) for p in (points, [*points, one]))
    assert after == pytest.approx(before, rel=0.1)


def test_steps_that_hosts_bound_say_nothing_of_kernels(coverage: Any) -> None:
    points = drawn(coverage, random.Random(9), 12, {})
    late = [replace(p, measured=p.measured * 3, behind=0.9, source="host " + p.source)
            for p in points[:40]]  # fmt: skip
    waited = [replace(p, behind=-0.5, kernels=p.predicted) for p in late]
    for point in points[::40]:
        path = coverage.Hierarchy(points).path(point.cell)
        first, *others = (coverage.Hierarchy([*points, *more]) for more in ((), late, waited))
        for then in others:  # though the median of their source is three times as far
            assert then.scale(path) == pytest.approx(first.scale(path), rel=0.02)
            assert then.mean(path)[0] == pytest.approx(first.mean(path)[0], abs=0.01)


def test_what_steps_of_a_run_wait_for_tells_hosts_within_it(coverage: Any) -> None:
    """Sources lie 0.5 apart, which the spread of their hosts says, and steps of each 0.2."""
    draw, points = random.Random(10), drawn(coverage, random.Random(9), 12, {})
    for run in range(20):
        middle = draw.gauss(0, 0.5)
        points += [
            coverage.Point(f"m{n}", 1.0, math.exp(middle + draw.gauss(0, 0.2)), "", f"run {run}",
                           phase="decode", execution="eager", behind=0.6, hosts=0.5)
            for n in range(12)
        ]  # fmt: skip
    scale = coverage.Hierarchy(points).table({}).hosts
    assert scale == pytest.approx(1.645 * 0.2, rel=0.15)
    assert coverage.Hierarchy(points[:20]).table({}).hosts > scale  # nobody measured any


def test_a_cell_is_a_text_and_back() -> None:
    for cell in (HERE, HERE.of_kernel, StepCell(), StepCell(work="mla")):
        assert StepCell.of(str(cell)) == cell
    with pytest.raises(ResidualsError, match="expected generation, precision"):
        StepCell.of("hopper")


def test_the_table_that_comes_along_has_each_cell_within_those_around_it() -> None:
    table = IntervalTable.shipped()
    assert table.levels == LEVELS and len(table.scatter) == len(table.order)
    assert set(table.uses) == {"no fit", "one factor", "fitted"}
    for name, steps in table.cells.items():
        around = table.cells[", ".join(name.split(", ")[:-1])]
        assert steps.scale > 0 and steps.sources <= around.sources and steps.steps <= around.steps
    names = [StepCell().values(table.order), *(n.split(", ") for n in table.cells)]
    whole = [words for words in names if len(words) == len(table.order)]
    assert len(whole) > 20
    words = dict(zip(table.order, whole[1], strict=True))
    cell = StepCell(**{k: w.replace("-", "") for k, w in words.items() if k != "kind"})
    assert "like it" in table.grounds(cell)


@given(
    st.sampled_from(sorted(IntervalTable.shipped().cells)),
    st.lists(st.floats(LEVELS[0], LEVELS[-1]), min_size=2, max_size=2),
    st.floats(-1.0, 0.9),
)
def test_a_higher_level_is_never_narrower_wherever_a_step_is(
    name: str, levels: list[float], share: float
) -> None:
    table = IntervalTable.shipped()
    words = dict(zip(table.order[1:], name.split(", ")[1:], strict=False))
    errors = table.errors(StepCell(**{k: w.replace("-", "") for k, w in words.items()}), 0.0,
                          Behind(share, 0.5))  # fmt: skip
    (low, high), (lower, higher) = (errors.within(level) for level in sorted(levels))
    assert lower <= low <= 0.0 <= high <= higher


# -- chances ---------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    st.floats(-0.5, 0.5),
)
def test_a_chance_rises_with_the_limit_and_is_the_inverse_of_the_ends(
    down: list[float], up: list[float], middle: float
) -> None:
    low = tuple(middle - sum(down[: number + 1]) for number in range(4))
    high = tuple(middle + sum(up[: number + 1]) for number in range(4))
    errors = StepErrors(LEVELS, low, high)
    for level, below, above in zip(LEVELS, low, high, strict=True):
        assert errors.chance(below) == pytest.approx((1 - level) / 2)
        assert errors.chance(above) == pytest.approx((1 + level) / 2)
    assert errors.chance((low[0] + high[0]) / 2) == pytest.approx(0.5)
    chances = [errors.chance(middle + step / 10) for step in range(-60, 61)]
    assert chances == sorted(chances) and 0 <= chances[0] < 0.01 and 0.99 < chances[-1] <= 1


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    return rt.trace(net, torch.zeros(4096, 512))


@pytest.mark.parametrize("chip", ["a100-sxm-80", "mi300x"])
def test_an_estimate_has_the_chance_of_each_time(graph: rt.types.OpGraph, chip: str) -> None:
    one = rt.estimate(graph, chip, "eager")
    assert one.t_interval is not None
    chances = [one.chance(one.t_bound + (one.t_est - one.t_bound) * n / 10) for n in range(40)]
    assert chances == sorted(chances)
    errors = one.times.errors(one.knobs)
    assert errors is not None
    median = one.t_est * math.exp((errors.low[0] + errors.high[0]) / 2)
    assert one.chance(median) == pytest.approx(0.5)
    assert one.chance(one.t_bound * 0.99) == 0 and one.chance(one.t_est * 100) > 0.99
    bound = rt.estimate(graph, chip, execution_model("eager", knobs="none"))
    assert bound.chance(1.0) is None and bound.interval_grounds == ""


def test_a_report_says_where_its_interval_comes_from(graph: rt.types.OpGraph) -> None:
    one = rt.estimate(graph, "mi355x", "eager")
    assert "extrapolated" in one.interval_grounds and "(here cdna4)" in one.interval_grounds
    assert "interval extrapolated from" in str(one)


# -- after a fit -----------------------------------------------------------------------------------


def test_a_fit_is_wider_for_steps_that_are_elsewhere(
    graph: rt.types.OpGraph, tmp_path: Path
) -> None:
    plain = execution_model("eager", knobs=Knobs("mine", spread=0.1))
    here = rt.estimate(graph, "l4", plain).times.cell
    ends = Residuals(LEVELS, (-0.5, -1.0, -1.5, -2.0), (0.5, 1.0, 1.5, 2.0), 0.1, 60, 30, "mine",
                     (str(here),))  # fmt: skip
    knobs = Knobs("mine", spread=0.1, use="fitted", residuals={"fitted": ends})
    (tmp_path / "mine.toml").write_text(dump_knobs(knobs))
    assert load_knobs(tmp_path / "mine.toml") == knobs

    def width(knobs: Knobs) -> tuple[float, str]:
        one = rt.estimate(graph, "l4", execution_model("eager", knobs=knobs))
        assert one.t_interval is not None
        return math.log(one.t_interval[1] / one.t_est), one.interval_grounds

    assert width(knobs) == (pytest.approx(1.5 * 0.1), "")
    before = 1.5 * 0.1
    for changes in ({"execution": "graph"}, {"limit": "network"}, {"phase": "training"}):
        other = replace(ends, cells=(str(replace(here, **changes)),))
        wide, said = width(replace(knobs, residuals={"fitted": other}))
        assert wide > before and "none of them was" in said
        both = replace(ends, cells=(*other.cells, str(here)))
        assert width(replace(knobs, residuals={"fitted": both})) == width(knobs)
        before = wide
