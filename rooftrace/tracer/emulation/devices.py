"""Which devices there are, and which one a thread uses: what torch.cuda asks of its C half."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from rooftrace.tracer.emulation import memory
from rooftrace.tracer.emulation.refused import kernel_refused, refusal
from rooftrace.tracer.emulation.state import Answers, Emulation

_cuda: Any = torch.cuda
_BUILT_FOR = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Architectures of PyTorch's own wheels."""


def answers(here: Emulation) -> Iterator[Answers]:
    """What torch.cuda asks of its C half, and functions of its own that ask more."""
    yield torch._C, _names(here)
    yield torch.cuda, _functions(here)
    yield _cuda.CudaError, {"__init__": _named_by_its_code}


def _names(here: Emulation) -> dict[str, Any]:
    def architectures() -> str:
        own = here.device.architecture
        return own if here.device.is_rocm else " ".join(dict.fromkeys((*_BUILT_FOR, own)))

    return {
        "_cuda_getDeviceCount": lambda: here.count,
        "_cuda_init": lambda: None,
        "_cuda_getDevice": lambda: here.current,
        "_cuda_setDevice": here.choose,
        "_cuda_exchangeDevice": here.exchange,
        "_cuda_maybeExchangeDevice": here.exchange,
        "_cuda_hasPrimaryContext": lambda index: here.used and index == here.current,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getArchFlags": architectures,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_synchronize": here.clock.synchronize,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_tunableop_is_enabled": lambda: False,
        "_cuda_tunableop_tuning_is_enabled": lambda: False,
        "_cuda_record_untuned_is_enabled": lambda: False,
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),  # a type to name
    }


def _functions(here: Emulation) -> dict[str, Any]:
    def initialize() -> None:
        here.initialized = True

    def call(function: Any, **kwargs: Any) -> None:
        function()  # nothing has to wait until there is a device

    def runtime() -> Any:
        initialize()
        return library

    library = Runtime(here)
    return {
        "_lazy_init": initialize,
        "is_initialized": lambda: here.used,
        "_lazy_call": call,
        "cudart": runtime,
        "check_error": _check,
        "_exchange_device": here.exchange,
        "_maybe_exchange_device": here.exchange,
        "_compile_kernel": _kernel,
        "_get_device_properties": here.device.properties,
        "_device_count_nvml": lambda: -1,
        **{name: refusal(f"torch.cuda.{name}", *_SENSORS) for name in _MEASURED},
    }


def _kernel(kernel_source: str, kernel_name: str, *args: Any, **kwargs: Any) -> Any:
    """A kernel of CUDA source, which may be named and not launched."""

    def launched(*args: Any, **kwargs: Any) -> None:
        raise kernel_refused(f"the CUDA kernel {kernel_name}")

    launched.set_shared_memory_config = lambda nbytes: None  # type: ignore[attr-defined]
    return launched


_MEASURED = (
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "memory_usage",
    "device_memory_used",
    "list_gpu_processes",
    "_get_pynvml_handler",
)
"""Functions of torch.cuda that NVML answers."""
_SENSORS = (
    "NVML has no sensor to read",
    "Leave this call out of the run, for example behind a flag",
)


class Runtime:
    """Stands for the CUDA runtime library: `torch.cuda.cudart()`."""

    cudaError = SimpleNamespace(success=0)
    cudaOutputMode = SimpleNamespace(KeyValuePair=0, CSV=1)

    def __init__(self, here: Emulation) -> None:
        self._here = here

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        """Bytes that are free, and in total."""
        return memory.free(self._here), self._here.device.memory

    def cudaGetErrorString(self, error: Any) -> str:
        """What an error is called."""
        return "no error" if not error else f"CUDA error {error}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _NOTHING:
            return lambda *args, **kwargs: 0
        return refusal(f"torch.cuda.cudart().{name}", "no CUDA runtime runs")


_NOTHING = (
    "cudaProfilerStart",
    "cudaProfilerStop",
    "cudaProfilerInitialize",
    "cudaHostRegister",
    "cudaHostUnregister",
)
"""Calls of the runtime that succeed and change nothing that is counted."""


def _check(result: Any) -> None:
    if result:
        raise torch.cuda.CudaError(result)


def _named_by_its_code(error: Any, code: int) -> None:
    """Stands for the method of `CudaError`, which asks the runtime for the error's name."""
    RuntimeError.__init__(error, f"CUDA error ({code})")
