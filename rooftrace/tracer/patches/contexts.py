"""Contexts of one thread, and the garbage collector's, which all threads share.

Torch's own way of entering a mode notes what was on in variables that all threads share, and
restores them in the order in which modes end.  These helpers touch the stacks of the thread only.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

from rooftrace.tracer.patches.claims import claimed as claimed
from rooftrace.tracer.patches.scopes import Scope
from rooftrace.tracer.patches.shared import Shared

_dispatch: Any = _python_dispatch
_functions: Any = overrides


def fake_mode() -> Any:
    """The FakeTensorMode that is on in this thread; None where there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def push(mode: Any) -> None:
    """Put a dispatch mode on."""
    _dispatch._push_mode(mode)


def pop() -> None:
    """Take the innermost dispatch mode off."""
    _dispatch._pop_mode()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, no recording and no mode around this code sees what this thread runs."""
    with Scope().entered(), _dispatch._disable_current_modes():
        functions = [_functions._pop_mode() for _ in range(_functions._len_torch_function_stack())]
        try:
            yield
        finally:
            while _functions._len_torch_function_stack():
                _functions._pop_mode()
            for mode in reversed(functions):
                _functions._push_mode(mode)


def _collector_off() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return gc.enable


collector_off = Shared(_collector_off)
"""No garbage collection, in any thread: from the first that needs that to the last."""
