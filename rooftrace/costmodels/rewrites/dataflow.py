"""ValueFlow of a graph: producers and users of values, and their locations in storages.

A `Tensor` has shape and strides; the offset of a view follows from the ops that made it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from rooftrace.graph import Op, OpGraph, Ref, Tensor

VIEWS = frozenset({
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.transpose", "aten.permute", "aten.t",
    "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.detach", "aten.alias", "aten.lift_fresh",
    "aten.unflatten", "aten.flatten", "aten.view_as", "aten.expand_as",
})  # fmt: skip
"""Views of all elements."""
ORDERS = frozenset({"aten.t", "aten.transpose", "aten.permute"})
RESHAPES = VIEWS - ORDERS - {"aten.expand"}
IMAGES = {4: "torch.channels_last", 5: "torch.channels_last_3d"}
"""Memory formats by the number of dimensions of images, and of volumes."""
COPIES = frozenset({"aten.clone", "aten._to_copy", "aten.contiguous"})


@dataclass(frozen=True, slots=True)
class Location:
    """Element (i, j, ...) of a value is at offset + i stride[0] + j stride[1] + ... of its storage.

    All are in elements.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class ValueFlow:
    """Producers, users, writers and locations of the values of a graph."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.values = graph, graph.values
        self._locations: dict[int, Location | None] = {}

    @cached_property
    def storage_users(self) -> dict[int, list[Op]]:
        """Storage -> the ops that read or write it, in order."""
        users: dict[int, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            for storage in {self.values[i].storage for i in (*op.inputs, *op.outputs)}:
                users[storage].append(op)
        return users

    @cached_property
    def users(self) -> dict[int, list[Op]]:
        """Value -> the ops that read it, in this iteration or in the next one, in order."""
        users: dict[int, list[Op]] = defaultdict(list)
        for op in self.graph.ops:
            neighbours = {ref.then.value for ref in op.reads if ref.then is not None}
            for value in {*op.inputs, *neighbours}:
                users[value].append(op)
        return users

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """Storage -> the values in it."""
        members: dict[int, list[int]] = defaultdict(list)
        for index, tensor in enumerate(self.values):
            members[tensor.storage].append(index)
        return members

    @cached_property
    def escaping(self) -> frozenset[int]:
        """Storages that leave the step, or that an op reads of another iteration of a repeat."""
        return self.crossing | {self.values[i].storage for i in self.graph.outputs}

    @cached_property
    def crossing(self) -> frozenset[int]:
        """Storages that an op reads of another iteration of a repeat, or of all of them."""
        reads = [ref for op in self.graph.ops for ref in op.reads]
        read = [ref.id for ref in reads if ref.every]
        neighbours = [*(ref.then for ref in reads), *(tensor.then for tensor in self.values)]
        read += [then.value for then in neighbours if then is not None]
        return frozenset(self.values[i].storage for i in read)

    @cached_property
    def writers(self) -> dict[int, list[Op]]:
        """Storage -> the kernels that write into it after it was made, in order."""
        writers: dict[int, list[Op]] = defaultdict(list)
        for op in self.graph.kernels():
            for value in op.outputs:
                storage = self.values[value].storage
                if storage not in op.outputs:
                    writers[storage].append(op)
        return writers

    def overwritten(self, value: int, first: int, last: int) -> bool:
        """Whether an op between two ops, by their ids, writes into the storage of a value."""
        writers = self.writers.get(self.values[value].storage, ())
        return any(first < op.id < last for op in writers)

    def producer(self, value: int) -> Op | None:
        """The op that made a value; None for an external one."""
        index = self.graph.producers.get(value)
        return None if index is None else self.graph.ops[index]

    def kernel_of(self, value: int) -> Op | None:
        """The kernel that made a value, through views."""
        op = self.producer(value)
        while op is not None and op.kind == "view" and op.inputs:
            op = self.producer(op.inputs[0])
        return op

    def kernels_on(self, value: int) -> Iterator[Op]:
        """The kernels that read a value, through views."""
        for user in self.users[value]:
            if user.kind == "view":
                yield from (k for out in user.outputs for k in self.kernels_on(out))
            else:
                yield user

    def row_readers(self, value: int, turned: bool = False) -> Iterator[tuple[Op, bool, int]]:
        """Ops that read the rows of a value through views, whether as columns, and what they read.

        Views have whole rows.
        """
        width = self.values[value].shape[0 if turned else -1]
        for user in self.users[value]:
            turns, made = user.name == "aten.t", self.values[(user.outputs or (value,))[0]]
            if turns or (user.name in RESHAPES and made.shape[-1:] == (width,) and not turned):
                yield from self.row_readers(user.outputs[0], turned != turns)
            else:
                yield user, turned, value

    def takes_columns(self, op: Op) -> bool:
        """Whether an op takes some neighbouring columns of all rows as a view."""
        shapes = [self.values[v].shape[:-1] for v in (*op.inputs, *op.outputs)]
        alone = op.name == "aten.slice" and shapes[0] == shapes[1]
        return alone and self.location(op.outputs[0]) is not None

    def location(self, value: int) -> Location | None:
        """The location of a value; None behind a view of unknown offset or of another iteration."""
        if value not in self._locations:
            self._locations[value] = self._located(value)
        return self._locations[value]

    def distance(self, values: Sequence[int]) -> int | None:
        """Elements from each of several values to the next in one storage; None if they differ."""
        places = [place for value in values if (place := self.location(value)) is not None]
        steps = {after.offset - before.offset for before, after in pairwise(places)}
        alone = len({place.storage for place in places}) == 1 and len(places) == len(values)
        return steps.pop() if alone and len(steps) == 1 else None

    def previous(self, value: int) -> int | None:
        """The operand of views, a copy or a cast that has the same elements in the same order.

        Views may permute the elements on the way, if the last one restores the order.  None where
        another op made the value.
        """
        op, new = self.producer(value), self.values[value]
        if op is not None and op.name in COPIES and not reads_across(op):
            return op.inputs[0] if self.values[op.inputs[0]].elements == new.elements else None
        while op is not None and op.kind == "view" and len(op.inputs) == 1 and not reads_across(op):
            old = self.values[op.inputs[0]]
            if old.dtype != new.dtype or old.elements != new.elements:
                return None
            if merged_dims(old) == merged_dims(new):
                return op.inputs[0]
            op = self.producer(op.inputs[0])
        return None

    def chain(self, value: int, shape: tuple[int, ...] | None = None) -> Iterator[int]:
        """A value and its `previous` ones, the latest first, as long as they have the shape."""
        step: int | None = value
        while step is not None and (step == value or shape in (None, self.values[step].shape)):
            yield step
            step = self.previous(step)

    def root(self, value: int, shape: tuple[int, ...] | None = None) -> int:
        """The last value of the `chain`."""
        *_, first = self.chain(value, shape)
        return first

    def root_of_shape(self, value: int, shape: tuple[int, ...]) -> int | None:
        """The last value of the `chain` that has this shape."""
        alike = [v for v in self.chain(value) if self.values[v].shape == shape]
        return alike[-1] if alike else None

    def _located(self, value: int) -> Location | None:
        tensor = self.values[value]
        if tensor.then is not None:
            return None
        if tensor.storage == value:
            return Location(value, 0, tensor.shape, tensor.stride)
        op = self.producer(value)
        if op is None or not op.inputs or reads_across(op):
            return None
        source = self.location(op.inputs[0])
        alike = self.values[op.inputs[0]].dtype == tensor.dtype
        if source is None or source.storage != tensor.storage or not alike:
            return None
        start = self._start(op, source, op.outputs.index(value))
        if start is None:
            return None
        return Location(tensor.storage, source.offset + start, tensor.shape, tensor.stride)

    def _start(self, op: Op, source: Location, position: int) -> int | None:
        """The offset of an output of a view op in its operand; None for an unknown op."""
        if op.name in VIEWS or (op.name.endswith("_") and op.kind == "kernel"):
            return 0
        dim = op.arguments.get("dim", 0)
        if not isinstance(dim, int) or not source.shape:
            return None
        if op.name == "aten.unbind":
            return position * source.stride[dim]
        if op.name in ("aten.split", "aten.split_with_sizes", "aten.chunk"):
            before = sum(self.values[i].shape[dim] for i in op.outputs[:position])
            return before * source.stride[dim]
        if op.name not in ("aten.select", "aten.slice", "aten.narrow"):
            return None
        index = op.arguments.get("index" if op.name == "aten.select" else "start")
        start = clipped(index, source.shape[dim])
        return None if start is None else start * source.stride[dim]


def clipped(index: object, size: int) -> int | None:
    """An index of a dimension counted from its start; None stands for 0.  None for no number."""
    if index is None:
        return 0
    if not isinstance(index, int):
        return None
    return min(max(index + size if index < 0 else index, 0), size)


def reads_across(op: Op, but: Collection[Ref] = ()) -> bool:
    """Whether an op reads a value of another iteration of a repeat; but: reads to leave out."""
    return any(r.every or (r.then is not None and r not in but) for r in op.reads)


def same_strides(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether strides are equal but for dimensions of one element."""
    return all(n == 1 or s == t for n, s, t in zip(shape, a, b, strict=True))


