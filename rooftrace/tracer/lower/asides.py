"""Assumptions of a graph as a whole: those made beside the step, and those on fallbacks, which say
in which lines the function stands that runs in place of a package's kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from rooftrace.tracer.asking import assumptions as asked
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


# -- fallbacks -------------------------------------------------------------------------------------


def with_fallbacks(graph: OpGraph) -> OpGraph:
    """The graph with its ops resting on the fallbacks in whose lines they were called."""
    spans = [
        (item.id, *_span(str(item.value)))
        for item in graph.assumptions
        if item.kind == asked.FALLBACK and item.value
    ]
    if not spans:
        return graph
    ops = []
    for op in graph.ops:
        file, _, line = op.source.rpartition(":")
        resting = [
            number
            for number, other, first, last in spans
            if file == other and first <= int(line) <= last
        ]
        ops.append(replace(op, assumptions=(*op.assumptions, *resting)) if resting else op)
    return graph.replace(ops=tuple(ops))


def _span(text: str) -> tuple[str, int, int]:
    file, _, numbers = text.rpartition(":")
    first, _, last = numbers.partition("-")
    return file, int(first), int(last)
