"""Views of validations and calibrations, and of the kernels with the largest prediction errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.kernels import Knobs
from rooftrace.graph import pattern_of
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.alignment import Stray
from rooftrace.measured.fit import (
    Calibration,
    Errors,
    Node,
    NodeCheck,
    StepCheck,
    Validation,
    misses,
)
from rooftrace.reporting.figures import parity
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import factor_columns, factor_rows, factor_sentence, sentence

if TYPE_CHECKING:
    from rooftrace.measured.alignment import Alignment

SHOWN = 20
_OFF = units.Unit("s", "number", lambda s: f"{'+' if s >= 0 else '-'}{format_time(abs(s))}")
COLUMNS = (
    view.Column("kernel", units.TEXT, "kernel"),
    view.Column("module", units.CODE, "module", flexible=True),
    view.Column("launches", units.COUNT, "launches", drop=1),
    view.Column("predicted", units.SECOND, "predicted"),
    view.Column("measured", units.SECOND, "measured"),
    view.Column("miss", _OFF, "off by"),
    view.Column("reason", units.TEXT, "likely reason", folded=True),
)


def miss_rows(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> list[dict[str, Any]]:
    """The worst kernels, and calls that are not in the graph; the largest error first, in s."""
    rows = [node_row(node) for node in misses.worst(tuple(nodes), count)]
    rows += [stray_row(stray) for stray in (alignment.only_in_trace if alignment else ())]
    return sorted(rows, key=lambda row: -abs(row["miss"]))[:count]


def stray_row(stray: Stray) -> dict[str, Any]:
    """The row of a call that is not in the graph; its shapes take the place of a module."""
    shapes = ", ".join(str(list(shape)) for shape in stray.shapes if shape)
    return {
        "kernel": stray.name.removeprefix("aten::"),
        "module": shapes[:40],
        "launches": f"{stray.count:.3g}",
        "predicted": None,
        "measured": stray.seconds,
        "miss": stray.seconds,
        "reason": "op missing in the graph",
    }


def node_row(node: Node) -> dict[str, Any]:
    """The row of a kernel: its predicted and measured seconds."""
    return {
        "kernel": words.kernel_name(node.row.name),
        "module": pattern_of(node.row.module) or "(root)",
        "launches": node.row.count,
        "predicted": node.predicted,
        "measured": node.measured,
        "miss": node.miss,
        "reason": node.reason,
    }


def matched_words(nodes: Sequence[Node], alignment: Alignment | None = None) -> str:
    """A sentence on the number of matched kernels and on their sums, predicted and measured."""
    both = [node for node in nodes if node.measured is not None]
    predicted = sum(node.predicted for node in both)
    measured = sum(node.measured or 0.0 for node in both)
    text = (
        f"{len(both):,} of {words.plural(len(nodes), 'kernel')} measured: predicted "
        f"{format_time(predicted)}, measured {format_time(measured)}"
    )
    if predicted:
        text += f" ({measured / predicted:.2f}x)"
    if alignment is not None:
        text += (
            f"; {format_share(alignment.coverage)} of the run's time is matched to the graph by "
            f"{alignment.how}"
        )
    return text


def misses_view(
    nodes: Sequence[Node], alignment: Alignment | None = None, count: int = SHOWN
) -> view.View:
    """How much was matched, and the worst kernels."""
    rows = miss_rows(nodes, alignment, count)
    table = view.Table(columns=COLUMNS, rows=rows, padded=False)
    return view.View((view.Section(parts=[*sentence(matched_words(nodes, alignment)), table]),))


# -- calibrations ----------------------------------------------------------------------------------

_LEFT_OUT = 5
_OTHERS = (
    "measure next: steps of other models, in a table of model,batch,ms: kernels of one model tell "
    "one factor at most"
)
_KNOB = units.Unit("", "number", lambda value: f"{value:.3g}")
_KNOBS = (
    view.Column("name", units.TEXT, "knob"),
    view.Column("start", _KNOB, "start"),
    view.Column("value", _KNOB, "fitted"),
    view.Column("error", units.Unit("", "number", lambda e: f"{e:.0%}"), "std. error"),
    view.Column("note", units.TEXT, "", folded=True),
)
_ERRORS = (
    view.Column("name", units.TEXT, "error on"),
    view.Column("mean", units.SPREAD, "mean"),
    view.Column("median", units.SPREAD, "median"),
    view.Column("p90", units.SPREAD, "p90"),
    view.Column("bias", units.ERROR, "bias"),
    view.Column("worst", units.TEXT, "worst", folded=True),
)


def calibration_view(result: Calibration, output: view.Output) -> view.View:
    """The chip and the measurements, each fitted knob, and the errors with and without them."""
    fit, used = result.fit, result.measured - len(result.failures)
    single = f", and {words.plural(result.kernels, 'single kernel')}" if result.kernels else ""
    head = (
        f"{result.chip}, {result.execution}: {used} of {result.measured} measured "
        f"{result.what}{single}"
    )
    parts: list[view.Part] = [*sentence(head, label="calibration  ")]
    for place, why in list(result.failures.items())[:_LEFT_OUT]:
        parts.append(view.Note(f"  left out, {place}: {why}", "warn"))
    parts.append(view.Table(columns=_KNOBS, rows=[_knob(p) for p in fit.parameters]))
    parts += _traffic(result)
    for (first, second), value in fit.correlations.items():
        text = f"  {first} and {second} stand for each other ({value:+.2f})"
        parts.append(view.Note(text, "warn"))
    parts.append(view.Table(columns=_ERRORS, rows=_error_rows(result)))
    parts.append(view.Note(f"  {_interval(fit.knobs)}"))
    parts += [view.Note(f"  {result.choice}"), *(view.Note(f"  {n}", "warn") for n in result.notes)]
    if result.harms:
        text = "  steps that were left out are predicted worse than with nothing fitted; free fewer"
        parts.append(view.Note(text, "warn"))
    following = _OTHERS if result.what == "kernels" else result.next
    if following is not None:
        parts.append(view.Note(f"  {following}"))
    return view.View((view.Section(parts=parts),), "Calibration")


def _interval(knobs: Knobs) -> str:
    """The interval of steps by these knobs, and its source."""
    low, high = (math.exp(end * knobs.spread) for end in knobs.ends())
    residuals = knobs.of_use
    by = "the spread of single kernels" if residuals is None else residuals.basis
    wide = f"between {low:.2f} and {high:.2f} times"
    return f"90 % of steps are {wide} what is expected ({knobs.use}), by {by}"


def _traffic(result: Calibration) -> list[view.Part]:
    """The factors on bytes and their grounds; those of layers where they were fitted."""
    made = result.traffic
    if made is None:
        return []
    apart = f", {made.apart} left out as far from the others" if made.apart else ""
    off = f"; a kernel is {made.noise:.0%} off what its factors say" if made.kernels else ""
    head = f"bytes of {made.kernels} of {words.plural(made.of, 'kernel')}{apart}{off}"
    parts: list[view.Part] = [
        view.Note(head),
        view.Table(columns=factor_columns, rows=factor_rows(made.factors.factors)),
        view.Note(factor_sentence(made.factors)),
    ]
    if made.by_layer:
        parts.append(view.Table(columns=factor_columns, rows=factor_rows(made.by_layer)))
    return parts


def _knob(parameter: Any) -> dict[str, Any]:
    note = "not identified by these measurements; left at its start"
    if parameter.limited:
        note = "the most that kernels reach of this chip"
    timed = units.SECOND if parameter.name in ("launch", "dispatch") else None
    return {
        "name": parameter.name,
        "start": view.Cell(parameter.start, unit=timed),
        "value": view.Cell(parameter.value, unit=timed),
        "error": parameter.error,
        "note": "" if parameter.identified and not parameter.limited else note,
    }


def _error_rows(result: Calibration) -> list[dict[str, Any]]:
    fit, kind = result.fit, "models" if result.what == "steps" else result.what
    rows = [
        _errors("all, without knobs", result.before),
        _errors(f"{kind} that were fitted", fit.errors),
    ]
    if fit.left_out is not None:
        rows.append(_errors(f"{kind} that were left out", fit.left_out))
    for name, errors in fit.by_class.items():
        rows.append(_errors(f"  mostly {name} ({errors.count})", errors))
    return rows


def _errors(name: str, errors: Errors) -> dict[str, Any]:
    numbers = {key: getattr(errors, key) for key in ("count", "bias", "mean", "median", "p90")}
    return {"name": name, **numbers, "worst": f"{errors.worst:+.0%} {errors.worst_case}"}


# -- validations -----------------------------------------------------------------------------------

STEPS, CLASSES, NODES = 12, 8, 10
"""Lines of a screen for steps of all phases, classes and kernels.  A page has more."""
_NODES_OF_PAGE = 40
_TRAFFIC_SHOWN = 20
"""Kernels below this share of the time are not drawn: they would only stretch the axes."""


def headline(result: Validation) -> str:
    """The source, the chip, the execution, and the number of steps, in a sentence."""
    name = f"{Path(result.source).name} on " if result.source else ""
    knobs = f", knobs {result.knobs}" if result.knobs else ""
    steps = f"{len(result.steps)} of {words.plural(result.planned, 'measured step')}"
    return f"{name}{result.chip.title}, {result.execution}{knobs}: {steps}"


def remarks(result: Validation) -> list[str]:
    """The grounds of the numbers, a sentence each."""
    lines = list(result.notes)
    if result.inside is not None:
        inside, of = result.inside
        lines.append(
            f"{inside} of {words.plural(of, 'step')} ({format_share(inside / of)}) "
            f"{'is' if inside == 1 else 'are'} inside the predicted interval, made to hold 90 %"
        )
    decode = [step for step in result.steps if step.phase == "decode"]
    if len(decode) > 1:
        launch = [step.shares.get("launch", 0.0) for step in decode]
        lines.append(
            f"decode is predicted to be bound by launches for {format_share(min(launch))} to "
            f"{format_share(max(launch))} of a step, median "
            f"{format_share(statistics.median(launch))}"
        )
    if result.coverage is not None:
        lines.append(_coverage_words(result))
    return lines


def _coverage_words(result: Validation) -> str:
    share = result.coverage or 0.0
    text = f"{format_share(share)} of the measured op time belongs to a predicted kernel"
    sums: dict[str, float] = {}
    for _, stray in result.strays:
        sums[stray.name] = sums.get(stray.name, 0.0) + stray.seconds
    most = sorted(sums.items(), key=lambda entry: -entry[1])[:3]
    if not most:
        return text
    names = [f"{n.removeprefix('aten::')} {format_share(s / result.op_seconds)}" for n, s in most]
    return f"{text}; the most of the rest: {words.listed(names)}"


# -- tables ----------------------------------------------------------------------------------------

_ERROR_COLUMNS = (
    view.Column("name", units.TEXT, "error of"),
    view.Column("count", units.COUNT, "steps"),
    view.Column("bias", units.ERROR, "bias"),
    view.Column("mean", units.SPREAD, "mean"),
    view.Column("median", units.SPREAD, "median"),
    view.Column("p90", units.SPREAD, "p90"),
    view.Column("worst", units.TEXT, "worst", clipped=30),
)
_CLASSES = (
    view.Column("name", units.TEXT, "class"),
    view.Column("count", units.COUNT, "launches"),
    view.Column("predicted", units.SECOND, "predicted"),
    view.Column("measured", units.SECOND, "measured"),
    view.Column("share", units.full(units.SHARE), "of the time"),
    view.Column("bias", units.ERROR, "bias"),
    view.Column("mean", units.SPREAD, "mean error"),
)
_TRAFFIC = (
    view.Column("kernel", units.CODE, "kernel"),
    view.Column("module", units.CODE, "module"),
    view.Column("launches", units.COUNT, "launches"),
    view.Column("bytes", units.BYTE, "HBM"),
    view.Column("counted", units.BYTE, "counted"),
    view.Column("error", units.ERROR, "error"),
)


def _rows_of_errors(result: Validation) -> list[dict[str, Any]]:
    """Errors of steps by phase, and of the memory."""
    errors = dict(result.by_phase)
    peaks = result.peak_errors
    if peaks:
        errors["memory at the peak"] = peaks
    return [_errors(name, of) for name, of in errors.items()]


def _step_columns(steps: Sequence[StepCheck]) -> list[view.Column]:
    """The columns that have values for these steps; a row is a step."""
    columns = [
        view.Column("step", units.TEXT, "step", clipped=24, of=parity.short_label),
        view.Column("measured", units.SECOND, "measured"),
        view.Column("predicted", units.SECOND, "predicted"),
        view.Column("interval", units.WORDS, "90 % between", drop=1, of=_interval_of_step),
        view.Column("error", units.ERROR, "error"),
        view.Column("limits", units.TEXT, "limited by", clipped=22, of=_limits),
        view.Column("device", units.SECOND, "device", drop=3),
        view.Column("device_predicted", units.SECOND, "device predicted", drop=3),
        view.Column("peak", units.CAPACITY, "peak", drop=2),
        view.Column("peak_error", units.ERROR, "peak error", drop=2),
    ]
    empty = set()
    if not any(step.interval for step in steps):
        empty |= {"interval"}
    if not any(step.device is not None for step in steps):
        empty |= {"device", "device_predicted"}
    if not any(step.peak_error is not None for step in steps):
        empty |= {"peak", "peak_error"}
    return [column for column in columns if column.key not in empty]


def _interval_of_step(step: StepCheck) -> str | None:
    if step.interval is None:
        return None
    return f"{format_time(step.interval[0])}, {format_time(step.interval[1])}"


def _limits(step: StepCheck) -> str:
    """ "launch 62%, HBM 30%": the two largest, and of decode always the launches."""
    ranked = sorted(step.shares.items(), key=lambda entry: -entry[1])
    shown = [(name, share) for name, share in ranked[:2] if share]
    if step.phase == "decode":
        shown += [(name, share) for name, share in ranked[2:] if name == "launch"]
    return ", ".join(f"{words.LIMITS[name]} {words.percent(share)}" for name, share in shown)


def _grouped(result: Validation) -> dict[str, list[StepCheck]]:
    """Steps by the lines of the summary, worst first."""
    return {
        line: sorted(steps, key=lambda step: (-abs(step.error), step.label))
        for line, steps in result.lines.items()
    }


def _class_rows(result: Validation) -> list[dict[str, Any]]:
    """Classes of kernels, most measured time first."""
    classes = result.by_class
    total = sum(of.measured for of in classes.values())
    keys = ("count", "predicted", "measured", "bias", "mean")
    return [
        {"name": name, "share": of.measured / total, **{key: getattr(of, key) for key in keys}}
        for name, of in classes.items()
    ]


def _node_columns(result: Validation) -> list[view.Column]:
    """The columns of kernels: with the step where there are several, with counted bytes."""
    several = len(result.steps) > 1
    kernel, module, launches, *times, miss, reason = COLUMNS
    columns = [
        replace(kernel, unit=units.CODE, clipped=20),
        replace(module, flexible=not several, drop=2 * several),
        replace(launches, drop=4),
        *times,
        replace(miss, drop=3),
        view.Column("bytes", units.BYTE, "HBM"),
        view.Column("counted", units.BYTE, "counted"),
        replace(reason, clipped=38),
    ]
    if not any(check.dram is not None for check in result.nodes):
        columns = [column for column in columns if column.key not in ("bytes", "counted")]
    step = view.Column("step", units.TEXT, "step", clipped=18)
    return [step, *columns] if several else columns


def _node_rows(result: Validation, count: int, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The worst kernels and unmatched calls.  names: of the steps, by label."""
    rows = []
    for miss in worst(result, count):
        if isinstance(miss, NodeCheck):
            row = {
                **node_row(miss.node),
                "step": names[miss.step],
                "bytes": miss.node.row.bytes,
                "counted": miss.dram,
            }
        else:
            step, stray = miss
            row = {**stray_row(stray), "step": names[step], "bytes": None, "counted": None}
        rows.append(row)
    return rows


