"""From a target on meta to the same module and inputs with random data on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.measured.bench import Bench
from rooftrace.tracer.asking import Request
from rooftrace.tracer.targets import load_target
from rooftrace.tracer.values import REAL_VALUE


def realized(
    target: str, bench: Bench, request: Request | None = None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module of a target, and the arguments of a call.

    Weights are random and small, whole numbers are known ones or zero.  Raises TargetError or
    RequestError for a target or inputs that make no sense.
    """
    with torch.no_grad():
        made = load_target(target, request).filled(lambda tensor: _filled(tensor, bench))
    return made.module.eval(), tuple(made.inputs.args), dict(made.inputs.kwargs)


def _filled(tensor: Tensor, bench: Bench) -> Tensor:
    """A real tensor of the size of one on meta: its known value, small random numbers, or zero."""
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        real: Tensor = value.to(bench.device)
        return real
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=bench.device)
    return bench.random(*tensor.shape).mul_(0.02).to(tensor.dtype)
