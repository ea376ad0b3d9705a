"""Estimates of one step from any source."""

from __future__ import annotations

from typing import Any

from rooftrace.costmodels.estimates import Estimate, estimate as estimate_graph
from rooftrace.costmodels.fusion import Plan
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.commands.requests import StepRequest, priced
from rooftrace.tracer import Job, only

Module = Any
"""A torch.Module (this package does not import torch)."""

Source = Any
"""A module, an OpGraph, graphs by phase, or a target (a string or path)."""


def priced_graphs(source: Source, *args: Any, **kwargs: Any) -> dict[str, OpGraph]:
    """The graphs by phase of a source, in the precisions of the call; takes what `report` takes."""
    return dict(priced(Job.of(priced_graphs, source, args, kwargs)).graphs)


def estimate(source: Source, *args: Any, phase: str | None = None, **kwargs: Any) -> Estimate:
    """The cost of one step on `chip` (default h200-sxm) under `execution` (default mixed for a
    script, efficient for all others).

    source: a graph, or a Plan, which has its execution; else a module with its arguments or
    anything that `trace` takes, at a `phase`.  A graph's chip and execution may also stand second
    and third.  dtype, weights_dtype, kv_dtype: storage precisions to price in.
    system: how chips are joined, for a step of several processes; its chip is `chip` then.  knobs,
    rewrites, tf32, library, exchange, what_if, settings: changes of the execution.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in; and the errors of `trace`.
    """
    planned = isinstance(source, Plan)
    if planned or Job(source=source).is_graph:
        kwargs, args = _placed(args, kwargs), ()
    elif kwargs.get("chip") is None and args and _is_chip(args[-1]):
        raise RequestError(
            f"estimate(..., {args[-1]!r:.40}): after a module stand the arguments of its call; say "
            "chip= for the chip"
        )
    if planned:
        chip, system = kwargs.pop("chip", None), kwargs.pop("system", None)
        if kwargs or phase is not None:
            name = next(iter({**kwargs, "phase": phase}))
            raise RequestError(f"{name}=: a Plan is priced already; estimate its graph anew")
        return estimate_graph(source, chip, system=system)
    return estimated(StepRequest.of(estimate, source, args, {**kwargs, "phase": phase}))


def _placed(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a graph by name: its chip and its execution may stand second and third."""
    placed = dict(zip(("chip", "execution"), args, strict=False))
    if len(args) > 2 or any(named.get(name) is not None for name in placed):
        raise RequestError("estimate(graph, chip, execution): give each of them once")
    return {**named, **placed}


def estimated(request: StepRequest) -> Estimate:
    """The estimate of the only graph of a request."""
    return estimate_graph(only(request.of_one_phase().graphs()), request.chip, request.model)


def _is_chip(value: Any) -> bool:
    """Whether an argument is a chip, or the name of one that comes with rooftrace."""
    if not isinstance(value, str):
        return isinstance(value, Chip)
    try:
        load_chip(value)
    except (ValueError, LookupError):
        return False
    return True
