"""Functions and attributes of other people's modules and classes, replaced for some threads.

The first scope that replaces a name puts a guard there; the last one puts the original back.  The
guard runs the replacement of the scope that its thread belongs to, and the original in any other
thread.  So scopes of several threads may overlap and end in any order, and code that keeps a
reference to the guard keeps the original.

A process that runs nothing but a script has no other threads: `put` replaces for all, for good.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from rooftrace.tracer.patches.contexts import plainly
from rooftrace.tracer.patches.scopes import Scope

_ABSENT: Any = object()
"""Stands for an attribute that is not there."""
_LOCK = threading.RLock()
_FUNCTIONS = (FunctionType, BuiltinFunctionType)


class _Guard:
    """A name that is replaced: `instead` stands for it in threads whose scope does not say."""

    __slots__ = ("count", "home", "instead", "name", "original", "there")

    def __init__(self, home: Any, name: str) -> None:
        self.home, self.name = home, name
        self.original = self.instead = vars(home).get(name, _ABSENT)
        self.count = 0  # how many scopes replace it
        if isinstance(self.original, _FUNCTIONS) or isinstance(home, ModuleType):
            self.there: Any = _guarded_function(self)
        else:
            self.there = _GuardedAttribute(self)

    def chosen(self) -> Any:
        """What stands for the name in the running thread."""
        scope = Scope.current()
        if scope is None or not self.count:  # somebody may keep a reference to what was there
            return self.instead
        return scope.replacements.get((id(self.home), self.name), self.instead)

    def install(self) -> None:
        setattr(self.home, self.name, self.there)

    def remove(self) -> None:
        if vars(self.home).get(self.name, _ABSENT) is not self.there:
            return  # somebody else replaced it since, and may call the guard
        if self.original is _ABSENT:
            delattr(self.home, self.name)
        else:
            setattr(self.home, self.name, self.original)


_GUARDS: dict[tuple[int, str], _Guard] = {}


@contextlib.contextmanager
def replaced(home: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these attributes of a module or a class are others for the threads of this scope."""
    scope = Scope.current()
    assert scope is not None, "a replacement belongs to a scope"
    _dynamo_imported()
    keys = {(id(home), name): value for name, value in replacements.items()}
    with _LOCK:
        for name in replacements:
            _guard_of(home, name).count += 1
    try:
        with scope.replacing(keys):
            yield
    finally:
        with _LOCK:
            for key in keys:
                guard = _GUARDS[key]
                guard.count -= 1
                if not guard.count:
                    del _GUARDS[key]
                    guard.remove()


def put(home: Any, replacements: Mapping[str, Any]) -> None:
    """From here on these attributes of a module or a class are others in this process."""
    _dynamo_imported()
    with _LOCK:
        for name, value in replacements.items():
            guard = _guard_of(home, name)
            guard.count += 1
            guard.instead = value
            if isinstance(home, ModuleType) and not isinstance(guard.original, _FUNCTIONS):
                guard.there = value  # no function: it may be asked for without a call
                guard.install()


def _guard_of(home: Any, name: str) -> _Guard:
    """The guard of a name, which is there."""
    key = id(home), name
    guard = _GUARDS.get(key)
    if guard is None:
        guard = _GUARDS[key] = _Guard(home, name)
        guard.install()
    return guard


@functools.cache
def _dynamo_imported() -> None:
    """Import Dynamo before anything is replaced.

    It knows functions of torch by what it found under their names when it was imported.
    """
    with plainly():
        importlib.import_module("torch._dynamo")


def original_of(home: Any, name: str) -> Any:
    """The attribute of a module or class (as its body has it) without a replacement of ours."""
    with _LOCK:
        guard = _GUARDS.get((id(home), name))
        return vars(home).get(name, _ABSENT) if guard is None else guard.original


def _guarded_function(guard: _Guard) -> Any:
    chosen = guard.chosen

    @functools.wraps(guard.original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return chosen()(*args, **kwargs)

    return call


class _GuardedAttribute:
    """Stands for an attribute that is no function: a property, a constant, a class."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard

    def __get__(self, instance: Any, owner: Any) -> Any:
        value = self._guard.chosen()
        if value is _ABSENT:
            value = self._inherited(owner)
        bind = getattr(type(value), "__get__", None)
        return value if bind is None else bind(value, instance, owner)

    def _inherited(self, owner: type) -> Any:
        kinds, name = owner.__mro__, self._guard.name
        for kind in kinds[kinds.index(self._guard.home) + 1 :]:
            if name in vars(kind):
                return vars(kind)[name]
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {name!r}")
