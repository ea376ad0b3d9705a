"""A diff in words: for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rooftrace.reporting.text.changed import cut, delta, labelled, left_out, said, times, totals
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.findings.diffs import Diff, changes
    from rooftrace.costmodels.memory import Held
    from rooftrace.tracer.revisions.origins import DiffOrigins

_SIGNS = {"added": ("+", "good"), "removed": ("-", "bad"), "changed": ("~", "warn")}
_ROWS: tuple[view.Column, ...] = (
    delta("time", units.SECOND, "expected time", marked=True),
    delta("eager", units.SECOND, "in eager", marked=True),
    delta("bytes", units.BYTE, "bytes"),
    delta("flops", units.FLOP, "FLOPs", on="page"),
    delta("kernels", units.COUNT, "kernels", on="page"),
    view.Column("cause", units.TEXT, "cause", folded=True),
    view.Column("where", units.CODE, "where", folded=True),
    view.Column("lines", units.CODE, "line", folded=True),
)
_HELD: tuple[view.Column, ...] = (
    delta("bytes", units.CAPACITY, "at the peak", marked=True),
    view.Column("role", units.TEXT, "role", of=lambda row: row.held.role),
    view.Column("what", units.TEXT, "what", folded=True, of=lambda row: held_what(row.held)),
    view.Column(
        "module", units.CODE, "module", folded=True, of=lambda row: row.held.module or "(root)"
    ),
)
_MODULES: tuple[view.Column, ...] = (
    view.Column("status", units.TEXT, "", on="page"),
    view.Column("sign", units.TEXT, "", on="screen", of=lambda row: view.Cell(*_SIGNS[row.status])),
    view.Column(
        "module", units.CODE, "module", folded=True, of=lambda row: times(row.path, row.count)
    ),
    delta("time", units.SECOND, "expected time"),
    delta("bytes", units.BYTE, "bytes"),
    delta("flops", units.FLOP, "FLOPs"),
    view.Column("ops", units.TEXT, "ops", folded=True, of=lambda row: op_words(row)),
)
_LABELS = {
    "time": "expected time",
    "flops": "FLOPs",
    "bytes": "HBM bytes",
    "memory": "peak memory",
    "params": "parameters",
    "kernels": "kernels",
    "communication": "communication",
    "exposed": "exposed of it",
}
_UNITS = {**units.TOTALS, "communication": units.SECOND, "exposed": units.SECOND}
SHOWN = 8
"""Rows of each table that a screen shows."""


def op_words(module: changes.ModuleChange) -> str:
    """What changed in the module's ops: "+2 _to_copy, -1 rms_norm, mm resized"."""
    parts = [f"+{n} {words.op_name(name)}" for name, n in module.ops_added.items()]
    parts += [f"-{n} {words.op_name(name)}" for name, n in module.ops_removed.items()]
    if module.resized:
        names = ", ".join(words.op_name(name) for name in module.resized[:3])
        parts.append(f"{names}{' ...' if len(module.resized) > 3 else ''} resized")
    text = ", ".join(parts[:5]) + (" ..." if len(parts) > 5 else "")
    return text or "grouped or placed otherwise"


def held_what(held: Held) -> str:
    """What is held: "weight", "mul, forward, saved for backward"."""
    name = held.name.rpartition(".")[2]
    made = f"{words.op_name(held.op)}, {held.part}" if held.op else ""
    return (name or made or held.role) + (", saved for backward" if held.saved else "")


def unchanged_words(result: Diff) -> str:
    """That nothing changed, and whether the source files say so too."""
    text, sources = "no change in any phase", result.sources
    if sources is None:
        return text
    if sources.differing:
        names = ", ".join(sources.differing[:4]) + (" ..." if len(sources.differing) > 4 else "")
        count = len(sources.differing)
        files = "1 source file differs" if count == 1 else f"{count} source files differ"
        return f"{text}: {files} ({names}), but no op, size or total changed"
    count = sources.files[0]
    files = "the same source file" if count == 1 else f"the same {count} source files"
    if sources.same_place:
        return f"{text}: both sides were read from {files}"
    equal = "equal source files" if count == 1 else f"{count} source files that are equal"
    return f"{text}: the two have {equal}"


def diff_view(result: Diff, output: view.Output) -> view.View:
    """Totals of each phase before and after, and the modules behind the change."""
    before, after = result.names
    where = f"on {result.chip}, execution {result.execution}"
    head: list[view.Part] = [
        view.Note(
            f"{before} -> {after}   on {result.chip}, {result.execution}",
            on="screen",
            label="diff  ",
        ),
        view.Note(f"O{where[1:]}.", on="page"),
    ]
    head += origin_notes(result.origins)
    for line in _one_sided(result):
        head.append(view.Note(line, "warn", bullet=1))
    if result.unchanged:
        head += said(unchanged_words(result), "good")
    phases = [] if result.unchanged else [_phase(result, i) for i in range(len(result.phases))]
    title = f"Cost of `{before}` -> `{after}`"
    return view.View((view.Section(parts=head), *phases), title)


