"""Predicted against measured in words: one screen, a page, and the points of its figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import (
    MISSING,
    format_capacity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.measured.alignment import Stray
from rooftrace.measured.fit import Errors
from rooftrace.measured.validate import NodeCheck, StepCheck
from rooftrace.reporting.figures import ParityPoint, kernel_points
from rooftrace.reporting.text.misstext import HEADS, node_cells, stray_cells
from rooftrace.reporting.text.words import LIMITS, kernel_name, listed, percent, plural
from rooftrace.tracer.graph import pattern_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rooftrace.measured.validate import Validation

STEPS, CLASSES, NODES = 12, 8, 10
"""Lines on the one screen: steps of all phases, classes, kernels.  The page has more."""
_NODES_OF_PAGE = 40
_ERROR_HEADS = ("error of", "steps", "bias", "mean", "median", "p90", "worst")
_CLASS_HEADS = ("class", "launches", "predicted", "measured", "of the time", "bias", "mean error")
_TRAFFIC_HEADS = ("kernel", "module", "launches", "HBM", "counted", "error")
_DROPS = {"90 % between": 1, "peak": 2, "peak error": 2, "device": 3, "device predicted": 3}
"""Columns of steps that a narrow screen does without, the highest number first."""
_LEFT_OUT = 5
_LEAST_SHOWN = 1e-3
"""Share of the time below which a kernel is no point of the figure: axes end where time does."""


def headline(found: Validation) -> str:
    """What was compared with what."""
    name = f"{Path(found.source).name} on " if found.source else ""
    knobs = f", knobs {found.knobs}" if found.knobs else ""
    steps = f"{len(found.steps)} of {plural(found.planned, 'measured step')}"
    return f"{name}{found.chip.title}, {found.execution}{knobs}: {steps}"


def remarks(found: Validation) -> list[str]:
    """What the numbers rest on, one sentence each."""
    lines = list(found.notes)
    if found.inside is not None:
        inside, of = found.inside
        lines.append(
            f"{inside} of {plural(of, 'step')} ({format_share(inside / of)}) "
            f"{'is' if inside == 1 else 'are'} inside the predicted interval, made to hold 90 %"
        )
    decode = [step for step in found.steps if step.phase == "decode"]
    if len(decode) > 1:
        launch = [step.shares.get("launch", 0.0) for step in decode]
        lines.append(
            f"decode is predicted to be bound by launches for {format_share(min(launch))} to "
            f"{format_share(max(launch))} of a step, median "
            f"{format_share(statistics.median(launch))}"
        )
    if found.coverage is not None:
        lines.append(_coverage_words(found))
    return lines


def _coverage_words(found: Validation) -> str:
    share = found.coverage or 0.0
    text = f"{format_share(share)} of the measured op time belongs to a predicted kernel"
    sums: dict[str, float] = {}
    for _, stray in found.strays:
        sums[stray.name] = sums.get(stray.name, 0.0) + stray.seconds
    most = sorted(sums.items(), key=lambda entry: -entry[1])[:3]
    if not most:
        return text
    names = [f"{n.removeprefix('aten::')} {format_share(s / found.op_seconds)}" for n, s in most]
    return f"{text}; the most of the rest: {listed(names)}"


# -- cells -----------------------------------------------------------------------------------------


def error_rows(found: Validation) -> list[list[str]]:
    """Errors of steps by phase, and of the memory; cells of _ERROR_HEADS."""
    rows = [[name, *_error_cells(one)] for name, one in found.by_phase.items()]
    peaks = found.peak_errors
    return [*rows, ["memory at the peak", *_error_cells(peaks)]] if peaks else rows


def _error_cells(one: Errors) -> list[str]:
    numbers = [f"{one.mean:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}"]
    return [f"{one.count}", f"{one.bias:+.1%}", *numbers, f"{one.worst:+.0%} {one.worst_case}"]


def _step_columns(steps: Sequence[StepCheck]) -> list[tuple[str, Any]]:
    """(head, how to make its cell) of what these steps have."""
    columns: list[tuple[str, Any]] = [
        ("measured", lambda step: format_time(step.measured)),
        ("predicted", lambda step: format_time(step.predicted)),
        ("error", lambda step: f"{step.error:+.1%}"),
    ]
    if any(step.interval for step in steps):
        columns.insert(2, ("90 % between", _interval))
    columns.append(("limited by", _limits))
    if any(step.device is not None for step in steps):
        columns.append(("device", lambda step: _time(step.device)))
        columns.append(("device predicted", lambda step: format_time(step.device_predicted)))
    if any(step.peak_error is not None for step in steps):
        columns.append(("peak", lambda step: format_capacity(step.peak)))
        columns.append(("peak error", _peak_error))
    return columns


def _interval(step: StepCheck) -> str:
    if step.interval is None:
        return MISSING
    return f"{format_time(step.interval[0])}, {format_time(step.interval[1])}"


def _limits(step: StepCheck) -> str:
    """ "launch 62%, HBM 30%": the two largest, and of decode always the launches."""
    ranked = sorted(step.shares.items(), key=lambda entry: -entry[1])
    shown = [(name, share) for name, share in ranked[:2] if share]
    if step.phase == "decode":
        shown += [(name, share) for name, share in ranked[2:] if name == "launch"]
    return ", ".join(f"{LIMITS[name]} {percent(share)}" for name, share in shown)


def _peak_error(step: StepCheck) -> str:
    return MISSING if step.peak_error is None else f"{step.peak_error:+.1%}"


def _time(seconds: float | None) -> str:
    return MISSING if seconds is None else format_time(seconds)


def _short(step: StepCheck) -> str:
    """The label without what the heading above it says."""
    said = {step.phase, "eager", "compiled"}
    words = [word for word in step.label.split() if word not in said]
    return " ".join(words) or step.label


def _grouped(found: Validation) -> dict[str, list[StepCheck]]:
    """Steps by the lines of the summary, worst first."""
    return {
        line: sorted(steps, key=lambda step: (-abs(step.error), step.label))
        for line, steps in found.lines.items()
    }


def class_rows(found: Validation) -> list[list[str]]:
    """Cells of _CLASS_HEADS, most measured time first."""
    classes = found.by_class
    whole = sum(one.measured for one in classes.values())
    return [
        [
            name,
            f"{one.count:,}",
            format_time(one.predicted),
            format_time(one.measured),
            format_share(one.measured / whole),
            f"{one.bias:+.1%}",
            f"{one.mean:.1%}",
        ]
        for name, one in classes.items()
    ]


def _node_table(
    found: Validation, count: int, names: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the worst kernels and unmatched calls; columns that nothing fills are
    left out.  names: of the steps, by label."""
    several = len(found.steps) > 1
    counted = any(check.dram is not None for check in found.nodes)
    heads = [*HEADS[:6], *(["HBM", "counted"] if counted else []), HEADS[6]]
    if several:
        heads.insert(0, "step")
    rows = []
    for one in worst(found, count):
        if isinstance(one, NodeCheck):
            step, cells = one.step, node_cells(one.node)
            traffic = [format_traffic(one.node.row.bytes), format_traffic(one.dram)]
        else:
            step, cells = one[0], stray_cells(one[1])
            traffic = [MISSING, MISSING]
        row = [*cells[:6], *(traffic if counted else []), cells[6]]
        rows.append([names[step], *row] if several else row)
    return heads, rows


