"""A program's files in a scratch folder: what stands for functions that name files.

Redirected are Python's own (`open`, `os`, `shutil`, `pathlib`) and what is built on them, torch's
and safetensors' writers.  Other libraries that open files by name in C, such as SQLite, HDF5 and
Arrow, and programs that are started write where they say.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.overlay import Overlay, folder_of, opened
from rooftrace.tracer.patches import original_of, replaced

_READING = ("access", "lstat", "readlink", "stat", "statvfs", "getxattr", "listxattr")
_CHANGING = ("chmod", "chown", "lchown", "setxattr", "truncate", "utime")


@contextlib.contextmanager
def redirected(scratch: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, files that this scope writes come to lie in `scratch`, and are read from there.

    Raises RequestError for a scratch folder that cannot be made.
    """
    folder = folder_of(scratch)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"scratch folder {scratch}: {error.strerror or error}") from error
    overlay = Overlay(folder)
    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(os, _of_os(overlay)))
        undo.enter_context(replaced(shutil, {"rmtree": overlay.rmtree}))
        for home, name in _opens():
            ours = opened(overlay, original_of(io, "open"))
            undo.enter_context(replaced(home, {name: ours}))
        undo.enter_context(replaced(tempfile, _of_tempfile(overlay)))
        for home, names in _of_libraries(overlay):
            undo.enter_context(replaced(home, names))
        before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        undo.callback(setattr, sys, "dont_write_bytecode", before)
        yield


def _of_os(overlay: Overlay) -> dict[str, Any]:
    functions: dict[str, Any] = {
        "open": overlay.open,
        "mkdir": overlay.mkdir,
        "remove": overlay.remove,
        "unlink": overlay.remove,
        "rmdir": overlay.rmdir,
        "rename": overlay.rename,
        "replace": overlay.rename,
        "link": overlay.link,
        "symlink": overlay.symlink,
        "chdir": overlay.chdir,
        "listdir": overlay.listdir,
        "scandir": overlay.scandir,
    }
    functions |= {name: overlay.reading(name) for name in _READING if hasattr(os, name)}
    functions |= {name: overlay.changing(name) for name in _CHANGING if hasattr(os, name)}
    return functions


def _opens() -> list[tuple[Any, str]]:
    """Where modules keep `open` of Python."""
    places: list[tuple[Any, str]] = [(builtins, "open"), (io, "open")]
    for name, attribute in (("bz2", "_builtin_open"), ("tarfile", "bltn_open")):
        home = importlib.import_module(name)
        if hasattr(home, attribute):
            places.append((home, attribute))
    return places


def _of_tempfile(overlay: Overlay) -> dict[str, Any]:
    """Temporary files in their own folder stay where they are."""

    def plain(name: str, folder_at: int) -> Any:
        original = original_of(tempfile, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            folder = args[folder_at] if len(args) > folder_at else kwargs.get("dir")
            own = tempfile.gettempdir()
            if folder is not None and os.path.abspath(os.fsdecode(folder)) != os.path.abspath(own):
                return original(*args, **kwargs)
            before, overlay.here.plain = overlay.here.plain, True
            try:
                made = original(*args, **kwargs)
            finally:
                overlay.here.plain = before
            overlay.leave_alone(os.fsdecode(made[1] if isinstance(made, tuple) else made))
            return made

        return make

    names: dict[str, int] = {"mkdtemp": 2, "_mkstemp_inner": 0}
    return {name: plain(name, place) for name, place in names.items() if hasattr(tempfile, name)}


def _of_libraries(overlay: Overlay) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(module or class, what stands for its functions) of writers and readers in C."""
    serialization: Any = torch.serialization
    writer = serialization._open_zipfile_writer_file
    start = original_of(writer, "__init__")

    def write(self: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        start(self, overlay.written(name), *args, **kwargs)

    yield writer, {"__init__": write}
    load = original_of(serialization, "load")

    def read(f: Any, *args: Any, **kwargs: Any) -> Any:
        named = isinstance(f, str | os.PathLike)
        return load(overlay.seen(f) if named else f, *args, **kwargs)

    yield serialization, {"load": read}
    yield torch, {"load": read}
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


def _saving(overlay: Overlay, serialize: Any) -> Any:
    def save(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
        return serialize(tensors, overlay.written(filename), *args, **kwargs)

    return save
