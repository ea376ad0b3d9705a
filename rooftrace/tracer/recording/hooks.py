"""One pair of hooks on the calls of all modules, for all recordings of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn
from torch.nn.modules import module as nn_module

from rooftrace.tracer.patches import Scope, contexts, shared

_NAME = "calls"
"""Under which a scope keeps who watches its calls."""


class CallWatcher(Protocol):
    """Is told of calls of modules."""

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
            with contexts.untraced():
                watching.before_call(module)


def _after(module: nn.Module, inputs: Any, output: Any) -> None:
    scope = Scope.current()
    watching = None if scope is None else scope.kept.get(_NAME)
    if watching is not None:
        with contexts.untraced():
            watching.after_call(module)


def _registered() -> Callable[[], None]:
    """Register the hooks; returns what removes them."""
    handles = (
        nn_module.register_module_forward_pre_hook(_before),
        nn_module.register_module_forward_hook(_after, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


_HOOKS = shared.Shared(_registered)


@contextlib.contextmanager
def calls_watched(watcher: CallWatcher) -> Iterator[None]:
    """Inside, a watcher is told of the calls of modules in the threads of its scope."""
    watcher.scope.kept[_NAME] = watcher
    _WATCHERS[id(watcher)] = watcher
    try:
        with _HOOKS.used():
            yield
    finally:
        del _WATCHERS[id(watcher)]
        del watcher.scope.kept[_NAME]