def worst(found: Validation, count: int) -> list[NodeCheck | tuple[str, Stray]]:
    """The kernels, and calls without a kernel, that are most seconds off, most first.

    Kernels of one name in modules that are alike are one, with the reason of the worst of them.
    """
    rows: list[tuple[float, NodeCheck | tuple[str, Stray]]] = []
    rows += [(abs(check.node.miss), check) for check in alike(found.nodes)]
    rows += [(stray.seconds, (step, stray)) for step, stray in found.strays]
    rows.sort(key=lambda entry: -entry[0])
    return [one for _, one in rows[:count]]


def alike(checks: Sequence[NodeCheck]) -> list[NodeCheck]:
    """Kernels of one step with the same name and work, in modules that differ by their numbers, as
    one."""
    groups: dict[Any, list[NodeCheck]] = {}
    for check in checks:
        row, unknown = check.node.row, (check.node.measured is None, check.dram is None)
        work = (row.flops_causal or row.bytes) // row.count
        key = (check.step, row.name, pattern_of(row.module), row.part, work, unknown)
        groups.setdefault(key, []).append(check)
    return [_summed(group) if len(group) > 1 else group[0] for group in groups.values()]


def _summed(group: Sequence[NodeCheck]) -> NodeCheck:
    first = max(group, key=lambda check: abs(check.node.miss))
    all_nodes = [check.node for check in group]
    row = replace(
        first.node.row,
        count=sum(node.row.count for node in all_nodes),
        bytes=sum(node.row.bytes for node in all_nodes),
    )
    known = first.node.measured is not None
    node = replace(
        first.node,
        row=row,
        predicted=sum(node.predicted for node in all_nodes),
        measured=sum(node.measured or 0.0 for node in all_nodes) if known else None,
    )
    dram = None if first.dram is None else sum(check.dram or 0.0 for check in group)
    return replace(first, node=node, dram=dram)


