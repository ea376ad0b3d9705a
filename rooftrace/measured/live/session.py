"""A live session: a user's loop timed and profiled against its prediction, and its slow kernels."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from rooftrace._shown import short
from rooftrace.costmodels.estimates import Row
from rooftrace.costmodels.fusion import ExecutionModel, execution_model
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph, pattern_of
from rooftrace.hardware import Chip, load_chip
from rooftrace.measured.bench import machine
from rooftrace.measured.fit import NodeCheck, Validation
from rooftrace.measured.live import graphbook
from rooftrace.measured.live.graphbook import GraphBook, Price, total
from rooftrace.measured.live.notes import ItemCount, Notebook, StepNote, StepPattern, is_compiled
from rooftrace.measured.live.profiles import (
    FewSteps,
    ProfileCheck,
    chip_at_hand,
    device_of,
    outside_of,
    remarks,
)
from rooftrace.measured.live.results import Figures, LiveResult, OffKernel

_LAST = 1000
"""So many times are kept for the median."""


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0

    def add(self, other: _Sum) -> None:
        """Add the steps of another."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.samples += other.samples
        self.tokens += other.tokens


@dataclass
class StepTally:
    """Steps since it was made."""

    sums: dict[StepPattern, _Sum] = field(default_factory=dict)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    folded: _Sum = field(default_factory=lambda: _Sum())  # of patterns that are not kept
    folded_price: Price = field(default_factory=Price)
    unknown: _Sum = field(default_factory=lambda: _Sum())  # of these, those that have no price
    outside: float = 0.0  # s, between steps
    gaps: int = 0

    def add(self, pattern: StepPattern, seconds: float, counted: ItemCount) -> None:
        """Count one step."""
        step = _Sum(1, seconds, counted.samples, counted.tokens)
        self.sums.setdefault(pattern, _Sum()).add(step)
        self.last.append(seconds)

    def add_outside(self, seconds: float) -> None:
        """Count the time between two steps."""
        self.outside += seconds
        self.gaps += 1

    @property
    def patterns(self) -> int:
        """How many different steps are kept apart."""
        return len(self.sums)

    def fold(self, price_of: Callable[[StepPattern], Price | None]) -> None:
        """Price the steps, and keep their sums alone: of the most frequent one all is kept."""
        often = max(self.sums, key=lambda pattern: self.sums[pattern].steps)
        for pattern in [other for other in self.sums if other != often]:
            entry, price = self.sums.pop(pattern), price_of(pattern)
            (self.unknown if price is None else self.folded).add(entry)
            if price is not None:
                self.folded_price = total([self.folded_price, price.times(entry.steps)])

    @property
    def median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.last) if self.last else None

    def figures(self, price_of: Callable[[StepPattern], Price | None], chip: Chip) -> Figures:
        """The rates of the steps whose work is known."""
        priced = {pattern: price_of(pattern) for pattern in self.sums}
        known, unknown, prices = _Sum(), _Sum(), [self.folded_price]
        known.add(self.folded)
        unknown.add(self.unknown)
        for pattern, price in priced.items():
            entry = self.sums[pattern]
            (unknown if price is None else known).add(entry)
            if price is not None:
                prices.append(price.times(entry.steps))
        outside = self.outside / self.gaps if self.gaps else None
        if not known.steps:
            return Figures(  # rates that need no count of the work, of all steps
                steps=0,
                uncounted=unknown.steps,
                seconds=unknown.seconds / unknown.steps if unknown.steps else None,
                outside=outside,
                samples_per_s=_ratio(unknown.samples, unknown.seconds) or None,
                tokens_per_s=_ratio(unknown.tokens, unknown.seconds) or None,
            )
        sums, steps, seconds = total(prices), known.steps, known.seconds
        interval = (sums.low / steps, sums.high / steps)
        return Figures(
            steps=steps,
            uncounted=unknown.steps,
            seconds=seconds / steps,
            outside=outside,
            flops=sums.flops / steps,
            bytes=sums.bytes / steps,
            mfu=_ratio(sums.useful_s, seconds),
            hfu=_ratio(sums.matrix_s, seconds),
            bandwidth_share=_ratio(sums.bytes / chip.memory_bandwidth.value, seconds),
            samples_per_s=_ratio(known.samples, seconds) or None,
            tokens_per_s=_ratio(known.tokens, seconds) or None,
            expected=sums.expected / steps,
            interval=None if any(map(math.isnan, interval)) else interval,
            expected_mfu=_ratio(sums.useful_s, sums.expected),
        )


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


