"""The figure of main effects: its bars end at the means, the widest is on top."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from rooftrace.reporting.figures import style, tornado
from rooftrace.studies.sensitivity import factorial

pytestmark = pytest.mark.quick

LEVELS = {"kv": (1, 2), "top-k": ("few", "many"), "none": (0, 1), "a very long name " * 3: (1,)}
RESPONSE = [[[[1.0], [1.0]], [[5.0], [5.0]]], [[[2.0], [2.0]], [[6.0], [6.0]]]]


def bars(axes) -> list[tuple[int, float]]:
    """The row of each bar, and where its outer end is."""
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [
        (round(patch.get_y() + patch.get_height() / 2), patch.get_x() + patch.get_width())
        for patch in patches
    ]


def test_bars_reach_from_the_lowest_mean_to_the_highest_and_the_widest_is_on_top() -> None:
    result = factorial(LEVELS, RESPONSE)
    (axes,) = tornado(result.main).axes
    # Means by hand: few (1 + 1 + 2 + 2) / 4, many (5 + 5 + 6 + 6) / 4; kv 3 and 4.
    assert bars(axes) == [(0, 1.5), (0, 5.5), (1, pytest.approx(3)), (1, pytest.approx(4))]
    texts = [text.get_text() for text in axes.texts]
    assert texts[0] == "top-k"
    assert any(text.startswith("many: 5.5") for text in texts)
    assert texts.count("no effect") == 2


def test_it_is_drawn_1800_wide_and_what_it_is_called_stands_as_it_is(tmp_path: Path) -> None:
    result = factorial({"$x$": (1, 2)}, [0.1, 0.2])
    style.save(lambda: tornado(result.main, "a $title$"), tmp_path / "tornado.png")
    header = (tmp_path / "tornado.png").read_bytes()[:24]
    assert int.from_bytes(header[16:20], "big") == 1800


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_cells_are_drawn_without_an_effect(value: float, tmp_path: Path) -> None:
    figure = tornado(factorial({"a": (1, 2)}, [value, value]).main)
    (axes,) = figure.axes
    assert not bars(axes)
    texts = [text.get_text() for text in axes.texts]
    assert texts[0] == "a" and texts.count("no effect") == 1
    low, high = axes.get_xlim()
    assert low < value < high  # an axis around the one mean
    style.save(lambda: figure, tmp_path / "tornado.png")
    assert (tmp_path / "tornado.png").stat().st_size > 0


def test_no_effects_are_told() -> None:
    with pytest.raises(ValueError, match="no effects"):
        tornado(())
