"""Functions that hold parts of a model: copies of them, which hold the parts of its copy.

A step's optimizer may stand in its closure, among the globals that it names, on the object whose
method it is, or with a hook on a parameter.  `copy.deepcopy` does not copy functions, so these
would still refer to the original.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from rooftrace.tracer.tensors import owners, trees

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_REGISTER = ("register_hook", "register_post_accumulate_grad_hook")
_DEPTH = 6
"""How deep objects inside objects are looked into."""


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
    """The globals that a function names: objects, and functions of its own module."""
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
                there[name] = rebound(item, memo)  # what cannot be copied stays the original
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
        inside = [*owners.weights_in(item)]
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
