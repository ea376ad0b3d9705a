"""Patterns of ops: by which op a value was made, and of what, behind views, copies and casts.

`Pat("mul", Pat("silu", "x"), "y")` is a product, in either order, of the SiLU of one value and of
another one; matched, it says which values `x` and `y` are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any, NamedTuple

from rooftrace.costmodels.rewriting.places import Places, beside
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op

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
