"""Tensors on meta, shown to a script as tensors on a CUDA device.

A function mode answers what a script asks of a tensor's place.  The recorder, autograd and torch's
own kernels go on seeing meta tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.recording import functions
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.tensors import tensors_in, trees

_GET: dict[str, Any] = {
    name: getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_meta", "is_cpu")
}
_KINDS: dict[Any, str] = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int16: "torch.cuda.ShortTensor",
    torch.int8: "torch.cuda.CharTensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.bool: "torch.cuda.BoolTensor",
}


class Shapes:
    """The tensors that a script made on the meta device itself, to have their shapes alone."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}  # by the place of the bytes

    def add(self, tensor: Tensor) -> None:
        """A tensor was asked for on meta."""
        if tensor.layout is torch.strided:
            storage = trees.unwrapped(tensor).untyped_storage()
            key = storage._cdata
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def has(self, key: int) -> bool:
        """Whether the bytes at this place are those of such a tensor."""
        return key in self._storages

    def __contains__(self, tensor: Tensor) -> bool:
        if not self._storages or tensor.layout is not torch.strided:
            return False
        return trees.unwrapped(tensor).untyped_storage()._cdata in self._storages


class Presented(functions.Functions):
    """The function mode of a recording in which meta tensors are shown on a CUDA device.

    shown: the device.  shapes: tensors on meta that are shown as what they are.
    """

    def __init__(
        self, tape: Tape, device: torch.device | None, shown: torch.device, shapes: Shapes
    ) -> None:
        super().__init__(tape, device)
        self._shown, self._shapes = shown, shapes
        self._answers: dict[Any, Callable[[Tensor], Any]] = {
            _GET["device"]: lambda tensor: shown,
            _GET["is_cuda"]: lambda tensor: True,
            _GET["is_meta"]: lambda tensor: False,
            _GET["is_cpu"]: lambda tensor: False,
            Tensor.get_device: lambda tensor: shown.index,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.get(func)
        if answer is not None:
            tensor = args[0]
            return answer(tensor) if self._is_there(tensor) else func(*args, **(kwargs or {}))
        if func is Tensor.type and len(args) == 1 and not kwargs and self._is_there(args[0]):
            return _KINDS.get(args[0].dtype) or func(*args)
        asked = (kwargs or {}).get("device")
        if asked is None and func is Tensor.to and len(args) > 1:
            asked = args[1]
        out = super().__torch_function__(func, types, args, kwargs)
        if asked is not None and _is_meta(asked):
            for tensor in tensors_in(out):
                self._shapes.add(tensor)
        return out

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == "meta" and tensor not in self._shapes


def _is_meta(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "meta"
    return isinstance(device, str) and device.startswith("meta")


@contextlib.contextmanager
def moved_in_place() -> Iterator[None]:
    """Inside, modules that move between the host and the device keep their parameters.

    torch makes new ones where the two tensors are of different kinds, as those of the CPU and of
    meta are; tied weights would then be two, and an optimizer would hold the old ones.
    """
    name = "_has_compatible_shallow_copy_type"
    original = original_of(torch, name)

    def compatible(first: Tensor, second: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            kinds = {first.device.type, second.device.type}
        return kinds == {"cpu", "meta"} or bool(original(first, second))

    with replaced(torch, {name: compatible}):
        yield


@contextlib.contextmanager
def checkpoints_alike() -> Iterator[None]:
    """Inside, checkpoints compare tensors by where they are, not by where they are shown.

    What forward saved is looked at while no function mode is on; what is computed again, under one.
    """
    checks: Any = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})
    before = dict(checks)

    def plainly(look: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def looked(tensor: Tensor) -> Any:
            with torch._C.DisableTorchFunction():
                return look(tensor)

        return looked

    checks.update({name: plainly(look) for name, look in before.items()})
    try:
        yield
    finally:
        checks.update(before)
