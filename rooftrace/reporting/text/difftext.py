"""A diff in words: for the terminal and as markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.findings.diffs import Change, Diff, ModuleChange
from rooftrace.hardware.units import (
    format_capacity,
    format_count,
    format_flops,
    format_time,
    format_traffic,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_FORMATS: dict[str, Callable[[float], str]] = {
    "time": format_time,
    "flops": format_flops,
    "bytes": format_traffic,
    "memory": format_capacity,
    "params": format_count,
    "kernels": lambda n: f"{n:,.0f}",
}
_LABELS = {
    "time": "t_est",
    "flops": "FLOPs",
    "bytes": "HBM bytes",
    "memory": "peak memory",
    "params": "parameters",
    "kernels": "kernels",
}
SHOWN = 15
LONGEST_NAME = 20


def signed(metric: str, value: float) -> str:
    """A change with its sign: "+2.10 GB"."""
    if not value:
        return "0"
    return ("+" if value > 0 else "-") + _FORMATS[metric](abs(value))


def percent(change: Change) -> str:
    """Relative change: "+5.0 %", "new" where there was nothing before."""
    if change.relative is None:
        return "new"
    return "0 %" if not change.delta else f"{change.relative:+.1%}".replace("%", " %")


def cause(module: ModuleChange) -> str:
    """What changed in the module's ops: "+2 _to_copy, -1 rms_norm, mm resized"."""
    parts = [f"+{n} {_short(name)}" for name, n in module.ops_added.items()]
    parts += [f"-{n} {_short(name)}" for name, n in module.ops_removed.items()]
    if module.resized:
        names = ", ".join(_short(name) for name in module.resized[:3])
        parts.append(f"{names}{' ...' if len(module.resized) > 3 else ''} resized")
    text = ", ".join(parts[:5]) + (" ..." if len(parts) > 5 else "")
    return text or "grouped or placed otherwise"


def _short(name: str) -> str:
    return name.removeprefix("aten.").removeprefix("rooftrace.")


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


def render_diff(result: Diff) -> RenderableType:
    """The terminal view."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[Any] = [
        Text.assemble(
            ("diff  ", "bold"),
            f"{result.names[0]} -> {result.names[1]}   on {result.chip}, {result.execution}",
        )
    ]
    for line in _one_sided(result):
        parts.append(Text(line, style="yellow"))
    if result.unchanged:
        parts.append(Text(unchanged_words(result), style="green"))
        return Group(*parts)
    for phase in result.phases:
        table = Table(
            title=phase.phase,
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for column in ("", *columns(result), "change", ""):
            table.add_column(
                column, justify="left" if column == "" and not table.columns else "right"
            )
        for metric, change in phase.totals.items():
            style = "red" if change.delta > 0 else "green" if change.delta < 0 else "dim"
            table.add_row(
                _LABELS[metric],
                _FORMATS[metric](change.before),
                _FORMATS[metric](change.after),
                Text(signed(metric, change.delta), style),
                Text(percent(change), style),
            )
        parts.append(table)
        if not phase.modules:
            continue
        modules = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
        modules.add_column("")
        modules.add_column("module", overflow="fold", ratio=3)
        for column in ("time", "bytes", "FLOPs"):
            modules.add_column(column, justify="right", no_wrap=True)
        modules.add_column("cause", overflow="fold", ratio=3)
        marks = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow")}
        for module in phase.modules[:SHOWN]:
            mark, style = marks[module.status]
            modules.add_row(
                Text(mark, style),
                _label(module),
                signed("time", module.time.delta),
                signed("bytes", module.bytes.delta),
                signed("flops", module.flops.delta),
                cause(module),
            )
        parts.append(modules)
        if len(phase.modules) > SHOWN:
            parts.append(
                Text(
                    f"... and {len(phase.modules) - SHOWN} more modules (--format json has all)",
                    style="dim",
                )
            )
    return Group(*parts)


def diff_markdown(result: Diff) -> str:
    """GitHub-flavoured markdown, for a pull request."""
    before, after = columns(result)
    lines = [
        f"## Cost of `{result.names[0]}` -> `{result.names[1]}`",
        "",
        f"On {result.chip}, execution {result.execution}.",
        "",
    ]
    lines += [f"- {line}" for line in _one_sided(result)]
    if result.unchanged:
        return "\n".join([*lines, f"N{unchanged_words(result)[1:]}.", ""])
    for phase in result.phases:
        lines += [
            f"### {phase.phase}",
            "",
            f"| | {before} | {after} | change | |",
            "|---|---:|---:|---:|---:|",
        ]
        for metric, change in phase.totals.items():
            lines.append(
                f"| {_LABELS[metric]} | {_FORMATS[metric](change.before)} "
                f"| {_FORMATS[metric](change.after)} "
                f"| {signed(metric, change.delta)} | {percent(change)} |"
            )
        if phase.modules:
            lines += [
                "",
                "| | module | time | bytes | FLOPs | cause |",
                "|---|---|---:|---:|---:|---|",
            ]
            lines += [
                f"| {m.status} | `{_label(m)}` | {signed('time', m.time.delta)} | "
                f"{signed('bytes', m.bytes.delta)} | {signed('flops', m.flops.delta)} | "
                f"{cause(m)} |"
                for m in phase.modules
            ]
        lines.append("")
    return "\n".join(lines)


def _one_sided(result: Diff) -> list[str]:
    lines = []
    for phases, name in (
        (result.only_before, result.names[0]),
        (result.only_after, result.names[1]),
    ):
        if phases:
            lines.append(f"only {name} has {', '.join(phases)}: not compared")
    return lines
