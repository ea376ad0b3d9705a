"""Tools of graph passes: an editor, names of attention ops, op patterns, and fusible regions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.places import Places, beside
from rooftrace.tracer.graph import Argument, GraphError, Op, OpGraph, Ref, Tensor, refs
from rooftrace.tracer.requests import assumptions as asked

Match = TypeVar("Match")

ATTENTION = "rooftrace.attention.default"
ATTENTION_BACKWARD = "rooftrace.attention_backward.default"
LATENT_ATTENTION = "rooftrace.latent_attention.default"
PACKED_ATTENTION = "rooftrace.packed_attention.default"
PACKED_LATENT_ATTENTION = "rooftrace.packed_latent_attention.default"


class Editor:
    """A graph being rebuilt: new values at the end, ops in a new list, renumbered at the end."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self.repeats = list(graph.repeats)
        self.replaced: dict[int, int] = {}
        """What comes from outside or leaves the step in place of another value."""
        self.moved: dict[int, int] = {}
        """Storages whose values lie in another one now."""
        self._masks: dict[str, int] = {}

    def rewrite(
        self,
        matches: Mapping[int, Match],
        emit: Callable[[Match], object],
        dropped: Container[int] = (),
    ) -> None:
        """The ops of the graph in order: what `emit` writes where one has a match, by its id, and
        the op itself elsewhere, unless it is dropped."""
        for op in self.graph.ops:
            if op.id in matches:
                emit(matches[op.id])
            elif op.id not in dropped:
                self.ops.append(op)

    def value(
        self,
        shape: tuple[int, ...],
        dtype: str,
        role: str,
        repeats: tuple[int, ...],
        name: str = "",
        stride: tuple[int, ...] | None = None,
    ) -> int:
        """A new value: contiguous, or with these strides."""
        index = len(self.values)
        stride = Tensor.contiguous(shape) if stride is None else stride
        self.values.append(
            Tensor(
                shape=shape,
                dtype=dtype,
                stride=stride,
                role=role,
                storage=index,
                name=name,
                repeats=repeats,
            )
        )
        return index

    def view(
        self, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...], repeats: tuple[int, ...]
    ) -> int:
        """A value that has the bytes of another, contiguous or with these strides."""
        index, source = len(self.values), self.values[of.id]
        then = source.then if source.then and source.then.repeat in repeats else None
        if of.then is not None:
            then = replace(of.then, value=self.values[of.then.value].storage)
        self.values.append(
            replace(source, shape=shape, stride=stride, name="", repeats=repeats, then=then)
        )
        return index

    def named_like(
        self, value: int, parts: Sequence[int], join: Callable[[list[str]], str]
    ) -> None:
        """Name a value in each iteration, where the parts that it is made of have names of their
        own."""
        for position, repeat in enumerate(self.repeats):
            if all(part in repeat.names for part in parts):
                columns = zip(*(repeat.names[part] for part in parts), strict=True)
                names = {**repeat.names, value: tuple(join(list(column)) for column in columns)}
                self.repeats[position] = replace(repeat, names=names)

    def kernel_for(self, op: Op) -> Op:
        """An op as the place of the kernel of a package, which is no fallback any more."""
        known = self.graph.assumptions
        rest = tuple(number for number in op.assumptions if known[number].kind != asked.FALLBACK)
        return replace(op, assumptions=rest)

    def emit(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        outputs: tuple[int, ...],
        kind: str = "kernel",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """An op in the place of `like`: same module, part and family."""
        self.ops.append(
            replace(
                like,
                target=target,
                arguments=dict(arguments),
                inputs=tuple(refs(arguments)),
                outputs=outputs,
                kind=kind,
                facts=dict(facts or {}),
                flops_torch=None,
            )
        )

    def viewed(
        self, like: Op, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...] | None = None
    ) -> Ref:
        """A value in another shape: contiguous, or with these strides."""
        strides = Tensor.contiguous(shape) if stride is None else stride
        out = self.view(of, shape, strides, like.repeats)
        self.stands_for(like, of, out)
        return Ref(out)

    def stands_for(self, like: Op, of: Ref, value: int) -> None:
        """Let a value be another one in a shape of its own."""
        shape = self.values[value].shape
        self.emit(like, "aten.reshape.default", {"self": of, "shape": shape}, (value,), kind="view")

    def sliced(self, like: Op, of: Ref, dim: int, start: int, end: int) -> Ref:
        """Elements `start` to `end` of a value along one dimension; itself if that is all."""
        source = self.values[of.id]
        if (start, end) == (0, source.shape[dim]):
            return of
        shape = (*source.shape[:dim], end - start, *source.shape[dim + 1 :])
        out = self.view(of, shape, source.stride, like.repeats)
        cut: dict[str, Argument] = {"self": of, "dim": dim, "start": start, "end": end}
        self.emit(like, "aten.slice.Tensor", cut, (out,), kind="view")
        return Ref(out)

    def permuted(self, like: Op, of: Ref, dims: tuple[int, ...]) -> Ref:
        """A value with its dimensions in another order."""
        source = self.values[of.id]
        shape, stride = (tuple(t[d] for d in dims) for t in (source.shape, source.stride))
        out = self.view(of, shape, stride, like.repeats)
        self.emit(like, "aten.permute.default", {"self": of, "dims": dims}, (out,), kind="view")
        return Ref(out)

    def made(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        shape: tuple[int, ...],
        dtype: str,
        role: str = "activations",
        facts: Mapping[str, Any] | None = None,
    ) -> Ref:
        """The new value that a new kernel makes."""
        out = self.value(shape, dtype, role, like.repeats)
        self.emit(like, target, arguments, (out,), facts=facts)
        return Ref(out)

    def known_mask(self, name: str, *sizes: int) -> int:
        """A constant bool[S, L] of this name and sizes, the same for all attention of them."""
        named = f"{name}_mask_{'x'.join(map(str, sizes))}"
        if named not in self._masks:
            self._masks[named] = self.value(sizes[:2], "bool", "constants", (), named)
        return self._masks[named]

    def turned(self, like: Op, item: Ref) -> Ref:
        """The [H, b, a] view of an [H, a, b] value."""
        source = self.values[item.id]
        (heads, a, b), (outer, rows, columns) = source.shape, source.stride
        out = self.view(item, (heads, b, a), (outer, columns, rows), like.repeats)
        self.turns_into(like, item, out)
        return Ref(out)

    def turns_into(self, like: Op, item: Ref, value: int) -> None:
        """Let a value be another one with its dimensions 1 and 2 the other way round."""
        turn: dict[str, Argument] = {"self": item, "dim0": 1, "dim1": 2}
        self.emit(like, "aten.transpose.int", turn, (value,), kind="view")

    def done(self) -> OpGraph:
        """The new graph."""
        graph, other = self.graph, self.replaced
        moved = self.moved
        fields = {
            "values": tuple(
                replace(t, storage=moved[t.storage]) if t.storage in moved else t
                for t in self.values
            ),
            "repeats": tuple(self.repeats),
            "inputs": tuple(other.get(value, value) for value in graph.inputs),
            "outputs": tuple(other.get(value, value) for value in graph.outputs),
        }
        return graph.with_ops(self.ops, **fields)


