"""Calls of modules whose ops are noted, and the same call again on other sizes, aside."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rooftrace.tracer.scripts.calls import resized, state_of
from rooftrace.tracer.scripts.lengths import Ops
from rooftrace.tracer.scripts.stage import RecorderStage


def noted_call(stage: RecorderStage, module: nn.Module, arguments: Any) -> tuple[Any, Ops | None]:
    """What a call gives, and its ops; None where it changes what the module holds.

    arguments: those without a name, and those with one.
    """
    args, kwargs = arguments
    recorder = stage.recorder
    with torch._C.DisableTorchFunction():
        state = state_of(module)
    before, log = recorder.log, []  # type: ignore[var-annotated]
    recorder.log = log
    try:
        output = recorder.answer(module, *args, **kwargs)
    finally:
        recorder.log = before
    with torch._C.DisableTorchFunction():
        return output, log if state_of(module) == state else None


class CallAside:
    """A call, to be made again on tensors of other sizes, of which nothing is recorded.

    It keeps neither the module nor its arguments alive.
    """

    def __init__(
        self, stage: RecorderStage, module: nn.Module, arguments: Any, sizes: Sequence[int]
    ) -> None:
        self._stage, self._module = stage, weakref.ref(module)
        with torch._C.DisableTorchFunction():
            self._arguments = resized(arguments, sizes)
        self._trains = [inner.training for inner in module.modules()]
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._cast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def __call__(self, sizes: Sequence[int]) -> Ops | None:
        """The ops of the call on these sizes; None where it cannot be made."""
        module = self._module()
        with torch._C.DisableTorchFunction():
            arguments = None if self._arguments is None else resized(self._arguments, sizes)
        if module is None or arguments is None:
            return None
        inside = list(module.modules())
        trains = [inner.training for inner in inside]
        _train(inside, self._trains)
        enabled, dtype = self._cast
        try:
            with (
                self._stage.recorder.paused(),
                torch.inference_mode(self._inference),
                torch.set_grad_enabled(self._grad),
                torch.autocast("cuda", dtype, enabled),
            ):
                return noted_call(self._stage, module, arguments)[1]
        except Exception:  # whatever the module raises at these sizes
            return None
        finally:
            _train(inside, trains)


def _train(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=False):
        module.training = flag
