"""Caches that grow in place: what compiled and efficient execution make of a `cat` with a cache."""

from __future__ import annotations

from rooftrace.costmodels.pricing import NOTHING, Cost, OpView, builtin


@builtin("rooftrace.cache_append", label="cache append")
def cache_append(op: OpView) -> Cost:
    """cache[L, D] <- new[n, D] at row L: new rows are read and written, the others stay."""
    new = op.tensors("new")
    size = sum(t.nbytes for t in new)
    return sum((op.read(t) for t in new), NOTHING) + op.write(op.outputs[0], size)
