"""Attributes of modules that are data, or that a module lacks, with other values for some threads.

A function can ask which thread calls it (see `replacing`); a value cannot.  So the name is taken
out of the module, and the module's `__getattr__` gives each thread its own value: that of the scope
that the thread belongs to, or what was there before.  Code of the module itself that reads the name
as a global does not find it meanwhile: use this for names that others read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rooftrace.tracer.patches.scopes import current_scope

_ABSENT: Any = object()
"""Stands for an attribute that is not there."""
_LOCK = threading.RLock()
_HOOK = "__getattr__"


class _Answers:
    """The names of one module that scopes answer."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._before: Callable[[str], Any] = vars(module).get(_HOOK, _ABSENT)
        self._originals: dict[str, Any] = {}
        self._counts: dict[str, int] = {}
        self._hook = self._answer
        setattr(module, _HOOK, self._hook)

    def take(self, name: str) -> None:
        """One more scope answers a name."""
        if name not in self._originals:
            self._originals[name] = vars(self._module).pop(name, _ABSENT)
            self._counts[name] = 0
        self._counts[name] += 1

    def give_back(self, name: str) -> None:
        """One scope less; the last puts back what was there."""
        self._counts[name] -= 1
        if self._counts[name]:
            return
        original = self._originals.pop(name)
        vars(self._module).pop(name, None)  # somebody may have set it since
        if original is not _ABSENT:
            setattr(self._module, name, original)

    def remove(self) -> bool:
        """Take the hook away if it answers nothing more; returns whether it did."""
        if self._originals:
            return False
        if vars(self._module).get(_HOOK) is self._hook:
            if self._before is _ABSENT:
                delattr(self._module, _HOOK)
            else:
                setattr(self._module, _HOOK, self._before)
        return True

    def _answer(self, name: str) -> Any:
        scope = current_scope()
        original = self._originals.get(name, _ABSENT)
        value = original
        if scope is not None:
            value = scope.replacement((id(self._module), name), original)
        if value is not _ABSENT:
            return value
        if self._before is not _ABSENT:
            return self._before(name)
        raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")


_ANSWERS: dict[int, _Answers] = {}


@contextlib.contextmanager
def answered(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these attributes of a module have other values for the threads of this scope.

    Other threads see what was there before, also that a name is missing.
    """
    scope = current_scope()
    assert scope is not None, "a replacement belongs to a scope"
    keys = {(id(module), name): value for name, value in values.items()}
    with _LOCK:
        answers = _ANSWERS.get(id(module))
        if answers is None:
            answers = _ANSWERS[id(module)] = _Answers(module)
        for name in values:
            answers.take(name)
    try:
        with scope.replacing(keys):
            yield
    finally:
        with _LOCK:
            for name in values:
                answers.give_back(name)
            if answers.remove():
                del _ANSWERS[id(module)]
