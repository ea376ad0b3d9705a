"""ValueFlow of a graph: producers and users of values, and their locations in storages.

A `Tensor` has shape and strides; the offset of a view follows from the ops that made it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from rooftrace._amounts import np
from rooftrace.graph import Op, OpGraph, Ref, Tensor

VIEWS = frozenset({
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.transpose", "aten.permute", "aten.t",
    "aten.unsqueeze", "aten.squeeze", "aten.expand", "aten.detach", "aten.alias", "aten.lift_fresh",
    "aten.unflatten", "aten.flatten", "aten.view_as", "aten.expand_as",
})  # fmt: skip
"""Views of all elements."""
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


def reads_across(op: Op) -> bool:
    """Whether an op reads a value of another iteration of a repeat."""
    return any(r.then is not None or r.every for r in op.reads)


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


# -- steps of optimizers ---------------------------------------------------------------------------


@dataclass(eq=False)
class TensorState:
    """Numbers of a tensor at one moment of the optimizer: some random elements of it.

    ref: as it was first read.  op: by which it was made, None before.  known: whether the numbers
    are worked out from those of `parents`, element by element.
    """

    numbers: Any
    ref: Ref | None = None
    op: int | None = None
    known: bool = True
    parents: tuple[TensorState, ...] = ()

    def ancestors(self, until: Collection[TensorState] = ()) -> dict[TensorState, None]:
        """The states that this one is made of, and itself, but for some and what these are of."""
        reached, stack = dict[TensorState, None](), [self]
        while stack:
            state = stack.pop()
            if state not in reached and state not in until:
                reached[state] = None
                stack += state.parents
        return reached


_OTHER = ("other", "scalars", "scalar", "exponent", "tensors1", "end", "src")
_SCALE = ("value", "scalars")
_FORMULAS: Mapping[str, Callable[[Callable[..., Any]], Any]] = {
    "add": lambda of: of("self") + of(*_OTHER) * of("alpha"),
    "sub": lambda of: of("self") - of(*_OTHER) * of("alpha"),
    "mul": lambda of: of("self") * of(*_OTHER),
    "div": lambda of: of("self") / of(*_OTHER),
    "lerp": lambda of: of("self") + of("weight") * (of(*_OTHER) - of("self")),
    "addcmul": lambda of: of("self") + of(*_SCALE) * of("tensor1") * of("tensor2"),
    "addcdiv": lambda of: of("self") + of(*_SCALE) * of("tensor1") / of("tensor2"),
    "pow": lambda of: of("self") ** of(*_OTHER),
    "sqrt": lambda of: of("self") ** 0.5,
    "rsqrt": lambda of: of("self") ** -0.5,
    "reciprocal": lambda of: 1 / of("self"),
    "neg": lambda of: -of("self"),
    **dict.fromkeys(("clone", "_to_copy"), lambda of: of("self")),
    "copy": lambda of: of(*_OTHER),
}
"""Ops on a tensor, or on lists of tensors, on numbers; `of` gives the first argument there is."""
_SAMPLES = 16
"""Numbers that stand for a tensor: more than a step of an optimizer has unknown factors."""
_STATES = 5
"""Tensors that a step writes beside its weights from which on it is not looked at: moments, the
largest of them, a gradient that is clipped."""


class Updates:
    """First and last states of the tensors that an optimizer writes into, and its steps on them."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.random = graph, np.random.default_rng(0)
        self.first, self.last = dict[int, TensorState](), dict[int, TensorState]()
        for op in graph.ops:
            if op.part == "optimizer" and op.kind == "kernel":
                self._run(op)

    def _run(self, op: Op) -> None:
        name = op.name.removeprefix("aten.").removeprefix("_foreach_").rstrip("_")
        made = [self._made(op, name, place) for place in range(len(op.outputs))]
        self.last |= zip((self.graph.values[v].storage for v in op.outputs), made, strict=True)

    def _made(self, op: Op, name: str, place: int) -> TensorState:
        """The state of a result; new numbers where it is not worked out element by element."""
        values, parents = self.graph.values, list[TensorState]()
        elements = values[op.outputs[place]].elements

        def of(*names: str) -> Any:
            items = (op.arguments.get(name) for name in names)
            item = next((item for item in items if item is not None), 1)
            item = item[place] if isinstance(item, tuple) else item
            if not isinstance(item, Ref):
                return item
            if values[item.id].elements not in (1, elements):
                raise TypeError
            parents.append(self._read(item))
            return parents[-1].numbers

        try:
            with np.errstate(all="ignore"):
                numbers = _FORMULAS[name](of) + 0.0
            return TensorState(numbers, op=op.id, parents=tuple(parents))
        except (KeyError, TypeError, IndexError):
            return TensorState(self._new(elements), op=op.id, known=False)

    def _read(self, ref: Ref) -> TensorState:
        tensor = self.graph.values[ref.id]
        whole = tensor.elements == self.graph.values[tensor.storage].elements
        if tensor.storage not in self.last or not whole:
            state = TensorState(self._new(tensor.elements), ref, known=whole)
            self.first[tensor.storage] = self.last[tensor.storage] = state
        state = self.last[tensor.storage]
        state.ref = state.ref or ref
        return state

    def _new(self, elements: int) -> Any:
        return self.random.uniform(0.5, 1.5, _SAMPLES if elements > 1 else 1)

    def rows(self) -> Iterator[UpdateRow]:
        """Steps of Adam, or of SGD with momentum, on one tensor each."""
        ends = {self.last[s]: s for s, first in self.first.items() if self.last[s] is not first}
        for end, storage in ends.items():
            shape = self.graph.values[storage].shape
            states = [ends[s] for s in end.ancestors() if s in ends and s is not end]
            states = [s for s in states if self.graph.values[s].shape == shape]
            orders = (order for count in (2, 1) for order in permutations(states, count))
            rows = (self._row([storage, *order]) for order in orders if len(states) < _STATES)
            if row := next(filter(None, rows), None):
                yield row

    def _row(self, storages: Sequence[int]) -> UpdateRow | None:
        """The step that writes a tensor and its moments, in this order; None for others."""
        firsts, ends = ([side[s] for s in storages] for side in (self.first, self.last))
        kind = {2: _as_sgd, 3: _as_adam}[len(storages)]
        for grad in reversed([*ends[1].ancestors()]):
            options = kind(firsts, ends, grad) if grad not in {*firsts, *ends} else None
            if options is None:
                continue
            if (before := _before_decay(grad, firsts[0])) is not None:
                grad, options = before, {**options, "weight_decay": 1}
            made = {state: None for end in ends for state in end.ancestors({grad})}
            refs = tuple(state.ref for state in (firsts[0], grad, *firsts[1:]) if state.ref)
            others = {s for s in self._made_of[grad] - {*storages} if self.last[s] is not grad}
            alone = all(state.known for state in made) and not others
            dtypes = {self.graph.values[ref.id].dtype for ref in refs}  # fused kernels take one
            if alone and len(refs) == 1 + len(storages) and len(dtypes) == 1:
                ops = frozenset(s.op for s in made if s.op is not None)
                return UpdateRow(refs, ops, options)
        return None

    @cached_property
    def _made_of(self) -> dict[TensorState, set[int]]:
        """By state, the tensors whose last state is made of it."""
        made = defaultdict[TensorState, set[int]](set)
        for storage, end in self.last.items():
            for state in end.ancestors() if storage in self.first else ():
                made[state].add(storage)
        return made


