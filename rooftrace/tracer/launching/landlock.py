"""The kernel keeps a process, and those that it starts, from writing outside of a folder.

Landlock of Linux refuses whatever they call: it needs no rights, and cannot be taken back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on x86-64, aarch64 and most others
_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_OF_FOLDERS = sum(1 << bit for bit in range(4, 13))
"""Removing and making files, folders, sockets, pipes, devices and links: bits 4 to 12."""
_BY_VERSION = ((1, _WRITE_FILE | _OF_FOLDERS), (2, _REFER), (3, _TRUNCATE))
"""The version of Landlock from which on a kernel knows a right to write."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
"""What stays writable below /dev: devices that keep nothing, and shared memory."""


_GUARDED: list[str] = []
"""The folder below which this process may write, once it is guarded."""
_REFUSED = ("permission denied", "unable to open database", "readonly", "read-only")
_CAUGHT = "Python's own functions, torch, safetensors and sqlite3"
UNGUARDED = (
    f"--scratch catches what {_CAUGHT} write, and no other library in C and no program that the "
    "script starts: this system has no Landlock (Linux 5.13), by which the kernel refuses those"
)
"""What is said where the kernel cannot guard."""
_CAN_EMPTY = (
    "--scratch: a library in C and a program that the script starts can empty a file elsewhere, by "
    "truncate(2), which the kernel refuses since Linux 6.2"
)


def version() -> int:
    """The version of Landlock that this kernel has; 0 where it has none."""
    if sys.platform != "linux":
        return 0
    return max(_system_call(_CREATE_RULESET, None, 0, _VERSION), 0)


def guard(folder: str | os.PathLike[str]) -> str:
    """Let this process, and all that it starts, write below `folder` only, for ever.

    What is open stays writable, and so do standard output and errors where they are files, devices
    of /dev that keep nothing, and shared memory.  Returns what can be written elsewhere all the
    same, in words.  Raises RuntimeError in a process with several threads, of which the others
    would go on as before.
    """
    known = version()
    if not known:
        return UNGUARDED
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("Landlock holds for one thread, and this process has several")
    rights = sum(right for since, right in _BY_VERSION if known >= since)
    ruleset = _done(_system_call(_CREATE_RULESET, struct.pack("Q", rights), 8, 0))
    try:
        _allow(ruleset, rights, folder)
        for place in (*(f"/dev/{name}" for name in _DEVICES), "/dev/stdout", "/dev/stderr"):
            with contextlib.suppress(OSError):  # it is not there, or a pipe, which has no rules
                here = rights if os.path.isdir(place) else rights & (_WRITE_FILE | _TRUNCATE)
                _allow(ruleset, here, place)
        _done(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _done(_system_call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    _GUARDED.append(os.path.realpath(folder))
    return "" if known >= _BY_VERSION[-1][0] else _CAN_EMPTY


def refusal(error: BaseException | None) -> str:
    """What a user has to know of an error that comes of the guard; "" where none does."""
    while error is not None and _GUARDED:
        if _of_guard(error):
            return (
                f"--scratch lets nothing be written outside of {_GUARDED[0]}: {_CAUGHT} write "
                "into it, and programs that the script starts and other libraries in C are refused "
                "anything but paths below it and $TMPDIR; run without --scratch what has to write "
                "elsewhere"
            )
        error = error.__cause__ or error.__context__
    return ""


def _of_guard(error: BaseException) -> bool:
    if isinstance(error, subprocess.CalledProcessError):
        return True
    if not isinstance(error, OSError) or error.errno is None:
        return any(text in str(error).lower() for text in _REFUSED)
    place = os.fsdecode(error.filename or "")
    if os.path.isabs(place):
        existing = place if os.path.exists(place) else os.path.dirname(place)
        if not os.access(existing, os.W_OK):
            return False  # to this user it is closed anyway
    return error.errno in (errno.EACCES, errno.EXDEV)


def _allow(ruleset: int, rights: int, place: str | os.PathLike[str]) -> None:
    there = os.open(place, os.O_PATH)
    try:
        rule = struct.pack("=Qi", rights, there)
        _done(_system_call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(there)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: Any) -> int:
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_libc().syscall(ctypes.c_long(number), *passed))


def _done(returned: int) -> int:
    """What a call returned that did not fail."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned
