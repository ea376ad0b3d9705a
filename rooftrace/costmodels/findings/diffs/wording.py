"""Words for ops and tensors in the sentences of a diff."""

from __future__ import annotations

from rooftrace.costmodels.findings.diffs.sides import Side
from rooftrace.tracer.graph import Op, Tensor

_PADDED = 0.1
"""The most by which padding lets a dimension grow."""
_ALIGNED = 64
"""The least multiple that makes a dimension one of whole tiles."""
_TILES = (512, 256, 128, 64, 32, 16, 8)


def kind_of_call(side: Side, op: Op) -> str:
    """A call in the code by what it does: a cast, a copy, or the name of the call."""
    values = side.graph.values
    tensors = [values[i] for i in op.inputs], [values[i] for i in op.outputs]
    if len(tensors[0]) == len(tensors[1]) == 1 and not side.cost(op.id).flops():
        (read,), (made,) = tensors
        if read.elements == made.elements and read.dtype != made.dtype:
            return f"cast {read.dtype} -> {made.dtype} by {_by(op)}"
        if read.shape == made.shape and read.dtype == made.dtype and read.stride != made.stride:
            return f"copy by {_by(op)}"
    return call(op)


def call(op: Op) -> str:
    """The call in the code that an op is of: ".contiguous()", or its name in backward."""
    name = op.name.rpartition(".")[2]
    if op.part != "forward" or not op.function.isidentifier() or op.function.startswith("__"):
        return name
    return op.function if op.function == name else f"{op.function} ({name})"


def _by(op: Op) -> str:
    """A call that casts or copies: "contiguous()", or the name of the op in backward."""
    is_call = op.part == "forward" and op.function.isidentifier()
    return f"{op.function}()" if is_call else call(op)


def difference(first: Tensor, second: Tensor) -> tuple[str, str]:
    """How two tensors differ, and a note on a dimension that was padded."""
    if first.shape == second.shape:
        return f"{first.dtype} -> {second.dtype}", ""
    dtype = first.dtype if first.dtype == second.dtype else f"{first.dtype} -> {second.dtype} "
    text = f"{dtype}{list(first.shape)} -> {list(second.shape)}"
    if len(first.shape) != len(second.shape):
        return text, ""
    for a, b in zip(first.shape, second.shape, strict=True):
        if a != b and a and abs(b - a) <= _PADDED * a:
            old, new = _multiple(a), _multiple(b)
            if old < _ALIGNED <= new:
                return text, f" ({a} is padded to {b}, a multiple of {new})"
            if new < _ALIGNED <= old:
                return text, f" ({b} is no multiple of {old}, as {a} is)"
    return text, ""


def _multiple(size: int) -> int:
    """The largest tile size that divides a dimension, 1 for none."""
    return next((tile for tile in _TILES if size % tile == 0), 1)
