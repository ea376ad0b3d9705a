"""Whether two modules are the same to their code: it could not tell their calls apart."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.tensors import trees
from rooftrace.tracer.values import marks

PLAIN: tuple[type, ...] = (*trees.PLAIN, torch.Size)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 4
"""How deep plain objects among the attributes are compared."""
_REACH = 12
"""How deep in attributes a change is seen."""
_CONTAINERS = (dict, OrderedDict, list, tuple)
"""Containers that hold nothing but their items."""
_ABSENT = object()


def build_of(module: nn.Module, builds: Mapping[int, Any]) -> Any:
    """How a module is built, equal for equal builds; None where a hook watches its calls."""
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return None
    children = []
    for name, child in module._modules.items():
        build = None if child is None else builds.get(id(child), _ABSENT)
        if build is _ABSENT or (child is not None and build is None):
            return None
        children.append((name, build))
    tensors = tuple(
        (name, None if t is None else (type(t), *trees.look_of(t), t.device))
        for group in (module._parameters, module._buffers)
        for name, t in group.items()
    )
    stored = tuple(marks.stored_in(module).items())
    return hash((type(module), module.training, tensors, stored, tuple(children)))


def of_one_build(root: nn.Module) -> Iterator[list[nn.Module]]:
    """Modules inside that have one build, where there are several, in order.

    Those of torch itself are no code of the user's, and too small to matter.
    """
    builds: dict[int, Any] = {}
    by_build: dict[Any, list[nn.Module]] = {}
    for module in reversed(list(root.modules())):
        build = builds[id(module)] = build_of(module, builds)
        if not type(module).__module__.startswith("torch.") and build is not None:
            by_build.setdefault(build, []).append(module)
    yield from (equal[::-1] for equal in by_build.values() if len(equal) > 1)


def differences(module: nn.Module, other: nn.Module) -> frozenset[tuple[str, str]] | None:
    """Attributes in which two modules of one build differ, by path below; None if more differs."""
    parts, twins = modules_below(module), modules_below(other)
    if [(path, first) for path, _, first in parts] != [(path, first) for path, _, first in twins]:
        return None
    places = set()
    for (path, mine, _), (_, theirs, _) in zip(parts, twins, strict=True):
        own, others = vars(mine), vars(theirs)
        if type(mine) is not type(theirs) or own.keys() != others.keys():
            return None
        for name, value in own.items():
            if name in _STRUCTURE or value is others[name]:
                continue
            both = isinstance(value, Tensor) and isinstance(others[name], Tensor)
            if not (_look(value) == _look(others[name]) if both else _same(value, others[name])):
                places.add((path, name))
    return frozenset(places)


def modules_below(module: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """Modules inside by every path below, with a number for each module; its paths share it."""
    numbers: dict[int, int] = {}
    return [
        (path, part, numbers.setdefault(id(part), len(numbers)))
        for path, part in module.named_modules(remove_duplicate=False)
    ]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody watches the calls of this module or of one inside."""
    return any(getattr(part, hooks, None) for part in module.modules() for hooks in _HOOKS)


def _look(tensor: Tensor) -> Any:
    return type(tensor), *trees.look_of(tensor), tensor.device


def _same(value: Any, other: Any, depth: int = _DEPTH) -> bool:
    """Whether no code could tell two attributes apart, but by identity."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, PLAIN):
        return bool(value == other)
    if type(value) in _CONTAINERS and not value and not other:
        return True
    if depth == 0 or isinstance(value, (Tensor, nn.Module)) or callable(value):
        return False
    if type(value) in (set, frozenset, range, slice, bytes):
        return bool(value == other)
    if isinstance(value, (list, tuple)):
        same = len(value) == len(other) and all(
            _same(a, b, depth - 1) for a, b in zip(value, other, strict=True)
        )
    elif isinstance(value, dict):
        same = list(value) == list(other) and all(
            _same(a, other[key], depth - 1) for key, a in value.items()
        )
    else:
        same = type(value).__basicsize__ == _Simple.__basicsize__ and hasattr(value, "__dict__")
    return same and _same(getattr(value, "__dict__", 0), getattr(other, "__dict__", 0), depth - 1)


class _Simple:
    """A plain object: all its state is in its `__dict__`."""


def held_state(module: nn.Module) -> list[Any]:
    """The state that a call could change: attributes of the modules inside, and their contents."""
    state: list[Any] = []
    seen: set[int] = set()
    for part in module.modules():
        _collect(vars(part), _REACH, seen, state)
    return state


def _collect(value: Any, depth: int, seen: set[int], state: list[Any]) -> None:
    # Tensors by reference: how long they live is part of what is recorded.
    state.append(weakref.ref(value) if isinstance(value, Tensor) else value)
    hidden = isinstance(value, (*PLAIN, Tensor, nn.Module, type)) or callable(value)
    if hidden or depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        for key, item in value.items():
            state.append(key)
            _collect(item, depth - 1, seen, state)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        for item in value:
            _collect(item, depth - 1, seen, state)
    if type(value) not in _CONTAINERS and hasattr(value, "__dict__"):
        _collect(vars(value), depth - 1, seen, state)


def same_state(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
