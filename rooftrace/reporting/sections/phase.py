"""One phase in detail: whose bytes, which families, parts, modules and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import file_part
from rooftrace.hardware.units import (
    format_share,
    format_time,
)
from rooftrace.reporting.sections.fusing import fusing
from rooftrace.reporting.sections.indicators import indicators, worked_example
from rooftrace.reporting.sections.kernels import kernels_of
from rooftrace.reporting.sections.memory import memory_at_peak
from rooftrace.reporting.sections.tallies import ratio, tally
from rooftrace.reporting.view import model as view, units, words
from rooftrace.tracer.paths import pattern_of
from rooftrace.tracer.vocabulary import ROLES

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating import Estimate
    from rooftrace.reporting.sections.results import Results

MODULES_SHOWN = 25
SUMS = (
    view.Column("flops", units.FLOP, "FLOP"),
    view.Column("bytes", units.BYTE, "HBM"),
)


def _sum_columns(estimate: Estimate) -> tuple[view.Column, ...]:
    return (
        *SUMS,
        view.Column("t_device", units.SECOND, words.time_word([estimate]).capitalize()),
        view.Column("share_of_t_est", units.SHARE, "Share of step"),
        view.Column("limit", units.LIMITS, "Limited by"),
    )


def phase(results: Results, name: str) -> view.Section:
    """The phase under the main execution; bytes and families of every execution side by side."""
    main = results.estimate(name)
    every = [results.estimate(name, execution) for execution in results.executions]
    parts: list[view.Part] = [_roles(every), _families(every), indicators(every)]
    if len(main.by_part()) > 1:
        parts.append(_parts(main))
    parts += [
        _modules(main, results.parameters(name)),
        kernels_of(main),
        worked_example(main),
        fusing(results.headroom[name]),
    ]
    if name in results.memory:
        parts.append(memory_at_peak(results.memory[name]))
    file = file_part(name)
    parts += [view.Image(f"memory-{file}.png"), view.Image(f"roofline-{file}.png")]
    return view.Section(title=name.capitalize(), parts=parts)


def _roles(estimates: Sequence[Estimate]) -> view.Section:
    """Bytes by role, executions side by side; roles that move nothing are left out."""
    columns = [view.Column("role", units.TEXT, "Role")]
    rows: dict[str, dict[str, Any]] = {role: {"role": role} for role in ROLES}
    rows["all"] = {"role": view.Cell("all", "strong")}
    rows["floor"] = {"role": "compulsory floor"}
    for i, estimate in enumerate(estimates):
        size, share = f"bytes {i}", f"share {i}"
        columns += [
            view.Column(size, units.BYTE, estimate.execution.name),
            view.Column(share, units.SHARE, "share"),
        ]
        for role, moved in {
            **estimate.bytes.to_dict(),
            "floor": estimate.bytes_compulsory,
        }.items():
            rows[role] |= {size: moved, share: ratio(moved, estimate.bytes_hbm)}
        rows["all"][size] = view.Cell(estimate.bytes_hbm, "strong")
    for role in ROLES:
        if not any(estimate.bytes.to_dict()[role] for estimate in estimates):
            del rows[role]
    table = view.Table(columns=columns, rows=list(rows.values()), sets=2)
    return view.Section(title="HBM bytes by role", parts=[table])


def _families(estimates: Sequence[Estimate]) -> view.Section:
    """Time, then FLOP, bytes and intensity by family, executions side by side."""
    times = [view.Column("family", units.TEXT, "Family")]
    work = [view.Column("family", units.TEXT, "Family")]
    by_execution = []
    for i, estimate in enumerate(estimates):
        name, head = estimate.execution.name, words.time_word([estimate]).capitalize()
        times += [
            view.Column(f"seconds {i}", units.SECOND, f"{head}, {name}"),
            view.Column(f"share {i}", units.SHARE, "share of step"),
        ]
        work += [
            view.Column(f"flops {i}", units.FLOP, f"FLOP, {name}"),
            view.Column(f"bytes {i}", units.BYTE, "HBM"),
            view.Column(f"intensity {i}", units.INTENSITY, "FLOP/byte"),
        ]
        entries = tally(estimate.rows, lambda row: row.family)
        by_execution.append({entry.key: entry for entry in entries})
    names = [*by_execution[-1], *(name for entries in by_execution for name in entries)]
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        row: dict[str, Any] = {"family": name}
        for i, (estimate, families) in enumerate(zip(estimates, by_execution, strict=True)):
            entry = families.get(name)
            for key in ("flops", "bytes", "intensity", "seconds"):
                row[f"{key} {i}"] = getattr(entry, key, None)
            row[f"share {i}"] = ratio(entry.seconds, estimate.t_est) if entry else None
        rows.append(row)
    tables = [view.Table(columns=work, rows=list(rows), sets=3)]
    waits = [estimate.times.t_launch for estimate in estimates]
    if any(wait > 0 for wait in waits):
        row = {"family": "waiting for the host"}
        for i, (estimate, wait) in enumerate(zip(estimates, waits, strict=True)):
            row |= {f"seconds {i}": wait, f"share {i}": ratio(wait, estimate.t_est)}
        rows.append(row)
    tables.insert(0, view.Table(columns=times, rows=rows, sets=2))
    return view.Section(title="Families", parts=tables)


def _sums(entry: Mapping[str, Any], estimate: Estimate) -> dict[str, Any]:
    """An entry of `by_part` or `by_pattern`, with its share of the step and what limits it."""
    share = ratio(entry["t_device"], estimate.t_est)
    return {**entry, "share_of_t_est": share, "limit": words.LIMITS[entry["regime"]]}


def _parts(estimate: Estimate) -> view.Section:
    columns = (
        view.Column("part", units.TEXT, "Part"),
        view.Column("calls", units.COUNT, "Kernels"),
        *_sum_columns(estimate),
    )
    rows = [{"part": name, **_sums(e, estimate)} for name, e in estimate.by_part().items()]
    notes = [view.Note(text) for text in words.attention_again([(estimate, 1)])]
    return view.Section(title="Parts", parts=[view.Table(columns=columns, rows=rows), *notes])


def _modules(estimate: Estimate, params: Mapping[str, int]) -> view.Section:
    """Module paths with starred indices, most time first."""
    entries = estimate.by_pattern().rows
    classes = {pattern_of(path): name for path, name in estimate.graph.modules.items()}
    columns = (
        view.Column("key", units.MODULE, "Module"),
        view.Column("class", units.TEXT, "Class"),
        view.Column("instances", units.COUNT, "Instances"),
        view.Column("params", units.NUMBER, "Parameters"),
        *_sum_columns(estimate),
    )
    rows = [
        {
            **_sums(entry, estimate),
            "class": classes.get(entry["key"], ""),
            "params": params.get(entry["key"]),
        }
        for entry in entries[:MODULES_SHOWN]
    ]
    parts: list[view.Part] = [view.Table(columns=columns, rows=rows)]
    rest = entries[MODULES_SHOWN:]
    if rest:
        seconds = sum(entry["t_device"] for entry in rest)
        share = format_share(ratio(seconds, estimate.t_est))
        head = words.time_word([estimate])
        text = f"{len(rest):,} more patterns: {head} {format_time(seconds)}, {share}."
        parts.append(view.Note(text))
    return view.Section(title=f"Modules, {estimate.execution.name}", parts=parts)
