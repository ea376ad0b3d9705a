"""The turn of a script that is open, and the last turns that were equal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rooftrace.tracer.phases import stepping
from rooftrace.tracer.scripts.calls import Look, Result
from rooftrace.tracer.scripts.lengths import LengthTurn, Ops
from rooftrace.tracer.scripts.records import TurnPiece, Turns


@dataclass
class LoadedBatches:
    """What data loaders did for a turn."""

    seconds: float = 0.0
    batches: int = 0

    def add(self, seconds: float) -> None:
        """One more batch, after so many seconds."""
        self.seconds += seconds
        self.batches += 1


@dataclass
class OpenTurn:
    """The turn that is open."""

    kind: str
    label: str
    shape: tuple[int, ...] = ()  # of the first tensor of its first call
    light: bool = False  # no call had weights so far
    learnt: stepping.Learnt = field(default_factory=stepping.Learnt)
    recorded: bool = True  # False: it is taken to be like one that was
    calls: list[Look] = field(default_factory=list)
    by_form: LengthTurn | None = None  # what stands for it, if calls of other lengths do
    ops: Ops | None = None  # of its first call, where that changed nothing that its module holds
    after: list[Any] = field(default_factory=list)  # ops that followed it
    pieces: list[TurnPiece] = field(default_factory=list)
    backwards: int = 0  # how many of the calls were followed by a backward
    followed: int = 0  # calls up to the last one of these
    repeating: bool = False  # what runs is taken to be like the last piece
    loaded: LoadedBatches = field(default_factory=LoadedBatches)
    brought: int = 0
    taken: int = 0
    began: float = 0.0  # seconds of this machine's clock, for one that really runs
    helps: set[int] | None = field(default_factory=set)  # models, until one has gradients
    modules: set[int] = field(default_factory=set)  # that were called
    methods: frozenset[int] = frozenset()  # of modules, that made the first of these calls
    had: int = 0  # bytes that the host had brought when the last call began
    reached: dict[Any, float] = field(default_factory=dict)  # seconds up to where time was told

    @property
    def is_accumulated(self) -> bool:
        """Whether all calls look alike, each with a backward after it."""
        alike = all(look.key == self.calls[0].key for look in self.calls)
        return alike and self.backwards >= len(self.calls) - 1

    def repeat(self) -> None:
        """The last piece ran once more."""
        last = self.pieces[-1]
        self.pieces[-1] = TurnPiece(last.graph, last.times + 1)


@dataclass
class SteadyTurns:
    """The last turns of one kind, which were equal."""

    pieces: tuple[TurnPiece, ...] = ()
    calls: tuple[Any, ...] = ()
    alike: int = 0
    results: list[Result] = field(default_factory=list)
    stretch: Turns | None = None
    reached: dict[Any, float] = field(default_factory=dict)  # as of an open turn

    def answer(self, place: int, look: Look) -> Result | None:
        """What the call at this place of a turn gave; None where it looked otherwise."""
        if place < len(self.calls) and self.calls[place] == look.key:
            return self.results[place]
        return None


@dataclass
class Variety:
    """The kinds of turns of which one began like those before it and went on otherwise.

    From then on every turn of such a kind is recorded.  said: what was not counted, by kind.
    """

    kinds: set[str] = field(default_factory=set)
    said: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, before: int) -> None:
        """A turn of this kind, after so many, has begun alike and goes on otherwise."""
        self.kinds.add(kind)
        self.said[f"{kind} turns that differ"] = (
            f"{kind} turn {before + 1} began as the ones before it and went on otherwise: its "
            "first calls were not run and are not counted in it"
        )
