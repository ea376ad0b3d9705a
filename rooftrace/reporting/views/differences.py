"""Views, for the terminal and Markdown, of a diff, the origins of its sides, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rooftrace.graph import pattern_of
from rooftrace.hardware.units import MISSING, format_share, listed, plural
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import (
    cut,
    delta,
    labelled,
    left_out,
    statement,
    times,
    totals,
)
from rooftrace.reporting.views.inventories import VALUE, change_words, parameter_parts

if TYPE_CHECKING:
    from rooftrace.costmodels.memory import Held
    from rooftrace.diffs.costs import Diff, changes
    from rooftrace.diffs.git.origins import DiffOrigins
    from rooftrace.weights import CheckpointDiff, ConfigDiff, TensorDiff, TensorLook

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
    view.Column("what", units.TEXT, "what", folded=True, of=lambda row: held_words(row.held)),
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
    """The changes of a module's ops: "+2 _to_copy, -1 rms_norm, mm resized"."""
    parts = [f"+{n} {words.op_name(name)}" for name, n in module.ops_added.items()]
    parts += [f"-{n} {words.op_name(name)}" for name, n in module.ops_removed.items()]
    if module.resized:
        names = ", ".join(words.op_name(name) for name in module.resized[:3])
        parts.append(f"{names}{' ...' if len(module.resized) > 3 else ''} resized")
    text = ", ".join(parts[:5]) + (" ..." if len(parts) > 5 else "")
    return text or "grouped or placed otherwise"


def held_words(held: Held) -> str:
    """A tensor at the peak: "weight", "mul, forward, saved for backward"."""
    name = held.name.rpartition(".")[2]
    made = f"{words.op_name(held.op)}, {held.part}" if held.op else ""
    return (name or made or held.role) + (", saved for backward" if held.saved else "")


def unchanged_words(result: Diff) -> str:
    """A sentence on a diff without a change, and on whether the source files are equal too."""
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
    """Totals of each phase before and after, and the modules that changed."""
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
    for name, only in zip(result.names, (result.only_before, result.only_after), strict=True):
        if only:
            text = f"only {name} has {', '.join(only)}: not compared"
            head.append(view.Note(text, "warn", bullet=1))
    if result.unchanged:
        head += statement(unchanged_words(result), "good")
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
    """The columns, with this head for the time."""
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
    """The place of a cause, and the other amounts that it changes."""
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
    return f"{'assumed now' if text[0] == '+' else 'no longer assumed'}: {text[2:]}"


# -- origins ---------------------------------------------------------------------------------------


def origin_notes(origins: DiffOrigins | None) -> list[view.Note]:
    """Notes on the sides of a diff: revisions, versions, a bisection, commits."""
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


# -- checkpoints -----------------------------------------------------------------------------------

SHOWN_TENSORS = 15
"""Rows of each table on a screen."""

_NAME = view.Column("name", units.MODULE, "tensor", folded=True)
_COSINE = units.Unit("", "number", lambda c: f"{c:.6f}")
_DRIFT = (
    view.Column("relative", units.full(units.SHARE), "of norm before", of=lambda t: _relative(t)),
    view.Column(
        "difference", VALUE, "difference", of=lambda t: t.drift and t.drift.norm_difference
    ),
    view.Column("cosine", _COSINE, "cosine", of=lambda t: t.drift and t.drift.cosine),
    view.Column("largest", VALUE, "largest", of=lambda t: t.drift and t.drift.largest),
)


def _sides(words_of: Callable[[TensorLook | None], str]) -> tuple[view.Column, ...]:
    """Columns with words on a tensor before and after."""
    return (
        view.Column("before", units.TEXT, "before", folded=True, of=lambda t: words_of(t.before)),
        view.Column("after", units.TEXT, "after", folded=True, of=lambda t: words_of(t.after)),
    )


def _relative(tensor: TensorDiff) -> float | str | None:
    if tensor.drift is None:
        return None
    return "from 0" if tensor.drift.relative is None else tensor.drift.relative


def look(side: TensorLook | None) -> str:
    """The dtype and shape of a tensor: "bf16[8, 4]"."""
    return MISSING if side is None else f"{side.dtype}{list(side.shape)}"


def _special(side: TensorLook | None) -> str:
    return MISSING if side is None else f"{side.nans:,} NaN, {side.infs:,} infinite"


_LOOKS = _sides(look)


