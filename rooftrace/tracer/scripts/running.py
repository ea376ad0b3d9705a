"""Running a script to the end of its wanted steps, and what it was found to consist of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from rooftrace.hardware import Chip
from rooftrace.tracer.asking import names
from rooftrace.tracer.emulation import Device, emulate
from rooftrace.tracer.graph import Assumption, OpGraph
from rooftrace.tracer.graphfiles import graphs_bytes
from rooftrace.tracer.launching import (
    Ended,
    Ranks,
    call_apart,
    launched,
    understood,
)
from rooftrace.tracer.scripts import presenting, sending
from rooftrace.tracer.scripts.boundaries import Boundary
from rooftrace.tracer.scripts.clocks import Prices, SimulatedClock
from rooftrace.tracer.scripts.failing import failure_of
from rooftrace.tracer.scripts.metering import RecordedMemory
from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.scripts.recorders import ScriptRecorder
from rooftrace.tracer.scripts.records import Script
from rooftrace.tracer.scripts.replaying import GraphFinder
from rooftrace.tracer.scripts.stage import RecorderStage
from rooftrace.tracer.scripts.standing import DeviceTensors
from rooftrace.tracer.scripts.watching import watch, watch_marks
from rooftrace.tracer.values import Values
from rooftrace.tracer.vocabulary import UNRECORDED

FORKED = "a process that the script forked computes on the device: what it runs is not counted"


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """What is asked of a script.

    command: "train.py --flag", "torchrun ... train.py", as words.  chip: that it sees.  steps: it
    is ended after so many training steps; None: it runs to its end.  ranks: of how many processes
    this is the one with number `rank`; per_node: of how many on a node.  scratch: a folder in which
    the files that it writes come to lie.  assume: what is taken for unknown values (see `trace`).
    boundary: what begins a turn, one of `names.BOUNDARIES`; "mark=NAME" for a mark.
    """

    command: Sequence[str]
    chip: Chip
    steps: int | None = names.STEPS
    ranks: int | None = None
    rank: int = 0
    per_node: int | None = None
    scratch: str | os.PathLike[str] | None = None
    assume: Mapping[str, Any] | None = None
    boundary: str = names.BOUNDARIES[0]

    def run(self, seconds: Callable[[OpGraph], float] | None = None, stdout: Any = None) -> Script:
        """Run the script in a process of its own, on a chip that is not there.

        seconds: of a graph on the chip; with it the clocks that the script reads
        give simulated time.  stdout: where it prints; default `sys.stdout`.

        Raises RequestError for a command line that is none, or a mark that never came.  What the
        script raises is in `Script.failure`.
        """

        def answer(question: bytes) -> bytes:
            assert seconds is not None
            return repr(seconds(sending.graph_of(question))).encode()

        simulated = seconds is not None
        return sending.script_of(
            call_apart(run_here, self, simulated, answer=answer, stdout=stdout)
        )


def run_here(ask: Callable[[bytes], bytes], asked: ScriptRequest, simulated: bool) -> bytes:
    """Run a script in this process, which is its own; its record, as `sending` writes it.

    simulated: the clocks that it reads ask what graphs take.
    """
    line = understood(asked.command)
    where = Ranks.of(line, asked.ranks, asked.rank, asked.per_node)
    began = perf_counter()
    stops: list[Callable[[], None]] = []
    begins = Boundary.of(asked.boundary)
    run = RunWatch(where.local_rank, asked.steps, lambda: stops[0](), asked.assume, begins)
    said: dict[str, str] = {}

    def say(kind: str, text: str) -> None:
        said.setdefault(kind, text)

    def seconds(graph: OpGraph) -> float:
        return float(ask(graphs_bytes({"": graph})))

    device = replace(Device.of(asked.chip), count=max(where.local_world, 1))
    program = launched(line, where, asked.scratch)
    stops.append(program.stop)
    finder = run.finder
    program.at_end = finder.prove
    if simulated:
        finder.clock = SimulatedClock(
            Prices(seconds, finder.book.graphs), lambda: run.stage.leads, finder.elapsed
        )
    emulate(device, RecordedMemory(run.stage), finder.clock, where.local_rank, say, finder.told)
    if isinstance(finder.clock, SimulatedClock):
        finder.clock.tell()
    ended = run.watched(program)
    if isinstance(finder.clock, SimulatedClock):
        said["simulated clock"] = finder.clock.said
    if ended.exception is None:
        finder.check()
    said.update(ended.assumed)
    said.update(finder.variety.said)
    said.update(finder.lengths.said())
    script = run.script(" ".join((line.program, *line.arguments)), began, ended, said)
    return sending.script_bytes(script, finder.book.derived)


class RunWatch:
    """Everything that records one run; `finder` has what was found.

    index: of the device that the script sees.  wanted: steps, after which `stop` is called.
    """

    def __init__(
        self,
        index: int,
        wanted: int | None,
        stop: Callable[[], None],
        assume: Mapping[str, Any] | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        self.values = Values(assume=assume or {})
        self.shapes = Shapes()
        self.shown = torch.device("cuda", index)
        self.device_tensors = DeviceTensors(self.shapes)
        self.optimizers = Optimizers()
        self.stage = RecorderStage(self._recorder)
        self.finder = GraphFinder(
            self.stage, self.shapes, self.optimizers, wanted, stop, boundary=boundary
        )

    def _recorder(self, record: bool) -> ScriptRecorder:
        return ScriptRecorder(
            self.values,
            record,
            self.shown,
            self.shapes,
            self.device_tensors,
            lambda: self.finder.differentiated(),
        )

    def watched(self, program: Callable[[], Ended]) -> Ended:
        """Run a program, and watch what it does."""
        finder = self.finder
        watch(finder)
        watch_marks(finder.marked)
        presenting.move_in_place()
        presenting.show_devices(self.shown, self.shapes)
        presenting.show_saved()
        presenting.compare_checkpoints()
        self.optimizers.watch(
            lambda: self.stage.recorder,
            finder.before_step,
            finder.stepped,
            lambda: finder.learnt,
        )
        self.stage.open()
        ended = program()
        with torch._C.DisableTorchFunction():
            finder.end()
        self.stage.close()
        return ended

    def script(self, name: str, began: float, ended: Ended, said: Mapping[str, str]) -> Script:
        """The record of the run."""
        graphs = tuple(map(_of_script, self.finder.book.graphs))
        chosen = self.values.otherwise()
        said = {**said, "choices": " ".join(chosen)} if ended.code and chosen else said
        return Script(
            name=name,
            graphs=tuple(map(_short, graphs)) if self.device_tensors.forked else graphs,
            stretches=tuple(self.finder.book.stretches),
            ended=ended.reason,
            code=ended.code,
            seconds=perf_counter() - began,
            said=dict(said),
            outside=self.stage.unrecorded,
            rank=ended.ranks.rank,
            world=ended.ranks.world,
            failure=failure_of(ended, chosen),
        )


def _of_script(graph: OpGraph) -> OpGraph:
    """The graph, which says that it is of a script."""
    return graph.replace(provenance={**graph.provenance, "script": True})


def _short(graph: OpGraph) -> OpGraph:
    """The graph, which says that a forked process computed, too."""
    number = max((item.id for item in graph.assumptions), default=-1) + 1
    forked = Assumption(id=number, kind=UNRECORDED, where="", text=FORKED)
    return graph.replace(assumptions=(*graph.assumptions, forked))