def worst(result: Validation, count: int) -> list[NodeCheck | tuple[str, Stray]]:
    """The kernels with the largest errors in seconds, and calls without a kernel; largest first.

    Equal kernels in similar modules (`alike`) are one, with the reason of the worst of them.
    """
    rows: list[tuple[float, NodeCheck | tuple[str, Stray]]] = []
    rows += [(abs(check.node.miss), check) for check in result.alike]
    rows += [(stray.seconds, (step, stray)) for step, stray in result.strays]
    rows.sort(key=lambda entry: -entry[0])
    return [miss for _, miss in rows[:count]]


def _traffic_rows(result: Validation) -> list[dict[str, Any]]:
    """Kernels whose predicted bytes are furthest from the counted ones."""
    counted = [(c.node.row, c.dram) for c in result.alike if c.dram is not None]
    counted.sort(key=lambda pair: (-abs(pair[0].bytes - pair[1]), pair[0].index))
    return [
        {
            "kernel": words.kernel_name(row.name),
            "module": pattern_of(row.module) or "(root)",
            "launches": row.count,
            "bytes": row.bytes,
            "counted": dram,
            "error": row.bytes / dram - 1 if dram else None,
        }
        for row, dram in counted[:_TRAFFIC_SHOWN]
    ]


# -- screen and page -------------------------------------------------------------------------------


