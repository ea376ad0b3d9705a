"""Patterns of ops: by which op a value was made, and of what, through views, copies and casts.

`Pat("mul", Pat("silu", "x"), "y")` is a product, in either order, of the SiLU of one value and
of another one; its match binds `x` and `y` to values.  Then regions: ops that one kernel replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import permutations
from typing import Any, NamedTuple

from rooftrace.costmodels.rewrites.dataflow import ValueFlow, reads_across
from rooftrace.graph import Argument, Op, Ref

Pattern = Any
"""A Pat; a name, which binds a value, the same wherever it stands; Number, NonTensor or Along; a
tuple of alternatives; a list of patterns, for a list; or the constant that an argument has to be.
"""
Bindings = Mapping[str, Any]
"""Values by their ids, numbers, and ops, by the names in a pattern."""
_COMMUTE = frozenset({"mul", "add"})
_IGNORED = frozenset({
    "dtype", "layout", "device", "pin_memory", "memory_format", "half_to_float", "non_blocking",
    "size", "sorted", "stable", "implicit",
})  # fmt: skip
"""Arguments that change neither the numbers of a result nor their operands."""
_DEFAULTS = {
    "largest": True, "keepdim": False, "alpha": 1, "accumulate": False, "descending": False,
    "beta": 1, "threshold": 20,
}  # fmt: skip
"""Defaults that callers pass explicitly."""


class Number(NamedTuple):
    """Binds a number, or a tensor of one element that was filled with it."""

    name: str


class NonTensor(NamedTuple):
    """Binds an argument that is no tensor; None where the op has none."""

    name: str


class Along(NamedTuple):
    """The only dimension along which an op works, counted from the last one."""

    dim: int
    default: int | None = None  # where the op does not say


LAST = Along(-1)
LAST_OF_TOPK = Along(-1, default=-1)


class Pat:
    """An op of one of these names, without "aten." and with or without the "_" of ops in place.

    operands: patterns of its first arguments, of products and sums in any order.  arguments: those
    of others by name.  An argument without a pattern has to be left at its default, unless the
    pattern has no operands.  out: which of its results the value is.  bind: a name for the op.
    """

    __slots__ = ("arguments", "bind", "names", "operands", "out")

    def __init__(
        self, names: str, *operands: Pattern, out: int = 0, bind: str = "", **arguments: Pattern
    ) -> None:
        self.names = frozenset(names.split())
        self.operands, self.arguments = operands, arguments
        self.out, self.bind = out, bind


def match(
    flow: ValueFlow,
    value: int,
    pattern: Pattern,
    bound: Bindings | None = None,
    shape: tuple[int, ...] | None = None,
    accept: Callable[[str, int], bool] = lambda name, value: True,
) -> Bindings | None:
    """The bindings of a pattern that made a value; None where something else did.

    bound: bindings that have to hold.  shape: views are passed as far as values have it.  accept:
    whether a name may bind a value.
    """
    return _Matching(flow, shape, accept).value(value, pattern, bound or {})


class _Matching:
    def __init__(
        self, flow: ValueFlow, shape: tuple[int, ...] | None, accept: Callable[[str, int], bool]
    ) -> None:
        self.flow, self.shape, self.accept = flow, shape, accept

    def value(self, value: int, pattern: Pattern, bound: Bindings) -> Bindings | None:
        """Match a value."""
        if type(pattern) is tuple:
            tries = (self.value(value, each, bound) for each in pattern)
            return next((made for made in tries if made is not None), None)
        if isinstance(pattern, str):
            same = self.flow.root(bound.get(pattern, value)) == self.flow.root(value)
            return {pattern: value, **bound} if same and self.accept(pattern, value) else None
        if not isinstance(pattern, Pat):
            return None
        for step in self.flow.chain(value, self.shape):
            op = self.flow.producer(step)
            if op is not None and name_of(op) in pattern.names:
                right = op.outputs[pattern.out : pattern.out + 1] == (step,)
                return self._op(op, pattern, bound) if right and not reads_across(op) else None
        return None

    def _op(self, op: Op, pattern: Pat, bound: Bindings) -> Bindings | None:
        if pattern.bind:
            bound = {**bound, pattern.bind: op}
        rest = dict(op.arguments)
        operands = [rest.pop(name) for name in list(rest)[: len(pattern.operands)]]
        if len(operands) < len(pattern.operands):
            return None
        named = [(rest.pop(name, None), wanted) for name, wanted in pattern.arguments.items()]
        matched = self._all(op, named, bound)
        passed = {n for n, item in rest.items() if item not in (None, _DEFAULTS.get(n))}
        if matched is None or (pattern.operands and passed - _IGNORED):
            return None
        swaps = len(operands) == 2 and name_of(op) in _COMMUTE
        for order in permutations(operands) if swaps else (operands,):
            made = self._all(op, zip(order, pattern.operands, strict=True), matched)
            if made is not None:
                return made
        return None

    def _all(
        self, op: Op, pairs: Iterable[tuple[Argument, Pattern]], bound: Bindings
    ) -> Bindings | None:
        """Match pairs of an argument and its pattern."""
        matched: Bindings | None = bound
        for item, wanted in pairs:
            matched = None if matched is None else self._argument(op, item, wanted, matched)
        return matched

    def _argument(
        self, op: Op, item: Argument, wanted: Pattern, bound: Bindings
    ) -> Bindings | None:
        """Match an argument of an op."""
        if isinstance(wanted, Along):
            item = wanted.default if item is None else item
            return bound if dim_of(self.flow, op, item) == wanted.dim else None
        if isinstance(wanted, Number):
            number = number_of(self.flow, item)
            return None if number is None else {**bound, wanted.name: number}
        if isinstance(wanted, NonTensor):
            return None if isinstance(item, Ref) else {**bound, wanted.name: item}
        if isinstance(wanted, list):
            if not isinstance(item, tuple) or len(item) != len(wanted):
                return None
            return self._all(op, zip(item, wanted, strict=True), bound)
        if type(wanted) is tuple:
            tries = (self._argument(op, item, each, bound) for each in wanted)
            return next((made for made in tries if made is not None), None)
        if isinstance(item, Ref):
            return self.value(item.id, wanted, bound)
        return bound if item == wanted else None


def name_of(op: Op) -> str:
    """The name of an op without "aten.", and without the "_" of one in place."""
    return op.name.removeprefix("aten.").removesuffix("_")


def swapped(pattern: Pattern) -> Pat:
    """A value with its last two dimensions swapped."""
    either = Along(-1), Along(-2)
    return Pat("transpose", pattern, dim0=either, dim1=either, bind="swap")


def dim_of(flow: ValueFlow, op: Op, dims: Argument) -> int | None:
    """The one dimension among `dims` of an op's operand, counted from the last one: -1."""
    dims = dims if isinstance(dims, tuple) else (dims,)
    rank = len(flow.values[op.inputs[0]].shape)
    if len(dims) != 1 or not isinstance(dims[0], int):
        return None
    return dims[0] - rank if dims[0] >= 0 else dims[0]


