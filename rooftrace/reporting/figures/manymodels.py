"""Several models, chips and sizes on one roofline: a line of points for each model and phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.hardware.units import format_time
from rooftrace.reporting.figures import style
from rooftrace.reporting.figures.printing import SCREEN, Medium
from rooftrace.reporting.figures.roofline import SHAPES, roofs_of
from rooftrace.reporting.figures.roofplot import Point, Words, draw
from rooftrace.reporting.view import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rooftrace.reporting import rooflinesteps

MODELS = ("#D55E00", "#6A3D9A", "#C2185B", "#8C6D31", "#332288", "#117733", "#661100", "#5C5C5C")
"""Tones of models: none is that of a limit."""
LEAST_CAP = 0.999  # of the roof: a limit of its own that is not below it is not shown


def roofline_figure(result: rooflinesteps.Rooflines, medium: Medium = SCREEN) -> Figure:
    """FLOP/s over FLOP/byte of every step, log-log, under the roofs of the chips.

    A line joins the sizes of one model, phase and chip.  Colours are models, or phases where there
    is one model; shapes are chips.  Short marks are the limits that are no roof of the chip: what
    the host can launch, and what the network can carry.
    """
    by_chip = {
        chip: [row.estimate for row in result.rows if row.chip == chip] for chip in result.chips
    }
    points = _points(result)
    names = ", ".join(result.models)
    shapes = [
        f"{SHAPES[style.MARKERS[i % len(style.MARKERS)]]} {chip}"
        for i, chip in enumerate(result.chips)
    ]
    subtitles = [result.conditions, ", ".join(shapes if len(shapes) > 1 else [])]
    caps = [word for word, tone in _CAPS.items() if any(tone in dict(p.caps) for p in points)]
    marks = f"Short marks are limits of a step itself: {', '.join(caps)}" if caps else ""
    idle = [row.label for row in result.rows if row.rate is None]
    if idle:
        marks += f"{'; ' if marks else ''}without a point, no FLOP: {', '.join(idle)}"
    return draw(
        roofs_of(by_chip), points, Words(f"Roofline: {names}", tuple(subtitles), marks), medium
    )


_CAPS = {
    "orange what launches allow": style.REGIMES["launch"],
    "pink what the network allows": style.REGIMES["network"],
}


def _points(result: rooflinesteps.Rooflines) -> list[Point]:
    kinds = result.models if len(result.models) > 1 else result.phases
    tones = (
        {name: MODELS[i % len(MODELS)] for i, name in enumerate(kinds)}
        if len(result.models) > 1
        else style.colours(kinds, style.PHASES)
    )
    drawn: list[Point] = []
    for line in result.lines:
        seen = [row for row in line if row.rate is not None]
        for place, row in enumerate(seen):
            assert row.rate is not None and row.intensity is not None
            kind = row.model if len(result.models) > 1 else row.phase
            marker = style.MARKERS[result.chips.index(row.chip) % len(style.MARKERS)]
            drawn.append(
                Point(
                    row.intensity, row.rate, _label(result, seen, place), tones[kind], marker,
                    size=9.0 if place in (0, len(seen) - 1) else 7.0,
                    line=f"{row.model}\n{row.phase}\n{row.chip}" if len(seen) > 1 else "",
                    caps=_caps(row),
                )
            )  # fmt: skip
    return drawn


def _caps(row: rooflinesteps.RooflineRow) -> tuple[tuple[str, float], ...]:
    """Limits of a step that lie below the roof of its chip."""
    limits = (("launch", row.launch_rate), ("network", row.network_rate))
    top = LEAST_CAP * (row.roof or 0.0)
    return tuple((style.REGIMES[name], rate) for name, rate in limits if rate and rate < top)


def _label(
    result: rooflinesteps.Rooflines, line: Sequence[rooflinesteps.RooflineRow], place: int
) -> str:
    """Of the last point its whole name, of the others the size that differs."""
    row = line[place]
    size = f"{result.over} {row.sizes[result.over]:,}" if result.over else ""
    if place < len(line) - 1:
        return size if place == 0 else ""
    parts = [
        row.model if len(result.models) > 1 else "",
        row.phase if len(result.phases) > 1 or len(result.models) == 1 else "",
        row.chip if len(result.chips) > 1 else "",
    ]
    name = " ".join(filter(None, parts))
    time = f"{words.time_word([row.estimate])} {format_time(row.estimate.t_est)}"
    share = "" if row.share is None else f", {words.percent(row.share)} of its roof"
    return f"{name} {size}\n{time}{share}" if size else f"{name}\n{time}{share}"
