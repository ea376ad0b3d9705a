"""Views of a script, of a measured loop of the user, and of graph breaks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rooftrace.costmodels.estimates import ScriptCost, TurnCost
from rooftrace.hardware.units import (
    format_bandwidth,
    format_count,
    format_flop_rate,
    format_share,
    format_time,
    plural,
)
from rooftrace.measured.live import LiveResult, OffKernel
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import Folding, sentence
from rooftrace.scripts.steps import Script
from rooftrace.studies.advice import BreakCost, GraphBreaks

# -- scripts ---------------------------------------------------------------------------------------

_KINDS = {"training": "step", "inference": "no grad"}
_ENDS = {
    "stopped": "ended after the steps that were asked for",
    "end": "ran to its end",
    "exit": "exited",
    "error": "failed",
}


_KIND = view.Column("what", units.TEXT, "what", of=lambda row: _KINDS[row.kind])
_LIMIT = view.Column(
    "limit", units.TEXT, "limit", of=lambda row: words.LIMITS.get(row.limit, row.limit)
)
_TURNS = (
    view.Column("number", units.TEXT, "turns", of=lambda row: _number(row)),
    _KIND,
    view.Column("t_est", units.SECOND, "expected", mark="strong"),
    view.Column("interval", units.TEXT, "90 % between", of=lambda row: _interval(row)),
    _LIMIT,
    view.Column("peak", units.CAPACITY, "peak"),
    view.Column("mfu", units.SHARE, "MFU"),
    view.Column("flops", units.FLOP, "FLOP", drop=1),
    view.Column("bytes_hbm", units.BYTE, "HBM", drop=3),
    view.Column("loading", units.SECOND, "data here", drop=2),
    view.Column("label", units.CODE, "called", clipped=24),
)
_SHAPES = (
    _KIND,
    view.Column("called", units.CODE, "called"),
    view.Column("shape", units.TEXT, "input", of=lambda row: str(list(row.shape))),
    view.Column("turns", units.COUNT, "turns"),
    view.Column("t_est", units.SECOND, "each", mark="strong"),
    view.Column("per_item", units.SECOND, "per item"),
    _LIMIT,
    view.Column("peak", units.CAPACITY, "peak"),
)
_PIECES = (
    view.Column("piece", units.TEXT, "piece"),
    view.Column("times", units.COUNT, "times"),
    view.Column("seconds", units.SECOND, "each"),
    view.Column("total", units.SECOND, "together"),
    view.Column("kernels", units.COUNT, "kernels"),
)
_MEMORY = (
    view.Column("role", units.TEXT, "at the peak"),
    view.Column("bytes", units.CAPACITY, "bytes"),
)
_FOLDED = "a row with ranges has turns of several sizes; --format json has a row for each"
_OF_FOLDED = (
    *_TURNS[:3],
    view.Column("sum", units.SECOND, "together", of=lambda row: row.t_est * row.turns),
    replace(_TURNS[3], drop=4),
    *_TURNS[4:],
)
_FOLDED_TURNS = Folding(
    columns=_OF_FOLDED,
    name=("label", lambda row: row.label),
    seconds=lambda row: row.t_est * row.turns,
    merged={
        "number": lambda rows: f"{sum(r.turns for r in rows)} from {rows[0].stretch.first}",
        "sum": lambda rows: sum(row.t_est * row.turns for row in rows),
        "interval": lambda rows: _interval(*rows),
    },
    few=3,
    parts=1,
)
_FOLDED_SHAPES = Folding(
    columns=_SHAPES,
    name=("shape", lambda row: str(list(row.shape))),
    seconds=lambda row: row.t_est * row.turns,
    merged={"turns": lambda rows: sum(row.turns for row in rows)},
    few=8,
    parts=8,
)


def script_view(result: ScriptCost, output: view.Output) -> view.View:
    """The turns; the pieces of the steady step and its memory; the host; the assumptions."""
    steady = result.steady
    head: list[view.Part] = [view.Note(result.title, "strong"), view.Note(_summary(result))]
    remarks = dict(result.script.said)
    if lacking := remarks.pop("scratch", ""):
        head.append(view.Note(lacking, "bad"))
    if chosen := remarks.pop("choices", ""):
        head.append(view.Note(chosen, "warn"))
    if result.rows:
        rows = _FOLDED_TURNS.of(result.rows)
        is_folded = len(rows) < len(result.rows)
        head.append(view.Table(columns=_OF_FOLDED if is_folded else _TURNS, rows=rows))
        if is_folded:
            head.append(view.Note(_FOLDED, "faint"))
        head += [view.Note(line) for line in _sums(result)]
        head += [view.Note(line, mark) for line, mark in words.coverage_lines(result.steps)]
        head += [view.Note(text) for text in words.attention_again(steady.parts if steady else ())]
    else:
        head.append(view.Note(_nothing(result.script)))
    sections = [view.Section(parts=head, place=1)]
    shapes = result.by_shape()
    if shapes:
        table = view.Table(columns=_SHAPES, rows=_FOLDED_SHAPES.of(shapes))
        sections.append(view.Section(title="By the shape of the input", parts=[table], place=2))
    if steady is not None:
        sections += _of_steady(steady)
    notes: list[view.Part] = [
        view.Note(f"assumed: {text}", "faint")
        for text in (*remarks.values(), *_folded(result.assumptions()))
    ]
    if notes:
        sections.append(view.Section(title="What is assumed", parts=notes, place=4))
    return view.View(tuple(sections), "A script")


def _folded(texts: Iterable[str]) -> Iterator[str]:
    """Sentences; several that differ in shapes only become one."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(re.sub(r"\[[\d, ]*\]", "[...]", text), []).append(text)
    for folded, members in alike.items():
        yield members[0] if len(members) == 1 else f"{folded}, in {len(members)} shapes"


