"""The graphs of a script's stretches: equal ones are kept once."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.phases import steps
from rooftrace.tracer.scripts.clocks import Prices
from rooftrace.tracer.scripts.recorders import ScriptRecorder
from rooftrace.tracer.scripts.records import Derived, Turns
from rooftrace.tracer.tape import META_KEY, Entry, Recorded, records


class Book:
    """The stretches of a run so far, and their graphs."""

    def __init__(self) -> None:
        self.graphs: list[OpGraph] = []
        self.stretches: list[Turns] = []
        self._kept: list[int] = []  # bytes from before each graph that it does not read
        self._places: dict[int, int] = {}  # of graphs, by the print of what was recorded
        self.derived: list[Derived] = []

    def graph(self, recorder: ScriptRecorder, root: Any, learnt: Any) -> int:
        """The place of the graph of what a recorder has recorded, which ends here."""
        recorder.settle(learnt.gradients)
        print_ = _print_of(recorder.graph)
        place = self._places.setdefault(print_, len(self.graphs))
        kept = _kept_bytes(recorder.graph)
        if place == len(self.graphs):
            self.graphs.append(_lowered(recorder, root, learnt))
            self._kept.append(kept)
        # The first step has less from before than those after it.
        elif kept > self._kept[place] and not self._is_sample(place):
            self.graphs[place] = _lowered(recorder, root, learnt)
            self._kept[place] = kept
        return place

    def derive(self, graph: OpGraph) -> int:
        """The place of a graph that follows from others."""
        self.graphs.append(graph)
        self._kept.append(0)
        return len(self.graphs) - 1

    def _is_sample(self, place: int) -> bool:
        return any(place in each.samples.values() for each in self.derived)

    def part(self, recorder: ScriptRecorder, root: Any, learnt: Any, prices: Prices) -> float:
        """Expected seconds of what a recorder has recorded so far; it goes on."""
        return prices.part(_print_of(recorder.graph), lambda: _lowered(recorder, root, learnt))

    def add(self, stretch: Turns) -> None:
        """One more turn, or several equal ones."""
        before = self.stretches[-1] if self.stretches else None
        if before is not None and before.key == stretch.key:
            self.stretches[-1] = before.and_also(stretch)
            return
        turns = sum(s.turns for s in self.stretches if s.kind == stretch.kind)
        self.stretches.append(replace(stretch, first=turns + 1))


def _lowered(recorder: ScriptRecorder, root: Any, learnt: Any) -> OpGraph:
    """The graph of what was recorded; the recorder that is on now sees nothing of it."""
    with _disable_current_modes():
        return steps.graph_of_step(recorder, root, learnt)


def _is_kept(node: fx.Node) -> bool:
    """Whether a node stands for a tensor from before that no op reads."""
    noted = node.meta.get(META_KEY)
    return (
        isinstance(noted, Entry) and noted.kind in (records.KEPT, "gradient") and not _readers(node)
    )


def _frees(node: fx.Node) -> bool:
    return str(node.target).startswith(marks.FREE_STORAGES)


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if not _frees(user)]


def _kept_bytes(graph: fx.Graph) -> int:
    """Bytes of all such tensors."""
    specs = [node.meta[META_KEY].spec for node in graph.nodes if _is_kept(node)]
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _look(spec: records.Spec) -> tuple[Any, ...]:
    return spec.shape, spec.stride, spec.dtype


def _print_of(graph: fx.Graph) -> int:
    """A number that two recordings share if the same ops ran on the same sizes, in one order."""
    places: dict[fx.Node, int] = {}
    seen: list[Any] = []
    storages: dict[int, int] = {}
    for node in graph.nodes:
        if _is_kept(node) or _frees(node):
            continue
        places[node] = len(places)
        inputs = tuple(places.get(item, -1) for item in node.all_input_nodes)
        noted = node.meta.get(META_KEY)
        look: Any = None
        if isinstance(noted, Recorded):
            origin = noted.origin
            compiled = noted.facts.get(marks.COMPILED), marks.ENTERS in noted.facts
            place = origin.module, origin.part, origin.function, compiled
            specs = [
                (*_look(s), storages.setdefault(s.storage, len(storages))) for s in noted.specs
            ]
            look = tuple(specs), place, noted.stream, repr(noted.collective)
        elif isinstance(noted, Entry):
            own = storages.setdefault(noted.spec.storage, len(storages))
            look = noted.kind, noted.name, *_look(noted.spec), own
        else:
            look = id(getattr(noted, "block", None)) and type(noted).__name__
        seen.append((node.op, str(node.target), inputs, look))
    return hash(tuple(seen))
