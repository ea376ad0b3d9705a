"""Passes through the iterations of a repeat, and the copies of values that an op touches.

An iteration that stands for many has equal neighbours in the graph: the one before it and the one
after it, in the order in which they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rooftrace.graph import REVERSED, Op, OpGraph


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: ops[start:stop] stand for `count` iterations, the last one first if `reverse`."""

    repeat: int
    count: int
    start: int
    stop: int
    reverse: bool


def runs(graph: OpGraph) -> list[Pass]:
    """Every pass through every repeat, outer ones first."""
    passes: list[Pass] = []
    repeats = [op.repeats for op in graph.ops]

    def search(part: range, depth: int) -> None:
        for repeat, inside in segments(repeats, part, depth):
            if repeat is not None:
                backward = graph.ops[inside.start].part in REVERSED
                count = graph.repeats[repeat].count
                passes.append(Pass(repeat, count, inside.start, inside.stop, backward))
                search(inside, depth + 1)

    if graph.repeats:
        search(range(len(repeats)), 0)
    return passes


def missing(graph: OpGraph, op: Op, value: int) -> tuple[int, ...]:
    """The repeats of a value that an op stands outside of."""
    return tuple(r for r in graph.values[value].repeats if r not in op.repeats)


def copies(graph: OpGraph, op: Op, value: int) -> int:
    """How many copies of a value there are in an iteration of the op's repeats."""
    return math.prod(graph.repeats[r].count for r in missing(graph, op, value))


def listed(graph: OpGraph) -> dict[int, dict[int, int]]:
    """By op: storages of which it takes or makes all copies, and the number of copies."""
    all_copies: dict[int, dict[int, int]] = {}
    values = graph.values
    for op in graph.ops if graph.repeats else ():
        if all(values[i].repeats in ((), op.repeats) for i in (*op.inputs, *op.outputs)):
            continue
        taken = [ref.id for ref in op.reads if ref.every]
        storages = {values[i].storage for i in (*taken, *op.outputs)}
        counts = {storage: copies(graph, op, storage) for storage in storages}
        several = {storage: count for storage, count in counts.items() if count > 1}
        if several:
            all_copies[op.id] = several
    return all_copies


@dataclass(frozen=True, slots=True)
class Site:
    """The position of an op in the iterations of a repeat, or in neighbours of these.

    zone: 0 in the iteration that stands for many, -1 in the one before it, 1 in the one after it
    (as forward goes).  place: the pass, and the number of the op in its iteration.
    """

    repeat: int
    zone: int
    place: tuple[int, int]


