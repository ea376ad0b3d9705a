"""Measures the machine it runs on, quickly, as a `Chip`; knows no datasheet.

Every rate is the median of several repetitions on random data after a warm-up, and its source text
says how many, how far they spread, and under which torch. torch is imported only when called.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rooftrace.hardware import Chip
from rooftrace.hardware.chip import Engine, Fact, Peak
from rooftrace.measured.bench.clock import Bench, MeasureError
from rooftrace.measured.bench.devices import checked_device, cpu_cache, cpu_model, slug, stream_size
from rooftrace.measured.bench.launches import (
    OPS,
    direct_dispatch,
    eager_dispatch,
    graph_of_tiny_kernels,
    module_call,
    view_dispatch,
)
from rooftrace.measured.bench.threads import pinned_threads


def measure_chip(
    device: str = "cpu", budget_s: float = 20.0, progress: Callable[[str], None] | None = None
) -> Chip:
    """Measure `device` ("cpu", "cuda", "cuda:1") in about `budget_s` seconds.

    The result holds sustained rates: price with it as with any chip. A rate that torch does not
    offer on this device is left out, so that asking for it raises instead of guessing.
    """
    import torch

    if not budget_s > 0:
        raise MeasureError(f"budget_s = {budget_s!r}: expected a number of seconds above 0")
    target = checked_device(device)
    report = progress or (lambda line: None)
    with torch.inference_mode():
        if target.type == "cuda":
            with torch.cuda.device(target):
                return _measure_cuda(Bench(target, budget_s, report))
        cores = _cores()  # before each thread is given one
        with pinned_threads() as pinned:
            return _measure_cpu(Bench(target, budget_s, report, cores, pinned))


# Compute


def _product(bench: Bench, precision: str, size: int) -> Callable[[], object]:
    """A [size, size] @ [size, size] product in `precision`, ready to run."""
    import torch

    left, right = bench.random(size, size), bench.random(size, size)
    if precision == "fp8":
        unit = torch.ones((), device=bench.device)
        # The fp8 kernels want the right operand column-major.
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t().contiguous().t()
        return lambda: torch._scaled_mm(a, b, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)
    if precision == "int8":
        a, b = (left * 30).to(torch.int8), (right * 30).to(torch.int8).t().contiguous().t()
        return lambda: torch._int_mm(a, b)
    types = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = types.get(precision, torch.float32)
    a, b = left.to(dtype), right.to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _matmul_rate(bench: Bench, precision: str, share: float, largest: int) -> Fact | None:
    """FLOP/s of a large square product; None where torch has no such kernel here."""
    size = 256
    with bench.float32_precision("high" if precision == "tf32" else "highest"):
        try:
            run = _product(bench, precision, size)
            bench.once(run)
            # Grow until one product fills an eighth of its share of the budget.
            while size < largest and bench.once(run) * 8 < share * bench.budget_s / 8:
                size *= 2
                run = _product(bench, precision, size)
                bench.once(run)
            flops = 2 * size**3
            rates = [flops / seconds for seconds in bench.repeat(lambda: bench.once(run), share)]
        except RuntimeError as problem:
            first_line = str(problem).strip().splitlines()[0]
            bench.progress(f"{precision} matmul: not offered here ({first_line})")
            return None
    return bench.fact(rates, "FLOP/s", f"{precision} matmul {size} x {size} x {size}")


def _peaks(bench: Bench, wanted: list[tuple[Engine, str, float]], largest: int) -> list[Peak]:
    peaks = []
    for engine, precision, share in wanted:
        rate = _matmul_rate(bench, precision, share, largest)
        if rate is not None:
            peaks.append(Peak(engine, precision, rate))
    return peaks


# Memory


def _bandwidths(bench: Bench, cache: float, capacity: float, share: float) -> dict[str, Fact]:
    """Copy (read and write) and read-only bandwidth of buffers far beyond the caches."""
    import torch

    elements = stream_size(bench, cache, capacity)
    source = bench.random(elements)
    target = torch.empty_like(source)
    size = 4 * elements
    megabytes = f"{size / 1e6:.0f} MB"

    def rates(run: Callable[[], object], moved: int) -> list[float]:
        return [moved / s for s in bench.repeat(lambda: bench.once(run), share / 2)]

    return {
        "copy": bench.fact(
            rates(lambda: target.copy_(source), 2 * size),
            "byte/s",
            f"copy of {megabytes}, bytes read plus bytes written",
        ),
        "read": bench.fact(
            rates(lambda: source.sum(), size), "byte/s", f"sum of {megabytes}, bytes read"
        ),
    }


# Host costs


def _eager(bench: Bench, share: float) -> dict[str, Fact]:
    """Host seconds of eager PyTorch: per kernel, per view, per call of a module."""
    ways = {
        "dispatch_eager": (eager_dispatch, f"eager stack of {OPS} tiny ops, per op"),
        "dispatch_view": (view_dispatch, f"{OPS} views of a tiny tensor, per view"),
        "module_call": (module_call, f"stack of {OPS} modules that do nothing, per module"),
    }
    facts = {}
    for name, (sampler, what) in ways.items():
        note = "a module with options, hooks or checks takes longer" if "module" in name else ""
        samples = bench.repeat(sampler(bench), share / len(ways))
        facts[name] = bench.fact(samples, "second", what, note)
    return facts


def _dispatch_compiled(bench: Bench, share: float) -> Fact:
    samples = bench.repeat(direct_dispatch(bench), share)
    note = "as generated code calls its external kernels; torch.compile itself was not run"
    return bench.fact(samples, "second", "8 x 8 matmul into a ready output, per call", note)


# CPU


def _measure_cpu(bench: Bench) -> Chip:
    import torch

    model = cpu_model()
    capacity = _cpu_memory()
    cache = cpu_cache(Path("/sys/devices/system/cpu"))
    told = "logical CPUs this process may use, from the OS"
    cores = Fact.of(str(bench.cores), "count", told, "measured")
    peaks = _peaks(
        bench,
        [
            ("vector", "fp32", 0.22),
            ("matrix", "bf16", 0.18),
            ("matrix", "fp16", 0.08),
            ("vector", "fp64", 0.08),
        ],
        largest=4096,
    )
    bandwidths = _bandwidths(bench, cache.value if cache else 0.0, capacity.value, 0.14)
    compiled, eager = _dispatch_compiled(bench, 0.05), _eager(bench, 0.1)
    return Chip(
        name=slug(model),
        title=f"{model}, {torch.get_num_threads()} threads, as measured",
        vendor=_vendor(model),
        kind="cpu",
        peaks=tuple(peaks),
        memory_capacity=capacity,
        memory_bandwidth=bandwidths["copy"],
        l2_capacity=cache,
        sm_count=cores,
        kernel_gap=Fact.of(
            "0 s", "second", "a CPU has no queue: the cost of an op is the host's", "derived"
        ),
        dispatch_eager=eager["dispatch_eager"],
        dispatch_view=eager["dispatch_view"],
        module_call=eager["module_call"],
        dispatch_compiled=compiled,
        graph_launch=replace(
            compiled, kind="derived", note="a CPU has no graphs: one call of compiled code"
        ),
        measured={"read_bandwidth": bandwidths["read"]},
    )


def _cores() -> int:
    """Logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _vendor(model: str) -> str:
    known = ("Intel", "AMD", "Apple", "NVIDIA", "Ampere")
    return next((name for name in known if name.lower() in model.lower()), "unknown")


