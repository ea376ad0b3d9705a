"""Every public name of torch.cuda: answered, or refused by its name.  Code compiled for a GPU."""

import ctypes
import importlib.util
import re
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rooftrace.scripts.fake_cuda import DeviceError
from tests.tracer.emulated_device import h100

pytestmark = pytest.mark.quick

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

cuda: Any = torch.cuda
ops: Any = torch.ops


def arguments() -> dict[str, tuple[Any, ...]]:
    """What the functions of torch.cuda are called with that need something."""
    linear = nn.Linear(1, 1)
    return {
        "CudaError": (1,),
        "CUDAPluggableAllocator": ("library.so", "allocate", "free"),
        "ExternalStream": (77,),
        "StreamContext": (None,),
        "caching_allocator_alloc": (16,),
        "caching_allocator_delete": (16,),
        "can_device_access_peer": (0, 0),
        "change_current_allocator": (None,),
        "check_error": (0,),
        "device": (0,),
        "device_of": (torch.ones(1),),
        "get_stream_from_external": (77,),
        "graph": (cuda.CUDAGraph(),),
        "make_graphed_callables": (linear, (torch.ones(1, 1),)),
        "manual_seed": (0,),
        "manual_seed_all": (0,),
        "set_device": (0,),
        "set_per_process_memory_fraction": (0.5,),
        "set_rng_state": (cuda.get_rng_state(),),
        "set_rng_state_all": (cuda.get_rng_state_all(),),
        "set_stream": (cuda.Stream(),),
        "set_sync_debug_mode": ("warn",),
        "stream": (None,),
        "use_mem_pool": (None,),
    }


REFUSED = {
    "CUDAPluggableAllocator",
    "GreenContext",
    "MemPool",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "change_current_allocator",
    "clock_rate",
    "current_blas_handle",
    "current_solver_handle",
    "device_memory_used",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "list_gpu_processes",
    "memory_snapshot",
    "memory_usage",
    "power_draw",
    "temperature",
    "use_mem_pool",
    "utilization",
    *(name for name in cuda.__all__ if name.endswith("Storage")),
}
"""What only a real device has: sensors, handles, blocks of memory."""
TYPED = {name for name in cuda.__all__ if name.endswith("Tensor")}
"""Old constructors: see test_emulation_run."""


@pytest.mark.parametrize("name", sorted(cuda.__all__))
def test_every_name_of_torch_cuda_is_answered_or_refused_by_its_name(name: str) -> None:
    with h100():
        item = getattr(cuda, name)
        if not callable(item) or name in TYPED:
            return
        given = arguments().get(name, ())
        if name not in REFUSED:
            item(*given)
            return
        with pytest.raises(DeviceError) as caught:
            item(*given)
    said = str(caught.value)
    assert name.removesuffix("_as_nested_dict") in said
    assert said.startswith(("torch.cuda.", "torch._C.", "torch.UntypedStorage")), said  # then why
    assert "this one is emulated" in said and "test_emulation_refused.py" in said


def test_names_of_torchs_c_half_are_found_by_those_who_look() -> None:
    """Python code of torch.cuda calls nothing of torch._C that is not there."""
    folder = Path(cuda.__file__).parent
    files = [*folder.glob("*.py"), *(folder.parent / "accelerator").glob("*.py")]
    asked = set()
    for path in files:
        asked |= set(re.findall(r"\b_C\.(_\w+)", path.read_text(encoding="utf-8")))
    with h100():
        missing = {name for name in asked if not hasattr(torch._C, name)}
    assert missing <= {"_CudaDeviceProperties", "_CUDAGreenContext"}  # classes that code asks for


# -- code compiled for a GPU -----------------------------------------------------------------------


def test_an_extension_for_cuda_fails_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "libcudart.so.12: cannot open shared object file: No such file or directory"

    def create(self: Any, spec: Any) -> Any:
        raise ImportError(text)

    monkeypatch.setattr(ExtensionFileLoader, "create_module", create)
    loader = ExtensionFileLoader("flash_attn_2_cuda", "flash_attn_2_cuda.so")
    spec = ModuleSpec("flash_attn_2_cuda", loader)
    with h100():
        with pytest.raises(DeviceError, match="import flash_attn_2_cuda") as caught:
            importlib.util.module_from_spec(spec)
        assert isinstance(caught.value, ImportError)  # libraries catch it, and go another way
        assert "torch.library" in str(caught.value) and "docs/rules.md" in str(caught.value)
        text = "libfoo.so: cannot open shared object file"
        with pytest.raises(ImportError) as other:
            importlib.util.module_from_spec(spec)
        assert not isinstance(other.value, DeviceError)


def test_a_library_of_ops_for_cuda_fails_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
        raise OSError("libc10_cuda.so: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with h100(), pytest.raises(DeviceError, match=r"load_library\('.*own_ops.so'\)") as caught:
        ops.load_library(str(tmp_path / "own_ops.so"))
    assert isinstance(caught.value, OSError)


def test_compiling_for_cuda_fails_by_its_name() -> None:
    with h100():
        extension = importlib.import_module("torch.utils.cpp_extension")
        with pytest.raises(DeviceError, match=r"cpp_extension.load\('own'\)"):
            extension.load("own", ["own.cpp", "own_kernel.cu"])
        with pytest.raises(DeviceError, match=r"load_inline\('own'\)"):
            extension.load_inline("own", cpp_sources="", cuda_sources="__global__ void k() {}")
        with pytest.raises(DeviceError, match=r"CUDAExtension\('own'\)"):
            extension.CUDAExtension("own", ["own.cu"])
    assert extension.CUDAExtension.__module__ == "torch.utils.cpp_extension"


TRITON = """
class JITFunction:
    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        return "launched"
"""


def test_a_kernel_of_triton_fails_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name stands for Triton, which no build for the CPU has."""
    package = tmp_path / "triton" / "runtime"
    package.mkdir(parents=True)
    (package / "jit.py").write_text(TRITON)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)

    def add_kernel(x: Any) -> None: ...

    try:
        with h100():
            jit = importlib.import_module("triton.runtime.jit")
            kernel = jit.JITFunction(add_kernel)
            with pytest.raises(
                DeviceError, match=r"the Triton kernel add_kernel at .*rooftrace.extend.rule"
            ):
                kernel[(1,)](1.0)
        assert kernel[(1,)](1.0) == "launched"
        with h100(), pytest.raises(DeviceError, match="add_kernel"):  # it is imported already
            kernel[(1,)](1.0)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            del sys.modules[name]
