"""Numbers that differ between graphs of one structure, their formulas, and repeated sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from rooftrace._amounts import np
from rooftrace.graph import OpGraph
from rooftrace.graph.formulas import polynomials
from rooftrace.graph.formulas.polynomials import Formula

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


# -- varying numbers -------------------------------------------------------------------------------
# Numbers of a record that sizes change, and how each is computed: at one place, or at many.

Numbers = tuple[int, ...]
"""A value for each size of a form."""


class Draw(Struct, frozen=True, omit_defaults=True):
    """The classes that rows reach on average, each choosing some of many.

    beside: reached in addition, as all rows of a table that is zeroed before some are written.
    """

    function: str  # a name that `function_of` takes
    rows: Formula
    chosen: Formula
    classes: Formula
    beside: Formula = Formula()

    @property
    def is_constant(self) -> bool:
        """Whether no size changes it."""
        return all(part.is_constant for part in self.parts)

    @property
    def parts(self) -> tuple[Formula, Formula, Formula, Formula]:
        """All formulas, in the order of the fields."""
        return self.rows, self.chosen, self.classes, self.beside

    def at(self, numbers: Numbers) -> float:
        """The number that is reached."""
        rows, chosen, classes, beside = (part.at(numbers) for part in self.parts)
        return beside + polynomials.function_of(self.function)(rows, chosen, classes)

    def over(self, columns: Sequence[Array]) -> Array:
        """The numbers that are reached at many points; equal draws are computed once."""
        count = max((len(column) for column in columns), default=1)
        arguments = [np.broadcast_to(formula.over(columns), (count,)) for formula in self.parts]
        function = polynomials.function_of(self.function)
        computed: dict[tuple[int, ...], float] = {}
        reached = np.empty(count)
        for place, key in enumerate(zip(*(a.tolist() for a in arguments), strict=True)):
            value = computed.get(key)
            if value is None:
                value = computed[key] = key[3] + function(*key[:3])
            reached[place] = value
        return reached

    def written(self, names: Sequence[str]) -> str:
        """The function with its arguments: "distinct(8 batch, 8, 256)"."""
        if self.is_constant:
            return f"{self.at(()):,g}"
        *arguments, beside = (part.written(names) for part in self.parts)
        drawn = f"{self.function}({', '.join(arguments)})"
        return f"({beside} + {drawn})" if self.beside.terms else drawn


PLAIN, TEXT, REACHED, TOUCHED, EACH = "plain", "text", "reached", "touched", "each"
"""Kinds of a slot: a formula; a text with formulas; a draw; round(formula x draw), the bytes that a
draw touches; formula / draw, the rows of each class."""


class Varying(Struct, frozen=True):
    """A number of a record that sizes change; for a text, all its numbers.

    formulas: indices of formulas of the form.  draw: index of its draw.  words: the text around the
    numbers.  whole: an integer result stands as an int.
    """

    path: Path
    kind: str = PLAIN
    formulas: tuple[int, ...] = ()
    draw: int = -1
    words: tuple[str, ...] = ()
    commas: bool = False
    whole: bool = True

    def value(self, values: Sequence[int], reached: Sequence[float]) -> Any:
        """The number or text, from the values of all formulas and draws."""
        if self.kind == TEXT:
            shown = [f"{values[i]:,}" if self.commas else str(values[i]) for i in self.formulas]
            return self.words[0] + "".join(
                number + word for number, word in zip(shown, self.words[1:], strict=True)
            )
        if self.kind == PLAIN:
            return values[self.formulas[0]]
        number = self.number(
            values[self.formulas[0]] if self.formulas else 0,
            reached[self.draw] if self.draw >= 0 else 0.0,
        )
        whole = self.whole and isinstance(number, float) and number.is_integer()
        return int(number) if whole else number

    def number(self, value: Any, reached: Any) -> Any:
        """The number from that of its formula and that of its draw; also of arrays of them."""
        if self.kind == REACHED:
            return reached
        if self.kind == TOUCHED:
            return touched(value, reached)
        return each(value, reached) if self.kind == EACH else value


def touched(size: Any, reached: Any) -> Any:
    """Bytes of the reached rows, `size` bytes each, rounded as rules do."""
    product = size * reached
    return product.round() if hasattr(product, "round") else round(product)


def each(rows: Any, reached: Any) -> Any:
    """Rows of each class that is reached, if at least one is."""
    if hasattr(reached, "clip"):
        return rows / reached.clip(min=1)
    return rows / max(reached, 1)


# -- leaves ----------------------------------------------------------------------------------------
# What differs between graphs of one structure: where, and the values there.

Path = tuple[Any, ...]
"""Steps to a value: names of fields, keys of mappings, indices of tuples."""
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)|\d+")
"""An integer in a text, with or without commas."""


class StructureError(ValueError):
    """Graphs that differ in more than their numbers: says where."""


class Differing(NamedTuple):
    """A number that is not the same in all graphs, or a text with such numbers."""

    path: Path
    values: tuple[Any, ...]  # one for each graph: all int, all int or float, or all str


def differences(samples: Sequence[Any], path: Path = ()) -> Iterator[Differing]:
    """Paths at which these records, tuples, mappings or plain values differ.

    Raises StructureError where they differ in kind, length, keys or words.
    """
    first = samples[0]
    if all(
        (sample is first or sample == first) and type(sample) is type(first)  # a NaN is itself
        for sample in samples[1:]
    ):
        return
    kinds = {type(sample) for sample in samples}
    if kinds <= {int, float} or kinds == {str}:
        yield Differing(path, tuple(samples))
        return
    if len(kinds) > 1:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise StructureError(f"{_shown(path)}: values of different kinds: {shown}")
    if isinstance(first, (tuple, list)):
        steps: Sequence[Any] = range(len(first))
        if len({len(sample) for sample in samples}) > 1:
            lengths = ", ".join(str(len(sample)) for sample in samples)
            raise StructureError(f"{_shown(path)}: of different lengths: {lengths}")
    elif isinstance(first, Mapping):
        steps = list(first)
        if any(list(sample) != steps for sample in samples):
            raise StructureError(f"{_shown(path)}: different keys")
    else:
        kind: Any = type(first)
        names = field_names(kind)
        if names is None:
            raise StructureError(f"{_shown(path)}: {first!r:.40} and {samples[-1]!r:.40}")
        for name in names:
            yield from differences([getattr(s, name) for s in samples], (*path, name))
        return
    for step in steps:
        yield from differences([sample[step] for sample in samples], (*path, step))


def words_and_numbers(texts: Sequence[str], path: Path) -> tuple[list[str], list[tuple[int, ...]]]:
    """The words between the numbers of equal texts, and the values of each number.

    There is a word before, between and behind all numbers ("" where there is none).  Raises
    StructureError where the words differ.
    """
    words = [_NUMBER.split(text) for text in texts]
    if any(other != words[0] for other in words[1:]):
        raise StructureError(f"{_shown(path)}: {texts[0]!r:.60} and {texts[-1]!r:.60}")
    numbers = [[int(n.replace(",", "")) for n in _NUMBER.findall(text)] for text in texts]
    return words[0], list(zip(*numbers, strict=True))


def has_commas(texts: Sequence[str]) -> bool:
    """Whether large numbers in these texts have commas."""
    return any("," in number for text in texts for number in _NUMBER.findall(text))


Tree = dict[Any, Any]
"""Changes by the first step to them: more steps, or the place of a new value in a `Leaf`."""


class Leaf(NamedTuple):
    """The place of a new value among all."""

    place: int


def tree_of(paths: Iterable[Path]) -> Tree:
    """Places of new values by path, as a tree."""
    tree: Tree = {}
    for place, path in enumerate(paths):
        inner = tree
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = Leaf(place)
    return tree


def changed(item: Any, tree: Tree | Leaf, values: Sequence[Any]) -> Any:
    """A copy of a record with new values; unchanged parts are shared."""
    if isinstance(tree, Leaf):
        return values[tree.place]
    if isinstance(item, tuple):
        parts = list(item)
        for step, inner in tree.items():
            parts[step] = changed(parts[step], inner, values)
        return tuple(parts)
    if isinstance(item, list):
        listed = enumerate(item)
        return [changed(part, tree[i], values) if i in tree else part for i, part in listed]
    if isinstance(item, Mapping):
        pairs = item.items()
        return {key: changed(v, tree[key], values) if key in tree else v for key, v in pairs}
    new = {name: changed(getattr(item, name), inner, values) for name, inner in tree.items()}
    if isinstance(item, msgspec.Struct):
        return msgspec.structs.replace(item, **new)
    return replace(item, **new)


@cache
def field_names(kind: type) -> tuple[str, ...] | None:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else None


def _shown(path: Path) -> str:
    return ".".join(map(str, path)) or "the graph"


# -- series ----------------------------------------------------------------------------------------
# Sequences that grow with a size, such as the modules of all layers, in a form that does not.
#
# A series is blocks of items whose numbers grow by equal steps from block to block.  Two blocks
# and their count say all of it, so that graphs of 8 and of 80 layers have one structure.

_DIGITS = re.compile(r"\d+")
_LONGEST = 256
"""The most items of a block."""
_LEAST_LISTED = 8
"""Numbers in an argument that is a list of them."""


class Series(Struct, frozen=True):
    """`count` blocks; the numbers of block i are `first` + i (second - first)."""

    first: tuple[Any, ...]
    second: tuple[Any, ...] | None = None
    count: int = 1

    def items(self) -> Iterator[Any]:
        """All items in order.  Raises StructureError where the two blocks are not alike."""
        if self.second is None:
            yield from self.first
            return
        changes = list(differences([self.first, self.second]))
        tree = tree_of(path for path, _ in changes)
        for block in range(self.count):
            values = [_along(values, block, path) for path, values in changes]
            yield from changed(self.first, tree, values) if changes else self.first


def _along(values: Sequence[Any], block: int, path: Any) -> Any:
    """The value of a block, from the first two."""
    if not isinstance(values[0], str):
        return values[0] + block * (values[1] - values[0])
    words, numbers = words_and_numbers(values, path)
    shown = [str(first + block * (second - first)) for first, second in numbers]
    return words[0] + "".join(n + word for n, word in zip(shown, words[1:], strict=True))


def series_of(items: Sequence[Any]) -> tuple[Series, ...]:
    """Items as series: the shortest block that comes again and again, from the front."""
    looks = [_DIGITS.sub("#", repr(item)) for item in items]
    result: list[Series] = []
    place = 0
    while place < len(items):
        series = _series_at(items, looks, place)
        if series.second is None and result and result[-1].second is None:
            result[-1] = Series((*result[-1].first, *series.first))
        else:
            result.append(series)
        place += series.count * len(series.first)
    return tuple(result)


def _series_at(items: Sequence[Any], looks: Sequence[str], place: int) -> Series:
    """The series that begins at a place: of several blocks, else of the item alone."""
    most = min(_LONGEST, (len(items) - place) // 2)
    for size in range(1, most + 1):
        if looks[place] != looks[place + size] or (
            looks[place : place + size] != looks[place + size : place + 2 * size]
        ):
            continue
        first, second = (tuple(items[place + i * size : place + (i + 1) * size]) for i in (0, 1))
        count = _count(items, place, Series(first, second, len(items) // size))
        if count > 2:
            return Series(first, second, count)
    return Series((items[place],))


def _count(items: Sequence[Any], place: int, series: Series) -> int:
    """Number of blocks from a place on."""
    size, blocks = len(series.first), 0
    try:
        made = series.items()
        while True:
            block = items[place + blocks * size : place + (blocks + 1) * size]
            if len(block) < size or any(item != next(made, None) for item in block):
                return blocks
            blocks += 1
    except StructureError:
        return blocks


class ListedNumbers(Struct, frozen=True):
    """An argument of an op that lists a number for each of many tensors, as an optimizer's does."""

    op: int
    name: str
    items: tuple[Series, ...]


