"""Compares two files, traces or runs, with predictions where graphs are known."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel, execution_model, runs
from rooftrace.diffs.changes import Pairing
from rooftrace.diffs.runs.comparing import change_of, chip_for, compare_sides, with_prediction
from rooftrace.diffs.runs.rundiff import (
    MeasuredCall,
    MeasuredChange,
    MeasuredKernel,
    MeasuredSide,
    RunDiff,
    StepDiff,
    equal_as_one,
    family_of_kernel,
    family_of_op,
)
from rooftrace.diffs.runs.traceside import GraphPlace, side_of_trace
from rooftrace.errors import ProfileError, RequestError, UnusedError, naming
from rooftrace.graph import OpGraph, pattern_of
from rooftrace.hardware import Chip, load_chip
from rooftrace.hardware.chip import USUAL
from rooftrace.measured.alignment import (
    Alignment,
    Graphs,
    is_compiled,
    pairing as matching,
    read_measured,
)
from rooftrace.measured.bench import ModelRow, OpTime, Run
from rooftrace.measured.profiles import Trace, source_of

Source: TypeAlias = "str | os.PathLike[str] | Trace | Run"


@dataclass(frozen=True, kw_only=True)
class RunQuestion:
    """The options of a comparison of two measured runs."""

    graphs: tuple[Graphs | None, Graphs | None] = (None, None)  # of the measured code, by phase
    chip: Chip | None = None  # predicted for; None: the device of each side, by its name
    execution: ExecutionModel | None = None  # of both; None: of each side
    phases: Sequence[str] | None = None  # only rows of these phases
    names: tuple[str, str] | None = None
    tell: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class _Predicted:
    """A side, with its estimate or the reason why there is none."""

    side: MeasuredSide
    estimate: Estimate | None = None
    reason: str = ""
    by_path: bool = False  # whether the side has the module paths of the graph


def is_measured(source: Any) -> bool:
    """Whether a source is a measured run: a Trace, a Run, or a file of one."""
    if not isinstance(source, (str, os.PathLike)):
        return type(source).__module__.startswith("rooftrace.measured")
    if not os.path.isfile(source):
        return False
    try:
        return source_of(source).gives in ("run", "trace")
    except (ProfileError, OSError):  # a file of another kind: its reader will refuse it
        return False


def diff_runs(before: Source, after: Source, question: RunQuestion | None = None) -> RunDiff:
    """The changes from one measured run to another: two traces, two runs, or one of each.

    Raises ProfileError for files that cannot be read, and RequestError for two that cannot be
    compared.
    """
    question = question or RunQuestion()
    labels = [_label(source, usual) for source, usual in ((before, "before"), (after, "after"))]
    first = _read(before, question)
    second = first if after is before else _read(after, question)
    measured = (first, second)
    _check_used(question, first, second)
    pairs, only = _paired_rows(first, second, question.phases)
    kinds = tuple("run" if isinstance(each, Run) else "trace" for each in measured)
    if kinds == ("trace", "trace"):
        _check_devices(first, second, labels)  # type: ignore[arg-type]
    names = question.names or (labels[0], labels[1])
    steps = []
    for rows in pairs:
        sides: list[_Predicted] = []
        for number, (each, row) in enumerate(zip(measured, rows, strict=True)):
            if number == 0 or first is not second:
                with naming(labels[number]):
                    sides.append(_side(each, row, labels[number], number, question))
        key = next((row.key for row in rows if row is not None), "step")
        steps.append(_compared(sides[0], sides[-1], key))
    both_runs = isinstance(first, Run) and isinstance(second, Run)
    return RunDiff(
        names=names,
        kinds=(kinds[0], kinds[1]),
        steps=tuple(steps),
        only_before=only[0],
        only_after=only[1],
        operations=_operations(first, second) if both_runs else None,  # type: ignore[arg-type]
    )


def _label(source: Source, usual: str) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else usual


def _read(source: Source, question: RunQuestion) -> Trace | Run:
    question.tell(f"reading {_label(source, 'a run')}")
    if isinstance(source, (Trace, Run)):
        return source
    measured = read_measured(os.fspath(source), "a comparison of two runs")
    if isinstance(measured, (Trace, Run)):
        return measured
    raise RequestError(
        f"{os.fspath(source)}: a table of step times, expected a trace of torch.profiler or a run "
        "file of `rooftrace measure`"
    )


def _check_used(question: RunQuestion, *measured: Trace | Run) -> None:
    """Raise UnusedError for options of predictions, where nothing is predicted."""
    run_files = [each for each in measured if isinstance(each, Run)]
    if question.graphs == (None, None) and not any(run.graphs for run in run_files):
        reason = "nothing is predicted: say with --target what ran (in Python: graphs=)"
        if question.chip is not None:
            raise UnusedError("chip", question.chip.name, reason)
        if question.execution is not None:
            raise UnusedError("execution", question.execution.name, reason)
        if question.phases and not run_files:
            reason = "a trace is of one step, and does not say its phase"
            raise UnusedError("phases", ",".join(question.phases), reason)


def _check_devices(before: Trace, after: Trace, labels: Sequence[str]) -> None:
    """Raise ProfileError where one trace has kernels and the other has none."""
    if before.on_device == after.on_device:
        return
    bare, full = (labels[0], labels[1]) if after.on_device else (labels[1], labels[0])
    raise ProfileError(
        f"{bare}: no kernels in it, only calls on the host, and {full} has kernels: their seconds "
        "are of two kinds; profile both with activities=[ProfilerActivity.CPU, "
        "ProfilerActivity.CUDA]"
    )


# -- rows of runs ----------------------------------------------------------------------------------

_Rows: TypeAlias = "tuple[ModelRow | None, ModelRow | None]"
_KEYS: tuple[Callable[[ModelRow], Hashable], ...] = (
    lambda row: row.key,
    lambda row: (row.phase, tuple(row.sizes.items()), row.mode),
    lambda row: (row.phase, tuple(row.sizes.items())),
    lambda row: row.phase,
)
"""Keys that pair two rows of a step if each run has them once, each looser than the one before."""


def _paired_rows(
    before: Trace | Run, after: Trace | Run, phases: Sequence[str] | None
) -> tuple[list[_Rows], tuple[tuple[str, ...], tuple[str, ...]]]:
    """The rows of two runs that are of one step, and the keys of rows that only one side has.

    Rows pair by key, then by phase, sizes and mode, then by phase.  A trace has no rows: a run that
    is compared with it has one.
    """
    rows = _rows(before, phases), _rows(after, phases)
    if isinstance(before, Run) and isinstance(after, Run):
        pairing = Pairing(*(range(len(each)) for each in rows))
        for key in _KEYS:
            keys = [[key(row) for row in each] for each in rows]
            pairing.by(keys[0].__getitem__, keys[1].__getitem__, alone=True)
        has_operations = bool({r.key for r in before.micro} & {r.key for r in after.micro})
        if not pairing.pairs and not has_operations:
            listed = [", ".join(row.key for row in each) or "none" for each in rows]
            raise RequestError(
                f"the two runs have no step in common: before has {listed[0]}, after {listed[1]}"
            )
        if len(rows[0]) == len(rows[1]) == 1 and not pairing.pairs:
            pairing.pair(0, 0)
        pairs: list[_Rows] = [(rows[0][pair.before], rows[1][pair.after]) for pair in pairing.pairs]
        first, second = (
            tuple(each[number].key for number in left)
            for each, left in zip(rows, pairing.left, strict=True)
        )
        return pairs, (first, second)
    for each in rows:
        if len(each) > 1:
            raise RequestError(
                f"a trace is of one step, and the run beside it has {len(each)}: "
                f"{', '.join(row.key for row in each[:6])}; choose with --phase, or compare runs"
            )
    return [(next(iter(rows[0]), None), next(iter(rows[1]), None))], ((), ())


def _rows(measured: Trace | Run, phases: Sequence[str] | None) -> list[ModelRow]:
    if not isinstance(measured, Run):
        return []
    rows = [row for row in measured.models if not phases or row.phase in phases]
    if phases and not rows:
        there = sorted({row.phase for row in measured.models})
        raise RequestError(
            f"phase {', '.join(phases)}: the run has {', '.join(there) or 'no step'}"
        )
    return rows


def _operations(before: Run, after: Run) -> Mapping[str, MeasuredChange]:
    """Seconds of the operations alone that both runs have, by key."""
    other = {row.key: row for row in after.micro}
    return {
        row.key: change_of(row.seconds, other[row.key].seconds, ("median", "median"))
        for row in before.micro
        if row.key in other
    }


# -- sides and their predictions -------------------------------------------------------------------


def _side(
    measured: Trace | Run, row: ModelRow | None, label: str, number: int, question: RunQuestion
) -> _Predicted:
    graphs = question.graphs[number]
    if isinstance(measured, Trace):
        return _of_trace(measured, label, graphs, question)
    if row is None:
        raise RequestError("the run has no step of a model, only operations alone")
    traced = measured.graphs.get(row.key)
    graph = traced if graphs is None else graphs.get(row.phase, _only(graphs))
    if graph is None:
        return _Predicted(side=side_of_row(measured, row))
    chip, reason = _chip(question, str(measured.device.get("name") or ""))
    if chip is None:
        return _Predicted(side=side_of_row(measured, row, graph), reason=reason)
    model = question.execution or execution_model(row.mode)
    priced = estimate(graph, chip, model.as_called)
    side = side_of_row(measured, row, priced.graph)
    by_path = row.source == "replay" and not row.kernels
    return _Predicted(side=side, estimate=priced, by_path=by_path)


def _only(graphs: Graphs) -> OpGraph | None:
    """The only graph, or None."""
    return next(iter(graphs.values())) if len(graphs) == 1 else None


def _of_trace(trace: Trace, label: str, graphs: Graphs | None, question: RunQuestion) -> _Predicted:
    if graphs is None:
        return _Predicted(side=side_of_trace(trace, label))
    device = next(iter(trace.devices.values()), "")
    chip, reason = _chip(question, device)
    compiled = is_compiled(trace)
    model = question.execution or execution_model("compiled" if compiled else "eager")
    if compiled and model.fusion != "none":
        graph = matching.best_fused(trace, lambda: graphs, question.tell)[0].detected.source
        priced = None if chip is None else estimate(graph, chip, model)
        return _Predicted(side=side_of_trace(trace, label), estimate=priced, reason=reason)
    # Modules are known by the graph, whatever the chip.
    match = matching.best_match(
        trace, lambda: graphs, chip or load_chip(USUAL), model, question.tell
    )
    alignment = match.alignment
    side = side_of_trace(alignment.trace, label, _places(alignment))
    estimated = None if chip is None else match.estimate
    return _Predicted(side=side, estimate=estimated, reason=reason, by_path=True)


def _chip(question: RunQuestion, device: str) -> tuple[Chip | None, str]:
    if question.chip is not None:
        return question.chip, ""
    name, reason = chip_for(device)
    return (None if name is None else load_chip(name)), reason


def _places(alignment: Alignment) -> dict[int, GraphPlace]:
    """The module and family in the graph of each call of the trace that has an op there."""
    graph = alignment.graph
    places: dict[int, GraphPlace] = {}
    paths: dict[int, tuple[str, ...]] = {}
    for call, (number, iteration) in alignment.places.items():
        op = graph.ops[number]
        if number not in paths:
            paths[number] = runs.kernel_modules(graph, (number,), op)
        path = paths[number][iteration % len(paths[number])]
        places[call] = GraphPlace(path, pattern_of(path), op.family)
    return places


def _compared(before: _Predicted, after: _Predicted, key: str) -> StepDiff:
    sides = (before.side, after.side)
    if any(side.middle == "median" for side in sides):  # a run merges equal layers
        sides = (equal_as_one(sides[0]), equal_as_one(sides[1]))
    step = compare_sides(*sides, key)
    if before.estimate is not None and after.estimate is not None:
        by_path = before.by_path and after.by_path
        return with_prediction(step, before.estimate, after.estimate, by_path)
    reasons = tuple(filter(None, dict.fromkeys((before.reason, after.reason))))
    if (before.estimate is None) != (after.estimate is None) and not reasons:
        reasons = ("not predicted: the graph of one side only is known; give both",)
    return replace(step, notes=(*reasons, *step.notes))


# -- a row of a run as a side ----------------------------------------------------------------------


def side_of_row(run: Run, row: ModelRow, graph: OpGraph | None = None) -> MeasuredSide:
    """The measured step of a row of a run.

    Its ops were measured apart from the step: by the profiler, or one by one.  So they have no
    spread, and do not add up to the step.  graph: of the step; adds families of ops.
    """
    on_device = run.device.get("type") == "cuda"
    calls = _kernel_calls(row)
    if not row.kernels:
        calls = tuple(_op_call(op, graph) for op in row.ops if op.seconds > 0)
    rest = 0.0 if row.kernels else row.unattributed or 0.0
    if rest:
        name = _REST if row.source == "replay" else "kernels of no op"
        calls = (*calls, _single(name, "op", 1, rest, ""))
    figures: dict[str, tuple[float, ...]] = {"time": row.seconds}
    if calls:
        kernels = [kernel for call in calls for kernel in call.kernels if kernel.name != _REST]
        figures["work"] = (sum(sum(k.seconds) for call in calls for k in call.kernels),)
        figures["kernels"] = (sum(kernel.count for kernel in kernels),)
    if row.peak_bytes is not None:
        figures["memory"] = (float(row.peak_bytes),)
    return MeasuredSide(
        device=str(run.device.get("name") or ""),
        on_device=on_device,
        figures=figures,
        middle="median",
        calls=calls,
        in_order=bool(row.kernels) or row.source == "replay",
        notes=tuple(_notes(row)),
    )


_REST = "outside of its ops"


def _notes(row: ModelRow) -> Iterable[str]:
    if row.kernels:
        yield "kernels of the compiled step were timed by the profiler, apart from its wall time"
    elif row.source == "replay":
        yield "its ops were timed one by one, apart from the step: they do not add up to it"
    elif row.source == "profiler":
        yield "its ops are of one step under the profiler, apart from its wall times"
    else:
        yield "its ops were not timed: nothing is known but its wall time"
    if row.note:
        yield row.note


def _op_call(op: OpTime, graph: OpGraph | None) -> MeasuredCall:
    name = ".".join(op.target.split(".")[:2]).replace(".", "::", 1)
    family = family_of_op(op.target) or "other"
    sizes = " ".join(str(list(shape)) for shape in op.shapes if shape)
    if graph is not None and op.id is not None and op.id < len(graph.ops):
        traced = graph.ops[op.id]
        if traced.target == op.target:
            family = traced.family if traced.family != "other" else family
            tensors = [graph.values[value] for value in traced.inputs]
            sizes = " ".join(f"{t.dtype}{list(t.shape)}" for t in tensors[:4] if t.shape)
    call = _single(" + ".join(op.kernels) or name, "op", op.count, op.seconds, family)
    return replace(call, name=name, sizes=sizes, module=op.module, pattern=pattern_of(op.module))


def _kernel_calls(row: ModelRow) -> tuple[MeasuredCall, ...]:
    calls = []
    for kernel in row.kernels:
        families = [family_of_op(target) for target in kernel.targets]
        family = next((f for f in families if f and f != "elementwise"), "")
        family = family or ("elementwise" if families else family_of_kernel(kernel.name, "kernel"))
        calls.append(_single(kernel.name, "kernel", 1, kernel.seconds, family))
    return tuple(calls)


def _single(name: str, kind: str, count: float, seconds: float, family: str) -> MeasuredCall:
    family = family or "other"
    kernel = MeasuredKernel(name=name, kind=kind, count=count, seconds=(seconds,), family=family)
    return MeasuredCall(name="", family=family, kernels=(kernel,))
