"""The device and chip of a live loop, profiles of a few steps, and remarks on the estimate."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rooftrace._progress import tell
from rooftrace._shown import some
from rooftrace.errors import RequestError, worded
from rooftrace.hardware import Chip, available_chips, load_chip
from rooftrace.hardware.chipfile import chips_called
from rooftrace.hardware.units import format_capacity
from rooftrace.measured.bench import measure_chip, profiler
from rooftrace.measured.fit import Validation, validated
from rooftrace.measured.live.graphbook import GraphBook
from rooftrace.measured.live.notes import StepNote
from rooftrace.measured.profiles import Trace, read_trace, records
from rooftrace.tracer import torch_private

_SECONDS = 8.0
"""Budget for the rates of a CPU."""
_NEAR = 0.1
"""The largest relative difference between two capacities of one chip."""


def chip_at_hand(device: torch.device) -> Chip:
    """The chip of a device.  A CPU is measured, once in a process, in some seconds.

    Raises RequestError for a GPU that is none of the bundled chips.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return load_chip(name_of(properties.name, properties.total_memory))
    return _measured(str(device))


@lru_cache
def _measured(device: str) -> Chip:
    tell("measuring the rates of this device")
    return measure_chip(device, _SECONDS)


def name_of(device: str, capacity: int) -> str:
    """The name of the chip of a device by its reported name and bytes of memory.

    Raises RequestError where none, or more than one, fits.
    """
    names = [
        name
        for name in chips_called(device)
        if abs(load_chip(name).memory_capacity.value / capacity - 1) < _NEAR
    ]
    if len(names) == 1:
        return names[0]
    several = f"may be {' or '.join(names)}" if names else "is no chip that comes with rooftrace"
    raise RequestError(
        f"chip: this device calls itself {device!r}, has {format_capacity(capacity)} and "
        f'{several}: say chip="NAME", one of {", ".join(available_chips())}, or the path of a '
        "file that `rooftrace measure --chip-only` writes"
    )


def device_of(modules: Sequence[Any]) -> torch.device:
    """The device of the modules' first tensor."""
    if not modules:
        raise RequestError("live(): pass the module, or the modules, that a step calls")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise RequestError(
                f"live({module!r:.60}): expected the modules that a step calls, got "
                f"{type(module).__name__}; a function of yours goes inside `with live.step():`"
            )
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise RequestError(
            f"{type(modules[0]).__name__} is on {device}: expected cpu or cuda, where steps run"
        )
    return device


# -- profiles --------------------------------------------------------------------------------------

_STEP = records.PROFILER_STEP
"""The range around a step, by which the reader of traces separates steps."""


class FewSteps:
    """Profiles `count` steps, after one that warms the profiler up.

    Sizes are recorded, stacks and memory are not: they cost time in every op.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._left = device, count + 1 if count else 0
        self._profiler: Any = None
        self._warm = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.ran: list[StepNote] = []  # the steps in the trace
        self.trouble = ""  # why there is no trace; "" where nothing failed

    @property
    def active(self) -> bool:
        """Whether the next step is for the profiler."""
        return self._left > 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step under the profiler."""
        if self._profiler is None and not self._start():
            yield
            return
        if not self._warm:
            yield
            return
        self._wait()  # a step's kernels end before the next begins
        with torch.profiler.record_function(f"{_STEP}#{len(self.ran)}"):
            yield
            self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def ended(self, note: StepNote) -> None:
        """Called after a step of the profiler, with its note."""
        self._left -= 1
        if self._warm:
            self.ran.append(note)
        self._warm = True
        if self._left <= 0:
            self.stop()

    def stop(self) -> None:
        """End the profiler, if it runs, and write its trace."""
        self._left = 0
        recorded, self._profiler = self._profiler, None
        if recorded is None:
            return
        recorded.stop()
        if self.ran:
            self._folder = tempfile.TemporaryDirectory(prefix="rooftrace-live-")
            recorded.export_chrome_trace(str(Path(self._folder.name) / "steps.json"))

    def trace(self) -> Trace | None:
        """The steps with the work of the first; None where no step was profiled."""
        if self._folder is None:
            return None
        trace = read_trace(Path(self._folder.name) / "steps.json")
        trace = replace(trace, source="the profile of the loop")
        steps = [step for step in trace.steps if step.name.startswith(_STEP)]
        if len(steps) != len(self.ran):
            return trace
        first = self.ran[0].pattern
        ran = zip(steps, self.ran, strict=True)
        return replace(trace, steps=tuple(s for s, note in ran if note.pattern == first))

    def by_name(self) -> dict[str, float]:
        """Seconds of a step by the name of the op, most first; empty where none was profiled.

        They are of the device; on a CPU self seconds of the host.
        """
        trace = self.trace() if not self.active else None
        sums: dict[str, float] = {}
        for entry in trace.by_op() if trace is not None else ():
            sums[entry.name] = sums.get(entry.name, 0.0) + entry.seconds / len(self.ran)
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    def _start(self) -> bool:
        if torch_private.profiler_enabled():
            self.trouble = "a profiler of the loop's own was running: no step was profiled for this"
            self._left = 0
            return False
        self._profiler = profiler(self._device)
        self._profiler.start()
        return True


