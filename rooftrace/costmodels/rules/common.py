"""What rules share: which operands an op reads and writes, and how vector work is keyed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from rooftrace.costmodels.cost import NOTHING, Access, Cost, OpView, Slot, TensorView
from rooftrace.hardware.precision import precision, widest


def is_complex(tensor: TensorView) -> bool:
    """Whether the elements have a real and an imaginary part."""
    return tensor.dtype.startswith("complex")


def has_arithmetic(op: OpView) -> bool:
    """Whether the op touches a floating or complex tensor; integer and index work is bytes only."""
    return any(t.floating or is_complex(t) for t in (*op.inputs, *op.outputs))


def vector_precision(op: OpView) -> str:
    """fp64 if anything is stored in it, else fp32: GPU kernels compute low precisions in fp32."""
    wide = any(t.dtype in ("fp64", "complex128") for t in (*op.inputs, *op.outputs))
    return "fp64" if wide else "fp32"


def vector(op: OpView, flop: int, count: str = "useful") -> Cost:
    """`flop` on the vector engine, none if the op is on integers."""
    if not has_arithmetic(op):
        return NOTHING
    return Cost.of(vector=flop, precision=vector_precision(op), count=count)


def product_precision(*operands: TensorView | None) -> str:
    """What a matrix product of these operands computes in; scales and biases have no say."""
    return widest(*(t.dtype for t in operands if t is not None))


def is_matrix_type(tensor: TensorView) -> bool:
    """Whether products of this type are counted: floats, and complex by their real parts."""
    return precision(tensor.dtype).kind in ("float", "complex")


def operands(op: OpView) -> Iterator[tuple[str, TensorView]]:
    """Every tensor argument with its schema name; members of a list have the name of the list."""
    for name, value in op.arguments:
        for slot in _slots(value):
            yield name, op.inputs[slot.index]


def _slots(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _slots(item)


def given(op: OpView, *names: str) -> TensorView | None:
    """The first of these tensor arguments that is there (schemas differ in what they call it)."""
    for name in names:
        tensor = op.tensor(name)
        if tensor is not None:
            return tensor
    return None


def needed(op: OpView, *names: str) -> TensorView:
    """As `given`, for an argument the op cannot be called without."""
    tensor = given(op, *names)
    if tensor is None:
        raise ValueError(f"{op.target}: expected a tensor argument {' or '.join(names)}, "
                         f"got {', '.join(name for name, _ in op.arguments) or 'no arguments'}")
    return tensor


def written(op: OpView) -> tuple[TensorView, ...]:
    """What the op writes: its outputs; of an in-place op that returns nothing, its `self`."""
    if op.outputs or not op.target.rsplit(".", 1)[0].endswith("_"):
        return op.outputs
    one = op.tensor("self")
    return op.tensors("self") if one is None else (one,)


def read_all(op: OpView, tensors: Iterable[TensorView | None]) -> Cost:
    """Each distinct tensor read once: bytes given twice, as in x * x, move once."""
    cost = NOTHING
    seen = set()
    for tensor in tensors:
        if tensor is not None and tensor not in seen:
            seen.add(tensor)
            cost += op.read(tensor)
    return cost


def write_all(op: OpView, tensors: Iterable[TensorView | None]) -> Cost:
    """Each tensor written once."""
    cost = NOTHING
    for tensor in tensors:
        cost += op.write(tensor)
    return cost


def streamed(op: OpView, unread: Iterable[str] = ()) -> Cost:
    """Every input read once, everything written once.

    Not read: the arguments named in `unread`, and the buffers of an out= overload.
    """
    skip = set(unread)
    overload = op.target.rsplit(".", 1)[-1]
    into_buffers = overload == "out" or overload.endswith("_out")
    storages = {t.storage for t in op.outputs} if into_buffers else set()
    inputs = [t for name, t in operands(op)
              if name not in skip and not (t.storage in storages and name not in ("self", "input"))]
    return read_all(op, inputs) + write_all(op, written(op))


def reading(op: OpView, *names: str) -> Cost:
    """These arguments read once, everything written once."""
    wanted = (t for name, t in operands(op) if name in names)
    return read_all(op, wanted) + write_all(op, written(op))


def total(tensors: Iterable[TensorView]) -> int:
    """Elements of all of them."""
    return sum(t.elements for t in tensors)


def axes(op: OpView, rank: int, name: str = "dim", default: Any = None) -> tuple[int, ...]:
    """A dimension argument as non-negative indices; None and () mean all of them."""
    value = op.attribute(name, default)
    if value is None or value == ():
        return tuple(range(rank))
    values = value if isinstance(value, tuple) else (value,)
    return tuple(int(v) % rank for v in values) if rank else ()


def extent(shape: tuple[int, ...], dims: Iterable[int]) -> int:
    """Product of the sizes of these dimensions."""
    return math.prod(shape[d] for d in dims)


def share(tensor: TensorView, part: int, whole: int) -> int:
    """Bytes of `part` out of `whole` equal pieces of a tensor."""
    return 0 if whole <= 0 else -(-tensor.nbytes * min(part, whole) // whole)


def over_link(tensor: TensorView, size: int) -> Cost:
    """`size` bytes of a tensor sent to other devices."""
    return Cost({}, {Access(tensor.storage, False, "link"): size}) if size else NOTHING
