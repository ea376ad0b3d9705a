"""Targets of a fleet: what their files hold when a fleet is asked for, and the same on a worker."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rooftrace.errors import TargetError
from rooftrace.tracer.asking.names import config_file, names_code

_CARRIED = 16 << 20
"""Bytes of a file that is sent along, at most."""


@dataclass(frozen=True)
class FleetSource:
    """A target by its name, and the digest of the files that it names; "" where it names none."""

    name: str
    place: str = ""  # the same with an absolute path
    digest: str = ""
    content: bytes = b""  # of a file that stands alone, where it is sent along

    @staticmethod
    def of(target: str | os.PathLike[str]) -> FleetSource:
        """A target as its files are now.  A target whose files are not there has no digest."""
        name = os.fspath(target)
        return FleetSource(name, _absolute(name), _digest(name))

    def carried(self) -> FleetSource:
        """This source with the content of its file, for workers that do not see the same disk.

        Code and folders stay where they are.
        """
        path = Path(self.place)
        with contextlib.suppress(OSError):
            if path.is_file() and path.stat().st_size <= _CARRIED:
                return replace(self, content=path.read_bytes())
        return self

    @contextlib.contextmanager
    def there(self) -> Iterator[str]:
        """The name under which this process has the target, with files that hold the same.

        Raises TargetError where it has none.
        """
        same = [name for name in (self.name, self.place) if _digest(name) == self.digest]
        if same:
            yield same[0]
        elif self.content:
            with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
                path = Path(folder) / Path(self.place).name  # the name is the title of its model
                path.write_bytes(self.content)
                yield str(path)
        else:
            raise TargetError(
                f"{self.name}: this worker does not have the files that the caller has: share the "
                "disk, or name a package that is installed on both"
            )


def _absolute(name: str) -> str:
    path, colon, attribute = name.rpartition(":") if names_code(name) else (name, "", "")
    return f"{os.path.abspath(path)}{colon}{attribute}" if os.path.exists(path) else name


def _digest(name: str) -> str:
    """The SHA-256 of the files that a target names.

    Of code it is all Python files in its folder and in the packages below; what else it imports is
    not looked at.  Of a folder with a config.json it is that, and code beside it.
    """
    if names_code(name):
        where = name.rpartition(":")[0]
        folder = Path(where).absolute().parent if os.path.isfile(where) else _package(where)
        return _of_files(sorted(_python_files(folder))) if folder else ""
    path = Path(name)
    if path.is_file():
        return _of_files([path])
    config = config_file(name) if path.is_dir() else None
    return _of_files([config, *sorted(filter(Path.is_file, path.glob("*.py")))]) if config else ""


def _package(module: str) -> Path | None:
    """The folder of the package that a module is of; None for one that is installed, or a file."""
    top = module.partition(".")[0]
    for entry in sys.path:
        folder = Path(entry or ".").absolute() / top
        if top and folder.is_dir():
            return None if "site-packages" in folder.parts else folder
    return None


def _python_files(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Python files of a folder and of packages below; links that lead in a circle end."""
    above |= {os.path.realpath(folder)}
    for entry in os.scandir(folder):
        if entry.name.endswith(".py") and entry.is_file():
            yield Path(entry.path)
            continue
        package = os.path.isfile(os.path.join(entry.path, "__init__.py"))
        if package and os.path.realpath(entry.path) not in above:
            yield from _python_files(Path(entry.path), above)


def _of_files(paths: list[Path]) -> str:
    """One digest of files by their names and contents; "" where one cannot be read."""
    digest = hashlib.sha256()
    above = os.path.commonpath([path.absolute().parent for path in paths])
    try:
        for path in paths:
            content = path.read_bytes()
            digest.update(f"{path.absolute().relative_to(above)} {len(content)}\n".encode())
            digest.update(content)
    except OSError:
        return ""
    return digest.hexdigest()
