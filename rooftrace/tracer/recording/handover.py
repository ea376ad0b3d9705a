"""A recorder takes the place of another in the middle of code, under whatever modes it has on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rooftrace.tracer.patches import contexts
from rooftrace.tracer.recording.autocast import set_aside
from rooftrace.tracer.recording.functions import Functions
from rooftrace.tracer.recording.threads import Follower, taken_over
from rooftrace.tracer.tape import Tape


class Handed(Protocol):
    """A recorder, as far as its place matters."""

    threads: Any

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...


def give_way(old: Handed, new: Handed | None) -> None:
    """A recorder ends in this thread, and another one begins; regions of autocast stay on.

    new: also gets what threads run that the old one has followed; None: none takes its place.
    """
    if new is None:
        with contexts.exchanging(_is_recording):
            old.__exit__(None, None, None)
        return
    old.threads.heir = old
    try:
        with contexts.exchanging(_is_recording), set_aside():
            old.__exit__(None, None, None)
            new.__enter__()
    finally:
        old.threads.heir = new


def lead_here(new: Handed, first: Callable[[], None], ended: Callable[[], Handed]) -> bool:
    """A recorder begins in this thread in place of what follows another one here.

    first: is called before it does.  ended: is called at the end of what the thread does; it
    returns the recorder that is on then.  False where no recorder follows this thread.
    """

    def begin() -> Callable[[], None]:
        first()
        new.__enter__()
        return end

    def end() -> None:
        give_way(ended(), None)

    with contexts.exchanging(_is_recording), set_aside():
        return taken_over(begin)


def _is_recording(mode: Any) -> bool:
    """Whether a mode is one by which a recorder sees a thread."""
    return isinstance(mode, Tape | Follower | Functions)
