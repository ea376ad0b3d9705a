"""Intervals by residuals of left-out steps: how often they hold a step drawn like the others."""

import math
import random
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given, strategies as st

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.kernels.intervals import (
    LEVELS,
    Residuals,
    ResidualsError,
    normal_ends,
)
from rooftrace.costmodels.kernels.knobs import Knobs, KnobsError, dump_knobs, load_knobs
from rooftrace.studies.sweeps.evaluating import SECONDS


def skewed(draw: random.Random) -> float:
    """Most steps are a little fast, some far too slow: as measured ones are."""
    return draw.gauss(-0.3, 0.5) if draw.random() < 0.85 else draw.expovariate(0.7)


def covered(draws: int, families: int, members: int) -> dict[float, float]:
    """The share of new steps inside of ends made from others, each draw with its own, by level."""
    draw, inside = random.Random(families), dict.fromkeys(LEVELS, 0)
    for _ in range(draws):
        shift = [draw.gauss(0, 0.6) for _ in range(families)]
        values = [s + skewed(draw) for s in shift for _ in range(members)]
        names = [f"f{i}" for i in range(families) for _ in range(members)]
        found = Residuals.of_steps(values, names)
        new = draw.gauss(0, 0.6) + skewed(draw)
        for level in LEVELS:
            low, high = found.ends(level)
            inside[level] += low <= new <= high
    return {level: count / draws for level, count in inside.items()}


@pytest.mark.parametrize(("families", "members"), [(40, 1), (40, 3), (90, 1)])
def test_ends_hold_their_share_of_new_families_whatever_the_distribution(
    families: int, members: int
) -> None:
    draws = 1000
    found = covered(draws, families, members)
    for level in (0.8, 0.9, 0.95):
        off = 4 * math.sqrt(level * (1 - level) / draws)  # binomial
        assert level - off <= found[level]
        # Each side may be one family too wide.
        assert found[level] <= level + 2 / families + off


def test_ends_by_the_steps_alone_would_not_hold_their_share_of_new_families() -> None:
    """The oracle of the weights: many members of few families hold far less than they say."""
    draw, inside, draws = random.Random(3), 0, 300
    for _ in range(draws):
        values = [
            s + draw.gauss(0, 0.05)
            for s in (draw.gauss(0, 1) for _ in range(10))
            for _ in range(30)
        ]
        apart = [str(number) for number in range(len(values))]
        low, high = Residuals.of_steps(values, apart).ends()
        inside += low <= draw.gauss(0, 1) <= high
    assert inside / draws < 0.85
    assert covered(200, 10, 30)[0.9] > 0.84


@pytest.mark.parametrize("families", [1, 3, 6, 9])
def test_few_families_are_made_wider(families: int) -> None:
    draw, inside, draws = random.Random(7), 0, 1200
    for _ in range(draws):
        values = [draw.gauss(0, 1) for _ in range(families)]
        ends = Residuals.of_steps(values, [str(v) for v in values])
        assert ends.few is (families < 10)
        inside += ends.ends()[0] <= draw.gauss(0, 1) <= ends.ends()[1]
    assert 0.88 <= inside / draws <= 0.97


def test_without_families_the_usual_spread_is_all_there_is() -> None:
    low, high = Residuals.of_steps([], [], usual=2.0).ends()
    # Student's t with 4 degrees of freedom has its 95 % point at 2.132 (tables).
    assert high == pytest.approx(2.132 * 2.0 * math.sqrt(1 + 1 / 4), rel=2e-3) and low == -high


def test_many_residuals_of_a_normal_distribution_have_its_ends() -> None:
    n = 4000
    values = [NormalDist(0.2, 1.5).inv_cdf((i + 0.5) / n) for i in range(n)]
    low, high = Residuals.of_steps(values, [str(i) for i in range(n)]).ends()
    assert low == pytest.approx(0.2 - 1.6449 * 1.5, abs=0.01)
    assert high == pytest.approx(0.2 + 1.6449 * 1.5, abs=0.01)
    assert normal_ends() == pytest.approx((-1.6449, 1.6449), abs=1e-4)


numbers = st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=60)


@given(numbers, st.integers(1, 12), st.floats(0.5, 0.95), st.floats(0.5, 0.95))
def test_a_higher_level_is_never_narrower_and_the_estimate_is_inside(
    values: list[float], families: int, one: float, other: float
) -> None:
    ends = Residuals.of_steps(values, [str(i % families) for i in range(len(values))])
    (low, high), (far_low, far_high) = ends.ends(min(one, other)), ends.ends(max(one, other))
    assert far_low <= low <= 0 <= high <= far_high


@given(numbers, st.randoms(use_true_random=False))
def test_the_order_of_residuals_does_not_matter(values: list[float], draw: random.Random) -> None:
    pairs = [(value, str(i % 25)) for i, value in enumerate(values)]
    mixed = draw.sample(pairs, len(pairs))
    made = [Residuals.of_steps(*map(list, zip(*some, strict=True))) for some in (pairs, mixed)]
    assert made[0].low == pytest.approx(made[1].low) and made[0].high == pytest.approx(made[1].high)


