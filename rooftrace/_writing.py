"""Writes files and folders that are whole or not there, also where the process is killed.

What is written is made in a hidden folder beside its place, then renamed into it.  The process
holds a lock on that folder.  A folder without one was left by a process that died: the next write
beside it takes it up, so nothing hidden stays.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rooftrace._reading import check_name

try:
    import fcntl
except ImportError:  # Windows: there what a process left is known by its age
    fcntl = None  # type: ignore[assignment]

_HIDDEN = ".rooftrace-"
_UNLOCKED = ".rooftrace_"
"""A folder whose lock is not yet held, for a moment."""
_OLD = 3600.0
"""Seconds after which a folder without a lock is taken as left."""


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file: a reader sees the old one or the whole new one.

    Makes the folders above it.  What is no file, as a pipe, is written to as it is; a link stays.
    Raises OSError with the name of `path`.
    """
    try:
        check_name(path)
        path = Path(os.path.realpath(path))
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path.parent) as folder:
            made = folder / "file"
            made.write_bytes(content)
            os.replace(made, path)
    except OSError as error:
        raise _naming(error, path) from error


def write_packed(path: Path, content: bytes) -> None:
    """Write a file as `write_bytes` does, as gzip without a time stamp if its name ends in .gz."""
    packed = path.suffix == ".gz"
    write_bytes(path, gzip.compress(content, compresslevel=6, mtime=0) if packed else content)


def put_folder(made: Path, out: Path) -> None:
    """Put a folder that was made in one of `aside` in the place of `out`, as a whole.

    Files of `out` that `made` has not stay.  Where `out` cannot be renamed (it is the working
    folder, or a mount), each file is put there whole, one after the other.
    """
    if not out.exists():
        os.replace(made, out)
        return
    hidden, place = made.parent, out.resolve()
    if _may_be_renamed(place) and hidden.parent == place.parent:
        os.chmod(made, place.stat().st_mode & 0o7777)
        (hidden / "place").write_text(place.name, encoding="utf-8", errors="surrogateescape")
        os.rename(place, hidden / "old")
        os.rename(made, place)
        _take_back(hidden)
    else:
        for file in sorted(made.iterdir()):
            os.replace(file, out / file.name)


def _may_be_renamed(place: Path) -> bool:
    """Whether no process would lose its working folder, as far as this one knows."""
    here = Path.cwd()
    return not (os.path.ismount(place) or here == place or place in here.parents)


@contextlib.contextmanager
def aside(parent: Path) -> Iterator[Path]:
    """A hidden folder in `parent` for what is being made; it is gone afterwards.

    First takes up what processes that died have left there.
    """
    _take_up(parent)
    folder = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder = folder.rename(parent / folder.name.replace(_UNLOCKED, _HIDDEN, 1))
        yield folder
    finally:
        _take_back(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _take_up(parent: Path) -> None:
    """Put back and remove what processes that died have left in a folder."""
    for folder in (*parent.glob(f"{_HIDDEN}*"), *parent.glob(f"{_UNLOCKED}*")):
        with contextlib.suppress(OSError):  # another process takes it up, or may not be disturbed
            if _is_left(folder):
                _take_back(folder)
                shutil.rmtree(folder)


def _is_left(folder: Path) -> bool:
    """Whether the process that made a hidden folder is gone."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    if fcntl is None or folder.name.startswith(_UNLOCKED):
        return time.time() - folder.stat().st_mtime > _OLD
    lock = os.open(folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _take_back(hidden: Path) -> None:
    """Undo or finish an exchange of folders: the old one, or what only the old one has."""
    old = hidden / "old"
    if not old.is_dir():
        return
    name = (hidden / "place").read_text(encoding="utf-8", errors="surrogateescape")
    place = hidden.parent / Path(name).name
    if not place.exists():
        os.rename(old, place)
        return
    for entry in old.iterdir():
        if not os.path.lexists(place / entry.name):
            os.rename(entry, place / entry.name)


def _naming(error: OSError, path: Path) -> OSError:
    """The error with the path that the user knows, in place of a hidden one."""
    if error.errno is None:
        return error
    return type(error)(error.errno, error.strerror or str(error), str(path))
