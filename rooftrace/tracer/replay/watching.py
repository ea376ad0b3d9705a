"""Watches reads of attributes of modules, in one thread, without a change that others notice."""

from __future__ import annotations

import threading
from collections.abc import Set
from typing import Any

from torch import nn

from rooftrace.tracer.tensors import trees

_ABSENT = trees.ABSENT
_LOCK = threading.RLock()


class _Thread(threading.local):
    watches: tuple[Watch, ...] = ()  # that are entered; a read counts for all of them


_thread = _Thread()


def note(module: nn.Module, name: str) -> None:
    """An attribute of a module is read."""
    for watch in _thread.watches:
        watch.note(module, name)


class Watch:
    """Notes reads of some attributes of a module and those inside, while entered."""

    def __init__(self, module: nn.Module, places: Set[tuple[str, str]]) -> None:
        self.read: set[tuple[str, str]] = set()
        self._parts = {(id(module.get_submodule(path)), name): path for path, name in places}
        kinds = {(type(module.get_submodule(path)), name) for path, name in places}
        self._kinds = sorted(kinds, key=lambda item: (item[0].__qualname__, item[1]))
        self._held: list[Watched] = []

    def __enter__(self) -> Watch:
        _thread.watches = (*_thread.watches, self)
        with _LOCK:
            for kind, name in self._kinds:
                watched = getattr(kind, name, _ABSENT)
                if not isinstance(watched, Watched):
                    watched = Watched(kind, name)
                    setattr(kind, name, watched)
                watched.users += 1
                self._held.append(watched)
        return self

    def __exit__(self, *exception: Any) -> None:
        _thread.watches = tuple([watch for watch in _thread.watches if watch is not self])
        with _LOCK:
            while self._held:
                watched = self._held.pop()
                watched.users -= 1
                if not watched.users:
                    watched.remove()

    def note(self, module: nn.Module, name: str) -> None:
        """An attribute of a module is read."""
        path = self._parts.get((id(module), name))
        if path is not None:
            self.read.add((path, name))


class Watched:
    """A descriptor that reports when an attribute is read; it takes precedence over instances.

    users: how many watches need it.  inherited: the attribute that the class had under this name,
    as a class body defines it, not bound to anything.
    """

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._before = vars(kind).get(name, _ABSENT)
        self.users = 0
        self.inherited = next(
            (vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT
        )

    def remove(self) -> None:
        """The class is as it was."""
        if vars(self._kind).get(self._name) is not self:
            return  # somebody has set another one since
        if self._before is _ABSENT:
            delattr(self._kind, self._name)
        else:
            setattr(self._kind, self._name, self._before)

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self
        note(module, self._name)
        inherited = self.inherited
        is_property = hasattr(type(inherited), "__set__")
        if self._name in vars(module) and not is_property:
            return vars(module)[self._name]
        if inherited is _ABSENT:
            raise AttributeError(self._name)
        return inherited.__get__(module, kind) if hasattr(inherited, "__get__") else inherited

    def __set__(self, module: Any, value: Any) -> None:
        inherited: Any = self.inherited
        if hasattr(type(inherited), "__set__"):
            inherited.__set__(module, value)
        else:
            vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if vars(module).pop(self._name, _ABSENT) is _ABSENT:
            raise AttributeError(self._name)
