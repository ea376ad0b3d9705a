"""Which counters of a device would confirm what limits a kernel, and what they should then read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time, format_traffic

_TIME = "gpu__time_duration.sum"
_READ = "dram__bytes_read.sum,dram__bytes_write.sum"
_DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
_FMA = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"


@dataclass(frozen=True, slots=True)
class Counter:
    """metric: as the tool calls it.  expected: what it should read if the prediction is right."""

    tool: str
    metric: str
    expected: str


@dataclass(frozen=True, slots=True)
class Busy:
    """What a kernel does in one launch: seconds without its gap, byte, and shares of peaks."""

    seconds: float
    bytes: float
    net: float
    memory: float  # of the memory's bandwidth
    matrix: float  # of the matrix engine's rate
    vector: float  # of the vector engine's rate


def counters_of(chip: Chip, limiter: str, busy: Busy, gap: float) -> tuple[Counter, ...]:
    """Counters that confirm a limiter on a chip; names as of Nsight Compute 2024 and ROCm 6.

    limiter: a name in REGIMES.  Of other vendors' chips only what a clock can tell.
    """
    vendor = chip.vendor.lower()
    moved = format_traffic(busy.bytes)
    common: tuple[Counter, ...]
    dram: tuple[Counter, ...]
    math: tuple[Counter, ...] = ()
    net: tuple[Counter, ...] = ()
    launch: tuple[Counter, ...] = ()
    if vendor == "nvidia":
        common = (Counter("ncu", _TIME, format_time(busy.seconds)),)
        dram = (
            Counter("ncu", _READ, f"{moved} together"),
            Counter("ncu", _DRAM, f"{_percent(busy.memory)} of the peak"),
        )
        pipes: Mapping[str, float] = {_TENSOR: busy.matrix, _FMA: busy.vector}
        math = tuple(
            Counter("ncu", name, f"at least {_percent(share)}: padding of tiles adds to it")
            for name, share in pipes.items()
            if share > 0.0005
        )
        net = (Counter("ncu", "nvltx__bytes.sum,nvlrx__bytes.sum", format_traffic(busy.net)),)
        launch = (Counter("nsys", "time between kernels", format_time(gap)),)
    elif vendor == "amd":
        common = (Counter("rocprofv3 --kernel-trace", "duration", format_time(busy.seconds)),)
        dram = (Counter("rocprofv3 --pmc", "TCC_EA0_RDREQ_sum, TCC_EA0_WRREQ_sum",
                        f"{moved} together, at 32 to 128 byte each"),)  # fmt: skip
        math = (Counter("rocprofv3 --pmc", "MfmaUtil", f"at least {_percent(busy.matrix)}"),)
        launch = (Counter("rocprofv3", "time between kernels", format_time(gap)),)
    elif chip.kind == "cpu":
        common = (Counter("a clock", "seconds", format_time(busy.seconds)),)
        dram = (Counter("perf stat", "uncore_imc/cas_count_read/, uncore_imc/cas_count_write/",
                        f"{moved} together, at 64 byte each"),)  # fmt: skip
    else:
        return (Counter("a clock", "seconds", format_time(busy.seconds)),)
    by_limiter = {"hbm": dram + math[:1], "compute": math + dram[1:], "network": net}
    return common + by_limiter.get(limiter, launch)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"
