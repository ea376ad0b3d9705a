"""What a run of torch.compile's front end (Dynamo) showed: compiled graphs, and why they ended."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rooftrace.tracer.graph import GraphError

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
        """What makes two causes the same one."""
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
