"""torch.accelerator: the same device, asked by its general name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rooftrace.tracer.emulation.memory import free
from rooftrace.tracer.emulation.state import Answers, Emulation

_cuda: Any = torch.cuda
_c: Any = torch._C


def answers(here: Emulation) -> Iterator[Answers]:
    """Functions of torch._C that every build has, and that know no device."""
    kind = torch.device("cuda")
    asked = {
        "getAccelerator": lambda: kind,
        "getDeviceIndex": lambda: here.current,
        "setDeviceIndex": here.choose,
        "exchangeDevice": here.exchange,
        "maybeExchangeDevice": here.exchange,
        "getStream": lambda index: _cuda.current_stream(index),
        "setStream": lambda stream: _cuda.set_stream(stream),
        "synchronizeDevice": lambda index=None: here.clock.synchronize(),
        "isAllocatorInitialized": lambda: True,
        "emptyCache": lambda: _c._cuda_emptyCache(),
        "emptyHostCache": lambda: None,
        "getDeviceStats": lambda index: _c._cuda_memoryStats(index),
        "resetPeakStats": lambda index: _c._cuda_resetPeakMemoryStats(index),
        "resetAccumulatedStats": lambda index: None,
        "getMemoryInfo": lambda index: (free(here), here.device.memory),
        "getDeviceCapability": lambda index: {"supported_dtypes": _precisions(here)},
        "hooks_device_count": lambda: here.count,
        "hooks_get_current_device": lambda: here.current,
        "hooks_set_current_device": here.choose,
        "hooks_exchange_device": here.exchange,
        "hooks_maybe_exchange_device": here.exchange,
    }
    general = {f"_accelerator_{name}": item for name, item in asked.items()}
    yield _c, {**general, "_get_accelerator": lambda check=None: kind}


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
