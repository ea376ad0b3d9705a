"""fvcore's FlopCountAnalysis: formulas for the nodes of a torch.jit trace."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.peers.counts import CannotCountError, PeerCount, exclusive
from rooftrace.tracer.phases import PlainCall
from rooftrace.tracer.tensors import tensors_in
from rooftrace.tracer.twins import replaced


def by_trace(call: PlainCall) -> PeerCount:
    """fvcore's counts of a forward; it counts a multiply-add as 1."""
    if call.losses is not None:
        raise CannotCountError("fvcore counts no backward")
    try:
        from fvcore.nn import FlopCountAnalysis
    except ImportError:
        raise CannotCountError(
            "fvcore is not installed: pip install 'rooftrace[compare]'"
        ) from None
    from importlib.metadata import version

    wrapped = _Positional(call)
    analysis = FlopCountAnalysis(wrapped, tuple(wrapped.tensors))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    analysis.tracer_warnings("none")
    with torch.no_grad(), torch.device(call.device):
        by_module = analysis.by_module_and_operator()
    inclusive = {_inside(path): counts for path, counts in by_module.items()}
    uncounted = {
        (_inside(path), op): calls
        for path in by_module
        for op, calls in _own_unsupported(analysis, path).items()
    }
    doubled = {key: 2 * round(count) for key, count in exclusive(inclusive).items()}
    return PeerCount("", version("fvcore"), flops=doubled, scale=2, uncounted=uncounted)


class _Positional(nn.Module):
    """The call as a function of its tensors alone, as torch.jit.trace wants it."""

    def __init__(self, call: PlainCall) -> None:
        super().__init__()
        self.module = call.module
        self.arguments = (tuple(call.args), dict(call.kwargs))
        self.tensors = tensors_in(self.arguments)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        instead = {id(old): new for old, new in zip(self.tensors, tensors, strict=True)}
        args, kwargs = replaced(self.arguments, lambda tensor: instead[id(tensor)])
        return tuple(tensors_in(self.module(*args, **kwargs)))


def _inside(path: str) -> str:
    """A path in the wrapper as one in the module."""
    return path.removeprefix("module").removeprefix(".")


def _own_unsupported(analysis: Any, path: str) -> Mapping[str, int]:
    """The unsupported ops of a module itself, without those of its children."""
    own = Counter(analysis.unsupported_ops(path))
    for child, _ in _named(analysis, path).named_children():
        below = f"{path}.{child}" if path else child
        with contextlib.suppress(KeyError):
            own.subtract(analysis.unsupported_ops(below))
    return +own


def _named(analysis: Any, path: str) -> nn.Module:
    module: nn.Module = analysis._model
    return module.get_submodule(path)