def checkpoints_view(result: CheckpointDiff, output: view.Output) -> view.View:
    """The changes: in sum, in values, in names, shapes and dtypes, and in the config."""
    matched_by = view.Column("by", units.TEXT, "known by")
    share = _DRIFT[0]
    drifted = sorted(result.of("drifted"), key=lambda tensor: tensor.moved, reverse=True)
    changed = (*result.of("shape"), *result.of("dtype"))
    sections = [
        view.Section(parts=list(_head(result)), place=1),
        _section("Drifted", drifted, (_NAME, *_DRIFT), 2),
        _section("Changed in dtype or shape", changed, (_NAME, *_LOOKS, share), 3),
        _section("Renamed", _renamed(result), (*_LOOKS, matched_by, share), 4),
        _section("Added", _folded(result.of("added")), (_NAME, _LOOKS[1]), 5),
        _section("Removed", _folded(result.of("removed")), (_NAME, _LOOKS[0]), 6),
        _section("Frozen", _folded(result.of("frozen")), (_NAME, _LOOKS[1]), 7),
        _section("Not finite", result.not_finite, (_NAME, *_sides(_special)), 8),
        *_config(result.config),
    ]
    title = f"Checkpoints {result.names[0]} and {result.names[1]}"
    return view.View(tuple(section for section in sections if section.parts), title)


_STATUSES = {
    "drifted": "drifted",
    "frozen": "frozen (the same bytes)",
    "renamed": "renamed",
    "dtype": "of another dtype",
    "shape": "of another shape",
    "added": "added",
    "removed": "removed",
}


def _head(result: CheckpointDiff) -> Iterator[view.Note]:
    yield view.Note(f"{result.names[0]} -> {result.names[1]}", "strong", on="screen")
    counts = [f"{len(result.of(s)):,} {text}" for s, text in _STATUSES.items() if result.of(s)]
    yield from labelled("tensors", listed(counts) or "none on either side")
    yield from labelled("parameters", change_words(result.params))
    yield from labelled("bytes", change_words(result.bytes, capacity=True))
    if result.unchanged:
        yield view.Note("every tensor has the same bytes", "good", bullet=1)
    else:
        text = f"{format_share(result.relative)} of the norm before, over the tensors in both"
        yield from labelled("drift", text)
    bad = result.not_finite
    if bad:
        text = f"NaN or infinite values in {plural(len(bad), 'tensor')}; drift leaves them out"
        yield view.Note(text, "bad", bullet=1)
    closed: dict[str, int] = {}
    for tensor in result.tensors:
        if tensor.note and tensor.status != "shape":
            closed[tensor.note] = closed.get(tensor.note, 0) + 1
    for note, count in closed.items():
        yield view.Note(f"{plural(count, 'tensor')}: {note}", "warn", bullet=1)
    for note in result.notes:
        yield view.Note(note, "warn", bullet=1)


def _section(
    title: str, rows: Sequence[Any], columns: Sequence[view.Column], place: int
) -> view.Section:
    """A table under a title, cut on a screen; no parts where there are no rows."""
    if not rows:
        return view.Section()
    head = view.Note(title.lower(), "strong", on="screen")
    parts = [head, *cut(columns, rows, SHOWN_TENSORS), *left_out(len(rows) - SHOWN_TENSORS)]
    return view.Section(title=title, parts=parts, place=place)


def _renamed(result: CheckpointDiff) -> list[dict[str, Any]]:
    """Renamed tensors; those of one pattern share a row, with the largest drift."""
    groups: dict[tuple[str, str, str | None], list[TensorDiff]] = {}
    for tensor in result.tensors:
        if tensor.renamed_from:
            patterns = pattern_of(tensor.renamed_from), pattern_of(tensor.name)
            groups.setdefault((*patterns, tensor.renamed_by), []).append(tensor)
    rows = []
    for (old, new, by), tensors in groups.items():
        first, *others = tensors
        names = (old, f"{new} x{len(tensors)}") if others else (first.renamed_from, first.name)
        moved = max(tensors, key=lambda tensor: tensor.moved)
        share = {"relative": _relative(moved)}
        rows.append({"before": names[0], "after": names[1], "by": by, **share})
    return rows


def _folded(tensors: Sequence[TensorDiff]) -> list[dict[str, Any]]:
    """Tensors; equal ones whose names differ in indices alone share a row."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for tensor in tensors:
        key = (pattern_of(tensor.name), look(tensor.before), look(tensor.after))
        groups.setdefault(key, []).append(tensor.name)
    return [
        {
            "name": f"{pattern} x{len(names)}" if len(names) > 1 else names[0],
            "before": before,
            "after": after,
        }
        for (pattern, before, after), names in groups.items()
    ]


def _config(config: ConfigDiff | None) -> Iterator[view.Section]:
    """The fields of the config that changed, and the parameters of the models of both."""
    if config is None:
        return
    columns = (view.Column("key", units.CODE, "field"), *_LOOKS)
    rows = [{"key": k, "before": before, "after": after} for k, before, after in config.fields]
    yield _section("Fields of config.json", rows, columns, 9)
    parts: list[view.Part] = []
    if config.parameters is not None:
        parts = list(parameter_parts(config.parameters))
    elif config.note:
        parts = [view.Note(f"parameters of the two configs: {config.note}", "warn", bullet=1)]
    yield view.Section(title="Models of the two configs", parts=parts, place=10)
