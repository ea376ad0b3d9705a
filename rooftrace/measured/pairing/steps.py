"""Measured steps with the graphs of their code: from a run file, or a table of step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.rewriting import reprice
from rooftrace.errors import UnusedError
from rooftrace.measured.pairing.reading import Graphs, MeasuredRequestError
from rooftrace.measured.pairing.templates import (
    SIZES,
    TRUSTED,
    TargetTemplate,
    not_run,
    shortened,
    template_of,
)
from rooftrace.measured.runs import ModelRow, Run
from rooftrace.measured.tables import StepTime
from rooftrace.tracer.asking import names
from rooftrace.tracer.graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One measured step, and how its graph is made."""

    label: str  # what to call it
    place: str  # where it stands: the key of a row, or a line of a table
    group: str  # what ran, whatever its sizes
    seconds: float  # s
    graph: Callable[[], OpGraph]
    phase: str | None = None  # None where a table does not say
    row: ModelRow | None = None  # of a run

    def why_not(self, error: Exception) -> str:
        """One line on why the step could not be used."""
        text = str(error.args[0]) if isinstance(error, LookupError) else str(error)
        why = (text.splitlines() or [""])[0]
        return why if self.group in self.place else f"{shortened(self.group)}: {why}"


def steps_of(
    measured: Run | Sequence[StepTime],
    model: ExecutionModel,
    target: str | Graphs | None,
    trust_targets: bool = False,
) -> list[MeasuredStep]:
    """The measured steps of a run that ran as `model` dispatches, or of a table.

    target: graphs by phase, or a target in which {target} stands for the name in the measurements,
    and {batch}, {seq}, {kv} (in a table also {image_size}) for its sizes.  None: rows of a run may
    name models of the suite.  trust_targets: without a target, the names in the measurements are
    targets, which are code; else a table, and other rows of a run, have no graph.  Raises
    MeasuredRequestError for another name in braces, for a table without either, and where a run
    has no such step.
    """
    if isinstance(measured, Run):
        return steps_of_run(measured, model, target, trust_targets)
    return steps_of_table(measured, target, trust_targets)


def steps_of_table(
    steps: Sequence[StepTime], target: str | Graphs | None, trust_targets: bool = False
) -> list[MeasuredStep]:
    """The steps of a table.

    target: how the name in the table becomes a target, for example "models.py:{target}"; {batch},
    {seq}, {kv} and {image_size} stand for those columns.  Or graphs, if all lines are steps of one.
    """
    source = _source(target, trust_targets)
    if source is None and steps:
        raise not_run(steps[0].target)
    return [
        MeasuredStep(
            label=" ".join(str(v) for v in (step.target, step.phase, step.batch, step.seq) if v),
            place=f"line {step.line}",
            group=step.target,
            seconds=step.seconds,
            graph=partial(_graph_of_step, step, source),
            phase=step.phase,
        )
        for step in steps
    ]


def steps_of_run(
    run: Run,
    execution: str | ExecutionModel,
    target: str | Graphs | None = None,
    trust_targets: bool = False,
) -> list[MeasuredStep]:
    """The models of a run that ran as `execution` dispatches.

    target: graphs, or a target in which {target} stands for the row's model; without it a run that
    was measured here has its graphs, and rows of others name models of the suite, and with
    `trust_targets` also targets.  Raises MeasuredRequestError where
    the run has no such row.
    """
    source = _source(target, trust_targets)
    mode = "eager" if execution_model(execution).dispatch == "eager" else "compiled"
    own = run.graphs if target is None else {}
    steps = [
        MeasuredStep(
            label=row.key,
            place=row.key,
            group=row.model,
            seconds=row.median,
            graph=partial(own.__getitem__, row.key)
            if row.key in own
            else partial(_graph_of_row, row, source, target is None),
            phase=row.phase,
            row=row,
        )
        for row in run.models
        if row.mode == mode
    ]
    if trust_targets and steps and all(step.row is not None and step.row.scale for step in steps):
        reason = "every row of the run is of a model of the suite"
        raise UnusedError("trust_targets", "True", reason)
    if not steps:
        raise MeasuredRequestError(
            f"the run has no {mode} steps of models, only "
            f"{', '.join(sorted({row.mode for row in run.models})) or 'operations'}; measure some "
            "with `rooftrace measure`, or name another --execution"
        )
    return steps