# -- session ---------------------------------------------------------------------------------------
# A loop of the user's own beside its prediction: steps timed as they run, a few profiled.

# -- marks -----------------------------------------------------------------------------------------
# Moments of a loop, and the seconds between two of them, without waiting for the device.
#
# On CUDA a moment is an event on the current stream: the host goes on, and the seconds are read
# when the device has passed both.  Elsewhere, and with a clock that the caller hands in, it is a
# number.


Mark = Any
"""A moment: a number of seconds, or a CUDA event."""


class HostMarks:
    """Moments by a clock of the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def now(self) -> Mark:
        """This moment."""
        return self._clock()

    def passed(self, mark: Mark) -> bool:
        """Whether the seconds until this moment can be read without waiting."""
        return True

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one moment to another."""
        return float(end - start)


class CudaMarks:
    """Moments of a CUDA device, each an event on the stream that is current in the loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Mark:
        """The moment at which the device has done what was queued so far."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: Mark) -> bool:
        """Whether the seconds until this moment can be read without waiting."""
        return bool(mark.query())

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one moment to another; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # torch gives milliseconds


def marks_for(device: torch.device, clock: Callable[[], float] | None) -> HostMarks | CudaMarks:
    """Moments of a device; by `clock` where the caller has one."""
    if clock is not None:
        return HostMarks(clock)
    return CudaMarks(device) if device.type == "cuda" else HostMarks()


# -- session ---------------------------------------------------------------------------------------


_P = ParamSpec("_P")
_T = TypeVar("_T")


_COUNTED = (
    "counted are the calls of the module, their backward and its optimizers; a loss or other work "
    "outside of the module is in the time alone"
)


@dataclass(slots=True)
class _Timed:
    """A step whose seconds are not read yet."""

    before: Mark | None  # the end of the step before; None where something else was between
    start: Mark
    end: Mark
    note: StepNote