def _listed(graph: OpGraph) -> Iterator[ListedNumbers]:
    for op in graph.ops:
        for name, argument in op.arguments.items():
            if (
                isinstance(argument, tuple)
                and len(argument) >= _LEAST_LISTED
                and all(isinstance(item, (int, float)) for item in argument)
            ):
                yield ListedNumbers(op.id, name, series_of(argument))


def _with_arguments(graph: OpGraph, listed: Mapping[tuple[int, str], Any]) -> OpGraph:
    """The graph with other values of some arguments, by op and name."""
    by_op: dict[int, dict[str, Any]] = {}
    for (op, name), value in listed.items():
        by_op.setdefault(op, {})[name] = value
    if not by_op:
        return graph
    ops = list(graph.ops)
    for number, arguments in by_op.items():
        ops[number] = msgspec.structs.replace(
            ops[number], arguments={**ops[number].arguments, **arguments}
        )
    return graph.replace(ops=tuple(ops))


@dataclass(frozen=True)
class SeriesGraph:
    """A graph with its sequences as series; `written_out` is the graph."""

    graph: OpGraph  # without the sequences below
    modules: tuple[Series, ...]
    constants: tuple[Series, ...]
    assumptions: tuple[Series, ...]
    names: tuple[Mapping[int, tuple[Series, ...]], ...]  # by repeat and value
    rests: tuple[Mapping[int, tuple[Series, ...]], ...]  # by repeat and assumption
    listed: tuple[ListedNumbers, ...] = ()

    @staticmethod
    def of(graph: OpGraph) -> SeriesGraph:
        """The graph in this form."""
        listed = tuple(_listed(graph))
        short = _with_arguments(graph, {(each.op, each.name): () for each in listed})
        return SeriesGraph(
            graph=short.replace(
                modules={},
                constants={},
                assumptions=(),
                repeats=tuple(
                    msgspec.structs.replace(r, names={}, assumptions={}) for r in graph.repeats
                ),
            ),
            modules=series_of(list(graph.modules.items())),
            constants=series_of(list(graph.constants.items())),
            assumptions=series_of(graph.assumptions),
            names=tuple({k: series_of(v) for k, v in r.names.items()} for r in graph.repeats),
            rests=tuple({k: series_of(v) for k, v in r.assumptions.items()} for r in graph.repeats),
            listed=listed,
        )

    def placed(self) -> Iterator[tuple[Path, Any]]:
        """The assumptions of each first and second block, with their paths."""
        for number, series in enumerate(self.assumptions):
            for block in ("first", "second"):
                for place, item in enumerate(getattr(series, block) or ()):
                    yield ("assumptions", number, block, place), item

    def written_out(self) -> OpGraph:
        """The graph with all items."""
        repeats = zip(self.graph.repeats, self.names, self.rests, strict=True)
        full = {(each.op, each.name): tuple(_items(each.items)) for each in self.listed}
        return _with_arguments(self.graph, full).replace(
            modules=dict(_items(self.modules)),
            constants=dict(_items(self.constants)),
            assumptions=tuple(_items(self.assumptions)),
            repeats=tuple(
                msgspec.structs.replace(
                    repeat,
                    names={k: tuple(_items(v)) for k, v in names.items()},
                    assumptions={k: tuple(_items(v)) for k, v in rests.items()},
                )
                for repeat, names, rests in repeats
            ),
        )


def _items(many: Sequence[Series]) -> Iterator[Any]:
    for series in many:
        yield from series.items()