def operand(op: Op, name: str) -> Ref:
    """A tensor argument by schema name.  Raises GraphError where it is none."""
    item = op.arguments.get(name)
    if not isinstance(item, Ref):
        raise GraphError(f"op {op.id} ({op.target}): expected a tensor as {name!r}, got {item!r}")
    return item


# -- matching --------------------------------------------------------------------------------------
# Patterns of ops: by which op a value was made, and of what, behind views, copies and casts.
#
# `Pat("mul", Pat("silu", "x"), "y")` is a product, in either order, of the SiLU of one value and
# of another one; matched, it says which values `x` and `y` are.

Pattern = Any
"""Of what an op is given: a Pat; a word, which names a value, the same wherever it stands; Number,
NonTensor or Along; a tuple of patterns of which one holds; a list of patterns, for a list; or the
constant that it has to be."""
Words = Mapping[str, Any]
"""What the words of a pattern name: values by their ids, numbers, and ops."""
_COMMUTE = frozenset({"mul", "add"})
_SAY_NOTHING = frozenset({
    "dtype", "layout", "device", "pin_memory", "memory_format", "half_to_float", "non_blocking",
    "size", "sorted", "stable", "implicit",
})  # fmt: skip
"""Arguments that change neither which numbers are made nor of what."""
_DEFAULTS = {
    "largest": True, "keepdim": False, "alpha": 1, "accumulate": False, "descending": False,
    "beta": 1, "threshold": 20,
}  # fmt: skip
"""What further arguments are where a caller says what is so anyhow."""


class Number(NamedTuple):
    """A number, also as a tensor of one element, which a word names."""

    word: str


