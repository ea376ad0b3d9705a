"""A target is built from its files as they are now, whatever this process imported before.

Python imports a module once by its name.  Two checkouts with a neighbour of one name, or one file
before and after an edit, would share what was imported first.  Inside `own_imports` the modules of
a target are imported afresh and from source text; afterwards `sys.modules` and `sys.path` are
restored.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from rooftrace import _extensions
from rooftrace._reading import digest_of
from rooftrace.tracer import spec_after

_LOCK = threading.RLock()
_OWN = frozenset({"rooftrace", "torch"})
_PACKAGES = frozenset({"site-packages", "dist-packages"})

Modules = dict[str, ModuleType]


@dataclass
class Kept:
    """Modules and models of targets, for a call that builds a target several times.

    modules: the imports of targets, by target: the target's module first, then its other modules;
    and `sys.path` after the import.  models: of configs, by all that they are built from.  opened:
    paths of files that were opened.  registers: whether one registered rules or the like.  stack:
    holds a mesh as long as it stands.  spread: the model over it, and what was said of that.
    """

    modules: dict[str, tuple[Modules, list[str]]] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    opened: dict[str, None] = field(default_factory=dict)
    registers: bool = False
    stack: contextlib.ExitStack | None = None
    spread: tuple[Any, str] | None = None

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Inside, the mesh of a model stays from one trace to the next, and the model spread."""
        with contextlib.ExitStack() as self.stack:
            try:
                yield
            finally:
                self.stack = self.spread = None
                self.models.clear()

    def enter(self, mesh: contextlib.AbstractContextManager[Any]) -> None:
        """Let a mesh stand, in place of one whose model could not be spread."""
        assert self.stack is not None
        self.stack.close()
        self.stack.enter_context(mesh)


_KEPT: ContextVar[Kept | None] = ContextVar("_KEPT", default=None)


@dataclass
class _Imports:
    """The state that an `own_imports` has to put back.

    folders: where the targets lie.  aside: modules that were taken out of `sys.modules`.  seen:
    the earlier records of their files.  key: the key of the last target.  registered: what rules
    and the like there were.  opened: paths of the files that were opened.
    """

    path: list[str]
    before: Modules
    registered: list[Any]
    opened: dict[str, None]
    folders: set[str] = field(default_factory=set)
    aside: Modules = field(default_factory=dict)
    seen: dict[str, _SeenFile] = field(default_factory=dict)
    key: str = ""


_ACTIVE: list[_Imports] = []
_LEFT: list[tuple[_Imports, list[str]]] = []
"""Imports that still stand, and `sys.path` with them: those of a target loaded to be run later."""
_IMPORTED: set[str] = set()
"""Names of every module that a target of this process had."""


@dataclass(frozen=True)
class _SeenFile:
    """A file as it was when its module was first seen; the stamp is there to save reading it."""

    file: str
    digest: str
    stamp: tuple[int, ...]

    def edited(self) -> bool:
        return _stamp(self.file) != self.stamp and digest_of(self.file) != self.digest


_SEEN: dict[str, _SeenFile] = {}
"""Modules of the user outside any target, which may still be edited, by name."""


@contextlib.contextmanager
def own_imports(leave: bool = False) -> Iterator[None]:
    """Targets loaded inside get fresh modules; their later imports belong inside too.

    One thread at a time.  Contexts may be nested: the outer one counts.  leave: imports stay until
    the next target is loaded.
    """
    with _LOCK:
        if _ACTIVE:
            yield
            return
        while _LEFT:
            _put_back(*_LEFT.pop())
        kept = _KEPT.get()
        opened = {} if kept is None else kept.opened
        imports = _Imports(list(sys.path), dict(sys.modules), _extensions.registered(), opened)
        _watch()
        finder = _SourceFinder()
        _ACTIVE.append(imports)
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            _ACTIVE.pop()
            sys.meta_path.remove(finder)
            if leave:
                _LEFT.append((imports, list(sys.path)))
            else:
                _put_back(imports, list(sys.path))


@contextlib.contextmanager
def keeping(kept: Kept) -> Iterator[None]:
    """Inside, a target that is built several times is imported once; some code allows no more."""
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)


def once(key: str, build: Callable[[], Any]) -> Any:
    """The result of `build`, made once for each key inside `keeping`, and anew outside of it."""
    kept = _KEPT.get()
    if kept is None:
        return build()
    if key not in kept.models:
        kept.models[key] = build()
    return kept.models[key]


def standing() -> Kept | None:
    """The modules and models of this call, while a mesh stays from one trace to the next."""
    kept = _KEPT.get()
    return kept if kept is not None and kept.stack is not None else None


