"""The periods of a sequence of calls: the steps of a trace without marks.

Layers repeat inside of a step as steps repeat inside of a trace, so a sequence alone does not tell
which of its periods is a step.  Periods that look most like the graph come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

_ANCHORS = 4
"""The number of rarest keys that are examined: in a step they come once, or a few times."""
_PLACES = 48
"""How many places of each are compared with its first two."""
_BEGINNINGS = 8
"""How many places where a step may begin are compared with the graph."""
_STRETCHES = 4
"""How many stretches, the longest, are compared with it."""
_TRIED = 3
"""How many periods are tried."""


@dataclass(frozen=True, slots=True)
class Period:
    """`length` calls that come again.  runs: (first call, how many times) of each stretch in which
    nothing else is between them."""

    length: int
    runs: tuple[tuple[int, int], ...]


def periods(have: Sequence[Hashable], wanted: Sequence[Hashable]) -> list[Period]:
    """The periods of `have` that look like `wanted`, best first; none where nothing comes twice.

    Calls before the first period, and after the last one, are in no run.
    """
    import numpy

    numbers: dict[Hashable, int] = {}
    calls = [numbers.setdefault(key, len(numbers)) for key in have]
    graph = [numbers.setdefault(key, len(numbers)) for key in wanted]
    sequence = numpy.array(calls, dtype=numpy.int64)
    ranked: list[tuple[float, int, Period]] = []
    for length in sorted(_lengths(calls)):
        equal = sequence[length:] == sequence[:-length]
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([0], equal, [0]))))
        stretches = [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a >= length]
        if not stretches:
            continue
        first, score = _beginning(calls, graph, length, stretches)
        runs = tuple(_runs(calls, first, length, stretches))
        if runs:
            ranked.append((-score, length, Period(length, runs)))
    return [period for _, _, period in sorted(ranked, key=lambda entry: entry[:2])[:_TRIED]]


def _lengths(calls: Sequence[int]) -> set[int]:
    """The distances between the rarest calls."""
    counts = Counter(calls)
    often = sorted((count, number) for number, count in counts.items() if count > 1)
    anchors = {number for _, number in often[:_ANCHORS]}
    places: dict[int, list[int]] = {}
    for place, number in enumerate(calls):
        if number in anchors:
            places.setdefault(number, []).append(place)
    return {
        after - before
        for positions in places.values()
        for start in (0, 1)
        for before in positions[start : start + 1]
        for after in positions[start + 1 : start + 1 + _PLACES]
    }


def _beginning(
    calls: Sequence[int], graph: Sequence[int], length: int, stretches: Sequence[tuple[int, int]]
) -> tuple[int, float]:
    """The beginning of the period that looks most like the graph, and its likeness (0 to 1)."""
    from rapidfuzz.distance import LCSseq

    best, most = stretches[0][0], -1.0
    for start, end in sorted(stretches, key=lambda stretch: stretch[0] - stretch[1])[:_STRETCHES]:
        turn = calls[start : start + length]
        there = set(turn)
        heads = [number for number in dict.fromkeys(graph) if number in there][:2]
        places = [start + offset for offset in range(length) if turn[offset] in heads]
        for place in [start, *places[:_BEGINNINGS]]:
            if place > end:
                break
            same = LCSseq.similarity(calls[place : place + length], graph)
            score = min(same / length, same / len(graph)) if graph else 0.0
            if score > most:
                best, most = place, score
    return best, most


def _runs(
    calls: Sequence[int], first: int, length: int, stretches: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The periods in each stretch, all of them beginning with the same call."""
    turn = calls[first : first + length]
    for start, end in stretches:
        begins = (
            place
            for place in range(start, min(start + length, end + 1))
            if calls[place] == turn[0] and calls[place : place + length] == turn
        )
        begin = next(begins, None)
        if begin is not None:
            yield begin, (end + length - begin) // length
