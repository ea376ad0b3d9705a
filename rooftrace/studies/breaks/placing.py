"""Compiled graphs of a step under Dynamo: which op runs in which, and why graphs end.

A trace and a run under Dynamo run the same code on the same sizes.  So ops of one line and one name
follow each other in the same order; where a line has other ops in one of the two (attention stands
as one op in a trace), its visits do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from rooftrace.graph import PARTS, REVERSED, GraphError, Op, OpGraph, marks

_FORWARD = PARTS[0]


@dataclass(frozen=True)
class PlacedStep:
    """A traced step, and the stretch of a run under Dynamo that each of its ops runs in.

    stretch_of: by op of the step written out; None for what is outside of the module's call (an
    optimizer).  Of a backward op it is the stretch whose ops it differentiates: autograd compiles
    the backward of each graph on its own.
    """

    graph: OpGraph
    stretches: tuple[Stretch, ...]
    stretch_of: tuple[int | None, ...]
    unplaced: int  # ops that run where a graph ends, and that no line tells to be in front of it
    shared: int  # backward ops of a line that is in several stretches: taken to be in one

    @cached_property
    def flat(self) -> OpGraph:
        """The step written out."""
        return self.graph.expand()

    @cached_property
    def order(self) -> tuple[int, ...]:
        """By op of the step written out: its number in the graph."""
        return tuple(_written_out(self.graph))

    def marked(self, *stretches: Joined, folded: bool = True) -> list[OpGraph]:
        """The step with a mark wherever a stretch ends: a graph for each way to join them.

        They are of one form: with repeats, where every iteration is cut alike in all of them.
        folded=False writes the step out in any case.
        """
        cuts = [self._cuts(joined) for joined in stretches]
        if folded and all(self._is_even(each) for each in cuts):
            return [
                marks.with_breaks(self.graph, {self.order[i]: eager for i, eager in each.items()})
                for each in cuts
            ]
        return [marks.with_breaks(self.flat, each) for each in cuts]

    def _cuts(self, joined: Joined) -> dict[int, bool]:
        """By op of the step written out that begins a stretch: whether that one is eager."""
        cuts: dict[int, bool] = {}
        now, eager = -1, False
        for index, old in enumerate(self.stretch_of):
            if old is None:
                if eager:
                    cuts[index], eager = False, False
                continue
            place = joined.place_of[old]
            if place == now:
                continue
            begins = joined.stretches[place].eager
            if (now >= 0 or begins) and not (eager and begins):
                cuts[index] = begins
            now, eager = place, begins
        return cuts

    def _is_even(self, cuts: dict[int, bool]) -> bool:
        """Whether all copies of an op are cut alike."""
        seen: dict[int, bool | None] = {}
        for index, number in enumerate(self.order):
            if seen.setdefault(number, cuts.get(index)) != cuts.get(index):
                return False
        return True


def placed(graph: OpGraph, run: DynamoRun) -> PlacedStep:
    """Place every op of a step in a stretch of a run of the same module and sizes."""
    flat = graph.expand() if graph.repeats else graph
    forward = [op for op in flat.ops if op.part == _FORWARD]
    known = _in_order(_by_lines(forward, run.ops))
    stretch_of: list[int | None] = [None] * len(flat.ops)
    unplaced = 0
    for op, (place, sure) in zip(forward, _filled(known), strict=True):
        stretch_of[op.id] = place
        unplaced += not sure and op.kind == "kernel"
    shared = _backward(flat, stretch_of)
    return PlacedStep(graph, run.stretches, tuple(stretch_of), unplaced, shared)


# -- forward ---------------------------------------------------------------------------------------


def _by_lines(ops: Sequence[Op], ran: Sequence[RanOp]) -> list[int | None]:
    """The stretch of each op, as far as its line and name tell it."""
    known: list[int | None] = [None] * len(ops)
    ours = _grouped(range(len(ops)), lambda i: (ops[i].source, ops[i].name))
    theirs = _grouped(range(len(ran)), lambda i: (ran[i].source, ran[i].name))
    left: set[str] = set()
    for key, places in ours.items():
        others = theirs.get(key, [])
        if len(places) == len(others):
            for place, other in zip(places, others, strict=True):
                known[place] = ran[other].stretch
        else:
            left.add(key[0])
    our_visits = _visits([op.source for op in ops])
    their_visits = _visits([op.source for op in ran])
    for source in left:
        _by_visits(
            known, our_visits[source], [[ran[i].stretch for i in v] for v in their_visits[source]]
        )
    return known


def _by_visits(
    known: list[int | None], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> None:
    """Place ops of a line, visit by visit, where all of a visit is in one stretch."""
    if len(ours) != len(theirs):
        every = {stretch for visit in theirs for stretch in visit}
        theirs = [list(every)] * len(ours)
    for visit, stretches in zip(ours, theirs, strict=True):
        if len(set(stretches)) == 1:
            for place in visit:
                if known[place] is None:
                    known[place] = stretches[0]


def _visits(sources: Sequence[str]) -> dict[str, list[list[int]]]:
    """By line, its visits: ops of it that follow one another."""
    visits: dict[str, list[list[int]]] = defaultdict(list)
    for source, members in groupby(range(len(sources)), lambda i: sources[i]):
        visits[source].append(list(members))
    return visits


def _grouped(items: Iterable[int], key: Callable[[int], Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def _in_order(known: Sequence[int | None]) -> list[int | None]:
    """The longest part of what is known whose stretches never go back; None for the rest."""
    ends: list[int] = []  # the last stretch of the best row of each length
    at: list[int] = []  # where that row ends
    before = [-1] * len(known)
    for place, stretch in enumerate(known):
        if stretch is None:
            continue
        length = bisect_right(ends, stretch)
        before[place] = at[length - 1] if length else -1
        ends[length : length + 1] = [stretch]
        at[length : length + 1] = [place]
    kept: list[int | None] = [None] * len(known)
    place = at[-1] if at else -1
    while place >= 0:
        kept[place] = known[place]
        place = before[place]
    return kept


def _filled(known: Sequence[int | None]) -> list[tuple[int, bool]]:
    """A stretch for every op, and whether it is sure: what lies between two ops of one is in it."""
    after: list[int | None] = [None] * len(known)
    following: int | None = None
    for place in range(len(known) - 1, -1, -1):
        following = known[place] if known[place] is not None else following
        after[place] = following
    filled: list[tuple[int, bool]] = []
    last: int | None = None
    for place, stretch in enumerate(known):
        if stretch is not None:
            last = stretch
            filled.append((stretch, True))
            continue
        behind = after[place]
        first = next((item for item in (last, behind) if item is not None), 0)
        filled.append((first, last is None or behind is None or last == behind))
    return filled


# -- backward --------------------------------------------------------------------------------------


def _backward(flat: OpGraph, stretch_of: list[int | None]) -> int:
    """Place backward ops with the forward ops of their module, call and line; how many of them
    could be in several stretches."""
    places: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for op in flat.ops:
        place = stretch_of[op.id]
        if op.part == _FORWARD and place is not None:
            places[op.module, op.call, op.source].add(place)
    shared, last = 0, max((p for p in stretch_of if p is not None), default=0)
    for op in flat.ops:
        if op.part not in REVERSED:
            continue
        several = places.get((op.module, op.call, op.source), {last})
        if last not in several:
            shared += len(several) > 1 and op.kind == "kernel"
            last = max((place for place in several if place < last), default=max(several))
        stretch_of[op.id] = last
    return shared


# -- marks -----------------------------------------------------------------------------------------


def _written_out(graph: OpGraph) -> Iterable[int]:
    """The numbers of ops in the order in which the step runs them, iteration after iteration."""

    def walk(part: range, depth: int) -> Iterable[int]:
        def repeat_of(number: int) -> int | None:
            inside = graph.ops[number].repeats
            return inside[depth] if depth < len(inside) else None

        for repeat, members in groupby(part, repeat_of):
            numbers = list(members)
            if repeat is None:
                yield from numbers
                continue
            inside = range(numbers[0], numbers[-1] + 1)
            for _ in range(graph.repeats[repeat].count):
                yield from walk(inside, depth + 1)

    return walk(range(len(graph.ops)), 0)


# -- What a run of torch.compile's front end (Dynamo) showed: compiled graphs, and why they ended --

BREAK, SKIP, LIMIT = "break", "skip", "recompile limit"
"""Kinds of causes.

