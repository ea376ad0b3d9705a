"""Caches that grow in place: what compiled and efficient execution make of a `cat` with a cache."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin


@builtin("rooftrace.cache_append", label="cache append")
def cache_append(op: OpView) -> Cost:
    """cache[L, D] <- new[n, D] at row L: new rows are read and written, the others stay.

    So do parts of the cache itself: of a window the oldest row is what the new one is written over.
    """
    cache = op.needed("cache").storage
    new = [t for t in op.tensors("new") if t.storage != cache]
    size = sum(t.nbytes for t in new)
    return sum((op.read(t) for t in new), Cost()) + op.write(op.outputs[0], size)
