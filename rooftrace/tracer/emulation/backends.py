"""What torch says of its libraries for CUDA: versions, switches, NVTX, NCCL."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rooftrace.tracer.emulation.refused import refusal
from rooftrace.tracer.emulation.state import Emulation
from rooftrace.tracer.patches import original_of

_c: Any = torch._C
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


def version(here: Emulation) -> dict[str, Any]:
    """Attributes of torch.version."""
    if here.device.is_rocm:
        return {"cuda": None, "hip": _HIP}
    here.assume("CUDA", f"torch.version.cuda says {cuda_version()}, as PyTorch's wheels do")
    return {"cuda": cuda_version()}


def names(here: Emulation) -> dict[str, Any]:
    """Attributes of torch._C: which libraries torch was built with."""
    major, minor = (int(part) for part in cuda_version().split("."))
    nccl, nccl_minor, patch = _NCCL
    told = {
        "_has_cuda": True,
        "_has_cudnn": True,
        "_cuda_getCompiledVersion": lambda: 1000 * major + 10 * minor,
        "_nccl_version": lambda: nccl << 32 | nccl_minor << 16 | patch,
        "_nccl_version_suffix": lambda: b"",
        "_is_flash_attention_available": lambda: here.device.capability >= (8, 0),
    }
    return told if _BUILT_WITH is None else {}


_KEPT = {
    "_cuda_{}_cudnn_benchmark_limit": ("get", "set", 10),
    "_cuda_{}CublasWorkspaceSize": ("get", "set", 0),
    "_cuda_{}CublasLtWorkspaceSize": ("get", "set", 0),
    "_cuda_{}_conv_benchmark_empty_cache": ("get", "set", True),
}
"""Settings of libraries that change no op: their names, and what they are at first."""


def settings(here: Emulation) -> dict[str, Any]:
    """Functions of torch._C that read and write settings of libraries."""
    kept = here.settings
    functions: dict[str, Any] = {}
    for name, (read, write, first) in _KEPT.items():
        functions[name.format(read)] = functools.partial(kept.get, name, first)
        functions[name.format(write)] = functools.partial(kept.__setitem__, name)
    return functions


def cudnn_functions(here: Emulation) -> dict[str, Any]:
    """Functions of torch.backends.cudnn; a build for CUDA has its own."""
    if _BUILT_WITH is not None:
        return {}

    def version() -> int:
        here.assume("cuDNN", f"torch.backends.cudnn.version() says {_CUDNN}")
        return _CUDNN

    return {"version": version, "_init": lambda: True}


def nvtx_functions() -> dict[str, Any]:
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


def profilers(here: Emulation) -> Iterator[tuple[Any, dict[str, Any]]]:
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


# -- switches --------------------------------------------------------------------------------------

_OPS = ("all", "matmul", "conv", "rnn")
_SWITCHES = (
    ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
    ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    ("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    ("_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"),
    ("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    ("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
)
_REDUCTIONS = ("fp16", "bf16")
_LEGACY = (
    ("_get_float32_matmul_precision", "_set_float32_matmul_precision"),
    ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
    ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
)
_LIBRARIES = {"generic": ("all",), "cuda": _OPS, "mkldnn": _OPS}
"""For which torch 2.9 and later keep precisions of fp32, and of which ops."""


@contextlib.contextmanager
def switches_put_back() -> Iterator[None]:
    """Switches of the whole process that a script for CUDA sets are as before at the end."""
    undo = [_restorer(read, write) for read, write in _SWITCHES]
    for kind in _REDUCTIONS:
        name = f"cublas_allow_{kind}_reduced_precision_reduction"
        undo.append(_restorer(f"_get_{name}", f"_set_{name}"))
    precisions = _precisions()
    try:
        yield
    finally:
        for restore in undo:
            restore()
        if _precisions() != precisions:
            _set_precisions(precisions)


def _precisions() -> dict[tuple[str, ...], Any]:
    """What products of fp32 may be computed in, as each of torch's ways to ask says it."""
    precisions: dict[tuple[str, ...], Any] = {}
    for read, write in _LEGACY:
        with contextlib.suppress(RuntimeError):  # asked one way, what was set another way
            precisions[write,] = getattr(_c, read)()
    get = getattr(_c, "_get_fp32_precision_getter", None)
    if get is not None:
        for library, ops in _LIBRARIES.items():
            precisions.update({(library, op): get(library, op) for op in ops})
    return precisions


def _set_precisions(precisions: dict[tuple[str, ...], Any]) -> None:
    """Set them the older way first, which sets some of the newer ones."""
    for where, value in precisions.items():
        if len(where) == 1:
            getattr(_c, where[0])(value)
        else:
            _c._set_fp32_precision_setter(*where, value)


def _restorer(read: str, write: str) -> Callable[[], Any]:
    """What sets a switch as it is now; nothing where this release has none."""
    get, put = getattr(_c, read, None), getattr(_c, write, None)
    if get is None or put is None:
        return lambda: None
    value = get()

    def restore() -> None:
        if get() != value:
            put(*(value if isinstance(value, tuple) else (value,)))

    return restore


def distributed(here: Emulation) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Modules of torch.distributed, and functions of theirs."""
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "is_nccl_available"):
            yield module, {"is_nccl_available": lambda: True}


def collective_names() -> dict[str, Any]:
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
