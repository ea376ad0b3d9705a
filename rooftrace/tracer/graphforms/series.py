"""Sequences that grow with a size, such as the modules of all layers, in a form that does not.

A series is blocks of items whose numbers grow by equal steps from block to block.  Two blocks and
their count say all of it, so that graphs of 8 and of 80 layers have one structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphforms.leaves import (
    Path,
    StructureError,
    changed,
    differences,
    tree_of,
    words_and_numbers,
)

_DIGITS = re.compile(r"\d+")
_LONGEST = 256
"""The most items of a block."""
_LEAST_LISTED = 8
"""Numbers in an argument that is a list of them."""


class Series(Struct, frozen=True):
    """`count` blocks; the numbers of block i are those of `first` + i (second - first)."""

    first: tuple[Any, ...]
    second: tuple[Any, ...] | None = None
    count: int = 1

    def items(self) -> Iterator[Any]:
        """All items in order.  Raises StructureError where the two blocks are not alike."""
        if self.second is None:
            yield from self.first
            return
        changes = list(differences([self.first, self.second]))
        for block in range(self.count):
            yield from (
                changed(
                    self.first,
                    tree_of({path: _along(values, block, path) for path, values in changes}),
                )
                if changes
                else self.first
            )


def _along(values: Sequence[Any], block: int, path: Any) -> Any:
    """The value of a block, from those of the first two."""
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
    """How many blocks there are from a place on."""
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
    """A graph with its sequences as series; `whole` is the graph."""

    graph: OpGraph  # without what follows
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

    def whole(self) -> OpGraph:
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
