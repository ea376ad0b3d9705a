"""Memory of the device: bytes that the recording has alive, in the words of PyTorch's allocator.

The recording knows the bytes of tensors.  Which blocks and segments the allocator would make of
them is priced elsewhere, after the run: here reserved memory is the largest so far in segments of
2 MiB, which a real allocator exceeds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from rooftrace.tracer.emulation.refused import DeviceError, refusal
from rooftrace.tracer.emulation.state import Answers, Emulation
from rooftrace.tracer.patches import original_of

_cuda: Any = torch.cuda
_SEGMENT = 2 << 20
_KIND = "memory"
_GIB = 1 << 30


def _read(here: Emulation) -> tuple[int, int, int, int]:
    """Bytes allocated, their peak, bytes reserved, their peak."""
    here.assume(
        _KIND,
        "torch.cuda's memory numbers are those of the tensors that the recording has alive; "
        "reserved memory is the largest of them in segments of 2 MiB",
    )
    settings: Any = here.settings
    allocated = here.meter.allocated()
    peak = max(here.meter.peak(), allocated)
    most = peak if peak > settings.get("peak_when_emptied", 0) else allocated
    reserved = settings["reserved"] = max(settings.get("reserved", 0), _in_segments(most))
    top = settings["reserved_peak"] = max(settings.get("reserved_peak", 0), reserved)
    return allocated, peak, reserved, top


def _in_segments(size: int) -> int:
    return -(-size // _SEGMENT) * _SEGMENT


def free(here: Emulation) -> int:
    """Bytes of the device that nobody has."""
    *_, reserved, _ = _read(here)
    return max(here.device.memory - here.device.context - reserved, 0)


def _statistics(here: Emulation) -> dict[str, Any]:
    """Statistics of the allocator as nested dictionaries, as far as they are known."""
    allocated, peak, reserved, top = _read(here)
    tensors = {"all": {"current": allocated, "peak": peak}}
    segments = {"all": {"current": reserved, "peak": top}}
    inactive = {"all": {"current": reserved - allocated, "peak": top}}
    return {
        "allocated_bytes": tensors,
        "requested_bytes": tensors,
        "active_bytes": tensors,
        "reserved_bytes": segments,
        "inactive_split_bytes": inactive,
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "max_split_size": -1,
    }


def answers(here: Emulation) -> Iterator[Answers]:
    """Functions of torch._C that a build without CUDA lacks, and of torch.cuda that show more."""
    yield torch._C, _names(here)
    yield _cuda, _functions(here)
    statistics = original_of(_cuda.memory, "memory_stats")
    yield _cuda, {"memory_stats": lambda device=None: Statistics(statistics(device))}


def _names(here: Emulation) -> dict[str, Any]:
    settings = here.settings

    def reset_peak(device: int = 0) -> None:
        here.meter.reset_peak()
        settings.pop("reserved_peak", None)
        settings.pop("peak_when_emptied", None)

    def empty() -> None:
        allocated, peak, *_ = _read(here)
        settings["reserved"], settings["peak_when_emptied"] = _in_segments(allocated), peak

    def set_fraction(fraction: float, device: int = 0) -> None:
        settings["memory_fraction"] = fraction
        here.assume(
            "memory fraction",
            f"set_per_process_memory_fraction({fraction}): a limit below the device's memory is "
            "not enforced",
        )

    def history(enabled: Any = None, *args: Any, **kwargs: Any) -> None:
        if enabled:
            raise DeviceError.of(
                "torch.cuda.memory._record_memory_history",
                "there are no blocks of an allocator whose history could be kept",
                "The report has the memory of the step over time, by role",
            )

    hidden = "there are no blocks of an allocator"
    report = "The report has the memory of the step over time, by role"
    snapshot = refusal("torch.cuda.memory_snapshot", hidden, report)
    pinned = refusal("torch.cuda.host_memory_stats", "pinned memory is not counted")
    return {
        "_cuda_memoryStats": lambda device: _statistics(here),
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_hostMemoryStats": pinned,
        "_cuda_emptyCache": empty,
        "_host_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: settings.get("memory_fraction", 1.0),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": history,
        "_cuda_record_memory_history_legacy": history,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_cuda_allocationTraceback": snapshot,
        "_cuda_cudaCachingAllocator_set_allocator_settings": lambda text: None,
    }


def _functions(here: Emulation) -> dict[str, Any]:
    def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
        allocated, peak, reserved, top = _read(here)
        rows = (
            ("Allocated memory", allocated, peak),
            ("GPU reserved memory", reserved, top),
        )
        lines = [
            f"Memory of {here.device.name} (emulated), device {here.current}",
            f"{'':<22}{'now':>14}{'peak':>14}",
            *(
                f"{name:<22}{now / _GIB:>10.3f} GiB{most / _GIB:>10.3f} GiB"
                for name, now, most in rows
            ),
            "Blocks, segments and retries of the allocator are not known.",
        ]
        return "\n".join(lines)

    pools = "memory pools are the allocator's, which is not run"
    return {
        "memory_summary": memory_summary,
        "change_current_allocator": refusal("torch.cuda.memory.change_current_allocator", pools),
        "use_mem_pool": refusal("torch.cuda.use_mem_pool", pools),
    }


class Statistics(OrderedDict[str, Any]):
    """What `torch.cuda.memory_stats()` returns; a statistic that is not known is an error."""

    def __missing__(self, name: str) -> Any:
        raise DeviceError.of(
            f"torch.cuda.memory_stats()[{name!r}]",
            f"the recording knows bytes, not blocks: {', '.join(self)}",
        )