def _source(target: str | Graphs | None, trust_targets: bool) -> TargetTemplate | Graphs | None:
    """Where graphs come from; None: no name in the measurements is run."""
    if target is None:
        return TRUSTED if trust_targets else None
    return template_of(target) if isinstance(target, str) else target


def _graph_of_step(step: StepTime, source: TargetTemplate | Graphs | None) -> OpGraph:
    from rooftrace.tracer import trace_target
    from rooftrace.tracer.asking import Options, Request

    if source is None:
        raise not_run(step.target)
    if not isinstance(source, TargetTemplate):
        return _of_phase(source, step.phase)
    name = source.filled({"target": step.target, **{n: getattr(step, n) for n in SIZES}})
    request = Request(step.batch, step.seq, step.kv)
    phases = [step.phase] if step.phase else None
    graph = next(iter(trace_target(name, phases, request, Options(dtype=step.dtype)).values()))
    return graph if step.dtype is None else reprice(graph, step.dtype)


def _graph_of_row(row: ModelRow, source: TargetTemplate | Graphs | None, of_suite: bool) -> OpGraph:
    """The graph of a row.  of_suite: a row with a scale is of a model of the suite."""
    if of_suite and row.scale:
        from rooftrace.measured.suite import traced_model

        return traced_model(row)
    if source is None or isinstance(source, TargetTemplate):
        if of_suite and not _names_a_target(row.model):
            raise MeasuredRequestError(
                f"{row.key!r}: {row.model!r} is no model of the suite and names no target; say "
                "with --target what ran (in Python: target=rooftrace.trace(model, x))"
            )
        if source is None:
            raise not_run(row.model)
        sizes = {size: row.sizes.get(size) for size in ("batch", "seq", "kv")}
        return _at_sizes(source.filled({"target": row.model, **sizes}), row.phase, sizes)
    return _of_phase(source, None if row.phase == "step" else row.phase)


def _at_sizes(name: str, phase: str, sizes: Mapping[str, int | None]) -> OpGraph:
    """The graph of a phase of a target at these sizes.

    A target that makes its own inputs does not get sizes that it does not take; its inputs must
    then have these sizes.
    """
    from rooftrace.errors import RequestError, TargetError
    from rooftrace.tracer import trace_target
    from rooftrace.tracer.asking import Request

    batch, seq, kv = (sizes[size] for size in ("batch", "seq", "kv"))
    first: Exception | None = None
    for request in (Request(batch, seq, kv), Request(batch), Request()):
        try:
            graph = trace_target(name, [phase], request)[phase]
        except (RequestError, TargetError) as error:
            first = first or error
            continue
        known = {n: graph.workload[n] for n in sizes if graph.workload.get(n) is not None}
        other = [n for n in known if sizes[n] not in (None, known[n])]
        if not other:
            return graph
        first = first or MeasuredRequestError(
            f"{name}: measured with {other[0]} {sizes[other[0]]}, traces with {known[other[0]]}"
        )
    raise first or MeasuredRequestError(f"{name}: does not trace at the sizes that were measured")


def _names_a_target(model: str) -> bool:
    return ":" in model or model.endswith(".json") or names.is_script(model)


def _of_phase(graphs: Graphs, phase: str | None) -> OpGraph:
    """The graph of a phase, or the only one."""
    if phase is not None and phase in graphs:
        return graphs[phase]
    if phase is None and len(graphs) == 1:
        return next(iter(graphs.values()))
    raise MeasuredRequestError(
        f"phase {phase or 'not given'}: the target has {', '.join(graphs) or 'none'}"
    )
