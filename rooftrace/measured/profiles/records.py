"""What a profile holds: kernels, CPU ops, annotations and steps; no files, no graphs.

Times are in seconds, `start` since the earliest event of the trace.  A trace has millions of
events, so tables keep columns and make a record when one is asked for.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar, overload

NONE = -1
"""No index, no id."""

Shape = tuple[Any, ...]
"""Sizes of a tensor; of a list of tensors, their shapes."""


class ProfileError(ValueError):
    """A file of measurements that cannot be read, or does not fit: names it and what to do."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What an op was called with, one entry for each argument; () for what is no tensor.

    types: "float", "c10::BFloat16", "Scalar", "TensorList", "" ...
    """

    shapes: tuple[Shape, ...] = ()
    types: tuple[str, ...] = ()
    strides: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class CpuOp:
    """One call of an operator on the host.

    name: "aten::mm".  inputs: None where shapes were not recorded.  self_duration: `duration`
    without the ops that it called.  thread: number of the thread in the trace.  sequence: number
    that a backward op shares with its forward op, None without one.  backward: whether autograd
    ran it.  external: what kernels name it by.  parent: index of the op that called it.  modules:
    the nn.Module calls it is in, outermost first ("Linear_0").
    """

    index: int
    name: str
    inputs: Inputs | None
    start: float
    duration: float
    self_duration: float
    thread: int
    sequence: int | None
    backward: bool
    external: int | None
    parent: int | None
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work on a device.

    kind: kernel, memcpy or memset.  bytes: of a copy, None for a kernel.  op: index of the
    innermost CPU op that launched it, None where the trace does not say.  launched: when the host
    launched it.
    """

    index: int
    name: str
    kind: str
    device: int
    stream: int
    start: float
    duration: float
    correlation: int | None
    external: int | None
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None
    bytes: int | None
    op: int | None
    launched: float | None


@dataclass(frozen=True, slots=True)
class Annotation:
    """A range that the program named: "ProfilerStep#3", or what `record_function` was given."""

    name: str
    start: float
    duration: float
    thread: int
    external: int | None = None

    @property
    def end(self) -> float:
        """When it ends."""
        return self.start + self.duration


Record = TypeVar("Record", CpuOp, Kernel)


class Names:
    """Things by number: equal ones are kept once."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any) -> int:
        """The number of `item`, a new one where it is new."""
        found = self._numbers.get(item)
        if found is None:
            found = self._numbers[item] = len(self.items)
            self.items.append(item)
        return found


class Table(Sequence[Record], Generic[Record]):
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


class Ops(Table[CpuOp]):
    """CPU ops in the order of the file."""

    def __init__(self) -> None:
        self.names, self.inputs_known, self.stacks = Names(), Names(), Names()
        self.name, self.inputs, self.modules = array("i"), array("i"), array("i")
        self.start, self.duration, self.own = array("d"), array("d"), array("d")
        self.thread, self.parent, self.backward = array("i"), array("i"), array("b")
        self.sequence, self.external = array("q"), array("q")

    def record(self, index: int) -> CpuOp:
        """The op at `index`."""
        inputs, stack = self.inputs[index], self.modules[index]
        return CpuOp(
            index,
            self.names.items[self.name[index]],
            None if inputs == NONE else self.inputs_known.items[inputs],
            self.start[index],
            self.duration[index],
            self.own[index],
            self.thread[index],
            _known(self.sequence[index]),
            bool(self.backward[index]),
            _known(self.external[index]),
            _known(self.parent[index]),
            () if stack == NONE else self.stacks.items[stack],
        )


class Kernels(Table[Kernel]):
    """Kernels, copies and fills in the order of the file."""

    def __init__(self) -> None:
        self.names, self.shapes = Names(), Names()
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
            index,
            self.names.items[self.name[index]],
            KINDS[self.kind[index]],
            self.device[index],
            self.stream[index],
            self.start[index],
            self.duration[index],
            _known(self.correlation[index]),
            _known(self.external[index]),
            grid,
            block,
            _known(self.bytes[index]),
            _known(self.op[index]),
            None if launched < 0 else launched,
        )


KINDS = ("kernel", "memcpy", "memset")


def _known(number: int) -> int | None:
    return None if number == NONE else number


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run.

    duration: what the host spent on it.  busy: seconds in which the device worked for it, kernels
    that overlap counted once; None in a trace without kernels.  gaps: seconds of each pause
    between two of its kernels.  ops, kernels: their indices, in order of their start (of kernels:
    of their launch).  waited: seconds of `duration` in which the host waited for kernels that were
    launched before the trace begins.
    """

    name: str
    start: float
    duration: float
    busy: float | None
    gaps: tuple[float, ...]
    ops: Sequence[int]
    kernels: Sequence[int]
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        """What the step takes: the slower of host and device sets the pace."""
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
    """How many kernels were put into a step (or into none), and by what.

    copies: how many copies and fills beside them.  seconds: of all.
    """

    how: str
    kernels: int
    copies: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OpSum:
    """All calls of one op with the same input shapes: totals over the trace.

    device_seconds: of the kernels that it launched itself; None in a trace without kernels.
    """

    name: str
    shapes: tuple[Shape, ...] | None
    count: int
    device_seconds: float | None
    self_cpu_seconds: float

    @property
    def seconds(self) -> float:
        """Device seconds, or without kernels those of the host itself."""
        return self.self_cpu_seconds if self.device_seconds is None else self.device_seconds


