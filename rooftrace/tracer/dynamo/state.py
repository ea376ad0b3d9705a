"""What Dynamo keeps for the whole process, as it was before a run of ours.

Compiled code is kept with each function's code object, for every caller in the process.  What a run
of ours adds is taken out again; what others compiled stays.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

_CONTAINERS = (
    ("torch._dynamo.utils", "counters"),
    ("torch._dynamo.utils", "graph_break_reasons"),
    ("torch._dynamo.utils", "guard_failures"),
    ("torch._dynamo.utils", "warn_once_cache"),
    ("torch._dynamo.utils", "_compilation_metrics"),
    ("torch._dynamo.utils", "compilation_time_metrics"),
    ("torch._dynamo.convert_frame", "FRAME_COMPILE_COUNTER"),
)
_NUMBERS = (
    ("torch._dynamo.convert_frame", "FRAME_COUNTER"),
    ("torch._dynamo.convert_frame", "initial_global_state"),
    ("torch._dynamo.utils", "curr_frame"),
)
_TRACKERS = ("input_codes", "output_codes")
OURS = "of_rooftrace"
"""The attribute by which a backend is known to be that of a run of ours."""


class Touched:
    """Functions that Dynamo was asked to compile in a run of ours, each as it was before."""

    def __init__(self) -> None:
        self._before: dict[CodeType, tuple[bool, dict[str, Any], dict[str, Any]]] = {}

    def note(self, code: CodeType, sizes: dict[str, Any]) -> None:
        """Dynamo is about to compile a function.  sizes: what it remembers of its arguments."""
        if code not in self._before:
            known = bool(_entries(code))
            self._before[code] = known, sizes, dict(sizes) if sizes else {}

    def take_out(self) -> None:
        """Take out what was compiled and remembered since."""
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        eval_frame: Any = torch._C._dynamo.eval_frame
        action = eval_frame._FrameAction.DEFAULT
        for code, (known, sizes, were) in self._before.items():
            if not known:
                eval_frame.reset_code(code)
                continue
            for entry in _entries(code):
                manager = entry.guard_manager
                if _is_ours(entry.backend) and manager.extra_state is not None:
                    gone = DeletedGuardManagerWrapper("a run of rooftrace has ended")
                    manager.extra_state.invalidate(entry, gone)
            sizes.clear()
            sizes.update(were)
            # Code that was not to be compiled before does not come here.
            eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action, action))


def _entries(code: CodeType) -> list[Any]:
    eval_frame: Any = torch._C._dynamo.eval_frame
    return list(eval_frame._debug_get_cache_entry_list(code))


@contextlib.contextmanager
def kept(touched: Touched) -> Iterator[None]:
    """Inside, Dynamo may compile; afterwards the process is as before.

    touched: what it was asked to compile, which the caller notes meanwhile.
    """
    import torch._dynamo.convert_frame as frames

    homes = {name: _module(name) for name, _ in (*_CONTAINERS, *_NUMBERS)}
    containers = [
        (held, _copied(held))
        for home, name in _CONTAINERS
        if (held := getattr(homes[home], name, None)) is not None
    ]
    numbers = [
        (homes[home], name, getattr(homes[home], name))
        for home, name in _NUMBERS
        if hasattr(homes[home], name)
    ]
    held_codes: list[Any] = [getattr(frames, name) for name in _TRACKERS if hasattr(frames, name)]
    trackers = [(tracker, list(tracker.seen), set(tracker.seen_ids)) for tracker in held_codes]
    with _quiet():
        try:
            yield
        finally:
            touched.take_out()
            for held, was in containers:
                _restore(held, was)
            for home, name, value in numbers:
                setattr(home, name, value)
            for tracker, seen, ids in trackers:
                tracker.seen[:], tracker.seen_ids = seen, ids


def _module(name: str) -> Any:
    import importlib

    return importlib.import_module(name)


def _copied(held: Any) -> Any:
    if isinstance(held, dict):
        return {
            key: value.copy() if isinstance(value, (dict, list)) else value
            for key, value in held.items()
        }
    return list(held)


def _restore(held: Any, was: Any) -> None:
    held.clear()
    if hasattr(held, "extend"):
        held.extend(was)
    else:
        held.update(was)


def _is_ours(backend: Any) -> bool:
    while backend is not None:
        if getattr(backend, OURS, False):
            return True
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return False


class _NotHere(logging.Filter):
    """Leaves out what Dynamo logs in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or not record.name.startswith("torch._dynamo")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, what Dynamo logs in this thread is not shown: the result says it."""
    named = ("torch._dynamo", "torch", None)
    handlers = [handler for name in named for handler in logging.getLogger(name).handlers]
    if logging.lastResort is not None:
        handlers.append(logging.lastResort)
    leave_out = _NotHere()
    for handler in handlers:
        handler.addFilter(leave_out)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(leave_out)
