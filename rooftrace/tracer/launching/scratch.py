"""A program's files in a scratch folder: what stands for functions that name files.

Redirected are Python's own (`open`, `os`, `shutil`, `pathlib`) and what is built on them, torch's
and safetensors' writers and sqlite3.  Other libraries that open files by name in C, such as HDF5
and Arrow, and programs that are started, are for the kernel to refuse (`landlock`).
"""

from __future__ import annotations

import _io
import builtins
import importlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.overlay import Overlay, folder_of, opened
from rooftrace.tracer.patches import original_of, put

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


def _tell_others(ours: dict[Any, Any]) -> None:
    """Let ours be what the originals are in sets of `os`, and where `tempfile` has kept them."""
    for name in dir(os):
        if name.startswith("supports_") and isinstance(vars(os)[name], set):
            vars(os)[name].update({ours[each] for each in vars(os)[name] if each in ours})
    for function in vars(getattr(tempfile, "_TemporaryFileCloser", object)).values():
        before = getattr(function, "__defaults__", None)
        if before:
            function.__defaults__ = tuple(ours.get(each, each) for each in before)


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
    """(module or class, what stands for its functions) of writers and readers in C."""
    serialization: Any = torch.serialization
    writer = serialization._open_zipfile_writer_file
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
