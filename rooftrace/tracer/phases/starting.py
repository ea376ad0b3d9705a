"""The first code of a process that `apart` starts: where modules come from, which files are read.

Standard library only, and nothing newer than Python 3.8: the interpreter may be any.  A side of a
diff runs from a checkout.  Then every way of Python to a module of the repository is led into the
checkout: `sys.path`, the finders of editable installs, and paths that code makes itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

if __name__ == "__main__":  # files next to this one hide no module
    sys.path[:] = [p for p in sys.path if p not in ("", os.path.dirname(os.path.abspath(__file__)))]

import importlib.util
import json
import signal

_ENVIRONMENT = ("site-packages", "dist-packages")


class Moves:
    """Leads from the folder of a repository into a checkout of it.

    ignored: paths below the repository that git ignores; build outputs there are in no checkout,
    so it is read from the repository.
    """

    def __init__(self, before: str, after: str, ignored: Sequence[str]) -> None:
        self.before = before + os.sep
        self.after = after + os.sep
        self.ignored = tuple(path for path in ignored if path.endswith("/"))
        self.files = frozenset(ignored)

    def new(self, path: str) -> str | None:
        """The place of a file or folder in the checkout; None for one that is not moved."""
        real = os.path.realpath(path) if path else ""
        if (real + os.sep).startswith(self.after) or not (real + os.sep).startswith(self.before):
            return None
        below = real[len(self.before) :]
        if set(_ENVIRONMENT) & set(below.split(os.sep)) or self.is_ignored(below):
            return None
        return self.after + below

    def old(self, path: str) -> str | None:
        """The place in the repository of a path of the checkout; None for any other."""
        return self.before + path[len(self.after) :] if path.startswith(self.after) else None

    def is_ignored(self, below: str) -> bool:
        """Whether git ignores a path below the repository."""
        slashes = below.replace(os.sep, "/")
        return slashes in self.files or (slashes + "/").startswith(self.ignored)

    def path(self, entries: Iterable[str]) -> list[str]:
        """An import path in the checkout."""
        return [self.new(entry) or entry for entry in entries]


class MovedFinder:
    """A finder whose modules of a repository are those of a checkout."""

    def __init__(self, finder: Any, moves: Moves) -> None:
        self._finder, self._moves = finder, moves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a module, moved; None where the checkout does not have the module."""
        spec = self._finder.find_spec(name, path, target)
        if spec is not None:
            return self._moved(spec)
        entries = sys.path if path is None else path
        built = [old for old in map(self._moves.old, map(str, entries)) if old]
        spec = self._finder.find_spec(name, built, target) if built else None
        origin = spec.origin if spec is not None and spec.has_location else None
        below = os.path.realpath(origin)[len(self._moves.before) :] if origin else ""
        return spec if below and self._moves.is_ignored(below) else None

    def _moved(self, spec: Any) -> Any:
        folders = spec.submodule_search_locations
        moved = None if folders is None else self._moves.path(map(str, folders))
        new = self._moves.new(spec.origin) if spec.has_location and spec.origin else None
        if new is None:
            if moved is not None and moved != list(folders):
                spec.submodule_search_locations = moved
            return spec
        if not os.path.isfile(new):
            return None
        return importlib.util.spec_from_file_location(
            spec.name, new, submodule_search_locations=moved
        )


class OursFinder:
    """Finds the package rooftrace in the folder that the other process has it from."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of rooftrace; None for any other module."""
        if name != "rooftrace":
            return None
        return importlib.util.spec_from_file_location(
            name,
            os.path.join(self._folder, "__init__.py"),
            submodule_search_locations=[self._folder],
        )


READ: dict[str, None] = {}
"""Paths of the files that were opened, in order."""


def _note(event: str, arguments: Any) -> None:
    if event == "open" and isinstance(arguments[0], str):
        READ[arguments[0]] = None


def start(job: Mapping[str, Any]) -> None:
    """Set up where modules come from, then do the job.

    job["path"]: the import path of the other process, or the part of it that this interpreter has
    not; None keeps its path.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: the other process says so, once
    moves = Moves(*job["moves"]) if job["moves"] else None
    entries = job["path"] if job["full_path"] else job["path"] + sys.path
    sys.path[:] = moves.path(entries) if moves else entries
    if moves:
        from importlib.machinery import BuiltinImporter, FrozenImporter

        kept = (BuiltinImporter, FrozenImporter)
        sys.meta_path[:] = [f if f in kept else MovedFinder(f, moves) for f in sys.meta_path]
        for name, module in list(sys.modules.items()):  # imported while Python started
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and name != "__main__" and moves.new(file) is not None:
                del sys.modules[name]
    sys.meta_path.insert(0, OursFinder(job["rooftrace"]))
    if job["root"]:
        sys.addaudithook(_note)
    try:
        worker = importlib.import_module(job["worker"])
    except (ImportError, SyntaxError, TypeError) as error:
        running = f"{sys.executable} (Python {sys.version.split()[0]})"
        message = f"{running} cannot run rooftrace: {type(error).__name__}: {error}"
        print(json.dumps({"error": ["TargetError"], "message": message}), flush=True)
        return
    worker.work(job, READ)


if __name__ == "__main__":
    start(json.loads(sys.stdin.read()))