def validation_view(result: Validation, output: view.Output) -> view.View:
    """Errors by phase, every step, classes of kernels, and the worst kernels."""
    sections = [_head(result)]
    if len(result.steps) > 1:
        rows = _rows_of_errors(result)
        table = view.Table(columns=_ERROR_COLUMNS, rows=rows, padded=False)
        sections.append(view.Section(parts=[table], place=1))
    sections.append(view.Section(parts=[view.Image("parity.png", "predicted and measured")]))
    sections += _steps(result)
    if result.nodes:
        sections += _kernels(result)
    return view.View(tuple(sections), "Predicted and measured")


def _head(result: Validation) -> view.Section:
    parts: list[view.Part] = [*sentence(headline(result), label="validation  ")]
    if result.idle_words:
        parts.append(view.Note(f"  {result.idle_words}", on="screen"))
        parts.append(view.Note(f"{result.idle_words}.", on="page", bullet=1))
    failures = [f"{place}: {why}" for place, why in result.failures.items()]
    for failure in failures[:_LEFT_OUT]:
        parts.append(view.Note(f"  left out, {failure}", "warn", on="screen"))
    if len(failures) > _LEFT_OUT:
        more = f"  and {len(failures) - _LEFT_OUT} more"
        parts.append(view.Note(more, "warn", on="screen"))
    lines = remarks(result)
    parts += [view.Note(f"  {line}", "faint", on="screen") for line in lines]
    lines += [f"Left out, {failure}" for failure in failures]
    parts += [view.Note(f"{line}.", on="page", bullet=1) for line in lines]
    parts.append(view.Note("Errors are (predicted - measured) / measured.", on="page"))
    return view.Section(parts=parts, place=0)


