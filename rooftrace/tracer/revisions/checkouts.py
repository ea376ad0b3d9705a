"""A revision as files in a temporary worktree, which is gone afterwards.

The user's working tree, index and branches are not touched.  While a checkout lives, git lists it
among the worktrees of the repository.  `git worktree prune` is not run: it would also forget
worktrees of the user's that are on a disk which is not there now.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooftrace._writing import aside
from rooftrace.tracer.revisions.program import git, tried
from rooftrace.tracer.revisions.repositories import Repository

_FOLDER = "rooftrace-checkout"
_GITLINK = "160000"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A commit as files."""

    root: str  # where its files are
    missing: tuple[str, ...] = ()  # submodules whose files are not in this clone


@contextmanager
def checked_out(repository: Repository, hash_: str) -> Iterator[Checkout]:
    """The files of a commit, in a folder of the repository's name."""
    with aside(Path(tempfile.gettempdir()).resolve()) as folder:
        place = str(folder / _FOLDER / os.path.basename(repository.root))
        made: list[tuple[str, str]] = []
        try:
            missing = _check_out(repository.root, hash_, place, "", made)
            yield Checkout(place, tuple(missing))
        finally:
            for root, worktree in reversed(made):
                if tried(root, "worktree", "remove", "--force", "--force", worktree) is None:
                    shutil.rmtree(worktree, ignore_errors=True)
                    tried(root, "worktree", "remove", "--force", "--force", worktree)


def link_ignored(repository: Repository, root: str) -> None:
    """Lead a checkout to what git ignores in the repository: data that a script reads.

    What lies there already stays.
    """
    for path in repository.ignored:
        there, here = (os.path.join(place, path.rstrip("/")) for place in (repository.root, root))
        if not os.path.lexists(here):
            os.makedirs(os.path.dirname(here), exist_ok=True)
            os.symlink(there, here, target_is_directory=path.endswith("/"))


def _check_out(
    root: str, hash_: str, place: str, below: str, made: list[tuple[str, str]]
) -> list[str]:
    """Check a commit out, and its submodules where their commits are in this clone.

    Appends each worktree to `made`.  Returns the paths of submodules that are missing.
    """
    made.append((root, place))
    git(root, "worktree", "add", "--quiet", "--force", "--detach", "--", place, hash_)
    missing = []
    for path, (mode, content) in Repository(root).tree(hash_).items():
        if mode != _GITLINK:
            continue
        inside, shown = os.path.join(root, path), f"{below}{path}"
        there = os.path.exists(os.path.join(inside, ".git"))
        if there and tried(inside, "cat-file", "-e", f"{content}^{{commit}}") is not None:
            folder = os.path.join(place, path)
            missing += _check_out(inside, content, folder, f"{shown}/", made)
        else:
            missing.append(shown)
    return missing