def prepare(key: str, first: Sequence[str], more: Sequence[str] = ()) -> ModuleType | None:
    """Make ready to import a target; requires `own_imports`.

    key: tells this target from others.  first: folders (real paths) that come first in `sys.path`.
    more: further folders whose modules belong to the target.  Modules of another target, or of
    an older file, are set aside.  Returns the target's module where `keeping` has it.
    """
    (imports,) = _ACTIVE
    imports.key = key
    imports.folders |= {*first, *more}
    importlib.invalidate_caches()  # a folder's listing is trusted for as long as its time is equal
    linecache.checkcache()
    _set_aside(imports, _in_the_way(first, more))
    if any(seen.edited() for seen in _SEEN.values()):
        _set_aside(imports, set(_SEEN))  # the importers of an edited module are unknown
    for name, module in list(sys.modules.items()):
        _see(name, module)
    for folder in reversed(first):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    kept = _KEPT.get()
    if kept is None or key not in kept.modules:
        return None
    modules, sys.path[:] = kept.modules[key]
    sys.modules.update(modules)
    return next(iter(modules.values()))


def imported(module: ModuleType) -> None:
    """Say which module is the target itself, for `keeping`."""
    kept = _KEPT.get()
    (imports,) = _ACTIVE
    if kept is not None:
        modules = {name: other for name, other in _new(imports).items() if other is not module}
        kept.modules[imports.key] = ({module.__name__: module, **modules}, list(sys.path))


def imported_again() -> bool:
    """Whether modules of the last target were imported before; some code allows only one import."""
    if not _ACTIVE:
        return False
    (imports,) = _ACTIVE
    return bool(imports.aside) or not _IMPORTED.isdisjoint(_new(imports))


def _new(imports: _Imports) -> Modules:
    """The user's modules that were imported while these imports were active."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if imports.before.get(name) is not module and _users_module(name, module)
    }


def source_files() -> dict[str, str]:
    """Digests of the user's Python files that came in with the target, by real path."""
    (imports,) = _ACTIVE
    files = {_real(file) for module in _new(imports).values() if (file := _file(module))}
    return {file: digest_of(file, whole=True) for file in sorted(files)}


def opened() -> tuple[str, ...]:
    """The user's files that were opened to be read, also those that were not there."""
    (imports,) = _ACTIVE
    paths = (path for path in sorted(imports.opened) if not path.startswith(_OF_SYSTEM))
    return tuple(path for path in paths if _users(path))


def has_registered() -> bool:
    """Whether the code of the target, or of an earlier one inside `keeping`, brought rules or the
    like."""
    (imports,), kept = _ACTIVE, _KEPT.get()
    has = imports.registered != _extensions.registered() or (kept is not None and kept.registers)
    if kept is not None:
        kept.registers = has
    return has


@cache
def _watch() -> None:
    """Have Python say which files it opens; there is no way to have it stop."""
    sys.addaudithook(_note)


def _note(event: str, arguments: Any) -> None:
    if event == "open" and _ACTIVE and isinstance(arguments[0], str):
        path, _, flags = arguments
        if not flags & os.O_WRONLY:
            _ACTIVE[-1].opened[os.path.abspath(path)] = None


_OF_SYSTEM = ("/proc/", "/sys/", "/dev/")


# -- which modules are whose -----------------------------------------------------------------------


def _put_back(imports: _Imports, path: Sequence[str]) -> None:
    """`sys.modules` and `sys.path` as before.  Other people's modules stay imported."""
    added = [entry for entry in path if entry not in imports.path]
    if sys.path == list(path):
        sys.path[:] = imports.path
    else:
        sys.path[:] = [entry for entry in sys.path if entry not in added]
    new = _new(imports)
    _IMPORTED.update(new)
    # A package and its modules stay or go together.
    tops = {name.partition(".")[0] for name in new}
    dropped = {top for top in tops if not _stays(top, imports)}
    dropped |= {name.partition(".")[0] for name in imports.aside}
    for name, module in new.items():
        if name.partition(".")[0] in dropped:
            del sys.modules[name]
            _SEEN.pop(name, None)
        else:
            _see(name, module)
    sys.modules.update(imports.aside)
    _SEEN.update(imports.seen)  # modules of the user are still of the earlier file
    importlib.invalidate_caches()


def _stays(top: str, imports: _Imports) -> bool:
    """Whether a top-level module is found without the target too: then it is not the target's."""
    folders = _places(top)
    if not folders or folders & imports.folders:
        return False
    try:
        spec = _spec_now(top)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and bool(_spec_places(spec) & folders)


def _spec_now(top: str) -> ModuleSpec | None:
    """The spec that an import of this top-level name would find now, even if it is imported."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(top, None, None) if find is not None else None
        if spec is not None:
            return spec
    return None


def place_of(top: str) -> str | None:
    """The user's folder in which a top-level name is found now; None for any other place."""
    spec = _spec_now(top)
    folders = () if spec is None else _spec_places(spec)
    return next((folder for folder in folders if _users(os.path.join(folder, top))), None)


