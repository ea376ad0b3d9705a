"""A copy-on-write overlay: writes go to a scratch folder and later reads see them.

The twin of a path is the folder and the path without its root.  A path that was removed or replaced
is gone: the real file is not seen any more (a whiteout).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooftrace.tracer.recording import original_of

_ALONE = tuple(f"{os.sep}{name}{os.sep}" for name in ("dev", "proc", "sys"))
_SHARED = f"{os.sep}dev{os.sep}shm{os.sep}"
_NAMES = (
    *("access", "chdir", "chmod", "getcwd", "link", "listdir", "lstat", "makedirs", "mkdir"),
    *("open", "readlink", "remove", "rename", "replace", "rmdir", "scandir", "stat", "symlink"),
    *("truncate", "unlink", "utime"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_LINKS = 40
"""Links in one path, of which Linux follows as many."""


class _PlainThread(threading.local):
    plain = False  # this thread's calls are not ours to redirect


class Layer:
    """Which file a program with a scratch folder means by a path.

    Paths in the scratch folder and those below /dev (but for /dev/shm), /proc and /sys are left
    alone; file descriptors are, too.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._os: Any = {name: original_of(os, name) for name in _NAMES}
        os.makedirs(folder, exist_ok=True)
        self._folder = os.path.realpath(os.fspath(folder))
        self._gone: set[str] = set()
        self._folders: set[str] = set()  # that are no links, until the program changes one
        self._working: str | None = None  # the program's folder, where it is not this process's
        self.here = _PlainThread()

    # -- paths -------------------------------------------------------------------------------------

    def absolute(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> str | None:
        """The path that a program means, without links; None for one that is left alone.

        follow: also without a link in its last place.
        """
        if self.here.plain or isinstance(path, int):
            return None
        text = os.fsdecode(path)
        base = self.working() if dir_fd is None else self.named(dir_fd)
        if not text or not isinstance(base, str):
            return None
        at, rest, links = "", os.path.join(base, text), 0
        while rest or not at:
            if not at:
                drive, rest = os.path.splitdrive(rest)
                at = drive + os.sep
            part, _, rest = rest.partition(os.sep)
            if part in ("", os.curdir, os.pardir):
                at = os.path.dirname(at) if part == os.pardir else at
                continue
            at = f"{at}{part}" if at.endswith(os.sep) else f"{at}{os.sep}{part}"
            if rest and at in self._folders:
                continue
            if at.startswith(_ALONE) and not (at + os.sep).startswith(_SHARED):
                return None
            target = self._target(at) if rest or follow else None
            if target is not None:
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                at, rest = "", os.path.join(os.path.dirname(at), target, rest)
            elif rest:
                self._folders.add(at)
        if not self._within(at, self._folder):
            return at
        return self._meant(at) if links else None

    def _target(self, path: str) -> str | None:
        """The target of a link that a program sees at a path; None for no link."""
        try:
            return os.fsdecode(self._os["readlink"](self.place(path)))
        except (OSError, ValueError):
            return None

    def _meant(self, path: str) -> str:
        """The path whose twin a path in the scratch folder is."""
        return os.path.join(os.sep, os.path.relpath(path, self._folder))

    def working(self) -> str:
        """The working directory, as the program knows it."""
        return self._working or str(self._os["getcwd"]())

    def named(self, descriptor: Any) -> Any:
        """The path of the file or folder that is open, as the program knows it.

        The descriptor itself where it has none, or where this system does not tell.
        """
        if not isinstance(descriptor, int):
            return descriptor
        try:
            path = str(self._os["readlink"](f"/proc/self/fd/{descriptor}"))
        except OSError:
            return descriptor
        if not os.path.isabs(path) or path.startswith(_ALONE):
            return descriptor
        return self._meant(path) if self._within(path, self._folder) else path

    @staticmethod
    def _within(path: str, folder: str) -> bool:
        return path == folder or path.startswith(folder + os.sep)

    def twin(self, path: str) -> str:
        """Where a path comes to lie."""
        return os.path.join(self._folder, os.path.splitdrive(path)[1].lstrip(os.sep))

    def hidden(self, path: str) -> bool:
        """Whether the program has removed the real file of a path."""
        while self._gone and path not in self._gone:
            path, below = os.path.dirname(path), path
            if path == below:
                return False
        return bool(self._gone)

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
            return stat.S_ISDIR(self._os["lstat"](self.place(path)).st_mode)
        except OSError:
            return False

    def place(self, path: str) -> str:
        """The real place of an absolute path of the program."""
        twin = self.twin(path)
        return twin if self._is(twin) or self.hidden(path) else path

    def seen(self, path: Any, dir_fd: int | None = None, follow: bool = True) -> Any:
        """The real place of a path of the program; the path itself where they agree."""
        absolute = self.absolute(path, dir_fd, follow)
        if absolute is None:
            return path
        location = self.place(absolute)
        if not self._working and location == os.path.abspath(os.fsdecode(path)):
            return path
        return os.fsencode(location) if isinstance(path, bytes) else location

    def exists(self, path: str) -> bool:
        """Whether a program sees something at an absolute path."""
        return self._is(self.place(path))

    def written(
        self, path: Any, keep: bool = False, dir_fd: int | None = None, follow: bool = True
    ) -> Any:
        """Where a program writes a path.  keep: with its content; else it begins empty."""
        absolute = self.absolute(path, dir_fd, follow)
        if absolute is None:
            return path
        twin = self.twin(absolute)
        if not self._is(twin) and self.is_folder(os.path.dirname(absolute)):
            with self.plainly():
                os.makedirs(os.path.dirname(twin), exist_ok=True)
            if keep and self.exists(absolute):
                self._copy(absolute, twin)
        return os.fsencode(twin) if isinstance(path, bytes) else twin

    def _copy(self, real: str, twin: str) -> None:
        with self.plainly():
            if os.path.isdir(real) and not os.path.islink(real):
                os.mkdir(twin)
            else:
                shutil.copy2(real, twin, follow_symlinks=real.startswith(_ALONE))

    @contextlib.contextmanager
    def plainly(self) -> Iterator[None]:
        """Inside, calls of this thread are not redirected."""
        before, self.here.plain = self.here.plain, True
        try:
            yield
        finally:
            self.here.plain = before


class Overlay(Layer):
    """The functions of `os` as a program with a scratch folder sees them."""

    def reading(self, name: str, home: Any = os) -> Any:
        """A function of `os`, or another module, that reads the file of its first argument."""
        original = original_of(home, name)
        follows = name not in ("lstat", "readlink")

        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            follow = kwargs.get("follow_symlinks", follows)
            return original(self.seen(path, kwargs.get("dir_fd"), follow), *args, **kwargs)

        return read

    def changing(self, name: str) -> Any:
        """A function of `os` that changes the file of its first argument, as `chmod`."""
        original = original_of(os, name.replace("fch", "ch"))

        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            named, follow = self.named(path), kwargs.get("follow_symlinks", name[0] != "l")
            absolute = self.absolute(named, kwargs.get("dir_fd"), follow)
            if absolute is not None and self.exists(absolute):
                path = self.written(named, True, kwargs.get("dir_fd"), follow)
            return original(path, *args, **kwargs)

        return change

    def making(self, name: str) -> Any:
        """A function of `os` that makes a new file, as `mkdir`."""
        original = original_of(os, name)

        def make(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            absolute = self.absolute(path, dir_fd, follow=False)
            if absolute is not None:
                if self.exists(absolute):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                if not self.is_folder(os.path.dirname(absolute)):
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                path = self.written(path, dir_fd=dir_fd, follow=False)
            original(path, *args, dir_fd=dir_fd, **kwargs)

        return make

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """`os.open`."""
        follow = not flags & getattr(os, "O_NOFOLLOW", 0)
        if not flags & _WRITES:
            path = self.seen(path, dir_fd, follow)
        else:
            new = flags & os.O_EXCL and flags & os.O_CREAT
            if new and (absolute := self.absolute(path, dir_fd, False)) and self.exists(absolute):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            anew = flags & os.O_TRUNC and flags & os.O_CREAT
            path = self.written(path, not anew, dir_fd, follow)
        return int(self._os["open"](path, flags, mode, dir_fd=dir_fd))

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        """`os.remove` and `os.unlink`."""
        absolute = self.absolute(path, dir_fd, follow=False)
        if absolute is None:
            self._os["remove"](path, dir_fd=dir_fd)
            return
        if self.is_folder(absolute):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not self.exists(absolute):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._drop(absolute)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """`os.rmdir`."""
        absolute = self.absolute(path, dir_fd, follow=False)
        if absolute is None:
            self._os["rmdir"](path, dir_fd=dir_fd)
            return
        if self.listdir(absolute):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._drop(absolute)

    def rmtree(self, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any) -> None:
        """`shutil.rmtree`."""
        absolute = self.absolute(path, kwargs.get("dir_fd"), follow=False)
        if absolute is not None and self.is_folder(absolute):
            self._drop(absolute)
        else:
            original_of(shutil, "rmtree")(path, ignore_errors, *args, **kwargs)

    def _drop(self, absolute: str) -> None:
        """Nothing is at a path any more, nor below it."""
        self._folders.clear()
        twin = self.twin(absolute)
        if os.path.isdir(twin) and not os.path.islink(twin):
            with self.plainly():
                original_of(shutil, "rmtree")(twin)
        elif self._is(twin):
            self._os["remove"](twin)
        if self._is(absolute):
            self._gone.add(absolute)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        """`os.rename` and `os.replace`."""
        old = self.absolute(src, src_dir_fd, follow=False)
        new = self.absolute(dst, dst_dir_fd, follow=False)
        if old is not None:
            if not self.exists(old):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), src, None, dst)
            if self._is(old) and not self.hidden(old) and self.is_folder(old):
                self._copy_below(old)
            src = self.written(src, True, src_dir_fd, follow=False)
        if new is not None:
            if self.is_folder(new) and self.listdir(new):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), src, None, dst)
            dst = self.written(dst, False, dst_dir_fd, follow=False)
        try:
            self._os["replace"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            if error.errno != errno.EXDEV or (old is None and new is None):
                raise
            with self.plainly():
                shutil.move(src, dst)
        self._folders.clear()
        for side in (old, new):
            if side is not None and self._is(side):
                self._gone.add(side)

    def _copy_below(self, folder: str) -> None:
        """Copy a folder as the program sees it, except files written before."""
        with self.plainly():
            os.makedirs(self.twin(folder), exist_ok=True)
        for name in self.listdir(folder):
            path = os.path.join(folder, name)
            if self.is_folder(path):
                self._copy_below(path)
            else:
                self.written(path, keep=True, follow=False)

    def link(self, src: Any, dst: Any, *, dst_dir_fd: int | None = None, **kwargs: Any) -> None:
        """`os.link`: a copy, so that nobody writes into the original."""
        source = self.seen(src, kwargs.get("src_dir_fd"))
        absolute = self.absolute(dst, dst_dir_fd, follow=False)
        if absolute is None and source is src:
            self._os["link"](src, dst, dst_dir_fd=dst_dir_fd, **kwargs)
            return
        if absolute is not None and self.exists(absolute):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        self._copy(os.fsdecode(source), os.fsdecode(self.written(dst, False, dst_dir_fd, False)))

    def symlink(self, src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        """`os.symlink`: with the text that the program says."""
        absolute = self.absolute(dst, kwargs.get("dir_fd"), follow=False)
        self._folders.clear()
        if absolute is not None:
            if self.exists(absolute):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
            dst = self.written(dst, False, kwargs.get("dir_fd"), follow=False)
        self._os["symlink"](src, dst, *args, **kwargs)

    def chdir(self, path: Any) -> None:
        """`os.chdir` and `os.fchdir`: into the folder that really is there, if there is one."""
        named = self.named(path)
        absolute = self.absolute(named)
        if absolute is None:
            self._os["chdir"](path)
            self._working = None
            return
        real = not self.hidden(absolute) and self._is(absolute)
        location = absolute if real else self.place(absolute)
        self._os["chdir"](location)
        self._working = None if location == absolute else absolute

    def listdir(self, path: Any = ".") -> list[Any]:
        """`os.listdir`: the names that a program sees."""
        names = [entry.name for entry in self._entries(path)]
        return [os.fsencode(n) for n in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """`os.scandir`."""
        if self.absolute(self.named(path)) is None or isinstance(path, bytes):
            return self._os["scandir"](self.seen(path))
        return _Entries(self._entries(path), "" if isinstance(path, int) else os.fspath(path))

    def _entries(self, path: Any) -> list[Any]:
        absolute = self.absolute(self.named(path))
        if absolute is None:
            with self._os["scandir"](path) as listed:
                return list(listed)
        entries: dict[str, Any] = {}
        twin = self.twin(absolute)
        real = not self.hidden(absolute) and self._is(absolute)
        for folder, exists in ((absolute, real or not self._is(twin)), (twin, self._is(twin))):
            if exists:
                with self._os["scandir"](folder) as listed:
                    entries |= {os.fsdecode(entry.name): entry for entry in listed}
        written = {name for name in entries if self._is(os.path.join(twin, name))}
        return [
            entry
            for name, entry in entries.items()
            if name in written or not self.hidden(os.path.join(absolute, name))
        ]


class _FolderEntry:
    """An entry of a folder, under the path that the program knows."""

    def __init__(self, entry: os.DirEntry[str], folder: str) -> None:
        self._entry, self.name = entry, entry.name
        self.path = os.path.join(folder, entry.name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the program sees a folder, or a link to one."""
        if follow_symlinks and self._entry.is_symlink():
            return os.path.isdir(self.path)
        return self._entry.is_dir(follow_symlinks=False)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether the program sees a file, or a link to one."""
        if follow_symlinks and self._entry.is_symlink():
            return os.path.isfile(self.path)
        return self._entry.is_file(follow_symlinks=False)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """The result of `os.stat`."""
        if follow_symlinks and self._entry.is_symlink():
            return os.stat(self.path)
        return self._entry.stat(follow_symlinks=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class _Entries:
    """The result of `os.scandir`: an iterator that can be closed."""

    def __init__(self, entries: list[os.DirEntry[str]], folder: str) -> None:
        self._entries = iter([_FolderEntry(entry, folder) for entry in entries])

    def __iter__(self) -> Iterator[_FolderEntry]:
        return self._entries

    def __next__(self) -> _FolderEntry:
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
            try:
                return original(shown, mode, *args, **kwargs)
            except FileNotFoundError as error:
                error.filename = file  # as the program has named it
                raise
        absolute = overlay.absolute(file)
        if absolute is not None and not overlay.is_folder(os.path.dirname(absolute)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        if "x" in mode and absolute is not None and overlay.exists(absolute):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        if absolute is not None and mode.startswith("r") and not overlay.exists(absolute):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        return original(overlay.written(file, keep="w" not in mode), mode, *args, **kwargs)

    return open_


def folder_of(scratch: str | os.PathLike[str]) -> Path:
    """A scratch folder, absolute."""
    return Path(os.path.abspath(os.path.expanduser(os.fspath(scratch))))