break: a graph ends at a line, and the next one begins behind it.  skip: a whole function runs op by
op.  recompile limit: so does one that was compiled for as many different callers as Dynamo allows.
"""
KINDS = (BREAK, SKIP, LIMIT)


class DynamoError(RuntimeError):
    """Dynamo, or the code that it runs, failed: names the line and the error."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why compiled code ends at a line."""

    kind: str  # one of KINDS
    reason: str  # plain words
    source: str  # "file.py:12"
    module: str = ""  # the path of the module whose code it is, with its indices starred
    detail: str = ""  # what Dynamo says
    hints: tuple[str, ...] = ()  # what Dynamo advises
    times: int = 1  # how often it happens in a step

    @property
    def key(self) -> tuple[str, str]:
        """A key that is equal for the same cause."""
        return self.source, self.reason


@dataclass(frozen=True, slots=True)
class Stretch:
    """Ops that run one behind the other, in one call of a compiled graph or in none."""

    graph: int  # number of the compiled graph; -1 for code that Python runs op by op
    cause: int  # why it begins: its place in `DynamoRun.causes`; -1 for the begin of the step
    within: int = -1  # another cause without which that one would not be there; -1 for none

    @property
    def eager(self) -> bool:
        """Whether Python runs it op by op."""
        return self.graph < 0


@dataclass(frozen=True, slots=True)
class RanOp:
    """An op as it ran, in order."""

    name: str  # "aten.mm", without the overload
    source: str  # "file.py:12" of the user's line, as `Op.source`
    stretch: int  # its place in `DynamoRun.stretches`


@dataclass(frozen=True, slots=True)
class Recompiled:
    """A function that Dynamo compiled more than once: once for each kind of caller."""

    source: str  # "file.py:12" of its first line
    name: str
    times: int  # how often it was compiled
    reason: str = ""  # what differed the last time


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamoRun:
    """One step of a module under Dynamo, whose graphs ran as they were captured."""

    causes: tuple[Cause, ...]
    stretches: tuple[Stretch, ...]  # in order of running
    ops: tuple[RanOp, ...]
    graphs: int  # different compiled graphs
    graph_breaks: int  # as torch._dynamo.utils.counters["graph_break"] counts them: while compiling
    recompiled: tuple[Recompiled, ...] = ()
    real: bool = False  # whether it ran on numbers, because code asked for values
    notes: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        """How often a compiled graph is called in a step."""
        return sum(not stretch.eager for stretch in self.stretches)

    def verify(self) -> DynamoRun:
        """Return self if stretches follow one another and name causes that are there."""
        order = [op.stretch for op in self.ops]
        if order != sorted(order) or not set(order) <= set(range(len(self.stretches))):
            raise GraphError("ops of a run are not in the order of its stretches")
        for stretch in self.stretches:
            if not -1 <= stretch.cause < len(self.causes):
                raise GraphError(f"a stretch names cause {stretch.cause}, which is not there")
        return self


@dataclass(frozen=True, slots=True)
class Joined:
    """Stretches that are left when some causes are gone."""

    stretches: tuple[Stretch, ...]
    place_of: tuple[int, ...]  # for each stretch of the run, which of these it is in


def without(stretches: Sequence[Stretch], causes: Collection[int] = ()) -> Joined:
    """The stretches without these causes: what they part is one compiled graph.

    What another cause keeps apart stays apart.
    """
    gone = frozenset(causes)
    kept: list[Stretch] = []
    place_of: list[int] = []
    for stretch in stretches:
        now = stretch
        if not gone.isdisjoint((stretch.cause, stretch.within)):
            if kept and not kept[-1].eager:
                place_of.append(len(kept) - 1)
                continue
            # A graph of its own behind code in Python, for the reason that this code has.
            before = kept[-1] if kept else Stretch(-1, -1)
            now = Stretch(max(stretch.graph, 0), before.cause, before.within)
        kept.append(now)
        place_of.append(len(kept) - 1)
    return Joined(tuple(kept), tuple(place_of))
