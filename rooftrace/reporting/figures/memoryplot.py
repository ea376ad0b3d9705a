"""Memory over a step: bytes alive by role, as op after op runs, with the peak and the capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.memory import Moment
from rooftrace.hardware.units import format_capacity
from rooftrace.reporting.figures import style
from rooftrace.reporting.view import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.costmodels.memory import Memory
    from rooftrace.reporting.sections import Results

MOMENTS = 1200  # about as many as the figure has pixels for
HEIGHT, TOP, BOTTOM = 5.2, 1.15, 0.62  # inches: the sheet, above and below the axes
LEFT, SPAN = 0.085, 0.895  # of the page
ROOMY = 0.07  # of the step: a part that its name fits above
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
NAMES = {"saved": "saved for backward", "kv": "KV"}
ORDER = (
    "weights",
    "optimizer",
    "kv",
    "gradients",
    "constants",
    "saved",
    "activations",
    "temporary",
    "optimizer temporaries",
)
"""From the bottom up: what stays first, what comes and goes last."""


def memory_figure(report: Results, phase: str) -> Figure:
    """Bytes alive by role over the ops of a phase."""
    need, chip = report.memory[phase], report.chips[0]
    name = report.model.get("name") or "model"
    fits = "fits" if need.fits(chip) else f"needs {words.plural(need.chips_needed(chip), 'chip')}"
    figure = style.sheet(
        HEIGHT,
        f"Memory over a step of {phase}: {name}",
        f"peak {format_capacity(need.peak)}; one {chip.title} holds "
        f"{format_capacity(chip.memory_capacity.value)}: {fits}",
    )
    axes = figure.add_axes((LEFT, BOTTOM / HEIGHT, SPAN, 1 - (TOP + BOTTOM) / HEIGHT))
    moments = need.timeline.coarse(MOMENTS).moments
    _areas(axes, moments)
    _frame(axes, need, moments, float(chip.memory_capacity.value))
    _parts(axes, need)
    _peak(axes, need, moments)
    return figure


def _areas(axes: Axes, moments: Sequence[Moment]) -> None:
    """One area above the other; kinds of which there never is any are left out."""
    times = [moment.time for moment in moments]
    if len(times) == 1:
        times, moments = [times[0], times[0] + 1], [*moments, *moments]
    sizes = [moment.by_kind for moment in moments]
    columns = {kind: [size[kind] for size in sizes] for kind in ORDER}
    shown = [kind for kind in ORDER if any(columns[kind])]
    areas = axes.stackplot(
        times,
        [columns[kind] for kind in shown],
        colors=[style.KINDS[kind] for kind in shown],
        labels=[NAMES.get(kind, kind) for kind in shown],
        linewidth=0,
    )
    style.row_legend(axes, areas, (-0.006, 1.075), 0.0)


def _frame(axes: Axes, need: Memory, moments: Sequence[Moment], capacity: float) -> None:
    """Limits and ticks; the capacity as a line where it is near enough not to squeeze the rest."""
    near = capacity <= 2 * need.peak
    top = 1.12 * max(need.peak, capacity if near else 0.0)
    axes.set_xlim(0, max(1, moments[-1].time))
    axes.set_ylim(0, top)
    style.plain_axes(axes)
    axes.yaxis.grid(True, color=style.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    step = _nice(top / 5)
    axes.set_yticks([step * i for i in range(int(top / step) + 1)])
    axes.yaxis.set_major_formatter(lambda size, _: format_capacity(size) if size else "0")
    axes.xaxis.set_major_formatter(lambda time, _: f"{time:,.0f}")
    axes.set_xlabel("ops run", fontsize=10, color=style.FAINT)
    if near:
        axes.axhline(capacity, color="white", linewidth=3.6)  # stands out from any area
        axes.axhline(capacity, color=style.INK, linewidth=1.6, linestyle=(0, (5, 3)))
        left = _fullest(moments).time > 0.5 * moments[-1].time
        axes.annotate(
            "capacity of one chip",
            (0 if left else 1, capacity),
            xycoords=("axes fraction", "data"),
            xytext=(6 if left else -6, 5),
            textcoords="offset points",
            fontsize=9,
            ha="left" if left else "right",
            color=style.INK,
            bbox={**PAPER, "alpha": 0.85},
        )


def _fullest(moments: Sequence[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total)


def _nice(step: float) -> float:
    """The next larger 1, 2, 4, 8 ... times a power of 1024."""
    unit = 1.0
    while unit < step:
        unit *= 2
    return unit


def _parts(axes: Axes, need: Memory) -> None:
    """Lines between forward, backward and optimizer, and their names where there is room."""
    parts = need.timeline.parts()
    end = parts[-1][2] if parts else 0
    for name, start, stop in parts if len(parts) > 1 else []:
        if start:
            axes.axvline(start, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)))
        roomy, last = stop - start > ROOMY * end, stop == end
        if roomy or last:
            axes.annotate(
                name,
                ((start + stop) / 2 if roomy else stop, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                fontsize=10,
                ha="center" if roomy else "right",
                va="bottom",
                color=style.FAINT,
            )


def _peak(axes: Axes, need: Memory, moments: Sequence[Moment]) -> None:
    """A mark at the fullest moment, its size beside it."""
    most = _fullest(moments)
    right = most.time > 0.75 * moments[-1].time
    axes.plot([most.time], [most.total], marker="v", color=style.INK, markersize=8, clip_on=False)
    axes.annotate(
        f"peak {format_capacity(need.peak)}",
        (most.time, most.total),
        xytext=(-9 if right else 9, 3),
        textcoords="offset points",
        fontsize=10,
        fontweight="bold",
        ha="right" if right else "left",
        va="bottom",
        color=style.INK,
        bbox=PAPER,
    )
