"""Arguments of ops: numbers and words as they are, tensors as `Ref`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Neighbour(Struct, frozen=True):
    """What an iteration reads of the iteration beside it.

    Iteration i of `repeat` reads iteration ``i + shift`` of `value`.  What stands in the graph
    beside a Neighbour is what the iteration at the edge reads, which has no such neighbour.
    """

    repeat: int
    value: int
    shift: int

    def renumbered(self, ids: Mapping[int, int]) -> Neighbour:
        """The Neighbour where its value has another id."""
        return replace(self, value=ids[self.value])


class Ref(Struct, frozen=True):
    """A value used as an argument: ``Ref(7)`` is the value with id 7.

    In a repeat, iteration i reads iteration i of a value that has iterations too; `then` says
    otherwise.  Outside of the repeat it is what the iteration that ran last made, or, where
    `every` is set, one item of a list for each iteration.
    """

    id: int
    then: Neighbour | None = None
    every: bool = False


Argument = Any
"""Ref, None, bool, int, float, complex, str, or a tuple of arguments."""


def references(argument: Argument) -> Iterator[Ref]:
    """The Refs in an argument (or in a mapping of arguments), in order."""
    collected: list[Ref] = []
    _collect(argument, collected)
    return iter(collected)


_PLAIN = frozenset({int, bool, float, str, type(None)})


def _collect(argument: Argument, collected: list[Ref]) -> None:
    kind = type(argument)
    if kind is Ref:
        collected.append(argument)
    elif kind is tuple:
        for item in argument:
            _collect(item, collected)
    elif kind not in _PLAIN and isinstance(argument, Mapping):
        for item in argument.values():
            _collect(item, collected)


def refs(argument: Argument) -> Iterator[int]:
    """The value ids in an argument (or in a mapping of arguments), in order."""
    return (ref.id for ref in references(argument))


def in_order(holds: Iterable[Ref]) -> tuple[Ref, ...]:
    """What an op holds, each once, by id."""
    return tuple(sorted(dict.fromkeys(holds), key=lambda ref: ref.id))
