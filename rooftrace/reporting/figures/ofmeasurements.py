"""The figures that a notebook shows of results about measured time."""

from __future__ import annotations

from typing import Any

from rooftrace.measured.fit import Calibration
from rooftrace.measured.validate import Validation
from rooftrace.reporting.figures.breakdown import Bar
from rooftrace.reporting.figures.inline import bar_svg, image, point_svg
from rooftrace.reporting.figures.parity import parity_points


def figure_of_measured(result: Any) -> str:
    """The HTML of the figure of a Validation or a Calibration; "" for another type."""
    if isinstance(result, Validation):
        return of_validation(result)
    return of_calibration(result) if isinstance(result, Calibration) else ""


def of_validation(result: Validation) -> str:
    """A point for each step or kernel: predicted over measured seconds."""
    points, _ = parity_points(result)
    title = "predicted and measured seconds"
    return image(point_svg(title, points), title) if points else ""


def of_calibration(result: Calibration) -> str:
    """The mean error of predictions without knobs, with them, and on what a fit had not seen."""
    errors = {"without knobs": result.before, "fitted": result.fit.errors}
    if result.fit.left_out is not None:
        errors["left out"] = result.fit.left_out
    bars = [
        Bar("", name, {"mean error": each.mean}, f"{each.mean:.1%} of {each.count}")
        for name, each in errors.items()
    ]
    title = "mean error of predicted times"
    return image(bar_svg(title, bars), title)
