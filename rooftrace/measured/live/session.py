"""A live session: a loop timed and profiled against its prediction, and its slow kernels."""

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
    NOT_PROFILED,
    FewSteps,
    checked,
    chip_at_hand,
    device_of,
    outside_of,
    remarks,
)
from rooftrace.measured.live.results import Figures, LiveResult, OffKernel

_LAST = 1000
"""Times that are kept for the median."""


@dataclass(slots=True)
class _StepSum:
    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0

    def add(self, other: _StepSum) -> None:
        """Add the steps of another."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.samples += other.samples
        self.tokens += other.tokens


@dataclass
class StepTally:
    """Sums of timed steps."""

    sums: dict[StepPattern, _StepSum] = field(default_factory=dict)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    folded: _StepSum = field(default_factory=_StepSum)  # of priced patterns that are not kept
    folded_price: Price = field(default_factory=Price)
    unknown: _StepSum = field(default_factory=_StepSum)  # of patterns without a price
    outside: float = 0.0  # s, between steps
    gaps: int = 0

    def add(self, pattern: StepPattern, seconds: float, counted: ItemCount) -> None:
        """Count one step."""
        step = _StepSum(1, seconds, counted.samples, counted.tokens)
        self.sums.setdefault(pattern, _StepSum()).add(step)
        self.last.append(seconds)

    def add_outside(self, seconds: float) -> None:
        """Count the time between two steps."""
        self.outside += seconds
        self.gaps += 1

    @property
    def patterns(self) -> int:
        """The number of different steps that are kept apart."""
        return len(self.sums)

    def fold(self, price_of: Callable[[StepPattern], Price | None]) -> None:
        """Price the steps and keep only their sums, except for the most frequent one."""
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
        """The rates of the steps of known work."""
        priced, unknown, prices = _StepSum(), _StepSum(), [self.folded_price]
        priced.add(self.folded)
        unknown.add(self.unknown)
        for pattern, entry in self.sums.items():
            price = price_of(pattern)
            (unknown if price is None else priced).add(entry)
            if price is not None:
                prices.append(price.times(entry.steps))
        outside = self.outside / self.gaps if self.gaps else None
        if not priced.steps:
            return Figures(  # rates of all steps that need no price
                steps=0,
                uncounted=unknown.steps,
                seconds=unknown.seconds / unknown.steps if unknown.steps else None,
                outside=outside,
                samples_per_s=_ratio(unknown.samples, unknown.seconds) or None,
                tokens_per_s=_ratio(unknown.tokens, unknown.seconds) or None,
            )
        sums, steps, seconds = total(prices), priced.steps, priced.seconds
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
            samples_per_s=_ratio(priced.samples, seconds) or None,
            tokens_per_s=_ratio(priced.tokens, seconds) or None,
            expected=sums.expected / steps,
            interval=None if any(map(math.isnan, interval)) else interval,
            expected_mfu=_ratio(sums.useful_s, sums.expected),
        )


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


# -- marks -----------------------------------------------------------------------------------------
# On CUDA a mark is an event on the current stream: the host does not wait, and seconds are read
# when the device has passed both.  Elsewhere, and with a clock of the caller, it is a number.


Mark = Any
"""A moment: a number of seconds, or a CUDA event."""


class HostMarks:
    """Moments by a clock of the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now: Callable[[], Mark] = clock

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
        """The moment at which the device has finished the work queued so far."""
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
    """Moments of a device, or of the caller's clock."""
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
class _UnreadStep:
    """A step whose seconds are not read yet."""

    before: Mark | None  # the end of the step before; None after an untimed step
    start: Mark
    end: Mark
    note: StepNote


