"""Checks which files an output may replace.

An existing file is replaced where it is an output of rooftrace of the same kind.  A link, a folder
and a file without write permission are never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from rooftrace._reading import check_name
from rooftrace.errors import RequestError

MARK = "made_by: rooftrace"
"""In an output whose format has no schema: in a comment, or in the metadata of a picture."""
MADE_BY = {"made_by": "rooftrace"}
TOML_MARK = f"# {MARK}\n"
"""The first line of a file of a chip or a system."""

_KIND = re.compile(
    rb"(?:schema|format)\W{1,5}rooftrace\.(\w+)/|(made_by)\W{1,8}rooftrace"
    rb'|"check_name": "(rooftrace-)|rooftrace.{2,4}\{"(key)"'
    rb"|Made by `rooftrace (lock)`",
    re.DOTALL,
)
_HEADER = re.compile(rb'[\w.]+(?:,[^,"\s]+)+\r?\n')
_HEAD, _TAIL = 4096, 65_536
_CODE = (".py", ".pyi", ".pyw", ".pyx", ".ipynb")

Files = frozenset[tuple[int, int]]
_COMMAND: ContextVar[tuple[Files, bool] | None] = ContextVar("rooftrace_command", default=None)


@contextlib.contextmanager
def outputs_of_command(named: Iterable[str], force: bool) -> Iterator[None]:
    """Check every output of the block by the rules of a command line.

    named: its other words; files among them are inputs.  force: replace any plain file.
    """
    inputs = set()
    for path in named:
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                inputs.add((status.st_dev, status.st_ino))
    before = _COMMAND.set((frozenset(inputs), force))
    try:
        yield
    finally:
        _COMMAND.reset(before)


def check_output(
    path: Path,
    content: bytes | None = None,
    *,
    own_name: bool = False,
    known: bool = False,
    table: bool = True,
) -> None:
    """Raise RequestError or OSError where an output cannot go, or where a file would be lost.

    content: of the output; None before it is made.  own_name: rooftrace chose the name, in a folder
    of the user.  known: a manifest lists the file as rooftrace's.  table: a CSV is accepted before
    there is content, which then has to be of the same table.

    On the command line, and for names that rooftrace chose, only a file of the same kind is
    replaced.  A file that a caller in Python names is replaced unless it is code.
    """
    check_name(path)
    if is_stream(path) and not own_name:
        return
    try:
        status = path.lstat()
    except FileNotFoundError:
        _check_parent(path)
        return
    _check_plain(path, status)
    inputs, force = _COMMAND.get() or (frozenset(), False)
    if force:
        return
    by_command = _COMMAND.get() is not None
    rather = "; name another file" + (", or add --force to replace it" if by_command else "")
    if (status.st_dev, status.st_ino) in inputs:
        raise RequestError(f"{str(path)!r} is an input of this command{rather}")
    if path.suffix in _CODE:
        raise RequestError(f"{str(path)!r} is code, and would be lost{rather}")
    if known or not (by_command or own_name) or not status.st_size:
        return
    was = kind_at(path) if table or path.suffix != ".csv" else None
    new = was if content is None else kind_of(content, path.suffix)
    if was is None or (was != new and _NOTHING not in (was, new)):
        raise RequestError(
            f"{str(path)!r} is there, and is not what rooftrace writes here: it would be lost"
            f"{rather}"
        )


def is_stream(path: Path) -> bool:
    """Whether a path is written to as it is: a device, a pipe, or a stream of this process."""
    folder = os.path.dirname(os.path.abspath(path))
    special = folder in ("/dev", "/dev/fd") or folder.startswith("/proc/")
    return path.exists() and not path.is_dir() and (special or not path.is_file())


_NOTHING = b"nothing"


def kind_of(content: bytes, suffix: str) -> bytes | None:
    """The kind of an output of rooftrace, by its beginning and its end; None for another file."""
    if content.strip() in (b"", b"[]"):
        return _NOTHING
    if suffix == ".csv":
        header = _HEADER.match(content)
        return header[0] if header else None
    if content[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            content = zlib.decompressobj(31).decompress(content, _HEAD)
    match = _KIND.search(content[:_HEAD]) or _KIND.search(content[-_TAIL:])
    return next(filter(None, match.groups())) if match else None


def kind_at(path: Path) -> bytes | None:
    """The kind of a plain file, as `kind_of` has it; None for a link and for other files."""
    return kind_of(_ends(path), path.suffix) if path.is_file() and not path.is_symlink() else None


def _ends(path: Path) -> bytes:
    """The beginning and the end of a file; all of a small one."""
    with path.open("rb") as file:
        head = file.read(_TAIL)
        file.seek(max(len(head), os.fstat(file.fileno()).st_size - _TAIL))
        return head + file.read(_TAIL)


def _check_plain(path: Path, status: os.stat_result) -> None:
    """Raise RequestError unless this is a plain file with write permission."""
    if stat.S_ISLNK(status.st_mode):
        raise RequestError(
            f"{str(path)!r} is a link to {os.readlink(path)!r}: name that file itself, or remove "
            "the link"
        )
    if stat.S_ISDIR(status.st_mode):
        raise RequestError(f"{str(path)!r} is a folder: an output has this name; move it away")
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(f"{str(path)!r} is no plain file: an output has this name; move it away")
    if not status.st_mode & 0o222 or not os.access(path, os.W_OK):
        raise RequestError(f"{str(path)!r} is read-only: make it writable, or name another file")


def _check_parent(path: Path) -> None:
    """Raise OSError where a file cannot be made: a file in the way, or a folder without rights."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, f"{str(parent)!r} is a file, and no folder", str(path)
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
