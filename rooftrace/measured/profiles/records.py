"""The records of a trace: kernels, CPU ops, annotations and steps; no files, no graphs.

Times are in seconds, `start` since the earliest event of the trace.  A trace has millions of
events, so tables keep columns and make a record on access.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar, overload

NONE = -1
"""No index, no id."""

PROFILER_STEP = "ProfilerStep"
"""The name of the ranges that the profiler's schedule puts around steps."""

WHOLE = "the whole trace"
"""The name of the step of a trace without marks."""

# Rules that put a kernel into a step.
LAUNCH, OP, ORDER, DEVICE, BESIDE, START, EARLIER = (
    "are in the step of their launch",
    "are in the step of the op that launched them",
    "have no launch in the trace: put between the launches whose numbers are around theirs",
    "are put into the step in whose range on the device they begin: the trace has no launches",
    "have no launch and no number in the trace: put into the step of the kernel that began before",
    "have no launch in the trace: put where they begin",
    "are in no step: launched before the trace begins",
)
OUTSIDE = "are in no step: launched outside of all of them"

Shape = tuple[Any, ...]
"""Sizes of a tensor, or shapes of a list of tensors."""


@dataclass(frozen=True, slots=True)
class CallInputs:
    """The arguments of a call; each tuple has one entry for each argument, () for no tensor."""

    shapes: tuple[Shape, ...] = ()
    types: tuple[str, ...] = ()  # "float", "c10::BFloat16", "Scalar", "TensorList", "" ...
    strides: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOp:
    """One call of an operator on the host."""

    index: int  # in the table of ops
    name: str  # "aten::mm"
    inputs: CallInputs | None  # None where shapes were not recorded
    start: float  # s
    duration: float  # s
    self_duration: float  # s, without the ops that it called
    thread: int  # number of the thread in the trace
    sequence: int | None  # a backward op shares it with its forward op
    backward: bool  # whether autograd ran it
    external: int | None  # number by which kernels refer to the op
    parent: int | None  # index of the op that called it
    modules: tuple[str, ...]  # nn.Module calls around it, outermost first ("Linear_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One piece of work on a device: a kernel, a copy or a fill."""

    index: int  # in the table of kernels
    name: str
    kind: str  # one of KINDS: kernel, memcpy, memset
    device: int
    stream: int
    start: float  # s, on the device
    duration: float  # s
    correlation: int | None  # number that it shares with the runtime call that launched it
    external: int | None  # number that it shares with its op
    grid: tuple[int, ...] | None  # blocks by dimension
    block: tuple[int, ...] | None  # threads of a block by dimension
    bytes: int | None  # byte moved by a copy; None for a kernel
    op: int | None  # index of the innermost op that launched it; None: unknown
    launched: float | None  # s, when the host launched it


@dataclass(frozen=True, slots=True)
class Annotation:
    """A range of the program: "ProfilerStep#3", or a name passed to `record_function`."""

    name: str
    start: float  # s
    duration: float  # s
    thread: int
    external: int | None = None

    @property
    def end(self) -> float:
        """When it ends [s]."""
        return self.start + self.duration


Record = TypeVar("Record", CpuOp, Kernel)


class Numbered:
    """Values with numbers; equal values are kept once."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of `item`; a new item gets the next number."""
        number = self._numbers.get(item)
        if number is None:
            number = self._numbers[item] = len(self.items)
            self.items.append(item)
        return number


