"""Confines a program's file writes to a scratch folder, by Landlock and redirected functions."""

from __future__ import annotations

import _io
import builtins
import contextlib
import ctypes
import errno
import importlib
import importlib.util
import io
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rooftrace.errors import RequestError
from rooftrace.scripts.launch.overlay import Overlay, folder_of, opened
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import original_of, put

# -- landlock --------------------------------------------------------------------------------------
# The kernel keeps a process, and those that it starts, from writing outside of a folder.
#
# Landlock of Linux refuses whatever they call: it needs no rights, and cannot be taken back.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # on x86-64, aarch64 and most others
_VERSION, _PATH_BENEATH = 1, 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_OF_FOLDERS = sum(1 << bit for bit in range(4, 13))
"""Removing and making files, folders, sockets, pipes, devices and links: bits 4 to 12."""
_BY_VERSION = ((1, _WRITE_FILE | _OF_FOLDERS), (2, _REFER), (3, _TRUNCATE))
"""The version of Landlock from which on a kernel knows a right to write."""
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm")
"""Writable below /dev: devices that keep nothing, and shared memory."""


_GUARDED: list[str] = []
"""The folder below which this process may write, once it is guarded."""
_REFUSED = ("permission denied", "unable to open database", "readonly", "read-only")
_CAUGHT = "Python's own functions, torch, safetensors and sqlite3"
UNGUARDED = (
    f"--scratch catches what {_CAUGHT} write, and no other library in C and no program that the "
    "script starts: this system has no Landlock (Linux 5.13), by which the kernel refuses those"
)
"""The warning on a kernel without Landlock."""
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
    of /dev that keep nothing, and shared memory.  Returns the paths that can be written all the
    same, in words.  Raises RuntimeError in a process with several threads, of which the others
    would go on as before.
    """
    abi = version()
    if not abi:
        return UNGUARDED
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("Landlock holds for one thread, and this process has several")
    rights = sum(right for since, right in _BY_VERSION if abi >= since)
    ruleset = _done(_system_call(_CREATE_RULESET, struct.pack("Q", rights), 8, 0))
    try:
        _allow(ruleset, rights, folder)
        for path in (*(f"/dev/{name}" for name in _DEVICES), "/dev/stdout", "/dev/stderr"):
            with contextlib.suppress(OSError):  # it is not there, or a pipe, which has no rules
                here = rights if os.path.isdir(path) else rights & (_WRITE_FILE | _TRUNCATE)
                _allow(ruleset, here, path)
        _done(_libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _done(_system_call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    _GUARDED.append(os.path.realpath(folder))
    return "" if abi >= _BY_VERSION[-1][0] else _CAN_EMPTY


def refusal(error: BaseException | None) -> str:
    """An explanation of an error that the guard causes; "" for other errors."""
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
    path = os.fsdecode(error.filename or "")
    if os.path.isabs(path):
        existing = path if os.path.exists(path) else os.path.dirname(path)
        if not os.access(existing, os.W_OK):
            return False  # to this user it is closed anyway
    return error.errno in (errno.EACCES, errno.EXDEV)


def _allow(ruleset: int, rights: int, path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_PATH)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        _done(_system_call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: Any) -> int:
    passed = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(_libc().syscall(ctypes.c_long(number), *passed))


def _done(returned: int) -> int:
    """The result of a call; raises OSError if the call failed."""
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned


# -- scratch ---------------------------------------------------------------------------------------
# A program's files in a scratch folder: replacements of functions that take file names.
#
# Redirected are Python's (`open`, `os`, `shutil`, `pathlib`), the code built on them,
# torch's and safetensors' writers and sqlite3.  Other libraries that open files by name in C,
# such as HDF5 and Arrow, and programs that are started, are for the kernel to refuse
# (`landlock`).

_READING = ("access", "lstat", "readlink", "stat", "statvfs", "getxattr", "listxattr")
_CHANGING = (
    *("chmod", "chown", "fchmod", "fchown", "lchown", "removexattr", "setxattr", "truncate"),
    "utime",
)
_NAMES_OF_OPEN = ("open", "_open", "_builtin_open", "bltn_open")
_MAKING = ("mkdir", "mkfifo", "mknod")


def redirect(scratch: str | os.PathLike[str]) -> None:
    """From here on files that this process writes come to lie in `scratch`, and are read there.

    Raises RequestError for a scratch folder that cannot be made, or that holds the working folder.
    """
    folder = folder_of(scratch)
    if Path.cwd().is_relative_to(folder.resolve()):
        raise RequestError(
            f"scratch folder {scratch}: the script runs in it, so that its files would lie where "
            "it writes them anyway; name a folder below, or elsewhere"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"scratch folder {scratch}: {error.strerror or error}") from error
    overlay = Overlay(folder)
    temporary = overlay.twin(os.path.realpath(tempfile.gettempdir()))
    os.makedirs(temporary, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = temporary  # also of programs that are started
    for home in (os, sys.modules[os.name]):
        put(home, _of_os(overlay))
    _tell_others({original_of(os, name): vars(os)[name] for name in _of_os(overlay)})
    put(shutil, {"rmtree": overlay.rmtree})
    for home, name in _opens():
        put(home, {name: opened(overlay, original_of(io, "open"))})
    for home in (io, _io):
        put(home, {"open_code": overlay.reading("open_code", io)})
    for home, names in _of_libraries(overlay):
        put(home, names)
    sys.dont_write_bytecode = True


def _tell_others(replaced: dict[Any, Any]) -> None:
    """Replace the originals in the sets of `os`, and where `tempfile` keeps them."""
    for name in dir(os):
        if name.startswith("supports_") and isinstance(vars(os)[name], set):
            vars(os)[name].update({replaced[each] for each in vars(os)[name] if each in replaced})
    for function in vars(getattr(tempfile, "_TemporaryFileCloser", object)).values():
        before = getattr(function, "__defaults__", None)
        if before:
            function.__defaults__ = tuple(replaced.get(each, each) for each in before)


def _of_os(overlay: Overlay) -> dict[str, Any]:
    functions: dict[str, Any] = {
        "open": overlay.open,
        "remove": overlay.remove,
        "unlink": overlay.remove,
        "rmdir": overlay.rmdir,
        "rename": overlay.rename,
        "replace": overlay.rename,
        "link": overlay.link,
        "symlink": overlay.symlink,
        "chdir": overlay.chdir,
        "fchdir": overlay.chdir,
        "getcwd": overlay.working,
        "getcwdb": lambda: os.fsencode(overlay.working()),
        "listdir": overlay.listdir,
        "scandir": overlay.scandir,
    }
    functions |= {name: overlay.reading(name) for name in _READING}
    functions |= {name: overlay.changing(name) for name in _CHANGING}
    functions |= {name: overlay.making(name) for name in _MAKING}
    return {name: function for name, function in functions.items() if hasattr(os, name)}


def _opens() -> list[tuple[Any, str]]:
    """Where modules keep `open` of Python."""
    function = builtins.open
    return [
        (home, name)
        for home in list(sys.modules.values())
        for name in _NAMES_OF_OPEN
        if getattr(home, "__dict__", {}).get(name) is function
    ]


def _of_libraries(overlay: Overlay) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(module or class, replacements of its functions) of writers and readers in C."""
    writer = torch_private.zipfile_writer
    start = original_of(writer, "__init__")

    def write(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        start(self, overlay.written(name), *args, **kwargs)

    yield writer, {"__init__": write}
    storage: Any = torch.UntypedStorage
    mapped = storage.from_file

    def read(filename: Any, *args: Any, **kwargs: Any) -> Any:
        return mapped(overlay.seen(filename), *args, **kwargs)

    yield storage, {"from_file": staticmethod(read)}
    if importlib.util.find_spec("_sqlite3") is not None:
        for name in ("sqlite3", "sqlite3.dbapi2"):
            yield importlib.import_module(name), {"connect": _connecting(overlay)}
    if importlib.util.find_spec("safetensors") is None:
        return
    for name in ("safetensors.torch", "safetensors.numpy"):
        home: Any = importlib.import_module(name)
        serialize = getattr(home, "serialize_file", None)
        if serialize is not None:
            yield home, {"serialize_file": _saving(overlay, serialize)}
    opening = vars(sys.modules["safetensors"])["safe_open"]

    def open_safe(filename: Any, *args: Any, **kwargs: Any) -> Any:
        return opening(overlay.seen(filename), *args, **kwargs)

    for holder in list(sys.modules.values()):
        if getattr(holder, "__dict__", {}).get("safe_open") is opening:
            yield holder, {"safe_open": open_safe}


def _connecting(overlay: Overlay) -> Any:
    connect = original_of(importlib.import_module("sqlite3.dbapi2"), "connect")

    def connect_here(database: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fsdecode(database) in ("", ":memory:") or kwargs.get("uri"):
            return connect(database, *args, **kwargs)
        for of_transactions in ("-journal", "-wal"):
            overlay.written(f"{os.fsdecode(database)}{of_transactions}", keep=True)
        return connect(overlay.written(database, keep=True), *args, **kwargs)

    return connect_here


def _saving(overlay: Overlay, serialize: Any) -> Any:
    def save(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return serialize(tensors, overlay.written(filename), *args, **kwargs)

    return save