@given(numbers)
def test_mirrored_residuals_have_mirrored_ends(values: list[float]) -> None:
    names = [str(i) for i in range(len(values))]
    there, back = (Residuals.of_steps([s * v for v in values], names) for s in (1, -1))
    assert there.ends()[1] == pytest.approx(-back.ends()[0])


# -- in knobs, files and estimates -----------------------------------------------------------------

ENDS = Residuals(
    levels=LEVELS, low=(-0.3, -0.8, -1.0, -1.5), high=(0.6, 1.4, 2.0, 3.0),
    spread=0.2, count=90, groups=40, of="steps of a table",
)  # fmt: skip
KNOBS = Knobs("mine", pace=0.8, spread=0.2, residuals={"no fit": ENDS})


def test_a_knob_file_has_them(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(dump_knobs(KNOBS))
    assert load_knobs(path) == KNOBS
    assert load_knobs(path).residuals["no fit"].of == "steps of a table"
    fitted = replace(KNOBS, use="fitted", residuals={"fitted": ENDS})
    path.write_text(dump_knobs(fitted))
    assert load_knobs(path) == fitted and load_knobs(path).ends() == (-1.0, 2.0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("low = [-1.0, -0.5]", "low=.*expected wider ends for higher levels"),
        ("low = [-0.5, 1.0]", "low=.*expected numbers of -1000 to 0"),
        ("low = [-0.5]", "as many ends as levels"),
        ("low = [-0.5, nan]", "low="),
        ("speed = 1", "unknown key 'speed'"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, line: str, words: str) -> None:
    path = tmp_path / "bad.toml"
    low = "" if line.startswith("low") else "low = [-1.0, -2.0]\n"
    path.write_text(
        'schema = "rooftrace.knobs/1"\ntitle = "x"\n[residuals.fitted]\nlevels = [0.8, 0.9]\n'
        f"high = [1.0, 2.0]\n{low}{line}\n"
    )
    with pytest.raises(KnobsError, match=words):
        load_knobs(path)


def test_a_use_that_is_none_is_refused() -> None:
    with pytest.raises(KnobsError, match="use 'twice': expected one of no fit"):
        Knobs("x", use="twice")


@pytest.fixture(scope="module")
def graph() -> rt.types.OpGraph:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    return rt.trace(net, torch.zeros(256, 512))


def test_an_interval_is_the_estimate_times_its_ends(graph) -> None:
    one = rt.estimate(graph, "l4", execution_model("eager", knobs=KNOBS))
    low, high = one.t_interval
    assert math.log(high / one.t_est) == pytest.approx(2.0 * 0.2)
    assert math.log(low / one.t_est) == pytest.approx(-1.0 * 0.2)
    assert one.within(0.9) == one.t_interval
    narrow, wide = one.within(0.5), one.within(0.95)
    assert wide[0] < low < narrow[0] < one.t_est < narrow[1] < high < wide[1]
    for level in (0.4, 0.99, 0, 1, -1, 90, float("nan"), True):
        with pytest.raises(ResidualsError, match=r"expected a share of steps from 0\.5 to 0\.95"):
            one.within(level)


def test_no_interval_begins_below_the_bound(graph) -> None:
    wide = replace(ENDS, low=(-900.0, -900.0, -900.0, -900.0))
    knobs = replace(KNOBS, residuals={"no fit": wide})
    one = rt.estimate(graph, "l4", execution_model("eager", knobs=knobs))
    assert one.t_interval[0] == one.t_bound


def test_a_sweep_has_the_intervals_of_its_estimates() -> None:
    import torch
    from torch import nn

    model = execution_model("eager", knobs=KNOBS)
    net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 64))
    table = rt.sweep(
        net, torch.zeros(4, 512), chip="l4", execution=model, over={"batch": [8, 4096]}
    )
    frame = table.frame()
    for batch in (8, 4096):
        single = rt.estimate(rt.trace(net, torch.zeros(batch, 512)), "l4", model)
        row = frame[frame["batch"] == batch].iloc[0]
        assert (row["t_low"], row["t_high"]) == pytest.approx(single.t_interval)
    assert {"t_low", "t_high"} <= set(SECONDS)


# -- one pace for the whole step -------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["naive", "eager", "compiled", "efficient"])
@pytest.mark.parametrize("chip", ["rtx-4090", "h100-sxm"])  # L4's last cache beats its memory
def test_at_half_the_pace_all_of_a_step_takes_twice_as_long(graph, chip, execution) -> None:
    typical = rt.estimate(graph, chip, execution).knobs
    assert typical is not None
    whole, half = (
        rt.estimate(graph, chip, execution_model(execution, knobs=replace(typical, pace=pace)))
        for pace in (1.0, 0.5)
    )
    assert half.t_est == pytest.approx(2 * whole.t_est)
    for one, other in zip(half.rows, whole.rows, strict=True):
        assert one.timing.t_device == pytest.approx(2 * other.timing.t_device)
    assert half.t_bound == pytest.approx(whole.t_bound)  # the chip's peaks are what they are


def test_a_pace_of_one_is_not_written() -> None:
    assert "pace" not in dump_knobs(Knobs("x")) and "pace = 0.8" in dump_knobs(KNOBS)
    for pace in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(KnobsError, match="pace="):
            Knobs("x", pace=pace)
