"""Sides of a diff at revisions: their checkouts, what they read from elsewhere, who changed a line.

A side that runs other code than its revision has would make every diff "no change".  So what a
process read is compared with what the revision has: code from elsewhere is an error, the rest a
note.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from rooftrace._progress import tell
from rooftrace.costmodels.findings.diffs import Diff
from rooftrace.errors import TargetError
from rooftrace.hardware.units import few
from rooftrace.reporting.sides import BASE, FILES, DiffSide
from rooftrace.tracer.asking import names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.revisions import RevisionError, authorship, checkouts
from rooftrace.tracer.revisions.origins import Bisection, DiffOrigins, LineChange, SideOrigin
from rooftrace.tracer.revisions.repositories import Commit, Repository, repository_at
from rooftrace.tracer.sources.apart import Reads
from rooftrace.tracer.sources.places import ProcessPlace


@dataclass(frozen=True)
class Placed:
    """A side with the place where it runs."""

    side: DiffSide
    place: ProcessPlace | None  # None: this process, or one like it
    origin: SideOrigin
    repository: Repository | None = None

    @property
    def label(self) -> str:
        """ "before, a1b2c3d 'Add a norm'"."""
        text = str(self.origin)
        return f"{self.side.which}, {text}" if text else self.side.which


@contextmanager
def placed(sides: Sequence[DiffSide]) -> Iterator[list[Placed]]:
    """Both sides with the places where they run; checkouts are gone afterwards."""
    with ExitStack() as stack:
        yield [_placed(side, stack) for side in sides]


def _placed(side: DiffSide, stack: ExitStack) -> Placed:
    target = side.job.name if side.job.is_named else ""
    origin = SideOrigin(target=target, options=side.options)
    plain = Placed(side, None if side.python is None else ProcessPlace(side.python), origin)
    if side.revision is None:
        return plain
    if side.revision == FILES:
        try:
            return _of_files(side, repository_of(target), origin)
        except RevisionError:  # beside a revision: files that are in no repository
            return plain
    repository = repository_of(target)
    commit, why = commit_of(repository, side.revision)
    return at_commit(side, repository, replace(origin, why=why), commit, stack)


def _of_files(side: DiffSide, repository: Repository, origin: SideOrigin) -> Placed:
    place = ProcessPlace(side.python or sys.executable, repository.root)
    state = str(repository.state())
    origin = replace(origin, commit=repository.commit("HEAD"), working_tree=state)
    return Placed(side, place, origin, repository)


def at_commit(
    side: DiffSide, repository: Repository, origin: SideOrigin, commit: Commit, stack: ExitStack
) -> Placed:
    """A side at a commit, whose checkout lives as long as the stack."""
    tell(f"checking out {commit}")
    checkout = stack.enter_context(checkouts.checked_out(repository, commit.hash))
    if side.job.is_script:
        checkouts.link_ignored(repository, checkout.root)
    place = ProcessPlace(
        side.python or sys.executable, checkout.root, repository.root, repository.ignored
    )
    notes = tuple(
        f"the submodule {path} is not in this clone at that revision: its files are missing"
        for path in checkout.missing
    )
    return Placed(side, place, replace(origin, commit=commit, notes=notes), repository)


def commit_of(repository: Repository, revision: str) -> tuple[Commit, str]:
    """The commit of a revision, and why that one where the user did not name it."""
    if revision == BASE:
        return repository.base()
    before, dots, after = revision.partition("...")
    if dots:
        hash_ = repository.merge_base(repository.commit(before).hash, repository.commit(after).hash)
        return repository.commit(hash_), f"the last commit in common of {before} and {after}"
    commit = repository.commit(revision)
    return commit, "" if commit.hash.startswith(revision) else revision


def repository_of(target: str) -> Repository:
    """The repository of a target: of its file, or of the package that its name leads to."""
    if not names.names_code(target):
        return repository_at(os.path.dirname(os.path.realpath(target)))
    where = names.where_of(target)
    if where.endswith(".py"):
        return repository_at(os.path.dirname(os.path.realpath(where)))
    here = os.getcwd()
    top = where.partition(".")[0]
    beside = any(os.path.exists(os.path.join(here, name)) for name in (top, f"{top}.py"))
    try:
        spec = None if beside else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    folder = next((p for p in places if os.path.exists(p) and "site-packages" not in p), here)
    folder = folder if os.path.isdir(folder) else os.path.dirname(folder)
    try:
        return repository_at(os.path.realpath(folder))
    except RevisionError:
        return repository_at(os.path.realpath(here))


# -- what a side read ------------------------------------------------------------------------------

_SOURCE_FOLDERS = ("", "src/", "lib/", "python/")
_POINTER = b"version https://git-lfs"


def checked(at: Placed, reads: Reads, graphs: Mapping[str, OpGraph]) -> SideOrigin:
    """The origin of a side with the versions that made it, and notes on what it read.

    Raises TargetError where code of the repository was read from elsewhere.
    """
    made = next(iter(graphs.values())).provenance if graphs else {}
    versions = {name: str(text) for name, text in made.get("versions", {}).items()}
    if "python" in made:
        versions["Python"] = str(made["python"])
    notes = [*at.origin.notes, *(notes_on(at, reads) if at.repository else ())]
    return replace(at.origin, versions=versions, notes=tuple(notes))


def notes_on(at: Placed, reads: Reads) -> list[str]:
    """What a reader has to know of the files that a side read.  Raises TargetError."""
    assert at.repository is not None and at.place is not None and at.origin.commit is not None
    checkout = at.origin.working_tree is None
    tracked = at.repository.tracked()
    if checkout:
        tracked |= at.repository.tree(at.origin.commit.hash).keys()
    notes = _of_elsewhere(at, reads, tracked)
    wrong = [path for path in reads.outside if path in tracked]
    code = [path for path in wrong if path.endswith(".py")]
    if code:
        raise TargetError(
            f"it ran {few(code, 4)} of the working tree and not of the revision: the "
            "code names that place by an absolute path"
        )
    if wrong:
        notes.append(f"read from the working tree, by an absolute path: {few(wrong, 4)}")
    built = [path for path in reads.outside if path not in tracked]
    if built:
        notes.append(f"in no commit, so read from the working tree: {few(built, 4)}")
    if not checkout:
        new = [p for p in reads.inside if p not in tracked and not _is_ignored(at.repository, p)]
        if new:
            notes.append(f"untracked: {few(new, 4)}")
    return [*notes, *pointers(at, reads)]


def pointers(at: Placed, reads: Reads) -> list[str]:
    """A note on the files that a side read whose content is not in this clone."""
    root = "" if at.place is None else at.place.root
    paths = [path for path in reads.inside if _is_pointer(os.path.join(root, path))]
    note = f"only pointers of Git LFS, without their content: {few(paths, 4)}"
    return [note] if paths else []


def _of_elsewhere(at: Placed, reads: Reads, tracked: frozenset[str]) -> list[str]:
    """Notes on modules that the repository has and that an installed copy hides."""
    assert at.place is not None
    where = names.where_of(at.side.job.name)
    own = "" if where.endswith(".py") else where.partition(".")[0]
    notes = []
    for name, file in reads.modules.items():
        inside = file.startswith(at.place.root + os.sep) and "site-packages" not in file
        beside = (f"{folder}{name}" for folder in _SOURCE_FOLDERS)
        there = [p for b in beside for p in (f"{b}.py", f"{b}/__init__.py") if p in tracked]
        if inside or not there:
            continue
        text = f"{name} was imported from {file}, and the repository has {there[0]}"
        if name == own:
            raise TargetError(
                f"{text}: so both sides would run the same code; install it with "
                "`pip install -e .`, or put the folder that holds it on PYTHONPATH"
            )
        notes.append(text)
    return notes


def _is_ignored(repository: Repository, path: str) -> bool:
    folders = tuple(entry for entry in repository.ignored if entry.endswith("/"))
    return path in repository.ignored or path.startswith(folders)


def _is_pointer(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


# -- who changed a line ----------------------------------------------------------------------------

_ROWS = 3
"""Of how many rows of a phase the commit is looked up: each takes a run of `git blame`."""


def origins_of(
    before: tuple[Placed, SideOrigin, Reads],
    after: tuple[Placed, SideOrigin, Reads],
    result: Diff,
    bisection: Bisection | None,
) -> DiffOrigins:
    """Where both sides come from, with the commits that explain the difference.

    Commits are looked up where both sides are of one repository, and the first is a commit.
    """
    origins = DiffOrigins(before=before[1], after=after[1], bisection=bisection)
    repository, commit = after[0].repository, before[1].commit
    same = repository is not None and before[0].repository == repository
    if not same or repository is None or commit is None or before[1].working_tree is not None:
        return origins
    files = sorted({*before[2].inside, *after[2].inside})
    end = after[1].commit if after[1].working_tree is None else None
    ends = (commit.hash, end.hash if end is not None else None)
    return replace(
        origins,
        lines=_line_changes(repository, ends, result),
        touching=repository.touching(commit.hash, ends[1] or "HEAD", files),
        uncommitted=repository.uncommitted(files) if end is None else (),
    )


def _line_changes(
    repository: Repository, ends: tuple[str, str | None], result: Diff
) -> list[LineChange]:
    """The commits behind the first rows of each phase."""
    lines = []
    for phase in result.phases:
        for row in phase.rows[:_ROWS]:
            line = _line_change(repository, ends, phase.phase, row.before, row.after)
            if line is not None and line not in lines:
                lines.append(line)
    return lines


def _line_change(
    repository: Repository,
    ends: tuple[str, str | None],
    phase: str,
    before: str | None,
    after: str | None,
) -> LineChange | None:
    """The commit that wrote the line of a row; else the one that took its old line away."""
    for kind, source, look in (
        ("wrote", after, authorship.wrote),
        ("removed", before, authorship.removed),
        ("lacks", before, _written_apart),
    ):
        commit = look(repository, *ends, source) if source else None
        if commit is not None and source is not None:
            known = commit if isinstance(commit, Commit) else None
            return LineChange(phase=phase, source=source, kind=kind, commit=known)
    return None


def _written_apart(
    repository: Repository, before: str, after: str | None, source: str
) -> Commit | str | None:
    """The commit that wrote a line of `before` and that `after` does not have."""
    return authorship.wrote(repository, after or "HEAD", before, source)
