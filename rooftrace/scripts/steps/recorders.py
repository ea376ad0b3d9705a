"""The recorder of one stretch of a script: host tensors are real, those of the device on meta."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.scripts.steps.calls import Result
from rooftrace.scripts.steps.presenting import DeviceTensors, Presented, knows
from rooftrace.tracer.recording import (
    META_KEY,
    Call,
    Recorded,
    Recorder,
    copied_to_host,
    functions as torch_functions,
    info_of,
    library,
)
from rooftrace.tracer.torch_private import FakeTensor, disable_current_modes, tree_map
from rooftrace.tracer.values import META, UnknownValueError, Values, masks, tensors_in, trees

_TO = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default
_aten = torch.ops.aten
_TAKES_VALUES = frozenset(
    {_aten.fill_, _aten.index_fill_, _aten.index_put_, _aten._index_put_impl_, _aten.masked_fill_}
)
"""Ops that write a tensor and take a value from another device."""
_MAX_HELD = 10**9
"""Bytes from the host that a recording holds after the script may have freed them, and of a copy to
the host that the script may write to though its values are unknown."""
_LONG = 1000
"""Ops that a recorder may hold of turns that need no graph, before another takes its place."""
_ELSEWHERE = frozenset({_aten.set_, _aten.resize_as_})
"""Ops that read no number of their other tensor."""


class ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]  # of torch, when it is made
    """Records the ops of a script on the emulated device.

    values: of the whole run.  shown: the device that the script sees.  While the script is setting
    up, nothing is recorded.  `differentiated` is called when a backward of the script has run.
    """

    hands_on_calls = True
    lends_modules = False

    def __init__(self, values: Values, shown: torch.device) -> None:
        self.shown, self.device_tensors = shown, DeviceTensors()
        self.differentiated: Callable[[], None] = lambda: None
        super().__init__(values, record=False, own_step=True, roll_loops=False)
        self._runner.device = shown
        self._followers.told_of_forks = True

    def begin(self, record: bool) -> None:
        """From here on a new, empty graph is recorded; if `record`."""
        super().begin(record)
        self.brought_bytes = self.taken_bytes = 0  # host to device, device to host
        self.unrecorded = 0  # ops that made a tensor of the device while nothing was recorded
        self.log: list[Any] | None = None  # of the device's ops and the shapes that they made
        self._inputs: set[int] = set()  # their storages
        self.entries.weakly = True
        self.entries.real_of = self.device_tensors.copies.of

    def renew(self, record: bool = True, prepare: Callable[[], None] = lambda: None) -> None:
        """Drop the recording, and record another graph from here on, if `record`.

        prepare: is called before anything is.
        """
        with self.lock:
            self.end_graph()
            self.device_tensors.meet_results(self)
            self.entries.close()
            self.tags.forget_places()
            self.forget()
            torch.clear_autocast_cache()
            self.begin_graph(record, prepare)

    def tell_of_ends(self, leaving: Callable[[], None]) -> None:
        """From here on `leaving` is called at the end of the task of another thread."""
        self._followers.leaving = leaving

    @property
    def recording(self) -> bool:
        """Whether ops that this thread runs now enter the graph."""
        return super().recording and self.threads.led()

    def here_recorded(self) -> bool:
        """Whether ops of the running thread are recorded here."""
        return super().here_recorded() and self.threads.led()

    def functions(self, device: torch.device | None = None) -> torch_functions.Functions:
        """The function mode of one thread, which shows the device."""
        return Presented(
            self, None, self.shown, self.device_tensors.shapes
        )  # a thread begins without a default

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, FakeTensor) for kind in types):
            with self.paused():  # somebody asks for sizes: DTensor, a compiler
                return super().__torch_dispatch__(func, types, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def backward_ran(self) -> None:
        """A backward of the script has run in this thread, and no module since."""
        if self.threads.led():
            super().backward_ran()
            self.differentiated()

    def _settle(self) -> None:
        """Threads of a script, as those of data loaders, go on."""

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._of_device(func, args, kwargs)
        tensors = (out,) if isinstance(out, Tensor) else tuple(tensors_in(out))
        self.device_tensors.meet(tensors)
        if self.log is not None and any(t.is_meta for t in (*tensors, *tensors_in(args))):
            self.log.append((str(func), tuple(tuple(map(int, t.shape)) for t in tensors)))
        return out

    def _of_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _TO and "device" in kwargs:
            if isinstance(args[0], trees.LAZY):
                with self.paused():  # it has no bytes yet
                    return super()._dispatched(func, args, kwargs)
            moved = self._moved(args[0], kwargs)
            if moved is not None:
                return moved
        elif func is _COPY and isinstance(args[1], Tensor):
            self._count(args[0], args[1])
            if args[0].device.type == "cpu" and args[1].device.type == "meta":
                return self._filled(Call.of(func, *args, **kwargs))
        elif func._opname.endswith("_") and _is_host(args[0]):
            args = self._for_host(func, args)
        out = super()._dispatched(func, args, kwargs)
        written = [t for t in info_of(func).written(args, kwargs) if t.is_meta]
        copies = self.device_tensors.copies
        if self.recording or not copies.follow(self.values, func, (args, kwargs), written, out):
            copies.forget(written)
        if not self.recording and isinstance(out, Tensor) and out.is_meta:
            self.unrecorded += 1
        return out

    def _from_data(self, tensor: Tensor) -> Tensor | None:
        value = super()._from_data(tensor)
        real = self.device_tensors.copies.of(tensor) if value is None else None
        return value if real is None else real.clone()

    def _for_host(self, func: Any, args: Any) -> Any:
        """The arguments of an op that writes a host tensor: it takes single values of the device,
        where torch does."""
        others = [tensor for tensor in tensors_in(args[1:]) if tensor.is_meta]
        if not others or func._overloadpacket in _ELSEWHERE:
            return args
        if func._overloadpacket not in _TAKES_VALUES or any(tensor.dim() for tensor in others):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{self.shown} and cpu! (in {func._opname})"
            )
        for tensor in others:
            torch_functions.wait(self, tensor)
        values = {id(tensor): self._value(tensor) for tensor in others}
        return tree_map(lambda item: values.get(id(item), item), args)

    def _count(self, to: Tensor, source: Tensor) -> None:
        if source.device.type == to.device.type:
            return
        if to.device.type == "cpu":
            self.taken_bytes += source.nbytes
        else:
            self.brought_bytes += source.nbytes

    def _moved(self, tensor: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The copy of a tensor that goes from the host to the device, or back; None for others."""
        here, target = tensor.device.type, torch.device(kwargs["device"]).type
        if {here, target} != {"cpu", "meta"} or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        if trees.is_sparse(tensor):
            return None  # its pieces are moved one by one
        dtype = kwargs.get("dtype") or tensor.dtype
        size = tensor.numel() * tensor.element_size()
        if target == "cpu":
            self.taken_bytes += size
            value = self._value(tensor).to(dtype)
            copied_to_host(self, Call.of(_TO, tensor, **kwargs), value)
            return value
        self.brought_bytes += size
        made = torch.empty_like(tensor, dtype=dtype, device=META, requires_grad=False)
        if self.tags.on_host(tensor):
            self.record(Call.of(library.FROM_HOST, tensor), [made], single=True)
            return made
        if masks.small(tensor):
            self.values.learn(made, tensor.detach().to(dtype, copy=True))
        elif type(tensor) is Tensor and not tensor.requires_grad:
            if self.brought_bytes > _MAX_HELD:
                self.enter_inputs([made])  # without its numbers
            self.device_tensors.copies.bring(made, tensor)
            if (mask := masks.mask_in(tensor)) is not None and mask.leaf is not None:
                values = mask.leaf.to(dtype, copy=True).expand(tensor.shape)
                self.values.learn(made, mask.of(values))
        self.enter_inputs([made])
        self.storages.brought([made])
        return made

    def given(self, result: Result, module: nn.Module, arguments: Any) -> Any:
        """The result of a call that does not run: tensors of the device, as ops make them."""
        output = result.again(module, self.values, arguments)
        self.device_tensors.meet(tensors_in(output))
        return output

    @property
    def is_long(self) -> bool:
        """Whether it holds so much that another should take its place."""
        return len(self.graph.nodes) > _LONG or self.brought_bytes > _MAX_HELD // 10

    @property
    def has_ops(self) -> bool:
        """Whether anything ran on the device since this one is on."""
        noted = (node.meta.get(META_KEY) for node in self.graph.nodes)
        return any(isinstance(note, Recorded) for note in noted)

    def alive_bytes(self) -> int:
        """Bytes of the storages of the device that are alive."""
        self.device_tensors.meet_results(self)
        return sum(storage.nbytes() for storage, _ in self.device_tensors.there())

    def enter(self, tensor: Tensor, kind: str, name: str) -> None:
        """Make `tensor` a value that no op made (once); a gradient until the script drops it."""
        if kind != "gradient" or not self.recording:
            super().enter(tensor, kind, name)
            return
        for part, suffix in trees.parts_of(tensor):
            if part.is_meta and not knows(self, part.untyped_storage()):
                self.entries.standing.add(part, kind, name + suffix)

    def stand_in(self) -> None:
        """Declare all other live tensors of the device as older than this recording."""
        self.device_tensors.stand_in(self)

    def settle(self, gradients: Collection[int]) -> None:
        """The graph is done: reports the bytes freed in it.  gradients: their storages."""
        self.end_graph()
        blocks = [twin.nodes for twin in self.twins()]
        self.entries.standing.settle({*gradients, *self._inputs}, blocks)

    def enter_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Make tensors that the graph does not know inputs of the step."""
        if not self.recording:
            return
        tensors = [trees.unwrapped(tensor) for tensor in tensors]
        self.tags.recognise([t for t in tensors if type(t) is Tensor])
        for tensor in tensors:
            new = tensor.is_meta and tensor.grad_fn is None and not self.tags.has(tensor)
            if new and type(tensor) is Tensor and self.entries.storage_of(tensor) is None:
                self.entries.inputs.append(_like(tensor))
                self.enter(tensor, "input", f"input_{len(self.entries.inputs)}")
                self._watch(tensor)

    def _watch(self, tensor: Tensor) -> None:
        """Note when the script lets go of an input."""
        storage = self.storage_of(tensor)
        if storage is not None:
            self._inputs.add(storage)
            self.tags.watch(tensor, storage)

    def _filled(self, call: Call) -> Tensor:
        to: Tensor = call.args[0]
        source: Tensor = call.args[1]
        with torch.no_grad():
            to.copy_(self._value(source))
        copied_to_host(
            self, Call.of(_TO, source, non_blocking=bool(call.named.get("non_blocking"))), to
        )
        return to

    def _value(self, tensor: Tensor) -> Tensor:
        """A host copy of a tensor of the device: its value, else a policy's."""
        try:
            value, _ = self.values.value_of(tensor, "a copy to the host")
            return value.clone()
        except UnknownValueError:
            chosen = self.values.decision("value")
            fill = 1 if chosen is None else chosen
            text = f"a copy to the host of a large unknown tensor holds {fill} everywhere"
            self.values.chosen("value", text, fill)
            filled = torch.full((), fill, dtype=tensor.dtype).expand(tensor.shape)
            return filled.contiguous() if tensor.nbytes <= _MAX_HELD else filled


def _is_host(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == "cpu"


def _like(tensor: Tensor) -> Tensor:
    """A tensor of the same look that is none of the script's."""
    with disable_current_modes():
        if tensor.layout is not torch.strided:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