def traffic_rows(found: Validation, count: int = 20) -> list[list[str]]:
    """Kernels whose predicted bytes are furthest from what was counted; cells of _TRAFFIC_HEADS."""
    known = [(c.node.row, c.dram) for c in alike(found.nodes) if c.dram is not None]
    known.sort(key=lambda pair: (-abs(pair[0].bytes - pair[1]), pair[0].index))
    return [
        [
            kernel_name(row.name),
            pattern_of(row.module) or "(root)",
            f"{row.count:,}",
            format_traffic(row.bytes),
            format_traffic(dram),
            f"{row.bytes / dram - 1:+.1%}" if dram else MISSING,
        ]
        for row, dram in known[:count]
    ]


def parity_points(found: Validation) -> tuple[list[ParityPoint], str]:
    """By kernel for a trace, else by step, coloured by phase; and what is left out, in words."""
    if found.kind == "trace":
        points = kernel_points([check.node for check in alike(found.nodes)])
        least = _LEAST_SHOWN * sum(point.weight for point in points)
        shown = [point for point in points if point.weight >= least]
        few = len(points) - len(shown)
        left = f"{plural(few, 'kernel')} below {format_share(_LEAST_SHOWN)} of the time left out"
        return shown, left if few else ""
    points = [
        ParityPoint(
            f"{_short(step)} {step.phase}", step.predicted, step.measured,
            step.line, max(step.predicted, step.measured),
        )
        for step in found.steps
        if step.predicted > 0
    ]  # fmt: skip
    return points, ""


# -- one screen ------------------------------------------------------------------------------------


def render_validation(found: Validation) -> RenderableType:
    """The terminal view."""
    from rich.console import Group
    from rich.text import Text

    from rooftrace.reporting.text.grids import Column, grid

    parts: list[Any] = [Text.assemble(("validation  ", "bold"), headline(found))]
    failures = list(found.failures.items())
    for place, why in failures[:_LEFT_OUT]:
        parts.append(Text(f"  left out, {place}: {why}", style="yellow"))
    if len(failures) > _LEFT_OUT:
        parts.append(Text(f"  and {len(failures) - _LEFT_OUT} more", style="yellow"))
    parts += [Text(f"  {line}", style="dim") for line in remarks(found)]
    if len(found.steps) > 1:
        columns = [Column(head, right=head not in ("error of", "worst")) for head in _ERROR_HEADS]
        columns[-1] = Column("worst", right=False, clipped=30)
        parts += [Text(), grid(columns, error_rows(found))]
    parts += [Text(), _steps_grid(found)]
    classes = class_rows(found)
    if len(classes) > 1:
        columns = [Column(head, right=head != "class") for head in _CLASS_HEADS]
        parts += [Text(), grid(columns, classes[:CLASSES])]
    if found.nodes:
        several = len(found.steps) > 1
        names = {step.label: f"{step.group} {step.phase}" for step in found.steps}
        heads, rows = _node_table(found, NODES, names)
        parts += [Text(), grid([_node_column(head, several) for head in heads], rows)]
    return Group(*parts)


