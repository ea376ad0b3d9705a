"""Answers of torch about its CUDA libraries: versions, switches, NVTX, NCCL, gradient scaling."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from rooftrace.scripts.fake_cuda.state import Answers, Emulation, refusal
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import original_of

_CUDA_UNTIL = (2, 11)
_HIP = "6.4.0"
_CUDNN = 91002
_NCCL = (2, 27, 5)
_BUILT_WITH: str | None = torch.version.cuda


def cuda_version() -> str:
    """The CUDA that torch was built with; else that of PyTorch's wheel on PyPI, of this release."""
    if _BUILT_WITH is not None:
        return _BUILT_WITH
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return "12.8" if release < _CUDA_UNTIL else "13.0"


def answers(here: Emulation) -> Iterator[Answers]:
    """The answers of each of these libraries."""
    yield torch.version, _version(here)
    yield torch_private.bindings, {**_settings(here), **_collectives()}
    if _BUILT_WITH is None:
        yield torch_private.bindings, _built_with(here)
        yield torch.backends.cudnn.m, _cudnn(here)  # type: ignore[attr-defined]
    if not isinstance(torch_private.nvtx_bindings, ModuleType):
        yield type(torch_private.nvtx_bindings), _nvtx()
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        if hasattr(sys.modules.get(name), "is_nccl_available"):
            yield sys.modules[name], {"is_nccl_available": lambda: True}
    yield from _profilers(here)
    yield torch.amp.GradScaler, _scaling(here)


def _version(here: Emulation) -> dict[str, Any]:
    if here.device.is_rocm:
        return {"cuda": None, "hip": _HIP}
    here.assume("CUDA", f"torch.version.cuda says {cuda_version()}, as PyTorch's wheels do")
    return {"cuda": cuda_version()}


def _built_with(here: Emulation) -> dict[str, Any]:
    """Attributes of torch._C: which libraries torch was built with."""
    major, minor = (int(part) for part in cuda_version().split("."))
    nccl, nccl_minor, patch = _NCCL
    return {
        "_has_cuda": True,
        "_has_cudnn": True,
        "_cuda_getCompiledVersion": lambda: 1000 * major + 10 * minor,
        "_nccl_version": lambda: nccl << 32 | nccl_minor << 16 | patch,
        "_nccl_version_suffix": lambda: b"",
        "_is_flash_attention_available": lambda: here.device.capability >= (8, 0),
    }


_KEPT: dict[str, tuple[str, str, object]] = {
    "_cuda_{}_cudnn_benchmark_limit": ("get", "set", 10),
    "_cuda_{}CublasWorkspaceSize": ("get", "set", 0),
    "_cuda_{}CublasLtWorkspaceSize": ("get", "set", 0),
    "_cuda_{}_conv_benchmark_empty_cache": ("get", "set", True),
    "_cuda_{}_sync_debug_mode": ("get", "set", 0),
    "_cuda_{}MemoryMetadata": ("get", "set", ""),
    "_accelerator_{}AllocatorSettings": ("get", "set", ""),
    "_cuda_cudaCachingAllocator_{}": ("is_enabled", "enable", True),
}
"""Settings that change no op: their names and defaults."""


def _settings(here: Emulation) -> dict[str, Any]:
    """Functions of torch._C that read and write settings."""
    kept = here.settings
    functions: dict[str, Any] = {}
    for name, (read, write, first) in _KEPT.items():
        functions[name.format(read)] = functools.partial(kept.get, name, first)
        functions[name.format(write)] = functools.partial(kept.__setitem__, name)
    return functions


def _cudnn(here: Emulation) -> dict[str, Any]:
    def version() -> int:
        here.assume("cuDNN", f"torch.backends.cudnn.version() says {_CUDNN}")
        return _CUDNN

    return {"version": version, "_init": lambda: True}


def _nvtx() -> dict[str, Any]:
    """Functions of NVTX, as torch.cuda.nvtx calls them; nobody listens."""
    depth = [0]

    def push(message: str) -> int:
        depth[0] += 1
        return depth[0] - 1

    def pop() -> int:
        depth[0] = max(depth[0] - 1, 0)
        return depth[0]

    def nothing(*args: Any) -> None:
        pass

    return {
        "rangePushA": staticmethod(push),
        "rangePop": staticmethod(pop),
        "rangeStartA": staticmethod(lambda message: 1),
        "rangeEnd": staticmethod(nothing),
        "markA": staticmethod(nothing),
        "deviceRangeStart": staticmethod(lambda message, stream=0: 1),
        "deviceRangeEnd": staticmethod(nothing),
    }


def _profilers(here: Emulation) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Classes of torch's profilers, and methods that would watch a device."""
    home: Any = torch.autograd.profiler
    make = original_of(home.profile, "__init__")

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_device") == "cuda" or kwargs.get("use_cuda"):
            here.assume(
                "profiler",
                "torch.profiler sees what this host does: its trace has no kernels",
            )
            kwargs = {**kwargs, "use_device": None, "use_cuda": False}
        make(self, *args, **kwargs)

    yield home.profile, {"__init__": init}
    yield (
        home.emit_nvtx,
        {"__enter__": lambda self: self, "__exit__": lambda self, *exception: None},
    )


def _scaling(here: Emulation) -> dict[str, Any]:
    """Methods of `torch.amp.GradScaler`, which the older classes inherit."""
    step = original_of(torch.amp.GradScaler, "step")

    def stepped(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            here.assume(
                "found_inf",
                "GradScaler finds no inf or nan in gradients: no step is skipped, and the scale "
                "grows as it does then",
            )
        return step(self, optimizer, *args, **kwargs)

    return {"step": stepped}


def _collectives() -> dict[str, Any]:
    """Functions of torch._C that copy between devices of one process; one device needs no copy."""
    reason = "one device is emulated for each process"
    instead = "Run one process for each device (torchrun, DistributedDataParallel)"

    def refused(name: str) -> Callable[..., Any]:
        return refusal(f"torch._C.{name} (torch.cuda.comm, DataParallel)", reason, instead)

    def to_all(name: str, copy: Callable[[Any], Any]) -> Callable[..., Any]:
        several = refused(name)

        def sent(tensors: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
            if len(devices) > 1:
                several()
            return (copy(tensors),)

        return sent

    def gather(tensors: Any, *args: Any) -> Any:
        return tensors[0] if len(tensors) == 1 else refused("_gather")()

    here = torch.device("cuda")
    return {
        **{name: refused(name) for name in _BETWEEN},
        "_broadcast": to_all("_broadcast", lambda tensor: tensor),
        "_broadcast_coalesced": to_all("_broadcast_coalesced", list),
        "_scatter": to_all("_scatter", lambda tensor: tensor.to(here)),
        "_gather": gather,
    }


_BETWEEN = (
    "_broadcast_out",
    "_scatter_out",
    "_gather_out",
    "_nccl_all_reduce",
    "_nccl_all_gather",
    "_nccl_broadcast",
    "_nccl_reduce",
    "_nccl_reduce_scatter",
    "_nccl_init_rank",
    "_nccl_unique_id",
)
"""Functions of torch._C that write into tensors of several devices."""
