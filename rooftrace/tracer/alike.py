"""Whether two modules are alike: no code could tell calls of one from calls of the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
)
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules"})
_DEPTH = 4
"""How deep plain objects among the attributes are compared."""
_ABSENT = object()


def build_of(module: nn.Module, builds: Mapping[int, Any]) -> Any:
    """How a module is built, equal for those built alike; None where a hook watches its calls."""
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return None
    children = []
    for name, child in module._modules.items():
        build = None if child is None else builds.get(id(child), _ABSENT)
        if build is _ABSENT or (child is not None and build is None):
            return None
        children.append((name, build))
    tensors = tuple(
        (name, None if t is None else (type(t), tuple(t.shape), t.stride(), t.dtype, t.device))
        for group in (module._parameters, module._buffers)
        for name, t in group.items()
    )
    return hash((type(module), module.training, tensors, tuple(children)))


def differences(module: nn.Module, other: nn.Module) -> frozenset[tuple[str, str]] | None:
    """Attributes in which two modules of one build differ, by path below; None: more than that."""
    found = set()
    pairs = zip(module.named_modules(), other.named_modules(), strict=True)
    for (path, mine), (_, theirs) in pairs:
        own, others = vars(mine), vars(theirs)
        if own.keys() != others.keys():
            return None
        for name, value in own.items():
            if name not in _STRUCTURE and not _alike(value, others[name], _DEPTH):
                found.add((path, name))
    return frozenset(found)


def _alike(value: Any, other: Any, depth: int) -> bool:
    """Whether no code could tell two attributes apart, but by identity."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, PLAIN):
        return bool(value == other)
    if isinstance(value, Tensor):
        look = tuple(value.shape), value.stride(), value.dtype, value.device
        return look == (tuple(other.shape), other.stride(), other.dtype, other.device)
    if depth == 0 or isinstance(value, nn.Module):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(
            _alike(a, b, depth - 1) for a, b in zip(value, other, strict=True)
        )
    if isinstance(value, dict):
        return list(value) == list(other) and all(
            _alike(a, other[key], depth - 1) for key, a in value.items()
        )
    if callable(value) or not hasattr(value, "__dict__"):
        return not callable(value) and not hasattr(value, "__slots__") and bool(value == other)
    return _alike(vars(value), vars(other), depth - 1)


def state_of(module: nn.Module) -> list[Any]:
    """What a call could change: attributes of the modules inside, and items of their containers."""
    found: list[Any] = []
    for part in module.modules():
        for name, value in vars(part).items():
            found += [name, value]
            if isinstance(value, dict):
                found += value.values()
            elif isinstance(value, (list, set)):
                found += value
    return found


def same_state(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


class Watch:
    """Notes reads of some attributes of a module and those inside, while entered."""

    def __init__(self, module: nn.Module, places: set[tuple[str, str]]) -> None:
        self.read: set[tuple[str, str]] = set()
        self._parts = {(id(module.get_submodule(path)), name): path for path, name in places}
        kinds = {(type(module.get_submodule(path)), name) for path, name in places}
        self._kinds = sorted(kinds, key=lambda item: (item[0].__qualname__, item[1]))
        self._before: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Watch:
        for kind, name in self._kinds:
            self._before.append((kind, name, vars(kind).get(name, _ABSENT)))
            setattr(kind, name, _Watched(self, name, getattr(kind, name, _ABSENT)))
        return self

    def __exit__(self, *exception: Any) -> None:
        for kind, name, before in self._before:
            if before is _ABSENT:
                delattr(kind, name)
            else:
                setattr(kind, name, before)

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute of a module is read."""
        path = self._parts.get((id(module), name))
        if path is not None:
            self.read.add((path, name))


class _Watched:
    """An attribute that tells when it is read; it stands in the class and goes before instances."""

    def __init__(self, watch: Watch, name: str, default: Any) -> None:
        self._watch, self._name, self._default = watch, name, default

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self
        self._watch.note(module, self._name)
        found = vars(module).get(self._name, self._default)
        if found is _ABSENT:
            raise AttributeError(self._name)
        return found

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self._name]