class LiveSession:
    """Steps of a loop; `live` says how it is used.

    forward: runs a call again on meta, where the loop notes its calls (`note_call`).
    counted: a sentence on the counted work.
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
        self._counted = counted
        self._warmup, self._few = warmup, FewSteps(self._device, profile)
        self._undo: contextlib.ExitStack | None = None  # of the step that runs
        self._start: Mark | None = None
        self._before: Mark | None = None  # the end of the last timed step
        self._count = self._profiled = 0
        self._waiting: deque[_UnreadStep] = deque()
        self._all, self._window = StepTally(), StepTally()
        self._check: Validation | str = NOT_PROFILED

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
        """Begin a step, for loops in which no `with` block can contain it."""
        if self._undo is not None:
            raise RequestError("live.step(): a step of this session runs already; end it first")
        with contextlib.ExitStack() as undo:
            if self._profiles:
                undo.enter_context(self._few.step())
            undo.enter_context(self._notebook.step())
            self._undo = undo.pop_all()
        self._start = self._marks.now()

    def end(self) -> None:
        """End the step that began."""
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
            self._waiting.append(_UnreadStep(before, self._start, end, note))
        else:
            self._before = None
        self._count += 1
        self._read(wait=False)

    def abandon(self) -> None:
        """Leave the step that began uncounted, if there is one."""
        if self._undo is not None:
            self._undo.close()
            self._undo = self._before = None

    def note_call(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note a call of a module without hooks."""
        self._notebook.begin(number, args, kwargs)

    def watch(self, output: Any) -> None:
        """Note the tensors of the output of the last call that get a gradient."""
        self._notebook.watch(output)

    def close(self) -> None:
        """End the step and the profiler of a loop that ended early."""
        self.abandon()
        self._few.stop()

    @property
    def _profiles(self) -> bool:
        return self._count >= self._warmup and self._few.active

    def _read(self, wait: bool) -> None:
        """Add the steps that the device has passed to the tallies."""
        while self._waiting and (wait or self._marks.passed(self._waiting[0].end)):
            step = self._waiting.popleft()
            seconds, pattern = self._marks.between(step.start, step.end), step.note.pattern
            if self._all.patterns >= _PATTERNS:
                self._all.fold(self.book.price)
            for tally in (self._all, self._window):
                tally.add(pattern, seconds, step.note.counted)
                if step.before is not None:
                    tally.add_outside(self._marks.between(step.before, step.start))

    # -- results -----------------------------------------------------------------------------------

    @property
    def figures(self) -> Figures:
        """The rates of all timed steps; unpriced parts are traced now."""
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
        """(graph, count) of the parts of the most frequent step."""
        self._figures_of(self._all)
        sums = self._all.sums
        if not sums:
            return ()
        return self.book.graphs(max(sums, key=lambda pattern: sums[pattern].steps))

    @property
    def result(self) -> LiveResult:
        """The results so far, also during the loop."""
        figures = self.figures
        if self._check == NOT_PROFILED:
            self._check = checked(self._few, self.book)
        validation = self._check if isinstance(self._check, Validation) else None
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
            notes=tuple(remarks(self._check, self.book, self._device, self._counted)),
            validation=validation,
        )


_PATTERNS = 10_000
"""Different steps that are kept apart before they are priced and added up."""
_KEPT = 4
"""Kinds of calls whose arguments are kept, over kinds that are traced."""


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
    """Your loop while it runs: MFU, rates and step time beside the prediction.

        with rt.live(model, chip="h100-sxm") as live:
            for batch in loader:
                with live.step():
                    train_step(batch)
        print(live)                     # live.figures.mfu, live.result.off

    Or `@rt.live(model, ...)` on the function of one step; the function then has it as `.live`.

    modules: the modules that a step calls (the result of torch.compile, the DDP wrapper).  Every
    call is noted with its sizes, settings, backward and the optimizer steps, and each kind of calls
    is traced once on meta copies, when figures are first read; the loop does not change.
    chip: a name or a file; by default that of the CUDA device, and a CPU is measured for 8 s.
    execution: compiled where the module is, else eager.  warmup: steps before anything is timed.
    profile: number of steps under torch.profiler (0: none); each other step costs two clocks.
    kinds: number of kinds of calls that are traced; others are priced by a fit to these that meets
    them all, or are traced, up to twice as many, or are shown as not counted.
    items: a function of the arguments of the first module's call: its number of items; by default
    samples are the first size of its first tensor, tokens the ids in it.
    graph: of the step (`rooftrace.capture`), in place of tracing the calls.
    clock: gives seconds, in place of events of the device.

    Raises RequestError for arguments that are no module, or on no CPU or CUDA device, for numbers
    that make no sense, and for a GPU of unknown chip; UnknownChipError and ExecutionError.
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


# -- off kernels -----------------------------------------------------------------------------------


FAR = 1.5
"""Measured over expected seconds from which a kernel is off, over the typical ratio if above 1."""
LEAST = 0.005
"""Least share of a step's measured seconds that an off kernel loses."""


def typical_ratio(validation: Validation) -> float | None:
    """Median of measured over expected seconds, weighted by expected ones; None without kernels.

    A few kernels that are far off do not move it.
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
    """The kernels that are far slower than expected, equal ones in similar modules as one.

    Most lost seconds are first.
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
