"""Measures the machine it runs on as a `Chip`, and reads its devices and measuring conditions."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rooftrace._processes import processors
from rooftrace.hardware import Chip, load_host
from rooftrace.hardware.chip import Engine, Fact, Peak
from rooftrace.measured.bench.clock import (
    OPS,
    Bench,
    MeasureError,
    direct_dispatch,
    eager_dispatch,
    graph_of_tiny_kernels,
    module_call,
    pinned_threads,
    view_dispatch,
)

# -- the machine as a chip -------------------------------------------------------------------------
# Every rate is the median of several repetitions on random data after a warm-up; its source text
# has their number, their spread, and the release of torch.


def measure_chip(
    device: str = "cpu", budget_s: float = 20.0, progress: Callable[[str], None] | None = None
) -> Chip:
    """Measure `device` ("cpu", "cuda", "cuda:1") in about `budget_s` seconds.

    The result has sustained rates: price with it as with any chip.  A rate that torch does not
    offer on this device is left out.
    """
    if not budget_s > 0:
        raise MeasureError(f"budget_s = {budget_s!r}: expected a number of seconds above 0")
    target = checked_device(device)
    report = progress or (lambda line: None)
    with torch.inference_mode():
        if target.type == "cuda":
            with torch.cuda.device(target):
                return _measure_cuda(Bench(target, budget_s, report))
        cores = processors()  # before threads are pinned
        with pinned_threads() as pinned:
            return _measure_cpu(Bench(target, budget_s, report, cores, pinned))


def _product(bench: Bench, precision: str, size: int) -> Callable[[], object]:
    """A [size, size] @ [size, size] product in `precision`, ready to run."""
    from rooftrace.tracer import torch_private

    left, right = bench.random(size, size), bench.random(size, size)
    if precision == "fp8":
        unit = torch.ones((), device=bench.device)
        # The fp8 kernels want the right operand column-major.
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t().contiguous().t()
        return lambda: torch_private.scaled_mm(
            a, b, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16
        )
    if precision == "int8":
        a, b = (left * 30).to(torch.int8), (right * 30).to(torch.int8).t().contiguous().t()
        return lambda: torch_private.int_mm(a, b)
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


def _bandwidths(bench: Bench, cache: float, capacity: float, share: float) -> dict[str, Fact]:
    """Copy (read and write) and read-only bandwidth of buffers far beyond the caches."""
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


def _eager(bench: Bench, share: float) -> dict[str, Fact]:
    """Host seconds of eager PyTorch: per kernel, per view, per call of a module."""
    ways = {
        "dispatch_eager": (eager_dispatch, f"eager stack of {OPS} tiny ops, per op"),
        "dispatch_view": (view_dispatch, f"{OPS} views of a tiny tensor, per view"),
        "module_call": (module_call, f"stack of {OPS} modules that do nothing, per module"),
    }
    facts = {}
    for name, (sampler, case) in ways.items():
        note = "a module with options, hooks or checks takes longer" if "module" in name else ""
        samples = bench.repeat(sampler(bench), share / len(ways))
        facts[name] = bench.fact(samples, "second", case, note)
    return facts


def _dispatch_compiled(bench: Bench, share: float) -> Fact:
    samples = bench.repeat(direct_dispatch(bench), share)
    note = "as generated code calls its external kernels; torch.compile itself was not run"
    return bench.fact(samples, "second", "8 x 8 matmul into a ready output, per call", note)


def _measure_cpu(bench: Bench) -> Chip:
    model = cpu_model()
    capacity = _cpu_memory()
    cache = cpu_cache(Path("/sys/devices/system/cpu"))
    source = "logical CPUs this process may use, from the OS"
    cores = Fact.of(str(bench.cores), "count", source, "measured")
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
        graph_entry=load_host("typical").facts["graph_entry"],
        read_back=load_host("typical").facts["read_back"],
        graph_launch=replace(
            compiled, kind="derived", note="a CPU has no graphs: one call of compiled code"
        ),
        measured={"read_bandwidth": bandwidths["read"]},
    )


def _vendor(model: str) -> str:
    vendors = ("Intel", "AMD", "Apple", "NVIDIA", "Ampere")
    return next((name for name in vendors if name.lower() in model.lower()), "unknown")


def _cpu_memory(limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> Fact:
    """Physical memory, or the limit of the container where that is less."""
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


def _measure_cuda(bench: Bench) -> Chip:
    properties = torch.cuda.get_device_properties(bench.device)
    source = f"torch.cuda.get_device_properties, torch {torch.__version__}"
    capacity = Fact.of(f"{properties.total_memory // 2**20} MiB", "byte", source, "measured")
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
        l2_capacity=Fact.of(f"{cache // 2**10} KiB", "byte", source, "measured") if cache else None,
        sm_count=Fact.of(str(properties.multi_processor_count), "count", source, "measured"),
        clock=Fact.of(f"{clock // 1000} MHz", "hertz", source, "measured") if clock else None,
        kernel_gap=gap,
        dispatch_eager=eager["dispatch_eager"],
        dispatch_view=eager["dispatch_view"],
        module_call=eager["module_call"],
        dispatch_compiled=_dispatch_compiled(bench, 0.05),
        graph_entry=load_host("typical").facts["graph_entry"],
        read_back=load_host("typical").facts["read_back"],
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


# -- devices and conditions ------------------------------------------------------------------------

_SIZES = {"cpu": 2.0**26, "cuda": 2.0**30}
"""Bytes of a buffer, at least; by the kind of device."""
_CACHES = 4
_TIMES, _TIMES_AT_LEAST, _LONG_ENOUGH = 15, 5, 1.0  # copies; seconds of them all
_SHARE = 1 / 16
"""The largest share of free memory that a buffer takes."""
_PACKAGES = ("rooftrace", "torch", "transformers", "triton", "numpy")
IDENTITY = ("type", "name", "memory_bytes", "threads")
"""The facts that tell devices apart: equal in two measurements of one device."""


def default_device() -> str:
    """cuda where torch sees one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def checked_device(device: str) -> torch.device:
    """The torch device of this name.  Raises MeasureError for one that is not there."""
    try:
        target = torch.device(device)
    except RuntimeError as problem:
        raise MeasureError(f'device "{device}": expected "cpu" or "cuda": {problem}') from problem
    if target.type not in ("cpu", "cuda"):
        raise MeasureError(f'device "{device}": expected "cpu" or "cuda"')
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here"
        raise MeasureError(f'device "{device}": {seen}')
    return target


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name, type, memory and other facts, none of which identifies this machine."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "driver": smi(device, ("driver_version",)),
            "limits": smi(device, ("clocks.max.sm", "clocks.max.mem", "power.limit")),
            "float32_matmul": _setting(torch.get_float32_matmul_precision),
            "tf32_convolution": _setting(lambda: torch.backends.cudnn.allow_tf32),
        }
    return {
        "type": "cpu",
        "name": cpu_model(),
        "memory_bytes": None,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _setting(read: Callable[[], Any]) -> Any:
    """A setting; None if torch raises, as its old and new switches exclude each other."""
    try:
        return read()
    except RuntimeError:
        return None


def clocks(device: torch.device) -> str | None:
    """Clocks, power and temperature now; None where the device does not report them."""
    if device.type != "cuda":
        return None
    return smi(device, ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"))


def smi(device: torch.device, names: Sequence[str]) -> str | None:
    """Values that nvidia-smi reads; None without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    # Several devices are listed in another order than torch's, unless all are there.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = (device.index or 0) if not visible else 0
    if len(lines) > 1 and visible:
        return None
    return lines[index].strip() if index < len(lines) else None


def versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries of `_PACKAGES`."""
    versions_here = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions_here.setdefault(package, version(package))
    return versions_here


def load_note() -> str | None:
    """The load of the machine; None where the OS does not report it."""
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
    return f"load average {load:.1f} on {os.cpu_count()} cores at the start"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware") and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "CPU"


def slug(name: str) -> str:
    """A chip name from a device's: "NVIDIA H200" -> "nvidia-h200-measured"."""
    plain = re.sub(r"\((r|tm)\)|®|™", "", name, flags=re.IGNORECASE)
    words = re.sub(r"[^a-z0-9.]+", "-", plain.lower()).strip("-.")
    return f"{words or 'chip'}-measured"


def cpu_cache(root: Path) -> Fact | None:
    """All last-level caches together, as Linux lists them; None elsewhere."""
    caches: dict[tuple[int, str], int] = {}
    for folder in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            level = int((folder / "level").read_text())
            shared = (folder / "shared_cpu_list").read_text().strip()
            size = (folder / "size").read_text().strip()
            scale = {"K": 2**10, "M": 2**20}.get(size[-1], 1)
            caches[level, shared] = int(size.rstrip("KM")) * scale
    if not caches:
        return None
    last = max(level for level, _ in caches)
    sizes = [size for (level, _), size in caches.items() if level == last]
    text = f"{sum(sizes) // 2**10} KiB"
    source = f"{len(sizes)} x L{last} of {sizes[0] // 2**10} KiB, from /sys/devices/system/cpu"
    return Fact.of(text, "byte", source, "measured")


def stream_size(bench: Bench, cache: float, room: float) -> int:
    """fp32 numbers in a buffer beyond the caches: several times the bytes of the last one, but a
    small part of the room in memory."""
    wanted = max(_CACHES * cache, _SIZES[bench.device.type])
    return max(int(min(wanted, room * _SHARE)) // 4, 1)


def copy_seconds(bench: Bench) -> tuple[int, tuple[float, ...]]:
    """The bytes that one copy reads and writes, and the seconds of 5 to 15 copies."""
    cache, room = 0.0, float("inf")
    if bench.on_cuda:
        room = float(torch.cuda.mem_get_info(bench.device)[0])
    elif last := cpu_cache(Path("/sys/devices/system/cpu")):
        cache = last.value
    source = bench.random(stream_size(bench, cache, room))
    target = torch.empty_like(source)
    run = lambda: target.copy_(source)  # noqa: E731
    bench.once(run)
    seconds = [bench.once(run) for _ in range(_TIMES_AT_LEAST)]
    while len(seconds) < _TIMES and sum(seconds) < _LONG_ENOUGH:
        seconds.append(bench.once(run))
    return 8 * source.numel(), tuple(seconds)