def _nothing(script: Script) -> str:
    """Why there is no turn."""
    if not script.outside:
        return "nothing ran on the device"
    return (
        f"{plural(script.outside, 'op')} ran on the device, none of them in a call of a module or "
        "in a step of an optimizer: say where a turn begins, with --boundary "
        "mark=NAME, a name that the script gives to torch.profiler.record_function or to NVTX"
    )


def _number(row: TurnCost) -> str:
    stretch = row.stretch
    if stretch.turns == 1:
        return f"{stretch.first}"
    return f"{stretch.turns} from {stretch.first}"


def _interval(*rows: TurnCost) -> str:
    ends = [row.t_interval for row in rows if row.t_interval is not None]
    if len(ends) < len(rows):
        return "-"
    return f"{format_time(min(ends)[0])} - {format_time(max(high for _, high in ends))}"


def _summary(result: ScriptCost) -> str:
    script = result.script
    end = _ENDS.get(script.ended, script.ended)
    code = f" with code {script.code}" if script.code else ""
    compiled = "" if result.compiled is None else f"; {result.compiled}"
    return f"{end}{code}, {format_time(script.seconds)} here{compiled}"


def _sums(result: ScriptCost) -> Iterator[str]:
    device = format_time(result.device_seconds)
    loading = format_time(result.loading_seconds)
    yield (
        f"all turns: {device} on the device; {loading} in data loaders, measured on this machine's "
        "CPU"
    )
    stretches = [row.stretch for row in result.rows]
    by_form = sum(stretch.by_form for stretch in stretches)
    alike = sum(stretch.turns - stretch.run for stretch in stretches) - by_form
    if by_form:
        yield (
            f"{plural(by_form, 'turn')} of these differ from recorded ones in one length: they "
            "were counted by formulas of it, and not run"
        )
    if alike:
        yield (
            f"{plural(alike, 'turn')} of these called the same modules with the same sizes as two "
            "before: they were counted and not run"
        )


