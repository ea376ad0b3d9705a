"""Copies of functions that hold parts of a model, and meta twins of modules and inputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.errors import TraceError
from rooftrace.tracer import torch_private
from rooftrace.tracer.values import masks, trees
from rooftrace.tracer.values.masks import META, REAL_VALUE
from rooftrace.tracer.values.trees import own_tensors, tensors_in

# -- functions -------------------------------------------------------------------------------------
# Functions that hold parts of a model: copies of them, which hold the parts of its copy.
#
# A step's optimizer may stand in its closure, among the globals that it names, on the object whose
# method it is, or with a hook on a parameter.  `copy.deepcopy` does not copy functions, so these
# would still refer to the original.

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_REGISTER = ("register_hook", "register_post_accumulate_grad_hook")
_DEPTH = 6
"""Levels of objects inside objects that are searched."""


def held_by(item: Any) -> list[Any]:
    """The objects that a function, bound method or partial refers to, also through functions."""
    held: list[Any] = []
    seen: set[int] = set()

    def search(item: Any) -> None:
        if id(item) in seen:
            return
        seen.add(id(item))
        inside = _parts_of_callable(item)
        if inside is None:
            held.append(item)
        for part in inside or ():
            search(part)

    search(item)
    return [part for part in held if part is not item]


def _parts_of_callable(item: Any) -> list[Any] | None:
    if isinstance(item, partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, MethodType):
        return [item.__func__, item.__self__]
    if isinstance(item, FunctionType):
        globals_ = globals_of(item).values()
        return [*_contents(item.__closure__ or ()), *(item.__defaults__ or ()), *globals_]
    return None


def globals_of(function: FunctionType) -> dict[str, Any]:
    """The globals that a function names: objects, and functions of its module."""
    there, named = function.__globals__, _names_in(function.__code__)
    return {name: there[name] for name in named if name in there and _is_own(there[name], there)}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from _names_in(item)


def _is_own(item: Any, there: Mapping[str, Any]) -> bool:
    if isinstance(item, FunctionType):
        return item.__globals__ is there
    return not isinstance(item, (type, ModuleType, BuiltinFunctionType, *trees.PLAIN))


def _contents(cells: Iterable[CellType]) -> list[Any]:
    contents = map(trees.cell_content, cells)
    return [content for content in contents if content is not trees.ABSENT]


def rebound(item: Any, memo: dict[int, Any]) -> Any:
    """`item`, or a copy if it refers to something that `memo` has a copy of.

    memo: as of `copy.deepcopy`, by the identity of the original.
    """
    if id(item) in memo:
        return memo[id(item)]
    if not _refers(item, memo, _DEPTH, {}):
        return item
    if isinstance(item, partial):
        kept = {name: rebound(value, memo) for name, value in item.keywords.items()}
        return partial(rebound(item.func, memo), *(rebound(a, memo) for a in item.args), **kept)
    if isinstance(item, MethodType):
        return MethodType(rebound(item.__func__, memo), rebound(item.__self__, memo))
    if isinstance(item, FunctionType):
        return _function(item, memo)
    if type(item) is dict and any(_is_identity(key, memo) for key in item):
        item = {id(memo[k]) if _is_identity(k, memo) else k: value for k, value in item.items()}
    return copy.deepcopy(item, memo)


def _is_identity(key: Any, memo: Mapping[int, Any]) -> bool:
    """Whether a key of a dict is the id of a tensor that has a copy."""
    return type(key) is int and isinstance(memo.get(key), Tensor)


def _function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    named = {name: item for name, item in globals_of(function).items() if item is not function}
    there = {**function.__globals__} if _refers(named, memo, _DEPTH, {}) else function.__globals__
    made = FunctionType(function.__code__, there, function.__name__, function.__defaults__, cells)
    memo[id(function)] = made  # it may refer to itself
    if there is not function.__globals__:
        for name, item in named.items():
            with contextlib.suppress(TypeError, RuntimeError, ValueError, AttributeError):
                there[name] = rebound(item, memo)  # else the original stays
    made.__kwdefaults__ = function.__kwdefaults__
    made.__defaults__ = tuple(rebound(d, memo) for d in function.__defaults__ or ()) or None
    vars(made).update(vars(function))
    for mine, theirs in zip(cells, function.__closure__ or (), strict=True):
        for value in _contents([theirs]):
            mine.cell_contents = rebound(value, memo)
    return made


def _refers(item: Any, memo: Mapping[int, Any], depth: int, seen: dict[int, int]) -> bool:
    """Whether something that `item` holds has a copy."""
    if id(item) in memo:
        return True
    plain = (str, bytes, int, float, type, ModuleType)
    if item is None or isinstance(item, plain) or depth == 0:
        return False
    if seen.get(id(item), 0) >= depth:
        return False
    seen[id(item)] = depth
    inside: Iterable[Any] | None = _parts_of_callable(item)
    if inside is None and isinstance(item, nn.Module):
        inside = [*trees.weights_in(item)]
    elif inside is None and isinstance(item, dict):
        inside = [*item.keys(), *item.values()]
    elif inside is None and isinstance(item, (list, tuple, set, frozenset)):
        inside = item
    elif inside is None and not isinstance(item, Tensor):
        inside = list(vars(item).values()) if hasattr(item, "__dict__") else []
    return any(_refers(part, memo, depth - 1, seen) for part in inside or ())


def hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """The hooks on the gradient of a tensor."""
    return [hook for name in _HOOKS for hook in (getattr(tensor, name, None) or {}).values()]


def copy_hooks(tensors: Iterable[Tensor], memo: dict[int, Any]) -> None:
    """Put the gradient hooks of tensors on their copies in `memo`, bound to copied objects."""
    for tensor in tensors:
        made = memo.get(id(tensor))
        if made is None or made is tensor or hooks_of(made):
            continue
        for name, register in zip(_HOOKS, _REGISTER, strict=True):
            for hook in (getattr(tensor, name, None) or {}).values():
                getattr(made, register)(rebound(hook, memo))


# -- moving ----------------------------------------------------------------------------------------
# Meta twins of modules and inputs: same sizes, no data, nothing shared with the original.


def twin(tensor: Tensor) -> Tensor:
    """A fresh meta tensor of the same size and strides; a small value is kept under REAL_VALUE.

    The twin of a tensor subclass has its class and attributes (see `Twins`).
    """
    twins = Twins()
    made = twins.of(tensor)
    twins.finish()
    return made


def _empty_like(tensor: Tensor) -> Tensor:
    """A meta tensor of the same size; a sparse one has as many stored elements."""
    if tensor.layout is not torch.sparse_coo:
        return torch.empty_like(tensor, device=META)
    index, values = (torch.empty_like(piece, device=META) for piece in trees.pieces_of(tensor))
    with torch.no_grad():
        return torch.sparse_coo_tensor(
            index, values, tensor.shape, is_coalesced=tensor.is_coalesced(), check_invariants=False
        )


def _plain_twin(tensor: Tensor) -> Tensor:
    empty = _empty_like(tensor)
    empty.requires_grad_(tensor.requires_grad and tensor.dtype.is_floating_point)
    _refer(empty, tensor)
    if tensor.device.type == "cpu" and masks.small(tensor) and type(tensor) is Tensor:
        empty.__dict__[REAL_VALUE] = tensor.detach().clone()
    elif REAL_VALUE in tensor.__dict__:
        empty.__dict__[REAL_VALUE] = tensor.__dict__[REAL_VALUE]
    for mark in (masks.UNIFORM, masks.IMPLICIT):
        if mark in tensor.__dict__:
            empty.__dict__[mark] = tensor.__dict__[mark]
    return empty


def _is_apart(tensor: Tensor) -> bool:
    """Whether some bytes of a tensor are not on meta."""
    return any(part.device.type != "meta" for part, _ in trees.parts_of(tensor))


def on_meta(module: nn.Module) -> nn.Module:
    """The module itself if all its tensors are on meta, else a copy with meta tensors.

    The copy shares no state with the original, and no weight is copied.  Raises TraceError for
    a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    twins = Twins(memo)
    scripted = _scripted(module)
    inside = {id(part) for script in scripted for part in script.modules()}
    for script in scripted:
        if any(t.device.type != "meta" for t in (*script.parameters(), *script.buffers())):
            memo[id(script)] = _loaded_on_meta(script)
    parts = [part for part in trees.modules_in(module) if id(part) not in inside]
    tensors = [tensor for part in parts for tensor in own_tensors(part)]
    if not memo and not any(map(_is_apart, tensors)):
        return module
    for path, owner in module.named_modules():
        for tensor in () if id(owner) in inside else own_tensors(owner):
            if _is_apart(tensor):
                twins.of(tensor, owned=True, name=_name_in(owner, path, tensor))
    twins.held_by_modules(parts)
    twins.handles(module)
    try:
        twins.finish()
        made: nn.Module = copy.deepcopy(module, memo)
        copy_hooks(tensors, memo)
        return made
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{type(module).__name__} cannot be copied to the meta device ({error}): build it "
            "under `with torch.device('meta'):` and pass that"
        ) from error


