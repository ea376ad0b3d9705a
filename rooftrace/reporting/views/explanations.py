"""Views of an explanation, each number with its formula, and of several models on one roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rooftrace.hardware.units import (
    format_bandwidth,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_time,
    format_traffic,
)
from rooftrace.reporting.commands import rooflinesteps
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import entry, sentence
from rooftrace.studies.explaining import ExplainedKernel, Explanation, steps

ON_SCREEN = 3
"""Kinds of kernels that a screen shows in full; a page has all."""

_FORMATS = {"FLOP": format_flops, "byte": format_traffic}

_COLUMNS = (
    view.Column("name", units.TEXT, ""),
    view.Column("symbols", units.TEXT, "formula", folded=True),
    view.Column("numbers", units.TEXT, "with the sizes", folded=True, drop=1),
    view.Column("value", units.WORDS, "value"),
)
_RATIO = units.Unit("", "number", lambda ratio: f"{ratio:.2f}")
_TESTS = (
    view.Column("name", units.TEXT, "scaling test"),
    view.Column("change", units.TEXT, "change", drop=1, folded=True),
    view.Column("ratio", _RATIO, "expected time after / before", short="expected"),
    view.Column("compute", _RATIO, "if compute alone", short="compute"),
    view.Column("hbm", _RATIO, "if HBM alone", short="HBM"),
    view.Column("network", _RATIO, "if the network alone", short="network"),
    view.Column("launch", _RATIO, "if launches alone", short="launch"),
    view.Column("note", units.TEXT, "", folded=True),
)
_COUNTERS = (
    view.Column("tool", units.TEXT, "confirmed by"),
    view.Column("metric", units.CODE, "counter", folded=True),
    view.Column("expected", units.TEXT, "should read", folded=True),
)


def explanation_view(result: Explanation, output: view.Output) -> view.View:
    """The selected kernels, or all of the step with its sweep."""
    sizes = ", ".join(f"{name} {size:,}" for name, size in result.sizes.items())
    where = f"{result.chip.name}, {result.execution}"
    head = f"{result.title}, {result.phase}, {sizes}; {where}"
    source = f"shares of peaks: {result.knobs}" if result.knobs else "peaks of the datasheet"
    sections = [view.Section(parts=sentence(f"{head}; {source}", label="explain  "), place=0)]
    for number, kernel in enumerate(result.kernels):
        sections.append(_kernel(kernel, number))
    left = result.kernels[ON_SCREEN:]
    if left:
        names = ", ".join(f"{kernel.name} in {kernel.module or '(root)'}" for kernel in left)
        note = view.Note(f"{words.plural(len(left), 'more kind')}: {names}", "faint", on="screen")
        sections.append(view.Section(parts=[note], place=90))
    if result.step is not None:
        sections += _step(result)
    sections += [_sweep(sweep, place=95 + n) for n, sweep in enumerate(result.sweeps)]
    return view.View(tuple(sections), f"Explained: {result.title}, {result.phase}")


# -- kernels ---------------------------------------------------------------------------------------


def _kernel(kernel: ExplainedKernel, number: int) -> view.Section:
    on: view.Output = "both" if number < ON_SCREEN else "page"
    title = f"{kernel.name}  {kernel.module or '(root)'}"
    count = f"{words.plural(kernel.count, 'launch').replace('launchs', 'launches')}"
    parts: list[view.Part] = [
        view.Note(f"{title}   {count}, {kernel.share:.1%} of the step; one launch:", "strong", on)
    ]
    if kernel.sizes:
        sizes = ", ".join(f"{name} = {text}" for name, text in kernel.sizes.items())
        parts.append(view.Note(f"sizes: {sizes}", "faint", on))
    rows = [_row(item) for item in (*kernel.flops, *kernel.bytes) if item.value or item.symbols]
    parts.append(view.Table(columns=_COLUMNS, rows=rows, padded=False, on=on))
    parts.append(view.Table(columns=_COLUMNS, rows=_seconds(kernel), padded=False, on=on))
    margin = "nothing else takes time"
    if math.isfinite(kernel.margin):
        margin = f"{kernel.margin:.2f} times the next term"
    parts.append(
        view.Note(f"limited by {words.LIMITS[kernel.limiter]}, {margin}", kernel.limiter, on)
    )
    parts.append(view.Table(columns=_COUNTERS, rows=kernel.counters, padded=False, on=on))
    parts.append(_tests(kernel.scaling, on))
    return view.Section(title=title, parts=parts, place=1 + number)


def _row(item: Any) -> dict[str, str]:
    """The cells of a quantity; a product of shapes is said first, where there is one."""
    symbols = f"{item.shapes} = {item.symbols}" if item.shapes else item.symbols
    exact = f"{item.value:,.0f} {item.unit}"
    name = {"all": {"FLOP": "FLOP", "byte": "HBM bytes"}[item.unit]}.get(item.name, item.name)
    number = exact if len(exact) <= _EXACT else _FORMATS[item.unit](item.value)
    return _line(name, symbols, item.numbers, number)


_EXACT = 24
"""Letters of a number that is written in full."""


def _seconds(kernel: ExplainedKernel) -> list[dict[str, str]]:
    """Each term with its arithmetic."""
    s, flop, size = kernel.seconds, kernel.flops[-1].value, kernel.bytes[-1].value
    numbers = f"{flop:,.0f} / {size:,.0f}"
    rows = [_line("intensity", "FLOP / HBM bytes", numbers, format_intensity(kernel.intensity))]
    if s.compute_share is not None:
        share = _share(s.compute_share, f"{s.kind}, knobs", "tiles, waves, feeding")
        numbers = f"({_ideal(s.rates)}) / {share}"
        formula = "sum of FLOP / rate, over the share"
        rows.append(_line("t_comp", formula, numbers, format_time(s.compute)))
    if s.hbm_share is not None:
        share = _share(s.hbm_share, f"{s.kind}, knobs", "walks over K, copies")
        numbers = f"{size:,.0f} / ({format_bandwidth(s.bandwidth)} x {share})"
        rows.append(_line("t_hbm", "HBM bytes / (bandwidth x share)", numbers, format_time(s.hbm)))
    if s.network:
        numbers = f"at {format_bandwidth(s.link)}"
        rows.append(_line("t_net", "link bytes / link bandwidth", numbers, format_time(s.network)))
    gap, most = format_time(s.gap), format_time(max(s.compute, s.hbm, s.network))
    rows.append(_line("gap", "between kernels", "of the chip, or of knobs", gap))
    formula = "largest term + imperfect overlap + gap"
    numbers = f"{most} + {format_time(s.more)} + {gap}"
    return [*rows, _line("time", formula, numbers, format_time(s.device))]


def _ideal(rates: Sequence[Any]) -> str:
    return " + ".join(
        f"{r.flop:,.0f} / {format_flop_rate(r.rate)} ({r.engine} {r.precision})" for r in rates
    )


def _share(share: Any, first: str, second: str) -> str:
    product = f"{share.whole:.4g}"
    if abs(share.rest - 1) < 1e-6:
        return f"{product} ({first})" if share.knobs != 1 else product
    return f"{product} ({share.knobs:.3g} {first}, {share.rest:.3g} {second})"


def _tests(tests: Sequence[Any], on: view.Output) -> view.Table:
    rows = [
        {
            "name": test.name,
            "change": test.change,
            "ratio": test.ratio,
            "note": test.note,
            **{name: test.by_limiter.get(name) for name in words.LIMITS},
        }
        for test in tests
    ]
    columns = [
        column
        for column in _TESTS
        if column.key in ("name", "change", "ratio") or any(row[column.key] for row in rows)
    ]
    return view.Table(columns=columns, rows=rows, padded=False, on=on)


# -- the step --------------------------------------------------------------------------------------


def _step(result: Explanation) -> list[view.Section]:
    step = result.step
    assert step is not None
    rows = [_row(item) for item in (*step.flops, *step.bytes) if item.value]
    limits = ", ".join(
        f"{words.LIMITS[name]} {words.percent(share)}"
        for name, share in sorted(step.regime_shares.items(), key=lambda item: -item[1])
        if share > 0
    )
    below = step.intensity < step.ridge
    times = [
        _line("intensity", "FLOP / HBM bytes",
              f"{step.total_flops.value:,.0f} / {step.total_bytes.value:,.0f}",
              format_intensity(step.intensity)),
        _line("ridge", "peak / bandwidth",
              f"{format_flop_rate(step.peak)} {step.peak_precision} / "
              f"{format_bandwidth(step.bandwidth)}", format_intensity(step.ridge)),
        _line("roofline", "bandwidth x intensity" if below else "peak",
              f"{format_bandwidth(step.bandwidth)} x {format_intensity(step.intensity)}"
              if below else "at or above the ridge",
              format_flop_rate(min(step.peak, step.bandwidth * step.intensity))),
        _line("t_comp at peaks", "sum over engines of FLOP / rate",
              _ideal(step.rates), format_time(step.t_comp_peaks)),
        _line("t_hbm at peaks", "HBM bytes / bandwidth",
              f"{step.total_bytes.value:,.0f} / {format_bandwidth(step.bandwidth)}",
              format_time(step.t_hbm_peaks)),
        _line("t_comp", "sum over kernels",
              f"{_of(step.t_comp_peaks, step.t_comp)} of the peaks", format_time(step.t_comp)),
        _line("t_hbm", "sum over kernels",
              f"{_of(step.t_hbm_peaks, step.t_hbm)} of the bandwidth", format_time(step.t_hbm)),
        _line("t_launch", "gaps and waiting for the host", "", format_time(step.t_launch)),
        _line("t_est", "end of the queue of kernels", limits, format_time(step.t_est)),
        _line("FLOP rate", "FLOP / t_est",
              f"{step.total_flops.value:,.0f} / {format_time(step.t_est)}",
              format_flop_rate(step.total_flops.value / step.t_est if step.t_est else 0.0)),
    ]  # fmt: skip
    parts: list[view.Part] = [
        view.Table(columns=_COLUMNS, rows=rows, padded=False),
        view.Table(columns=_COLUMNS, rows=times, padded=False),
    ]
    if step.critical is not None:
        parts += [view.Note(text) for text in _critical(result)]
    return [
        view.Section(title="The step", parts=parts, place=1),
        view.Section(title="Scaling tests", parts=[_tests(step.scaling, "both")], place=2),
    ]


def _line(name: str, symbols: str, numbers: str, value: str) -> dict[str, str]:
    return {"name": name, "symbols": symbols, "numbers": numbers, "value": value}


def _of(part: float, total: float) -> str:
    return f"{part / total:.1%}" if total else "all"


def _critical(result: Explanation) -> list[str]:
    """Where computing begins to limit, at the peaks and as expected."""
    step = result.step
    assert step is not None
    critical = step.critical
    assert critical is not None
    name, span = critical.name, f"{critical.low:,} to {critical.high:,}"
    others = ", ".join(f"{n} {size:,}" for n, size in result.sizes.items() if n != name)
    with_others = f" with {others}" if others else ""
    lines = []
    for about, value in (("at peaks", critical.by_peaks), ("expected", critical.expected)):
        if value is None:
            text = f"none of {span}"
            if about == "expected":
                text += f"; at {critical.high:,} the limit is {words.LIMITS[critical.limiter]}"
        else:
            text = f"{value:,} is the least {name} of {span} that computing limits{with_others}"
            if about == "expected" and not critical.stays:
                text += ", though not every larger one is"
        lines.append(f"B_crit {about}: {text}.")
    ridge = step.ridge
    side = "below" if critical.more_intensity < ridge else "above"
    lines.append(
        f"One more {name} at {critical.high:,} adds {format_flops(critical.more_flops)} and "
        f"{format_traffic(critical.more_bytes)}, {format_intensity(critical.more_intensity)}: "
        f"{side} the ridge of {format_intensity(ridge)}"
        + (", so no larger one reaches it." if side == "below" else ".")
    )
    return lines


# -- sweeps ----------------------------------------------------------------------------------------


def _sweep(sweep: steps.SizeSweep, place: int) -> view.Section:
    several = len({row.chip for row in sweep.rows}) > 1

    def value(row: Any) -> view.Cell:
        marked = sweep.is_marked(row)
        return view.Cell(row.value, "strong" if marked else "", after=" B_crit" if marked else "")

    columns = [
        view.Column("chip", units.TEXT, "chip"),
        view.Column("value", units.COUNT, sweep.name, of=value),
        view.Column("flops", units.full(units.FLOP), "FLOP"),
        view.Column("bytes", units.BYTE, "HBM"),
        view.Column("intensity", units.INTENSITY, "FLOP/byte"),
        view.Column("t_comp", units.SECOND, "t_comp", drop=1),
        view.Column("t_hbm", units.SECOND, "t_hbm", drop=1),
        view.Column("t_est", units.SECOND, "t_est"),
        view.Column("rate", units.FLOP_RATE, "FLOP/s"),
        view.Column("item_rate", units.RATE, "items/s", drop=2),
        view.Column("regime", units.LIMITS, "limit", of=_limit),
    ]
    others = ", ".join(f"{name} {size:,}" for name, size in sweep.others.items())
    title = f"{sweep.phase.capitalize()} {sweep.name} sweep" + (f", {others}" if others else "")
    table = view.Table(columns=columns if several else columns[1:], rows=sweep.rows, padded=False)
    return view.Section(
        title=title, parts=[view.Note(title, "strong", on="screen"), table], place=place
    )


def _limit(row: Any) -> view.Cell:
    return view.Cell(f"{words.LIMITS[row.regime]} {words.percent(row.regime_share)}", row.regime)


# -- rooflines -------------------------------------------------------------------------------------


def rooflines_view(result: rooflinesteps.Rooflines, output: view.Output) -> view.View:
    """A row for each step; the roofs and ridges of the chips below."""
    # What all steps share is told by the heading, and has no column.
    sizes = (view.Column(n, units.COUNT, n, of=entry("sizes", n)) for n in result.varying)
    keys = (
        view.Column("model", units.TEXT, "model", clipped=8),
        *([view.Column("phase", units.TEXT, "phase")] if len(result.phases) > 1 else []),
        *sizes,
        *([view.Column("dtype", units.TEXT, "dtype")] if len(result.dtypes) > 1 else []),
        *([view.Column("chip", units.TEXT, "chip")] if len(result.chips) > 1 else []),
    )
    columns = (
        *keys,
        view.Column("intensity", units.INTENSITY, "FLOP/byte"),
        view.Column("rate", units.FLOP_RATE, "rate"),
        view.Column("share", units.SHARE, "of its roof", short="roof"),
        view.Column("launch_rate", units.FLOP_RATE, "launches allow", short="launches", drop=2),
        view.Column("network_rate", units.FLOP_RATE, "network allows", short="network", drop=1),
        view.Column("limit", units.TEXT, "limited by", short="limit", of=_limit_of_step),
        view.Column("t_est", units.SECOND, _time(result), of=lambda row: row.estimate.t_est),
    )
    if not any(row.network_rate for row in result.rows):
        columns = tuple(column for column in columns if column.key != "network_rate")
    head = view.Note(result.conditions, "strong")
    table = view.Table(columns=columns, rows=result.rows, leading=len(keys))
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


def _limit_of_step(row: rooflinesteps.RooflineRow) -> str:
    return words.LIMITS[row.estimate.times.regime]


def _time(result: rooflinesteps.Rooflines) -> str:
    return words.time_word(row.estimate for row in result.rows)


def reports_view(result: rooflinesteps.Reports, output: view.Output) -> view.View:
    """The steps of all reports in one table, and the targets that failed."""
    sections: list[view.Section] = []
    title = "No report"
    if result.roofline is not None:
        (steps_section,) = rooflines_view(result.roofline, output).sections
        title = f"Reports: {', '.join(result.roofline.models)}"
        image = view.Image(f"{rooflinesteps.FIGURE}.png", "all steps on one roofline")
        sections.append(view.Section(parts=[*steps_section.parts, image]))
    if result.failures:
        notes = [
            view.Note(f"{target}: {why}", "bad", bullet=1)
            for target, why in result.failures.items()
        ]
        head = view.Note("Failed:", "bad", on="screen")
        sections.append(view.Section(title="Failed", parts=[head, *notes]))
    return view.View(tuple(sections), title)
