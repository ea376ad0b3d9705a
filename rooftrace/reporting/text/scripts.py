"""A script in words: its turns, the pieces of a step, what the host did, what was assumed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rooftrace.costmodels.scripting import ScriptCost, TurnCost
from rooftrace.hardware.units import format_time, plural
from rooftrace.reporting.text.folding import Folding
from rooftrace.reporting.view import model as view, units, words
from rooftrace.tracer.scripts import Script

_LIMITS = {"compute": "compute", "hbm": "HBM", "network": "network", "launch": "launch"}
_KINDS = {"training": "step", "inference": "no grad"}
_ENDS = {
    "stopped": "ended after the steps that were asked for",
    "end": "ran to its end",
    "exit": "exited",
    "error": "failed",
}


_TURNS = (
    view.Column("number", units.TEXT, "turns", of=lambda row: _number(row)),
    view.Column("what", units.TEXT, "what", of=lambda row: _KINDS[row.kind]),
    view.Column("t_est", units.SECOND, "expected", mark="strong"),
    view.Column("interval", units.TEXT, "90 % between", of=lambda row: _interval(row)),
    view.Column("limit", units.TEXT, "limit", of=lambda row: _LIMITS.get(row.limit, row.limit)),
    view.Column("peak", units.CAPACITY, "peak"),
    view.Column("mfu", units.SHARE, "MFU"),
    view.Column("flops", units.FLOP, "FLOP", drop=1),
    view.Column("bytes_hbm", units.BYTE, "HBM", drop=3),
    view.Column("loading", units.SECOND, "data here", drop=2),
    view.Column("label", units.CODE, "called", flexible=True),
)
_SHAPES = (
    view.Column("what", units.TEXT, "what", of=lambda row: _KINDS[row.kind]),
    view.Column("called", units.CODE, "called"),
    view.Column("shape", units.TEXT, "input", of=lambda row: str(list(row.shape))),
    view.Column("turns", units.COUNT, "turns"),
    view.Column("t_est", units.SECOND, "each", mark="strong"),
    view.Column("per_item", units.SECOND, "per item"),
    view.Column("limit", units.TEXT, "limit", of=lambda row: _LIMITS.get(row.limit, row.limit)),
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
    own={
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
    own={"turns": lambda rows: sum(row.turns for row in rows)},
    few=8,
    parts=8,
)


def script_view(result: ScriptCost, output: view.Output) -> view.View:
    """The turns; the pieces of the steady step and its memory; the host; what is assumed."""
    steady = result.steady
    head: list[view.Part] = [view.Note(result.title, "strong"), view.Note(_summary(result))]
    said = dict(result.script.said)
    if lacking := said.pop("scratch", ""):
        head.append(view.Note(lacking, "bad"))
    if chosen := said.pop("choices", ""):
        head.append(view.Note(chosen, "warn"))
    if result.rows:
        rows = _FOLDED_TURNS.of(result.rows)
        is_folded = len(rows) < len(result.rows)
        head.append(view.Table(columns=_OF_FOLDED if is_folded else _TURNS, rows=rows))
        if is_folded:
            head.append(view.Note(_FOLDED, "faint"))
        head += [view.Note(line) for line in _sums(result)]
        head += [view.Note(line, look) for line, look in words.coverage_lines(result.steps)]
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
        for text in (*said.values(), *_folded(result.assumptions()))
    ]
    if notes:
        sections.append(view.Section(title="What is assumed", parts=notes, place=4))
    return view.View(tuple(sections), "A script")


def _folded(texts: Iterable[str]) -> Iterator[str]:
    """Sentences, those that differ in a shape only as one."""
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
    how = _ENDS.get(script.ended, script.ended)
    code = f" with code {script.code}" if script.code else ""
    compiled = "" if result.compiled is None else f"; {result.compiled}"
    return f"{how}{code}, {format_time(script.seconds)} here{compiled}"


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
