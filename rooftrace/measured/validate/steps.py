"""Measured steps with the graphs of what ran: from a run file, or from a table of step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rooftrace.costmodels.estimating import Estimate, ExecutionModel, estimate, execution_model
from rooftrace.costmodels.rewriting import reprice
from rooftrace.hardware import Chip
from rooftrace.measured.bench import ModelRow, Run, load_run
from rooftrace.measured.profiles import (
    KINDS,
    Alignment,
    Profile,
    ProfileError,
    StepTime,
    align,
    kind_of,
    read_steps,
    read_trace,
)
from rooftrace.reporting.text import listed
from rooftrace.tracer.graph import OpGraph

Graphs = Mapping[str, OpGraph]
"""By phase."""


class MeasuredRequestError(ValueError):
    """Measurements that do not go with what was asked: quotes them and says what to do."""


@dataclass(frozen=True)
class MeasuredStep:
    """One measured step [s]: what to call it, where it stands, and how its graph is made.

    group: what ran, whatever its sizes.  phase: None where the table does not say.  row: of a run.
    """

    label: str
    place: str
    group: str
    seconds: float
    graph: Callable[[], OpGraph]
    phase: str | None = None
    row: ModelRow | None = None


def steps_of_table(
    steps: Sequence[StepTime], target: str | Graphs = "{target}"
) -> list[MeasuredStep]:
    """The steps of a table.

    target: how the name in the table becomes a target, for example "models.py:{target}"; {batch},
    {seq}, {kv} and {image_size} stand for those columns.  Or graphs, if all lines are steps of one.
    """
    return [
        MeasuredStep(
            " ".join(str(v) for v in (step.target, step.phase, step.batch, step.seq) if v),
            f"line {step.line}",
            step.target,
            step.seconds,
            partial(_graph_of_step, step, target),
            step.phase,
        )
        for step in steps
    ]


def steps_of_run(
    run: Run, execution: str | ExecutionModel, target: str | Graphs | None = None
) -> list[MeasuredStep]:
    """The models of a run that ran as `execution` dispatches.

    target: graphs of what ran, or a target in which {target} stands for the row's model; without it
    rows name models of the suite, or targets themselves.  Raises MeasuredRequestError where the
    run has no such row.
    """
    mode = "eager" if execution_model(execution).dispatch == "eager" else "compiled"
    found = [
        MeasuredStep(
            row.key, row.key, row.model, row.median, partial(_graph_of_row, row, target),
            row.phase, row,
        )
        for row in run.models
        if row.mode == mode
    ]  # fmt: skip
    if not found:
        raise MeasuredRequestError(
            f"the run has no {mode} steps of models, only "
            f"{', '.join(sorted({row.mode for row in run.models})) or 'operations'}; measure some "
            "with `rooftrace measure`, or name another --execution"
        )
    return found


def _graph_of_step(step: StepTime, target: str | Graphs) -> OpGraph:
    from rooftrace.tracer import trace_target
    from rooftrace.tracer.asking import Options, Request

    if not isinstance(target, str):
        return _of_phase(target, step.phase)
    sizes = ("target", "batch", "seq", "kv", "image_size")
    name = filled(target, {size: getattr(step, size) for size in sizes})
    request = Request(step.batch, step.seq, step.kv)
    phases = [step.phase] if step.phase else None
    graph = next(iter(trace_target(name, phases, request, Options(dtype=step.dtype)).values()))
    return graph if step.dtype is None else reprice(graph, step.dtype)


def _graph_of_row(row: ModelRow, target: str | Graphs | None) -> OpGraph:
    if target is None and row.scale:
        from rooftrace.measured.suite import traced_model

        return traced_model(row)
    if target is not None and not isinstance(target, str):
        return _of_phase(target, None if row.phase == "step" else row.phase)
    if target is None and not _names_a_target(row.model):
        raise MeasuredRequestError(
            f"{row.key!r}: {row.model!r} is no model of the suite and names no target; say with "
            "--target what ran (in Python: target=rooftrace.trace(model, x))"
        )
    sizes = {size: row.sizes.get(size) for size in ("batch", "seq", "kv")}
    name = row.model if target is None else filled(target, {"target": row.model, **sizes})
    return _at_sizes(name, row.phase, sizes)


def _at_sizes(name: str, phase: str, sizes: Mapping[str, int | None]) -> OpGraph:
    """A phase of a target at these sizes.  A target that makes its own inputs is not told what it
    does not take; what it has then must be these sizes."""
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
    return ":" in model or model.endswith(".json")


def _of_phase(graphs: Graphs, phase: str | None) -> OpGraph:
    """The graph of a phase, or the only one."""
    if phase is not None and phase in graphs:
        return graphs[phase]
    if phase is None and len(graphs) == 1:
        return next(iter(graphs.values()))
    raise MeasuredRequestError(
        f"phase {phase or 'not given'}: the target has {', '.join(graphs) or 'none'}"
    )


def filled(target: str, sizes: Mapping[str, Any]) -> str:
    """A template with its names filled in.  Raises MeasuredRequestError for another name in it."""
    try:
        return target.format(**sizes)
    except (KeyError, IndexError, ValueError) as error:
        raise MeasuredRequestError(
            f"--target {target!r}: {error}; expected some of "
            f"{', '.join(f'{{{name}}}' for name in sizes)}"
        ) from None


def why_not(error: Exception, step: MeasuredStep) -> str:
    """One line on why a step could not be used."""
    text = str(error.args[0]) if isinstance(error, LookupError) else str(error)
    why = (text.splitlines() or [""])[0]
    return why if step.group in step.place else f"{step.group}: {why}"


# -- files and traces ------------------------------------------------------------------------------


def read_measured(source: str, use: str) -> Run | Profile | Sequence[StepTime]:
    """What a file holds.  use: what it is wanted for, in an error.  Raises what its reader does."""
    kind = kind_of(source)
    if kind == "run":
        return load_run(source)
    if kind == "trace":
        return read_trace(source)
    if kind == "steps":
        return read_steps(source)
    raise MeasuredRequestError(
        f"{source}: {KINDS[kind]}, which is not enough for {use}: it stands beside a trace, as in "
        f"`rooftrace validate TRACE --counters {source}`"
    )


def what_ran(profile: Profile, graphs_of: Callable[[], Graphs] | None) -> Graphs:
    """The graphs of what a trace ran.  Raises MeasuredRequestError where nobody says what it is."""
    if graphs_of is None:
        raise MeasuredRequestError(
            f"{profile.source or 'the trace'}: a trace does not say what ran: name it with "
            "--target, and its sizes with --batch, --seq, --phase (in Python: "
            "target=rooftrace.trace(model, x))"
        )
    return graphs_of()


def best_match(
    profile: Profile, graphs: Graphs, chip: Chip, model: ExecutionModel, tell: Callable[[str], None]
) -> tuple[Estimate, Alignment]:
    """The graph that a trace matches best, priced, and how it matches.  Raises what `align` does
    where it matches none."""
    best: tuple[Estimate, Alignment] | None = None
    errors: list[ProfileError] = []
    for phase, graph in graphs.items():
        tell(f"aligning with {phase}")
        priced = estimate(graph, chip, model)
        try:
            found = align(profile, priced.graph)
        except ProfileError as error:
            errors.append(error)
            continue
        if best is None or _score(found) > _score(best[1]):
            best = priced, found
    if best is not None:
        return best
    if not errors:
        raise MeasuredRequestError(f"{profile.source}: the target has no graph to set it beside")
    if len(errors) == 1:
        raise errors[0]
    raise ProfileError(f"{errors[0]} (tried {listed(list(graphs))}; this is of the first)")


def _score(found: Alignment) -> float:
    return min(found.coverage, found.ops_matched_share)
