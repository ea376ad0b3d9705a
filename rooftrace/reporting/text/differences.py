"""A diff in words: for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.reporting.text.origins import origin_notes
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.findings.diffs import Diff, changes
    from rooftrace.tracer.changes import Change

_SIGNS = {"added": ("+", "good"), "removed": ("-", "bad"), "changed": ("~", "warn")}
TIME = view.Column("time", units.signed(units.SECOND), "expected time")
_ROWS: tuple[view.Column, ...] = (
    TIME,
    view.Column("eager", units.signed(units.SECOND), "in eager"),
    view.Column("bytes", units.signed(units.BYTE), "bytes"),
    view.Column("flops", units.signed(units.FLOP), "FLOPs", on="page"),
    view.Column("kernels", units.signed(units.COUNT), "kernels", on="page"),
    view.Column("cause", units.TEXT, "cause", folded=True),
    view.Column("module", units.CODE, "where", folded=True),
    view.Column("line", units.CODE, "line", folded=True),
)
_HELD: tuple[view.Column, ...] = (
    view.Column("bytes", units.signed(units.CAPACITY), "at the peak"),
    view.Column("role", units.TEXT, "role"),
    view.Column("what", units.TEXT, "what", folded=True),
    view.Column("module", units.CODE, "module", folded=True),
)
_MODULES: tuple[view.Column, ...] = (
    view.Column("status", units.TEXT, "", on="page"),
    view.Column("sign", units.TEXT, "", on="screen"),
    view.Column("module", units.CODE, "module", folded=True),
    TIME,
    view.Column("bytes", units.signed(units.BYTE), "bytes"),
    view.Column("flops", units.signed(units.FLOP), "FLOPs"),
    view.Column("ops", units.TEXT, "ops", folded=True),
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
_BOUNDS = {"time": "time, a bound"}
SHOWN = 8
"""Rows of each table that a screen shows."""
LONGEST_NAME = 20


def percent(change: Change) -> str:
    """Relative change: "+5.0 %", "new" where there was nothing before."""
    if change.relative is None:
        return "new"
    return "0 %" if not change.delta else f"{change.relative:+.1%}".replace("%", " %")


def op_words(module: changes.ModuleChange) -> str:
    """What changed in the module's ops: "+2 _to_copy, -1 rms_norm, mm resized"."""
    parts = [f"+{n} {words.op_name(name)}" for name, n in module.ops_added.items()]
    parts += [f"-{n} {words.op_name(name)}" for name, n in module.ops_removed.items()]
    if module.resized:
        names = ", ".join(words.op_name(name) for name in module.resized[:3])
        parts.append(f"{names}{' ...' if len(module.resized) > 3 else ''} resized")
    text = ", ".join(parts[:5]) + (" ..." if len(parts) > 5 else "")
    return text or "grouped or placed otherwise"


def held_what(held: changes.HeldChange) -> str:
    """What is held: "weight", "mul, forward, saved for backward"."""
    name = held.name.rpartition(".")[2]
    made = f"{words.op_name(held.op)}, {held.part}" if held.op else ""
    return (name or made or held.role) + (", saved for backward" if held.saved else "")


def columns(result: Diff) -> tuple[str, str]:
    """Column heads: the two names, or before and after where a name is too long for one."""
    if max(map(len, result.names)) > LONGEST_NAME or result.names[0] == result.names[1]:
        return "before", "after"
    return result.names


def _label(module: changes.ModuleChange) -> str:
    path = module.path or "(root)"
    return f"{path} x{module.count}" if module.count > 1 else path


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


def diff_view(result: Diff) -> view.View:
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
        text = unchanged_words(result)
        head.append(view.Note(text, "good", on="screen"))
        head.append(view.Note(f"N{text[1:]}.", on="page"))
    phases = [] if result.unchanged else [_phase(result, i) for i in range(len(result.phases))]
    title = f"Cost of `{before}` -> `{after}`"
    return view.View((view.Section(parts=head), *phases), title)


