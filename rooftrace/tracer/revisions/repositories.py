"""A repository, its commits, and the state of its working tree, as git tells them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rooftrace.tracer.revisions.program import RevisionError, git, tried


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit, as it is shown."""

    hash: str
    short: str
    subject: str
    author: str
    date: str  # of the author, ISO 8601

    def __str__(self) -> str:
        return f"{self.short} {self.subject!r}"

    @property
    def signed(self) -> str:
        """ "a1b2c3d 'Cast the norm' (Ada, 2025-01-31)"."""
        return f"{self} ({self.author}, {self.date[:10]})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "hash": self.hash,
            "short": self.short,
            "subject": self.subject,
            "author": self.author,
            "date": self.date,
        }


@dataclass(frozen=True, slots=True)
class State:
    """What lies in a working tree besides the commit that it is at."""

    changed: int = 0  # tracked files, of which some may be submodules
    untracked: int = 0
    submodules: tuple[str, ...] = ()  # those with changes of their own, or at another commit

    @property
    def is_clean(self) -> bool:
        """Whether it is the commit, nothing else."""
        return not self.changed and not self.untracked

    def __str__(self) -> str:
        parts = [f"{self.changed} file{'s' * (self.changed != 1)} changed"] * bool(self.changed)
        parts += [f"{self.untracked} untracked"] * bool(self.untracked)
        parts += [f"submodule {path} differs" for path in self.submodules]
        return ", ".join(parts) or "nothing changed"


