"""One graph of a whole turn, from the graphs of its pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from rooftrace.tracer.arguments import Argument, Neighbour, Ref, in_order, refs
from rooftrace.tracer.graph import Assumption, Op, OpGraph, Repeat, Tensor

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
            place = tensor.name, tuple(map(_stack, stacks))
            if any(shown.setdefault((tensor.role, name), place) != place for name in names):
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
        self.outputs = piece.values(graph.outputs)  # what a piece leaves, the next one reads
        for value in (*graph.external, *graph.outputs):
            owner = graph.owner(value)
            if owner.role in _LASTING and owner.name:
                self._lasting[owner.role, owner.name] = piece.ids[value]

    def known(self, tensor: Tensor) -> int | None:
        """The value that a lasting tensor of a further piece is."""
        if tensor.role not in _LASTING or not tensor.name:
            return None
        value = self._lasting.get((tensor.role, tensor.name))
        if value is None:
            return None
        there = self.values[value]
        same = (there.shape, there.dtype, there.stride) == (
            tensor.shape,
            tensor.dtype,
            tensor.stride,
        )
        return value if same else None

    def place_of(self, repeat: Repeat, renamed: Callable[[Repeat, int], Repeat]) -> int:
        """The id of a repeat of a piece; layers of several pieces are one repeat."""
        place = len(self.repeats)
        if repeat.container is not None:
            place = self._stacks.setdefault(_stack(repeat), place)
        if place == len(self.repeats):
            self.repeats.append(renamed(repeat, place))
        return place

    def assumption(self, item: Assumption) -> int:
        """The number of an assumption; those that say the same are one."""
        key = item.kind, item.where, item.text, item.op, repr(item.value)
        return self.assumptions.setdefault(key, replace(item, id=len(self.assumptions))).id

    def graph(self, graphs: Sequence[OpGraph], phase: str, passes: int) -> OpGraph:
        """The whole turn.  graphs: its pieces."""
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
    """A piece in the ids of the joined graph.  Its own repeats are inside of that of the piece."""

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
            known = self._turn.known(tensor) if value in outside else None
            ids[value] = count if known is None else known
            count += known is None
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
        return [self._op(op, first + place) for place, op in enumerate(self._graph.ops)]

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
