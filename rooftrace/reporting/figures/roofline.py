"""Log-log rooflines: phases, op families, or steps of many models under the roofs of chips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import MATRIX
from rooftrace.hardware.units import format_share, format_time
from rooftrace.reporting.figures import memoryplot, printing, style
from rooftrace.reporting.figures.printing import SCREEN, Medium
from rooftrace.reporting.figures.roofplot import Point, Roof, Words, draw
from rooftrace.reporting.renderers import words
from rooftrace.reporting.sections import tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rooftrace.reporting.commands import rooflinesteps
    from rooftrace.reporting.sections import Results

FAMILIES_SHOWN = 8
LEAST_SHARE = 0.005  # of t_est: a family with less has no point
SHAPES = {"o": "circle", "s": "square", "D": "diamond", "^": "triangle", "v": "wedge", "P": "plus"}


def roofs(report: Results) -> list[Roof]:
    """The roof of every chip, with the ceilings of the rates that any phase uses."""
    return roofs_of(
        {
            chip.name: [
                report.estimate(phase, execution, chip.name)
                for phase in report.phases
                for execution in report.executions
            ]
            for chip in report.chips
        }
    )


def roofs_of(estimates: Mapping[str, Sequence[Estimate]]) -> list[Roof]:
    """The roof of the chip of each group of estimates, with the ceilings of the rates they use."""
    result = []
    for position, some in enumerate(estimates.values()):
        chip = some[0].chip
        used: dict[str, float] = {}
        for estimate in some:
            used.update(_rates(estimate))
        if not used:  # nothing was computed
            used = {f"{peak.engine} {peak.precision}": peak.rate.value for peak in chip.peaks}
        ceilings = tuple(sorted(used.items(), key=lambda entry: (-entry[1], entry[0])))
        result.append(Roof(chip, ceilings, style.CHIPS[position % len(style.CHIPS)]))
    return result


def _rates(estimate: Estimate) -> dict[str, float]:
    """The matrix rates of the work of an estimate, and the vector rate of the chip."""
    rates: dict[str, float] = {}
    if estimate.chip.has_peak("vector", "fp32"):
        rates["vector fp32"] = estimate.chip.peak("vector", "fp32")
    for work, flop in estimate.plan.total.work.items():
        if flop and (work.operation in MATRIX or not rates):
            engine, precision = engines.engine_of(work, estimate.chip, estimate.execution)
            peak = estimate.chip.find_peak(engine, precision)
            if peak is not None:
                rates[f"{engine} {peak.precision}"] = peak.rate.value
    return rates


def phase_points(report: Results) -> list[Point]:
    """One point per phase and execution on the first chip, and per phase on the others.

    A step that computes or moves nothing has no point.
    """
    tones = style.colours(report.phases, style.PHASES)
    points = []
    shown = _shown(report, _others(report))
    for roof, marker in zip(roofs(report), _markers(report), strict=True):
        for phase in report.phases:
            # More points than these leave no room for their names.
            for execution in shown if roof.chip is report.chips[0] else [report.main]:
                estimate = report.estimate(phase, execution, roof.chip.name)
                if not estimate.ai_hbm or not estimate.t_est:
                    continue
                rate = estimate.flops_causal / estimate.t_est
                name = f"{phase}, {execution}"
                if len(report.chips) > 1:
                    name += f", {roof.chip.name}"
                label = (
                    f"{name}\n{words.time_word([estimate])} {format_time(estimate.t_est)}, "
                    f"{words.percent(rate / roof.at(estimate.ai_hbm))} of its roof"
                )
                points.append(
                    Point(
                        estimate.ai_hbm, rate, label, tones[phase], marker, execution == report.main
                    )
                )
    return points


def family_points(report: Results, phase: str) -> tuple[list[Point], str]:
    """One point per family of a phase on the first chip, for the main execution and one other.

    The text names the families that have no point since they compute nothing.
    """
    names = [entry.key for entry in tally(report.estimate(phase).rows, lambda row: row.family)]
    tones = style.colours(names, style.FAMILIES)
    points, idle = [], []
    for execution in _shown(report, 1):
        estimate = report.estimate(phase, execution)
        main = execution == report.main
        entries = tally(estimate.rows, lambda row: row.family)
        for rank, entry in enumerate(entries):
            share = entry.seconds / estimate.t_est if estimate.t_est else 0.0
            if not entry.flops_causal or not entry.bytes:
                if main and share >= LEAST_SHARE:
                    idle.append(f"{entry.key} {words.percent(share)}")
                continue
            if rank >= FAMILIES_SHOWN or share < LEAST_SHARE:
                continue
            label = entry.key if main else f"{entry.key}, {execution}"
            points.append(
                Point(
                    entry.flops_causal / entry.bytes,
                    entry.flops_causal / entry.seconds,
                    f"{label}\n{format_share(share)} of the time",
                    tones.get(entry.key, style.GREY),
                    filled=main,
                    size=7.0 + 16.0 * share**0.5,
                )
            )
    return points, f"Without a point, since they compute nothing: {', '.join(idle)}" if idle else ""


def _markers(report: Results) -> list[str]:
    return [style.MARKERS[i % len(style.MARKERS)] for i in range(len(report.chips))]


def roofline(report: Results, medium: Medium = SCREEN) -> Figure:
    """The roofline of every phase and execution on every chip."""
    first = report.estimate(report.phases[0])
    shapes = [
        f"{SHAPES[marker]} {chip.name}"
        for marker, chip in zip(_markers(report), report.chips, strict=True)
    ]
    legend = [_legend_words(report, _others(report)), *(shapes if len(shapes) > 1 else [])]
    title = f"Roofline: {words.model_words(report.model, first.graph.workload)}"
    subtitles = (memoryplot.of_report(report, None), ", ".join(legend))
    return draw(roofs(report), phase_points(report), Words(title, subtitles), medium)


def family_roofline(report: Results, phase: str, medium: Medium = SCREEN) -> Figure:
    """The roofline of the families of one phase on the first chip."""
    points, idle = family_points(report, phase)
    estimate = report.estimate(phase)
    subtitles = (
        memoryplot.of_phase(report, phase),
        f"{_legend_words(report, 1)}; area is the share of "
        f"{words.time_word([estimate])} {format_time(estimate.t_est)}",
    )
    title = f"{phase.capitalize()} by family: {report.model.get('name') or 'model'}"
    return draw(roofs(report)[:1], points, Words(title, subtitles, idle), medium)


def _others(report: Results) -> int:
    """The number of executions, besides the main one, that the points of all phases show."""
    return 2 if len(report.chips) == 1 else 1


def _shown(report: Results, others: int) -> list[str]:
    """The main execution and the first few of the others, in their order."""
    rest = [name for name in report.executions if name != report.main][:others]
    return [name for name in report.executions if name == report.main or name in rest]


def _legend_words(report: Results, others: int) -> str:
    names = [name for name in _shown(report, others) if name != report.main]
    return f"filled {report.main}" + (f", hollow {words.listed(names)}" if names else "")


# -- many models -----------------------------------------------------------------------------------

LEAST_CAP = 0.999  # of the roof: a limit of a step is shown below this


def draw_roofline(result: rooflinesteps.Rooflines, path: Path, style: str) -> None:
    """Draw steps of several models on one roofline, in the format that the file ends in.

    Raises RequestError for another ending or style.
    """
    medium = printing.medium_of(style)
    printing.save(lambda: roofline_figure(result, medium), path, medium=medium)


def roofline_figure(result: rooflinesteps.Rooflines, medium: Medium = SCREEN) -> Figure:
    """FLOP/s over FLOP/byte of every step, log-log, under the roofs of the chips.

    A line joins the sizes of one model, phase and chip.  Colours are models, or phases where there
    is one model; shapes are chips.  Short marks are limits other than roofs: the launches of the
    host, and the network.
    """
    by_chip = {
        chip: [row.estimate for row in result.rows if row.chip == chip] for chip in result.chips
    }
    points = _points(result, brief=medium.is_narrow)
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


def _points(result: rooflinesteps.Rooflines, *, brief: bool = False) -> list[Point]:
    """The points of all steps.  brief: the shape alone tells the chip, one label a model."""
    kinds = result.models if len(result.models) > 1 else result.phases
    tones = style.colours(kinds, {} if len(result.models) > 1 else style.PHASES)
    drawn: list[Point] = []
    for line in result.lines:
        seen = [row for row in line if row.rate is not None]
        for place, row in enumerate(seen):
            assert row.rate is not None and row.intensity is not None
            kind = row.model if len(result.models) > 1 else row.phase
            marker = style.MARKERS[result.chips.index(row.chip) % len(style.MARKERS)]
            label = _label(result, seen, place, brief)
            drawn.append(
                Point(
                    row.intensity, row.rate, label, tones[kind], marker,
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
    result: rooflinesteps.Rooflines,
    line: Sequence[rooflinesteps.RooflineRow],
    place: int,
    brief: bool,
) -> str:
    """The full name of the last point; of the first, the size."""
    row = line[place]
    if brief and row.chip != result.chips[0]:
        return ""
    size = f"{result.over} {row.sizes[result.over]:,}" if result.over else ""
    if place < len(line) - 1:
        return size if place == 0 else ""
    parts = [
        row.model if len(result.models) > 1 else "",
        row.phase if len(result.phases) > 1 or len(result.models) == 1 else "",
        row.chip if len(result.chips) > 1 and not brief else "",
    ]
    name = " ".join(filter(None, parts))
    time = f"{words.time_word([row.estimate])} {format_time(row.estimate.t_est)}"
    share = "" if row.share is None else f", {words.percent(row.share)} of its roof"
    return f"{name} {size}\n{time}{share}" if size else f"{name}\n{time}{share}"