def _steps(result: Validation) -> list[view.Section]:
    """A page has a table for each phase, a screen one table of the worst steps of each."""
    columns, groups = _step_columns(result.steps), _grouped(result)
    lines = max(3, STEPS // len(groups))
    rows: list[Any] = []
    for name, group in groups.items():
        shown = group[:lines] if len(group) > lines + 1 else group
        rows_of_phase = [{c.key: c.read(step) for c in columns} for step in shown]
        if len(group) > len(shown):
            rows_of_phase.append({"step": f"{len(group) - len(shown)} nearer"})
        rows += [{**row, "phase": name} for row in rows_of_phase]
    several = len(result.steps) > 1
    if not several:
        rows = [{**row, "step": f"  {row['step']}"} for row in rows]
    screen = view.Table(
        columns=columns,
        rows=rows,
        group=(lambda row: row["phase"]) if several else None,
        on="screen",
    )
    sections = [view.Section(parts=[screen], place=2)]
    for name, group in groups.items():
        table = view.Table(columns=columns, rows=group, padded=False, on="page")
        sections.append(view.Section(title=f"{name[0].upper()}{name[1:]}", parts=[table]))
    return sections


def _kernels(result: Validation) -> list[view.Section]:
    """Classes of kernels and the worst kernels; a screen shows the classes in a section apart."""
    classes, columns = _class_rows(result), _node_columns(result)
    short = {step.label: f"{step.group} {step.phase}" for step in result.steps}
    long = {step.label: f"{parity.short_label(step)} {step.phase}" for step in result.steps}
    on_screen = _node_rows(result, NODES, short)
    on_page = _node_rows(result, _NODES_OF_PAGE, long)
    few = classes[:CLASSES] if len(classes) > 1 else []
    parts: list[view.Part] = [
        view.Table(columns=columns, rows=on_screen, on="screen"),
        view.Table(columns=_CLASSES, rows=classes, padded=False, on="page"),
        view.Note("Most seconds off first:", on="page"),
        view.Table(columns=columns, rows=on_page, padded=False, on="page"),
    ]
    traffic = _traffic_rows(result)
    if traffic:
        parts.append(view.Note("Most bytes off first:", on="page"))
        parts.append(view.Table(columns=_TRAFFIC, rows=traffic, padded=False, on="page"))
    table = view.Table(columns=_CLASSES, rows=few, on="screen")
    return [
        view.Section(parts=[table], place=3),
        view.Section(title="Kernels", parts=parts, place=4),
    ]