class Cut(Protocol):
    """Makes steps of parts of a trace."""

    def __call__(self, name: str, start: float, end: float) -> Step:
        """The step of what the host called and launched from `start` until `end`."""

    def all(self) -> Step:
        """One step of everything."""


@dataclass(frozen=True)
class Profile:
    """A trace as records.

    source: the file.  devices: names of the devices by number.  marked_by: the name of the ranges
    around its steps, "" where the trace has no such marks.  cut: makes a step of what the host did
    between two moments, `cut(name, start, end)`, or of everything, `cut.all()`.
    placements: what says which step kernels belong to.
    """

    source: str
    ops: Ops
    kernels: Kernels
    annotations: tuple[Annotation, ...]
    steps: tuple[Step, ...]
    devices: Mapping[int, str]
    marked_by: str = ""
    cut: Cut | None = field(default=None, repr=False)
    placements: tuple[Placement, ...] = ()

    @property
    def on_device(self) -> bool:
        """Whether there are kernels; without them the host's self times stand for the work."""
        return len(self.kernels) > 0

    @property
    def has_shapes(self) -> bool:
        """Whether input shapes were recorded."""
        return bool(self.ops.inputs_known.items)

    @property
    def step_time(self) -> float:
        """Median seconds of a step."""
        return statistics.median(step.seconds for step in self.steps)

    @cached_property
    def calls(self) -> Mapping[int, tuple[int, ...]]:
        """The ops that an op called, by its index, in order of their start."""
        found: dict[int, list[int]] = {}
        for index, parent in enumerate(self.ops.parent):
            if parent != NONE:
                found.setdefault(parent, []).append(index)
        start = self.ops.start
        return {op: tuple(sorted(called, key=start.__getitem__)) for op, called in found.items()}

    @cached_property
    def launches(self) -> Mapping[int, tuple[int, ...]]:
        """Kernels by the op that launched them; NONE has those that no op did."""
        found: dict[int, list[int]] = {}
        for index, op in enumerate(self.kernels.op):
            found.setdefault(op, []).append(index)
        return {op: tuple(kernels) for op, kernels in found.items()}

    def by_op(self) -> tuple[OpSum, ...]:
        """Sums by op name and input shapes over the whole trace, most seconds first."""
        ops = self.ops
        device = array("d", bytes(8 * len(ops)))
        for op, duration in zip(self.kernels.op, self.kernels.duration, strict=True):
            if op != NONE:
                device[op] += duration
        sums: dict[tuple[int, int], list[float]] = {}
        for name, inputs, on_device, own in zip(ops.name, ops.inputs, device, ops.own, strict=True):
            entry = sums.setdefault((name, inputs), [0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += on_device
            entry[2] += own
        found = [
            OpSum(
                ops.names.items[name],
                None if inputs == NONE else ops.inputs_known.items[inputs].shapes,
                int(count),
                seconds if self.on_device else None,
                own,
            )
            for (name, inputs), (count, seconds, own) in sums.items()
        ]
        return tuple(sorted(found, key=lambda entry: (-entry.seconds, entry.name)))


def busy_and_gaps(intervals: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, ...]]:
    """Seconds that (start, end) intervals cover together, and of each pause between them."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    gaps = tuple(after[0] - before[1] for before, after in pairwise(merged))
    return sum(end - start for start, end in merged), gaps
