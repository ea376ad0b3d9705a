"""Times code on one device and describes the conditions; torch is imported when called.

Device work is asynchronous: on CUDA kernels are timed between two events, and whole steps on the
wall between two idle moments of the device.  Data is random, as constant data draws less power and
so runs faster.  A cold measurement reads a buffer beyond the last cache before every repetition.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftrace.hardware import units
from rooftrace.hardware.chip import Fact

if TYPE_CHECKING:
    import torch

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
        import torch

        # Reading leaves clean lines: written ones would go back to memory while `run` is timed.
        self._beyond_the_caches.sum()
        if self.on_cuda and hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]
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
