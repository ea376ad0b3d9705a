"""Progress of long calls for a listener, which no parameter has to carry.

    with telling(print):
        rooftrace.report(model, x)

Each thread, and each task of asyncio, has its own listener.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str], None]
"""A function that is called with a few words, for example "tracing decode"."""

_LISTENER: ContextVar[Listener | None] = ContextVar("_LISTENER", default=None)


@contextlib.contextmanager
def telling(listener: Listener | None) -> Iterator[None]:
    """Calls in the `with` block report their progress to `listener`; None keeps the old one."""
    if listener is None:
        yield
        return
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


WARNING = "warning: "
"""The beginning of a text that is always shown to the user."""


def tell(text: str) -> None:
    """Report the present work in a few words."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)
