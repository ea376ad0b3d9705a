"""Scopes: which recording a thread belongs to, and what it has in place of functions of torch.

A patch of a module or a class is seen by every thread of the process.  So a patch of ours asks
first whether the thread that calls it belongs to a recording, and else does what was there before.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from rooftrace.tracer.releases import Release, installed_release


class Scope:
    """One recording: what stands in place of functions, in the threads that it records.

    replacements: by the identity of the module or class that holds the original, and its name.
    owner: the thread in which it began, or in which the recording around it did.
    kept: what parts of the recording keep for these threads, by name.
    release: of PyTorch, whose kernels of CUDA run.
    apart: while an attention runs as several kernels, why it does; else "".
    lasting: what it replaces is replaced in scopes that begin inside of it, too: a program that
    runs is one in all its recordings.
    beneath: the lasting scope around it.
    """

    __slots__ = ("apart", "beneath", "kept", "lasting", "owner", "release", "replacements")

    def __init__(self, release: Release | None = None, lasting: bool = False) -> None:
        outer = _thread.current
        self.lasting = lasting
        self.beneath: Scope | None = None
        self.release = release or installed_release()
        self.apart = ""
        self.replacements: dict[tuple[int, str], Any] = {}
        self.owner: int = threading.get_ident() if outer is None else outer.owner
        self.kept: dict[str, Any] = {}

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
        outer = _thread.current
        if outer is not None and outer is not self:  # in threads that it follows there is none
            self.beneath = outer if outer.lasting else outer.beneath
        _thread.scopes = (*_thread.scopes, self)
        _thread.current = self

    def leave(self) -> None:
        """This thread belongs to the scope that was around this one."""
        _thread.scopes = tuple([scope for scope in _thread.scopes if scope is not self])
        _thread.current = _thread.scopes[-1] if _thread.scopes else None


class _Thread(threading.local):
    scopes: tuple[Scope, ...] = ()  # those that are entered, the innermost last
    current: Scope | None = None  # the innermost


_thread = _Thread()


def current_scope() -> Scope | None:
    """The scope to which the running thread belongs; None for a thread that nobody records."""
    return _thread.current
