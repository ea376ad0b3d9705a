"""Which ops run in place of a package's kernel: those that the function of a fallback called."""

from __future__ import annotations

from msgspec.structs import replace

from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.graph import OpGraph


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