def _phase(result: Diff, number: int) -> view.Section:
    phase = result.phases[number]
    time = "expected time" if result.expected else "time, a bound"
    labels = _LABELS if result.expected else {**_LABELS, "time": time}
    parts: list[view.Part] = [
        view.Note(phase.phase, "strong", on="screen"),
        totals(phase.totals, _UNITS.__getitem__, labels.__getitem__, result.names),
    ]
    if phase.mesh_changed:
        first, second = (
            ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "none"
            for mesh in phase.meshes
        )
        parts.append(view.Note(f"mesh {first} -> {second}", "warn", bullet=1))
    parts += [view.Note(_assumed(text), "warn", bullet=1) for text in phase.assumed]
    parts += _causes(phase.rows, time)
    for title, columns, rows in (
        ("by module", _MODULES, phase.modules),
        ("memory at the peak", _HELD, phase.held),
    ):
        if rows:
            parts.append(view.Note("", label=title, on="screen"))
            parts.append(view.Note(f"{title[0].upper()}{title[1:]}:", on="page"))
            parts += cut(_timed(columns, time), rows, SHOWN)
            parts += left_out(len(rows) - SHOWN)
    return view.Section(title=phase.phase, parts=parts)


def _timed(columns: Sequence[view.Column], head: str) -> list[view.Column]:
    """Columns, that of the time under a head."""
    return [replace(column, head=head) if column.key == "time" else column for column in columns]


def _causes(rows: Sequence[changes.DiffRow], time: str) -> Iterator[view.Part]:
    """The causes: sentences on a screen, a table on a page."""
    if not rows:
        return
    yield view.Note("", label="by cause", on="screen")
    for row in rows[:SHOWN]:
        seconds = units.signed(units.SECOND).page(row.time.delta)
        yield view.Note(row.cause, row.time.mark, on="screen", label=f"{seconds}  ")
        yield view.Note(_details(row), "faint", on="screen")
    yield from left_out(len(rows) - SHOWN, "more causes")
    has_eager = any(row.eager is not None for row in rows)
    columns = [column for column in _ROWS if column.key != "eager" or has_eager]
    yield view.Note("By cause:", on="page")
    yield view.Table(columns=_timed(columns, time), rows=rows, padded=False, on="page")


def _details(row: changes.DiffRow) -> str:
    """Where a cause is, and what it changes beside the time."""
    amounts = [
        f"{name} {unit.page(change.delta)}".strip()
        for name, change, unit in (
            ("eager", row.eager, units.signed(units.SECOND)),
            ("HBM", row.bytes, units.signed(units.BYTE)),
            ("", row.flops, units.signed(units.FLOP)),
            ("kernels", row.kernels, units.signed(units.COUNT)),
        )
        if change is not None and change.delta
    ]
    return "; ".join(filter(None, (f"in {row.place}" if row.place else "", ", ".join(amounts))))


def _assumed(text: str) -> str:
    """An assumption that one side alone makes."""
    sign, said = text[0], text[2:]
    return f"assumed now: {said}" if sign == "+" else f"no longer assumed: {said}"


def _one_sided(result: Diff) -> list[str]:
    sides = zip(result.names, (result.only_before, result.only_after), strict=True)
    return [f"only {name} has {', '.join(own)}: not compared" for name, own in sides if own]


# -- origins ---------------------------------------------------------------------------------------
# Where the sides of a diff come from, in words: revisions, versions, commits, a bisection.


def origin_notes(origins: DiffOrigins | None) -> list[view.Note]:
    """A line for each thing that a reader of a diff has to know of its sides."""
    if origins is None:
        return []
    notes: list[view.Note] = []
    say = partial(labelled, width=9)
    sides = (("before", origins.before), ("after", origins.after))
    for which, side in sides:
        if str(side):
            notes += say(which, str(side))
    if origins.versions():
        notes += say("versions", ", ".join(origins.versions()), "warn")
    for which, side in sides:
        for text in side.notes:
            notes += say(which, text, "warn")
    if origins.bisection is not None:
        for text in origins.bisection.sentences():
            notes += say("bisect", text)
    for line in origins.lines:
        notes += say(line.phase, str(line))
    if not origins.lines and origins.touched():
        notes += say("commits", origins.touched())
    return notes
