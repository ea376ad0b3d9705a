"""Origins of a diff: the revisions of its sides, commits that changed lines, and bisection."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooftrace._plain import Plain
from rooftrace.diffs.git.repositories import Commit, Repository

UNCOMMITTED = "not committed yet"


def wrote(
    repository: Repository, before: str, after: str | None, source: str
) -> Commit | str | None:
    """The commit after `before` that wrote the line "file.py:12" of `after` (None: the files).

    UNCOMMITTED for a line of the working tree that is in no commit; None for one that is older.
    """
    file, number = _place(source)
    if number is None:
        return None
    span = [f"^{before}"] if after is None else [f"{before}..{after}"]
    told = repository.tried("blame", "--porcelain", "-L", f"{number},{number}", *span, "--", file)
    if not told or "\nboundary\n" in told:
        return None
    hash_ = told.split(" ", 1)[0]
    return repository.commit(hash_) if hash_.strip("0") else UNCOMMITTED


def removed(
    repository: Repository, before: str, after: str | None, source: str
) -> Commit | str | None:
    """The commit up to `after` (None: the working tree) that took away a line of `before`.

    None for a line that is still there, or whose end git cannot tell.
    """
    file, number = _place(source)
    if number is None:
        return None
    line = f"{number},{number}"
    span = f"{before}..{after or 'HEAD'}"
    told = repository.tried("blame", "--reverse", "--porcelain", "-L", line, span, "--", file)
    if told:
        for text in told.splitlines():
            if text.startswith("previous "):  # in reverse: the first commit without the line
                return repository.commit(text.split(" ")[1])
        number, file = int(told.split(" ")[1]), _name_in(told, file)
    if after is None and _removed_here(repository, file, number):
        return UNCOMMITTED
    return None


def making(
    repository: Repository, before: str, after: str | None, files: Sequence[str], module: str
) -> str | None:
    """The line "file.py:12" of `after` that sets a module or parameter, and is not in `before`.

    None where no such line or several of the files have the last name of its path.
    """
    names = [name for name in module.split(".") if name.isidentifier()]
    ends = [before] if after is None else [before, after]
    options = ("-U0", "--no-ext-diff", "--no-prefix", *ends, "--", *files)
    told = repository.tried("diff", *options) if names and files else None
    lines, file, number = [], "", 0
    for text in (told or "").splitlines():
        if text.startswith("+++ "):
            file = text[4:]
        elif text.startswith("@@ "):
            number = int(text.split("+")[1].partition(" ")[0].partition(",")[0])
        elif text.startswith("+"):
            if re.search(rf"\b{names[-1]}\b[^=(]*=[^=]", text):
                lines.append(f"{file}:{number}")
            number += 1
    return lines[0] if len(lines) == 1 else None


def _removed_here(repository: Repository, file: str, number: int) -> bool:
    """Whether the working tree no longer has a line of HEAD."""
    told = repository.tried("diff", "-U0", "--no-ext-diff", "HEAD", "--", file) or ""
    for text in told.splitlines():
        if text.startswith("@@ -"):
            start, _, count = text.split(" ")[1][1:].partition(",")
            if int(start) <= number < int(start) + int(count or 1):
                return True
    return False


def _name_in(told: str, file: str) -> str:
    names = [t.partition(" ")[2] for t in told.splitlines() if t.startswith("filename ")]
    return names[0] if names else file


def _place(source: str) -> tuple[str, int | None]:
    """The file and the number of a line; no number for what is no line of a repository."""
    file, _, number = source.rpartition(":")
    if not file or not number.isdigit() or os.path.isabs(file):
        return file, None
    return file, int(number)


# -- bisecting -------------------------------------------------------------------------------------
# The first of many commits that breaks a condition, by trying few of them.


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a condition begins to hold, by the numbers of commits; -1 is the one before them."""

    good: int  # the last commit at which it is known not to hold
    bad: int  # the first commit at which it is known to hold
    untold: tuple[int, ...] = ()  # between the two: commits that cannot be tried


def first_bad(count: int, holds: Callable[[int], bool | None]) -> Crossing:
    """Search `count` commits, of which the last holds a condition, and what is before does not.

    holds: None for a commit that cannot be tried; others are then tried in its place.  Where the
    history crosses the condition several times, one of the crossings is returned.
    """
    good, bad = -1, count - 1
    untold: set[int] = set()
    skips = 0  # one after the other
    while left := [i for i in range(good + 1, bad) if i not in untold]:
        number = left[int(_spread(skips) * len(left))]
        told = holds(number)
        if told is None:
            untold.add(number)
            skips += 1
            continue
        skips = 0
        good, bad = (good, number) if told else (number, bad)
    return Crossing(good, bad, tuple(sorted(i for i in untold if good < i < bad)))


def _spread(number: int) -> float:
    """1/2, 1/4, 3/4, 1/8, 5/8 ...: places that leave a run of commits that do not build."""
    value, step = 0.0, 0.5
    number += 1
    while number:
        value += step * (number & 1)
        number >>= 1
        step /= 2
    return value


