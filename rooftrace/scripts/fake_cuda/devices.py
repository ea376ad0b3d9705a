"""Answers of torch.cuda and torch.accelerator on emulated devices, defaults, and legacy names."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rooftrace.scripts.fake_cuda import memory
from rooftrace.scripts.fake_cuda.memory import free
from rooftrace.scripts.fake_cuda.state import Answers, Emulation, kernel_refused, refusal
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import original_of

# -- devices ---------------------------------------------------------------------------------------
# Which devices there are, and which one a thread uses: the C half of torch.cuda.

_cuda: Any = torch.cuda
_BUILT_FOR = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Architectures of PyTorch's wheels."""


def answers(here: Emulation) -> Iterator[Answers]:
    """Answers for the C half of torch.cuda, and for functions of torch.cuda that need more."""
    yield torch_private.bindings, _names(here)
    yield torch.cuda, _functions(here)
    yield _cuda.CudaError, {"__init__": _named_by_its_code}


def _names(here: Emulation) -> dict[str, Any]:
    def architectures() -> str:
        architecture = here.device.architecture
        return (
            architecture
            if here.device.is_rocm
            else " ".join(dict.fromkeys((*_BUILT_FOR, architecture)))
        )

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
        """The name of an error."""
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


# -- accelerator -----------------------------------------------------------------------------------
# torch.accelerator: the same device by its general name.


def accelerator_answers(here: Emulation) -> Iterator[Answers]:
    """Functions of torch._C that every build has, and that know no device."""
    kind = torch.device("cuda")
    answers = {
        "getAccelerator": lambda: kind,
        "getDeviceIndex": lambda: here.current,
        "setDeviceIndex": here.choose,
        "exchangeDevice": here.exchange,
        "maybeExchangeDevice": here.exchange,
        "getStream": lambda index: _cuda.current_stream(index),
        "setStream": lambda stream: _cuda.set_stream(stream),
        "synchronizeDevice": lambda index=None: here.clock.synchronize(),
        "isAllocatorInitialized": lambda: True,
        "emptyCache": lambda: torch_private.bindings._cuda_emptyCache(),
        "emptyHostCache": lambda: None,
        "getDeviceStats": lambda index: torch_private.bindings._cuda_memoryStats(index),
        "resetPeakStats": lambda index: torch_private.bindings._cuda_resetPeakMemoryStats(index),
        "resetAccumulatedStats": lambda index: None,
        "getMemoryInfo": lambda index: (free(here), here.device.memory),
        "getDeviceCapability": lambda index: {"supported_dtypes": _precisions(here)},
        "hooks_device_count": lambda: here.count,
        "hooks_get_current_device": lambda: here.current,
        "hooks_set_current_device": here.choose,
        "hooks_exchange_device": here.exchange,
        "hooks_maybe_exchange_device": here.exchange,
    }
    general = {f"_accelerator_{name}": item for name, item in answers.items()}
    yield torch_private.bindings, {**general, "_get_accelerator": lambda check=None: kind}


