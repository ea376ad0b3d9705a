"""Which bytes of a process are there because others hold the rest: gathered weights, buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rooftrace.tracer.graph import OpGraph


def gathered(graph: OpGraph, alive: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Bytes of whole weights that the step has made of the shards of all processes.

    alive: how many tensors of each storage there are.
    """
    return sum(
        count * sizes[storage]
        for storage, count in alive.items()
        if graph.values[storage].role == "weights" and storage in graph.producers
    )


def buffers(graph: OpGraph, alive: Mapping[int, int], sizes: Sequence[int]) -> int:
    """Bytes that are sent or received and serve nothing else, such as those of an all-gather."""
    exchanged = {
        graph.values[value].storage
        for op in graph.ops
        if op.collective is not None
        for value in (*op.inputs, *op.outputs)
    }
    return sum(
        count * sizes[storage]
        for storage, count in alive.items()
        if storage in exchanged and graph.values[storage].role == "temporary"
    )
