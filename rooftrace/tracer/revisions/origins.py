"""Where the two sides of a diff come from: revisions, options, versions, and who changed a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooftrace._plain import Plain
from rooftrace.tracer.revisions.repositories import Commit

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
        """What a column of this side is called; "" where nothing tells it from the other."""
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
            f"one of these, {len(self.skipped)} do not build and were skipped; where a history "
            "crosses the limit several times, this is one of the crossings"
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
        """What changed the files that ran, in words; "" where nothing did."""
        parts = [f"{commit}" for commit in self.touching[:_SHOWN]]
        parts += [f"{len(self.touching) - _SHOWN} more"] * (len(self.touching) > _SHOWN)
        files = ", ".join(self.uncommitted[:_SHOWN])
        files += " ..." if len(self.uncommitted) > _SHOWN else ""
        parts += [f"what is not committed in {files}"] * bool(files)
        return f"the files that ran were changed by {', '.join(parts)}" if parts else ""
