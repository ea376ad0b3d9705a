"""Triton where it is not installed: a stand-in for code that cannot do without it."""

import builtins
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._triton import has_triton, has_triton_package

from rooftrace.scripts.fake_cuda import DeviceError
from tests.tracer.emulated_device import h100

pytestmark = pytest.mark.quick

if torch.cuda.is_available() or importlib.util.find_spec("triton") is not None:
    pytest.skip("a machine with Triton has its own", allow_module_level=True)

KERNELS = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

TYPES = {torch.float32: tl.float32}
WIDE = tl.constexpr(128)

@triton.jit(do_not_specialize=["rank"])
def add_kernel(x: tl.pointer_type(tl.int64), rank: tl.int64, BLOCK: tl.constexpr) -> None:
    tl.store(x, libdevice.rsqrt(tl.load(x)))

@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=8)], key=["n"])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def tuned_kernel(x, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    pass
"""
GUARDED = """
try:
    import kernels_of_test
except ImportError:
    kernels_of_test = None
try:
    from triton import language
    HAVE = True
except Exception:
    HAVE = False
import contextlib
with contextlib.suppress(ModuleNotFoundError):
    import triton
"""
RAISES = """
try:
    import triton
except ImportError as error:
    raise RuntimeError("needs triton") from error
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    texts = {"kernels_of_test": KERNELS, "guarded_of_test": GUARDED, "raises_of_test": RAISES}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module
    for name in texts:
        sys.modules.pop(name, None)


def test_kernels_are_defined_and_fail_by_their_name_when_launched(modules: Any) -> None:
    with h100() as device:
        home = modules("kernels_of_test")
        for kernel, name in ((home.add_kernel, "add_kernel"), (home.tuned_kernel, "tuned_kernel")):
            with pytest.raises(
                DeviceError, match=rf"the Triton kernel {name} at .*rooftrace.extend.rule"
            ):
                kernel[(1,)](1.0)
        assert home.tuned_kernel.configs[0].all_kwargs() == {
            "BLOCK": 64,
            "num_warps": 8,
            "num_stages": 3,
            "num_ctas": 1,
        }
        assert home.WIDE.value == 128 and home.add_kernel.__name__ == "add_kernel"
        assert (home.triton.cdiv(9, 4), home.triton.next_power_of_2(33)) == (3, 64)
        with pytest.raises(DeviceError, match=r"triton.language.float32.*has names without values"):
            bool(home.TYPES[torch.float32])
    assert "stand-in" in device.assumed["triton"]


def test_code_that_can_do_without_triton_does(modules: Any) -> None:
    """Also after other code has imported the stand-in."""
    with h100() as device:
        home = modules("guarded_of_test")
        assert home.kernels_of_test is None and not home.HAVE and "triton" not in vars(home)
        assert not device.assumed.keys() & {"triton"}
        sys.modules.pop("kernels_of_test", None)
        modules("kernels_of_test")
        del sys.modules["guarded_of_test"]
        assert not modules("guarded_of_test").HAVE
        assert not has_triton_package() and not has_triton()
        assert importlib.util.find_spec("triton") is None
        modules("raises_of_test")  # its handler only says what is missing


def test_nothing_is_left_of_the_stand_in(modules: Any) -> None:
    before, finders = builtins.__import__, list(sys.meta_path)
    with h100():
        modules("kernels_of_test")
    assert builtins.__import__ is before and sys.meta_path == finders
    assert not [name for name in sys.modules if name.partition(".")[0] == "triton"]
    assert not has_triton_package() and not has_triton()
    sys.modules.pop("kernels_of_test")
    with pytest.raises(ModuleNotFoundError):
        modules("kernels_of_test")
