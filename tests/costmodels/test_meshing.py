"""Meshes of a number of chips, and rows of them beside each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rooftrace.hardware.chip import Fact
from rooftrace.studies.solving import MeshAnswer, MeshRow, ScalingAnswer, TrainingRun, meshes_of
from rooftrace.studies.solving.meshes import STORAGE, goodput

pytestmark = pytest.mark.quick

ROW = MeshRow(
    mesh={"dp": 2},
    chips=2,
    checkpoint="none",
    batch=3,
    microbatches=1,
    global_batch=6,
    item="token",
    items=600,
    seconds=0.5,
    once=0.1,
    mfu=0.4,
    exposed=0.1,
    bubble=None,
    limited_by="compute",
    peak=30,
    fixed=20,
    saved=16,
    capacity=40.0,
    price=3.6,
    beyond="",
)


@given(st.integers(1, 256))
def test_meshes_are_all_ways_to_divide_the_chips(chips: int) -> None:
    meshes = [{"dp": 1, "tp": 1, **mesh} for mesh in meshes_of(chips, ("dp", "tp"), {})]
    assert [(m["dp"], m["tp"]) for m in meshes] == [
        (n, chips // n) for n in range(1, chips + 1) if chips % n == 0
    ]


@given(st.integers(1, 64), st.integers(1, 8))
def test_an_axis_has_its_largest_size(chips: int, most: int) -> None:
    meshes = list(meshes_of(chips, ("pp", "dp", "tp"), {"tp": most}))
    assert all(math.prod(mesh.values()) == chips for mesh in meshes)
    assert max(mesh.get("tp", 1) for mesh in meshes) == max(
        n for n in range(1, most + 1) if chips % n == 0
    )


def test_a_row_says_what_a_million_items_cost() -> None:
    assert ROW.items_per_s == 1200
    assert ROW.items_per_s_per_chip == 600
    # Two chips for a million over 1,200 seconds, at 0.1 cent a second each.
    assert ROW.dollars == pytest.approx(2 * 1e6 / 1200 * 3.6 / 3600)
    assert replace(ROW, price=None).dollars is None


def answer(*rows: MeshRow) -> MeshAnswer:
    plain: Any = {"title": "", "question": "", "item": "token", "system": "", "left_out": ()}
    return MeshAnswer(rows=(), others=rows, edges=(), rests=(), **plain)


def test_how_many_chips_are_needed_by_capacity() -> None:
    large = replace(ROW, peak=100)
    assert answer(large).needed == 5
    assert answer(large, replace(large, chips=8, peak=41)).needed == 5
    assert answer(replace(large, fixed=50)).needed == 3  # smaller microbatches hold the rest
    assert answer(ROW).needed is None


def scaled(*rows: MeshRow) -> ScalingAnswer:
    return ScalingAnswer(title="", item="token", system="", rows=rows, left_out=(), rests=())


@given(st.lists(st.integers(1, 10), min_size=1, max_size=5, unique=True))
def test_a_step_that_does_not_change_scales_perfectly(powers: list[int]) -> None:
    rows = [
        replace(ROW, chips=1 << n, items=600 << n, once=0.0, mesh={"dp": 1 << n})
        for n in sorted(powers)
    ]
    result = scaled(*rows)
    assert [result.weak(row) for row in rows] == pytest.approx([1.0] * len(rows))
    assert [result.strong(row) for row in rows] == pytest.approx([1.0] * len(rows))
    assert result.strong_seconds(rows[-1]) == rows[-1].seconds


def test_what_is_done_once_a_step_is_not_repeated_with_microbatches() -> None:
    few, many = ROW, replace(ROW, chips=8, items=2400)
    result = scaled(few, many)
    assert result.microbatches(few) == 4
    assert result.strong_seconds(few) == pytest.approx(4 * 0.4 + 0.1)


def simulated(mtbf: float, save: float, interval: float, restart: float, pieces: int) -> float:
    """Goodput of a training that is walked through, from one interruption to the next."""
    chance = random.Random(0)
    clock, next_stop = 0.0, chance.expovariate(1 / mtbf)
    for _ in range(pieces):
        while next_stop < clock + interval + save:
            clock = next_stop
            next_stop = clock + chance.expovariate(1 / mtbf)
            while next_stop < clock + restart:
                clock = next_stop
                next_stop = clock + chance.expovariate(1 / mtbf)
            clock += restart
        clock += interval + save
    return pieces * interval / clock


@pytest.mark.parametrize(
    ("mtbf", "save", "interval", "restart"),
    [(100, 1, 15, 10), (100, 1, 200, 10), (100, 20, 5, 0), (100, 30, 60, 150), (1e6, 0, 1, 1)],
)
def test_goodput_is_that_of_a_simulation(
    mtbf: float, save: float, interval: float, restart: float
) -> None:
    walked = simulated(mtbf, save, interval, restart, 20_000)
    assert goodput(mtbf, save, interval, restart) == pytest.approx(walked, rel=0.03)


def test_no_other_interval_of_checkpoints_is_much_better_than_that_of_young() -> None:
    run = training()
    others = (goodput(run.mtbf, run.save, run.interval * 1.05**n, 600) for n in range(-60, 60))
    assert max(others) < run.goodput * 1.001


def test_a_training_that_cannot_go_on_has_no_goodput() -> None:
    assert goodput(1.0, 1000.0, 1000.0, 0.0) == 0.0


def training(**changed: Any) -> TrainingRun:
    """A training on 16,384 chips that takes 50 days without interruptions."""
    row = replace(ROW, chips=16384, items=864, seconds=1.0, saved=6 * 10**12)
    costs = {"price": Fact(2.0, "", "", "guess"), "power": Fact(1000.0, "", "", "guess")}
    plain: dict[str, Any] = {"title": "", "system": "", "tokens": 864 * 50 * 86400.0, "rests": ()}
    return TrainingRun(row=row, **{**plain, **costs, **changed})


def test_the_training_of_llama_3_went_on_for_more_than_90_percent_of_the_time() -> None:
    """Interruptions each 3 hours, and more than 90 % (arXiv:2407.21783, section 3.3.4)."""
    run = training()
    assert run.mtbf == pytest.approx(54 * 86400 / 419, rel=1e-4)
    assert run.save == pytest.approx(3, rel=0.01)  # 6 TB at 2 TB/s
    assert 0.9 < run.goodput < 0.95
    assert run.days == pytest.approx(50 / run.goodput)


def test_a_training_costs_its_chip_hours() -> None:
    run = training(asked={"mtbf": 1e15, "save": 1e-9, "interval": 1.0}, restart=STORAGE)
    assert run.goodput == pytest.approx(1)
    assert run.chip_hours == pytest.approx(16384 * 50 * 24)
    assert run.dollars == pytest.approx(2 * 16384 * 50 * 24)
    assert run.joules == pytest.approx(1000 * 16384 * 50 * 24 * 3600)
    assert training(price=None, power=None).dollars is None
    assert training(price=None, power=None).joules is None
