"""Watches what a process imports, runs, starts and connects to, by Python's audit events."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

EVENTS = {
    "import",
    "exec",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.startfile",
    "socket.connect",
    "socket.getaddrinfo",
    "socket.bind",
    "pickle.find_class",
    "ctypes.dlopen",
    "webbrowser.open",
}
_ON = threading.local()
_INSTALLED: list[bool] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    seen = getattr(_ON, "seen", None)
    if seen is not None and event in EVENTS:
        what = arguments[0] if arguments else ""
        if event == "exec":
            what = getattr(what, "co_filename", "")
        seen.append((event, str(what)))


@contextlib.contextmanager
def watching() -> Iterator[list[tuple[str, str]]]:
    """The audit events of this thread inside the block: (event, its first argument).

    A hook stays for the life of a process, so there is one, which sleeps outside of blocks.
    """
    if not _INSTALLED:
        sys.addaudithook(_hook)
        _INSTALLED.append(True)
    _ON.seen = seen = []
    try:
        yield seen
    finally:
        _ON.seen = None


def unasked(seen: list[tuple[str, str]], names: tuple[str, ...], folder: str) -> list[str]:
    """The events that data caused: code of `folder`, a module of these names, or any process.

    Libraries import their own modules late, so an import as such says nothing.
    """
    bad = []
    for event, what in seen:
        if event == "import":
            wrong = what.split(".")[0] in names
        elif event == "exec":
            wrong = what.startswith(folder)
        else:
            wrong = event != "ctypes.dlopen"
        if wrong:
            bad.append(f"{event} {what}")
    return bad
