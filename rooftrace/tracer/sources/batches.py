"""A source traced at other batch sizes: the first dimension of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources.tracing import collector_paused, traced

BatchTrace = Callable[[str, int], OpGraph]
"""Traces a phase at a batch size."""

_RunAt = Callable[[tuple[str, ...] | None, int], dict[str, OpGraph]]
"""Traces some phases at a batch size."""


def at_batches(job: Job) -> tuple[tuple[str, ...], BatchTrace]:
    """The phases of a job, and a function that traces one of them at another batch size.

    Each trace is kept.  Raises RequestError for a graph, whose sizes are fixed, and for a source
    that cannot run at another batch size.
    """
    if job.is_graph:
        raise RequestError(
            "another batch cannot be traced from a graph, which has its sizes: give the module or "
            "the target that it was made from"
        )
    run = _target_at(job) if job.is_named else _module_at(job)
    first = run(job.phases, 1)
    job.check_used(first)
    traces = {(phase, 1): graph for phase, graph in first.items()}

    def trace_at(phase: str, batch: int) -> OpGraph:
        if (phase, batch) not in traces:
            tell(f"{phase} at batch {batch:,}")
            try:
                traces[phase, batch] = run((phase,), batch)[phase]
            except RuntimeError as error:  # a TraceError, or torch's own
                raise RequestError(
                    f"{phase} runs with batch 1 and not with {batch}, so the first dimension of "
                    f"its inputs is not their batch: {str(error).splitlines()[0]}"
                ) from error
        return traces[phase, batch]

    return tuple(first), trace_at


def _target_at(job: Job) -> _RunAt:
    from rooftrace.tracer.targets import isolation

    kept = isolation.Kept()

    def run(phases: tuple[str, ...] | None, batch: int) -> dict[str, OpGraph]:
        request = replace(job.request, batch=batch)
        # Explicit arguments were checked for all phases, and may be for another phase than this.
        at_batch = replace(job, phases=phases, request=request, explicit=())
        with isolation.keeping(kept):
            return dict(traced(at_batch).graphs)

    return run


def _module_at(job: Job) -> _RunAt:
    from rooftrace.tracer.inputs import call_inputs
    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.phases import trace_phases
    from rooftrace.tracer.twins import inputs_on_meta

    with contexts.apart():
        args, kwargs = inputs_on_meta((job.args, dict(job.kwargs)))

    def run(phases: tuple[str, ...] | None, batch: int) -> dict[str, OpGraph]:
        with collector_paused(), contexts.apart():
            inputs = call_inputs(job.source, args, kwargs, batch)
            return trace_phases(job.source, inputs, phases, job.options)

    return run
