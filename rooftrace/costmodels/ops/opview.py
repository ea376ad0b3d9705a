"""An op as a rule sees it: sizes, precisions and arguments of one call, and the bytes it moves.

A rule adds up the costs of these methods: `op.read(tensor)`, `op.write(tensor)`, or `op.streamed()`
for an op that reads each operand once and writes each result once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from msgspec import Struct

from rooftrace.costmodels.ops.cost import Access, Cost
from rooftrace.errors import hint
from rooftrace.hardware.precisions import widest


class TensorView(Struct, frozen=True):
    """A tensor as a rule sees it: sizes only, and a local storage index, shared with its views."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]
    storage: int
    elements: int
    unique_elements: int
    nbytes: int
    floating: bool

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


class Slot(Struct, frozen=True):
    """Stands in an OpView's arguments for the tensor at this position of `inputs`."""

    index: int


class OpView(Struct, frozen=True):
    """An op as a rule sees it: shapes, precisions and attributes, but not which tensors they are.

    Two ops with equal views cost the same, so each view is priced once.  `arguments` is a tuple of
    (schema name, value), without those left at their defaults; a tensor is a Slot(position in
    inputs).  schema: the names of all arguments of the op; methods raise ValueError for other
    names.  None: unknown, and not checked.
    """

    target: str
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    arguments: tuple[tuple[str, Any], ...]
    facts: tuple[tuple[str, Any], ...] = ()
    schema: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """The op with its arguments: "mylib.rope.default(x=bf16[8, 64], base=500)"."""
        shown = (f"{name}={self._shown(value)}" for name, value in self.arguments)
        return f"{self.target}({', '.join(shown)})"

    def attribute(self, name: str, default: Any = None) -> Any:
        """A non-tensor argument by schema name; `default` where the call does not pass it."""
        self._check(name)
        return self._argument(name, default)

    def fact(self, name: str, default: Any = None) -> Any:
        """A fact of the tracer about this op (rows_touched, groups_touched, mask ...)."""
        for key, value in self.facts:
            if key == name:
                return value
        return default

    def tensor(self, name: str) -> TensorView | None:
        """A tensor argument by schema name; None where the call passes none."""
        self._check(name)
        return self._tensor(name)

    def tensors(self, name: str) -> tuple[TensorView, ...]:
        """A tensor-list argument by schema name (absent members left out), or the one tensor."""
        self._check(name)
        return self._tensors(name)

    def _check(self, *names: str) -> None:
        if self.schema is None:
            return
        for name in names:
            if name not in self.schema:
                raise ValueError(
                    f'{self.target} has no argument "{name}"; its schema has '
                    f"{', '.join(self.schema) or 'none'}{hint(name, self.schema)}"
                )

    def _argument(self, name: str, default: Any = None) -> Any:
        for key, value in self.arguments:
            if key == name:
                return value
        return default

    def _tensor(self, name: str) -> TensorView | None:
        value = self._argument(name)
        return self.inputs[value.index] if isinstance(value, Slot) else None

    def _tensors(self, name: str) -> tuple[TensorView, ...]:
        value = self._argument(name, ())
        if value is None or isinstance(value, Slot):
            value = (value,)
        return tuple(self.inputs[item.index] for item in value if isinstance(item, Slot))

    @property
    def precision(self) -> str:
        """The widest precision of its floating inputs (of inputs and outputs if it has none)."""
        names = [t.dtype for t in self.inputs if t.floating]
        if not names:
            names = [t.dtype for t in (*self.inputs, *self.outputs)]
        return widest(*names) if names else "fp32"

    def first(self, *names: str) -> TensorView | None:
        """The first of these tensor arguments that the call passes: schemas differ in their names.

        Only one of the names must be in the schema.
        """
        if self.schema is not None and not set(names) & set(self.schema):
            self._check(*names)
        return next((t for name in names if (t := self._tensor(name)) is not None), None)

    def needed(self, *names: str) -> TensorView:
        """The first of these tensor arguments.  Raises ValueError where the op has none of them."""
        tensor = self.first(*names)
        if tensor is None:
            raise ValueError(
                f"{self.target}: expected a tensor argument {' or '.join(names)}, "
                f"got {', '.join(name for name, _ in self.arguments) or 'no arguments'}"
            )
        return tensor

    def operands(
        self, only: Collection[str] | None = None, but: Collection[str] = ()
    ) -> Iterator[tuple[str, TensorView]]:
        """Tensor arguments with their schema names; members of a list have the name of the list.

        A tensor that is passed twice, as in x * x, comes once.  Two slices of one storage come
        both, even if their sizes are equal.
        """
        self._check(*but, *(only or ()))
        seen = set()
        for name, value in self.arguments:
            if name in but or (only is not None and name not in only):
                continue
            for slot in _slots(value):
                if slot.index not in seen:
                    seen.add(slot.index)
                    yield name, self.inputs[slot.index]

    def written(self) -> tuple[TensorView, ...]:
        """The written tensors: its outputs; of an in-place op without any, its `self`."""
        if self.outputs or not self.target.rsplit(".", 1)[0].endswith("_"):
            return self.outputs
        return self._tensors("self")

    def read(self, tensor: TensorView | None, size: int | None = None) -> Cost:
        """Reading `size` bytes of a tensor (default: each distinct element once)."""
        return _moved(tensor, size, write=False)

    def write(self, tensor: TensorView | None, size: int | None = None) -> Cost:
        """Writing `size` bytes of a tensor (default: each distinct element once)."""
        return _moved(tensor, size, write=True)

    def read_all(self, tensors: Iterable[TensorView | None]) -> Cost:
        """Each of these tensors read once; None costs nothing."""
        return _all_moved(tensors, write=False)

    def write_all(self, tensors: Iterable[TensorView | None]) -> Cost:
        """Each of these tensors written once; None costs nothing."""
        return _all_moved(tensors, write=True)

    def streamed(self, unread: Collection[str] = ()) -> Cost:
        """Every operand read once, every written tensor written once.

        Not read are the arguments named in `unread`, and the buffers of an out= overload.
        """
        overload = self.target.rsplit(".", 1)[-1]
        into_buffers = overload == "out" or overload.endswith("_out")
        buffers = {t.storage for t in self.outputs} if into_buffers else set[int]()
        inputs = (
            tensor
            for name, tensor in self.operands(but=unread)
            if tensor.storage not in buffers or name in ("self", "input")
        )
        return self.read_all(inputs) + self.write_all(self.written())

    def reading(self, *names: str) -> Cost:
        """These arguments read once, every written tensor written once."""
        inputs = (tensor for _, tensor in self.operands(only=names))
        return self.read_all(inputs) + self.write_all(self.written())

    def _shown(self, value: Any) -> str:
        if isinstance(value, Slot):
            tensor = self.inputs[value.index]
            return f"{tensor.dtype}[{', '.join(map(str, tensor.shape))}]"
        if isinstance(value, tuple):
            return f"[{', '.join(map(self._shown, value))}]"
        return f"{value!r}"


def _moved(tensor: TensorView | None, size: int | None, write: bool) -> Cost:
    if tensor is None:
        return Cost()
    amount = tensor.nbytes if size is None else size
    return Cost({}, {Access(tensor.storage, write): amount}) if amount else Cost()


def _all_moved(tensors: Iterable[TensorView | None], write: bool) -> Cost:
    traffic: dict[Access, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.nbytes:
            key = Access(tensor.storage, write)
            traffic[key] = traffic.get(key, 0) + tensor.nbytes
    return Cost({}, traffic)


def _slots(argument: Any) -> Iterator[Slot]:
    if isinstance(argument, Slot):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _slots(item)
