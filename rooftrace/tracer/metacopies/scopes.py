"""Scopes: which recording a thread belongs to, and what it has in place of functions of torch.

A patch of a module or a class is seen by every thread of the process.  So a patch of ours asks
first whether the thread that calls it belongs to a recording, and else does what was there
before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rooftrace.tracer.recording import Release, installed_release


class Scope:
    """One recording: what stands in place of functions, in the threads that it records.

    replacements: by the identity of the module or class that holds the original, and its name.
    owner: the thread in which it began, or in which the recording around it did.
    kept: what parts of the recording keep for these threads, by name.
    release: of PyTorch, whose kernels of CUDA run.
    apart: while an attention runs as several kernels, why it does; else "".
    """

    __slots__ = ("apart", "kept", "owner", "release", "replacements")

    def __init__(self, release: Release | None = None) -> None:
        outer = _thread.current
        self.release = release or installed_release()
        self.apart = ""
        self.replacements: dict[tuple[int, str], Any] = {}
        self.owner: int = threading.get_ident() if outer is None else outer.owner
        self.kept: dict[str, Any] = {}

    @staticmethod
    def current() -> Scope | None:
        """The scope to which the running thread belongs; None for one that nobody records."""
        return _thread.current

    @contextlib.contextmanager
    def replacing(self, values: Mapping[tuple[int, str], Any]) -> Iterator[None]:
        """Inside, these values stand for their names in the threads of this scope."""
        before = {key: self.replacements[key] for key in values if key in self.replacements}
        self.replacements.update(values)
        try:
            yield
        finally:
            for key in values:
                self.replacements.pop(key, None)
            self.replacements.update(before)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this thread belongs to this scope, and to no other."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """From here on this thread belongs to this scope."""
        _thread.scopes = (*_thread.scopes, self)
        _thread.current = self

    def leave(self) -> None:
        """This thread belongs to the scope that was around this one, as it last entered it."""
        scopes = list(_thread.scopes)
        place = next((i for i in reversed(range(len(scopes))) if scopes[i] is self), None)
        if place is not None:
            del scopes[place]
        _thread.scopes = tuple(scopes)
        _thread.current = _thread.scopes[-1] if _thread.scopes else None


class _Thread(threading.local):
    scopes: tuple[Scope, ...] = ()  # those that are entered, the innermost last
    current: Scope | None = None  # the innermost


_thread = _Thread()