def _scripted(module: nn.Module) -> list[torch.jit.ScriptModule]:
    """The outermost modules that TorchScript compiled."""
    if isinstance(module, torch.jit.ScriptModule):
        return [module]
    return [inner for child in module.children() for inner in _scripted(child)]


def _loaded_on_meta(script: torch.jit.ScriptModule) -> nn.Module:
    """A copy on meta through a TorchScript file; such a module cannot be moved in another way."""
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    loaded: nn.Module = torch.jit.load(file, map_location=META)  # type: ignore[no-untyped-call]
    for mine, theirs in zip(script.modules(), loaded.modules(), strict=True):
        theirs.training = mine.training
    return loaded


_HANDLES: dict[type, Callable[[Any], Any]] = {
    ThreadPoolExecutor: lambda pool: ThreadPoolExecutor(pool._max_workers),
    type(threading.Lock()): lambda lock: threading.Lock(),
    type(threading.RLock()): lambda lock: threading.RLock(),
    threading.Event: lambda event: threading.Event(),
    threading.Semaphore: lambda semaphore: threading.Semaphore(semaphore._value),
    threading.local: lambda local: threading.local(),
}
"""Types that cannot be copied, each with a function that makes a new, unused object of the type."""
_HANDLE_DEPTH = 3
"""Levels of objects in modules that are searched for pools and locks."""