class LiveSession:
    """Steps of a loop; `live` says how it is used.

    forward: how a call is run again on meta, where the loop tells its calls itself (`note_call`).
    counted: a sentence on what the counts have and have not.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        chip: str | Chip | None = None,
        execution: str | ExecutionModel | None = None,
        *,
        warmup: int = 3,
        profile: int = 2,
        kinds: int = 8,
        items: Callable[..., int] | None = None,
        graph: OpGraph | None = None,
        clock: Callable[[], float] | None = None,
        forward: graphbook.Forward | None = None,
        counted: str = _COUNTED,
    ) -> None:
        _check_counts(warmup=warmup, profile=profile, kinds=kinds)
        if graph is not None and not isinstance(graph, OpGraph):
            raise RequestError(
                f"graph={graph!r:.40}: expected an OpGraph, which rooftrace.trace and "
                "rooftrace.capture give"
            )
        self._device = device_of(modules)
        self.chip = chip_at_hand(self._device) if chip is None else load_chip(chip)
        if execution is None:
            execution = "compiled" if any(map(is_compiled, modules)) else "eager"
        self.execution = execution_model(execution)
        self._notebook = Notebook(modules, items, hooks=forward is None, most=_KEPT * kinds)
        self.book = GraphBook(
            self._notebook, self.chip, self.execution, kinds, graph, forward or graphbook.called
        )
        self._marks = marks_for(self._device, clock)
        self._about = counted
        self._warmup, self._few = warmup, FewSteps(self._device, profile)
        self._undo: contextlib.ExitStack | None = None  # of the step that runs
        self._start: Mark | None = None
        self._before: Mark | None = None  # the end of the last timed step
        self._count = self._profiled = 0
        self._waiting: deque[_Timed] = deque()
        self._all, self._window = StepTally(), StepTally()
        self._profile = ProfileCheck(self._few, self.book)

    # -- steps -------------------------------------------------------------------------------------

    def __enter__(self) -> LiveSession:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __str__(self) -> str:
        return str(self.result)

    def _repr_html_(self) -> str:
        return self.result._repr_html_()

    def __repr__(self) -> str:
        names = "+".join(type(module).__name__ for module in self._notebook.modules)
        text = f"{names} on {self.chip.name}, {self.execution.name}: {self._count:,} steps"
        return short(self, text)

    def __call__(self, step: Callable[_P, _T]) -> Callable[_P, _T]:
        """A function that does one step, with the session as its attribute `live`."""

        @functools.wraps(step)
        def stepped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.step():
                return step(*args, **kwargs)

        stepped.live = self  # type: ignore[attr-defined]
        return stepped

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step of the loop.  A step that raises is not counted.

        Raises RequestError inside of another step of the session.
        """
        self.begin()
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self) -> None:
        """A step begins here, for loops in which no block can stand around it."""
        if self._undo is not None:
            raise RequestError("live.step(): a step of this session runs already; end it first")
        with contextlib.ExitStack() as undo:
            if self._profiles:
                undo.enter_context(self._few.step())
            undo.enter_context(self._notebook.step())
            self._undo = undo.pop_all()
        self._start = self._marks.now()

    def end(self) -> None:
        """The step that began ends here."""
        if self._undo is None or self._start is None:
            raise RequestError("live: a step ends that did not begin")
        end, profiles = self._marks.now(), self._profiles
        self._undo.close()
        self._undo, before, self._before = None, self._before, end
        note = self._notebook.take()
        if profiles:
            self._few.ended(note)
            self._profiled += 1
            self._before = None
        elif self._count >= self._warmup:
            self._waiting.append(_Timed(before, self._start, end, note))
        else:
            self._before = None
        self._count += 1
        self._read(wait=False)

    def abandon(self) -> None:
        """The step that began is not counted; nothing happens where none did."""
        if self._undo is not None:
            self._undo.close()
            self._undo = self._before = None

    def note_call(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note a call of a module whose own calls are not seen."""
        self._notebook.begin(number, args, kwargs)

    def watch(self, output: Any) -> None:
        """Note which tensors of the output of the call that was noted last get a gradient."""
        self._notebook.watch(output)

    def close(self) -> None:
        """End what a loop that ended early left open."""
        self.abandon()
        self._few.stop()

    @property
    def _profiles(self) -> bool:
        return self._count >= self._warmup and self._few.active

    def _read(self, wait: bool) -> None:
        """Add the steps to the tallies that the device has passed."""
        while self._waiting and (wait or self._marks.passed(self._waiting[0].end)):
            step = self._waiting.popleft()
            seconds, pattern = self._marks.between(step.start, step.end), step.note.pattern
            if self._all.patterns >= _PATTERNS:
                self._all.fold(self.book.price)
            for tally in (self._all, self._window):
                tally.add(pattern, seconds, step.note.counted)
                if step.before is not None:
                    tally.add_outside(self._marks.between(step.before, step.start))

    # -- what they say -----------------------------------------------------------------------------

    @property
    def figures(self) -> Figures:
        """The rates of all timed steps; what is not priced yet is traced now."""
        return self._figures_of(self._all)

    def since_last(self) -> Figures:
        """The rates of the steps that ended since the last call."""
        self._read(wait=True)
        window, self._window = self._window, StepTally()
        return self._figures_of(window)

    def _figures_of(self, tally: StepTally) -> Figures:
        self._read(wait=True)
        self._before = None  # the loop waits here
        return tally.figures(self.book.price, self.chip)

    @property
    def graphs(self) -> tuple[tuple[OpGraph, int], ...]:
        """The graphs of the step that ran most often, and how often each ran in it."""
        self._figures_of(self._all)
        sums = self._all.sums
        if not sums:
            return ()
        return self.book.graphs(max(sums, key=lambda pattern: sums[pattern].steps))

    @property
    def result(self) -> LiveResult:
        """Everything that is known so far, also during the loop."""
        figures = self.figures
        checked = self._profile.checked()
        validation = checked if isinstance(checked, Validation) else None
        outside = self._few.by_name() if validation is None else outside_of(validation)
        return LiveResult(
            chip=self.chip,
            execution=self.execution.name,
            device=str(machine.device_facts(self._device)["name"]),
            figures=figures,
            median=self._all.median,
            warmups=min(self._count, self._warmup),
            profiled=self._profiled,
            off=off_kernels(validation) if validation else (),
            typical=typical_ratio(validation) if validation else None,
            outside_graph=outside,
            matched=validation.coverage if validation else None,
            notes=tuple(remarks(checked, self.book, self._device, self._about)),
            validation=validation,
        )


_PATTERNS = 10_000
"""So many different steps are kept apart before they are priced and added up."""
_KEPT = 4
"""Of so many times the kinds of calls that are traced the arguments are kept."""


def live(
    *modules: nn.Module,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    warmup: int = 3,
    profile: int = 2,
    kinds: int = 8,
    items: Callable[..., int] | None = None,
    graph: OpGraph | None = None,
    clock: Callable[[], float] | None = None,
) -> LiveSession:
    """Your own loop while it runs: MFU, rates and step time beside the prediction.

        with rt.live(model, chip="h100-sxm") as live:
            for batch in loader:
                with live.step():
                    train_step(batch)
        print(live)                     # live.figures.mfu, live.result.off

    Or `@rt.live(model, ...)` on the function of one step; the function then has it as `.live`.

    modules: those that a step calls, as it calls them (what torch.compile returned, DDP around it).
    Every call is noted with its sizes, settings, backward and the optimizer steps, and each kind of
    them is traced once on meta copies, when figures are first read; nothing of the loop changes.
    chip: a name or a file; by default the CUDA device's own, and a CPU is measured for 8 s.
    execution: compiled where the module is, else eager.  warmup: steps before anything is timed.
    profile: so many steps then go through torch.profiler (0: none); all others cost two clocks.
    kinds: calls of so many sizes are traced each; others are priced by a fit to these, which has to
    meet them all, or are traced up to twice as many, or are shown as not counted.
    items: a function of the arguments of the first module's call that says how many items it has;
    by default samples are the first size of its first tensor, tokens the ids in it.
    graph: that of the whole step (`rooftrace.capture`), in place of tracing the calls.
    clock: gives seconds, in place of the device's own events.

    Raises RequestError for what is no module, or on no CPU or CUDA device, for numbers that make no
    sense, and for a GPU whose chip cannot be told; UnknownChipError and ExecutionError.
    """
    return LiveSession(
        modules,
        chip,
        execution,
        warmup=warmup,
        profile=profile,
        kinds=kinds,
        items=items,
        graph=graph,
        clock=clock,
    )


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        least = 1 if name == "kinds" else 0
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise RequestError(f"{name}={count!r:.40}: expected a whole number from {least} on")


# -- offkernels ------------------------------------------------------------------------------------
# Which kernels of a profiled step are off: far slower than expected, most seconds lost first.


FAR = 1.5
"""Measured over expected seconds from which a kernel is off, where kernels typically keep to it."""
LEAST = 0.005
"""Share of a step's measured seconds that it must lose."""


def typical_ratio(validation: Validation) -> float | None:
    """Measured over expected seconds of a typical kernel; None where none was measured.

    It is the median, each kernel weighing as much as it was expected to take: few kernels that are
    far off do not move it.
    """
    ratios = sorted(
        (check.node.measured / check.node.predicted, check.node.predicted)
        for check in validation.nodes
        if check.node.measured and check.node.predicted > 0
    )
    half = sum(weight for _, weight in ratios) / 2
    for ratio, weight in ratios:
        half -= weight
        if half <= 0:
            return ratio
    return None


def off_kernels(validation: Validation) -> tuple[OffKernel, ...]:
    """The kernels that are off, equal ones in similar modules as one.

    Where kernels typically take longer than expected, one is off that is far beyond that.
    """
    typical = max(1.0, typical_ratio(validation) or 1.0)
    least = LEAST * validation.op_seconds
    graph = validation.estimate.graph if validation.estimate is not None else None
    off = [
        _off(check, graph)
        for check in validation.alike
        if check.node.measured is not None
        and check.node.measured > FAR * typical * check.node.predicted
        and check.node.miss > least
    ]
    return tuple(sorted(off, key=lambda kernel: (-kernel.lost, kernel.name, kernel.module)))


def _off(check: NodeCheck, graph: OpGraph | None) -> OffKernel:
    node = check.node
    return OffKernel(
        name=node.row.name,
        module=pattern_of(node.row.module),
        source=_source(node.row, graph),
        part=node.row.part,
        launches=node.row.count,
        measured=node.measured or 0.0,
        expected=node.predicted,
        reason=node.reason,
    )


def _source(row: Row, graph: OpGraph | None) -> str:
    """The line of the first op of a row that has one."""
    ops: Sequence[int] = row.ops if graph is not None else ()
    lines = (graph.ops[op].source for op in ops if graph is not None)
    return next(filter(None, lines), "")