def _cpu_memory(limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> Fact:
    """Physical memory, or the container's share of it where that is less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        raise MeasureError(
            "this system does not tell its memory (os.sysconf): write the chip TOML by hand"
        ) from None
    source = "physical memory, from the OS"
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        limit = int(limit_file.read_text())
        if limit < total:
            total, source = limit, "memory limit of this container, from the OS"
    return Fact.of(f"{total // 2**20} MiB", "byte", source, "measured")


# CUDA


def _measure_cuda(bench: Bench) -> Chip:
    import torch

    properties = torch.cuda.get_device_properties(bench.device)
    told = f"torch.cuda.get_device_properties, torch {torch.__version__}"
    capacity = Fact.of(f"{properties.total_memory // 2**20} MiB", "byte", told, "measured")
    cache = getattr(properties, "L2_cache_size", 0)
    clock = getattr(properties, "clock_rate", 0)  # kilohertz; newer torch only
    wanted: list[tuple[Engine, str, float]] = [
        ("vector", "fp32", 0.08),
        ("matrix", "tf32", 0.08),
        ("matrix", "bf16", 0.14),
        ("matrix", "fp16", 0.08),
        ("matrix", "fp8", 0.08),
        ("matrix", "int8", 0.08),
        ("matrix", "fp64", 0.06),
    ]
    bandwidths = _bandwidths(bench, float(cache), capacity.value, 0.1)
    (gap, launch), eager = _graph(bench, 0.1), _eager(bench, 0.05)
    return Chip(
        name=slug(properties.name),
        title=f"{properties.name}, as measured",
        vendor=_vendor(properties.name) if torch.version.hip is None else "AMD",
        kind="gpu",
        architecture=getattr(properties, "gcnArchName", "").partition(":")[0]
        if torch.version.hip
        else f"sm_{properties.major}{properties.minor}",
        peaks=tuple(_peaks(bench, wanted, largest=8192)),
        memory_capacity=capacity,
        memory_bandwidth=bandwidths["copy"],
        l2_capacity=Fact.of(f"{cache // 2**10} KiB", "byte", told, "measured") if cache else None,
        sm_count=Fact.of(str(properties.multi_processor_count), "count", told, "measured"),
        clock=Fact.of(f"{clock // 1000} MHz", "hertz", told, "measured") if clock else None,
        kernel_gap=gap,
        dispatch_eager=eager["dispatch_eager"],
        dispatch_view=eager["dispatch_view"],
        module_call=eager["module_call"],
        dispatch_compiled=_dispatch_compiled(bench, 0.05),
        graph_launch=launch,
        measured={"read_bandwidth": bandwidths["read"]},
    )


def _graph(bench: Bench, share: float) -> tuple[Fact, Fact]:
    """Device seconds per tiny kernel, and host seconds per launch, of one captured graph."""
    period, launch_once = graph_of_tiny_kernels(bench)
    periods = bench.repeat(period, share / 2)
    note = "an 8-element kernel's own time is in it: that is what a kernel costs beside its work"
    gap = bench.fact(periods, "second", f"graph of {OPS} dependent tiny kernels, per kernel", note)
    launches = bench.repeat(launch_once, share / 2)
    launch = bench.fact(launches, "second", f"launch of a graph of {OPS} kernels, host time")
    return gap, launch
