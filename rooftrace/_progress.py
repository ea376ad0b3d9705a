"""What a long call is doing now, told to whoever listens; no parameter has to carry the listener.

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
    """Calls in the `with` block tell `listener` what they are doing.  None keeps the listener."""
    if listener is None:
        yield
        return
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


WARNING = "warning: "
"""How a text begins that is for the user, whatever else is shown."""


def tell(text: str) -> None:
    """Say what is being done now."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(text)
