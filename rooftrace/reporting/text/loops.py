"""A loop that was watched as it ran: its rates beside the prediction, and what is off."""

from __future__ import annotations

from typing import Any

from rooftrace.hardware.units import (
    format_bandwidth,
    format_count,
    format_flop_rate,
    format_share,
    format_time,
)
from rooftrace.measured.live import LiveResult, OffKernel
from rooftrace.reporting.view import model as view, units, words

SHOWN = 10
"""Kernels on a screen, and calls outside of the graph."""
_PAGE = 40

_RATES = (
    view.Column("what", units.TEXT, ""),
    view.Column("measured", units.WORDS, "measured"),
    view.Column("expected", units.WORDS, "expected"),
    view.Column("within", units.WORDS, "90 % within"),
)
_OFF = (
    view.Column("name", units.KERNEL, "off"),
    view.Column("module", units.MODULE, "module", flexible=True),
    view.Column("source", units.CODE, "line", clipped=40),
    view.Column("part", units.TEXT, "part", drop=2),
    view.Column("launches", units.COUNT, "calls", drop=2),
    view.Column("measured", units.SECOND, "measured"),
    view.Column("expected", units.SECOND, "expected"),
    view.Column("lost", units.SECOND, "lost", of=lambda kernel: kernel.lost),
    view.Column("reason", units.TEXT, "likely reason", on="page"),
)
_OUTSIDE = (
    view.Column("name", units.CODE, "in no predicted kernel"),
    view.Column("seconds", units.SECOND, "measured"),
)


def loop_view(result: LiveResult, output: view.Output) -> view.View:
    """The rates, the kernels that are off, what could not be matched, and the notes."""
    head = headline(result)
    rates = view.Table(columns=_RATES, rows=_rate_rows(result), padded=False)
    sections = [
        view.Section(parts=[view.Note(head, on="screen", label="live  ")], place=0),
        view.Section(parts=[view.Note(f"{head}.", on="page"), rates], place=1),
    ]
    if result.validation is not None or result.outside_graph:
        sections.append(_kernels(result))
    notes: list[view.Part] = []
    for line in result.notes:
        notes += [
            view.Note(line, "faint", on="screen"),
            view.Note(f"{line}.", on="page", bullet=1),
        ]
    sections.append(view.Section(parts=notes, place=5))
    return view.View(tuple(sections), "A loop beside its prediction")


def headline(result: LiveResult) -> str:
    """What ran on what, and which of its steps are in the numbers."""
    figures = result.figures
    timed = figures.steps + figures.uncounted
    text = (
        f"{result.chip.title}, {result.execution}: {words.plural(timed, 'step')} timed, "
        f"{result.warmups:,} before to warm up, {result.profiled:,} under the profiler"
    )
    if figures.uncounted:
        text += f"; the work of {figures.uncounted:,} is not known"
    return text


def _rate_rows(result: LiveResult) -> list[dict[str, Any]]:
    figures = result.figures
    expected = figures.expected
    rows = [
        _row("step, mean", format_time, figures.seconds, expected, figures.interval),
        _row("step, median", format_time, result.median),
        _row("between steps", format_time, figures.outside),
        _row("MFU", format_share, figures.mfu, figures.expected_mfu),
    ]
    if figures.hfu is not None and figures.hfu != figures.mfu:
        rows.append(_row("HFU", format_share, figures.hfu))
    rows += [
        _row("FLOP/s", format_flop_rate, figures.flops_per_s, _rate(figures.flops, expected)),
        _row(
            "HBM byte/s, as counted",
            format_bandwidth,
            figures.bytes_per_s,
            _rate(figures.bytes, expected),
        ),
    ]
    for name, amount in (("tokens/s", figures.tokens_per_s), ("samples/s", figures.samples_per_s)):
        if amount is not None and figures.seconds:
            a_step = amount * figures.seconds
            rows.append(_row(name, format_count, amount, _rate(a_step, expected)))
    return rows


def _rate(amount: float | None, seconds: float | None) -> float | None:
    return amount / seconds if amount is not None and seconds else None


def _row(name: str, written: Any, measured: Any, expected: Any = None, within: Any = None) -> Any:
    row = {"what": name, "measured": written(measured)}
    if expected is not None:
        row["expected"] = written(expected)
    if within is not None:
        row["within"] = words.interval_words(within)
    return row


def _kernels(result: LiveResult) -> view.Section:
    """The kernels that are off, and the calls that no kernel of the graph stands for."""
    parts: list[view.Part] = []
    if result.validation is not None:
        text = _off_words(result)
        parts += [view.Note(text, on="screen"), view.Note(f"{text}.", on="page")]
    for count, output in ((SHOWN, "screen"), (_PAGE, "page")):
        shown: list[OffKernel] = list(result.off[:count])
        if shown:
            parts.append(view.Table(columns=_OFF, rows=shown, on=output))  # type: ignore[arg-type]
    text = matched_words(result)
    parts += [view.Note(text, on="screen"), view.Note(f"{text}.", on="page")]
    rows = [{"name": n, "seconds": s} for n, s in list(result.outside_graph.items())[:_PAGE]]
    if rows:
        parts.append(view.Table(columns=_OUTSIDE, rows=rows, padded=False, on="page"))
    return view.Section(title="Kernels", parts=parts, place=3)


def _off_words(result: LiveResult) -> str:
    typical = result.typical or 1.0
    usual = f"a typical kernel takes {typical:.2f} times what is expected of it"
    if not result.off:
        return f"{usual}; none is far beyond that"
    lost = sum(kernel.lost for kernel in result.off)
    shown = f", the first {SHOWN} of them here" if len(result.off) > SHOWN else ""
    what = words.plural(len(result.off), "kind") + " of kernel"
    verbs = ("is", "loses") if len(result.off) == 1 else ("are", "lose")
    loss = f"{verbs[1]} {format_time(lost)} a step{shown}"
    return f"{usual}; {what} {verbs[0]} far beyond that and {loss}"


def matched_words(result: LiveResult) -> str:
    """How much of the profiled time is in predicted kernels, and the most of the rest."""
    text = "no profiled time is matched to a predicted kernel"
    if result.matched is not None:
        text = f"{format_share(result.matched)} of the profiled time belongs to a predicted kernel"
    most = [f"{name} {format_time(s)}" for name, s in list(result.outside_graph.items())[:3]]
    left = len(result.outside_graph) - len(most)
    if not most:
        return text
    if left > 0:
        most.append(f"{left:,} more")
    return f"{text}; in none: {words.listed(most)}"
