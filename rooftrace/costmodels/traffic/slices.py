"""Which slices of a value its views are, as far as selecting, slicing and splitting tell."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from rooftrace.costmodels.fusion import runs
from rooftrace.tracer.arguments import references
from rooftrace.tracer.graph import Op, OpGraph


@dataclass(frozen=True, slots=True)
class Slices:
    """base: what was sliced.  ranges: [start, stop) along `dimension`, of every iteration."""

    base: Hashable
    dimension: int
    ranges: tuple[tuple[int, int], ...]


_MOST = 1_000_000
"""Iterations, or places along a dimension, up to which slices are listed.  Beyond, a view is not
taken as a slice: the traffic that cannot be avoided is then a lower bound still, and a lower one.
"""


def slices(graph: OpGraph, storages: Collection[int]) -> dict[int, Slices]:
    """By value of one of these storages: the slices that it is, or is a view of.

    Views that are made alike in every iteration have the same base.
    """
    cuts: dict[int, Slices] = {}
    bases: dict[int, Hashable] = {}
    for op in graph.ops:
        if op.kind != "view" or not op.inputs:
            continue
        x = op.inputs[0]
        if graph.values[x].storage not in storages:
            continue
        if x in cuts:  # a slice of a slice lies in it
            cuts.update(dict.fromkeys(op.outputs, cuts[x]))
            continue
        (ref, *_) = op.reads
        base = bases.get(x, x)
        if base is None or ref.then is not None or ref.every:
            bases.update(dict.fromkeys(op.outputs))
            continue
        cut = dict(_cut(graph, op, base))
        cuts.update(cut)
        others = {k: v for k, v in op.arguments.items() if not any(references(v))}
        same = None if op.steps else (base, op.target, tuple(sorted(others.items(), key=str)))
        bases.update({i: same for i in op.outputs if i not in cut})
    return cuts


def union(sizes: Mapping[tuple[int, int], int]) -> int:
    """A sum over ranges that do not overlap: first those that end first."""
    total = end = 0
    for start, stop in sorted(sizes, key=lambda r: (r[1], r[0])):
        if start >= end:
            total, end = total + sizes[start, stop], stop
    return total


def _cut(graph: OpGraph, op: Op, base: Hashable) -> Iterator[tuple[int, Slices]]:
    """What a view op makes, if it cuts its input along a dimension."""
    x = graph.values[op.inputs[0]]
    dimension = op.arguments.get("dim", 0)
    if not x.shape or not isinstance(dimension, int):
        return
    dimension %= len(x.shape)
    length = x.shape[dimension]
    if not all(isinstance(op.arguments.get(name), int | None) for name in ("start", "end")):
        return
    copied = any(runs.missing(graph, op, i) for i in op.outputs)
    ranges: Iterable[Iterable[tuple[int, int]]] = ()
    turns = graph.repeats[op.repeats[-1]].count if op.steps else 1
    if not x.stride[dimension] or not 0 < length <= _MOST or turns > _MOST:
        return
    selects = op.name == "aten.select" and isinstance(op.arguments.get("index"), int)
    if (selects or op.name == "aten.slice") and not copied:
        ranges = [_turns(op, length, turns)]
    elif op.name == "aten.unbind" and (not copied or len(op.outputs) == 1):
        each = [(k, k + 1) for k in range(length)]
        ranges = [each] if copied else [[place] for place in each]
    elif op.name in ("aten.split", "aten.split_with_sizes", "aten.chunk") and not copied:
        ends = list(accumulate(graph.values[i].shape[dimension] for i in op.outputs))
        ranges = [[place] for place in zip([0, *ends], ends, strict=False)]
    for output, places in zip(op.outputs, ranges, strict=False):
        yield output, Slices(base, dimension, tuple(places))


def _turns(op: Op, length: int, turns: int) -> Iterator[tuple[int, int]]:
    """The range that a select or slice takes in each iteration of its innermost repeat."""
    for turn in range(turns):
        place = {name: step * turn for name, step in op.steps.items()}
        if op.name == "aten.select":
            index = op.arguments["index"] + place.get("index", 0)
            yield index % length, index % length + 1
            continue
        ends = []
        for name, default in (("start", 0), ("end", length)):
            end_of = op.arguments.get(name)
            end = default if end_of is None else end_of + place.get(name, 0)
            ends.append(min(max(end + length if end < 0 else end, 0), length))
        yield ends[0], ends[1]
