"""The graphs of a script's stretches, and the clocks that the script sees."""

from __future__ import annotations

import inspect
import math
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from msgspec.structs import replace
from torch import fx

from rooftrace.graph import OpGraph, marks
from rooftrace.hardware.units import format_time
from rooftrace.scripts.steps.recorders import ScriptRecorder
from rooftrace.scripts.steps.records import Derived, TurnPiece, Turns
from rooftrace.tracer.phases import steps
from rooftrace.tracer.recording import META_KEY, Entry, Recorded, original_of, put, taperecords
from rooftrace.tracer.torch_private import disable_current_modes

# -- clocks ----------------------------------------------------------------------------------------
# The time that a script sees: that of this machine, or that of the chip and its system.
#
# Simulated time passes as on this machine before the first turn.  From then on what recording
# and of the script's Python is left out.  Time passes by what turns are
# expected to take on the device, data loaders where they take longer than the turn that runs
# meanwhile, and by sleeps of the script.

_CLOCKS = ("time", "perf_counter", "monotonic")
"""Functions of the standard library that give seconds, each with one for nanoseconds."""
_BUILTIN = type(perf_counter)
_READ = 1e-7
"""Seconds that a read of the clock takes."""
_WAITS = 1000
"""So many reads in a row while nothing runs, and the script is taken to wait for time to pass."""


class HostClock:
    """That of this machine: the device is done as soon as its work is launched."""

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def device_seconds(self) -> float:
        """The time of this machine; seconds from an unknown beginning."""
        return perf_counter()

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds."""

    def began(self) -> None:
        """A turn begins."""

    def ended(self, pieces: Sequence[TurnPiece]) -> None:
        """A turn of these pieces has ended."""


class Prices:
    """Seconds of graphs on the device.  seconds: of one.  graphs: those of the run so far."""

    def __init__(self, seconds: Callable[[OpGraph], float], graphs: Sequence[OpGraph]) -> None:
        self._seconds, self._graphs = seconds, graphs
        self._of: dict[Any, float] = {}  # by the place of a graph, or the print of a part of one

    def part(self, print_: int, graph: Callable[[], OpGraph]) -> float:
        """Seconds of a part of a turn, of which `graph` makes the graph."""
        key = "part", print_
        if key not in self._of:
            self._of[key] = self._seconds(graph())
        return self._of[key]

    def total(self, pieces: Sequence[TurnPiece]) -> float:
        """Seconds of these pieces."""
        for piece in pieces:
            if piece.graph not in self._of:
                self._of[piece.graph] = self._seconds(self._graphs[piece.graph])
        return sum(self._of[piece.graph] * piece.times for piece in pieces)


class SimulatedClock(HostClock):
    """That of the device: who reads it is taken to wait for all work that was launched.

    leads: whether the running thread makes turns.  elapsed: seconds that have run of the open
    turn, None where none is open.
    """

    def __init__(
        self, prices: Prices, leads: Callable[[], bool], elapsed: Callable[[Prices], float | None]
    ) -> None:
        self._prices, self._leads, self._elapsed = prices, leads, elapsed
        self._began = self._read = perf_counter()  # of this machine; when it was last read
        self._open = False  # whether a turn was open then
        self._done = 0.0  # simulated seconds when the open turn began
        self._waited = 0.0  # since then, apart from recorded work
        self._loading = 0.0  # of data loaders since then: the device works meanwhile
        self._now = 0.0  # as last read
        self._ran, self._reads = -1.0, 0  # the seconds run then, and how many reads found that
        self._real = 0.0  # seconds of this machine that count

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch, after so many seconds."""
        self._since_read()
        self._real += seconds
        self._loading += seconds
        self._waited = max(self._waited, self._loading - (self._elapsed(self._prices) or 0.0))

    def began(self) -> None:
        """A turn begins."""
        self.ended(())

    def ended(self, pieces: Sequence[TurnPiece]) -> None:
        """A turn of these pieces has ended."""
        self._done += self._prices.total(pieces) + self._waited
        self._waited = self._loading = 0.0

    def device_seconds(self) -> float:
        """Simulated seconds since the beginning of the run."""
        if self._leads():  # another thread reads the last time of this one
            elapsed = self._elapsed(self._prices)
            self._open, self._ran = elapsed is not None, self._done + (elapsed or 0.0)
            self._now = max(self._now, self._ran + self._waited)
        return self._now

    def host_seconds(self) -> float:
        """Simulated seconds, for who reads a clock of the host: a read takes a moment."""
        if not self._leads():
            return self._now
        before = self._ran, self._open
        self.device_seconds()
        self._reads = self._reads + 1 if before == (self._ran, self._open) else 0
        real = self._since_read()
        if self._reads > _WAITS or (self._reads and not self._open):
            self._pass(real)
        self._waited += _READ
        self._now = max(self._now, self._ran + self._waited)
        return self._now

    def _pass(self, real: float) -> None:
        self._real += real
        self._waited += real

    def _since_read(self) -> float:
        """Seconds of this machine since this was last called."""
        last, self._read = self._read, perf_counter()
        return self._read - last

    def _sleep(self, seconds: float) -> None:
        original_of(time, "sleep")(seconds)
        if self._leads():
            self._since_read()
            self._reads = 0
            self._pass(seconds)

    @property
    def said(self) -> str:
        """A sentence on the time of this machine that the simulated time leaves out."""
        left = perf_counter() - self._began - self._real
        return (
            f"the time that the script saw is that of the chip: {format_time(left)} of this "
            "machine, of recording and of the script's own Python, are left out of it, and who "
            "reads a clock is taken to wait for the device"
        )

    def tell(self) -> None:
        """From here on functions of `time` give simulated time."""
        clocks: Any = time
        stand_ins: dict[str, Any] = {"sleep": self._sleep}
        for name in _CLOCKS:
            offset = original_of(clocks, name)()
            stand_ins[name] = _from(self.host_seconds, offset, 1.0)
            stand_ins[f"{name}_ns"] = _from(self.host_seconds, offset, 1e9)
        put(timeit.Timer, {"__init__": _timer_by_default})
        for home, names in _holders({original_of(clocks, name): name for name in stand_ins}):
            put(home, {n: stand_ins[names[n]] for n in names})


