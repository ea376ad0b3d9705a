"""One operation to time: its least FLOPs and bytes, and how it is made and timed.

A case is data until it is made.  Its flops and bytes predict its time on a device of known speed:
a slow device leaves out cases that only a fast one can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rooftrace.measured.bench import Bench

Call = Callable[[], object]


class NotOfferedError(RuntimeError):
    """This device or torch has no such operation."""


@dataclass(frozen=True)
class MicroCase:
    """One operation to time."""

    kind: str
    sizes: Mapping[str, Any]
    flops: float  # FLOP of one call; 0 for a launch cost
    bytes: float  # byte that one call moves at least; 0 for a launch cost
    # Puts random data on the device and returns the call.
    make: Callable[[Bench], Callable[[], Any]] = field(repr=False)
    sampler: bool = False  # whether the call measures by itself and returns seconds

    @property
    def key(self) -> str:
        """The name of the case in a file."""
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.sizes.items())])


def element_size(dtype: str) -> int:
    """Bytes of one element."""
    return {"fp32": 4, "tf32": 4, "fp8": 1}.get(dtype, 2)


def torch_type(dtype: str) -> torch.dtype:
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
    return types.get(dtype, torch.float32)


def usual_precision(on_cuda: bool) -> str:
    """The precision that models run in on such a device."""
    return "bf16" if on_cuda else "fp32"


def footprint(case: MicroCase) -> float:
    """Bytes of the data of a case on the device."""
    if case.kind == "lookup":
        table = case.sizes["entries"] * case.sizes["width"] * element_size(case.sizes["dtype"])
        return float(case.bytes + table)
    return case.bytes


def measured(case: MicroCase, bench: Bench, seconds: float) -> tuple[float, ...]:
    """Seconds of each call of `case`, repeated for about so many seconds after a warm-up.

    Raises NotOfferedError, or the errors of torch.
    """
    with (
        torch.inference_mode(),
        bench.float32_precision("high" if case.sizes.get("dtype") == "tf32" else "highest"),
    ):
        call = case.make(bench)
        sampler = call if case.sampler else lambda: bench.cold(call)
        sampler()
        sampler()
        return tuple(bench.repetitions(sampler, seconds, least=5, most=15))