def _in_the_way(first: Sequence[str], more: Sequence[str]) -> set[str]:
    """Names of imported modules that come from these folders, or hide a module there."""
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    tops -= {"__main__", "__mp_main__", *_OWN, *sys.stdlib_module_names}
    ours, hiding = set(), set()
    for top in tops:
        folders = _places(top)
        if folders & {*first, *more}:
            ours.add(top)
        elif folders and any(_provides(folder, top) for folder in first):
            hiding.add(top)
    return {
        name
        for name, module in list(sys.modules.items())
        if (top := name.partition(".")[0]) in hiding
        or (top in ours and _users_module(name, module))
    }


def _provides(folder: str, top: str) -> bool:
    """Whether a folder has a module or package of this name, or a part of a namespace package."""
    where = os.path.join(folder, top)
    if os.path.isfile(f"{where}.py") or os.path.isfile(os.path.join(where, "__init__.py")):
        return True
    names = vars(sys.modules[top]) if top in sys.modules else {}
    return "__path__" in names and names.get("__file__") is None and os.path.isdir(where)


def _see(name: str, module: Any) -> None:
    """Remember the content of a user's module file, unless there is an older state."""
    if name not in _SEEN and _users_module(name, module) and (file := _file(module)):
        _SEEN[name] = _SeenFile(file, digest_of(file), _stamp(file))


def _stamp(file: str) -> tuple[int, ...]:
    """A stamp that changes when a file is written, without reading the file."""
    try:
        state = os.stat(file)
    except OSError:
        return ()
    return state.st_mtime_ns, state.st_ctime_ns, state.st_size, state.st_ino


def _set_aside(imports: _Imports, names: set[str]) -> None:
    for name in names:
        seen = _SEEN.pop(name, None)
        module = sys.modules.get(name)
        if module is None or _is_extension(module):
            continue  # compiled modules cannot be imported twice
        if imports.before.get(name) is module:
            imports.aside[name] = module
            if seen is not None:
                imports.seen.setdefault(name, seen)
        del sys.modules[name]


def _places(top: str) -> set[str]:
    """The real folders in which an imported top-level module or package was found."""
    module = sys.modules.get(top)
    spec = getattr(module, "__dict__", {}).get("__spec__")
    if isinstance(spec, ModuleSpec):
        return _spec_places(spec)
    file = _file(module)
    return {os.path.dirname(_real(file))} if file else set()


def _spec_places(spec: ModuleSpec) -> set[str]:
    if spec.submodule_search_locations is not None:
        return {os.path.dirname(_real(folder)) for folder in spec.submodule_search_locations}
    return {os.path.dirname(_real(spec.origin))} if spec.origin and spec.has_location else set()


def _users_module(name: str, module: Any) -> bool:
    """Whether a module is Python code of the user: neither installed, nor Python's, nor ours."""
    if name.partition(".")[0] in {"__main__", "__mp_main__", *_OWN}:
        return False
    file = _file(module)
    if file:
        return not _is_extension(module) and _users(file)
    paths = [str(folder) for folder in getattr(module, "__dict__", {}).get("__path__", ())]
    return bool(paths) and all(map(_users, paths))


def _is_extension(module: Any) -> bool:
    file = _file(module)
    return bool(file) and not file.endswith((".py", ".pyc"))


def _file(module: Any) -> str:
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def _real(path: str) -> str:
    return os.path.realpath(path)


@cache
def _users(path: str) -> bool:
    """Whether a path is neither in an environment nor in Python or in rooftrace."""
    parts = Path(path).parts
    if _PACKAGES & set(parts) or path.startswith("<"):
        return False
    real = _real(path)
    return not any(real.startswith(folder) for folder in _installed())


@cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_paths()[name] for name in names]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    folders.append(str(Path(__file__).resolve().parents[2]))
    torch = importlib.util.find_spec("torch")
    folders += list(torch.submodule_search_locations or ()) if torch is not None else []
    return tuple(_real(folder) + os.sep for folder in folders)


class _FromSource(SourceFileLoader):
    """Compiles the current source: Python would trust a cached .pyc for a second after an edit."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _SourceFinder:
    """Returns the specs of the finders after it, but reads the user's Python files from source.

    Finders before it are skipped: they may be calling it, which would not end.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = spec_after(self, name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader and _users(str(spec.origin)):
            spec.loader = _FromSource(spec.loader.name, spec.loader.path)
        return spec


def from_source(name: str, path: Path) -> ModuleSpec | None:
    """A spec that reads `path` from its source text."""
    loader = _FromSource(name, str(path))
    return importlib.util.spec_from_file_location(name, path, loader=loader)
