"""A diff in words: for the terminal and as markdown."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.findings.diffs import Change, Diff, ModuleChange

_UNITS = {
    "time": units.SECOND,
    "flops": units.full(units.FLOP),
    "bytes": units.BYTE,
    "memory": units.CAPACITY,
    "params": units.NUMBER,
    "kernels": units.COUNT,
}
_SIGNS = {"added": ("+", "good"), "removed": ("-", "bad"), "changed": ("~", "warn")}
TIME = view.Column("time", units.signed(units.SECOND), "expected time")
_MODULES: tuple[view.Column, ...] = (
    view.Column("status", units.TEXT, "", on="page"),
    view.Column("sign", units.TEXT, "", on="screen"),
    view.Column("module", units.CODE, "module", folded=True),
    TIME,
    view.Column("bytes", units.signed(units.BYTE), "bytes"),
    view.Column("flops", units.signed(units.FLOP), "FLOPs"),
    view.Column("cause", units.TEXT, "cause", folded=True),
)
_LABELS = {
    "time": "expected time",
    "flops": "FLOPs",
    "bytes": "HBM bytes",
    "memory": "peak memory",
    "params": "parameters",
    "kernels": "kernels",
}
_BOUNDS = {"time": "time, a bound"}
SHOWN = 15
LONGEST_NAME = 20


def percent(change: Change) -> str:
    """Relative change: "+5.0 %", "new" where there was nothing before."""
    if change.relative is None:
        return "new"
    return "0 %" if not change.delta else f"{change.relative:+.1%}".replace("%", " %")


def cause(module: ModuleChange) -> str:
    """What changed in the module's ops: "+2 _to_copy, -1 rms_norm, mm resized"."""
    parts = [f"+{n} {words.op_name(name)}" for name, n in module.ops_added.items()]
    parts += [f"-{n} {words.op_name(name)}" for name, n in module.ops_removed.items()]
    if module.resized:
        names = ", ".join(words.op_name(name) for name in module.resized[:3])
        parts.append(f"{names}{' ...' if len(module.resized) > 3 else ''} resized")
    text = ", ".join(parts[:5]) + (" ..." if len(parts) > 5 else "")
    return text or "grouped or placed otherwise"


def columns(result: Diff) -> tuple[str, str]:
    """Column heads: the two names, or before and after where a name is too long for one."""
    if max(map(len, result.names)) > LONGEST_NAME or result.names[0] == result.names[1]:
        return "before", "after"
    return result.names


def _label(module: ModuleChange) -> str:
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
    modules = [_module(module) for module in phase.modules]
    time = TIME if result.expected else replace(TIME, head=_BOUNDS["time"])
    columns_ = tuple(time if column is TIME else column for column in _MODULES)
    parts.append(view.Table(columns=columns_, rows=modules[:SHOWN], on="screen"))
    parts.append(view.Table(columns=columns_, rows=modules, padded=False, on="page"))
    if len(modules) > SHOWN:
        more = f"... and {len(modules) - SHOWN} more modules (--format json has all)"
        parts.append(view.Note(more, "faint", on="screen"))
    return view.Section(title=phase.phase, parts=parts)


def _mark(change: Change) -> str:
    return "worse" if change.delta > 0 else "good" if change.delta < 0 else "faint"


def _module(module: ModuleChange) -> dict[str, Any]:
    sign, mark = _SIGNS[module.status]
    return {
        "status": module.status,
        "sign": view.Cell(sign, mark),
        "module": _label(module),
        "time": module.time.delta,
        "bytes": module.bytes.delta,
        "flops": module.flops.delta,
        "cause": cause(module),
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
