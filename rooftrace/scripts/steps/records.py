"""Records of a script's run, graphs of turns joined from pieces, and records as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from rooftrace.graph import (
    Argument,
    Assumption,
    GraphFileError,
    Neighbour,
    Op,
    OpGraph,
    Ref,
    Repeat,
    Tensor,
    decoded_graph,
    graphs_bytes,
    in_order,
    refs,
)
from rooftrace.graph.formulas import GraphForm

TRAINING, INFERENCE = "training", "inference"
OURS = "rooftrace"
_SUMS = ("turns", "run", "by_form", "loading", "batches", "brought", "taken")
"""Fields that are summed over equal turns in several places."""


class TurnPiece(Struct, frozen=True):
    """A part of a stretch with its graph, and how often it ran in a row.

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
    copied from the host to the device, and back.  label: the call, in words.  shape: of the
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
        """A key that is equal for equal turns: kind, pieces, called modules."""
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
    """The form of a graph at any length, from graphs at some lengths.

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

    error: the name of its class.  text: its message; of an assertion without one, its line.
    where: "file:line" of the innermost line that is no installed library's, or "".  thread: that it
    ended, "" for the main one.  traceback: as Python prints it.  frames: its calls, outermost
    first.  causes: the errors that it came from, a line each.  choices: the last values chosen for
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
        """One graph of a turn of a stretch."""
        pieces = [(self.graphs[piece.graph], piece.times) for piece in stretch.pieces]
        return joined(pieces, training=stretch.kind == TRAINING, passes=stretch.passes)

    def by_phase(self) -> dict[str, OpGraph]:
        """The graphs of the turns that the others became alike, by phase, as `trace` gives them."""
        graphs: dict[str, OpGraph] = {}
        for stretch in self._steady():
            graph = self.graph_of(stretch)
            graphs.setdefault(graph.phase, graph)
        return graphs


# -- joining ---------------------------------------------------------------------------------------


_LASTING = ("weights", "gradients", "optimizer", "kv", "constants")
"""Roles of values that are the same ones in every piece of a turn, by their names."""


def joined(pieces: Sequence[tuple[OpGraph, int]], training: bool, passes: int = 1) -> OpGraph:
    """The graph of a turn: its pieces one after another, each as often in a row as it ran.

    pieces: at least one graph, and how often it ran.  A piece that ran several times stands once,
    in a repeat.  Weights, gradients and states of optimizers are one value in all pieces.
    training: whether the turn is a training step.  passes: equal passes over a batch that it has.
    """
    phase = "training" if training else pieces[0][0].phase
    if len(pieces) == 1 and pieces[0][1] == 1:
        graph = pieces[0][0]
        return graph.replace(phase=phase, workload=_workload([graph], passes))
    if not _rolled_alike([graph for graph, _ in pieces]):
        pieces = [(graph.expand(), times) for graph, times in pieces]
    turn = _Turn([times for _, times in pieces if times > 1])
    for graph, times in pieces:
        turn.add(graph, times)
    return turn.graph([graph for graph, _ in pieces], phase, passes).verify()


def _rolled_alike(graphs: Sequence[OpGraph]) -> bool:
    """Whether the layers that stand once in one graph stand once, as the same, in the others."""
    shown: dict[tuple[str, str], Any] = {}  # by role and name of a tensor: where it stands
    for graph in graphs:
        for value in graph.external:
            tensor = graph.values[value]
            if tensor.role not in _LASTING or not tensor.name:
                continue
            stacks = [graph.repeats[repeat] for repeat in tensor.repeats]
            names = [tensor.name]
            for stack in stacks:
                names = [stack.path(name, turn) for name in names for turn in range(stack.count)]
            key = tensor.name, tuple(map(_stack, stacks))
            if any(shown.setdefault((tensor.role, name), key) != key for name in names):
                return False
    return True


def _stack(repeat: Repeat) -> tuple[Any, ...]:
    """The layers that a repeat stands for."""
    return repeat.container, repeat.first, repeat.step, repeat.count


class _Turn:
    """The pieces so far, in the ids of the joined graph.

    times: how often each of the pieces runs that run several times; their repeats are the first.
    """

    def __init__(self, times: Sequence[int]) -> None:
        self.values: list[Tensor] = []
        self.ops: list[Op] = []
        self.repeats = [Repeat(id=place, count=count) for place, count in enumerate(times)]
        self.begun = 0  # of these repeats
        self._stacks: dict[Any, int] = {}  # repeats of layers, by the layers
        self.assumptions: dict[Any, Assumption] = {}
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self._lasting: dict[tuple[str, str], int] = {}  # values by role and name

    def add(self, graph: OpGraph, times: int) -> None:
        """One more piece."""
        outer = (self.begun,) if times > 1 else ()
        self.begun += len(outer)
        piece = _Piece(self, graph, outer)
        self.ops += piece.ops(len(self.ops))
        self.inputs += [i for i in piece.values(graph.inputs) if i not in self.inputs]
        self.outputs = piece.values(graph.outputs)  # the next piece reads them
        for value in (*graph.external, *graph.outputs):
            owner = graph.owner(value)
            if owner.role in _LASTING and owner.name:
                self._lasting[owner.role, owner.name] = piece.ids[value]

    def joined(self, tensor: Tensor) -> int | None:
        """The value that a lasting tensor of a further piece is."""
        if tensor.role not in _LASTING or not tensor.name:
            return None
        value = self._lasting.get((tensor.role, tensor.name))
        if value is None:
            return None
        joined = self.values[value]
        same = (joined.shape, joined.dtype, joined.stride) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride,
        )
        return value if same else None

    def place_of(self, repeat: Repeat, renamed: Callable[[Repeat, int], Repeat]) -> int:
        """The id of a repeat of a piece; layers of several pieces are one repeat."""
        number = len(self.repeats)
        if repeat.container is not None:
            number = self._stacks.setdefault(_stack(repeat), number)
        if number == len(self.repeats):
            self.repeats.append(renamed(repeat, number))
        return number

    def assumption(self, item: Assumption) -> int:
        """The number of an assumption; those that say the same are one."""
        key = item.kind, item.where, item.text, item.op, repr(item.value)
        return self.assumptions.setdefault(key, replace(item, id=len(self.assumptions))).id

    def graph(self, graphs: Sequence[OpGraph], phase: str, passes: int) -> OpGraph:
        """The joined turn.  graphs: its pieces."""
        first = graphs[0]
        return first.replace(
            phase=phase,
            values=tuple(self.values),
            ops=tuple(self.ops),
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            repeats=tuple(self.repeats),
            assumptions=tuple(self.assumptions.values()),
            workload=_workload(graphs, passes),
            **{name: _merged(graphs, name) for name in _BY_NAME},
        )


_BY_NAME = ("modules", "constants", "schemas", "calls", "groups", "mesh")
"""Fields of a graph that are mappings by name, alike in all pieces."""


def _merged(graphs: Sequence[OpGraph], name: str) -> dict[str, Any]:
    return {key: value for graph in graphs for key, value in getattr(graph, name).items()}


def _workload(graphs: Sequence[OpGraph], passes: int) -> Mapping[str, Any]:
    """The sizes of a turn: those of its first pass, the items of all, the optimizers that step."""
    sizes = dict(graphs[0].workload)
    names = [name for graph in graphs if (name := graph.workload.get("optimizer"))]
    sizes["optimizer"] = "+".join(dict.fromkeys(names)) or None
    if passes > 1 and "items" in sizes:
        sizes |= {"items": sizes["items"] * passes, "passes": passes}
    return sizes


class _Piece:
    """A piece in the ids of the joined graph.  Its repeats are inside of that of the piece."""

    def __init__(self, turn: _Turn, graph: OpGraph, outer: tuple[int, ...]) -> None:
        self._turn, self._graph, self._outer = turn, graph, outer
        self._assumed = {item.id: turn.assumption(item) for item in graph.assumptions}
        self.ids = self._numbered()
        self._inner = [turn.place_of(repeat, self._renamed) for repeat in graph.repeats]
        for value, tensor in enumerate(graph.values):
            if self.ids[value] == len(turn.values):
                turn.values.append(self._tensor(value, tensor))

    def _numbered(self) -> dict[int, int]:
        """The new ids of values: lasting ones are there, the others follow those before."""
        outside = set(self._graph.external)
        ids: dict[int, int] = {}
        count = len(self._turn.values)
        for value, tensor in enumerate(self._graph.values):
            joined = self._turn.joined(tensor) if value in outside else None
            ids[value] = count if joined is None else joined
            count += joined is None
        return ids

    def values(self, ids: Sequence[int]) -> list[int]:
        """The new ids of some values."""
        return [self.ids[value] for value in ids]

    def _tensor(self, value: int, tensor: Tensor) -> Tensor:
        """A value in its new place.  One that the piece makes, each of its iterations makes."""
        owner = self.ids[tensor.storage]
        if owner < len(self._turn.values):
            owner = self._turn.values[owner].storage
        inside = value in self._graph.producers
        return replace(
            tensor,
            storage=owner,
            repeats=(*(self._outer if inside else ()), *self._places(tensor.repeats)),
            then=self._beside(tensor.then),
        )

    def _places(self, repeats: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._inner[repeat] for repeat in repeats)

    def _beside(self, then: Neighbour | None) -> Neighbour | None:
        if then is None:
            return None
        return replace(then, repeat=self._inner[then.repeat], value=self.ids[then.value])

    def _renamed(self, repeat: Repeat, place: int) -> Repeat:
        """A repeat of the piece, with another id, that names values and assumptions by theirs."""
        return replace(
            repeat,
            id=place,
            names={self.ids[value]: names for value, names in repeat.names.items()},
            assumptions={
                self._assumed[number]: tuple(self._assumed[other] for other in others)
                for number, others in repeat.assumptions.items()
            },
        )

    def ops(self, first: int) -> list[Op]:
        """The ops of the piece, numbered from `first` on."""
        return [self._op(op, first + position) for position, op in enumerate(self._graph.ops)]

    def _op(self, op: Op, place: int) -> Op:
        arguments = {name: self._argument(item) for name, item in op.arguments.items()}
        return replace(
            op,
            id=place,
            arguments=arguments,
            inputs=tuple(refs(arguments)),
            outputs=tuple(self.values(op.outputs)),
            assumptions=tuple(sorted({self._assumed[number] for number in op.assumptions})),
            repeats=(*self._outer, *self._places(op.repeats)),
            holds=in_order(self._argument(ref) for ref in op.holds),
        )

    def _argument(self, item: Argument) -> Argument:
        if type(item) is Ref:
            return Ref(self.ids[item.id], self._beside(item.then), item.every)
        return tuple(map(self._argument, item)) if type(item) is tuple else item


# -- sending ---------------------------------------------------------------------------------------
# The record of a script as bytes: read from its process as from a file, and checked.

_FROM = "the process of the script"


def script_bytes(script: Script, derived: Sequence[Derived] = ()) -> bytes:
    """A script as bytes, for `script_of`.  derived: how graphs follow that are not sent."""
    left = {number for each in derived for number in each.places.values()}
    graphs = {str(i): graph for i, graph in enumerate(script.graphs) if i not in left}
    content = graphs_bytes(graphs), list(derived), replace(script, graphs=())
    return msgspec.msgpack.encode(content)


def script_of(content: bytes) -> Script:
    """The script of bytes.  Raises GraphFileError for those that `script_bytes` has not made."""
    try:
        sent, derived, script = msgspec.msgpack.decode(
            content, type=tuple[bytes, list[Derived], Script]
        )
    except msgspec.MsgspecError as error:
        raise GraphFileError(f"{_FROM}: no record of it: {error}") from error
    graphs = {int(name): graph for name, graph in _graphs(sent)}
    for each in derived:
        form = graph_form({length: graphs[number] for length, number in each.samples.items()})
        graphs.update({number: form.at((length,)) for length, number in each.places.items()})
    return replace(script, graphs=tuple(graph for _, graph in sorted(graphs.items())))


def graph_of(content: bytes) -> OpGraph:
    """The graph of bytes that `graphs_bytes` has made.  Raises GraphFileError, as `script_of`."""
    ((_, graph),) = _graphs(content)
    return graph


def _graphs(content: bytes) -> list[tuple[str, OpGraph]]:
    try:
        graphs = msgspec.json.decode(content, type=_Sent).graphs
    except msgspec.MsgspecError as error:
        raise GraphFileError(f"{_FROM}: no graphs: {error}") from error
    return [(name, decoded_graph(data, _FROM, name)) for name, data in graphs.items()]


class _Sent(msgspec.Struct):
    graphs: dict[str, dict[str, Any]]
