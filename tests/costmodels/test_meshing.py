"""Meshes of a number of chips, and rows of them beside each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rooftrace.studies.solving import MeshAnswer, MeshRow, ScalingAnswer, meshes_of

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
