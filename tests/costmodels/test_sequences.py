"""Sequences of one attention kernel: pairs against a loop, and what stands for many lengths."""

from __future__ import annotations

import math
import random

import pytest

from rooftrace.costmodels.rules.attention import Band, Packed, together

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("seed", range(40))
def test_a_band_shows_what_a_loop_counts(seed: int) -> None:
    draw = random.Random(seed)
    n, m = draw.randint(0, 9), draw.randint(0, 9)
    behind, ahead = (draw.choice([None, 0, 1, 3, 20]) for _ in range(2))
    corner = draw.random() < 0.5
    band, shift = Band(behind, ahead, corner), m - n if corner else 0
    shown = [
        (i, j)
        for i in range(n)
        for j in range(m)
        if (behind is None or j >= i + shift - behind) and (ahead is None or j <= i + shift + ahead)
    ]
    assert band.pairs(n, m) == len(shown)
    if n and len(shown) and not (n > m + 20):
        assert band.seen(n, m) >= len({j for _, j in shown})


def test_two_lengths_stand_for_themselves() -> None:
    kinds = [Packed(63, 64, 64, 2080), Packed(2, 4096, 4096, 8390656)]
    fields = together(kinds)
    assert fields["long"] == pytest.approx(2) and fields["long_queries"] == 4096
    assert fields["batch"] * fields["visible"] == pytest.approx(63 * 2080 + 2 * 8390656)


def test_many_lengths_keep_their_totals_and_the_longest() -> None:
    draw = random.Random(7)
    lengths = [round(math.exp(draw.gauss(5, 1))) + 1 for _ in range(200)]
    kinds = [Packed(1, n, n, n * n) for n in lengths]
    fields = together(kinds)
    rest = fields["batch"] - fields["long"]
    for name, power in (("queries", 1), ("visible", 2)):
        others = (fields["batch"] * fields[name] - fields["long"] * fields[f"long_{name}"]) / rest
        assert min(lengths) ** power <= others < max(lengths) ** power
    shorter = (fields["batch"] * fields["queries"] - fields["long"] * max(lengths)) / rest
    pairs = rest * shorter**2 + fields["long"] * max(lengths) ** 2
    assert pairs == pytest.approx(sum(n * n for n in lengths))  # mean and variance are kept


def test_equal_lengths_are_a_plain_kernel() -> None:
    assert together([Packed(4, 8, 16, 100)]) == {
        "batch": 4, "queries": 8, "keys": 16, "visible": 100
    }  # fmt: skip
