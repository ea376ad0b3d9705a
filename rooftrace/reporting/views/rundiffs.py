"""View of the difference of two measured runs: slower ops, and the predicted difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rooftrace.diffs.runs import RunDiff, rundiff
from rooftrace.hardware.units import MISSING, arrow, format_time
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import cut, delta, left_out, statement, totals

ROWS, IN_NOISE, GROUPS, NOTES = 15, 5, 8, 6
"""Lines of a screen: kernels; kernels within noise where there are no others; modules and
families; disagreements."""
KERNEL = 34
"""Letters of a kernel's name; JSON has the full name."""

_LABELS = {
    "time": "step",
    "device": "device busy",
    "computing": "  computing",
    "exposed": "  communication, exposed",
    "copying": "  copies, exposed",
    "idle": "device idle",
    "waiting": "  waits for the host",
    "queued": "  between queued kernels",
    "outside": "  before and after kernels",
    "communication": "communication",
    "hidden": "  hidden by computing",
    "work": "kernels added up",
    "kernels": "kernels",
    "copies": "copies and fills",
    "memory": "peak memory",
}
_ON_HOST = {
    "device": "inside of ops",
    "idle": "outside of ops",
    "work": "ops added up",
    "kernels": "calls of ops",
}
_REPLAYED = {"work": "ops, timed alone", "kernels": "calls of ops"}
_UNITS = {"second": units.SECOND, "count": units.NUMBER, "byte": units.CAPACITY}
_SIGNS = {
    "slower": ("slower", "bad"),
    "faster": ("faster", "good"),
    "new": ("new", "warn"),
    "gone": ("gone", "good"),
    "replaced": ("replaced", "warn"),
    "resized": ("resized", "faint"),
    "unclear": ("in noise", "faint"),
    "same": ("same", "faint"),
}


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}x" if abs(ratio) >= 10 else f"{ratio:.2f}x"


_RATIO = units.Unit("", "number", _times)
_SIGNED = units.signed(units.SECOND)
_ROWS = (
    view.Column("status", units.TEXT, "", of=lambda row: view.Cell(*_SIGNS[row.status])),
    view.Column("call", units.TEXT, "call and kernel", folded=True, of=lambda row: _call(row)),
    view.Column(
        "module", units.CODE, "module", flexible=True, of=lambda row: row.module or MISSING
    ),
    view.Column("launches", units.WORDS, "launches", of=lambda row: _launches(row)),
    view.Column("before", units.SECOND, "before", drop=1, of=lambda row: row.time.before),
    view.Column("after", units.SECOND, "after", drop=1, of=lambda row: row.time.after),
    delta("time", units.SECOND, "change", marked=True),
)


def rundiff_view(result: RunDiff, output: view.Output) -> view.View:
    """Totals of each step before and after, then kernels, modules and families that differ."""
    before, after = (Path(name).name for name in result.names)
    if result.alone:
        return _alone(result, before)
    head: list[view.Part] = [
        view.Note(f"{before} -> {after}   measured", on="screen", label="diff  "),
    ]
    for only, name in ((result.only_before, before), (result.only_after, after)):
        if only:
            head.append(
                view.Note(f"only {name} has {words.listed(list(only))}: not compared", "warn")
            )
    if result.unchanged:
        head.append(view.Note("no difference in any measured quantity", "good"))
    sections = [view.Section(parts=head, place=0)]
    several = len(result.steps) > 1
    for number, step in enumerate(result.steps):
        sections += _step(step, result.names, several, 1 + 5 * number)
    if result.operations:
        sections.append(_operations(result))
    return view.View(tuple(sections), f"Measured: `{before}` -> `{after}`")


def _alone(result: RunDiff, name: str) -> view.View:
    """Where the time of each step of one run goes."""
    head = view.Note(f"{name}   where its time goes", on="screen", label="measured  ")
    sections = [view.Section(parts=[head], place=0)]
    for number, step in enumerate(result.steps):
        on = f" on {step.devices[0]}" if step.devices[0] else ""
        took = f"the step takes {format_time(step.totals['time'].after)}{on}"
        first: list[view.Part] = [*statement(took, "strong"), _shares(step)]
        below = [first, *_largest(step), _remarks(step, alone=True)]
        for place, each in enumerate(below, start=5 * number):
            title = "" if place % 5 else step.label
            sections.append(view.Section(title=title, parts=each, place=1 + place))
    return view.View(tuple(sections), f"Measured: `{name}`")


def _shares(step: rundiff.StepDiff) -> view.Table:
    """Each figure of a step, and the share of those that are seconds of it."""
    shown = {name: change.after for name, change in step.totals.items() if change.after}
    whole = step.totals["time"].after
    columns = (
        view.Column("metric", units.TEXT, "", of=partial(_label, step)),
        view.Column("value", units.COUNT, "", of=lambda n: view.Cell(shown[n], unit=_unit(n))),
        view.Column(
            "share",
            units.SHARE,
            "of the step",
            of=lambda n: shown[n] / whole if whole and _unit(n) is units.SECOND else None,
        ),
    )
    return view.Table(columns=columns, rows=list(shown), padded=False)