class UpdateRow(NamedTuple):
    """Weight, gradient and moments of one tensor, the ops of its step, and arguments for its rule.

    Of a decay these say only whether there is one.
    """

    refs: tuple[Ref, ...]
    ops: frozenset[int]
    options: Mapping[str, float]


def _before_decay(grad: TensorState, weight: TensorState) -> TensorState | None:
    """The gradient that a share of the weights was added to; None where none was."""
    made = grad.ancestors()
    for state in made if weight in made else ():
        if weight not in state.ancestors():
            factors = _factors(grad.numbers, state.numbers, weight.numbers)
            if factors is not None and abs(factors[0] - 1) < _ALIKE:
                return state
    return None


_Options = Mapping[str, float] | None


def _as_adam(
    first: Sequence[TensorState], last: Sequence[TensorState], grad: TensorState
) -> _Options:
    """The options of a step of Adam; None where it is no such step.

    m1 = b1 m0 + (1 - b1) g,  v1 = b2 v0 + (1 - b2) g^2,  w1 = d w0 - m1 / (p sqrt(v1) + q), where
    the last is linear in products of w0, w0 - w1 and sqrt(v1).
    """
    w0, m0, v0 = (state.numbers for state in first)
    w1, m1, v1 = (state.numbers for state in last)
    moments = _factors(m1, m0, grad.numbers), _factors(v1, v0, grad.numbers**2)
    if not all(each is not None and abs(sum(each) - 1) < _ALIKE for each in moments):
        return None
    root, moved = v1**0.5, w0 - w1
    factors = _factors(m1, moved * root, moved, w0 * root, w0)
    if factors is None or abs(factors[0]) < abs(factors[1]):
        return None
    return {"weight_decay": int(abs(factors[2]) > _ALIKE * abs(factors[0]))}


def _as_sgd(
    first: Sequence[TensorState], last: Sequence[TensorState], grad: TensorState
) -> _Options:
    """The options of a step of SGD with momentum, Nesterov's too; None where it is no such step.

    b1 = m b0 + c g,  w1 = w0 - r b1,  or  w1 = w0 - r (g + m b1).
    """
    (w0, b0), (w1, b1) = ([state.numbers for state in side] for side in (first, last))
    momentum = _factors(b1, b0, grad.numbers)
    step = _factors(w0 - w1, b1, grad.numbers)
    if momentum is None or step is None or abs(momentum[1]) < _ALIKE:
        return None
    ahead = abs(step[0] - momentum[0] * step[1]) < _ALIKE * abs(step[0])
    if not ahead and abs(step[1]) > _ALIKE * abs(step[0]):
        return None
    return {"momentum": float(momentum[0]), "nesterov": int(ahead), "weight_decay": 0}


_ALIKE = 1e-6
"""The part by which numbers that are equal by a formula may differ."""


def _factors(result: Any, *columns: Any) -> Sequence[float] | None:
    """The factors by which a result is a sum of columns; None where it is none."""
    matrix = np.stack([np.broadcast_to(column, _SAMPLES) for column in columns], axis=1)
    lengths = np.linalg.norm(matrix, axis=0)
    if not np.isfinite(matrix).all() or not lengths.all():
        return None
    factors = np.linalg.lstsq(matrix / lengths, np.broadcast_to(result, _SAMPLES), rcond=None)[0]
    left = np.abs(matrix / lengths @ factors - result).max()
    alike: bool = left <= _ALIKE * np.abs(result).max()
    return [*(factors / lengths)] if alike else None


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
    outside = [v for op in backward for v in op.inputs if v not in made and v not in inner]
    late = [v for v in outside if (by := flow.producer(v)) is None or by.part == "backward"]
    grad_out, *added = dict.fromkeys(late) or [-1]
    used = {v for v in made for op in flow.users.get(v, ()) if op not in backward}
    used |= made & set(flow.graph.outputs)
    grads = sorted(used)
    sizes = [values[ref.id].elements for ref in match.operands]
    sums = {v for op in backward if op.name in ("aten.add", "aten.add_") for v in op.inputs}
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
