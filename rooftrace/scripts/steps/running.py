"""Runs a script to its last wanted step: its record, its error, memory, and CUDA graphs."""

from __future__ import annotations

import itertools
import os
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import torch

from rooftrace.errors import TraceError, is_ours
from rooftrace.graph import UNRECORDED, Assumption, OpGraph, graphs_bytes
from rooftrace.hardware import Chip
from rooftrace.hardware.units import plural
from rooftrace.scripts.fake_cuda import Device, emulate
from rooftrace.scripts.launch import Ended, Ranks, launched, understood
from rooftrace.scripts.steps import presenting, records
from rooftrace.scripts.steps.book import Book, Prices, SimulatedClock
from rooftrace.scripts.steps.boundaries import Boundary, BoundaryFinder
from rooftrace.scripts.steps.calls import Look, ModuleCall
from rooftrace.scripts.steps.keeping import Optimizers
from rooftrace.scripts.steps.recorders import ScriptRecorder
from rooftrace.scripts.steps.records import INFERENCE, OURS, TRAINING, FailedCall, Failure, Script
from rooftrace.scripts.steps.watching import OpenTurn, watch, watch_marks
from rooftrace.tracer import names, source, torch_private
from rooftrace.tracer.phases import call_apart
from rooftrace.tracer.recording import META_KEY, Recorded
from rooftrace.tracer.values import Values

# -- failures --------------------------------------------------------------------------------------

_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = sysconfig.get_path("stdlib")
_MOST = 8
"""Lines of a way that are shown: the first ones, and the last."""
_WIDEST = 120
"""Letters of a line of code that are shown."""
_FAULT = (
    "It was raised in or below what stands for the device here.  If the script runs on a real one, "
    "this is a fault of rooftrace, or something that it does not do: keep the script, `pip freeze` "
    "and what --traceback prints, for its maintainers."
)


class ScriptError(TraceError):
    """A script raised an error that it did not catch.

    `script` is the recording up to then, with the error (`script.failure`); the cause
    (`__cause__`) says its traceback.  The first line of the message says where and what; the next
    ones the way there, and how to choose other values for unknown ones.
    """

    def __init__(self, script: Script) -> None:
        turns = sum(stretch.turns for stretch in script.stretches)
        after = f"after {plural(turns, 'turn')}" if turns else "before the end of a turn"
        rank = f", in rank {script.rank} of {script.world}" if script.world > 1 else ""
        failure = script.failure or Failure("SystemExit", str(script.code))
        thread = f", in thread {failure.thread}" if failure.thread else ""
        at = f", at {failure.where}" if failure.where else ""
        refused = f"; {script.said['refused']}" if "refused" in script.said else ""
        first = f"{script.name} failed {after}{rank}{thread}{at}: {failure}{refused}"
        fault = [_FAULT] if failure.below_device else []
        super().__init__("\n".join((first, *_way(failure), *failure.choices, *fault)))
        self.script = script
        self.__cause__ = RuntimeError(f"in the process of the script:\n{failure.traceback}")


def failure_of(ended: Ended, choices: Sequence[str] = ()) -> Failure | None:
    """The error that ended a program; None where none did.

    choices: values chosen for unknown ones before it, and how to choose others.
    """
    error = ended.exception
    if error is None:
        return None
    frames = _frames(error)
    script_frames = [frame for frame in frames if frame.whose == "script"] or [
        frame for frame in frames if frame.whose == "library"
    ]
    text = str(error)
    if not text and isinstance(error, AssertionError) and frames:
        text = frames[-1].code
    return Failure(
        error=type(error).__name__,
        text=text,
        where=f"{script_frames[-1].file}:{script_frames[-1].line}" if script_frames else "",
        thread=ended.thread,
        traceback="".join(traceback.format_exception(error)),
        frames=frames,
        causes=tuple(map(_cause, itertools.islice(_causes(error), 3))),
        choices=tuple(choices),
        below_device=_is_below_device(error, frames),
    )


def _is_below_device(error: BaseException, frames: Sequence[FailedCall]) -> bool:
    """Whether an error was raised in or below the emulated device, and seldom is the user's:
    sizes that do not fit, and missing modules, are errors on a real one, too."""
    callees = itertools.takewhile(lambda frame: frame.whose not in _USERS, reversed(frames))
    if is_ours(error) or not any(frame.whose == OURS for frame in callees):
        return False
    usual = isinstance(error, ImportError | IndexError | RuntimeError | ValueError)
    return not usual or isinstance(error, NotImplementedError) or "meta" in str(error).lower()


_USERS = ("script", "library")


def _frames(error: BaseException) -> tuple[FailedCall, ...]:
    """The calls that led to an error, outermost first."""
    calls = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        calls.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>"))
    frames = (
        FailedCall(
            call.filename, call.lineno or 0, call.name, call.line or "", _whose(call.filename)
        )
        for call in calls
    )
    passes = isinstance(error, ModuleNotFoundError)  # an import leads through code of ours
    return tuple(frame for frame in frames if not passes or frame.whose != OURS)


