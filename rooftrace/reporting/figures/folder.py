"""The figures of a report, their file names, and their drawing into a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rooftrace._escapes import file_part
from rooftrace.errors import RequestError
from rooftrace.reporting.figures.printing import SCREEN, Medium, medium_of, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rooftrace.reporting.commands import rooflinesteps
    from rooftrace.reporting.sections import Results
    from rooftrace.studies.sweeps import Sweep


def figures(report: Results, medium: Medium = SCREEN) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(name of the file without its ending, function that draws it) in the order of the report."""
    from rooftrace.reporting.figures import breakdown, memoryplot, roofline

    yield "roofline", lambda: roofline.roofline(report, medium)
    for phase in report.phases:
        draw = partial(roofline.family_roofline, report, phase, medium)
        yield f"roofline-{file_part(phase)}", draw
    yield "time", lambda: breakdown.time_figure(report, medium)
    yield "bytes", lambda: breakdown.byte_figure(report, medium)
    if report.memory:
        yield "memory", lambda: breakdown.peak_figure(report, medium)
    for phase, need in report.memory.items():
        if need.timeline.moments:
            draw = partial(memoryplot.memory_figure, report, phase, medium)
            yield f"memory-{file_part(phase)}", draw


def write_figures(
    report: Results, folder: Path, endings: Sequence[str] = ("png",), style: str = "screen"
) -> list[str]:
    """Draw every figure into `folder`, in each of these formats; the names of the files.

    style: one of `printing.MEDIA`.
    """
    medium = medium_of(style)
    names: list[str] = []
    for name, draw in figures(report, medium):
        files = [f"{name}.{ending}" for ending in endings]
        save(draw, *(folder / file for file in files), medium=medium)
        names += files
    return names


def draw_roofline(result: rooflinesteps.Rooflines, path: Path, style: str = "screen") -> None:
    """Draw steps of several models on one roofline, in the format that the file ends in.

    Raises RequestError for another ending or style.
    """
    from rooftrace.reporting.figures.roofline import roofline_figure

    medium = medium_of(style)
    save(lambda: roofline_figure(result, medium), path, medium=medium)


def draw_sweep(result: Sweep, path: Path, size: str | None = None) -> None:
    """Draw the seconds of a sweep over a size; default: its first."""
    from rooftrace.reporting.figures.sweepplot import sweep_plot

    save(lambda: sweep_plot(result, size), path)


def draw_answer(answer: object, path: Path) -> None:
    """Draw an answer about deployments or about scaling.  Raises RequestError for other answers."""
    from rooftrace.reporting.figures.sweepplot import front_plot, scaling_plot
    from rooftrace.studies.solving import ScalingAnswer
    from rooftrace.studies.solving.serving import ServingAnswer

    if isinstance(answer, ScalingAnswer):
        save(partial(scaling_plot, answer), path)
    elif isinstance(answer, ServingAnswer) and answer.curves:
        save(partial(front_plot, answer), path)
    else:
        raise RequestError(
            f"{path}: only batches of decode steps have a figure, as find='cheapest' asks for them"
        )
