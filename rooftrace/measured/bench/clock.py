"""A bench that times code on one device, with samplers of launch costs and pinned CPU threads."""

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
from typing import TYPE_CHECKING, Any

from rooftrace.hardware import units
from rooftrace.hardware.chip import Fact

if TYPE_CHECKING:
    import torch

# -- clock -----------------------------------------------------------------------------------------
# Times code on one device and describes the conditions; torch is imported when called.
#
# Device work is asynchronous: on CUDA kernels are timed between two events, and whole steps on the
# wall between two idle moments of the device.  Data is random, as constant data draws less power
# and so runs faster.  A cold measurement reads a buffer beyond the last cache before every
# repetition.

NOISY = 0.25
"""The relative spread from which a fact is noted as noisy."""
SPIN = 200_000
"""Clock cycles, about 0.1 ms, that a GPU is kept busy while the host queues what is timed."""
_BLOCK = 2**22
"""The most random numbers that are drawn; longer data repeats them."""


class MeasureError(RuntimeError):
    """This machine cannot be measured as asked."""


@dataclass(frozen=True)
class Bench:
    """Times code on one device and describes the conditions."""

    device: torch.device
    budget_s: float  # s, for `repeat`
    progress: Callable[[str], None]  # is told each fact
    cores: int = 1  # logical CPUs that the process may use
    pinned: bool = False  # whether each thread is kept on a core of its own

    @property
    def on_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def conditions(self) -> str:
        import torch

        if self.on_cuda:
            return f"torch {torch.__version__}, CUDA {torch.version.cuda}"
        pinned = " pinned" if self.pinned else ""
        return f"torch {torch.__version__}, {torch.get_num_threads()}{pinned} threads"

    def synchronize(self) -> None:
        import torch

        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def once(self, run: Callable[[], object]) -> float:
        """Device seconds of one `run`: between two events on CUDA, on the wall on a CPU."""
        import torch

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
        """Device seconds of one `run`, on caches that hold none of its data."""
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
        import torch

        count = math.prod(shape)
        drawn = self._drawn[: min(count, _BLOCK)].to(dtype or torch.float32)
        return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Random whole numbers from 0 on."""
        import torch

        generator = torch.Generator(self.device).manual_seed(0)
        return torch.randint(below, shape, generator=generator, device=self.device)

    @cached_property
    def _drawn(self) -> torch.Tensor:
        import torch

        with torch.inference_mode(False):  # for whoever comes later
            generator = torch.Generator(self.device).manual_seed(0)
            return torch.randn(_BLOCK, generator=generator, device=self.device)

    @cached_property
    def _beyond_the_caches(self) -> torch.Tensor:
        """Four times the last cache, as far as it is known, in fp32."""
        import torch

        size = 2**26
        if self.on_cuda:
            properties = torch.cuda.get_device_properties(self.device)
            size = max(4 * int(getattr(properties, "L2_cache_size", 0)), 2**28)
        return self.random(size // 4)

    def fact(self, samples: list[float], unit: str, what: str, note: str = "") -> Fact:
        """The median of `samples` as a measured fact in `unit`; a wide spread is noted."""
        middle = statistics.median(samples)
        quarters = statistics.quantiles(samples, n=4)
        spread = (quarters[2] - quarters[0]) / middle if middle else 0.0
        source = (
            f"{what}, median of {len(samples)}, spread {spread * 100:.0f} % (interquartile), "
            f"{self.conditions()}"
        )
        text = units.write(middle, unit)
        if spread > NOISY:
            best = max(samples) if unit.endswith("/s") else min(samples)
            noise = f"noisy, the best was {units.write(best, unit)}: was the machine busy?"
            note = f"{note}; {noise}" if note else noise
        self.progress(f"{what}: {text}{f' ({note})' if note else ''}")
        return Fact.of(text, unit, source, "measured", note)

    @staticmethod
    @contextlib.contextmanager
    def float32_precision(setting: str) -> Iterator[None]:
        """ "highest": fp32 products in fp32; "high": in TF32 on CUDA."""
        import torch

        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(setting)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


# -- launches --------------------------------------------------------------------------------------
# Host costs of a launch.  Each function gives a sampler: a call of it measures once [s].

OPS = 300
"""Ops in a row for a launch cost: few enough for the queue of a GPU, which holds 1024; the host
waits at a full one."""


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
    import torch
    from torch.nn import functional

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
    import torch

    cell = torch.zeros(8, device=bench.device)

    def run() -> None:
        x = cell
        for _ in range(OPS // 2):
            x = x.view(2, 4).view(8)

    return host_seconds(bench, run, OPS)


def module_call(bench: Bench) -> Callable[[], float]:
    """Seconds per call of a module that hands its input on."""
    import torch
    from torch import nn

    model = nn.Sequential(*(nn.Identity() for _ in range(OPS)))
    cell = torch.zeros(8, device=bench.device)
    return host_seconds(bench, lambda: model(cell), OPS)


def direct_dispatch(bench: Bench) -> Callable[[], float]:
    """Seconds per op called without modules and into a ready output, as generated code calls it."""
    import torch

    left = torch.ones(8, 8, device=bench.device)
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(OPS):
            torch.mm(left, left, out=out)

    return host_seconds(bench, run, OPS)


def stream_of_tiny_kernels(bench: Bench) -> Callable[[], float]:
    """Device seconds per tiny kernel of a queue that the host filled in time."""
    import torch

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
    import torch

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
# Keeps the threads of torch's pool on cores of their own while a CPU is measured.


@contextlib.contextmanager
def pinned_threads() -> Iterator[bool]:
    """Keep each thread of torch's pool on a core of its own, on Linux; yields whether it did.

    A scheduler may stack two of them on one core for seconds, where each waits for the other's time
    slice: a copy was seen to take 1.7 ms or 8 ms by that alone. All masks are restored afterwards.
    """
    import torch

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
    # The pool's threads are the ones that just worked; others (of a progress bar, say) come last.
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
    """Processor time that each thread of this process has used so far, in clock ticks."""
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
