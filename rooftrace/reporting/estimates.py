"""Estimates of one step from any source, and the habits `profile` and `summary`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.costmodels.estimating import Estimate, estimate as estimate_graph
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.rewriting import check_precisions, reprice
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, load_chip
from rooftrace.tracer import only
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources import Traced, traced

Module = Any
"""A torch.Module (this package does not import torch)."""

Source = Any
"""A module, an OpGraph, graphs by phase, or a target (a string or path)."""

CHIP = "h200-sxm"


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
    **kwargs: Any,
) -> Estimate:
    """What one step costs on `chip` (default h200-sxm) when run as `execution` says (efficient).

    source: a graph, or a Plan, which has its execution; else a module with its arguments or
    anything that `trace` takes, at a `phase`.  A graph's chip and execution may also stand second
    and third.  dtype, weights_dtype, kv_dtype: storage precisions to price in.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in; and what `trace` raises.
    """
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
        return estimate_graph(source, chip or CHIP, execution or "efficient")
    job = Job.of(estimate, source, args, kwargs, phase=phase)
    return _estimated(job, chip or CHIP, execution or "efficient")


def _estimated(job: Job, chip: str | Chip, execution: str | ExecutionModel) -> Estimate:
    return estimate_graph(only(priced(job.of_one_phase()).graphs), chip, execution)


def _is_chip(value: Any) -> bool:
    """Whether an argument is a chip, or the name of one that comes with rooftrace."""
    if not isinstance(value, str):
        return isinstance(value, Chip)
    try:
        load_chip(value)
    except (ValueError, LookupError):
        return False
    return True


@dataclass(frozen=True)
class Profile:
    """Counts of one forward pass.  Unpacks as `macs, params`, which is thop's order."""

    macs: int  # of matrix products and convolutions
    params: int
    flops: int  # a multiply-add as 2; with vector work
    unsupported: tuple[str, ...]  # names of ops without a rule
    estimate: Estimate

    def __iter__(self) -> Any:
        return iter((self.macs, self.params))


def profile(model: Module, inputs: Sequence[Any] = (), **kwargs: Any) -> Profile:
    """FLOPs, MACs and parameters of one forward pass of `model(*inputs, **kwargs)`."""
    result = _estimated(Job.of(profile, model, inputs, kwargs), CHIP, "eager")
    return Profile(
        result.macs,
        int(result.graph.model["params"]),
        result.flops,
        tuple(u.target for u in result.unsupported_ops()),
        result,
    )


def summary(
    model: Module,
    input_size: Sequence[int] | None = None,
    *,
    input_data: Any = None,
    chip: str | Chip = CHIP,
    execution: str | ExecutionModel = "eager",
    **kwargs: Any,
) -> Estimate:
    """An estimate of one forward pass, for the habit: print it for the table.

    Give `input_size` (one float tensor in the model's precision) or `input_data` (a tensor, a
    tuple, or a dict of keyword arguments); for a target, a graph or a Hugging Face model sizes may
    stand in their place (batch=8), as for `estimate`.
    """
    job = Job.of(summary, model, (), kwargs)
    sizes = job.is_named or job.is_graph or job.is_sized
    if (input_size, input_data) == (None, None) and sizes:
        return _estimated(job, chip, execution)
    if (input_size is None) == (input_data is None):
        raise ValueError("summary: give either input_size=(8, 3, 224, 224) or input_data=")
    args: tuple[Any, ...] = ()
    if input_size is not None:
        from rooftrace.tracer.inputs import arguments

        args = (arguments.floating_input(model, tuple(input_size)),)
    elif isinstance(input_data, Mapping):
        kwargs = {**input_data, **kwargs}
    else:
        args = tuple(input_data) if isinstance(input_data, (tuple, list)) else (input_data,)
    return _estimated(Job.of(summary, model, args, kwargs), chip, execution)
