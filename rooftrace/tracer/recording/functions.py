"""Torch-level calls: their names, and the few that leave the dispatcher for Python or a device.

`.tolist()`, `.numpy()`, f-strings and `torch.tensor([...])` never reach a dispatch mode; a device
that is not there must not be asked for: everything but the CPU is the meta device while tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from rooftrace.tracer.ops import Call
from rooftrace.tracer.patches import contexts, original_of, replaced
from rooftrace.tracer.tape import Tape, records
from rooftrace.tracer.tensors import owners, trees
from rooftrace.tracer.tensors.subclasses import OURS
from rooftrace.tracer.values import META, marks

_TO_PYTHON = frozenset({Tensor.tolist, Tensor.numpy})
_CONSTRUCTORS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LIKE = frozenset({Tensor.new_tensor, Tensor.new})
"""Constructors that take precision and device from a tensor."""
_PACK = torch._VF._pack_padded_sequence
_SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled
"""What every change of the grad mode calls."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
"""What `item()` calls: the op that stands for the host's wait for a value."""
PARSE_TO: Any = torch._C._nn._parse_to
"""Says what `Module.to` was asked for: the device that the module's tensors are told next."""
_UNNAMED = frozenset({"__get__", "__set__", "backward"})
"""Functions that never name an op: attribute access, and backward, whose ops have other names."""
_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})


class Functions(TorchFunctionMode):
    """Tells the tape which torch function runs, and answers the calls that need values.

    device: where this thread makes tensors, unless a mode of torch decides that.
    """

    def __init__(self, tape: Tape, device: torch.device | None = None) -> None:
        super().__init__()
        self.tape, self.device = tape, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tape = self.tape
        if not tape.live:  # in a thread that outlives the recording
            return func(*args, **kwargs)
        if self.device is not None and func in _makers() and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        if func in _TO_PYTHON:
            if args[0].device.type == "meta":
                return _to_python(tape, args[0], func.__name__)
        elif func is Tensor.__array__:
            if args[0].device.type == "meta":
                array = _to_python(tape, args[0], "numpy")
                kind = args[1] if len(args) > 1 else kwargs.get("dtype")
                return array if kind is None else array.astype(kind, copy=False)
        elif func in _INDEXING and args[0].device.type == "meta":
            args = (args[0], self._indexed(args[1]), *args[2:])
        elif func is Tensor.__repr__:
            if args[0].device.type == "meta" and type(args[0]) in _PLAIN_TENSORS:
                wait(tape, args[0])
        elif func == _SET_DATA:
            data = self._filling(args[0], args[1])
            _set_data(args[0], data)
            tape.stands_for(args[0], data)
            return None
        elif func is Tensor.__format__:
            if args[0].device.type == "meta" and args[0].dim() == 0:
                return format(args[0].item(), args[1])
        elif func in _LIKE and args[0].is_meta:
            made = self._like(func, args, kwargs)
            if made is not None:
                return made
        elif func in _CONSTRUCTORS:
            made = self._construct(func, args, kwargs)
            if made is not None:
                return made
        elif func is Tensor.cuda:
            func, args, kwargs = Tensor.to, (args[0], META), {}
        elif func is Tensor.to:
            args = tuple([_placed(item) for item in args])
        elif func is _PACK:
            entry = tape.values.known(args[1])  # the lengths must be on the host
            args = (args[0], args[1] if entry is None else entry.value, *args[2:])
        elif func is _SET_GRAD_ENABLED:
            tape.origins.recomputation.switched(bool(args[0]))
            return func(*args, **kwargs)
        elif func in _BACKWARD:
            with self._in_backward(), _gradients_wanted(tape):
                return func(*args, **kwargs)
        if "device" in kwargs and func is not PARSE_TO:
            kwargs = {**kwargs, "device": _placed(kwargs["device"])}
        outer = tape.here.function
        if not outer:
            name = getattr(func, "__name__", "")
            tape.here.function = "" if name in _UNNAMED else name
        try:
            return func(*args, **kwargs)
        finally:
            tape.here.function = outer

    @contextlib.contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Inside, the user's code runs autograd: its ops are backward, and this mode stays on.

        Torch switches a function mode off while it handles a call, but the forward that a
        checkpoint repeats needs the mode: `backward_kept` enters it again.
        """
        tape = self.tape
        here, before = tape.here, tape.here.part
        outer, here.functions = here.functions, (*here.devices, self)
        if tape.entries.own_step:
            here.part = "backward"
        try:
            yield
        finally:
            here.functions = outer
            here.part = before
            tape.backward_ran()

    def _filling(self, tensor: Tensor, data: Tensor) -> Tensor:
        """What `tensor.data = data` puts there: a weight on meta stays there."""
        return self.tape.brought(data) if tensor.is_meta else data

    def _indexed(self, index: Any) -> Any:
        """An index with known tensors in place of lists: torch would make the tensors unseen."""
        if isinstance(index, tuple):
            return tuple([self._indexed(item) for item in index])
        if isinstance(index, list) and index and all(type(item) in (int, bool) for item in index):
            made = self._construct(torch.tensor, (index,), {"device": META})
            return index if made is None else made
        return index

    def _like(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """`tensor.new(...)`: of numbers, or of the indices, values and size of a sparse tensor."""
        if _holds_numbers(func, args, kwargs):
            return self._construct(torch.tensor, args[1:], _as_of(args[0], kwargs))
        if func is Tensor.new and len(args) == 4 and trees.is_sparse(args[0]):
            return torch.sparse_coo_tensor(*args[1:])
        return None

    def _construct(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """`torch.tensor([...])`: a meta tensor whose value is known."""
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        device = kwargs.get("device")
        default = self.device or contexts.default_device()
        target = default if device is None else torch.device(device)
        if isinstance(data, (list, tuple)) and any(t.is_meta for t in trees.listed(data)):
            args = (_numbers(data), *args[1:])
            kwargs = {name: item for name, item in kwargs.items() if name not in ("data", "obj")}
        elif target.type == "cpu" or isinstance(data, Tensor):
            return None
        if target.type == "cpu":
            made: Tensor = func(*args, **kwargs)
            return made
        on_cpu = {**kwargs, "device": "cpu"}
        needs_gradient = bool(on_cpu.pop("requires_grad", False))
        value = func(*args, **on_cpu)
        with self.tape.paused():
            made = torch.empty(value.shape, dtype=value.dtype, device=META)
        if needs_gradient:  # functorch's transforms refuse the call, whatever it says
            made.requires_grad_()
        if marks.small(value):
            self.tape.values.learn(trees.unwrapped(made), trees.unwrapped(value))
        return made


_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""What autograd says of a loss that was computed without gradients."""


