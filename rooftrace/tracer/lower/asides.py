"""Assumptions that no recorded op rests on, because they were made beside the step."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from rooftrace.tracer.graph import OpGraph


def without_asides(graph: OpGraph, asides: Collection[int]) -> OpGraph:
    """The graph without those of these assumptions that none of its ops rests on.

    asides: ids of assumptions that were made while nothing was recorded, as in the prefill whose
    cache a decode step reads.
    """
    used = {number for op in graph.ops for number in op.assumptions}
    for repeat in graph.repeats:
        used.update(n for ids in repeat.assumptions.values() for n in ids)
    left = set(asides) - used
    if not left:
        return graph
    kept = [item for item in graph.assumptions if item.id not in left]
    ids = {item.id: number for number, item in enumerate(kept)}

    def renamed(numbers: Iterable[int]) -> tuple[int, ...]:
        return tuple(ids[number] for number in numbers)

    return graph.replace(
        assumptions=tuple(replace(item, id=ids[item.id]) for item in kept),
        ops=tuple(
            replace(op, assumptions=renamed(op.assumptions)) if op.assumptions else op
            for op in graph.ops
        ),
        repeats=tuple(
            replace(
                repeat,
                assumptions={ids[key]: renamed(many) for key, many in repeat.assumptions.items()},
            )
            for repeat in graph.repeats
        ),
    )
