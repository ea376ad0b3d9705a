"""Calls of modules, of torch functions and of compiled code, as a recording sees them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.overrides import TorchFunctionMode

from rooftrace._processes import Shared
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import overrides, taperecords
from rooftrace.tracer.recording.ops import Call
from rooftrace.tracer.recording.overrides import Scope, original_of, replaced
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.values import META, masks, trees
from rooftrace.tracer.values.trees import OURS

# -- module calls ----------------------------------------------------------------------------------
# One pair of hooks on the calls of all modules, for all recordings of the process.

_NAME = "calls"
"""The key of `Scope.kept` for the watcher of calls."""


class CallWatcher(Protocol):
    """An observer of calls of modules."""

    scope: Scope

    def before_call(self, module: nn.Module) -> None:
        """A module is called, in a thread of the scope or in one that nobody records."""

    def after_call(self, module: nn.Module) -> None:
        """A call of a module ends, in a thread of the scope."""


_WATCHERS: dict[int, CallWatcher] = {}


def _before(module: nn.Module, inputs: Any) -> None:
    scope = Scope.current()
    if scope is None:
        for watcher in list(_WATCHERS.values()):
            watcher.before_call(module)
    else:
        watching = scope.kept.get(_NAME)
        if watching is not None:
            with overrides.untraced():
                watching.before_call(module)


def _after(module: nn.Module, inputs: Any, output: Any) -> None:
    scope = Scope.current()
    watching = None if scope is None else scope.kept.get(_NAME)
    if watching is not None:
        with overrides.untraced():
            watching.after_call(module)


def _registered() -> Callable[[], None]:
    """Register the hooks; return their undo."""
    handles = (
        nn_module.register_module_forward_pre_hook(_before),
        nn_module.register_module_forward_hook(_after, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


_MODULE_HOOKS = Shared(_registered)


@contextlib.contextmanager
def calls_watched(watcher: CallWatcher) -> Iterator[None]:
    """Inside, a watcher observes the calls of modules in the threads of its scope."""
    watcher.scope.kept[_NAME] = watcher
    _WATCHERS[id(watcher)] = watcher
    try:
        with _MODULE_HOOKS.used():
            yield
    finally:
        del _WATCHERS[id(watcher)]
        del watcher.scope.kept[_NAME]


# -- compiling -------------------------------------------------------------------------------------
# torch.compile while we record: code runs as it is written, and ops to compile are marked.


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, code wrapped by torch.compile runs as it is written: here, not in other threads.

    `records.compiling` is where Dynamo would compile: the callback that it is given stays here.
    """
    with contextlib.ExitStack() as stack:
        torch_private.DYNAMO_LATER.once(
            torch_private.DYNAMO, stack, functools.partial(_uncompiled, stack.enter_context)
        )
        yield


def _uncompiled(enter: Callable[[AbstractContextManager[Any]], Any], dynamo: Any = None) -> None:
    frames = torch_private.eval_frame
    stance = original_of(frames, "_callback_from_stance")
    if not callable(stance):
        enter(torch.compiler.set_stance("force_eager"))
        return

    def set_callback(callback: Any) -> Any:
        before = taperecords.compiling.call
        if isinstance(callback, taperecords.CompiledCall):  # a returned one is set again
            taperecords.compiling.call = None if callback is _NONE else callback
            return before or _NONE
        caller = sys._getframe(2).f_locals  # of torch's wrapper, behind our guard
        outer, function = caller.get("prior"), caller.get("fn")
        inside = outer not in (None, _NONE, taperecords.LEFT_OUT)
        if callable(callback):
            if not inside and not _module_of(function).startswith(_ATTENTION):
                outer = taperecords.CompiledCall(_name_of(function))
        elif outer is not None and not _is_looked_through(function):
            outer = taperecords.LEFT_OUT
        taperecords.compiling.call = None if outer is _NONE else outer
        return before or _NONE

    def by_stance(callback: Any) -> Any:
        if isinstance(callback, taperecords.CompiledCall) or not callable(callback):
            return callback
        return None if torch_private.stance.stance == "force_eager" else callback

    stand_ins: dict[str, Any] = {
        "set_eval_frame": set_callback,
        "_maybe_set_eval_frame": set_callback,
        "_callback_from_stance": by_stance,
    }
    counter = original_of(frames, _COUNTER)
    if callable(counter):

        def count(frames: int) -> int:
            """The count: 0 at its beginning, so that nobody counts; then at least 1."""
            return 0 if frames == 0 else max(counter(frames), 1)

        stand_ins[_COUNTER] = count
    none = {"set_autograd_compiler": lambda compiler, dynamic: (None, False)}
    enter(replaced(frames, stand_ins))
    enter(replaced(torch_private.compiled_autograd, none))


def _is_looked_through(function: Any) -> bool:
    """Whether Dynamo compiles the code that this function calls, although torch disables it there:
    a checkpoint, and the ops of a subclass of Tensor."""
    name = getattr(function, "__name__", "")
    return name == "__torch_dispatch__" or _module_of(function) == "torch.utils.checkpoint"


def _module_of(function: Any) -> str:
    return str(getattr(function, "__module__", ""))


def _name_of(function: Any) -> str:
    """The name of a compiled callable: a module by its class, a function as it was defined."""
    name = str(getattr(function, "__qualname__", "")).rpartition("<locals>.")[2]
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type):
        return name or type(function).__name__
    kind, name = type(owner).__name__, name.rpartition(".")[2]
    called = isinstance(owner, nn.Module) and name in _CALLS
    return kind if called or not name else f"{kind}.{name}"