def _timer_by_default(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for the method of `timeit.Timer`: its default is the clock as it is now."""
    init = original_of(timeit.Timer, "__init__")
    bound = inspect.signature(init).bind(self, *args, **kwargs)
    if bound.arguments.get("timer", perf_counter) is perf_counter:
        bound.arguments["timer"] = timeit.default_timer
    init(*bound.args, **bound.kwargs)


def _holders(clocks: dict[Any, str]) -> Iterator[tuple[Any, dict[str, str]]]:
    """Modules that hold some of these functions, under which names: not those of Python, which wait
    for other threads by them, nor ours."""
    for name, module in list(sys.modules.items()):
        first = name.partition(".")[0]
        if module in (time, timeit) or first not in {"rooftrace", *sys.stdlib_module_names}:
            held = list(getattr(module, "__dict__", {}).items())
            names = {key: clocks[v] for key, v in held if type(v) is _BUILTIN and v in clocks}
            if names:
                yield module, names


def _from(seconds: Callable[[], float], offset: float, scale: float) -> Callable[[], float]:
    if scale == 1.0:
        return lambda: offset + seconds()
    return lambda: int((offset + seconds()) * scale)


# -- book ------------------------------------------------------------------------------------------
# The graphs of a script's stretches: equal ones are kept once.


class Book:
    """The stretches of a run so far, and their graphs."""

    def __init__(self) -> None:
        self.graphs: list[OpGraph] = []
        self.stretches: list[Turns] = []
        self._kept: list[int] = []  # bytes from before each graph that it does not read
        self._places: dict[int, int] = {}  # of graphs, by the print of the recording
        self.derived: list[Derived] = []

    def graph(self, recorder: ScriptRecorder, root: Any, learnt: Any) -> int:
        """The place of the graph of a recorder's recording, which ends here."""
        recorder.settle(learnt.gradients)
        print_ = _print_of(recorder.graph)
        number = self._places.setdefault(print_, len(self.graphs))
        kept = _kept_bytes(recorder.graph)
        if number == len(self.graphs):
            self.graphs.append(_lowered(recorder, root, learnt))
            self._kept.append(kept)
        # The first step has less from before than those after it.
        elif kept > self._kept[number] and not any(
            number in each.samples.values() for each in self.derived
        ):
            self.graphs[number] = _lowered(recorder, root, learnt)
            self._kept[number] = kept
        return number

    def derive(self, graph: OpGraph) -> int:
        """The place of a graph that follows from others."""
        self.graphs.append(graph)
        self._kept.append(0)
        return len(self.graphs) - 1

    def part(self, recorder: ScriptRecorder, root: Any, learnt: Any, prices: Prices) -> float:
        """Expected seconds of a recorder's recording so far; it goes on."""
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
    """The graph of the recording; the active recorder sees nothing of it."""
    with disable_current_modes():
        return steps.graph_of_step(recorder, root, learnt)


def _is_kept(node: fx.Node) -> bool:
    """Whether a node stands for a tensor from before that no op reads."""
    noted = node.meta.get(META_KEY)
    return (
        isinstance(noted, Entry)
        and noted.kind in (taperecords.KEPT, "gradient")
        and not _readers(node)
    )


def _frees(node: fx.Node) -> bool:
    return str(node.target).startswith(marks.FREE_STORAGES)


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if not _frees(user)]


def _kept_bytes(graph: fx.Graph) -> int:
    """Bytes of all such tensors."""
    specs = [node.meta[META_KEY].spec for node in graph.nodes if _is_kept(node)]
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _look(spec: taperecords.Spec) -> tuple[Any, ...]:
    return spec.shape, spec.stride, spec.dtype


def _print_of(graph: fx.Graph) -> int:
    """A number that two recordings share if the same ops ran on the same sizes, in one order."""
    positions: dict[fx.Node, int] = {}
    seen: list[Any] = []
    storages: dict[int, int] = {}
    for node in graph.nodes:
        if _is_kept(node) or _frees(node):
            continue
        positions[node] = len(positions)
        inputs = tuple(positions.get(item, -1) for item in node.all_input_nodes)
        noted = node.meta.get(META_KEY)
        look: Any = None
        if isinstance(noted, Recorded):
            origin = noted.origin
            compiled = noted.facts.get(marks.COMPILED), marks.ENTERS in noted.facts
            origin_key = origin.module, origin.part, origin.function, compiled
            specs = [
                (*_look(s), storages.setdefault(s.storage, len(storages))) for s in noted.specs
            ]
            look = tuple(specs), origin_key, noted.stream, repr(noted.collective)
        elif isinstance(noted, Entry):
            storage = storages.setdefault(noted.spec.storage, len(storages))
            look = noted.kind, noted.name, *_look(noted.spec), storage
        else:
            look = id(getattr(noted, "block", None)) and type(noted).__name__
        seen.append((node.op, str(node.target), inputs, look))
    return hash(tuple(seen))