# -- remarks ---------------------------------------------------------------------------------------
# Of the profiled steps against their estimate, and of the limits of the figures.

_GRAPH_OF_CALLER = (
    "counted is the graph that was handed in, for steps that do what the first timed one did"
)
NOT_PROFILED = "no step was profiled, so single kernels are not compared"
_SHOWN = 5
"""Names, and assumptions, in one note."""


def checked(few: FewSteps, book: GraphBook) -> Validation | str:
    """The profiled steps against the estimate of the first, or why they are not compared."""
    if few.trouble:
        return few.trouble
    trace = None if few.active else few.trace()
    if trace is None:
        return NOT_PROFILED
    try:
        graph = book.graph_of_step(few.ran[0])
        return validated(trace, book.chip, book.execution, lambda: {graph.phase: graph})
    except Exception as error:  # a step that does not trace, or a profile of something else
        return f"kernels are not compared: {worded(error).splitlines()[0]}"


def outside_of(validation: Validation) -> dict[str, float]:
    """Seconds of a step by the name of calls that are in no predicted kernel, most first."""
    sums: dict[str, float] = {}
    for _, stray in validation.strays:
        sums[stray.name] = sums.get(stray.name, 0.0) + stray.seconds
    return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


def remarks(
    checked: Validation | str, book: GraphBook, device: torch.device, counted: str
) -> Iterator[str]:
    """Sentences on work that was not counted or compared, and on the basis of the counts.

    counted: the sentence on counts of traces.
    """
    for reason, kinds in book.refused.items():
        yield f"{reason} ({kinds:,} kinds of steps or parts)" if kinds > 1 else reason
    if isinstance(checked, str):
        yield checked
        kind = "gpu" if device.type == "cuda" else "cpu"
        if kind != book.chip.kind:
            yield (
                f"ran on a {kind.upper()}, predicted for {book.chip.title}: MFU and expected "
                "times compare two devices"
            )
    else:
        yield from checked.notes
    if book.unknown:
        names = some(book.unknown, _SHOWN)
        yield f"no rule for {names}: only their bytes are counted; the FLOP are a lower bound"
    if book.assumed:
        yield f"assumed: {some(book.assumed, _SHOWN)}"
    if book.fitted:
        yield (
            f"{book.fitted:,} sizes of calls are between those that were traced, and are priced by "
            "a fit that meets those: FLOP in products exactly, MFU within 1 %, expected seconds "
            "within 5 %"
        )
    yield counted if book.graph is None else _GRAPH_OF_CALLER
    processes = _processes()
    if processes > 1:
        yield (
            f"figures are of one of {processes:,} processes and its device; what they exchange is "
            "in the time alone"
        )


def _processes() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
