"""A revision as files in a temporary folder, which is gone afterwards.

Nothing of the user's repository is written: the checkout has a git folder of its own.  No filter
runs, so a file that a filter would change (Git LFS, git-crypt) is there as it is stored.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooftrace._writing import aside
from rooftrace.tracer.revisions.program import git, make_git_folder
from rooftrace.tracer.revisions.repositories import GITLINK, Repository


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit as files."""

    root: str  # where its files are
    missing: tuple[str, ...] = ()  # submodules whose files are not in this clone


@contextmanager
def checked_out(repository: Repository, hash_: str) -> Iterator[Checkout]:
    """The files of a commit, in a folder of the repository's name."""
    with aside(Path(tempfile.gettempdir()).resolve()) as folder:
        place = folder / "rooftrace-checkout" / os.path.basename(repository.root)
        yield Checkout(str(place), tuple(_check_out(repository, hash_, place, "")))


def link_ignored(repository: Repository, root: str) -> None:
    """Lead a checkout to what git ignores in the repository: data that a script reads.

    What lies there already stays.
    """
    for path in repository.ignored:
        there, here = (os.path.join(place, path.rstrip("/")) for place in (repository.root, root))
        if not os.path.lexists(here):
            os.makedirs(os.path.dirname(here), exist_ok=True)
            os.symlink(there, here, target_is_directory=path.endswith("/"))


def _check_out(repository: Repository, hash_: str, place: Path, below: str) -> list[str]:
    """Check a commit out, and its submodules where their commits are in this clone.

    Returns the paths of submodules that are missing.
    """
    own = make_git_folder(place / ".git", repository.root, hash_)
    own |= {"GIT_WORK_TREE": str(place), "GIT_INDEX_FILE": str(place / ".git" / "index")}
    git(place, "read-tree", "-m", "-u", hash_, own=own)
    missing = []
    for path, (mode, content) in repository.tree(hash_).items():
        if mode != GITLINK:
            continue
        inner, shown = repository.submodule(path), f"{below}{path}"
        if inner is not None and inner.tried("cat-file", "-e", f"{content}^{{commit}}") is not None:
            missing += _check_out(inner, content, place / path, f"{shown}/")
        else:
            missing.append(shown)
    return missing