def _of_steady(row: TurnCost) -> Iterator[view.Section]:
    if len(row.parts) > 1:
        rows = [
            {
                "piece": _piece(place, row),
                "times": times,
                "seconds": step.t_est,
                "total": step.t_est * times,
                "kernels": step.kernels,
            }
            for place, (step, times) in enumerate(row.parts)
        ]
        table = view.Table(columns=_PIECES, rows=rows)
        yield view.Section(title="Pieces of the steady step", parts=[table], place=2)
    most = max((step for step, _ in row.parts), key=lambda step: step.memory.peak)
    roles: list[dict[str, Any]] = [
        {"role": role, "bytes": size} for role, size in words.alive(most.memory).items() if size
    ]
    table = view.Table(columns=_MEMORY, rows=roles)
    yield view.Section(title="Memory of the steady step", parts=[table], place=3)


def _piece(place: int, row: TurnCost) -> str:
    parts = {op.part for op in row.parts[place][0].graph.ops}
    if "backward" not in parts:
        return "the optimizer" if "optimizer" in parts else "forward"
    again = "forward and backward"
    return f"{again}, the optimizer" if "optimizer" in parts else again


# -- loops -----------------------------------------------------------------------------------------

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
    """The rates, the kernels that are off, the calls without a kernel, and the notes."""
    rows = [] if result.median is None else _rate_rows(result)
    rates = view.Table(columns=_RATES, rows=rows, padded=False)
    sections = [
        view.Section(parts=sentence(headline(result), label="live  "), place=0),
        view.Section(parts=[rates] if rows else [], place=1),
    ]
    if result.validation is not None or result.outside_graph:
        sections.append(_kernels(result))
    notes = [note for line in result.notes for note in sentence(line, "faint", bullet=1)]
    sections.append(view.Section(parts=notes, place=5))
    return view.View(tuple(sections), "A loop beside its prediction")


def headline(result: LiveResult) -> str:
    """The chip, the execution, and the steps that the numbers are of."""
    figures = result.figures
    timed = figures.steps + figures.uncounted
    text = (
        f"{result.chip.title}, {result.execution}: {words.plural(timed, 'step')} timed, "
        f"{result.warmups:,} before to warm up, {result.profiled:,} under the profiler"
    )
    if not timed:
        text += (
            "; times are of the steps after these: run more, or fewer of these by warmup=, profile="
        )
    if figures.uncounted:
        text += f"; the work of {figures.uncounted:,} is not known"
    return text


