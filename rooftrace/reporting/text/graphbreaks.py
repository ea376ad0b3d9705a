"""Graph breaks in words: the step in three ways, then a row for each line that breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rooftrace.costmodels.breaking import BreakCost, GraphBreaks
from rooftrace.hardware.units import format_share, format_time, plural
from rooftrace.reporting.view import model as view, units

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
    """The step eager, broken and whole; the lines; their reasons; what the prices assume."""
    ways = view.Table(columns=_WAYS, rows=list(_ways(result)))
    head = [view.Note(result.title, "strong"), view.Note(_summary(result))]
    sections = [view.Section(parts=[*head, ways], place=1)]
    if result.rows:
        table = view.Table(columns=_ROWS, rows=result.rows)
        parts: list[view.Part] = [table, view.Note(_sums(result)), *_reasons(result)]
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


def _summary(result: GraphBreaks) -> str:
    if not result.rows:
        return "no graph breaks: the module's call is one compiled graph, and nothing is lost"
    graphs = f"{plural(result.graphs, 'compiled graph')}, called {plural(result.calls, 'time')}"
    return (
        f"{plural(len(result.rows), 'line')} with graph breaks: {graphs} in a forward; "
        f"{format_time(result.together)} of the step"
    )


def _sums(result: GraphBreaks) -> str:
    share = result.together / result.broken.t_est if result.broken.t_est else 0.0
    together = f"{format_time(result.together)}, {format_share(share)} of the step"
    if len(result.rows) == 1:
        return f"together: {together}"
    return (
        f"all lines together: {together}.  Each line alone, added up: {format_time(result.total)}: "
        "gains do not add up"
    )


def _reasons(result: GraphBreaks) -> Iterator[view.Note]:
    for row in result.rows:
        yield view.Note(_reason(row))


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
