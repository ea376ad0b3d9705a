"""Writes files and folders: a reader of a file sees the old one or the complete new one.

A file is made under a hidden name in its folder, then renamed.  The hidden file is gone when the
write ends or fails.  A process that is killed leaves it; no other process touches it.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rooftrace._outputs import check_output, is_stream

try:
    import fcntl
except ImportError:  # Windows: two reports into one folder are then told by their manifest alone
    fcntl = None  # type: ignore[assignment]

_HIDDEN = ".rooftrace-"
_SCHEMA = "rooftrace.files/1"
_MOST = 1 << 20
"""Bytes of a manifest that is read."""
_PATIENCE = 60.0
"""Seconds to wait while another process puts its files into the same folder."""


def write_bytes(path: Path, content: bytes, *, own_name: bool = False) -> None:
    """Write an output, if nothing of the user's is lost (`check_output`).

    Makes the folders above it.  A pipe or a device is written to directly.
    Raises RequestError, and OSError with the name of `path`.
    """
    check_output(path, content, own_name=own_name)
    put_bytes(path, content)


def write_packed(path: Path, content: bytes) -> None:
    """Write a file as `write_bytes` does, as gzip without a time stamp if its name ends in .gz."""
    write_bytes(path, packed(path, content))


def packed(path: Path, content: bytes) -> bytes:
    """The bytes of a file of this name: gzip without a time stamp if it ends in .gz."""
    return gzip.compress(content, compresslevel=6, mtime=0) if path.suffix == ".gz" else content


def put_bytes(path: Path, content: bytes) -> None:
    """Write a file of rooftrace's own, whole or not at all.  Raises OSError with its name."""
    try:
        if is_stream(path):
            path.write_bytes(content)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        made = path.parent / f"{_HIDDEN}{secrets.token_hex(8)}"
        file = made.open("xb")  # exclusive: it is nobody else's
        try:
            with file:
                file.write(content)
            _replace(made, path)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _naming(error, path) from error


def _replace(made: Path, path: Path) -> None:
    """Put a file in the place of another, with its owner and permissions where there was one."""
    with contextlib.suppress(FileNotFoundError):
        old = path.lstat()
        if (old.st_uid, old.st_gid) != (made.lstat().st_uid, made.lstat().st_gid):
            with contextlib.suppress(OSError):  # only an administrator may give a file away
                os.chown(made, old.st_uid, old.st_gid)
        os.chmod(made, old.st_mode & 0o777)
    os.replace(made, path)


@contextlib.contextmanager
def aside(parent: Path) -> Iterator[Path]:
    """A hidden folder in `parent` for files that are being made; it is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=parent))
    maker = os.getpid()
    try:
        yield folder
    finally:
        if os.getpid() == maker:  # a fork that ends here has nothing to clean
            shutil.rmtree(folder, ignore_errors=True)


def put_files(made: Path, out: Path, manifest: str) -> None:
    """Put each file of `made` into the folder `out`, then a manifest of them.

    While files are put, the manifest has `complete: false`, and afterwards the SHA-256 of each: so
    a reader tells a complete set from a mixed one.  Files of an earlier set that `made` does not
    have stay; the manifest names them as `earlier`.  Other files are not touched.

    Raises RequestError, before anything is put, where a name belongs to another file.
    """
    files = sorted(made.iterdir())
    digests = {file.name: _digest(file) for file in files}
    with _alone(out):
        record = out / manifest
        check_files(out, digests, manifest, made)
        earlier = sorted(
            name for name in _listed(record) - digests.keys() if os.path.lexists(out / name)
        )
        table: dict[str, Any] = {"schema": _SCHEMA, "complete": False}
        table |= {"files": dict.fromkeys(digests), "earlier": earlier}
        _put_json(record, table)
        for file in files:
            _replace(file, out / file.name)
        _put_json(record, {**table, "complete": True, "files": digests})


def check_files(out: Path, names: Iterable[str], manifest: str, made: Path | None = None) -> None:
    """Raise RequestError where a file of these names in a folder is not of rooftrace.

    made: a folder that has the new files, once they are made.
    """
    check_output(out / manifest, own_name=True)
    listed = _listed(out / manifest)
    for name in names:
        content = (made / name).read_bytes() if made and os.path.lexists(out / name) else None
        check_output(out / name, content, own_name=True, known=name in listed)


def _listed(record: Path) -> set[str]:
    """The names that a manifest has; none where it is missing or damaged."""
    try:
        table = json.loads(record.read_bytes()) if record.stat().st_size < _MOST else {}
        return {*table["files"], *table["earlier"]} if table["schema"] == _SCHEMA else set()
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return set()


def _put_json(path: Path, table: dict[str, Any]) -> None:
    put_bytes(path, json.dumps(table, indent=1).encode() + b"\n")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, where the system has them: sets of files are put one by one."""
    with contextlib.ExitStack() as undo:
        if fcntl is not None:
            place = os.open(folder, os.O_RDONLY)
            undo.callback(os.close, place)
            until = time.monotonic() + _PATIENCE
            while not _locked(place):
                if time.monotonic() > until:
                    text = "another process is putting files there"
                    raise BlockingIOError(errno.EAGAIN, text, str(folder))
                time.sleep(0.05)
        yield


def _locked(place: int) -> bool:
    """Lock an open folder, unless another process has; True, too, where there are no locks."""
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _naming(error: OSError, path: Path) -> OSError:
    """The error with the path that the user knows, in place of a hidden one."""
    if error.errno is None:
        return error
    return type(error)(error.errno, error.strerror or str(error), str(path))
