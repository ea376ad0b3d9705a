"""Steps of several models on one roofline, as a table."""

from __future__ import annotations

from collections.abc import Callable

from rooftrace.hardware.units import format_bandwidth, format_flop_rate, format_intensity
from rooftrace.reporting import rooflinesteps
from rooftrace.reporting.view import model as view, units, words

_RATE = units.Unit("FLOP/s", "number", format_flop_rate)


def rooflines_view(result: rooflinesteps.Rooflines, output: view.Output) -> view.View:
    """A row for each step; the roofs and ridges of the chips below."""
    sizes = [
        name for name in ("batch", "seq", "kv") if any(name in row.sizes for row in result.rows)
    ]
    columns = (
        view.Column("model", units.TEXT, "model", clipped=8),
        view.Column("phase", units.TEXT, "phase"),
        *(view.Column(name, units.COUNT, name, of=_size(name)) for name in sizes),
        view.Column("chip", units.TEXT, "chip"),
        view.Column("intensity", units.INTENSITY, "FLOP/byte"),
        view.Column("rate", _RATE, "rate"),
        view.Column("share", units.SHARE, "of its roof", short="roof"),
        view.Column("launch_rate", _RATE, "launches allow", short="launches", drop=2),
        *(
            [view.Column("network_rate", _RATE, "network allows", short="network", drop=1)]
            if any(row.network_rate for row in result.rows)
            else []
        ),
        view.Column("limit", units.TEXT, "limited by", short="limit", of=_limit),
        view.Column("t_est", units.SECOND, _time(result), of=lambda row: row.estimate.t_est),
    )
    head = view.Note(result.conditions, "strong")
    table = view.Table(columns=columns, rows=result.rows, leading=2)
    roofs = {
        (row.chip, row.estimate.peak_precision): (
            f"{row.estimate.chip.title}: {format_flop_rate(row.estimate.peak)} "
            f"{row.estimate.peak_precision}, "
            f"{format_bandwidth(row.estimate.chip.memory_bandwidth.value)}, "
            f"ridge {format_intensity(row.estimate.ridge)}"
        )
        for row in result.rows
    }
    notes = [view.Note(text, bullet=1) for text in roofs.values()]
    title = f"Roofline: {', '.join(result.models)}"
    return view.View((view.Section(parts=[head, table, *notes]),), title)


def _size(name: str) -> Callable[[rooflinesteps.RooflineRow], int | None]:
    return lambda row: row.sizes.get(name)


def _limit(row: rooflinesteps.RooflineRow) -> str:
    return words.LIMITS[row.estimate.times.regime]


def _time(result: rooflinesteps.Rooflines) -> str:
    return words.time_word(row.estimate for row in result.rows)


def reports_view(result: rooflinesteps.Reports, output: view.Output) -> view.View:
    """The steps in one table, where each report stands, and which targets have none."""
    sections: list[view.Section] = []
    title = "No report"
    if result.roofline is not None:
        table = rooflines_view(result.roofline, output)
        title = f"Reports: {', '.join(result.roofline.models)}"
        image = view.Image(f"{rooflinesteps.FIGURE}.png", "all steps on one roofline")
        sections.append(view.Section(parts=[*table.sections[0].parts, image]))
    if result.failures:
        notes = [
            view.Note(f"{target}: {why}", "bad", bullet=1)
            for target, why in result.failures.items()
        ]
        head = view.Note("Failed:", "bad", on="screen")
        sections.append(view.Section(title="Failed", parts=[head, *notes]))
    return view.View(tuple(sections), title)