def _whose(file: str) -> str:
    """Whose code a file is: rooftrace, torch, library (installed), python or script."""
    owner = source.whose(file)
    if owner or any(part in file for part in _INSTALLED):
        return owner or "library"
    return "python" if file.startswith(("<", _STDLIB)) else "script"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors from which an error came, or while handling which it did."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return
        seen.add(id(before))
        yield before
        error = before


def _cause(error: BaseException) -> str:
    frames = _frames(error)
    text = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    return f"which came from {text}" + (f", at{_line(frames[-1])[1:]}" if frames else "")


def _way(failure: Failure) -> list[str]:
    """Lines for the calls from the script's innermost one on; neighbours that are in torch, Python
    or here are one line, but for the last call."""
    script_frames = [at for at, frame in enumerate(failure.frames) if frame.whose == "script"]
    lines: list[str] = []
    calls = failure.frames[script_frames[-1] if script_frames else 0 :]
    for of_users, group in itertools.groupby(calls, lambda frame: frame.whose in _USERS):
        shown = list(group)
        if not of_users:
            last = shown.pop() if shown[-1] is calls[-1] else None
            counts = Counter(frame.whose for frame in shown)
            left_out = ", ".join(f"{plural(n, 'call')} in {whose}" for whose, n in counts.items())
            lines += [f"  ... {left_out}"] if left_out else []
            shown = [last] if last else []
        lines += map(_line, shown)
    if len(lines) > _MOST:
        half = _MOST // 2
        lines[half : 1 - half] = [f"  ... {plural(len(lines) - 2 * half + 1, 'line')} more"]
    return lines + [f"  {cause}" for cause in failure.causes]


def _line(frame: FailedCall) -> str:
    code = f": {frame.code[:_WIDEST]}" if frame.code else ""
    return f"  {source.relative(frame.file)}:{frame.line} in {frame.function}{code}"


# -- running ---------------------------------------------------------------------------------------

FORKED = "a process that the script forked computes on the device: what it runs is not counted"


@dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """The request for a script.

    command: "train.py --flag", "torchrun ... train.py", as words.  chip: that it sees.  steps: it
    is ended after so many training steps; None: it runs to its end.  ranks: of how many processes
    this is the one with number `rank`; per_node: of how many on a node.  scratch: a folder in which
    the files that it writes come to lie.  assume: values taken for unknown ones (see `trace`).
    boundary: the start of a turn, one of `names.BOUNDARIES`; "mark=NAME" for a mark.
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
        """Run the script in a separate process, on an emulated chip.

        seconds: of a graph on the chip; with it the clocks that the script reads
        give simulated time.  stdout: where it prints; default `sys.stdout`.

        Raises RequestError for a command line that is none, or a mark that never came.  What the
        script raises is in `Script.failure`.
        """

        def answer(question: bytes) -> bytes:
            assert seconds is not None
            return repr(seconds(records.graph_of(question))).encode()

        simulated = seconds is not None
        return records.script_of(
            call_apart(run_here, self, simulated, answer=answer, stdout=stdout)
        )


def run_here(ask: Callable[[bytes], bytes], request: ScriptRequest, simulated: bool) -> bytes:
    """Run a script in this process, which it has for itself; its record, as `sending` writes it.

    simulated: the clocks that it reads give the expected time of graphs.
    """
    line = understood(request.command)
    where = Ranks.of(line, request.ranks, request.rank, request.per_node)
    began = perf_counter()
    begins = Boundary.of(request.boundary)
    reports: dict[str, str] = {}

    def say(kind: str, text: str) -> None:
        reports.setdefault(kind, text)

    def seconds(graph: OpGraph) -> float:
        return float(ask(graphs_bytes({"": graph})))

    device = replace(Device.of(request.chip), count=max(where.local_world, 1))
    program = launched(line, where, request.scratch)
    recorder = ScriptRecorder(
        Values(assume=request.assume or {}), torch.device("cuda", where.local_rank)
    )
    finder = GraphFinder(recorder, Optimizers(), request.steps, program.stop, boundary=begins)
    program.at_end = finder.prove
    if simulated:
        finder.clock = SimulatedClock(
            Prices(seconds, finder.book.graphs), lambda: finder.leads, finder.elapsed
        )
    emulate(
        device, RecordedMemory(recorder), finder.clock, where.local_rank, say, finder.graph_event
    )
    if isinstance(finder.clock, SimulatedClock):
        finder.clock.tell()

    def made(ended: Ended) -> bytes:
        with torch_private.DisableTorchFunction():
            finder.end()
        if isinstance(finder.clock, SimulatedClock):
            reports["simulated clock"] = finder.clock.said
        if ended.exception is None:
            finder.check()
        reports.update(ended.assumed)
        reports.update(finder.variety.said)
        reports.update(finder.lengths.said())
        name = " ".join((line.program, *line.arguments))
        script = _script(name, perf_counter() - began, finder.book, recorder, ended, reports)
        return records.script_bytes(script, finder.book.derived)

    finder.begin()
    return program(made)


def _script(
    name: str,
    seconds: float,
    book: Book,
    recorder: ScriptRecorder,
    ended: Ended,
    reports: Mapping[str, str],
) -> Script:
    """The record of a run."""
    graphs = tuple(map(_of_script, book.graphs))
    chosen = recorder.values.otherwise()
    reports = {**reports, "choices": " ".join(chosen)} if ended.code and chosen else reports
    return Script(
        name=name,
        graphs=tuple(map(_short, graphs)) if recorder.device_tensors.forked else graphs,
        stretches=tuple(book.stretches),
        ended=ended.reason,
        code=ended.code,
        seconds=seconds,
        said=dict(reports),
        outside=recorder.unrecorded,
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


# -- metering --------------------------------------------------------------------------------------
# Memory of the device that is not there, as a script may ask for it while it runs.


class RecordedMemory:
    """Bytes of the device that are alive, by the storages of recorders.

    They are counted where the script asks, so a peak between two questions is not seen: `peak` is
    the largest answer since the last reset.  The report has the peaks of the steps.
    """

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self._peak = 0

    def allocated(self) -> int:
        """Bytes alive now."""
        now = self._recorder.alive_bytes()
        self._peak = max(self._peak, now)
        return now

    def peak(self) -> int:
        """The most requested bytes since the last reset."""
        return max(self._peak, self.allocated())

    def reset_peak(self) -> None:
        """The peak becomes the bytes alive now."""
        self._peak = 0
        self.allocated()


# -- replaying -------------------------------------------------------------------------------------
# CUDA graphs of a script: a capture is no turn; a replay is one, or a part of one.


_LABEL = "CUDAGraph.replay()"


class GraphFinder(BoundaryFinder):
    """A finder that receives CUDA graphs, too.

    Calls during a capture run, whatever they look like, and are part of no turn.
    """

    _before: Counter[int] | None = None  # steps of optimizers before the capture that runs
    _seen = 0  # ops that were recorded before the replay that runs
    _replays = False  # a replay runs: modules that ops of it call are parts of it

    def begin(self) -> None:
        """From here on this process is watched, for good."""
        watch(self)
        watch_marks(self.marked)
        presenting.move_in_place()
        presenting.show_devices(self._recorder.shown, self._recorder.device_tensors.shapes)
        presenting.show_saved()
        presenting.compare_checkpoints()
        self._optimizers.watch(self._recorder, self.before_step, self.stepped, lambda: self.learnt)
        self._recorder.__enter__()

    def graph_event(self, event: Literal["capture", "captured", "replay", "replayed"]) -> None:
        """A capture or a replay begins, or has ended."""
        with torch_private.DisableTorchFunction():
            if event == "capture":
                self._end_whole()
                self._before = Counter(self._optimizers.steps)
                self._aside()
            elif event == "captured":
                self._aside()
                self._optimizers.steps, self._before = self._before or Counter(), None
            elif self._before is None and event == "replay":
                self._replay()
                self._replays = True
            elif self._before is None:
                self._replays = False
                self._replayed(self._replayed_steps())

    def call(self, made: ModuleCall) -> Any:
        """A module is called from outside of any module."""
        if self._before is not None or self._replays:
            return made.run()
        return super().call(made)

    def _stepped_here(self) -> None:
        if self._before is None:
            super()._stepped_here()

    def _end_whole(self) -> None:
        turn = self._turn
        if turn is not None and self._is_whole(turn):
            self._finish(turn)

    def _aside(self) -> None:
        """Outside of turns, the recording is dropped."""
        if self._turn is None:
            self._renew()

    def _replay(self) -> None:
        """A graph is about to be replayed: a separate turn, or a part of the open one."""
        self._end_whole()
        look, turn = Look(_LABEL, plain=False), self._turn
        if turn is None:
            kind = TRAINING if self._optimizers.has_any else INFERENCE
            if self._has_run_enough(kind):
                self._stop()
            turn = self._begin(OpenTurn(kind, _LABEL), look)
        elif not turn.recorded:
            self._record_rest(turn)
        turn.calls.append(look)
        self._seen = len(self._recorder.graph.nodes)

    def _replayed_steps(self) -> set[str]:
        """The classes of the optimizers whose ops were replayed."""
        names = set()
        for position, node in enumerate(self._recorder.graph.nodes):
            noted = node.meta.get(META_KEY)
            if position < self._seen or not isinstance(noted, Recorded):
                continue
            if noted.origin.part == "optimizer":
                names.add(noted.origin.function)
        return names

    def _replayed(self, classes: Collection[str]) -> None:
        """A replay has ended, in which optimizers of these classes have stepped."""
        for key, name in self._optimizers.names().items():
            if name in classes:
                self._optimizers.steps[key] += 1
                if self._turn is not None:
                    self._turn.learnt.optimizers.append(name.lower())
