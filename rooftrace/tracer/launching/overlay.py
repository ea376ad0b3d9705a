"""A folder that lies over the file system: what is written comes to lie in it, and is read from it.

The twin of a path is the folder and the path without its root.  A path that was removed or replaced
is gone: what really is there is not seen any more.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooftrace.tracer.patches import original_of

_ALONE = tuple(f"{os.sep}{name}{os.sep}" for name in ("dev", "proc", "sys"))
_NAMES = (
    *("access", "chdir", "chmod", "link", "listdir", "lstat", "makedirs", "mkdir", "open"),
    *("readlink", "remove", "rename", "replace", "rmdir", "scandir", "stat", "symlink"),
    *("truncate", "unlink", "utime"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Here(threading.local):
    plain = False  # this thread's calls are not ours to redirect


class Layer:
    """Which file a program with a scratch folder means by a path.

    Paths in the scratch folder, those below /dev, /proc and /sys, and what `tempfile` makes in the
    folder for temporary files are left alone; file descriptors are, too.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._os: Any = {name: original_of(os, name) for name in _NAMES}
        self._folder = os.path.abspath(os.fspath(folder))
        os.makedirs(self._folder, exist_ok=True)
        self._gone: set[str] = set()
        self._temporary: set[str] = set()
        self.here = _Here()

    # -- paths -------------------------------------------------------------------------------------

    def absolute(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path that a program means; None for one that is left alone."""
        if self.here.plain or isinstance(path, int) or dir_fd is not None:
            return None
        text = os.fsdecode(path)
        whole = os.path.abspath(text) if text else ""
        if not whole or self._within(whole, self._folder) or whole.startswith(_ALONE):
            return None
        if any(self._within(whole, place) for place in self._temporary):
            return None
        return whole

    @staticmethod
    def _within(path: str, folder: str) -> bool:
        return path == folder or path.startswith(folder + os.sep)

    def leave_alone(self, path: str) -> None:
        """What is at this path or below it is a temporary file of the program."""
        self._temporary.add(os.path.abspath(path))

    def twin(self, path: str) -> str:
        """Where a path comes to lie."""
        return os.path.join(self._folder, os.path.splitdrive(path)[1].lstrip(os.sep))

    def hidden(self, path: str) -> bool:
        """Whether what really is at a path is gone for the program."""
        return any(self._within(path, gone) for gone in self._gone)

    def _is(self, path: str) -> bool:
        """Whether there really is something at a path."""
        try:
            self._os["lstat"](path)
        except (OSError, ValueError):
            return False
        return True

    def is_folder(self, path: str) -> bool:
        """Whether a program sees a folder at an absolute path."""
        try:
            return stat.S_ISDIR(self._os["stat"](self.seen(path)).st_mode)
        except OSError:
            return False

    def seen(self, path: Any, dir_fd: int | None = None) -> Any:
        """Where what a program sees at a path is; the path itself where that is the same."""
        whole = self.absolute(path, dir_fd)
        if whole is None:
            return path
        twin = self.twin(whole)
        if not self._is(twin) and not self.hidden(whole):
            return path
        return os.fsencode(twin) if isinstance(path, bytes) else twin

    def exists(self, path: str) -> bool:
        """Whether a program sees something at an absolute path."""
        return self._is(self.seen(path))

    def written(self, path: Any, keep: bool = False, dir_fd: int | None = None) -> Any:
        """Where a program writes a path.  keep: with what is there; else it begins anew."""
        whole = self.absolute(path, dir_fd)
        if whole is None:
            return path
        twin = self.twin(whole)
        parent = os.path.dirname(whole)
        if not self._is(twin) and self.is_folder(parent):
            self._os["makedirs"](os.path.dirname(twin), exist_ok=True)
            if keep and not self.hidden(whole) and self._is(whole):
                self._copy(whole, twin)
        return os.fsencode(twin) if isinstance(path, bytes) else twin

    def _copy(self, real: str, twin: str) -> None:
        self.here.plain = True
        try:
            if os.path.isdir(real):
                shutil.copytree(real, twin, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(real, twin)
        finally:
            self.here.plain = False


class Overlay(Layer):
    """The functions of `os` as a program with a scratch folder sees them."""

    def reading(self, name: str) -> Any:
        """A function of `os` that reads what is at its first argument."""
        original = original_of(os, name)

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            return original(self.seen(path, kwargs.get("dir_fd")), *args, **kwargs)

        return read

    def changing(self, name: str) -> Any:
        """A function of `os` that changes what is at its first argument, as `chmod`."""
        original = original_of(os, name)

        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            whole = self.absolute(path, kwargs.get("dir_fd"))
            if whole is not None and self.exists(whole):
                if self.is_folder(whole):
                    self._os["makedirs"](self.twin(whole), exist_ok=True)
                path = self.written(path, keep=True)
            return original(path, *args, **kwargs)

        return change

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """`os.open`."""
        if not flags & _WRITES or flags & getattr(os, "O_TMPFILE", 0) > os.O_DIRECTORY:
            path = self.seen(path, dir_fd)
        elif flags & os.O_EXCL and (whole := self.absolute(path, dir_fd)) and self.exists(whole):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        else:
            path = self.written(path, not flags & os.O_TRUNC, dir_fd)
        return int(self._os["open"](path, flags, mode, dir_fd=dir_fd))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """`os.mkdir`."""
        whole = self.absolute(path, dir_fd)
        if whole is not None:
            if self.exists(whole):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            if not self.is_folder(os.path.dirname(whole)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            path = self.written(path)
        self._os["mkdir"](path, mode, dir_fd=dir_fd)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        """`os.remove` and `os.unlink`."""
        whole = self.absolute(path, dir_fd)
        if whole is None:
            self._os["remove"](path, dir_fd=dir_fd)
            return
        real = self._is(whole) and not self.hidden(whole)
        twin = self.twin(whole)
        if self.is_folder(whole) and not stat.S_ISLNK(self._os["lstat"](self.seen(path)).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if self._is(twin):
            self._os["remove"](twin)
        elif not real:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if real:
            self._gone.add(whole)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """`os.rmdir`."""
        whole = self.absolute(path, dir_fd)
        if whole is None:
            self._os["rmdir"](path, dir_fd=dir_fd)
            return
        if self.listdir(whole):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._drop(whole)

    def rmtree(self, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        """`shutil.rmtree`."""
        whole = self.absolute(path, kwargs.get("dir_fd"))
        original = original_of(shutil, "rmtree")
        if whole is None:
            original(path, ignore_errors, *args, **kwargs)
        elif self.exists(whole):
            self._drop(whole)
        elif not ignore_errors and not args and not (kwargs.keys() & {"onerror", "onexc"}):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _drop(self, whole: str) -> None:
        """Nothing is at a path any more, nor below it."""
        twin = self.twin(whole)
        if self._is(twin):
            original_of(shutil, "rmtree")(twin)
        if self._is(whole):
            self._gone.add(whole)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """`os.rename` and `os.replace`."""
        old, new = self.absolute(src, src_dir_fd), self.absolute(dst, dst_dir_fd)
        if old is None and new is None:
            self._os["replace"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        if old is not None:
            if not self.exists(old):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
            if self._is(old) and not self.hidden(old) and self.is_folder(old):
                self._copy_below(old)
            src = self.written(src, keep=True)
        if new is not None:
            if self.is_folder(new) and self.listdir(new):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), src, None, dst)
            dst = self.written(dst)
        self._os["replace"](src, dst)
        for place in (old, new):
            if place is not None and self._is(place):
                self._gone.add(place)

    def _copy_below(self, folder: str) -> None:
        """Copy what a program sees of a folder, where it has not been written before."""
        self._os["makedirs"](self.twin(folder), exist_ok=True)
        for name in self.listdir(folder):
            path = os.path.join(folder, name)
            if self.is_folder(path) and not os.path.islink(path):
                self._copy_below(path)
            else:
                self.written(path, keep=True)

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        """`os.link`: a copy, so that nobody writes into the original."""
        if self.absolute(src) is None and self.absolute(dst) is None:
            self._os["link"](src, dst, **kwargs)
            return
        self._copy(os.fsdecode(self.seen(src)), os.fsdecode(self.written(dst)))

    def symlink(self, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        """`os.symlink`."""
        whole = self.absolute(dst)
        if whole is not None:
            if self.exists(whole):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
            target = os.path.join(os.path.dirname(whole), os.fsdecode(src))
            src, dst = self.seen(target), self.written(dst)
        self._os["symlink"](src, dst, *args, **kwargs)

    def chdir(self, path: Any) -> None:
        """`os.chdir`: into the folder that really is there, if there is one."""
        whole = self.absolute(path)
        real = whole is not None and os.path.isdir(whole) and not self.hidden(whole)
        if real and self._is(str(whole)):
            self._os["chdir"](whole)
        else:
            self._os["chdir"](self.seen(path))

    def listdir(self, path: Any = ".") -> list[Any]:
        """`os.listdir`: the names that a program sees."""
        names = [entry.name for entry in self._entries(path)]
        return [os.fsencode(n) for n in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """`os.scandir`."""
        if self.absolute(path) is None or isinstance(path, bytes):
            return self._os["scandir"](self.seen(path))
        return _Entries(self._entries(path), os.fspath(path))

    def _entries(self, path: Any) -> list[Any]:
        whole = self.absolute(path)
        if whole is None:
            with self._os["scandir"](path) as listed:
                return list(listed)
        entries: dict[str, Any] = {}
        twin = self.twin(whole)
        real = not self.hidden(whole) and self._is(whole)
        for place, there in ((whole, real or not self._is(twin)), (twin, self._is(twin))):
            if there:
                with self._os["scandir"](place) as listed:
                    entries |= {os.fsdecode(entry.name): entry for entry in listed}
        own = {name for name in entries if self._is(os.path.join(twin, name))}
        return [
            entry
            for name, entry in entries.items()
            if name in own or not self.hidden(os.path.join(whole, name))
        ]


class _Entry:
    """An entry of a folder, under the path that the program knows."""

    def __init__(self, entry: os.DirEntry[str], folder: str) -> None:
        self._entry, self.name = entry, entry.name
        self.path = os.path.join(folder, entry.name)

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class _Entries:
    """What `os.scandir` returns: an iterator that is closed."""

    def __init__(self, entries: list[os.DirEntry[str]], folder: str) -> None:
        self._entries = iter([_Entry(entry, folder) for entry in entries])

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def close(self) -> None:
        """There is nothing to close."""


def opened(overlay: Overlay, original: Any) -> Any:
    """`open` of Python over an overlay."""

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mode, str) or not set(mode) & set("wax+"):
            shown = overlay.seen(file)
            if shown is not file and not overlay.exists(os.path.abspath(os.fsdecode(file))):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
            return original(shown, mode, *args, **kwargs)
        whole = overlay.absolute(file)
        if whole is not None and not overlay.is_folder(os.path.dirname(whole)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        if "x" in mode and whole is not None and overlay.exists(whole):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        if whole is not None and mode.startswith("r") and not overlay.exists(whole):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        return original(overlay.written(file, keep="w" not in mode), mode, *args, **kwargs)

    return open_


def folder_of(scratch: str | os.PathLike[str]) -> Path:
    """A scratch folder, absolute."""
    return Path(os.path.abspath(os.path.expanduser(os.fspath(scratch))))
