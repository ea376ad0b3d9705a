"""From a target on meta to the same module and inputs with random data on a device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.measured.bench import Bench
from rooftrace.tracer.asking import Request
from rooftrace.tracer.targets import load_target
from rooftrace.tracer.tensors import own_tensors
from rooftrace.tracer.twins import replaced
from rooftrace.tracer.values import REAL_VALUE


def realized(
    target: str, bench: Bench, request: Request | None = None
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module of a target, and the arguments of a call.

    Weights are random and small, whole numbers are known ones or zero.  Raises TargetError or
    RequestError for a target or inputs that make no sense.
    """
    loaded = load_target(target, request)
    module: nn.Module = loaded.module
    with torch.no_grad():
        # By identity, so that tied weights stay tied.
        memo: dict[int, Any] = {}
        for part in module.modules():
            for tensor in own_tensors(part):
                memo.setdefault(id(tensor), _owned(tensor, bench))
        real: nn.Module = copy.deepcopy(module, memo)
        arguments = (tuple(loaded.inputs.args), dict(loaded.inputs.kwargs))
        args, kwargs = replaced(arguments, lambda tensor: _filled(tensor, bench))
    return real.eval(), args, kwargs


def _owned(tensor: Tensor, bench: Bench) -> Tensor:
    """A real tensor in place of a module's meta tensor; a parameter stays a parameter."""
    real = _filled(tensor, bench)
    return nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _filled(tensor: Tensor, bench: Bench) -> Tensor:
    """A real tensor of the size of one on meta: its known value, small random numbers, or zero."""
    value = tensor.__dict__.get(REAL_VALUE)
    if value is not None:
        real: Tensor = value.to(bench.device)
        return real
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=bench.device)
    return bench.random(*tensor.shape).mul_(0.02).to(tensor.dtype)
