"""Which figures a report has, and the names of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rooftrace._escapes import file_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rooftrace.reporting.sections import Results


def figures(report: Results) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """(file name, how to draw it) in the order of the report."""
    from rooftrace.reporting.figures import breakdown, memoryplot, roofline

    yield "roofline.png", lambda: roofline.roofline(report)
    for phase in report.phases:
        draw = partial(roofline.family_roofline, report, phase)
        yield f"roofline-{file_part(phase)}.png", draw
    yield "time.png", lambda: breakdown.time_figure(report)
    yield "bytes.png", lambda: breakdown.byte_figure(report)
    if report.memory:
        yield "memory.png", lambda: breakdown.peak_figure(report)
    for phase, need in report.memory.items():
        if need.timeline.moments:
            draw = partial(memoryplot.memory_figure, report, phase)
            yield f"memory-{file_part(phase)}.png", draw


def write_figures(report: Results, folder: Path) -> list[str]:
    """Draw every figure into `folder`; the names of the files."""
    from rooftrace.reporting.figures import style

    names = []
    for name, draw in figures(report):
        style.save(draw(), folder / name)
        names.append(name)
    return names