class NonTensor(NamedTuple):
    """What is no tensor, which a word names; None where an op was not given it."""

    word: str


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
    pattern has no operands.  out: which of its results the value is.  said: a word for the op.
    """

    __slots__ = ("arguments", "names", "operands", "out", "said")

    def __init__(
        self, names: str, *operands: Pattern, out: int = 0, said: str = "", **arguments: Pattern
    ) -> None:
        self.names = frozenset(names.split())
        self.operands, self.arguments = operands, arguments
        self.out, self.said = out, said


def match(
    places: Places,
    value: int,
    pattern: Pattern,
    words: Words | None = None,
    shape: tuple[int, ...] | None = None,
    accept: Callable[[str, int], bool] = lambda word, value: True,
) -> Words | None:
    """What the words of a pattern name where it made a value; None where something else did.

    words: what some of them have to name.  shape: views are passed as far as values have it.
    accept: whether a word may name a value.
    """
    return _Matching(places, shape, accept).value(value, pattern, words or {})


class _Matching:
    def __init__(
        self, places: Places, shape: tuple[int, ...] | None, accept: Callable[[str, int], bool]
    ) -> None:
        self.places, self.shape, self.accept = places, shape, accept

    def value(self, value: int, pattern: Pattern, words: Words) -> Words | None:
        """Match a value."""
        if type(pattern) is tuple:
            tries = (self.value(value, each, words) for each in pattern)
            return next((made for made in tries if made is not None), None)
        if isinstance(pattern, str):
            known = words.get(pattern, value)
            same = self.places.straight(known) == self.places.straight(value)
            return {pattern: value, **words} if same and self.accept(pattern, value) else None
        if not isinstance(pattern, Pat):
            return None
        for behind in self.places.behind(value, self.shape):
            op = self.places.made_by(behind)
            if op is not None and name_of(op) in pattern.names:
                right = op.outputs[pattern.out : pattern.out + 1] == (behind,)
                return self._op(op, pattern, words) if right and not beside(op) else None
        return None

    def _op(self, op: Op, pattern: Pat, words: Words) -> Words | None:
        if pattern.said:
            words = {**words, pattern.said: op}
        rest = dict(op.arguments)
        operands = [rest.pop(name) for name in list(rest)[: len(pattern.operands)]]
        matched: Words | None = words
        for name, wanted in pattern.arguments.items():
            matched = (
                None if matched is None else self._given(op, rest.pop(name, None), wanted, matched)
            )
        if matched is None or len(operands) < len(pattern.operands):
            return None
        said = {n for n, item in rest.items() if item not in (None, _DEFAULTS.get(n))}
        if pattern.operands and said - _SAY_NOTHING:
            return None
        swaps = len(operands) == 2 and name_of(op) in _COMMUTE
        for order in permutations(operands) if swaps else (operands,):
            made: Words | None = matched
            for item, wanted in zip(order, pattern.operands, strict=True):
                made = None if made is None else self._given(op, item, wanted, made)
            if made is not None:
                return made
        return None

    def _given(self, op: Op, item: Argument, wanted: Pattern, words: Words) -> Words | None:
        """Match what an op was given."""
        if isinstance(wanted, Along):
            item = wanted.default if item is None else item
            return words if dim_of(self.places, op, item) == wanted.dim else None
        if isinstance(wanted, Number):
            number = number_of(self.places, item)
            return None if number is None else {**words, wanted.word: number}
        if isinstance(wanted, NonTensor):
            return None if isinstance(item, Ref) else {**words, wanted.word: item}
        if isinstance(wanted, list):
            listed = item if isinstance(item, tuple) and len(item) == len(wanted) else ()
            matched: Words | None = words if listed else None
            for each, pattern in zip(listed, wanted, strict=False):
                matched = None if matched is None else self._given(op, each, pattern, matched)
            return matched
        if type(wanted) is tuple:
            tries = (self._given(op, item, each, words) for each in wanted)
            return next((made for made in tries if made is not None), None)
        if isinstance(item, Ref):
            return self.value(item.id, wanted, words)
        return words if item == wanted else None


def name_of(op: Op) -> str:
    """The name of an op without "aten.", and without the "_" of one in place."""
    return op.name.removeprefix("aten.").removesuffix("_")


def swapped(pattern: Pattern) -> Pat:
    """A value with its last two dimensions the other way round."""
    either = Along(-1), Along(-2)
    return Pat("transpose", pattern, dim0=either, dim1=either, said="swap")


def dim_of(places: Places, op: Op, dims: Argument) -> int | None:
    """The one dimension of an op's operand that it was given, counted from the last one: -1; None
    for several, or none."""
    dims = dims if isinstance(dims, tuple) else (dims,)
    rank = len(places.graph.values[op.inputs[0]].shape)
    if len(dims) != 1 or not isinstance(dims[0], int):
        return None
    return dims[0] - rank if dims[0] >= 0 else dims[0]


def number_of(places: Places, item: Argument) -> float | None:
    """A number that an op was given, also as a tensor of one element that was filled with it."""
    if isinstance(item, Ref):
        made = None if item.then or item.every else places.kernel_of(item.id)
        said = {"aten.scalar_tensor": "s", "aten.full": "fill_value"}
        single = places.graph.values[item.id].elements == 1
        item = made.arguments.get(said.get(made.name, "")) if made is not None and single else None
    return float(item) if isinstance(item, (int, float)) else None


# -- regions ---------------------------------------------------------------------------------------
# Ops that one kernel can stand for: what lies between some values and what is made of them.


def ops_between(places: Places, start: Collection[int], ends: Iterable[int]) -> frozenset[int]:
    """The ops that make the values `ends` of the values `start` and of what comes from outside.

    With them go ops that read what they make, where nothing reads the result.  Views of what there
    was before do not count.
    """
    graph, inside = places.graph, set[int]()
    front = [value for value in ends if value not in start]
    while front:
        op = places.made_by(front.pop())
        if op is not None and op.id not in inside:
            inside.add(op.id)
            front += [value for value in op.inputs if value not in start]
    made = {value for number in inside for value in graph.ops[number].outputs}
    inside = {
        number
        for number in inside
        if any(graph.values[value].storage in made for value in graph.ops[number].outputs)
    }
    return frozenset(inside | _unread(places, inside, ends))


def _unread(places: Places, inside: Collection[int], ends: Iterable[int]) -> set[int]:
    """Further ops that read what these make, and whose results nothing reads."""
    graph, more = places.graph, set[int]()
    kept = {*graph.outputs, *ends}
    front = {i for number in inside for i in graph.ops[number].outputs} - kept
    for storage in front & {graph.values[i].storage for i in front}:
        for op in places.readers[storage]:
            if op.id in inside or op.kind == "sync" or "writes" in op.facts or not op.outputs:
                continue
            owners = {graph.values[i].storage for i in op.outputs}
            read = {
                i for owner in owners for reader in places.readers[owner] for i in reader.inputs
            }
            mine = owners <= {*op.outputs, *front}
            if mine and not kept & set(op.outputs) and read.isdisjoint(op.outputs):
                more.add(op.id)
    return more


def can_be_one(
    places: Places, inside: Collection[int], ends: Collection[int], start: Collection[int]
) -> bool:
    """Whether nothing but `ends` of what these ops make is read elsewhere, they run in the same
    iterations, and what they read of `start` is not overwritten while they run."""
    graph = places.graph
    ops = [graph.ops[number] for number in inside]
    if not ops or len({op.repeats for op in ops}) > 1 or any(beside(op) for op in ops):
        return False
    if any(op.kind == "sync" or op.collective is not None for op in ops):
        return False
    made = {value for op in ops for value in op.outputs}
    if made & set(graph.outputs) - set(ends):
        return False
    storages = {graph.values[value].storage for value in made}
    if storages & places.neighbours:
        return False
    last = max(inside)
    if any(places.overwritten(v, graph.producers.get(v, -1), last) for v in start):
        return False
    return all(
        op.id in inside or made.isdisjoint(op.inputs) or made.intersection(op.inputs) <= set(ends)
        for storage in storages
        for op in places.readers[storage]
    )


def apart(places: Places, edit: Editor, value: int, storage: int) -> None:
    """Let a value, and all that lies where it does, lie in another storage."""
    for member in places.members[places.graph.values[value].storage]:
        edit.values[member] = replace(edit.values[member], storage=storage)


def stands_for(places: Places, edit: Editor, like: Op, made: Ref, value: int) -> None:
    """Let a value be a view of a new one that has its elements in order."""
    apart(places, edit, value, made.id)
    edit.stands_for(like, made, value)


def times_rows(places: Places, value: int) -> tuple[int, int] | None:
    """Rows, and what each is multiplied by, where a value is their product."""
    values, op = places.graph.values, places.made_by(value)
    if op is None or op.name not in ("aten.mul", "aten.mul_") or len(op.inputs) != 2:
        return None
    for row, score in (op.inputs, op.inputs[::-1]):
        shape = values[row].shape
        if values[score].shape == (*shape[:-1], 1) and values[value].shape == shape:
            return row, score
    return None
