"""Index expressions of operands, through views, casts, broadcasts, products and sums.

A dimension of a value is read at `Dim`: a number in mixed radix, whose digits (`Atom`) belong to
axes that a finder names.  A value becomes a sum of products of factors, each with the dims at
which it is read, so that `einsum`, `bmm`, `mul` and `sum` in any order are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rooftrace.costmodels.rewrites.dataflow import COPIES, ValueFlow, clipped, reads_across
from rooftrace.graph import Op, OpGraph

Axis = Hashable


class Atom(NamedTuple):
    """(index of `axis` // step) % size."""

    axis: Axis
    step: int
    size: int


class Dim(NamedTuple):
    """A dimension is read at `start` plus the number whose digits are `atoms`."""

    atoms: tuple[Atom, ...]
    start: int = 0


Names = dict[Axis, list[tuple[Atom, Atom]]]
"""By axis, its digits, each with the digit that replaces it."""


class ReadValue(NamedTuple):
    """A value, read at these dims."""

    value: int
    dims: tuple[Dim, ...]

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes of its dims."""
        return frozenset(atom.axis for dim in self.dims for atom in dim.atoms)


@dataclass(frozen=True, slots=True)
class TurnAxis:
    """The axis of the iterations of a repeat."""

    repeat: int


@dataclass(frozen=True, slots=True)
class SumAxis:
    """An axis that a product or a sum adds over."""

    op: int
    dim: int


_SAME = frozenset({
    *COPIES, "aten.detach", "aten.alias", "aten.lift_fresh", "aten.expand_as", "aten.view_as",
})  # fmt: skip
_RESHAPES = frozenset({
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.flatten", "aten.unflatten",
    "aten.squeeze", "aten.unsqueeze", "aten.view_as",
})  # fmt: skip


def full(axis: Axis, size: int) -> Dim:
    """All of an axis; no digit for an axis of one element."""
    return Dim((Atom(axis, 1, size),)) if size > 1 else Dim(())


class Walker(ValueFlow):
    """Walks back from values of a graph and collects the ops on the way in `passed`, by id."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.passed: set[int] = set()
        self._edges: set[int] = set()
        """Values that an op outside of a repeat reads of its last iteration."""
        self._written = set(self.writers)

    def settled(self, storages: set[int]) -> None:
        """From here on, values of these storages are read as they are after the last write."""
        self._written -= storages

    def unsettled(self, storages: set[int]) -> None:
        """Take `settled` back."""
        self._written |= storages

    def fresh(self, value: int) -> ReadValue:
        """A value at new axes, one for each dimension."""
        sizes = enumerate(self.values[value].shape)
        return ReadValue(value, tuple(full((value, d), size) for d, size in sizes))

    def direct(self, value: int) -> ReadValue:
        """A value read at axes 0, 1, ..., one for each dimension."""
        sizes = enumerate(self.values[value].shape)
        return ReadValue(value, tuple(full(d, size) for d, size in sizes))

    def maker(self, value: int) -> Op | None:
        """The forward op that made a value of values of its iteration alone."""
        op = None if value in self._edges else self.producer(value)
        return None if op is None or op.part != "forward" or reads_across(op) else op

    def only_reader(self, value: int) -> Op | None:
        """The only op that reads a value, if it has one result and the step does not return the
        value."""
        readers = self.users[value]
        alone = len(readers) == 1 and value not in self.graph.outputs
        return readers[0] if alone and len(readers[0].outputs) == 1 else None

    def _pass(self, op: Op) -> None:
        """Add an op to `passed`; the walk ends at operands of another iteration."""
        self.passed.add(op.id)
        for value in op.inputs:
            made = self.producer(value)
            if made is not None and made.repeats != op.repeats[: len(made.repeats)]:
                self._edges.add(value)

    def source(self, factor: ReadValue, at: int | None = None) -> ReadValue:
        """The first value behind views, copies, casts and paddings, back to `at` at most."""
        while True:
            before = self._before(factor) if factor.value != at else None
            if before is None:
                return factor
            factor = before

    def parts(self, factor: ReadValue, at: int | None = None) -> tuple[ReadValue, ...]:
        """The factors of a product, or of a sum of products, back to `at` at most; the factor
        itself where it is none."""
        factor = self.source(factor, at)
        op = self.maker(factor.value)
        if op is None or self.changes(factor.value):
            return (factor,)
        made: tuple[ReadValue, ...] | None = None
        if op.name in ("aten.mul", "aten.mul_") and len(op.inputs) == 2:
            made = tuple(self.aligned(i, factor.dims) for i in op.inputs)
        elif op.name in ("aten.bmm", "aten.mm", "aten.mv"):
            made = self._product(op, factor.dims)
        elif op.name == "aten.sum":
            made = self._total(op, factor.dims)
        if made is None:
            return (factor,)
        self._pass(op)
        return tuple(self.source(part, at) for part in made)

    def under(self, factor: ReadValue, *names: str, **arguments: object) -> list[ReadValue]:
        """The operands of the last of these pointwise ops, each on the first operand of the one
        before; empty without such a chain.  arguments: required where an op has them.
        """
        read = [factor]
        for name in names:
            factor = self.source(read[0])
            op = self.maker(factor.value)
            if op is None or op.name != f"aten.{name}":
                return []
            if any(op.arguments.get(key, x) != x for key, x in {"alpha": 1, **arguments}.items()):
                return []
            self.passed.add(op.id)
            read = [self.source(self.aligned(i, factor.dims)) for i in op.inputs]
        return read

    def holding(self, factor: ReadValue, value: int) -> list[ReadValue] | None:
        """The factors among which a value is, expanded no further; None where it is in none."""
        factor = self.source(factor, value)
        if factor.value == value:
            return [factor]
        parts = self.parts(factor, value)
        if len(parts) == 1 and parts[0] == factor:
            return None
        inside = [self.holding(part, value) for part in parts]
        if all(pieces is None for pieces in inside):
            return None
        return [
            piece
            for part, pieces in zip(parts, inside, strict=True)
            for piece in ([part] if pieces is None else pieces)
        ]

    def expanded(self, factor: ReadValue, stop: Callable[[ReadValue], bool]) -> list[ReadValue]:
        """The factors of a value, each expanded until `stop` holds or it is no product."""
        factor = self.source(factor)
        parts = (factor,) if stop(factor) else self.parts(factor)
        if parts == (factor,):
            return [factor]
        return [piece for part in parts for piece in self.expanded(part, stop)]

    def at_index(self, view: int, source: ReadValue, dim: int, index: int) -> ReadValue | None:
        """A view with the axes of its source, if it is the source at one index of a dimension."""
        part = (*source.dims[:dim], Dim((), index), *source.dims[dim + 1 :])
        names, others = self.seen(self.fresh(view), ReadValue(source.value, part))
        return None if others else renamed(self.fresh(view), names)

    def seen(self, factor: ReadValue, anchor: ReadValue) -> tuple[Names | None, list[ReadValue]]:
        """Names by which a factor reads the value of `anchor` at its dims, and the other factors.

        None in place of names where it does not read the value exactly once.
        """
        pieces = self.holding(factor, anchor.value) or []
        same = [piece for piece in pieces if piece.value == anchor.value]
        names = named(same[0], anchor.dims) if len(same) == 1 else None
        return names, [piece for piece in pieces if piece.value != anchor.value]

    def aligned(self, value: int, dims: Sequence[Dim]) -> ReadValue:
        """An operand that broadcasts to these dims."""
        shape = self.values[value].shape
        dims = dims[len(dims) - len(shape) :]
        return ReadValue(
            value, tuple(Dim(()) if n == 1 else d for n, d in zip(shape, dims, strict=True))
        )

    def changes(self, value: int) -> bool:
        """Whether an op writes into the storage of a value after it was made."""
        return self.values[value].storage in self._written

    def _before(self, factor: ReadValue) -> ReadValue | None:
        value, dims = factor
        op = self.maker(value)
        if op is None or not op.inputs or self.changes(value):
            return None
        shape = self.values[op.inputs[0]].shape
        moved = self._moved(op, value, dims, shape)
        if moved is None:
            return None
        self._pass(op)
        return ReadValue(op.inputs[0], moved)

    def _moved(
        self, op: Op, value: int, dims: tuple[Dim, ...], shape: tuple[int, ...]
    ) -> tuple[Dim, ...] | None:
        """The dims at which a view, a copy or a padding reads its operand."""
        name, arguments = op.name, op.arguments
        if name in _SAME and len(shape) == len(dims):
            return tuple(Dim(()) if n == 1 else d for n, d in zip(shape, dims, strict=True))
        if name in _RESHAPES:
            return _regrouped(dims, self.values[value].shape, shape)
        if name == "aten.expand":
            return self.aligned(op.inputs[0], dims).dims
        if name in ("aten.permute", "aten.transpose", "aten.t"):
            order = order_of(op, len(shape))
            return tuple(dims[order.index(d)] for d in range(len(shape)))
        dim = arguments.get("dim", 0)
        if name == "aten.select" and isinstance(dim, int):
            return self._selected(op, dims, dim % len(shape), shape)
        if name == "aten.slice" and isinstance(dim, int) and not op.steps:
            start = clipped(arguments.get("start"), shape[dim])
            if arguments.get("step", 1) != 1 or start is None:
                return None
            dim %= len(shape)
            old = dims[dim]
            return (*dims[:dim], Dim(old.atoms, old.start + start), *dims[dim + 1 :])
        if name == "aten.constant_pad_nd" and not arguments.get("value", 0):
            # Zeros behind a dimension are read where an axis is longer; none may stand before it.
            return None if any(arguments["pad"][::2]) else dims
        return None

    def _selected(
        self, op: Op, dims: tuple[Dim, ...], dim: int, shape: tuple[int, ...]
    ) -> tuple[Dim, ...] | None:
        index = op.arguments.get("index")
        if not isinstance(index, int):
            return None
        start = index % shape[dim] if shape[dim] else 0
        atoms: tuple[Atom, ...] = ()
        if op.steps:
            if op.steps != {"index": 1}:
                return None
            repeat = op.repeats[-1]
            atoms = (Atom(TurnAxis(repeat), 1, self.graph.repeats[repeat].count),)
        return (*dims[:dim], Dim(atoms, start), *dims[dim:])

    def _product(self, op: Op, dims: tuple[Dim, ...]) -> tuple[ReadValue, ...] | None:
        left, right = op.inputs
        shape = self.values[left].shape
        inner = full(SumAxis(op.id, 0), shape[-1])
        if op.name == "aten.mv":
            return ReadValue(left, (*dims, inner)), ReadValue(right, (inner,))
        *outer, row, column = dims
        return ReadValue(left, (*outer, row, inner)), ReadValue(right, (*outer, inner, column))

    def _total(self, op: Op, dims: tuple[Dim, ...]) -> tuple[ReadValue, ...] | None:
        shape = self.values[op.inputs[0]].shape
        over = op.arguments.get("dim")
        if not isinstance(over, tuple) or not over:
            return None
        over = {d % len(shape) for d in over}
        left = iter(
            d for i, d in enumerate(dims) if i not in over or not op.arguments.get("keepdim")
        )
        read = tuple(
            full(SumAxis(op.id, d), n) if d in over else next(left) for d, n in enumerate(shape)
        )
        return (ReadValue(op.inputs[0], read),)


def order_of(op: Op, rank: int) -> list[int]:
    """By dimension of a permuted view: the dimension of its operand."""
    order = list(range(rank))
    if op.name == "aten.permute":
        return [d % rank for d in op.arguments["dims"]]
    a, b = (0, rank - 1) if op.name == "aten.t" else (op.arguments["dim0"], op.arguments["dim1"])
    order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return order


def _regrouped(
    dims: Sequence[Dim], seen: Sequence[int], shape: Sequence[int]
) -> tuple[Dim, ...] | None:
    """The dims of a value of `shape` whose reshape to `seen` is read at `dims`."""
    made: list[Dim] = []
    pending = [(n, d) for n, d in zip(seen, dims, strict=True) if n != 1]
    for size in shape:
        if size == 1:
            made.append(Dim(()))
            continue
        have, atoms, start = 1, list[Atom](), 0
        while have < size:
            if not pending:
                return None
            n, dim = pending.pop(0)
            if have * n > size:
                if have * n % size or dim.start:
                    return None
                inner = have * n // size
                halves = _halves(dim.atoms, inner)
                if halves is None:
                    return None
                pending.insert(0, (inner, Dim(halves[1])))
                n, dim = n // inner, Dim(halves[0])
            if (dim.start or start) and (atoms or have > 1):
                return None  # no digit may carry over
            have, start = have * n, dim.start
            atoms += dim.atoms
        made.append(Dim(joined(atoms), start))
    return tuple(made)


def _halves(
    atoms: tuple[Atom, ...], inner: int
) -> tuple[tuple[Atom, ...], tuple[Atom, ...]] | None:
    """The digits of a number over `inner`, and of its remainder."""
    lower: list[Atom] = []
    upper = list(atoms)
    while inner > 1 and upper:
        atom = upper.pop()
        if atom.size <= inner:
            if inner % atom.size:
                return None
            lower.insert(0, atom)
            inner //= atom.size
        else:
            if atom.size % inner:
                return None
            lower.insert(0, Atom(atom.axis, atom.step, inner))
            upper.append(Atom(atom.axis, atom.step * inner, atom.size // inner))
            inner = 1
    return tuple(upper), tuple(lower)


def joined(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Adjacent digits of one axis merged."""
    made: list[Atom] = []
    for atom in atoms:
        last = made[-1] if made else None
        if last and last.axis == atom.axis and last.step == atom.step * atom.size:
            made[-1] = Atom(atom.axis, atom.step, last.size * atom.size)
        elif atom.size > 1:
            made.append(atom)
    return tuple(made)


def named(factor: ReadValue, dims: Sequence[Dim]) -> Names | None:
    """Names for the axes of a factor by which it is read at `dims`; None where they cannot fit."""
    names: Names = {}
    for dim, other in zip(factor.dims, dims, strict=True):
        if dim.start != other.start:
            return None
        mine, theirs = list(dim.atoms), list(other.atoms)
        while mine and theirs:
            a, b = mine.pop(), theirs.pop()
            size = min(a.size, b.size)
            if not mine and not theirs and a.size < b.size:  # the first ones of an axis
                b = Atom(b.axis, b.step, size)
            if a.size % size or b.size % size:
                return None
            if (a.axis, a.step) != (b.axis, b.step):
                names.setdefault(a.axis, []).append(
                    (Atom(a.axis, a.step, size), Atom(b.axis, b.step, size))
                )
            if a.size > size:
                mine.append(Atom(a.axis, a.step * size, a.size // size))
            if b.size > size:
                theirs.append(Atom(b.axis, b.step * size, b.size // size))
        if mine or theirs:
            return None
    return names


def renamed(factor: ReadValue, names: Names | None) -> ReadValue | None:
    """A factor with its axes renamed; an axis without a new name keeps its old one.

    None where a digit does not fit its names, or without `names`.
    """
    if names is None:
        return None
    made: list[Dim] = []
    for dim in factor.dims:
        atoms: list[Atom] = []
        for atom in dim.atoms:
            if atom.axis not in names:
                atoms.append(atom)
                continue
            low, high, size = atom.step, atom.step * atom.size, 1
            for mine, other in sorted(names[atom.axis], key=lambda pair: -pair[0].step):
                lower, upper = max(low, mine.step), min(high, mine.step * mine.size)
                if upper > lower:
                    if lower % mine.step or upper % lower:
                        return None
                    size *= upper // lower
                    atoms.append(
                        Atom(other.axis, other.step * (lower // mine.step), upper // lower)
                    )
            if size != atom.size:
                return None
        made.append(Dim(joined(atoms), dim.start))
    return ReadValue(factor.value, tuple(made))


def all_renamed(factors: Mapping[str, ReadValue], names: Names) -> dict[str, ReadValue] | None:
    """Factors by name, each renamed; None where one does not fit."""
    made = {name: renamed(factor, names) for name, factor in factors.items()}
    fitting = {name: factor for name, factor in made.items() if factor is not None}
    return fitting if len(fitting) == len(factors) else None


def called(sizes: Mapping[Axis, tuple[Axis, int]]) -> Names:
    """Names for entire axes.  sizes: the new name and the length, by axis."""
    return {old: [(Atom(old, 1, n), Atom(new, 1, n))] for old, (new, n) in sizes.items()}