def _phase(result: Diff, number: int) -> view.Section:
    phase, names = result.phases[number], columns(result)
    totals = [
        {
            "metric": _LABELS[metric] if result.expected else _BOUNDS.get(metric, _LABELS[metric]),
            "before": view.Cell(change.before, unit=_UNITS[metric]),
            "after": view.Cell(change.after, unit=_UNITS[metric]),
            "change": view.Cell(change.delta, _mark(change), unit=units.signed(_UNITS[metric])),
            "relative": view.Cell(percent(change), _mark(change)),
        }
        for metric, change in phase.totals.items()
    ]
    parts: list[view.Part] = [
        view.Note(phase.phase, "strong", on="screen"),
        view.Table(
            columns=(
                view.Column("metric", units.TEXT, ""),
                view.Column("before", units.COUNT, names[0]),
                view.Column("after", units.COUNT, names[1]),
                view.Column("change", units.COUNT, "change"),
                view.Column("relative", units.WORDS, ""),
            ),
            rows=totals,
            padded=False,
        ),
    ]
    time = TIME if result.expected else replace(TIME, head=_BOUNDS["time"])
    if phase.mesh_changed:
        first, second = (
            ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "none"
            for mesh in phase.meshes
        )
        parts.append(view.Note(f"mesh {first} -> {second}", "warn", bullet=1))
    parts += [view.Note(_assumed(text), "warn", bullet=1) for text in phase.assumed]
    parts += _causes(phase.rows, time)
    for title, columns_, rows in (
        ("by module", _MODULES, [_module(module) for module in phase.modules]),
        ("memory at the peak", _HELD, [_held(held) for held in phase.held]),
    ):
        if rows:
            columns_ = tuple(time if column is TIME else column for column in columns_)
            parts += _table(title, columns_, rows)
    return view.Section(title=phase.phase, parts=parts)


def _table(
    title: str, columns_: Sequence[view.Column], rows: Sequence[dict[str, Any]]
) -> Iterator[view.Part]:
    """A table under its title; a screen shows the first rows only."""
    yield view.Note("", label=title, on="screen")
    yield view.Note(f"{title[0].upper()}{title[1:]}:", on="page")
    yield view.Table(columns=columns_, rows=rows[:SHOWN], on="screen")
    yield view.Table(columns=columns_, rows=rows, padded=False, on="page")
    if len(rows) > SHOWN:
        more = f"... and {len(rows) - SHOWN} more (--format json has all)"
        yield view.Note(more, "faint", on="screen")


def _causes(rows: Sequence[changes.DiffRow], time: view.Column) -> Iterator[view.Part]:
    """The causes: sentences on a screen, a table on a page."""
    if not rows:
        return
    yield view.Note("", label="by cause", on="screen")
    for row in rows[:SHOWN]:
        seconds = units.signed(units.SECOND).page(row.time.delta)
        yield view.Note(row.cause, _mark(row.time), on="screen", label=f"{seconds}  ")
        yield view.Note(_details(row), "faint", on="screen")
    if len(rows) > SHOWN:
        more = f"... and {len(rows) - SHOWN} more causes (--format json has all)"
        yield view.Note(more, "faint", on="screen")
    columns_ = tuple(time if column is TIME else column for column in _rows_columns(rows))
    yield view.Note("By cause:", on="page")
    yield view.Table(columns=columns_, rows=[*map(_row, rows)], padded=False, on="page")


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


def _rows_columns(rows: Sequence[changes.DiffRow]) -> tuple[view.Column, ...]:
    """The columns of the causes, without eager times where nothing has any."""
    has_eager = any(row.eager is not None for row in rows)
    return tuple(column for column in _ROWS if column.key != "eager" or has_eager)


def _row(row: changes.DiffRow) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "time": view.Cell(row.time.delta, _mark(row.time)),
        "bytes": row.bytes.delta,
        "flops": row.flops.delta,
        "kernels": row.kernels.delta,
        "cause": row.cause,
        "module": row.where,
        "line": row.lines,
    }
    if row.eager is not None:
        cells["eager"] = view.Cell(row.eager.delta, _mark(row.eager))
    return cells


def _held(held: changes.HeldChange) -> dict[str, Any]:
    return {
        "bytes": view.Cell(held.bytes.delta, _mark(held.bytes)),
        "role": held.role,
        "what": held_what(held),
        "module": held.module or "(root)",
    }


def _assumed(text: str) -> str:
    """An assumption that one side alone makes."""
    sign, said = text[0], text[2:]
    return f"assumed now: {said}" if sign == "+" else f"no longer assumed: {said}"


def _mark(change: Change) -> str:
    return "worse" if change.delta > 0 else "good" if change.delta < 0 else "faint"


def _module(module: changes.ModuleChange) -> dict[str, Any]:
    sign, mark = _SIGNS[module.status]
    return {
        "status": module.status,
        "sign": view.Cell(sign, mark),
        "module": _label(module),
        "time": module.time.delta,
        "bytes": module.bytes.delta,
        "flops": module.flops.delta,
        "ops": op_words(module),
    }


def _one_sided(result: Diff) -> list[str]:
    lines = []
    for phases, name in (
        (result.only_before, result.names[0]),
        (result.only_after, result.names[1]),
    ):
        if phases:
            lines.append(f"only {name} has {', '.join(phases)}: not compared")
    return lines