@contextlib.contextmanager
def _gradients_wanted(tape: Tape) -> Iterator[None]:
    """Inside, a backward is noted that fails as the phase runs the code without gradients."""
    try:
        yield
    except RuntimeError as error:
        if not tape.entries.own_step and not torch.is_grad_enabled() and _NO_GRAPH in str(error):
            tape.here.wants_gradients = True
        raise


def _to_python(tape: Tape, tensor: Tensor, method: str) -> Any:
    """`tensor.tolist()` or `.numpy()` of a meta tensor: the host waits for its value."""
    tape.values.op = method
    value, taint = tape.values.value_of(tensor, f"{method}()")
    if method == "numpy" and tensor.is_floating_point() and tape.recording:
        tape.entries.numpy_read = True
    tape.values.op = ""
    wait(tape, tensor, taint)
    return getattr(value.clone(), method)()


def wait(tape: Tape, tensor: Tensor, taint: frozenset[int] = records.NO_TAINT) -> None:
    """Record that the host waits for the value of a meta tensor (also where it is printed)."""
    facts = {"elements": tensor.numel()}
    tape.record(Call.of(_SCALAR, tensor), [], sync=True, facts=facts, taint=taint)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """`tensor.data = data`, also where a weight goes from the host to meta, or back."""
    if tensor.device != data.device:
        kind: Any = type(tensor)
        if isinstance(tensor, owners.LAZY):
            gone = kind(tensor.requires_grad, data.device, tensor.dtype)
            torch.utils.swap_tensors(tensor, gone)  # type: ignore[no-untyped-call]
            return
        gone = data.detach().requires_grad_(tensor.requires_grad)
        _become(tensor, gone if kind is Tensor else kind(gone, tensor.requires_grad))
    else:
        _SET_DATA(tensor, data)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _become(tensor: Tensor, other: Tensor) -> None:
    """`tensor` gets what `other` is, of the same class; the object keeps its attributes, its hooks
    and who refers to it weakly.

    Autograd may hold what it was, as that of a weight which its module has computed from others
    does: a backward through that raises.
    """
    own = {name: item for name, item in vars(tensor).items() if not name.startswith(OURS)}
    gradient = tensor.grad
    if gradient is not None:
        _set_data(gradient, gradient.to(other.device))
        other.grad = gradient
    for name in _HOOKS:
        hooks = getattr(tensor, name, None)
        if hooks:
            setattr(other, name, hooks)
    if tensor.is_leaf and tensor.requires_grad:
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_moved_since)
    exchange: Any = torch._C._swap_tensor_impl
    exchange(tensor, other)
    vars(tensor).clear()
    vars(tensor).update(vars(other))
    vars(tensor).update(own)


def _moved_since(gradients: Any) -> None:
    raise RuntimeError(
        "backward reaches a parameter as it was before its module moved to the device: move the "
        "module first, then run its forward and backward"
    )


@contextlib.contextmanager
def backward_kept(tape: Tape) -> Iterator[None]:
    """Inside, autograd runs under the function modes of the thread that called it."""
    engine: Any = torch.autograd
    name = "_engine_run_backward"
    original = original_of(engine, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with contexts.functions_on(tape.here.functions):
            return original(*args, **kwargs)

    with replaced(engine, {name: run}):
        yield


def _makers() -> Any:
    """The functions that make tensors on the default device."""
    return _device_constructors()


def _holds_numbers(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether `x.new_tensor(data)` or `x.new(data)` takes numbers: no tensor, no sizes."""
    data = args[1] if len(args) > 1 else kwargs.get("data")
    if data is None or len(args) > 2 or isinstance(data, (Tensor, torch.Size)):
        return False
    return func is Tensor.new_tensor or not isinstance(data, int)


def _as_of(tensor: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `torch.tensor` that make a tensor like this one."""
    return {"dtype": tensor.dtype, "device": tensor.device, **kwargs}


def _numbers(item: Any) -> Any:
    """Nested lists in which numbers replace meta tensors of one element."""
    if isinstance(item, (list, tuple)):
        return [_numbers(x) for x in item]
    return item.item() if isinstance(item, Tensor) and item.is_meta else item


def _placed(device: Any) -> Any:
    """META for a device that is neither the CPU nor meta; anything else as it is."""
    if isinstance(device, int) and not isinstance(device, bool):
        return META  # the number of an accelerator
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):  # Tensor.to takes anything
            device = torch.device(device)
    if isinstance(device, torch.device) and device.type not in ("cpu", "meta"):
        return META
    return device