class Twins:
    """Meta tensors for real ones, each made once and put into the memo of a deep copy.

    A subclass keeps its class, its attributes and the tensors inside of it; they are moved by
    `__tensor_unflatten__` where the class has it, else by making an object of that class with the
    same attributes.  Attributes may refer to anything, also to the module that owns the tensor:
    they are copied by `finish`, when all tensors have their twins.
    """

    def __init__(self, memo: dict[int, Any] | None = None) -> None:
        self.memo: dict[int, Any] = {} if memo is None else memo
        self._attributes: list[tuple[Tensor, dict[str, Any]]] = []
        self._storages: dict[int, Tensor] = {}
        self._kept: list[Any] = []  # so that no new object gets their identities

    def of(self, tensor: Tensor, owned: bool = False, name: str = "") -> Tensor:
        """The twin of `tensor`.  owned: by a module, so that a parameter stays one.

        Raises TraceError for a subclass that does not move, with its name.
        """
        made_before: Tensor | None = self.memo.get(id(tensor))
        if made_before is not None:
            return made_before
        made: Tensor | None
        if isinstance(tensor, torch_private.FakeTensor):
            made = tensor  # `check_traceable` refuses it, with advice
        elif type(tensor) in trees.ORDINARY or isinstance(tensor, trees.LAZY):
            made = _aliased(tensor, self._storages) if not owned else None
            if made is None:
                made = parameter_twin(tensor) if owned else _plain_twin(tensor)
        else:
            try:
                with torch_private.DisableTorchFunctionSubclass():
                    made = self._subclass(tensor, owned)
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
                kind = type(tensor)
                raise TraceError(
                    f"{name or 'a tensor'} is a {kind.__module__}.{kind.__qualname__}, which does "
                    f"not move to the meta device ({type(error).__name__}: {error}): give the "
                    "class __tensor_flatten__ and __tensor_unflatten__, or build the module under "
                    "`with torch.device('meta'):` and pass that"
                ) from error
        lazy = isinstance(tensor, trees.LAZY)
        if owned and not lazy and tensor.layout is torch.strided and not trees.is_hollow(tensor):
            self._storages.setdefault(trees.bytes_of(tensor), made)
        self.memo[id(tensor)] = made
        self._kept.append(tensor)
        attributes = trees.attributes_of(tensor)
        known_names = vars(made)
        rest = {n: item for n, item in attributes.items() if n not in known_names}
        if rest:
            self._attributes.append((made, rest))
            for inner in tensors_in(rest):
                if inner is not tensor:
                    self.of(inner, name=name)
        return made

    def _subclass(self, tensor: Tensor, owned: bool) -> Tensor:
        kind: Any = type(tensor)
        made: Tensor
        if hasattr(kind, "__tensor_flatten__"):
            flat: Any = tensor
            names, context = flat.__tensor_flatten__()
            inner = {n: self._part(getattr(tensor, n), owned) for n in names}
            size, stride = tensor.size(), tensor.stride() if _has_strides(tensor) else None
            made = kind.__tensor_unflatten__(inner, _on_no_device(context), size, stride)
        elif trees.is_hollow(tensor):
            made = torch_private.make_wrapper_subclass(
                kind,
                tensor.size(),
                strides=tensor.stride() if _has_strides(tensor) else None,
                dtype=tensor.dtype,
                layout=tensor.layout,
                device=META,
            )
        else:
            empty = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META
            )
            made = torch_private.make_subclass(kind, empty, False)
            made.__dict__[trees.HAS_BYTES] = True
            if not owned and tensor.device.type == "cpu" and masks.small(tensor):
                made.__dict__[REAL_VALUE] = tensor.detach().as_subclass(Tensor).clone()
        if made.requires_grad != tensor.requires_grad and made.is_leaf:
            made.requires_grad_(tensor.requires_grad)
        return made

    def _part(self, item: Any, owned: bool) -> Any:
        """The twin of a tensor inside of a subclass; values of a weight are not kept."""
        if not isinstance(item, Tensor):
            return item
        if type(item) is not Tensor or not owned:
            return self.of(item, owned)
        self._kept.append(item)
        made = self.memo[id(item)] = torch.empty_like(item, device=META)
        _refer(made, item)
        return made

    def held_by_modules(self, modules: Iterable[nn.Module]) -> None:
        """Make twins for tensors in other objects that modules hold, if they belong to weights.

        These share bytes with a weight that moved, or belong to a module with a tensor subclass, as
        the state of a quantised layer does.
        """
        seen: set[int] = set()
        for module in modules:
            special = any(type(tensor) not in trees.ORDINARY for tensor in own_tensors(module))
            for name, tensor in trees.held_tensors(module, seen):
                if tensor.device.type != "cpu" or id(tensor) in self.memo:
                    continue
                if special or trees.bytes_of(tensor) in self._storages:
                    self.of(tensor, name=name)

    def handles(self, module: nn.Module) -> None:
        """Put new pools and locks in the memo, for the ones that a module and its parts hold."""
        waiting = [item for part in module.modules() for item in vars(part).values()]
        for _ in range(_HANDLE_DEPTH):
            inside: list[Any] = []
            for item in waiting:
                make = _HANDLES.get(type(item))
                if make is not None:
                    self.memo.setdefault(id(item), make(item))
                elif type(item).__module__ in ("threading", "queue", "_thread", "_queue"):
                    continue  # a queue is emptied by a thread that knows the original
                elif not isinstance(item, (*trees.PLAIN, Tensor, nn.Module, type)):
                    inside += trees.held_in(item)
            waiting = inside

    def finish(self) -> None:
        """Copy the attributes of subclasses, once all tensors that they may name are there."""
        while self._attributes:
            made, attributes = self._attributes.pop()
            for name, item in attributes.items():
                try:
                    copied = copy.deepcopy(item, self.memo)
                except (TypeError, RuntimeError, ValueError, AttributeError):
                    copied = item  # a lock, a handle: no tensor is in it that could move
                with contextlib.suppress(AttributeError):  # a read-only slot
                    object.__setattr__(made, name, copied)


