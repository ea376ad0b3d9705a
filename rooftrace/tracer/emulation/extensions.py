"""Code compiled for a GPU: extensions, libraries, Triton's kernels.  Each fails by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rooftrace.tracer.emulation.refused import (
    DeviceError,
    MissingExtensionError,
    MissingLibraryError,
    kernel_refused,
    refusal,
)
from rooftrace.tracer.emulation.state import Answers
from rooftrace.tracer.patches import original_of, put
from rooftrace.tracer.source import spec_after

_LIBRARIES = ("libcuda", "libcudart", "libc10_cuda", "libtorch_cuda", "libnv", "libcu", "libamdhip")
"""Shared libraries that only an installation for a GPU has."""
_TRITON = "triton.runtime.jit"
_CPP = "torch.utils.cpp_extension"


def _is_about_cuda(error: Exception) -> bool:
    text = f"{error} {error.__cause__ or ''}"
    return any(name in text for name in _LIBRARIES) or (
        "undefined symbol" in text and "cuda" in text
    )


def _library_loader() -> Callable[..., Any]:
    kind: Any = type(torch.ops)
    original = original_of(kind, "load_library")

    def load_library(self: Any, path: Any) -> Any:
        try:
            return original(self, path)
        except OSError as error:
            if not _is_about_cuda(error):
                raise
            what = f"torch.ops.load_library({str(path)!r})"
            raise kernel_refused(what, MissingLibraryError) from error

    return load_library


def _module_loader() -> Callable[..., Any]:
    original = original_of(ExtensionFileLoader, "create_module")

    def create_module(self: Any, spec: Any) -> Any:
        try:
            return original(self, spec)
        except ImportError as error:
            if not _is_about_cuda(error):
                raise
            raise kernel_refused(f"import {spec.name}", MissingExtensionError) from error

    return create_module


def _compilers(module: Any) -> dict[str, Any]:
    """Functions of torch.utils.cpp_extension that compile for a GPU."""
    load, load_inline = original_of(module, "load"), original_of(module, "load_inline")

    def compiled(name: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [sources] if isinstance(sources, str) else list(sources)
        if kwargs.get("with_cuda") or any(str(path).endswith((".cu", ".hip")) for path in listed):
            raise kernel_refused(f"torch.utils.cpp_extension.load({name!r})")
        return load(name, sources, *args, **kwargs)

    def compiled_inline(name: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or kwargs.get("cuda_sources"):
            raise kernel_refused(f"torch.utils.cpp_extension.load_inline({name!r})")
        return load_inline(name, *args, **kwargs)

    def described(name: Any, *args: Any, **kwargs: Any) -> Any:
        raise kernel_refused(f"CUDAExtension({name!r})")

    return {"load": compiled, "load_inline": compiled_inline, "CUDAExtension": described}


def _launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    name = getattr(kernel, "__name__", None) or getattr(kernel, "fn", kernel)
    raise kernel_refused(f"the Triton kernel {name}")


def _of_module(module: ModuleType) -> tuple[Any, dict[str, Any]]:
    """What is replaced in a module once it is there, and where."""
    if module.__name__ == _TRITON:
        return module.JITFunction, {"run": _launch}
    return module, _compilers(module)


class _Finder:
    """Finds the modules that refuse to make code for a GPU, from when they have run on."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in (_TRITON, _CPP):
            return None
        spec: Any = spec_after(self, name, path, target)
        run = None if spec is None else getattr(spec.loader, "exec_module", None)
        if run is not None:

            def exec_module(module: ModuleType) -> None:
                run(module)
                put(*_of_module(module))

            spec.loader.exec_module = exec_module
        return spec


def watch_imports() -> None:
    """Modules that compile or launch code for a GPU refuse it from when they are imported on."""
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)


def answers() -> Iterator[Answers]:
    """What loads or makes code for a GPU fails with an error that says what to do."""
    yield type(torch.ops), {"load_library": _library_loader()}
    yield ExtensionFileLoader, {"create_module": _module_loader()}
    for name in (_TRITON, _CPP):
        if name in sys.modules:
            yield _of_module(sys.modules[name])
    yield torch._C, _refused_names()
    yield from _refused_classes()


def _refused_names() -> dict[str, Any]:
    """Functions of torch._C for CUDA that no emulated device answers, each with its error."""
    pools = "memory pools are the allocator's, which is not run"
    raw = "there is no memory of the device to point to"
    handle = "there is no library of the device to hold"
    tuning = "there is nothing to tune"
    table = {
        "_cuda_cudaCachingAllocator_raw_alloc": ("torch.cuda.caching_allocator_alloc", raw),
        "_cuda_cudaCachingAllocator_raw_delete": ("torch.cuda.caching_allocator_delete", raw),
        "_cuda_customAllocator": ("torch.cuda.memory.CUDAPluggableAllocator", pools),
        "_cuda_getAllocator": ("torch.cuda.memory._get_current_allocator", pools),
        "_cuda_cudaHostAllocator": ("torch.cuda.memory._host_allocator", pools),
        "_cuda_getCurrentBlasHandle": ("torch.cuda.current_blas_handle", handle),
        "_cuda_getCurrentSolverHandle": ("torch.cuda.current_solver_handle", handle),
        "_cuda_jiterator_compile_and_launch_kernel": (
            "torch.cuda.jiterator",
            "its kernels cannot be seen",
        ),
        **{
            f"_cuda_tunableop_{name}": ("torch.cuda.tunable", tuning)
            for name in (
                "enable",
                "tuning_enable",
                "write_file_on_exit",
                "write_file",
                "set_filename",
                "get_filename",
                "get_results",
                "get_validators",
                "read_file",
                "set_max_tuning_duration",
                "get_max_tuning_duration",
                "set_max_tuning_iterations",
                "get_max_tuning_iterations",
                "set_rotating_buffer_size",
                "get_rotating_buffer_size",
                "set_numerical_check_tolerances",
            )
        },
        "_cuda_record_untuned_enable": ("torch.cuda.tunable", tuning),
        "_cuda_sleep": ("torch.cuda._sleep", "nothing counts the cycles"),
        "_cuda_changeCurrentAllocator": ("torch.cuda.memory.change_current_allocator", pools),
        "_gds_register_buffer": ("torch.cuda.gds", raw),
        "_gds_register_handle": ("torch.cuda.gds", raw),
    }
    return {name: refusal(call, reason) for name, (call, reason) in table.items()}


def _refused_classes() -> Iterator[Answers]:
    """Classes of torch.cuda that no emulated device can make, and methods that say so."""
    cuda: Any = torch.cuda
    for name in ("MemPool", "CUDAPluggableAllocator", "GreenContext"):
        kind = getattr(cuda, name, None)
        if kind is not None:
            refuse = refusal(f"torch.cuda.{name}", "the driver and its allocator are not run")
            yield kind, {"__new__": staticmethod(refuse), "create": refuse}
    yield FakeTensorMode, {"from_tensor": _from_tensor()}


def _from_tensor() -> Callable[..., Any]:
    original = original_of(FakeTensorMode, "from_tensor")

    def from_tensor(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cuda":  # autograd would end the process
            raise DeviceError.of(
                "torch.export, or what else makes a FakeTensor of a tensor of the device",
                "PyTorch's CUDA half would have to answer for it",
                "Do it with the module and its inputs on the CPU, and move what comes of it",
            )
        return original(self, tensor, *args, **kwargs)

    return from_tensor
