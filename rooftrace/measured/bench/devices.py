"""The devices of this machine: their names, their own facts, and the measuring conditions.

torch is imported when a function is called.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.chip import Fact
from rooftrace.measured.bench.clock import Bench, MeasureError

if TYPE_CHECKING:
    import torch

_SIZES = {"cpu": 2.0**26, "cuda": 2.0**30}
"""Bytes of a buffer, at least; by the kind of device."""
_CACHES = 4
_TIMES, _TIMES_AT_LEAST, _LONG_ENOUGH = 15, 5, 1.0  # copies; seconds of them all
_SHARE = 1 / 16
"""Of the memory that is free, a buffer takes no more."""
_PACKAGES = ("rooftrace", "torch", "transformers", "triton", "numpy")
IDENTITY = ("type", "name", "memory_bytes", "threads")
"""The facts that tell devices apart: equal in two measurements of one device."""


def default_device() -> str:
    """cuda where torch sees one, else cpu."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def checked_device(device: str) -> torch.device:
    """The torch device of this name.  Raises MeasureError for one that is not there."""
    import torch

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
    """Name, type, memory and what else is known, without anything that names this machine."""
    import torch

    if device.type == "cuda":
        return _cuda_facts(device)
    return {
        "type": "cpu",
        "name": cpu_model(),
        "memory_bytes": None,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cuda_facts(device: torch.device) -> dict[str, Any]:
    import torch

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
        "float32_matmul": _told(torch.get_float32_matmul_precision),
        "tf32_convolution": _told(lambda: torch.backends.cudnn.allow_tf32),
    }


def _told(read: Callable[[], Any]) -> Any:
    """A setting; None if torch raises, because its old and new switches exclude each other."""
    try:
        return read()
    except RuntimeError:
        return None


def clocks(device: torch.device) -> str | None:
    """Clocks, power and temperature now; None where the device does not tell."""
    if device.type != "cuda":
        return None
    return smi(device, ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu"))


def smi(device: torch.device, names: Sequence[str]) -> str | None:
    """Values that nvidia-smi reads; None where there is no nvidia-smi.  It changes nothing."""
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
    """Versions of Python and the libraries that matter; those that are not there are left out."""
    import torch

    versions_here = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions_here.setdefault(package, version(package))
    return versions_here


def load_note() -> str | None:
    """How busy the machine is, where the OS tells."""
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
    """How many fp32 numbers a buffer has that no cache holds: its bytes are several times those of
    the last cache, and a small part of the room in memory."""
    wanted = max(_CACHES * cache, _SIZES[bench.device.type])
    return max(int(min(wanted, room * _SHARE)) // 4, 1)


def copy_seconds(bench: Bench) -> tuple[int, tuple[float, ...]]:
    """The bytes that one copy reads and writes, and the seconds of each of several.

    Where a copy takes long, fewer of them are made: 5 at least.
    """
    import torch

    cache, room = 0.0, float("inf")
    if bench.on_cuda:
        room = float(torch.cuda.mem_get_info(bench.device)[0])
    elif known := cpu_cache(Path("/sys/devices/system/cpu")):
        cache = known.value
    source = bench.random(stream_size(bench, cache, room))
    target = torch.empty_like(source)
    run = lambda: target.copy_(source)  # noqa: E731
    bench.once(run)
    seconds = [bench.once(run) for _ in range(_TIMES_AT_LEAST)]
    while len(seconds) < _TIMES and sum(seconds) < _LONG_ENOUGH:
        seconds.append(bench.once(run))
    return 8 * source.numel(), tuple(seconds)