class Records(Sequence[Record], Generic[Record]):
    """Records as columns; `table[i]` makes the i-th."""

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Record]:
        return (self.record(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Record, ...]: ...

    def __getitem__(self, index: int | slice) -> Record | tuple[Record, ...]:
        if isinstance(index, slice):
            return tuple(self.record(i) for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        return self.record(index % len(self))

    start: array[float]

    def record(self, index: int) -> Record:
        """The record at `index`, which is in range."""
        raise NotImplementedError


class Ops(Records[CpuOp]):
    """CPU ops in the order of the file."""

    def __init__(self) -> None:
        self.names, self.call_inputs, self.stacks = Numbered(), Numbered(), Numbered()
        self.name, self.inputs, self.modules = array("i"), array("i"), array("i")
        self.start, self.duration, self.self_duration = array("d"), array("d"), array("d")
        self.thread, self.parent, self.backward = array("i"), array("i"), array("b")
        self.sequence, self.external = array("q"), array("q")

    def record(self, index: int) -> CpuOp:
        """The op at `index`."""
        inputs, stack = self.inputs[index], self.modules[index]
        return CpuOp(
            index=index,
            name=self.names.items[self.name[index]],
            inputs=None if inputs == NONE else self.call_inputs.items[inputs],
            start=self.start[index],
            duration=self.duration[index],
            self_duration=self.self_duration[index],
            thread=self.thread[index],
            sequence=_optional(self.sequence[index]),
            backward=bool(self.backward[index]),
            external=_optional(self.external[index]),
            parent=_optional(self.parent[index]),
            modules=() if stack == NONE else self.stacks.items[stack],
        )


class Kernels(Records[Kernel]):
    """Kernels, copies and fills in the order of the file."""

    def __init__(self) -> None:
        self.names, self.shapes = Numbered(), Numbered()
        self.name, self.kind, self.shape = array("i"), array("b"), array("i")
        self.device, self.stream = array("i"), array("q")
        self.start, self.duration, self.launched = array("d"), array("d"), array("d")
        self.correlation, self.external, self.bytes = array("q"), array("q"), array("q")
        self.op = array("i")

    def record(self, index: int) -> Kernel:
        """The kernel at `index`."""
        grid, block = self.shapes.items[self.shape[index]]
        launched = self.launched[index]
        return Kernel(
            index=index,
            name=self.names.items[self.name[index]],
            kind=KINDS[self.kind[index]],
            device=self.device[index],
            stream=self.stream[index],
            start=self.start[index],
            duration=self.duration[index],
            correlation=_optional(self.correlation[index]),
            external=_optional(self.external[index]),
            grid=grid,
            block=block,
            bytes=_optional(self.bytes[index]),
            op=_optional(self.op[index]),
            launched=None if launched < 0 else launched,
        )


KINDS = ("kernel", "memcpy", "memset")


def _optional(number: int) -> int | None:
    return None if number == NONE else number


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One step of a trace."""

    name: str
    start: float  # s
    duration: float  # s, on the host
    busy: float | None  # s in which the device worked for it, overlaps once; None: no kernels
    gaps: tuple[float, ...]  # s of each pause between two of its kernels
    ops: Sequence[int]  # indices, in order of their start
    kernels: Sequence[int]  # indices, in order of their launch
    waited: float = 0.0  # s of `duration` spent on kernels launched before the trace begins

    @property
    def seconds(self) -> float:
        """Seconds of the step: of the slower of host and device."""
        return max(self.duration - self.waited, self.busy or 0.0)

    @property
    def busy_share(self) -> float | None:
        """Share of the step in which the device works; None without kernels."""
        return self.busy / self.seconds if self.busy is not None and self.seconds else None

    @property
    def idle_share(self) -> float | None:
        """Share of the step in which the device waits; None without kernels."""
        return None if self.busy_share is None else 1 - self.busy_share


@dataclass(frozen=True, slots=True)
class Placement:
    """The kernels that one rule assigned to steps, or to none."""

    how: str  # the rule, in words
    kernels: int
    copies: int  # copies and fills
    seconds: float  # s, of all of them
    names: tuple[str, ...] = ()  # of up to three of them, most seconds first


@dataclass(frozen=True, slots=True)
class OpSum:
    """All calls of one op with the same input shapes: totals over the trace."""

    name: str
    shapes: tuple[Shape, ...] | None  # None where shapes were not recorded
    count: int
    device_seconds: float | None  # s, of the kernels that it launched directly; None: no kernels
    self_cpu_seconds: float  # s, on the host, without the ops that it called

    @property
    def seconds(self) -> float:
        """Device seconds; in a trace without kernels self seconds of the host."""
        return self.self_cpu_seconds if self.device_seconds is None else self.device_seconds


class Cut(Protocol):
    """Makes steps from parts of a trace."""

    waits: Sequence[tuple[float, float]]  # (start, end) [s] of calls that wait for the device

    def __call__(self, name: str, start: float, end: float) -> TraceStep:
        """The step with all calls and launches of the host from `start` until `end`."""

    def all(self) -> TraceStep:
        """One step of everything."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A trace of torch.profiler as records."""

    source: str  # path of the file
    ops: Ops
    kernels: Kernels
    annotations: tuple[Annotation, ...]  # by start
    steps: tuple[TraceStep, ...]
    devices: Mapping[int, str]  # names by number
    marked_by: str = ""  # name of the ranges around its steps; "" without such ranges
    cut: Cut | None = field(default=None, repr=False)  # makes other steps of the trace
    placements: tuple[Placement, ...] = ()  # of kernels in steps
    left_out: tuple[tuple[str, int], ...] = ()  # values that could not be read: words, how often
    processes: int = 1  # of its ops: more than one where files of ranks were joined

    @property
    def damage(self) -> str:
        """A sentence on values that could not be read; "" without any."""
        if not self.left_out:
            return ""
        count = sum(times for _, times in self.left_out)
        values = f"{count:,} values" if count > 1 else "1 value"
        return f"{values} of the trace could not be read and are left out: {self.left_out[0][0]}"

    @property
    def on_device(self) -> bool:
        """Whether there are kernels; without them the host's self times stand for the work."""
        return len(self.kernels) > 0

    @property
    def kind(self) -> str:
        """The kind of the measured chip."""
        return "gpu" if self.on_device else "cpu"

    @property
    def has_shapes(self) -> bool:
        """Whether input shapes were recorded."""
        return bool(self.ops.call_inputs.items)

    @property
    def step_time(self) -> float:
        """Median seconds of a step."""
        return statistics.median(step.seconds for step in self.steps)

    @cached_property
    def calls(self) -> Mapping[int, tuple[int, ...]]:
        """The ops that an op called, by its index, in order of their start."""
        called_by: dict[int, list[int]] = {}
        for index, parent in enumerate(self.ops.parent):
            if parent != NONE:
                called_by.setdefault(parent, []).append(index)
        start = self.ops.start
        return {
            op: tuple(sorted(called, key=start.__getitem__)) for op, called in called_by.items()
        }

    @cached_property
    def launches(self) -> Mapping[int, tuple[int, ...]]:
        """Kernels by the op that launched them; NONE has those that no op did."""
        launched_by: dict[int, list[int]] = {}
        for index, op in enumerate(self.kernels.op):
            launched_by.setdefault(op, []).append(index)
        return {op: tuple(kernels) for op, kernels in launched_by.items()}

    def by_op(self) -> tuple[OpSum, ...]:
        """Sums by op name and input shapes over the whole trace, most seconds first."""
        ops = self.ops
        device = array("d", bytes(8 * len(ops)))
        for op, duration in zip(self.kernels.op, self.kernels.duration, strict=True):
            if op != NONE:
                device[op] += duration
        sums: dict[tuple[int, int], list[float]] = {}
        columns = (ops.name, ops.inputs, device, ops.self_duration)
        for name, inputs, on_device, on_host in zip(*columns, strict=True):
            entry = sums.setdefault((name, inputs), [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += on_device
            entry[2] += on_host
        totals = [
            OpSum(
                ops.names.items[name],
                None if inputs == NONE else ops.call_inputs.items[inputs].shapes,
                int(count),
                seconds if self.on_device else None,
                on_host,
            )
            for (name, inputs), (count, seconds, on_host) in sums.items()
        ]
        return tuple(sorted(totals, key=lambda entry: (-entry.seconds, entry.name)))


def joined(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(start, end) intervals in order, those that touch each other as one."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def busy_and_gaps(intervals: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, ...]]:
    """Seconds that (start, end) intervals cover together, and of each pause between them."""
    merged = joined(intervals)
    gaps = tuple(after[0] - before[1] for before, after in pairwise(merged))
    return sum(end - start for start, end in merged), gaps
