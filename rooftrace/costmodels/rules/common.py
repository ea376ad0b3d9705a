"""What rules share: which operands an op reads and writes, and how vector work is keyed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from rooftrace.costmodels.pricing import NOTHING, Access, Cost, OpView, Slot, TensorView
from rooftrace.hardware.precisions import precision, widest


def is_complex(tensor: TensorView) -> bool:
    """Whether the elements have a real and an imaginary part."""
    return tensor.dtype.startswith("complex")


def has_arithmetic(op: OpView) -> bool:
    """Whether the op touches a floating or complex tensor; integer and index work is bytes only."""
    return any(t.floating for t in (*op.inputs, *op.outputs))


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
    """What a matrix product of these operands computes in; scales and biases have no say.

    Whole numbers of 8 bits in int8; wider ones at the rate of fp32, as no chip has another.
    """
    known = [t for t in operands if t is not None]
    if all(precision(t.dtype).kind in ("int", "bool") for t in known):
        return "int8" if all(precision(t.dtype).bits <= 8 for t in known) else "fp32"
    return widest(*(t.dtype for t in known))


def stored_width(tensor: TensorView) -> float:
    """Bytes that one number of a tensor takes where it is stored; fp4_x2 has two in an element."""
    return float(precision(tensor.dtype).bits / 8) / (2 if tensor.dtype == "fp4_x2" else 1)


def widths(a: TensorView, b: TensorView) -> tuple[float, float]:
    """`stored_width` of the two operands of a product."""
    return stored_width(a), stored_width(b)


def operands(op: OpView, only: Collection[str] | None = None,
             but: Collection[str] = ()) -> Iterator[tuple[str, TensorView]]:
    """Tensor arguments with their schema names; members of a list have the name of the list.

    A tensor given twice, as in x * x, comes once.  Two slices of one storage come both, even if
    they look alike: what tells them apart is their place, not their sizes.
    """
    seen = set()
    for name, value in op.arguments:
        if name in but or (only is not None and name not in only):
            continue
        for slot in _slots(value):
            if slot.index not in seen:
                seen.add(slot.index)
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
    """Each of these read once (what is not there costs nothing)."""
    return _moved(tensors, write=False)


def write_all(op: OpView, tensors: Iterable[TensorView | None]) -> Cost:
    """Each tensor written once."""
    return _moved(tensors, write=True)


def _moved(tensors: Iterable[TensorView | None], write: bool) -> Cost:
    traffic: dict[Access, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.nbytes:
            key = Access(tensor.storage, write)
            traffic[key] = traffic.get(key, 0) + tensor.nbytes
    return Cost({}, traffic) if traffic else NOTHING


def streamed(op: OpView, unread: Collection[str] = ()) -> Cost:
    """Every input read once, everything written once.

    Not read: the arguments named in `unread`, and the buffers of an out= overload.
    """
    overload = op.target.rsplit(".", 1)[-1]
    into_buffers = overload == "out" or overload.endswith("_out")
    buffers = {t.storage for t in op.outputs} if into_buffers else set()
    inputs = (t for name, t in operands(op, but=unread)
              if t.storage not in buffers or name in ("self", "input"))
    return read_all(op, inputs) + write_all(op, written(op))


def reading(op: OpView, *names: str) -> Cost:
    """These arguments read once, everything written once."""
    return read_all(op, (t for _, t in operands(op, only=names))) + write_all(op, written(op))


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
