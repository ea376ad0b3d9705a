"""Modules on meta are traced themselves, not copies: by one recording at a time."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rooftrace.tracer.patches.scopes import Scope

_CHANGED = threading.Condition()
_CLAIMED: dict[int, Counter[int]] = {}  # how often each owner claimed an object, by identity


@contextlib.contextmanager
def claimed(objects: Sequence[Any]) -> Iterator[None]:
    """Inside, these objects are this recording's; another thread that claims one waits.

    A trace sets training flags, gradients and the like of a module on meta.  Traces inside of the
    trace that has an object may claim it too, also those of threads that it started.
    """
    scope = Scope.current()
    owner = threading.get_ident() if scope is None else scope.owner
    keys = {id(item) for item in objects}
    with _CHANGED:
        while any(_CLAIMED[key].keys() - {owner} for key in keys if key in _CLAIMED):
            _CHANGED.wait()
        for key in keys:
            _CLAIMED.setdefault(key, Counter())[owner] += 1
    try:
        yield
    finally:
        with _CHANGED:
            for key in keys:
                owners = _CLAIMED[key]
                owners[owner] -= 1
                if not owners[owner]:
                    del _CLAIMED[key]
            _CHANGED.notify_all()
