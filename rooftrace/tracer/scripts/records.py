"""What a run of a script was found to consist of: plain records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphforms import GraphForm
from rooftrace.tracer.scripts.joining import joined

TRAINING, INFERENCE = "training", "inference"
OURS = "rooftrace"
_SUMS = ("turns", "run", "by_form", "loading", "batches", "brought", "taken")
"""What equal turns in several places add up to."""


class TurnPiece(Struct, frozen=True):
    """A part of a stretch that has a graph of its own, and how often it ran in a row.

    graph: the place in `Script.graphs`.
    """

    graph: int
    times: int = 1


class Turns(Struct, frozen=True):
    """Equal turns of the script in a row: training steps, or calls without gradients.

    kind: training or inference.  first: the number of the first turn among those of its kind, from
    1.  turns: how many there were.  run: how many of them were recorded; the others were called
    with the same sizes, in the same order, as the last one recorded, or, by_form of them, with
    another length: their graph follows from those of lengths that were recorded.  loading: seconds
    that the host spent in data loaders; batches: how many batches they gave.  brought, taken: bytes
    copied from the host to the device, and back.  label: what was called, in words.  shape: of the
    first tensor of the first call, () without one.  passes: equal forward and backward passes of a
    turn.
    """

    kind: str
    pieces: tuple[TurnPiece, ...]
    first: int = 1
    turns: int = 1
    run: int = 1
    by_form: int = 0
    loading: float = 0.0
    batches: int = 0
    brought: int = 0
    taken: int = 0
    optimizers: tuple[str, ...] = ()
    label: str = ""
    shape: tuple[int, ...] = ()
    passes: int = 1

    @property
    def key(self) -> tuple[str, tuple[TurnPiece, ...], str]:
        """What equal turns have in common: the kind, the pieces, what was called."""
        return self.kind, self.pieces, self.label

    def and_also(self, other: Turns) -> Turns:
        """These turns and equal ones that came later, together."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMS})

    @property
    def last(self) -> int:
        """The number of the last turn."""
        return self.first + self.turns - 1


class FailedCall(Struct, frozen=True):
    """A call on the way to an error.  whose: script, library, torch, python or rooftrace."""

    file: str
    line: int
    function: str
    code: str  # of the line
    whose: str


class Derived(Struct):
    """Graphs that follow from recorded ones: equal ops, whose numbers are formulas of one length.

    samples: the places of those that the formulas are fitted to, by length; places: of the others.
    """

    samples: dict[int, int]
    places: dict[int, int] = field(default_factory=dict)


def graph_form(graphs: Mapping[int, OpGraph]) -> GraphForm:
    """What a graph is at any length, from those at some.

    Bytes of small constants that are not the same at all lengths are left out: they are values, of
    which no cost depends.  Raises StructureError where no formulas give these graphs.
    """
    all_ = graphs.values()
    plain: dict[tuple[int, ...], OpGraph] = {
        (length,): without_varying(graph, all_) for length, graph in graphs.items()
    }
    return GraphForm.fitted(("length",), plain)


def without_varying(graph: OpGraph, graphs: Iterable[OpGraph]) -> OpGraph:
    """A graph with those bytes of constants that it has in common with others."""
    kept = dict(graph.constants)
    for other in graphs:
        kept = {name: text for name, text in kept.items() if other.constants.get(name) == text}
    return graph if len(kept) == len(graph.constants) else graph.replace(constants=kept)


class Failure(Struct, frozen=True):
    """The error that ended a script.

    error: the name of its class.  text: what it says; of an assertion that says nothing, its line.
    where: "file:line" of the innermost line that is no installed library's, or "".  thread: that it
    ended, "" for the main one.  traceback: as Python prints it.  frames: its calls, outermost
    first.  causes: the errors that it came from, a line each.  choices: what was chosen last of
    unknown values, and how it is chosen otherwise.  below_device: it was raised in or below what
    stands for the device.
    """

    error: str
    text: str
    where: str = ""
    thread: str = ""
    traceback: str = ""
    frames: tuple[FailedCall, ...] = ()
    causes: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    below_device: bool = False

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.text else self.error


class Script(Struct, frozen=True):
    """A run of a script: its stretches in the order in which they ran, and their graphs.

    ended: why it ended (steps, end, exit, error).  said: how the emulated device answered what no
    trace can know, by kind.  seconds: the run took here.
    outside: ops that ran on the device before the first turn, or without any, about.
    rank: of how many processes, `world`, it was the one with this number.  failure: the error that
    ended it; None where none did.
    """

    name: str
    graphs: tuple[OpGraph, ...]
    stretches: tuple[Turns, ...]
    ended: str = "end"
    code: int = 0
    seconds: float = 0.0
    said: Mapping[str, str] = field(default_factory=dict)
    outside: int = 0
    rank: int = 0
    world: int = 1
    failure: Failure | None = None

    def of_kind(self, kind: str) -> tuple[Turns, ...]:
        """The stretches of one kind."""
        return tuple(stretch for stretch in self.stretches if stretch.kind == kind)

    @property
    def steady(self) -> Turns | None:
        """The training steps that the others became alike; of a script that does not train, the
        calls.  None for a script without any."""
        return next(self._steady(), None)

    def _steady(self) -> Iterator[Turns]:
        """Of each kind the longest stretch, the last of equals."""
        for kind in (TRAINING, INFERENCE):
            alike = self.of_kind(kind)
            if alike:
                yield max(reversed(alike), key=lambda stretch: stretch.turns)

    def graph_of(self, stretch: Turns) -> OpGraph:
        """One graph of a whole turn of a stretch."""
        pieces = [(self.graphs[piece.graph], piece.times) for piece in stretch.pieces]
        return joined(pieces, training=stretch.kind == TRAINING, passes=stretch.passes)

    def by_phase(self) -> dict[str, OpGraph]:
        """The graphs of the turns that the others became alike, by phase, as `trace` gives them."""
        graphs: dict[str, OpGraph] = {}
        for stretch in self._steady():
            graph = self.graph_of(stretch)
            graphs.setdefault(graph.phase, graph)
        return graphs
