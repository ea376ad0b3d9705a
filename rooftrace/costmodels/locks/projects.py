"""The project that a person stands in.  What its files name runs only inside of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rooftrace._reading import check_name
from rooftrace.costmodels.locks.records import Asked
from rooftrace.errors import RequestError
from rooftrace.tracer.asking import names
from rooftrace.tracer.launching import understood

FILE = "pyproject.toml"
_MARKS = (FILE, ".git")


class ProjectError(RequestError):
    """A file that names what lies outside of its project, or is another user's."""


def project_of(folder: Path) -> Path:
    """The nearest folder with a pyproject.toml or .git, this one or one above it; else this one.

    Raises ProjectError for one above that does not belong to the user this folder belongs to: in a
    shared folder anyone could put such a file over the folders of others.
    """
    folder = folder.resolve()
    for root in (folder, *folder.parents):
        for mark in (root / name for name in _MARKS):
            if not os.path.lexists(mark):
                continue
            owners = {path.lstat().st_uid for path in (folder, root, mark)}
            if root != folder and len(owners) > 1:
                raise ProjectError(
                    f"{mark}: it does not belong to the user to whom {folder} belongs, so its "
                    f"project is not taken for yours; stand in {root} to use it, or put a {FILE} "
                    "into your own folder"
                )
            return root
    return folder


def inside(root: Path, path: Path, named: str) -> Path:
    """The place of a path, links followed.  Raises ProjectError where that is not in a project.

    named: what names the path, for the message.
    """
    check_name(path)
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(root):
        raise ProjectError(
            f"{named}: {place} lies outside of the project {root}, and what its files name is run, "
            "read as a lock or written only inside of it; stand in the other project, or copy the "
            "file into this one"
        )
    return place


def code_of(
    root: Path, folder: Path, targets: Mapping[str, Asked], rules: Sequence[str]
) -> list[tuple[str, str]]:
    """What code targets and rules run: as it is named, and by what.

    Raises ProjectError for a file outside of the project.  A dotted name is imported as Python
    does: from the project, else from what is installed.
    """
    code = [(path, "rules") for path in rules]
    for path in rules:
        inside(root, folder / path, f"rules {path!r}")
    for name, asked in targets.items():
        said = f"target {name}"
        for path in _files_of(asked, folder):
            inside(root, folder / path, f"{said} = {asked.target!r}")
        if names.names_code(asked.target) or asked.trust_remote_code:
            remote = ", with code of its repository" * asked.trust_remote_code
            code.append((asked.target, f"{said}{remote}"))
    return code


def _files_of(asked: Asked, folder: Path) -> Iterator[str]:
    """Files of the project whose code a target runs, as far as its name says so."""
    target = asked.target
    if names.is_script(target):
        launch = understood(names.ScriptCommand.of(target).words, folder)
        yield from _module(launch.program, folder) if launch.module else [launch.program]
    elif names.names_code(target):
        where = names.where_of(target)
        yield from [where] if where.endswith(".py") else _module(where, folder)
    elif asked.trust_remote_code and not target.startswith("hf:"):
        yield target


def _module(name: str, folder: Path) -> Iterator[str]:
    path = name.replace(".", "/")
    for file in (path.partition("/")[0], f"{path}.py", path, f"{path}/__init__.py"):
        if (folder / file).exists():
            yield file