class Neighbourhood:
    """The sites of each op; which ops may share a kernel across iterations.

    A kernel that crosses from one iteration to the next has to do so between every two.  So it
    stays within two iterations and has no op of both; where the first iterations would differ from
    the last, the ops are barred from crossing.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.targets = [op.target for op in graph.ops]
        self.sites: dict[int, list[Site]] = {}
        self.barred: set[tuple[int, int]] = set()
        bounds = [range(len(graph.ops))]
        for number, run in enumerate(runs(graph)):
            length = run.stop - run.start
            depth = graph.ops[run.start].repeats.index(run.repeat)
            del bounds[depth + 1 :]
            around = bounds[-1]
            bounds.append(range(run.start, run.stop))
            for step in (-1, 0, 1):
                first = run.start + step * length
                if self._alike(range(first, first + length), run, around):
                    zone = -step if run.reverse else step
                    for place in range(length):
                        site = Site(run.repeat, zone, (number, place))
                        self.sites.setdefault(first + place, []).append(site)

    def _alike(self, part: range, run: Pass, around: range) -> bool:
        """Whether these ops equal those of an iteration."""
        if part.start < around.start or part.stop > around.stop:
            return False
        targets = self.targets
        return targets[part.start : part.stop] == targets[run.start : run.stop]

    def _by_repeat(self, members: Iterable[int]) -> dict[int, dict[int, Site]]:
        """Sites of these ops by repeat and op, of repeats that some op is in."""
        by_repeat: dict[int, dict[int, Site]] = {}
        for op in sorted(members):
            for site in self.sites.get(op, ()):
                by_repeat.setdefault(site.repeat, {})[op] = site
        return {r: s for r, s in by_repeat.items() if any(site.zone == 0 for site in s.values())}

    def may_share(self, members: Sequence[int]) -> bool:
        """Whether these ops may be one kernel."""
        return all(self._may_cross(sites, members) for sites in self._by_repeat(members).values())

    def _may_cross(self, sites: Mapping[int, Site], members: Sequence[int]) -> bool:
        zones = {site.zone for site in sites.values()}
        others = [op for op in members if op not in sites]
        if zones == {0} and not others:
            return True
        if len(zones) != 2 or len({site.place for site in sites.values()}) < len(sites):
            return False
        first, site = next(iter(sites.items()))
        if others and (site.zone == 0 or max(others) > first):
            return False
        return not any((site.repeat, op) in self.barred for op, site in sites.items())

    def bar_uneven(self, groups: Iterable[Sequence[int]]) -> bool:
        """Bar ops that cross into the first iterations and not out of them, or vice versa.

        Returns whether there were any.
        """
        shapes: dict[tuple[int, int], dict[frozenset[Any], Sequence[int]]] = {}
        for members in groups:
            for repeat, sites in self._by_repeat(members).items():
                zones = {site.zone for site in sites.values()}
                if len(zones) == 2:
                    first = min(zones)
                    shape = frozenset((site.zone - first, site.place) for site in sites.values())
                    shapes.setdefault((repeat, first), {})[shape] = tuple(sites)
        before = len(self.barred)
        for (repeat, first), crossing in shapes.items():
            others = shapes.get((repeat, -1 - first), {})
            for shape in crossing.keys() - others.keys():
                positions = {place for _, place in shape}
                self.barred |= {
                    (repeat, op)
                    for op, sites in self.sites.items()
                    if any(site.repeat == repeat and site.place in positions for site in sites)
                }
        return len(self.barred) > before

    def are_neighbours(self, a: Op, b: Op) -> bool:
        """Whether two ops are in the same repeats, or in neighbouring iterations of them."""
        differing = set(a.repeats) ^ set(b.repeats)
        if not differing:
            return True
        near = ({site.repeat for site in self.sites.get(op.id, ())} for op in (a, b))
        return differing <= set.intersection(*near)


def segments(
    repeats: Sequence[tuple[int, ...]], part: range, depth: int
) -> Iterator[tuple[int | None, range]]:
    """Contiguous ranges of `part` in one repeat at this depth (None: in none)."""

    def repeat_of(index: int) -> int | None:
        inside = repeats[index]
        return inside[depth] if depth < len(inside) else None

    for repeat, members in groupby(part, repeat_of):
        numbers = list(members)
        yield repeat, range(numbers[0], numbers[-1] + 1)


# -- the kernels that one kernel in the graph stands for -------------------------------------------


def kernel_modules(graph: OpGraph, ops: Sequence[int], lead: Op) -> tuple[str, ...]:
    """Module paths of the kernels that these ops stand for, as many in each path.

    lead: the one of them whose module counts.
    """
    if not graph.repeats:
        return (lead.module,)
    paths = [lead.module]
    first = graph.ops[ops[0]]
    for number in {*first.repeats, *lead.repeats}:
        repeat = graph.repeats[number]
        if repeat.container is not None:
            iterations = _iterations(first, lead, number, repeat.count)
            paths = [repeat.path(path, q) for path in paths for q in iterations]
    return tuple(dict.fromkeys(paths))


def _iterations(first: Op, other: Op, repeat: int, count: int) -> range:
    """The iterations of `other`, relative to it, in the kernels that begin with `first`.

    An op that is not in the repeat while the first one is, is in the iteration after it.
    """
    back = first.part in REVERSED
    if repeat not in first.repeats:
        return range(count - 1, count) if back else range(1)
    if repeat in other.repeats or back:
        return range(count)
    return range(1 - count, 1)


def resting_shares(graph: OpGraph, ops: Sequence[int]) -> dict[int, float]:
    """The assumptions that the kernels of these ops rest on, and which share of the kernels."""
    if not graph.repeats:
        return dict.fromkeys((a for op in ops for a in graph.ops[op].assumptions), 1.0)
    kernels_of: dict[int, set[tuple[int, int]]] = {}
    for op in ops:
        for position in range(len(graph.ops[op].assumptions)):
            for assumption, kernel in _assumed(graph, graph.ops[ops[0]], graph.ops[op], position):
                kernels_of.setdefault(assumption, set()).add(kernel)
    return {
        assumption: min(1.0, sum(1 / graph.repeats[r].count if r >= 0 else 1.0 for r, _ in kernels))
        for assumption, kernels in kernels_of.items()
    }


def _assumed(
    graph: OpGraph, first: Op, op: Op, position: int
) -> Iterator[tuple[int, tuple[int, int]]]:
    """An assumption of an op in each kernel that begins with `first`: (repeat, iteration).

    The repeat is -1 where all kernels rest on the same one.
    """
    shown, back = op.assumptions[position], first.part in REVERSED
    for number in dict.fromkeys((*op.repeats[::-1], *first.repeats[::-1])):
        twin = op if number in op.repeats else _twin(graph, first, op, number)
        copies = graph.repeats[number].assumptions.get(twin.assumptions[position]) if twin else None
        if not copies:
            continue
        if number not in first.repeats:
            yield copies[-1 if back else 0], (-1, 0)
            return
        if twin is not op:
            # A kernel that begins in one iteration ends in the one after it, the last one in `op`.
            copies = (shown, *copies[:-1]) if back else (*copies[1:], shown)
        for iteration, copy in enumerate(copies):
            yield copy, (number, iteration)
        return
    yield shown, (-1, 0)


def twin(graph: OpGraph, op: Op, inside: Op, repeat: int) -> Op | None:
    """The op like `op` in the iteration of `inside`, if `op` is in a neighbouring one."""
    start = stop = inside.id
    while start and repeat in graph.ops[start - 1].repeats:
        start -= 1
    while stop < len(graph.ops) and repeat in graph.ops[stop].repeats:
        stop += 1
    length = stop - start
    place = op.id - length if op.id >= stop else op.id + length
    if not start <= place < stop or graph.ops[place].target != op.target:
        return None
    return graph.ops[place]


def _twin(graph: OpGraph, first: Op, op: Op, repeat: int) -> Op | None:
    """The op like `op` in the iteration before it, which `first` is in too."""
    like = twin(graph, op, first, repeat) if op.id > first.id else None
    return like if like and len(like.assumptions) == len(op.assumptions) else None