def merged_dims(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Sizes and strides with contiguous neighbours merged: the order of elements."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)


def dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps; order: the dimensions, the outermost first."""
    steps = dict(zip(order, Tensor.contiguous([shape[d] for d in order]), strict=True))
    return tuple(steps[d] for d in range(len(shape)))


def last_strides(image: Tensor) -> tuple[int, ...] | None:
    """The strides of a contiguous image or weight with channels last; None for other tensors."""
    rank = len(image.shape)
    is_image = rank in IMAGES and image.stride == Tensor.contiguous(image.shape)
    return dense(image.shape, (0, *range(2, rank), 1)) if is_image else None


def dense_like(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps in the order of others."""
    return dense(shape, sorted(range(len(shape)), key=lambda dim: -stride[dim]))


def relaid(view: Tensor, old: Tensor, stride: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a view of a tensor that has other strides now; None where it needs a copy.

    old: the tensor in which the view has its strides.  A stride of m steps of a dimension has m of
    its new steps; where the view goes on into the next dimension, that must follow on this one.
    """
    dims = sorted(
        (step, size, new) for step, size, new in zip(old.stride, old.shape, stride, strict=True)
        if size > 1 and step
    )  # fmt: skip
    strides = []
    for size, step in zip(view.shape, view.stride, strict=True):
        place = max((i for i, dim in enumerate(dims) if dim[0] <= step), default=None)
        if size < 2 or step == 0 or place is None:
            strides.append(step)
            continue
        unit, count, new = dims[place]
        if step % unit:
            return None
        steps = step // unit
        while (size - 1) * steps >= count:
            place += 1
            if place == len(dims) or count % steps or dims[place][2] != new * count:
                return None
            count *= dims[place][1]
        strides.append(steps * new)
    return tuple(strides)


# -- forward and backward --------------------------------------------------------------------------


class BothWays(NamedTuple):
    """Ops that one kernel replaces, and those of its backward, if the step has one.

    operands: what forward reads; grads: their gradients, in this order, -1 for none.  grad_out:
    that of `out`.
    added: gradients of the first operand that come from elsewhere, and that backward adds up.
    """

    forward: tuple[Op, ...]
    operands: tuple[Ref, ...]
    out: int
    is_causal: bool = False
    backward: tuple[Op, ...] = ()
    grad_out: Ref | None = None
    grads: tuple[int, ...] = ()
    mask: Ref | None = None
    added: tuple[int, ...] = ()


def place_of(op: Op) -> tuple[object, ...]:
    """The line of an op, its module, the call of that, and the repeats: backward has the same."""
    return op.source, op.module, op.call, op.repeats


def run_of(graph: OpGraph, op: Op, alike: Callable[[Op], bool]) -> tuple[Op, ...]:
    """The ops in a row around one that are of its part and alike."""
    first = last = op.id
    while first and graph.ops[first - 1].part == op.part and alike(graph.ops[first - 1]):
        first -= 1
    for after in graph.ops[op.id + 1 :]:
        if after.part != op.part or not alike(after):
            break
        last = after.id
    return graph.ops[first : last + 1]


def with_backward(
    flow: ValueFlow, match: BothWays, places: Collection[object], inner: Collection[int]
) -> BothWays | None:
    """Ops of forward with those of their backward; None where these are not all known.

    places: of forward.  inner: values that backward may read, made by forward or read by it.
    """
    ops = flow.graph.ops
    later = tuple(op for op in ops if op.part == "backward" and place_of(op) in places)
    readers = [op for op in later if not {*inner}.isdisjoint(op.inputs)]
    if not readers:
        return match if not later else None
    near = run_of(flow.graph, readers[0], lambda op: place_of(op) in places)
    return _backward(flow, match, later, {*inner}) or _backward(flow, match, near, {*inner})


_SUMS = ("aten.add", "aten.add_")


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def _backward(
    flow: ValueFlow, match: BothWays, later: Sequence[Op], inner: set[int]
) -> BothWays | None:
    values, out = flow.values, flow.values[match.out]
    made, backward, whole = set[int](), list[Op](), set[int]()
    for op in later:  # from the gradient in the shape of the result on
        reads = {value for value in op.inputs if value not in inner}
        grads_in = {v for v in reads - made if _is_alike(values[v], out)}
        is_first = bool(grads_in) and not whole
        if made & reads or not inner.isdisjoint(op.inputs) or is_first or grads_in & whole:
            backward.append(op)
            made.update(op.outputs)
            whole |= grads_in
    while backward and backward[-1].name in _SUMS and {*backward[-1].inputs} - made - inner:
        made.difference_update(backward.pop().outputs)  # gradients from elsewhere come last
    outside = [v for op in backward for v in op.inputs if v not in made and v not in inner]
    late = [v for v in outside if (by := flow.producer(v)) is None or by.part == "backward"]
    grad_out, *added = dict.fromkeys(late) or [-1]
    used = {v for v in made for op in flow.users.get(v, ()) if op not in backward}
    used |= made & set(flow.graph.outputs)
    grads = sorted(used)
    sizes = [values[ref.id].elements for ref in match.operands]
    sums = {v for op in backward if op.name in _SUMS for v in op.inputs}
    if not sums.issuperset(added) or any(values[v].elements != sizes[0] for v in added):
        return None
    in_order = []
    for size in sizes:
        in_order.append(next((v for v in grads if values[v].elements == size), -1))
        grads = [v for v in grads if v != in_order[-1]]
    if grad_out < 0 or grads or max(in_order) < 0:
        return None
    return match._replace(
        backward=tuple(backward),
        grad_out=Ref(grad_out),
        grads=tuple(in_order),
        added=tuple(added),
    )