# -- origins ---------------------------------------------------------------------------------------
# Where the two sides of a diff come from: revisions, options, versions, and who changed a line.

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class SideOrigin(Plain):
    """Where one side of a diff comes from."""

    target: str  # as it was named; "" for an object
    commit: Commit | None = None  # what was checked out; for the working tree: its HEAD
    why: str = ""  # how the commit was chosen, where the user did not name it
    working_tree: str | None = None  # what differs from the commit; None for a checkout
    options: Mapping[str, str] = field(default_factory=dict)  # those of this side alone
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch, transformers, Python
    notes: Sequence[str] = ()  # what a reader has to know of the files it ran from

    @property
    def name(self) -> str:
        """The head of this side's column; "" if it equals the other side's."""
        if self.working_tree is not None:
            return "working tree"
        if self.commit is not None:
            return self.commit.short
        options = dict(self.options)
        release = self.versions.get("torch", "") if options.pop("python", "") else ""
        parts = [f"torch {release}"] * bool(release)
        return ", ".join(parts + [f"{name}={value}" for name, value in options.items()])

    def __str__(self) -> str:
        """The revision and the options, in words; "" for a side without either."""
        parts = []
        if self.working_tree is not None:
            parts.append(f"working tree on {self.commit}, {self.working_tree}")
        elif self.commit is not None:
            parts.append(f"{self.commit}{f' ({self.why})' if self.why else ''}")
        parts += [f"{name}={value}" for name, value in self.options.items()]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class LineChange(Plain):
    """The commit behind a line that costs more or less than before."""

    phase: str
    source: str  # "model.py:12", of the side after; of the side before for a line that is gone
    # "wrote"; "removed" for a line that is gone; "lacks" for one whose commit the side after lacks.
    kind: str
    commit: Commit | None  # None: not committed yet
    of: str = ""  # the line of the row, where `source` is the one that makes its module

    KEYS = "phase source kind commit of?"

    def __str__(self) -> str:
        who = "" if self.commit is None else f"by {self.commit.signed}"
        if self.kind == "removed":
            return f"{self.source}: taken out {who or 'and not committed yet'}"
        lacks = ", which the side after lacks" if self.kind == "lacks" else ""
        return f"{self.source}: written {who}{lacks}" if who else f"{self.source}: not committed"


@dataclass(frozen=True, kw_only=True)
class Bisection(Plain):
    """The first commit of a range at which a condition holds, and how it was looked for."""

    condition: str  # "time>5%", against the first revision of the range
    against: Commit
    first: Commit
    last_without: Commit  # the last commit before it at which the condition does not hold
    commits: int  # in the range
    traced: int  # of them, and of branches that were merged
    reused: int  # whose relevant files are those of a commit that was traced
    skipped: Sequence[tuple[Commit, str]] = ()  # those that do not build, with the reason
    untold: Sequence[Commit] = ()  # of them those that may be the first one as well
    merges: Sequence[Commit] = ()  # merges that brought it

    def sentences(self) -> list[str]:
        """The result in words."""
        lines = [f"{self.condition} against {self.against} first holds at {self.first.signed}"]
        lines += [f"it came with the merge {merge}" for merge in self.merges]
        if self.untold:
            listed = ", ".join(commit.short for commit in self.untold)
            lines.append(f"it may be one of these too, which do not build: {listed}")
        lines.append(
            f"of {self.commits} commits {self.traced} were traced, {self.reused} have the files of "
            f"one of these, {len(self.skipped)} do not build and were skipped"
        )
        if self.commits > 2:  # the least in which a cost rises, falls and rises
            lines.append(
                "where the cost goes up and down over the range, this is one of the rises: for a "
                f"later one begin the range at a commit after {self.first.short} without it, for "
                f"an earlier one end the range at a commit before {self.last_without.short} with it"
            )
        lines += [f"skipped {commit}: {reason}" for commit, reason in self.skipped]
        return lines

    @property
    def _skipped(self) -> list[dict[str, Any]]:
        return [{**commit.to_dict(), "reason": why} for commit, why in self.skipped]

    KEYS = (
        "condition against first last_without commits traced reused skipped=_skipped untold merges"
    )


@dataclass(frozen=True, kw_only=True)
class DiffOrigins(Plain):
    """Where both sides of a diff come from."""

    before: SideOrigin
    after: SideOrigin
    lines: Sequence[LineChange] = ()  # commits behind the first rows
    # Commits of the range that change a file which ran, the last one first, and such files with
    # changes that are in no commit.  A line may stay as it is, and what it is called with change.
    touching: Sequence[Commit] = ()
    uncommitted: Sequence[str] = ()
    bisection: Bisection | None = None

    KEYS = "before after versions touching uncommitted lines bisection"

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The commits behind the first rows, each once."""
        return tuple(dict.fromkeys(line.commit for line in self.lines if line.commit is not None))

    def versions(self) -> list[str]:
        """Libraries of which the sides have different releases: "torch 2.11.0 -> 2.13.0"."""
        before, after = self.before.versions, self.after.versions
        return [
            f"{name} {before[name]} -> {after[name]}"
            for name in before
            if name in after and before[name] != after[name]
        ]

    def touched(self) -> str:
        """The commits that changed the files that ran, in words; "" for none."""
        parts = [f"{commit}" for commit in self.touching[:_SHOWN]]
        parts += [f"{len(self.touching) - _SHOWN} more"] * (len(self.touching) > _SHOWN)
        files = ", ".join(self.uncommitted[:_SHOWN])
        files += " ..." if len(self.uncommitted) > _SHOWN else ""
        parts += [f"what is not committed in {files}"] * bool(files)
        return f"the files that ran were changed by {', '.join(parts)}" if parts else ""
