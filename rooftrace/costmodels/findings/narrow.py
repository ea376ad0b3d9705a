"""Where a step computes in another floating precision than the one that it is priced in.

`reprice` changes only what is in the model's own precision; an explicit cast to fp32 (a norm, a
router, logits for the loss) stays.  This lists what stayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rooftrace._plain import Positive
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.graph import OpGraph, Tensor
from rooftrace.tracer.paths import pattern_of


@dataclass(frozen=True, slots=True)
class Island:
    """Tensors of one precision made (or held) by one module pattern: how many, and their bytes."""

    precision: str
    where: str
    tensors: Positive
    bytes: int


def islands(graph: OpGraph) -> tuple[Island, ...]:
    """Islands of a graph, most bytes first; what the optimizer keeps and makes is left out."""
    expected = {graph.model.get("priced_dtype") or graph.model.get("dtype")}
    expected |= {graph.workload.get(name) for name in ("weights_dtype", "kv_dtype")}
    counts: dict[tuple[str, str], list[int]] = {}
    for where, tensor in _owners(graph):
        if tensor.dtype in {*expected, tensor.stored} or precision(tensor.dtype).kind != "float":
            continue
        entry = counts.setdefault((tensor.dtype, pattern_of(where)), [0, 0])
        entry[0] += graph.times(tensor)
        entry[1] += graph.times(tensor) * tensor.nbytes
    made = (Island(name, where, *count) for (name, where), count in counts.items())
    return tuple(sorted(made, key=lambda i: (-i.bytes, i.where, i.precision)))


def _owners(graph: OpGraph) -> Iterator[tuple[str, Tensor]]:
    """(module path, tensor) of every storage that is not the optimizer's."""
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.storage == index and tensor.role != "optimizer":
            yield tensor.name.rpartition(".")[0], tensor
    for op in graph.ops:
        if op.part == "optimizer":
            continue
        for index in op.outputs:
            if graph.values[index].storage == index:
                yield op.module, graph.values[index]