def _aliased(tensor: Tensor, storages: Mapping[int, Tensor]) -> Tensor | None:
    """A meta tensor on the storage of the twin whose original shares bytes with `tensor`."""
    if tensor.layout is not torch.strided or trees.bytes_of(tensor) not in storages:
        return None
    base = storages[trees.bytes_of(tensor)]
    empty = torch.empty(0, dtype=tensor.dtype, device=META)
    where = base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    return empty.set_(*where)


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _on_no_device(context: Any) -> Any:
    """The context of a subclass (`__tensor_flatten__`), with META in place of any device."""
    if isinstance(context, torch.device):
        return META
    if isinstance(context, dict):
        return {key: _on_no_device(item) for key, item in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_on_no_device(item) for item in context)
    if isinstance(context, tuple) and hasattr(context, "_fields"):
        kind: Any = type(context)
        return kind(*(_on_no_device(item) for item in context))
    devices = {
        name: META
        for name, item in getattr(context, "__dict__", {}).items()
        if isinstance(item, torch.device)
    }
    if devices and dataclasses.is_dataclass(context) and not isinstance(context, type):
        return dataclasses.replace(context, **devices)
    return context


def _name_in(owner: nn.Module, path: str, tensor: Tensor) -> str:
    groups = (owner._parameters, owner._buffers, vars(owner))
    names = (name for group in groups for name, item in group.items() if item is tensor)
    return ".".join(part for part in (path, next(names, "")) if part)