_NONE = taperecords.CompiledCall("")
"""Stands for no call where torch remembers the one set before."""
_CALLS = ("", "_call_impl", "_wrapped_call_impl", "__call__", "forward")
_ATTENTION = "torch.nn.attention."
"""Modules of torch whose functions of attention are one kernel each, compiled or not."""
_COUNTER = "set_fullgraph_compiled_frame_count"
"""Counts the frames that fullgraph=True compiles, which must not be none, from torch 2.12 on."""


# -- functions -------------------------------------------------------------------------------------
# Torch-level calls: their names, and the few that leave the dispatcher for Python or a device.
#
# `.tolist()`, `.numpy()`, f-strings and `torch.tensor([...])` never reach a dispatch mode; a
# device that is not there must not be requested: everything but the CPU is the meta device while
# tracing.

_TO_PYTHON = frozenset({Tensor.tolist, Tensor.numpy})
_CONSTRUCTORS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LIKE = frozenset({Tensor.new_tensor, Tensor.new})
"""Constructors that take precision and device from a tensor."""
_SCALAR = torch.ops.aten._local_scalar_dense.default
"""The op of `item()`: it stands for the host's wait for a value."""
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
        makes = self.device is not None and func in torch_private.device_constructors()
        if makes and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self.device}
        if func is Tensor.cuda:
            func, args, kwargs = Tensor.to, (args[0], META), {}
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
            return self._fill(*args)
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
        elif func is Tensor.to:
            args = tuple([_placed(item) for item in args])
            made = _from_host(*args, **kwargs) if tape.tags.on_host(args[0]) else None
            if made is not None:
                return made
        elif func is torch_private.pack_padded_sequence:
            entry = tape.values.known(args[1])  # the lengths must be on the host
            args = (args[0], args[1] if entry is None else entry.value, *args[2:])
        elif func is torch_private.set_grad_enabled:
            tape.origins.recomputation.switched(bool(args[0]))
            return func(*args, **kwargs)
        elif func in _BACKWARD:
            with self._in_backward(), _gradients_wanted(tape):
                return func(*args, **kwargs)
        if "device" in kwargs and func is not torch_private.parse_to:
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

    def _fill(self, tensor: Tensor, data: Tensor) -> None:
        """`tensor.data = data`."""
        data = self._filling(tensor, data)
        _set_data(tensor, data)
        self.tape.stands_for(tensor, data)

    def _filling(self, tensor: Tensor, data: Tensor) -> Tensor:
        """The data of `tensor.data = data`: a weight on meta stays there."""
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
            like = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
            return self._construct(torch.tensor, args[1:], like)
        if func is Tensor.new and len(args) == 4 and trees.is_sparse(args[0]):
            return torch.sparse_coo_tensor(*args[1:])
        return None

    def _construct(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """`torch.tensor([...])`: a meta tensor whose value is known."""
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        device = kwargs.get("device")
        default = self.device or overrides.default_device()
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
        if masks.small(value):
            self.tape.values.learn(trees.unwrapped(made), trees.unwrapped(value))
        return made


_NO_GRAPH = "does not require grad and does not have a grad_fn"
"""Autograd's error for a loss that was computed without gradients."""


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


def wait(tape: Tape, tensor: Tensor, taint: frozenset[int] = taperecords.NO_TAINT) -> None:
    """Record that the host waits for the value of a meta tensor (also where it is printed)."""
    facts = {"elements": tensor.numel()}
    tape.record(Call.of(_SCALAR, tensor), [], sync=True, facts=facts, taint=taint)


def _set_data(tensor: Tensor, data: Tensor) -> None:
    """`tensor.data = data`, also where a weight goes from the host to meta, or back."""
    if tensor.device != data.device:
        kind: Any = type(tensor)
        if isinstance(tensor, trees.LAZY):
            gone = kind(tensor.requires_grad, data.device, tensor.dtype)
            torch.utils.swap_tensors(tensor, gone)  # type: ignore[no-untyped-call]
            return
        gone = data.detach().requires_grad_(tensor.requires_grad)
        _become(tensor, gone if kind is Tensor else kind(gone, tensor.requires_grad))
    else:
        _SET_DATA(tensor, data)


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _become(tensor: Tensor, other: Tensor) -> None:
    """`tensor` becomes `other`, of the same class; the object keeps its attributes, hooks and weak
    references.

    Autograd may hold the former tensor, as of a weight that its module computes from others: a
    backward through that raises.
    """
    attributes = {name: item for name, item in vars(tensor).items() if not name.startswith(OURS)}
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
    torch_private.swap_tensor_impl(tensor, other)
    vars(tensor).clear()
    vars(tensor).update(vars(other))
    vars(tensor).update(attributes)


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
        with overrides.functions_on(tape.here.functions):
            return original(*args, **kwargs)

    with replaced(engine, {name: run}):
        yield


def _holds_numbers(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether `x.new_tensor(data)` or `x.new(data)` takes numbers: no tensor, no sizes."""
    data = args[1] if len(args) > 1 else kwargs.get("data")
    if data is None or len(args) > 2 or isinstance(data, (Tensor, torch.Size)):
        return False
    return func is Tensor.new_tensor or not isinstance(data, int)


def _numbers(item: Any) -> Any:
    """Nested lists in which numbers replace meta tensors of one element."""
    if isinstance(item, (list, tuple)):
        return [_numbers(x) for x in item]
    return item.item() if isinstance(item, Tensor) and item.is_meta else item


def _from_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """`tensor.to(...)` of a tensor in the memory of the host; None where it stays there."""
    placed = {name: _placed(item) for name, item in kwargs.items()}
    device, dtype, *_ = torch_private.parse_to(*args, **placed)
    if device is None or device.type != "meta":
        return None
    moved: Tensor = torch.ops.aten._to_copy.default(tensor, device=META, dtype=dtype)
    return moved


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