@dataclass(frozen=True)
class Repository:
    """A repository with a working tree; paths are real ones."""

    root: str

    def commit(self, revision: str) -> Commit:
        """The commit of a revision.  Raises RevisionError, which names revisions that are near."""
        if not revision or revision.startswith("-") or "\0" in revision:
            raise RevisionError(
                f"revision {revision!r}: expected a commit, a branch or a tag, for example main or "
                "HEAD~1"
            )
        where = f"{revision}^{{commit}}"
        hash_ = tried(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", where)
        if hash_ is None:
            raise RevisionError(self._unknown(revision))
        return self._commits(["-1", hash_.strip()])[0]

    def commits(self, before: str, after: str) -> list[Commit]:
        """The commits after one up to another, oldest first, by first parents."""
        return self._commits(["--first-parent", "--reverse", f"{before}..{after}"])

    def _commits(self, which: Sequence[str], files: Sequence[str] = ()) -> list[Commit]:
        form = "--format=%H%x00%h%x00%s%x00%an%x00%aI%x00"
        fields = git(self.root, "log", form, "-z", *which, "--", *files).split("\0")
        # Five fields, and the empty one between two separators, for each commit.
        rows = (fields[i : i + 5] for i in range(0, len(fields) - 5, 6))
        return [Commit(*(part.strip("\n") for part in row)) for row in rows]

    def is_ancestor(self, before: str, after: str) -> bool:
        """Whether a commit is part of the history of another."""
        return tried(self.root, "merge-base", "--is-ancestor", before, after) is not None

    def parents(self, hash_: str) -> list[str]:
        """Hashes of the parents of a commit; the first is what it was merged into."""
        return git(self.root, "rev-parse", f"{hash_}^@").split()

    def merge_base(self, first: str, second: str) -> str:
        """The hash of the last common commit.  Raises RevisionError where there is none."""
        base = tried(self.root, "merge-base", first, second)
        if base is None:
            raise RevisionError(
                f"{first} and {second} have no commit in common{self._shallow()}; name the "
                "revision to compare with"
            )
        return base.split()[0]

    def base(self) -> tuple[Commit, str]:
        """The commit that the working tree is compared with by default, and why that one.

        It is where HEAD left the default branch.  On that branch it is HEAD, or the commit before
        where the working tree holds nothing else.
        """
        head = self.commit("HEAD") if tried(self.root, "rev-parse", "--verify", "HEAD") else None
        if head is None:
            raise RevisionError(f"{self.root}: the repository has no commit yet")
        default = self._default_branch()
        if default is not None:
            base = self.merge_base("HEAD", default)
            if base != head.hash:
                return self.commit(base), f"where HEAD left {default}"
        if not self.state().is_clean:
            return head, "HEAD"
        parents = self.parents(head.hash)
        if default is None or not parents:
            why = "there is no branch main or master" if default is None else "HEAD is the first"
            raise RevisionError(
                f"{self.root}: {why}, and nothing is uncommitted{self._shallow()}; name the "
                "revision to compare with"
            )
        return self.commit(parents[0]), "the commit before HEAD: nothing is uncommitted"

    def _default_branch(self) -> str | None:
        told = tried(self.root, "symbolic-ref", "--short", "--quiet", "refs/remotes/origin/HEAD")
        names = ("origin/main", "origin/master", "main", "master")
        for name in (told.strip() if told else "", *names):
            if name and tried(self.root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
                return name
        return None

    def state(self) -> State:
        """What is in the working tree besides HEAD."""
        entries = iter(git(self.root, "status", "--porcelain=v2", "-z").split("\0"))
        changed, untracked, submodules = 0, 0, []
        for entry in entries:
            kind = entry[:1]
            untracked += kind == "?"
            changed += kind in ("1", "2", "u") and bool(kind)
            if kind in ("1", "2") and entry.split(" ")[2].startswith("S"):
                submodules.append(entry.split(" ", 8 if kind == "1" else 9)[-1])
            if kind == "2":
                next(entries, None)  # the name before it was renamed
        return State(changed, untracked, tuple(submodules))

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """Files that git ignores, by their paths below the root; a folder ends with a slash."""
        listing = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory")
        return tuple(filter(None, git(self.root, *listing).split("\0")))

    def tree(self, hash_: str) -> Mapping[str, tuple[str, str]]:
        """(mode, object) of every file of a commit by its path; of a submodule its commit."""
        lines = filter(None, git(self.root, "ls-tree", "-r", "-z", hash_).split("\0"))
        files = {}
        for line in lines:
            head, _, path = line.partition("\t")
            mode, _, content = head.split(" ")
            files[path] = (mode, content)
        return files

    def tracked(self) -> frozenset[str]:
        """Paths of the files of the working tree that git knows, those of submodules too."""
        return frozenset(git(self.root, "ls-files", "--recurse-submodules", "-z").split("\0"))

    def touching(self, before: str, after: str, files: Sequence[str]) -> list[Commit]:
        """The commits after one up to another that change some of these files, last one first."""
        return self._commits([f"{before}..{after}"], files) if files else []

    def uncommitted(self, files: Sequence[str]) -> list[str]:
        """Those of these files whose content in the working tree is in no commit of HEAD."""
        if not files:
            return []
        listing = git(self.root, "diff", "--name-only", "--no-ext-diff", "-z", "HEAD", "--", *files)
        return list(filter(None, listing.split("\0")))

    def last_change(self, path: str) -> Commit | None:
        """The last commit of HEAD that changed a file; None where there is none."""
        commits = self._commits(["-1", "HEAD"], [path])
        return commits[0] if commits else None

    def added(self, path: str) -> Commit | None:
        """The commit that added a file, of all branches; None where there is none."""
        commits = self._commits(["--all", "--diff-filter=A", "-1"], [path])
        return commits[0] if commits else None

    def _unknown(self, revision: str) -> str:
        refs = ("refs/heads", "refs/remotes", "refs/tags")
        names = git(self.root, "for-each-ref", "--format=%(refname:short)", *refs).split("\n")
        close = difflib.get_close_matches(revision, filter(None, names), n=3, cutoff=0.5)
        listed = f"; did you mean {', '.join(close)}?" if close else ""
        return f"revision {revision!r}: {self.root} has no such commit{listed}{self._shallow()}"

    def _shallow(self) -> str:
        shallow = (tried(self.root, "rev-parse", "--is-shallow-repository") or "").strip() == "true"
        return " (this clone is shallow: `git fetch --unshallow` brings the rest)" * shallow


def repository_at(folder: str) -> Repository:
    """The repository whose working tree a folder is in.  Raises RevisionError."""
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    bare = tried(folder, "rev-parse", "--is-bare-repository")
    if bare is None:
        try:
            git(folder, "rev-parse", "--git-dir")
        except RevisionError as error:
            if "not a git repository" in str(error):
                raise RevisionError(f"{folder}: it is in no git repository") from None
            raise RevisionError(f"{folder}: {error}") from None
    if (bare or "").strip() == "true":
        raise RevisionError(f"{folder}: the repository is bare; make a clone of it, and run there")
    root = tried(folder, "rev-parse", "--show-toplevel")
    if root is None:
        raise RevisionError(f"{folder}: it is no working tree of a git repository")
    return Repository(os.path.realpath(root.rstrip("\n")))
