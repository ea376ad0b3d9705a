"""What a graph from a file must fit beside `verify`: sizes and counts that a trace can have.

Pricing does not grow with counts where it can be closed over the iterations.  Where it cannot, the
bounds here keep it short.
"""

from __future__ import annotations

import math

from rooftrace.hardware.precisions import precision
from rooftrace.tracer.graph import GraphError, Op, OpGraph, Repeat

MOST_ELEMENTS = (1 << 63) - 1
"""Elements of all copies of a value together, and runs of an op: what torch can count."""
MOST_LISTED = 1_000_000
"""Copies that an op takes or makes as one list: such an op is priced copy by copy."""
MOST_VISITS = 5_000_000
"""Ops as memory is followed over a step, where seven iterations of a repeat stand for all."""
_VISITED = 7


def bounded(graph: OpGraph) -> OpGraph:
    """The graph.  Raises GraphError for the first repeat, value or op that passes a bound."""
    for repeat in graph.repeats:
        _check_repeat(graph, repeat)
    for number, tensor in enumerate(graph.values):
        precision(tensor.dtype)
        precision(tensor.stored or tensor.dtype)
        _check_inside(f"value {number}", tensor.repeats)
        if min(tensor.shape, default=0) < 0:
            raise GraphError(f"value {number}: a negative size in shape {list(tensor.shape)}")
        size = math.prod(map(float, tensor.shape)) * _runs(graph, tensor.repeats)
        if size > MOST_ELEMENTS:
            raise GraphError(
                f"value {number}: shape {list(tensor.shape)} in all iterations has {size:.3g} "
                f"elements; expected {MOST_ELEMENTS:.3g} at most"
            )
    visits = 0
    for op in graph.ops:
        _check_op(graph, op)
        visits += math.prod(min(graph.repeats[r].count, _VISITED) for r in op.repeats)
    if visits > MOST_VISITS:
        raise GraphError(
            f"repeats nest so deep that memory is followed over {visits:,} ops; expected "
            f"{MOST_VISITS:,} at most"
        )
    return graph


def _runs(graph: OpGraph, repeats: tuple[int, ...]) -> float:
    return math.prod(float(graph.repeats[r].count) for r in repeats)


def _check_inside(name: str, repeats: tuple[int, ...]) -> None:
    if len(set(repeats)) < len(repeats):
        raise GraphError(f"{name} is in one repeat twice: {list(repeats)}")


def _check_repeat(graph: OpGraph, repeat: Repeat) -> None:
    name = f"repeat {repeat.id}"
    lists = (*repeat.names.values(), *repeat.assumptions.values())
    if any(len(listed) != repeat.count for listed in lists):
        raise GraphError(f"{name}: {repeat.count:,} iterations, but its lists have fewer or more")
    if repeat.container is not None and repeat.count > len(graph.modules) + len(graph.values):
        raise GraphError(
            f"{name}: {repeat.count:,} iterations of the modules in {repeat.container!r:.60}, but "
            f"the graph has {len(graph.modules):,} modules"
        )
    if not set(repeat.names) <= set(range(len(graph.values))):
        raise GraphError(f"{name} names values that are not there")
    rests = {number for key, listed in repeat.assumptions.items() for number in (key, *listed)}
    if not rests <= set(range(len(graph.assumptions))):
        raise GraphError(f"{name} rests on assumptions that are not there")


def _check_op(graph: OpGraph, op: Op) -> None:
    name = f"op {op.id} ({op.target:.60})"
    _check_inside(name, op.repeats)
    if _runs(graph, op.repeats) > MOST_ELEMENTS:
        raise GraphError(f"{name} runs more than {MOST_ELEMENTS:.3g} times")
    if not set(op.assumptions) <= set(range(len(graph.assumptions))):
        raise GraphError(f"{name} rests on assumptions that are not there: {op.assumptions}")
    if op.steps and not op.repeats:
        raise GraphError(f"{name} has steps outside of every repeat")
    for argument in op.steps:
        if type(op.arguments.get(argument)) is not int:
            raise GraphError(f"{name}: {argument!r:.60} has a step, and is no whole number")
    listed = (*(ref.id for ref in op.reads if ref.every), *op.outputs)
    copies = sum(
        _runs(graph, tuple(r for r in graph.values[value].repeats if r not in op.repeats))
        for value in listed
    )
    if copies > max(MOST_LISTED, len(listed)):
        raise GraphError(
            f"{name} takes or makes {copies:.3g} copies of values of repeats as one list; expected "
            f"{MOST_LISTED:,} at most, as it is priced copy by copy"
        )