def _rate_rows(result: LiveResult) -> list[dict[str, Any]]:
    figures = result.figures
    expected = figures.expected
    flops_per_s, bytes_per_s = _rate(figures.flops, expected), _rate(figures.bytes, expected)
    rows = [
        _row("step, mean", format_time, figures.seconds, expected, figures.interval),
        _row("step, median", format_time, result.median),
        _row("between steps", format_time, figures.outside),
        _row("MFU", format_share, figures.mfu, figures.expected_mfu),
    ]
    if figures.hfu is not None and figures.hfu != figures.mfu:
        rows.append(_row("HFU", format_share, figures.hfu))
    rows += [
        _row("FLOP/s", format_flop_rate, figures.flops_per_s, flops_per_s),
        _row("HBM byte/s, as counted", format_bandwidth, figures.bytes_per_s, bytes_per_s),
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
    """The kernels that are off, and the calls without a kernel in the graph."""
    parts: list[view.Part] = []
    if result.validation is not None:
        parts += sentence(_off_words(result))
    for count, output in ((SHOWN, "screen"), (_PAGE, "page")):
        shown: list[OffKernel] = list(result.off[:count])
        if shown:
            parts.append(view.Table(columns=_OFF, rows=shown, on=output))  # type: ignore[arg-type]
    parts += sentence(matched_words(result))
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
    kinds = words.plural(len(result.off), "kind") + " of kernel"
    verbs = ("is", "loses") if len(result.off) == 1 else ("are", "lose")
    loss = f"{verbs[1]} {format_time(lost)} a step{shown}"
    return f"{usual}; {kinds} {verbs[0]} far beyond that and {loss}"


def matched_words(result: LiveResult) -> str:
    """The share of the profiled time in predicted kernels, and the most of the rest."""
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


# -- graph breaks ----------------------------------------------------------------------------------

_WAYS = (
    view.Column("way", units.TEXT, "step"),
    view.Column("seconds", units.SECOND, "expected"),
    view.Column("launch", units.SECOND, "launch"),
    view.Column("kernels", units.COUNT, "kernels"),
    view.Column("bytes", units.BYTE, "HBM"),
    view.Column("entries", units.COUNT, "graph calls"),
)
_ROWS = (
    view.Column("source", units.CODE, "line", of=lambda row: row.cause.source or "?"),
    view.Column("kind", units.TEXT, "what", of=lambda row: row.cause.kind),
    view.Column("times", units.COUNT, "times", of=lambda row: row.cause.times),
    view.Column("gain", units.signed(units.SECOND), "costs", mark="strong"),
    view.Column("share", units.SHARE, "share", drop=1),
    view.Column("launch", units.signed(units.SECOND), "launch", drop=2),
    view.Column("kernels", units.signed(units.COUNT), "kernels"),
    view.Column("singles", units.COUNT, "op by op", drop=3),
    view.Column("bytes", units.signed(units.BYTE), "HBM"),
    view.Column("module", units.MODULE, "module", flexible=True, of=lambda row: row.cause.module),
)


def graph_breaks_view(result: GraphBreaks, output: view.Output) -> view.View:
    """The step eager, with breaks and without; the lines; their reasons; the assumptions."""
    ways = view.Table(columns=_WAYS, rows=list(_ways(result)))
    head = [view.Note(result.title, "strong"), view.Note(_breaks_summary(result))]
    sections = [view.Section(parts=[*head, ways], place=1)]
    if result.rows:
        table = view.Table(columns=_ROWS, rows=result.rows)
        notes = [view.Note(_reason(row)) for row in result.rows]
        parts: list[view.Part] = [table, view.Note(_sums_of_breaks(result)), *notes]
        sections.append(view.Section(title="Where graphs end", parts=parts, place=2))
    if result.recompiled:
        recompiled = list(_recompiled(result))
        sections.append(view.Section(title="Compiled more than once", parts=recompiled, place=3))
    notes = [view.Note(f"assumed: {text}", "faint") for text in result.notes]
    sections.append(view.Section(title="What is assumed", parts=notes, place=4))
    return view.View(tuple(sections), "Graph breaks")


def _ways(result: GraphBreaks) -> Iterator[dict[str, Any]]:
    ways = (
        ("eager", result.eager, 0),
        ("compiled, as it breaks", result.broken, result.calls),
        ("compiled, without breaks", result.whole, 1),
    )
    for way, step, entries in ways:
        if step is result.broken and not result.rows:
            continue
        yield {
            "way": way,
            "seconds": step.t_est,
            "launch": step.times.regime_seconds["launch"],
            "kernels": step.kernels,
            "bytes": step.bytes_hbm,
            "entries": entries,
        }


def _breaks_summary(result: GraphBreaks) -> str:
    if not result.rows:
        return "no graph breaks: the module's call is one compiled graph, and nothing is lost"
    graphs = f"{plural(result.graphs, 'compiled graph')}, called {plural(result.calls, 'time')}"
    return (
        f"{plural(len(result.rows), 'line')} with graph breaks: {graphs} in a forward; "
        f"{format_time(result.together)} of the step"
    )


def _sums_of_breaks(result: GraphBreaks) -> str:
    share = result.together / result.broken.t_est if result.broken.t_est else 0.0
    together = f"{format_time(result.together)}, {format_share(share)} of the step"
    if len(result.rows) == 1:
        return f"together: {together}"
    return (
        f"all lines together: {together}.  Each line alone, added up: {format_time(result.total)}: "
        "gains do not add up"
    )


def _reason(row: BreakCost) -> str:
    cause = row.cause
    hint = f".  {cause.hints[0].rstrip('.')}" if cause.hints else ""
    return f"{cause.source or '?'}: {cause.reason}{hint}"


def _recompiled(result: GraphBreaks) -> Iterator[view.Note]:
    for again in result.recompiled:
        reason = f": {again.reason}" if again.reason else ""
        yield view.Note(
            f"{again.source} {again.name}: {plural(again.times, 'time')}, in the first step "
            f"only{reason}"
        )