def _largest(step: rundiff.StepDiff) -> Iterator[list[view.Part]]:
    """The kernels, the modules and the families of a step, most time first."""
    work = step.totals["work"].after
    _, call, module, launches, _, after, _ = _ROWS
    name = partial(view.Column, "name", flexible=True)
    times = (
        launches,
        replace(after, head="time", drop=0),
        view.Column(
            "share", units.SHARE, "share", of=lambda row: row.time.after / work if work else None
        ),
    )
    groups: tuple[tuple[Sequence[Any], tuple[view.Column, ...]], ...] = (
        (step.rows, (call, module)),
        (step.modules, (name(units.CODE, "module"),)),
        (step.families, (name(units.TEXT, "family"),)),
    )
    for rows, first in groups:
        ranked = sorted(rows, key=lambda row: -row.time.after)
        if ranked:
            most = ROWS if rows is step.rows else GROUPS
            yield [*cut((*first, *times), ranked, most), *left_out(len(ranked) - most)]


def verdict(step: rundiff.StepDiff) -> str:
    """The change of a step in a sentence: by how much, whether noise explains it, and why."""
    time = step.totals["time"]
    if not time.delta:
        text = f"the step takes {format_time(time.after)}, as before"
    else:
        relative = "" if time.relative is None else f" ({time.percent})"
        text = f"the step is {format_time(abs(time.delta))}{relative} "
        text += "slower" if time.delta > 0 else "faster"
        if time.noise is None:
            text += "; noise is not known"
        elif time.within_noise:
            return f"{text}, within the noise of ±{format_time(time.noise)}: no difference is shown"
        else:
            text += f", beyond the noise of ±{format_time(time.noise)}"
    parts = [(name, step.totals[name].delta) for name in _parts(step)]
    largest = sorted(parts, key=lambda part: -abs(part[1]))[:2]
    shown = [f"{_label(step, name).strip()} {_SIGNED.page(d)}" for name, d in largest if d]
    return f"{text}: {', '.join(shown)}" if shown else text


def _parts(step: rundiff.StepDiff) -> Sequence[str]:
    """Figures that add up to the time of the step; none where its kernels were timed apart."""
    if not step.timed_inside:
        return ()
    names = rundiff.PARTS if step.on_device else ("device", "idle")
    return [name for name in names if name in step.totals]


def _label(step: rundiff.StepDiff, name: str) -> str:
    if not step.timed_inside and name in _REPLAYED:
        return _REPLAYED[name]
    return _LABELS[name] if step.on_device else _ON_HOST.get(name, _LABELS[name])


def _step(
    step: rundiff.StepDiff, names: tuple[str, str], several: bool, place: int
) -> list[view.Section]:
    mark = "plain" if step.totals["time"].within_noise else "strong"
    head: list[view.Part] = []
    if several:
        head.append(view.Note(step.label, "strong", on="screen"))
    head += [*statement(verdict(step), mark), _totals(step, names)]
    below = [] if step.unchanged else [_kernels(step), *(_groups(step, by) for by in _GROUPED)]
    below.append(_remarks(step))
    sections = [view.Section(title=step.label, parts=head, place=place)]
    for number, parts in enumerate(below, start=1):
        sections.append(view.Section(parts=parts, place=place + number))
    return sections


_GROUPED = ("module", "family")


# -- totals ----------------------------------------------------------------------------------------


_NOISE = view.Column("noise", units.SECOND, "noise", drop=1)
_PREDICTED = view.Column("predicted", units.SECOND, "predicted")
_OVER = view.Column("ratio", _RATIO, "measured / predicted", short="ratio")


def _totals(step: rundiff.StepDiff, names: tuple[str, str]) -> view.Table:
    shown = {n: c for n, c in step.totals.items() if c.before or c.after or n == "time"}
    more: dict[view.Column, Callable[[str], Any]] = {}
    if any(change.noise is not None for change in step.totals.values()):
        more[_NOISE] = lambda name: _noise(shown[name], _unit(name))
    if step.prediction is not None:
        predicted = step.prediction.totals
        more[_PREDICTED] = lambda name: (
            view.Cell(predicted[name].delta, unit=units.signed(_unit(name)))
            if name in predicted
            else None
        )
        more[_OVER] = step.ratio
    before, after = (Path(name).name for name in names)
    return totals(shown, _unit, partial(_label, step), (before, after), more)


def _unit(name: str) -> units.Unit:
    return _UNITS[rundiff.METRICS[name].unit]


def _noise(change: rundiff.MeasuredChange, unit: units.Unit) -> view.Cell | None:
    if change.noise is None:
        return None
    return view.Cell(change.noise, "faint", before="±", unit=unit)


# -- kernels, modules, families --------------------------------------------------------------------