def _precisions(here: Emulation) -> set[torch.dtype]:
    """Precisions that tensors of the device may have."""
    newer = {name: getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
    eight = set(newer.values()) if here.device.capability >= (8, 9) else set()
    plain = {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
    return plain | eight


# -- defaults --------------------------------------------------------------------------------------
# Defaults of torch that name the device: `torch.set_default_device("cuda")`, default types.
#
# A default is applied by a function mode below all others, so nobody else turns the device that it
# adds into meta.  The mode of `with torch.device("cuda")` lies above: others see its argument.

_META = torch.device("meta")
_torch: Any = torch


def default_answers(types: dict[str, Any]) -> Iterator[Answers]:
    """Functions that apply a default device or set a default type.  types: of the device."""
    yield torch_private.DeviceContext, {"__torch_function__": _choosing()}
    default = _DefaultType(types)
    yield _torch, {"set_default_tensor_type": default.set_}
    yield Tensor, {"__new__": staticmethod(default.making())}


def _choosing() -> Any:
    """The method of the mode by which torch chooses a device."""
    kind: Any = torch_private.DeviceContext
    handle = original_of(kind, "__torch_function__")

    def __torch_function__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        makes = self.device.type == "cuda" and func in torch_private.device_constructors()
        if makes and kwargs.get("device") is None:
            lowest = not torch_private.len_torch_function_stack()
            kwargs = {**kwargs, "device": _META if lowest else self.device}
        return handle(self, func, types, args, kwargs)

    return __torch_function__


class _DefaultType:
    """The type of tensors that a script sets for all that name none.

    types: those of the device, by name.
    """

    def __init__(self, types: dict[str, Any]) -> None:
        self._types = types
        self._chosen: Any = None  # one of the device; None where it is the host's

    def set_(self, kind: Any) -> None:
        """Stands for `torch.set_default_tensor_type`."""
        name = kind.removeprefix("torch.cuda.") if type(kind) is str else ""
        chosen = self._types.get(name, kind)
        self._chosen = chosen if isinstance(chosen, Typed) else None
        if self._chosen is not None:
            torch.set_default_dtype(chosen.dtype)
            torch.set_default_device("cuda")
        else:
            original_of(_torch, "set_default_tensor_type")(kind)
            torch.set_default_device(None)

    def making(self) -> Any:
        """The constructor of `torch.Tensor(2, 3)`: this type decides, not the default device."""
        original: Any = Tensor.__new__

        def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is Tensor and self._chosen is not None and not kwargs:
                return self._chosen(*args)
            return original(cls, *args, **kwargs)

        return __new__


# -- legacy ----------------------------------------------------------------------------------------
# Names of old scripts: `torch.cuda.FloatTensor(...)`, `tensor.type("torch.cuda.FloatTensor")`.

_PRECISIONS = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}
_DEVICE = torch.device("cuda")
_original_type: Any = Tensor.type


class Typed(type):
    """Tensors of the device in one precision are instances of these classes."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        args = args or (0,)
        data = args[0] if len(args) == 1 else None
        if data is None or isinstance(data, (int, torch.Size)):
            sizes = (args or (0,)) if data is None else data
            return torch.empty(sizes, dtype=cls.dtype, device=_DEVICE)
        if isinstance(data, Tensor):
            return data.to(_DEVICE, cls.dtype)
        return torch.tensor(data, dtype=cls.dtype, device=_DEVICE)


def legacy_answers(types: dict[str, Any]) -> Iterator[Answers]:
    """The classes of torch.cuda, and methods of tensors that take them or their names."""
    yield torch.cuda, {**types, **_storages()}
    yield Tensor, {"type": _typing(types)}


def classes() -> dict[str, Any]:
    """The classes of torch.cuda, by name."""
    made = {
        name: Typed(name, (), {"dtype": dtype, "is_cuda": True, "is_sparse": False})
        for name, dtype in _PRECISIONS.items()
    }
    for kind in made.values():
        kind.__module__ = "torch.cuda"
    return made


def _storages() -> dict[str, Any]:
    """The classes of storages of torch.cuda, by name: their memory cannot be given."""
    names = [name for name in torch.cuda.__all__ if name.endswith("Storage")]
    return {
        name: refusal(f"torch.cuda.{name}", "there is no memory of the device to hold")
        for name in names
    }


def _typing(types: dict[str, Any]) -> Any:
    named = {f"torch.cuda.{name}": kind for name, kind in types.items()}
    names = {kind.dtype: name for name, kind in named.items()}

    def type_(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kw: Any) -> Any:
        if dtype is None and tensor.is_cuda:
            return names.get(tensor.dtype, f"torch.cuda.{tensor.dtype}")
        kind = named.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if isinstance(kind, Typed):
            return tensor.to(_DEVICE, kind.dtype, non_blocking=non_blocking)
        return _original_type(tensor, *(() if dtype is None else (dtype,)), **kw)

    return type_
