"""Where the elements of a value lie in the storage that owns them, and which ops make and read it.

A `Tensor` has shape and strides; a view's offset follows from the ops that made it.  With it,
rewrites tell what a value is made of, whatever views were taken on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rooftrace.tracer.graph import Op, OpGraph, Tensor

VIEWS = frozenset({
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.transpose", "aten.permute", "aten.t",
    "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.detach", "aten.alias", "aten.lift_fresh",
    "aten.unflatten", "aten.flatten", "aten.view_as", "aten.expand_as",
})  # fmt: skip
"""Views of all elements."""
COPIES = frozenset({"aten.clone", "aten._to_copy", "aten.contiguous"})


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """Where a value lies: element (i, j, ...) at offset + i stride[0] + j stride[1] + ...

    All are in elements of the storage.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides; 0 for dimensions of one element, whose stride says nothing."""
        return tuple(s if n > 1 else 0 for n, s in zip(self.shape, self.stride, strict=True))


class Places:
    """The places of the values of a graph, and the readers of its storages."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self._known: dict[int, StoragePlace | None] = {}

    @cached_property
    def readers(self) -> dict[int, list[Op]]:
        """Storage -> the ops that read or overwrite it, in order."""
        readers: dict[int, list[Op]] = defaultdict(list)
        values = self.graph.values
        for op in self.graph.ops:
            for storage in {values[i].storage for i in (*op.inputs, *op.outputs)}:
                readers[storage].append(op)
        return readers

    @cached_property
    def read_by(self) -> dict[int, list[Op]]:
        """Value -> the ops that read it, in this iteration or in the next one, in order."""
        reading: dict[int, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            neighbours = {ref.then.value for ref in op.reads if ref.then is not None}
            for value in {*op.inputs, *neighbours}:
                reading[value].append(op)
        return reading

    @cached_property
    def outside(self) -> frozenset[int]:
        """Values that no op makes."""
        return frozenset(self.graph.external)

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Storage -> the values that lie in it."""
        members: dict[int, list[int]] = defaultdict(list)
        for index, tensor in enumerate(self.graph.values):
            members[tensor.storage].append(index)
        return members

    @cached_property
    def shared(self) -> frozenset[int]:
        """Storages that leave the step, or that an op reads of another iteration of a repeat."""
        values = self.graph.values
        return self.neighbours | {values[i].storage for i in self.graph.outputs}

    @cached_property
    def neighbours(self) -> frozenset[int]:
        """Storages that an op reads of another iteration of a repeat, or of all of them."""
        graph, values = self.graph, self.graph.values
        across = [r.id for op in graph.ops for r in op.reads if r.every]
        beside = [r.then for op in graph.ops for r in op.reads]
        beside += [tensor.then for tensor in values]
        across += [then.value for then in beside if then is not None]
        return frozenset(values[i].storage for i in across)

    @cached_property
    def writers(self) -> dict[int, list[Op]]:
        """Storage -> the kernels that write into it once it is there, in order."""
        writers: dict[int, list[Op]] = defaultdict(list)
        for op in self.graph.kernels():
            for value in op.outputs:
                storage = self.graph.values[value].storage
                if storage not in op.outputs:
                    writers[storage].append(op)
        return writers

    def overwritten(self, value: int, first: int, last: int) -> bool:
        """Whether an op between two ops, by their ids, writes into the storage of a value."""
        writers = self.writers.get(self.graph.values[value].storage, ())
        return any(first < op.id < last for op in writers)

    def made_by(self, value: int) -> Op | None:
        """The op that made a value; None for what comes from outside."""
        index = self.graph.producers.get(value)
        return None if index is None else self.graph.ops[index]

    def kernel_of(self, value: int) -> Op | None:
        """The kernel that made a value, whatever views lie between."""
        op = self.made_by(value)
        while op is not None and op.kind == "view" and op.inputs:
            op = self.made_by(op.inputs[0])
        return op

    def place(self, value: int) -> StoragePlace | None:
        """Where a value lies; None where an unknown view, or a neighbour, is in between."""
        if value not in self._known:
            self._known[value] = self._placed(value)
        return self._known[value]

    def before(self, value: int) -> int | None:
        """The value behind views, a copy or a cast that has the same elements in the same order.

        Views between the two may turn them, as long as the last one turns them back.  None where
        another op made this one.
        """
        values, op = self.graph.values, self.made_by(value)
        new = values[value]
        if op is not None and op.name in COPIES and not beside(op):
            return op.inputs[0] if values[op.inputs[0]].elements == new.elements else None
        while op is not None and op.kind == "view" and len(op.inputs) == 1 and not beside(op):
            old = values[op.inputs[0]]
            if old.dtype != new.dtype or old.elements != new.elements:
                return None
            if merged(old) == merged(new):
                return op.inputs[0]
            op = self.made_by(op.inputs[0])
        return None

    def behind(self, value: int, shape: tuple[int, ...] | None = None) -> Iterator[int]:
        """A value, and those before it that have its elements in the same order, the latest first.

        shape: only as far as values have this shape.
        """
        step: int | None = value
        while step is not None and (
            step == value or shape in (None, self.graph.values[step].shape)
        ):
            yield step
            step = self.before(step)

    def straight(self, value: int, shape: tuple[int, ...] | None = None) -> int:
        """The first value that this one has the elements of, in the same order."""
        *_, first = self.behind(value, shape)
        return first

    def shaped(self, value: int, shape: tuple[int, ...]) -> int | None:
        """The first value of this shape that this one has the elements of, in the same order."""
        alike = [v for v in self.behind(value) if self.graph.values[v].shape == shape]
        return alike[-1] if alike else None

    def _placed(self, value: int) -> StoragePlace | None:
        tensor = self.graph.values[value]
        if tensor.then is not None:
            return None
        if tensor.storage == value:
            return StoragePlace(value, 0, tensor.shape, tensor.stride)
        op = self.made_by(value)
        if op is None or not op.inputs or beside(op):
            return None
        source = self.place(op.inputs[0])
        alike = self.graph.values[op.inputs[0]].dtype == tensor.dtype
        if source is None or source.storage != tensor.storage or not alike:
            return None
        start = _start(op, source, op.outputs.index(value), self.graph)
        if start is None:
            return None
        return StoragePlace(tensor.storage, source.offset + start, tensor.shape, tensor.stride)


def beside(op: Op) -> bool:
    """Whether an op reads what another iteration of a repeat makes."""
    return any(r.then is not None or r.every for r in op.reads)


def _start(op: Op, source: StoragePlace, position: int, graph: OpGraph) -> int | None:
    """How far behind its operand an output of a view op begins; None for an unknown one."""
    if op.name in VIEWS or (op.name.endswith("_") and op.kind == "kernel"):
        return 0
    dim = op.arguments.get("dim", 0)
    if op.name not in ("aten.slice", "aten.select", "aten.narrow", "aten.split", "aten.unbind",
                       "aten.split_with_sizes", "aten.chunk", "aten.split_copy"):  # fmt: skip
        return None
    if not isinstance(dim, int) or not source.shape:
        return None
    size, step = source.shape[dim], source.stride[dim]
    if op.name == "aten.unbind":
        return position * step
    if op.name in ("aten.split", "aten.split_with_sizes", "aten.chunk"):
        return step * sum(graph.values[i].shape[dim] for i in op.outputs[:position])
    first = op.arguments.get("index" if op.name == "aten.select" else "start")
    first = 0 if first is None else first
    if not isinstance(first, int):
        return None
    return step * min(max(first + size if first < 0 else first, 0), size)


def same_steps(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether strides are the same; those of dimensions of one element say nothing."""
    return all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))


def merged(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and strides with those that continue each other put together: the order of elements."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)
