"""Imports the code of a target: a file with its neighbours and its package, or a module."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from rooftrace.errors import TargetError
from rooftrace.tracer import users_traceback
from rooftrace.tracer.recording import followed
from rooftrace.tracer.targets.isolation import from_source, imported, place_of, prepare


def import_file(where: str, target: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise TargetError(f"target {target!r}: there is no file {where!r}")
    # Its neighbours are imported as when it is run, and as when it is run through a link.
    folders = list(dict.fromkeys([str(path.resolve().parent), os.path.abspath(path.parent)]))
    package = _package_of(path)
    if package is not None:
        root, name = package
        folders = list(dict.fromkeys([str(root), *folders]))
    else:
        name = f"_rooftrace_target_{path.stem}"
    folders = list(dict.fromkeys([*folders, *_roots(path.resolve())]))
    kept = prepare(f"{path.resolve()}", folders)
    if kept is not None:
        return kept
    module: ModuleType | None = None
    try:
        with followed():  # `@torch.autocast("cuda")` is decided where it stands
            if package is not None:
                module = importlib.import_module(name)
            else:
                spec = from_source(name, path)
                if spec is None or spec.loader is None:
                    raise TargetError(f"target {target!r}: {where!r} cannot be imported as Python")
                module = importlib.util.module_from_spec(spec)
                sys.modules[name] = module
                spec.loader.exec_module(module)
    except TargetError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file may raise
        raise failed(f"importing {where!r}", target, error) from error
    imported(module)
    return module


def _package_of(path: Path) -> tuple[Path, str] | None:
    """For a file that imports relatively: the folder above its package, and its dotted name."""
    try:
        nodes = ast.walk(ast.parse(path.read_bytes()))
    except (SyntaxError, ValueError):
        return None  # said where it is imported
    levels = [node.level for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    if not levels or not path.stem.isidentifier():
        return None
    return _above_package(path.resolve(), max(levels))


def _above_package(path: Path, levels: int = 0) -> tuple[Path, str]:
    """The folder above the outermost package that a file is in, and the file's dotted name there.

    levels: how many of the folders above it are packages, also without an `__init__.py`.
    """
    folder, names = path.parent, [path.stem]
    while folder.name and (len(names) <= levels or (folder / "__init__.py").is_file()):
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def _roots(path: Path) -> list[str]:
    """Folders of a file's checkout with packages that the file, or one next to it, imports.

    These folders come first, because the same package may be installed from another checkout.  They
    are the folder above the file's package and, up to the root of the project, each folder or its
    `src` that has a module of an imported name.
    """
    tops = _imported_names(path.parent) - {"rooftrace", "torch"} - sys.stdlib_module_names
    above = list(path.parents)
    ends = [i for i, folder in enumerate(above) if any((folder / m).exists() for m in _MARKS)]
    above_package, _ = _above_package(path)
    roots = [above_package] if above_package != path.parent else []
    for i, folder in enumerate(above):
        if folder.name in tops:
            roots.append(folder.parent)
        if ends and i <= ends[0]:
            roots += [p for p in (folder, folder / "src") if any(_has(p, top) for top in tops)]
    return [str(root) for root in roots]


_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
"""Names of files and folders that mark the root of a project."""


def _has(folder: Path, top: str) -> bool:
    """Whether a folder has a module or a package of this name, with or without `__init__.py`."""
    return (folder / f"{top}.py").is_file() or any((folder / top).glob("*.py"))


def _imported_names(folder: Path) -> set[str]:
    """The top-level names that Python files of a folder import absolutely."""
    names: set[str] = set()
    for file in sorted(filter(Path.is_file, folder.glob("*.py")))[:_FILES]:
        try:
            nodes = list(ast.walk(ast.parse(file.read_bytes())))
        except (SyntaxError, ValueError, OSError):
            continue  # said where it is imported
        for node in nodes:
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.partition(".")[0])
    return names


_FILES = 200
"""The most files of a folder whose imports are read."""


def import_module(where: str, target: str) -> ModuleType:
    here = os.path.realpath(os.getcwd())
    top = where.partition(".")[0]
    if here in sys.path:
        sys.path.remove(here)
    sys.path.insert(0, here)
    origin = place_of(top) if top not in sys.stdlib_module_names else None
    kept = prepare(f"{where} in {origin or here}", [here], [origin] if origin else [])
    if kept is not None:
        return kept
    try:
        with followed():
            module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            raise TargetError(f"target {target!r}: there is no module {error.name!r}") from None
        raise failed(f"importing {where!r}", target, error) from error
    except (Exception, SystemExit) as error:  # whatever a user's module may raise
        raise failed(f"importing {where!r}", target, error) from error
    imported(module)
    return module


def failed(doing: str, target: str, error: BaseException) -> TargetError:
    """A TargetError for a failure of the user's code, with the traceback shortened to that code."""
    reason = str(error) or "no message"
    lines = [
        f"target {target!r}: {doing} failed: {type(error).__name__}: {reason}",
        users_traceback(error),
    ]
    return TargetError("\n".join(line for line in lines if line))