def _node_column(head: str, several: bool) -> Any:
    from rooftrace.reporting.text.grids import Column

    left = head in ("step", "kernel", "module", "likely reason")
    return Column(
        head,
        right=not left,
        drop={"launches": 4, "off by": 3, "module": 2 * several}.get(head, 0),
        flexible=head == "module" and not several,
        clipped={"step": 18, "kernel": 20, "likely reason": 38}.get(head, 0),
    )


def _steps_grid(found: Validation) -> Any:
    from rich.text import Text

    from rooftrace.reporting.text.grids import Column, grid

    made = _step_columns(found.steps)
    columns = [Column("step", right=False, clipped=24)]
    for head, _ in made:
        left = head == "limited by"
        columns.append(Column(head, right=not left, drop=_DROPS.get(head, 0), clipped=22 * left))
    groups = _grouped(found)
    lines = max(3, STEPS // len(groups))
    rows: list[list[Any]] = []
    for name, group in groups.items():
        if len(found.steps) > 1:
            rows.append([Text(name, style="bold"), *[""] * len(made)])
        shown = group[:lines] if len(group) > lines + 1 else group
        rows += [[f"  {_short(step)}", *(make(step) for _, make in made)] for step in shown]
        if len(group) > len(shown):
            rows.append([f"  {len(group) - len(shown)} nearer", *[""] * len(made)])
    return grid(columns, rows)


# -- the page --------------------------------------------------------------------------------------


def validation_markdown(found: Validation, files: Sequence[str] = ()) -> str:
    """GitHub-flavoured markdown: every step, every class, the worst kernels.  files: beside it."""
    lines = ["## Predicted and measured", "", f"{headline(found)}.", ""]
    lines += [f"- {line}." for line in remarks(found)]
    lines += [f"- Left out, {place}: {why}." for place, why in found.failures.items()]
    lines += ["", "Errors are (predicted - measured) / measured.", ""]
    if len(found.steps) > 1:
        lines += [*_table(_ERROR_HEADS, error_rows(found), left=("error of", "worst")), ""]
    if "parity.png" in files:
        lines += ["![predicted and measured](parity.png)", ""]
    made = _step_columns(found.steps)
    heads = ["step", *(head for head, _ in made)]
    for name, group in _grouped(found).items():
        rows = [[_short(step), *(make(step) for _, make in made)] for step in group]
        lines += [f"### {name[0].upper()}{name[1:]}", ""]
        lines += [*_table(heads, rows, left=("step", "limited by")), ""]
    if found.nodes:
        names = {step.label: f"{_short(step)} {step.phase}" for step in found.steps}
        heads, rows = _node_table(found, _NODES_OF_PAGE, names)
        lines += ["### Kernels", ""]
        lines += [*_table(_CLASS_HEADS, class_rows(found), left=("class",)), ""]
        left = ("step", "kernel", "module", "likely reason")
        lines += ["Most seconds off first:", "", *_table(heads, rows, left=left), ""]
        traffic = traffic_rows(found)
        if traffic:
            lines += ["Most bytes off first:", ""]
            lines += [*_table(_TRAFFIC_HEADS, traffic, left=("kernel", "module")), ""]
    return "\n".join(lines)


_CODE = ("kernel", "module")
"""Columns that are set as code: a name with stars or underscores is no emphasis."""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> list[str]:
    rule = "|".join("---" if head in left else "---:" for head in heads)
    lines = [f"| {' | '.join(heads)} |", f"|{rule}|"]
    for row in rows:
        cells = [cell.replace("|", "/") for cell in row]
        cells = [
            f"`{cell}`" if head in _CODE and cell else cell
            for head, cell in zip(heads, cells, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