def parameter_twin(tensor: Tensor) -> Tensor:
    """A meta tensor for an ordinary one that a module owns: a parameter stays one."""
    if isinstance(tensor, trees.LAZY):
        kind: Any = type(tensor)
        empty: Tensor = kind(tensor.requires_grad, device=META, dtype=tensor.dtype)
        return empty
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(_empty_like(tensor), tensor.requires_grad)
        _refer(made, tensor)
        return made
    return _plain_twin(tensor)


def _refer(empty: Tensor, tensor: Tensor) -> None:
    """Give a twin a reference to the real tensor, to compute values from when code asks."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if plain and tensor.device.type == "cpu":
        empty.__dict__[masks.REAL] = masks.Real(tensor)
    elif masks.REAL in tensor.__dict__:
        empty.__dict__[masks.REAL] = tensor.__dict__[masks.REAL]


def inputs_on_meta(tree: Any) -> Any:
    """A copy of nested arguments with a twin for every tensor; the originals do not change."""
    twins = Twins()
    for tensor in tensors_in(tree):
        twins.of(tensor)
    twins.finish()
    return _copied(tree, twins.memo)


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested Python values with every tensor in it changed, each once."""
    return _copied(tree, {id(tensor): change(tensor) for tensor in tensors_in(tree)})


def _copied(tree: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(tree, dict(memo))
    except (TypeError, RuntimeError):  # a generator, a lock ...: only the containers are copied
        return torch_private.tree_map_only(Tensor, lambda tensor: memo[id(tensor)], tree)
