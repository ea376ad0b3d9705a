"""Results of a loop: its rates and the predicted ones, and the kernels that are off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.fit import Validation

SCHEMA = "rooftrace.live/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Rates of some steps on one device; None: unknown.

    Rates are over the time of the steps, without the time between them.
    """

    steps: int  # timed steps of known work
    uncounted: int  # timed steps of unknown work: in no other number
    seconds: float | None = None  # s of a step, mean
    outside: float | None = None  # s between two steps, mean: data, logs, evaluation
    flops: float | None = None  # FLOP of a step, mean
    bytes: float | None = None  # byte of a step through HBM, by rules: mean
    mfu: float | None = None  # useful matrix FLOPs per second over the peak
    hfu: float | None = None  # with recomputation and masked blocks
    bandwidth_share: float | None = None  # counted bytes per second over the chip's bandwidth
    samples_per_s: float | None = None
    tokens_per_s: float | None = None  # tokens that were run, padding included
    expected: float | None = None  # s of such a step, predicted: mean over these steps
    interval: tuple[float, float] | None = None  # s; of nine in ten such steps; None: no knobs
    expected_mfu: float | None = None

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s that were achieved."""
        return self.flops / self.seconds if self.flops is not None and self.seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        """HBM bytes per second, by rules [byte/s]."""
        return self.bytes / self.seconds if self.bytes is not None and self.seconds else None

    @property
    def ratio(self) -> float | None:
        """Measured over expected seconds."""
        return self.seconds / self.expected if self.seconds and self.expected else None

    def logged(self) -> dict[str, float]:
        """The figures for a logger, by name; unknown ones are left out."""
        named = {
            "mfu": self.mfu,
            "hfu": None if self.hfu == self.mfu else self.hfu,
            "tflop_per_s": None if self.flops_per_s is None else self.flops_per_s / 1e12,
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "step_s": self.seconds,
            "expected_step_s": self.expected,
            "uncounted_steps": self.uncounted or None,
        }
        return {f"rooftrace/{name}": float(v) for name, v in named.items() if v is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OffKernel(Plain):
    """Equal kernels of a step that took far longer than expected."""

    name: str
    module: str  # a path, with stars for numbers that differ; "" is the root
    source: str  # "model.py:12": the line that called it; "": unknown
    part: str  # forward, backward, optimizer
    launches: int
    measured: float  # s of all of them in one step
    expected: float  # s
    reason: str  # a likely one by the numbers

    KEYS = "* lost"

    @property
    def lost(self) -> float:
        """Seconds of a step beyond the expected ones."""
        return self.measured - self.expected


@dataclass(frozen=True, kw_only=True)
class LiveResult(Plain, Shown):
    """A loop against its prediction; print() shows it."""

    chip: Chip
    execution: str
    device: str  # name reported by its driver
    figures: Figures
    median: float | None  # s of a step, of the last 1,000 at the most
    warmups: int  # steps before the first that was timed
    profiled: int  # steps under the profiler, in no time above
    off: tuple[OffKernel, ...] = ()  # most seconds lost first
    typical: float | None = None  # measured over expected seconds of a typical kernel
    outside_graph: Mapping[str, float] = field(default_factory=dict)  # s of a step by call
    matched: float | None = None  # share of the profiled time that belongs to a predicted kernel
    notes: tuple[str, ...] = ()  # on uncounted work and assumptions
    validation: Validation | None = field(default=None, repr=False)  # of the profiled steps

    schema = SCHEMA
    KEYS = (
        "schema chip=chip.name execution device **figures flops_per_s=figures.flops_per_s "
        "bytes_per_s=figures.bytes_per_s median_s=median warmups profiled off "
        "typical_ratio=typical outside_graph_s=outside_graph matched_share=matched notes"
    )

    def __repr__(self) -> str:
        figures = self.figures
        time = "no step timed" if figures.seconds is None else format_time(figures.seconds)
        mfu = "" if figures.mfu is None else f", MFU {format_share(figures.mfu)}"
        return short(self, f"{figures.steps:,} steps on {self.chip.name}: {time}{mfu}")
