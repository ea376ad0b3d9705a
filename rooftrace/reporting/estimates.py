"""Estimates of one step from any source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rooftrace.costmodels.estimating import Estimate, estimate as estimate_graph
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.planning import Plan, usual_execution
from rooftrace.costmodels.rewriting import check_precisions, reprice
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, load_chip
from rooftrace.hardware.systems import System, load_system
from rooftrace.reporting.alternatives import one_chip
from rooftrace.tracer import only
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources import traced
from rooftrace.tracer.sources.apart import Traced

Module = Any
"""A torch.Module (this package does not import torch)."""

Source = Any
"""A module, an OpGraph, graphs by phase, or a target (a string or path)."""


def priced(job: Job) -> Traced:
    """The graphs of a job, in the precisions that were asked for."""
    check_precisions(*job.precisions)
    return in_precisions(job, traced(job))


def in_precisions(job: Job, made: Traced) -> Traced:
    """Graphs that were traced for a job, in the precisions that were asked for."""
    job.check_used(made.graphs)
    graphs = {phase: reprice(graph, *job.precisions) for phase, graph in made.graphs.items()}
    return replace(made, graphs=graphs)


def priced_graphs(source: Source, *args: Any, **kwargs: Any) -> dict[str, OpGraph]:
    """The graphs by phase of a source, in the precisions of the call; takes what `report` takes."""
    return dict(priced(Job.of(priced_graphs, source, args, kwargs)).graphs)


def estimate(
    source: Source,
    *args: Any,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    phase: str | None = None,
    system: str | System | None = None,
    **kwargs: Any,
) -> Estimate:
    """What one step costs on `chip` (default h200-sxm) when run as `execution` says: by
    default mixed for a script, and efficient for all others.

    source: a graph, or a Plan, which has its execution; else a module with its arguments or
    anything that `trace` takes, at a `phase`.  A graph's chip and execution may also stand second
    and third.  dtype, weights_dtype, kv_dtype: storage precisions to price in.
    system: how chips are joined, for a step of several processes; its chip is `chip` then.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in; and what `trace` raises.
    """
    if system is not None:
        if chip is not None:
            raise RequestError(f"chip={chip!r:.40} beside system=: a system has its own chip")
        chip = load_system(system).joined_chip
    planned = isinstance(source, Plan)
    if planned or Job(source=source).is_graph:
        if len(args) > 2 or (args and chip is not None) or (args[1:] and execution is not None):
            raise RequestError("estimate(graph, chip, execution): give each of them once")
        chip = args[0] if args else chip
        execution = args[1] if args[1:] else execution
        args = ()
    elif chip is None and args and _is_chip(args[-1]):
        raise RequestError(
            f"estimate(..., {args[-1]!r:.40}): after a module stand the arguments of its call; say "
            "chip= for the chip"
        )
    if planned:
        if kwargs or phase is not None:
            name = next(iter({**kwargs, "phase": phase}))
            raise RequestError(f"{name}=: a Plan is priced already; estimate its graph anew")
        return estimate_graph(source, chip)
    job = Job.of(estimate, source, args, kwargs, phase=phase)
    return estimated(job, chip, usual_execution(job) if execution is None else execution)


def estimated(job: Job, chip: str | Chip | None, execution: str | ExecutionModel) -> Estimate:
    """The estimate of the only graph of a job."""
    used = one_chip(chip, execution)
    return estimate_graph(only(priced(job.of_one_phase()).graphs), used, execution)


def _is_chip(value: Any) -> bool:
    """Whether an argument is a chip, or the name of one that comes with rooftrace."""
    if not isinstance(value, str):
        return isinstance(value, Chip)
    try:
        load_chip(value)
    except (ValueError, LookupError):
        return False
    return True
