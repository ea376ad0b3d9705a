"""A figure of the bytes alive over a step by role, and the captions of figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.memory import Moment
from rooftrace.hardware.units import format_capacity
from rooftrace.reporting.figures import printing, style
from rooftrace.reporting.figures.printing import SCREEN, Medium
from rooftrace.reporting.renderers import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.costmodels.memory import Memory
    from rooftrace.reporting.sections import Results


def of_report(report: Results, chips: int | None = 1) -> str:
    """All phases: "fp8; prefill 8 x 255 tokens; decode 8 x 1 token, KV 255; h200-sxm".

    chips: how many of them are drawn; None: all.
    """
    parts = [_precision(report, report.phases[0])]
    sized = {
        graph.phase: words.workload_words(graph.phase, graph.workload)
        for graph in map(report.graphs.__getitem__, report.phases)
    }
    parts += [f"{phase} {sizes}" for phase, sizes in sized.items() if sizes]
    parts.append(", ".join(chip.name for chip in report.chips[:chips]))
    return "; ".join(filter(None, parts))


def of_phase(report: Results, phase: str, execution: str | None = None) -> str:
    """One phase on the first chip: "fp8; 8 x 1 token, KV 255; efficient; h200-sxm"."""
    graph = report.graphs[phase]
    sizes = words.workload_words(graph.phase, graph.workload)
    run = execution or ""
    return "; ".join(filter(None, [_precision(report, phase), sizes, run, report.chips[0].name]))


def _precision(report: Results, phase: str) -> str:
    workload = report.graphs[phase].workload
    dtype = str(workload.get("dtype") or report.model.get("dtype") or "")
    cached = workload.get("kv_dtype")
    return f"{dtype}, KV cache {cached}" if cached and cached != dtype else dtype


# -- memory over a step ----------------------------------------------------------------------------

MOMENTS = 1200  # about as many as the figure has pixels for
BODY, TOP, BOTTOM = 3.45, 0.30, 0.62  # inches: the axes, the room above and below them
LEFT, RIGHT = 1.02, 0.24  # inches at the sides of the axes
SPIKE, LEAST_SPIKE = 0.006, 0.02  # of the step, and of the height: narrower and as high is marked
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
"""From the bottom up: lasting bytes first, short-lived ones last."""


def memory_figure(report: Results, phase: str, medium: Medium = SCREEN) -> Figure:
    """Bytes alive by role over the ops of a phase."""
    need, chip = report.memory[phase], report.chips[0]
    name = report.model.get("name") or "model"
    fits = "fits" if need.fits(chip) else f"needs {words.plural(need.chips_needed(chip), 'chip')}"
    moments = need.timeline.coarse(MOMENTS).moments
    labels = [label for _, label in _kinds(moments)]
    room = medium.width - (2 * style.MARGIN if medium.is_narrow else LEFT + style.MARGIN)
    above = printing.legend_height(labels, room) + TOP
    inches = BODY - (0.9 if medium.is_narrow else 0.0)
    figure, height = style.headed(
        medium,
        above + inches + BOTTOM,
        f"Memory over a step of {phase}: {name}",
        (
            of_phase(report, phase, report.main),
            f"peak {format_capacity(need.peak)}; one {chip.title} holds "
            f"{format_capacity(chip.memory_capacity.value)}: {fits}; keys: the most of each",
        ),
    )
    axes = figure.add_axes(
        (
            LEFT / medium.width,
            BOTTOM / height,
            1 - (LEFT + RIGHT) / medium.width,
            inches / height,
        )
    )
    areas = _areas(axes, moments)
    left = (style.MARGIN - LEFT if medium.is_narrow else 0.0) - 0.07
    span = medium.width - LEFT - RIGHT
    style.row_legend(axes, areas, (left / span, 1 + (TOP - 0.05) / inches), 0.0, room)
    _frame(axes, need, moments, float(chip.memory_capacity.value))
    _parts(axes, need, span)
    _spikes(axes, moments)
    _peak(axes, need, moments)
    return figure


def _kinds(moments: Sequence[Moment]) -> list[tuple[str, str]]:
    """Kinds of which there ever are any, each with its key: "KV 0.4 GiB", the most of it."""
    most = {kind: max(moment.by_kind[kind] for moment in moments) for kind in ORDER}
    return [
        (kind, f"{NAMES.get(kind, kind)} {format_capacity(size)}")
        for kind, size in most.items()
        if size
    ]


def _areas(axes: Axes, moments: Sequence[Moment]) -> Sequence[Any]:
    """One area above the other."""
    kinds = _kinds(moments)
    times = [moment.time for moment in moments]
    if len(times) == 1:
        times, moments = [times[0], times[0] + 1], [*moments, *moments]
    sizes = [moment.by_kind for moment in moments]
    return axes.stackplot(
        times,
        [[size[kind] for size in sizes] for kind, _ in kinds],
        colors=[style.KINDS[kind] for kind, _ in kinds],
        labels=[label for _, label in kinds],
        linewidth=0,
    )


def spikes(moments: Sequence[Moment], height: float) -> list[Moment]:
    """Moments that rise above those just before and just after: thinner than a line."""
    near = SPIKE * moments[-1].time
    thin = []
    for place, moment in enumerate(moments):
        before = [m.total for m in _within(reversed(moments[:place]), moment, near)]
        after = [m.total for m in _within(moments[place + 1 :], moment, near)]
        if not before or not after or moment.total < max(*before, *after, max(before) + 1):
            continue
        if moment.total - max(min(before), min(after)) > LEAST_SPIKE * height:
            thin.append(moment)
    return thin


def _within(moments: Iterable[Moment], middle: Moment, near: float) -> Iterator[Moment]:
    return takewhile(lambda moment: abs(moment.time - middle.time) <= near, moments)


def _spikes(axes: Axes, moments: Sequence[Moment]) -> None:
    """A small mark above each spike, and the size of the highest that is not the peak."""
    peak = _fullest(moments)
    rest = [spike for spike in spikes(moments, axes.get_ylim()[1]) if spike is not peak]
    for spike in rest:
        style.note(axes, "\u25be", (spike.time, spike.total), (0, -1), "center")
    far = [spike for spike in rest if abs(spike.time - peak.time) > 0.2 * moments[-1].time]
    if far:
        most = max(far, key=lambda spike: spike.total)
        away, side = (-6, "right") if most.time > 0.75 * moments[-1].time else (6, "left")
        style.note(axes, format_capacity(most.total), (most.time, most.total), (away, 4), side)


def _frame(axes: Axes, need: Memory, moments: Sequence[Moment], capacity: float) -> None:
    """Limits and ticks; the capacity as a line where it is near enough not to squeeze the rest."""
    near = capacity <= 2 * need.peak
    top = 1.15 * max(need.peak, capacity if near else 0.0)
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
        x, away, side = (0, 6, "left") if left else (1, -6, "right")
        style.note(
            axes, "capacity of one chip", (x, capacity), (away, 5), side, colour=style.INK,
            va="baseline", xycoords=("axes fraction", "data"), bbox={**PAPER, "alpha": 0.85},
        )  # fmt: skip


def _fullest(moments: Sequence[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total)


def _nice(step: float) -> float:
    """The next larger 1, 2, 4, 8 ... times a power of 1024."""
    unit = 1.0
    while unit < step:
        unit *= 2
    return unit


def _parts(axes: Axes, need: Memory, span: float) -> None:
    """Lines between forward, backward and optimizer, and their names where there is room."""
    parts = need.timeline.parts()
    end = parts[-1][2] if parts else 0
    taken = 0.0  # inches from the left, by names
    for name, start, stop in parts if len(parts) > 1 else []:
        if start:
            axes.axvline(start, color=style.INK, linewidth=0.9, linestyle=(0, (2, 2)))
        wide, inches = printing.width_of(name, 10), span / end
        roomy = (stop - start) * inches > wide + 0.1
        left = (start + stop) / 2 * inches - wide / 2 if roomy else stop * inches - wide
        if not roomy and (stop != end or left < taken + 0.1):
            continue
        taken = left + wide
        x, side = ((start + stop) / 2, "center") if roomy else (stop, "right")
        style.note(axes, name, (x, 1), (0, 3), side, 10, xycoords=("data", "axes fraction"))


def _peak(axes: Axes, need: Memory, moments: Sequence[Moment]) -> None:
    """A mark at the fullest moment, and its size."""
    most = _fullest(moments)
    at = (most.time, most.total)
    # The tip of the mark is at the peak, so that a thin peak stays in sight below it.
    style.note(axes, "\u25bc", at, (0, -1), "center", 10, style.INK)
    away, side = (-9, "right") if most.time > 0.75 * moments[-1].time else (9, "left")
    text = f"peak {format_capacity(need.peak)}"
    style.note(axes, text, at, (away, 1), side, 10, style.INK, fontweight="bold", bbox=PAPER)
