"""A few steps of a loop under torch's profiler; all others go without it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rooftrace.measured.live.notes import StepNote
from rooftrace.measured.traces import Trace, read_trace, records

_STEP = records.PROFILER_STEP
"""The range around a step, by which the reader of traces tells steps."""


class FewSteps:
    """Profiles so many steps, after one that warms the profiler up.

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
        """Called after a step of the profiler, with what it did."""
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
        """The steps that did the same as the first; None where no step was profiled."""
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

        They are of the device; on a CPU of the host, each op without those that it calls.
        """
        trace = self.trace() if not self.active else None
        sums: dict[str, float] = {}
        for entry in trace.by_op() if trace is not None else ():
            sums[entry.name] = sums.get(entry.name, 0.0) + entry.seconds / len(self.ran)
        return dict(sorted(sums.items(), key=lambda entry: -entry[1]))

    def _start(self) -> bool:
        from torch.profiler import ProfilerActivity, profile

        if torch._C._autograd._profiler_enabled():
            self.trouble = "a profiler of the loop's own was running: no step was profiled for this"
            self._left = 0
            return False
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # acc_events: torch 2.11 warns that others are cleared, as if there were several cycles.
        self._profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profiler.start()
        return True
