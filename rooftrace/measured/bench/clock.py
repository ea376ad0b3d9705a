"""A bench that times code on one device, with samplers of launch costs and pinned CPU threads.

Kernels on CUDA are timed between two events, and steps on the wall between two idle moments of the
device.  Data is random, as constant data draws less power and so runs faster.  A cold measurement
reads a buffer beyond the last cache before every repetition.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from rooftrace.hardware import units
from rooftrace.hardware.chip import Fact

NOISY = 0.25
"""The relative spread from which a fact is noted as noisy."""
SPIN = 200_000
"""Clock cycles, about 0.1 ms, that a GPU is kept busy while the host queues the timed work."""
_BLOCK = 2**22
"""The most random numbers that are drawn; longer data repeats them."""


class MeasureError(RuntimeError):
    """This machine cannot be measured."""


@dataclass(frozen=True)
class Bench:
    """Times code on one device and describes the conditions."""

    device: torch.device
    budget_s: float  # s, for `repeat`
    progress: Callable[[str], None]  # called with each fact
    cores: int = 1  # logical CPUs that the process may use
    pinned: bool = False  # whether each thread is pinned to a separate core

    @property
    def on_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def conditions(self) -> str:
        if self.on_cuda:
            return f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        pinned = " pinned" if self.pinned else ""
        return f"torch {torch.__version__}, {torch.get_num_threads()}{pinned} threads"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def once(self, run: Callable[[], object]) -> float:
        """Device seconds of one `run`: between two events on CUDA, on the wall on a CPU."""
        if not self.on_cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        before: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        after: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before.record()
        run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3  # torch gives milliseconds

    def cold(self, run: Callable[[], object]) -> float:
        """Device seconds of one `run`, on cold caches."""
        from rooftrace.tracer import torch_private

        # Reading leaves clean lines: written ones would go back to memory while `run` is timed.
        self._beyond_the_caches.sum()
        if self.on_cuda and torch_private.has("cuda_sleep"):
            torch_private.cuda_sleep(SPIN)
        return self.once(run)

    def wall(self, run: Callable[[], object]) -> float:
        """Wall seconds of one `run`, from an idle device to an idle device."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def repeat(self, time_one: Callable[[], float], share: float) -> list[float]:
        """Call `time_one` for `share` of the budget: 3 to 25 times, after one warm-up."""
        time_one()
        return self.repetitions(time_one, share * self.budget_s)

    def repetitions(
        self, time_one: Callable[[], float], seconds: float, least: int = 3, most: int = 25
    ) -> list[float]:
        """Call `time_one` for so many seconds, and `least` to `most` times; no warm-up."""
        deadline = time.perf_counter() + seconds
        samples: list[float] = []
        while len(samples) < least or (time.perf_counter() < deadline and len(samples) < most):
            samples.append(time_one())
        return samples

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Random numbers about 0; the same few million again and again where there are more."""
        count = math.prod(shape)
        drawn = self._drawn[: min(count, _BLOCK)].to(dtype or torch.float32)
        return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Random whole numbers from 0 on."""
        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(below, shape, generator=generator, device=self.device)

    @cached_property
    def _drawn(self) -> torch.Tensor:
        with torch.inference_mode(False):  # the cached tensor outlives this call
            generator = torch.Generator(self.device).manual_seed(0)
            return torch.randn(_BLOCK, generator=generator, device=self.device)

    @cached_property
    def _beyond_the_caches(self) -> torch.Tensor:
        """A fp32 buffer of four times the last cache, where its size is known."""
        size = 2**26
        if self.on_cuda:
            properties = torch.cuda.get_device_properties(self.device)
            size = max(4 * int(getattr(properties, "L2_cache_size", 0)), 2**28)
        return self.random(size // 4)

    def fact(self, samples: list[float], unit: str, case: str, note: str = "") -> Fact:
        """The median of `samples` as a measured fact in `unit`; a wide spread is noted."""
        middle = statistics.median(samples)
        quarters = statistics.quantiles(samples, n=4)
        spread = (quarters[2] - quarters[0]) / middle if middle else 0.0
        source = (
            f"{case}, median of {len(samples)}, spread {spread * 100:.0f} % (interquartile), "
            f"{self.conditions()}"
        )
        text = units.write(middle, unit)
        if spread > NOISY:
            best = max(samples) if unit.endswith("/s") else min(samples)
            noise = f"noisy, the best was {units.write(best, unit)}: was the machine busy?"
            note = f"{note}; {noise}" if note else noise
        self.progress(f"{case}: {text}{f' ({note})' if note else ''}")
        return Fact.of(text, unit, source, "measured", note)

    @staticmethod
    @contextlib.contextmanager
    def float32_precision(setting: str) -> Iterator[None]:
        """ "highest": fp32 products in fp32; "high": in TF32 on CUDA."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


# -- launches --------------------------------------------------------------------------------------
# Samplers of the host costs of a launch: each call measures once [s].

OPS = 300
"""Ops in a row for a launch cost: fewer than the 1024 that fill the queue of a GPU, where the host
waits."""


def host_seconds(bench: Bench, run: Callable[[], object], calls: int) -> Callable[[], float]:
    """Host seconds per call in one `run` that makes `calls` of them; the device may lag behind."""

    def once() -> float:
        bench.synchronize()
        start = time.perf_counter()
        run()
        seconds = (time.perf_counter() - start) / calls
        bench.synchronize()
        return seconds

    return once


def eager_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per op of a deep stack of tiny linear, relu and layer norm functions.

    Their kernels take next to no time.
    """
    width = 8
    weight = torch.ones(width, width, device=bench.device)
    bias, example = weight[0].clone(), weight.clone()

    def run() -> None:
        x = example
        for _ in range(OPS // 3):
            x = functional.relu(functional.linear(x, weight, bias))
            x = functional.layer_norm(x, (width,), bias, bias)

    return host_seconds(bench, run, OPS)


def view_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per view of a tiny tensor."""
    cell = torch.zeros(8, device=bench.device)

    def run() -> None:
        x = cell
        for _ in range(OPS // 2):
            x = x.view(2, 4).view(8)

    return host_seconds(bench, run, OPS)


def module_call(bench: Bench) -> Callable[[], float]:
    """Seconds per call of a module that returns its input."""
    model = nn.Sequential(*(nn.Identity() for _ in range(OPS)))
    cell = torch.zeros(8, device=bench.device)
    return host_seconds(bench, lambda: model(cell), OPS)


def direct_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per op called without modules and with `out=`, as generated code calls it."""
    left = torch.ones(8, 8, device=bench.device)
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(OPS):
            torch.mm(left, left, out=out)

    return host_seconds(bench, run, OPS)


def stream_of_tiny_kernels(bench: Bench) -> Callable[[], float]:
    """Device seconds per tiny kernel of a queue that the host has filled in advance."""
    from rooftrace.tracer import torch_private

    cell = torch.zeros(8, device=bench.device)

    def run() -> None:
        for _ in range(OPS):
            cell.add_(1)

    def once() -> float:
        if torch_private.has("cuda_sleep"):
            torch_private.cuda_sleep(50 * SPIN)  # the host's head start
        return bench.once(run) / OPS

    return once


def graph_of_tiny_kernels(bench: Bench) -> tuple[Callable[[], float], Callable[[], float]]:
    """Device seconds per tiny kernel, and host seconds per launch, of one captured CUDA graph."""
    cell = torch.zeros(8, device=bench.device)
    cell.add_(1)  # loads the kernel before the capture
    bench.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(OPS):
            cell.add_(1)
    graph.replay()
    return lambda: bench.once(graph.replay) / OPS, host_seconds(bench, graph.replay, 1)


# -- threads ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def pinned_threads() -> Iterator[bool]:
    """Pin each thread of torch's pool to a separate core, on Linux; yield whether that worked.

    A scheduler may run two of them on one core for seconds: a copy was seen to take 1.7 ms or 8 ms
    by that alone.  All masks are restored afterwards.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "sched_setaffinity") or not tasks.is_dir():
        yield False
        return
    idle = _processor_ticks(tasks)
    example = torch.ones(2**20)
    until = time.perf_counter() + 0.1
    while time.perf_counter() < until:
        example.add_(1)
    busy = _processor_ticks(tasks)
    ours = threading.get_native_id()
    allowed = os.sched_getaffinity(0)
    before: dict[int, set[int]] = {}
    for thread in (int(item.name) for item in tasks.iterdir()):
        with contextlib.suppress(OSError):  # it may have ended
            before[thread] = os.sched_getaffinity(thread)
    cores = spread_cores(allowed)
    # The threads of the pool just worked; others (of a progress bar, say) come last.
    others = [thread for thread in before if thread != ours]
    others.sort(key=lambda thread: idle.get(thread, 0) - busy.get(thread, 0))
    workers = [ours, *others]
    try:
        for position, thread in enumerate(workers):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, {cores[position % len(cores)]})
        yield True
    finally:
        for thread in (int(item.name) for item in tasks.iterdir()):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, before.get(thread, allowed))


def _processor_ticks(tasks: Path) -> dict[int, int]:
    """Processor time of each thread of this process so far, in clock ticks."""
    ticks = {}
    for item in tasks.iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # man proc_pid_stat: utime and stime are fields 14 and 15; the name (2) may hold spaces
            after_name = (item / "stat").read_text().rpartition(")")[2].split()
            ticks[int(item.name)] = int(after_name[11]) + int(after_name[12])
    return ticks


def spread_cores(allowed: set[int], root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The allowed CPUs, one of each physical core first, then their hyperthread siblings."""
    seen: dict[str, int] = {}
    order = []
    for cpu in sorted(allowed):
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        order.append((seen.get(siblings, 0), cpu))
        seen[siblings] = seen.get(siblings, 0) + 1
    return [cpu for _, cpu in sorted(order)]
