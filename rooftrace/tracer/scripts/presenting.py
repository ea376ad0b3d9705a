"""Tensors on meta, shown to a script as tensors on a CUDA device.

A function mode answers what a script asks of a tensor's place.  The recorder, autograd and torch's
own kernels go on seeing meta tensors.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, overrides
from torch._ops import OpOverload
from torch.utils import checkpoint

from rooftrace.tracer.patches import contexts, original_of, put
from rooftrace.tracer.recording import functions
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.tensors import owners, tensors_in, trees
from rooftrace.tracer.values import META

_modes_on: Any = overrides._get_current_function_mode_stack
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
            storage = _storage(tensor)
            key = storage._cdata
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def follow(self, arguments: Any, out: Any) -> None:
        """What was computed from such tensors, and from none of the device, is one of them."""
        if not self._storages:
            return
        own = [tensor in self for tensor in tensors_in(arguments) if trees.on_meta(tensor)]
        if own and all(own):
            for tensor in tensors_in(out):
                if trees.on_meta(tensor):
                    self.add(tensor)

    def has(self, key: int) -> bool:
        """Whether the bytes at this place are those of such a tensor."""
        return key in self._storages

    def __contains__(self, tensor: Tensor) -> bool:
        if not self._storages or tensor.layout is not torch.strided:
            return False
        return _storage(tensor)._cdata in self._storages


def _storage(tensor: Tensor) -> Any:
    """The bytes of a tensor; a weight whose shape is not known yet has none, and says so itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return trees.unwrapped(tensor).untyped_storage()


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
            torch.get_device: lambda tensor: shown.index,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._answers.get(func)
        if answer is not None:
            tensor = args[0]
            return answer(tensor) if self._is_there(tensor) else func(*args, **(kwargs or {}))
        if func is Tensor.type and len(args) == 1 and not kwargs and self._is_there(args[0]):
            return _KINDS.get(args[0].dtype) or func(*args)
        if isinstance(func, OpOverload):  # of a mode below: the device that it names is the op's
            return super().__torch_function__(func, types, args, kwargs)
        asked = self._asked(func, args, kwargs or {})
        if func in _MOVES and asked is not None:
            args = (self._leaving(args[0], asked), *args[1:])
        elif len(args) > 1 and any(map(_is_trained_value, args)) and _computes(func):
            args = tuple(self._beside(args))
        out = super().__torch_function__(func, types, args, kwargs)
        if func is functions.PARSE_TO:
            like = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(like, Tensor) and self._is_there(like):
                out = (self._shown, *out[1:])
        elif func in _WORDS and self._is_there(args[0]):
            out = out.replace("device='meta'", f"device='{self._shown}'")
        elif asked is None:
            self._shapes.follow((args, kwargs), out)
        elif _is_meta(asked):
            for tensor in tensors_in(out):
                self._shapes.add(tensor)
        return out

    def _filling(self, tensor: Tensor, data: Tensor) -> Tensor:
        return data  # the weight goes where the data is

    def _asked(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The device that a call names for its result; None where it names none."""
        if func is Tensor.cpu or func is Tensor.cuda:
            return func.__name__
        asked = kwargs.get("device")
        if asked is None and func is Tensor.to:
            asked = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(asked, Tensor):
            return self._shown if self._is_there(asked) else asked.device
        return None if isinstance(asked, torch.dtype) else asked

    def _leaving(self, tensor: Tensor, asked: Any) -> Tensor:
        """What a tensor is copied from that goes to meta, where it has no numbers and no bytes of
        the device, or from there."""
        if tensor in self._shapes:
            if not _is_meta(asked):
                raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        elif _is_meta(asked) and type(tensor) in (Tensor, torch.nn.Parameter):
            with self.tape.paused():
                return torch.empty_like(tensor, device=META)
        return tensor

    def _beside(self, args: Iterable[Any]) -> Iterator[Any]:
        """Arguments, some of them values of the host, whose gradients come there from a device."""
        mixed = any(isinstance(item, Tensor) and self._is_there(item) for item in args)
        for item in args:
            yield _HostValue.apply(item) if mixed and _is_trained_value(item) else item  # type: ignore[no-untyped-call]

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == "meta" and tensor not in self._shapes


class _HostValue(torch.autograd.Function):
    """A single value of the host.  Autograd moves its gradient there, but not from meta."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].cpu()


def _computes(func: Any) -> bool:
    """Whether a call makes a new tensor, and writes none that it gets."""
    name: str = func.__name__
    return not name.startswith("__set") and (name.endswith("__") or not name.endswith("_"))


def _is_trained_value(item: Any) -> bool:
    if not isinstance(item, Tensor) or isinstance(item, owners.LAZY):
        return False  # lazy ones have no sizes yet
    if item.dim() or not item.requires_grad:
        return False
    return item.device.type == "cpu" and torch.is_grad_enabled()


_WORDS = frozenset({Tensor.__repr__, Tensor.__format__})
_MOVES = frozenset({Tensor.to, Tensor.cuda, Tensor.cpu})


def _is_meta(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "meta"
    return isinstance(device, str) and device.startswith("meta")


def move_in_place() -> None:
    """From here on modules that move between the host and the device keep their parameters.

    torch makes new ones where the two tensors are of different kinds, as those of the CPU and of
    meta are; tied weights would then be two, and an optimizer would hold the old ones.
    """
    name = "_has_compatible_shallow_copy_type"
    original = original_of(torch, name)

    def compatible(first: Tensor, second: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            kinds = {first.device.type, second.device.type}
        return kinds == {"cpu", "meta"} or bool(original(first, second))

    put(torch, {name: compatible})


def show_devices(shown: torch.device, shapes: Shapes) -> None:
    """What torch's C half says of places on meta is shown on the device, as tensors are."""
    place = torch.UntypedStorage.device.__get__

    def device(storage: Any) -> torch.device:
        there: torch.device = place(storage)
        on_meta = there.type == "meta" and not shapes.has(storage._cdata)
        return shown if on_meta and _modes_on() else there

    name = "_group_tensors_by_device_and_dtype"
    group = original_of(torch._C, name)

    def grouped(*args: Any) -> Any:
        """Tensors by device: optimizers move scalars to what this says."""
        return {
            (shown if place.type == "meta" and parts[0][0][0] not in shapes else place, kind): parts
            for (place, kind), parts in group(*args).items()
        }

    put(torch.UntypedStorage, {"device": property(device)})
    put(torch._C, {name: grouped})


def show_saved() -> None:
    """Hooks on what forward saves see the device: torch calls them in the middle of an op, where no
    function mode is on."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    original = original_of(hooks, "__init__")

    def init(own: Any, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        modes = _modes_on()

        @functools.wraps(pack, updated=())
        def packed(tensor: Tensor) -> Any:
            with contexts.functions_on([] if _modes_on() else modes):
                return pack(tensor)

        original(own, packed, unpack)

    put(hooks, {"__init__": init})


def compare_checkpoints() -> None:
    """Checkpoints compare tensors by where they are, not by where they are shown.

    What forward saved is looked at while no function mode is on; what is computed again, under one.
    """
    checks: Any = getattr(checkpoint, "_allowed_determinism_checks_to_fns", {})

    def plainly(look: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def looked(tensor: Tensor) -> Any:
            with torch._C.DisableTorchFunction():
                return look(tensor)

        return looked

    checks.update({name: plainly(look) for name, look in checks.items()})