def _kernels(step: rundiff.StepDiff) -> list[view.Part]:
    rows = step.changes
    if not rows:
        return [view.Note("no kernel differs", "faint")]
    beyond = [row for row in rows if row.status != "unclear"]
    shown = beyond[:ROWS] or rows[:IN_NOISE]
    parts = cut(_ROWS, rows, len(shown))
    left = (
        (len(beyond) - len(shown), "more", rows[len(shown) : len(beyond)]),
        (len(rows) - max(len(beyond), len(shown)), "more within noise", rows[len(beyond) :]),
    )
    for count, about, others in left:
        if count > 0:
            total = _SIGNED.page(sum(row.time.delta for row in others))
            line = f"{words.plural(count, 'row')} {about}, {total} in all (--format json has them)"
            parts.append(view.Note(line, "faint", on="screen"))
    same = len(step.rows) - len(rows)
    if same:
        parts.append(view.Note(f"{words.plural(same, 'row')} without any difference", "faint"))
    return parts


def _call(row: rundiff.KernelChange) -> str:
    """ "linear: cutlass_gemm -> xmma_gemm", "copy_, fp32[8, 64]": a call, its kernels, sizes."""
    calls = [call.removeprefix("aten::") for call in row.call]
    if row.kind == "op":
        calls = [c or " and ".join(names) for c, names in zip(calls, row.kernels, strict=True)]
    text = arrow(*calls)
    if row.kind != "op":
        kernels = arrow(*map(_kernel_words, row.short_kernels, row.kernels))
        text = f"{text}: {kernels}" if text else kernels
    sizes = arrow(*map(_few, row.sizes))
    text = f"{text}, {sizes}" if sizes else text
    return f"{text} (backward)" if row.part else text


def _kernel_words(first: str, names: Sequence[str]) -> str:
    """The first kernel of several, and how many more there are."""
    text = words.short_text(first, KERNEL)
    return text if len(names) <= 1 else f"{text} and {len(names) - 1} more"


def _few(sizes: str) -> str:
    """The first two tensors of several."""
    tensors = sizes.split("] ")
    return sizes if len(tensors) <= 2 else f"{'] '.join(tensors[:2])}] …"


def _launches(row: rundiff.KernelChange) -> str:
    return arrow(f"{row.count.before:.3g}", f"{row.count.after:.3g}")


def _groups(step: rundiff.StepDiff, by: str) -> list[view.Part]:
    groups = step.modules if by == "module" else step.families
    rows = [
        g for g in groups if g.time.delta or g.count.delta or (g.predicted and g.predicted.delta)
    ]
    if not rows:
        return []
    columns = [
        view.Column("name", units.CODE if by == "module" else units.TEXT, by, flexible=True),
        view.Column("launches", units.WORDS, "launches", drop=1, of=_launches),
        view.Column("before", units.SECOND, "before", of=lambda g: g.time.before),
        view.Column("after", units.SECOND, "after", of=lambda g: g.time.after),
        delta("time", units.SECOND, "change", marked=True),
    ]
    if any(group.predicted is not None for group in rows):
        columns += [delta("predicted", units.SECOND, "predicted"), _OVER]
    return cut(columns, rows, GROUPS)


# -- notes -----------------------------------------------------------------------------------------


def _remarks(step: rundiff.StepDiff, alone: bool = False) -> list[view.Part]:
    lines: list[str] = []
    if step.prediction is not None:
        chips = " and ".join(dict.fromkeys(step.prediction.diff.chips))
        models = " and ".join(dict.fromkeys(step.prediction.diff.executions))
        kind = "" if step.prediction.diff.expected else ", as bounds"
        lines.append(f"predicted for {chips}, {models}{kind}")
    if step.totals["time"].noise is not None:
        before, after = step.steps
        average = "mean" if step.timed_inside else "median wall time"
        spread = "noise is half the 95 % interval of the difference, by their spread"
        compared = f"{before} and {words.plural(after, 'step')}; {spread}"
        lines.append(f"{average} of {words.plural(after, 'step') if alone else compared}")
    disagreements = step.prediction.notes if step.prediction else ()
    parts: list[view.Part] = []
    for group, mark, most in (
        (disagreements, "warn", NOTES),
        ((*lines, *step.notes), "faint", None),
    ):
        both = [statement(line, mark, 1) for line in group]
        parts += [screen for screen, _ in both[:most]]
        parts += [page for _, page in both]
    return parts


_OPERATIONS = (
    view.Column("name", units.TEXT, "operation alone", flexible=True, of=lambda row: row[0]),
    view.Column("before", units.SECOND, "before", of=lambda row: row[1].before),
    view.Column("after", units.SECOND, "after", of=lambda row: row[1].after),
    view.Column("change", units.WORDS, "change", of=lambda row: _relative(row[1])),
    view.Column("noise", units.SECOND, "noise", of=lambda row: row[1].noise),
)


def _relative(change: rundiff.MeasuredChange) -> view.Cell:
    return view.Cell(change.percent, "faint" if change.within_noise else "plain")


def _operations(result: RunDiff) -> view.Section:
    rows = sorted((result.operations or {}).items(), key=lambda o: -abs(o[1].relative or 0))
    note = "The same operations on both devices; where they differ, the machine does."
    parts = [*cut(_OPERATIONS, rows, GROUPS), view.Note(note, on="page")]
    return view.Section(title="Operations alone", parts=parts, place=99)