def number_of(flow: ValueFlow, item: Argument) -> float | None:
    """The number of an argument, also of a tensor of one element that was filled with it."""
    if isinstance(item, Ref):
        made = None if item.then or item.every else flow.kernel_of(item.id)
        filled = {"aten.scalar_tensor": "s", "aten.full": "fill_value"}
        single = flow.values[item.id].elements == 1
        item = made.arguments.get(filled.get(made.name, "")) if made and single else None
    return float(item) if isinstance(item, (int, float)) else None


def row_product(flow: ValueFlow, value: int) -> tuple[int, int] | None:
    """Rows, and the factor of each row, where a value is their product."""
    values, op = flow.values, flow.producer(value)
    if op is None or op.name not in ("aten.mul", "aten.mul_") or len(op.inputs) != 2:
        return None
    for row, score in (op.inputs, op.inputs[::-1]):
        shape = values[row].shape
        if values[score].shape == (*shape[:-1], 1) and values[value].shape == shape:
            return row, score
    return None


# -- regions ---------------------------------------------------------------------------------------


def ops_between(flow: ValueFlow, start: Collection[int], ends: Iterable[int]) -> frozenset[int]:
    """The ops that make the values `ends` of the values `start` and of external ones.

    Ops that read their results count too, where nothing reads what these make.  Views of values
    from before do not count.
    """
    graph, inside = flow.graph, set[int]()
    front = [value for value in ends if value not in start]
    while front:
        op = flow.producer(front.pop())
        if op is not None and op.id not in inside:
            inside.add(op.id)
            front += [value for value in op.inputs if value not in start]
    made = {value for number in inside for value in graph.ops[number].outputs}
    inside = {
        number
        for number in inside
        if any(flow.values[value].storage in made for value in graph.ops[number].outputs)
    }
    return frozenset(inside | _unread(flow, inside, ends))


def _unread(flow: ValueFlow, inside: Collection[int], ends: Iterable[int]) -> set[int]:
    """Further ops that read what these make, and whose results nothing reads."""
    graph, values, more = flow.graph, flow.values, set[int]()
    kept = {*graph.outputs, *ends}
    front = {i for number in inside for i in graph.ops[number].outputs} - kept
    for storage in front & {values[i].storage for i in front}:
        for op in flow.storage_users[storage]:
            if op.id in inside or op.kind == "sync" or "writes" in op.facts or not op.outputs:
                continue
            owners = {values[i].storage for i in op.outputs}
            read = {
                i for owner in owners for user in flow.storage_users[owner] for i in user.inputs
            }
            local = owners <= {*op.outputs, *front}
            if local and not kept & set(op.outputs) and read.isdisjoint(op.outputs):
                more.add(op.id)
    return more


def can_be_one(
    flow: ValueFlow, inside: Collection[int], ends: Collection[int], start: Collection[int]
) -> bool:
    """Whether one kernel can replace these ops.

    Of their results only `ends` are read elsewhere, they run in the same iterations, and nothing
    overwrites the values `start` while they run.
    """
    graph = flow.graph
    ops = [graph.ops[number] for number in inside]
    if not ops or len({op.repeats for op in ops}) > 1 or any(reads_across(op) for op in ops):
        return False
    if any(op.kind == "sync" or op.collective is not None for op in ops):
        return False
    made = {value for op in ops for value in op.outputs}
    if made & set(graph.outputs) - set(ends):
        return False
    storages = {flow.values[value].storage for value in made}
    if storages & flow.crossing:
        return False
    last = max(inside)
    if any(flow.overwritten(v, graph.producers.get(v, -1), last) for v in start):
        return False
    return all(
        op.id in inside or made.intersection(op.inputs) <= set(ends)
        for storage in storages
        for op in flow.storage_users[storage]
    )
