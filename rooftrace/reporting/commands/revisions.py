"""Sides of a diff at git revisions: checkouts, files read from elsewhere, line origins, and runs.

A side that runs other code than its revision would make every diff "no change".  So the files that
a process read are compared with those of the revision: other code is an error, other files a note.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from rooftrace._progress import tell
from rooftrace.costmodels.estimates import Estimate, estimate as estimate_graph
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.ops import own_rules
from rooftrace.diffs.costs import Diff, changes
from rooftrace.diffs.git import RevisionError, origins, repositories
from rooftrace.diffs.git.origins import Bisection, DiffOrigins, LineChange, SideOrigin
from rooftrace.diffs.git.repositories import Commit, Repository, repository_at
from rooftrace.errors import RequestError, TargetError, is_ours, naming
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import few, format_time
from rooftrace.reporting.commands.pricing import check_groups
from rooftrace.reporting.commands.requests import BASE, FILES, DiffSide, in_precisions, priced
from rooftrace.tracer import Job, names
from rooftrace.tracer.phases.apart import (
    Outcome,
    ProcessPlace,
    Reads,
    Traced,
    can_go_apart,
    run_apart,
    trace_each_apart,
)


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
        except RevisionError:  # the other side of a revision may be files in no repository
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
    checkout = stack.enter_context(repositories.checked_out(repository, commit.hash))
    if side.job.is_script:
        repositories.link_ignored(repository, checkout.root)
    place = ProcessPlace(
        side.python or sys.executable, checkout.root, repository.root, repository.ignored
    )
    notes = tuple(
        f"the submodule {path} is not in this clone at that revision: its files are missing"
        for path in checkout.missing
    )
    return Placed(side, place, replace(origin, commit=commit, notes=notes), repository)


def commit_of(repository: Repository, revision: str) -> tuple[Commit, str]:
    """The commit of a revision, and the reason for it where the user did not name it."""
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
    cwd = os.getcwd()
    top = where.partition(".")[0]
    local = any(os.path.exists(os.path.join(cwd, name)) for name in (top, f"{top}.py"))
    try:
        spec = None if local else importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    paths = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    folder = next((p for p in paths if os.path.exists(p) and "site-packages" not in p), cwd)
    folder = folder if os.path.isdir(folder) else os.path.dirname(folder)
    try:
        return repository_at(os.path.realpath(folder))
    except RevisionError:
        return repository_at(os.path.realpath(cwd))


# -- files that a side read ------------------------------------------------------------------------

_SOURCE_FOLDERS = ("", "src/", "lib/", "python/")
_MODULE_ENDS = (".py", "/__init__.py")
_POINTER = b"version https://git-lfs"


def checked(at: Placed, reads: Reads, graphs: Mapping[str, OpGraph]) -> SideOrigin:
    """The origin of a side with the versions that made it, and notes on the files that it read.

    Raises TargetError where code of the repository was read from elsewhere.
    """
    made = next(iter(graphs.values())).provenance if graphs else {}
    versions = {name: str(text) for name, text in made.get("versions", {}).items()}
    if "python" in made:
        versions["Python"] = str(made["python"])
    notes = [*at.origin.notes, *(notes_on(at, reads) if at.repository else ())]
    return replace(at.origin, versions=versions, notes=tuple(notes))


def notes_on(at: Placed, reads: Reads) -> list[str]:
    """Notes on files that a side read and that its revision does not have.  Raises TargetError."""
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
    package = "" if where.endswith(".py") else where.partition(".")[0]
    notes = []
    for name, file in reads.modules.items():
        inside = file.startswith(at.place.root + os.sep) and "site-packages" not in file
        paths = (f"{folder}{name}{end}" for folder in _SOURCE_FOLDERS for end in _MODULE_ENDS)
        there = [path for path in paths if path in tracked]
        if inside or not there:
            continue
        text = f"{name} was imported from {file}, and the repository has {there[0]}"
        if name == package:
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

_ROWS = 6
"""Rows of a phase whose commits are looked up: each takes a run of `git blame`."""


def origins_of(
    before: tuple[Placed, SideOrigin, Reads],
    after: tuple[Placed, SideOrigin, Reads],
    result: Diff,
    bisection: Bisection | None,
) -> DiffOrigins:
    """The origins of both sides, with the commits that explain the difference.

    Commits are looked up where both sides are of one repository, and the first is a commit.
    """
    made = DiffOrigins(before=before[1], after=after[1], bisection=bisection)
    repository, commit = after[0].repository, before[1].commit
    same = repository is not None and before[0].repository == repository
    if not same or repository is None or commit is None or before[1].working_tree is not None:
        return made
    files = sorted({*before[2].inside, *after[2].inside})
    end = after[1].commit if after[1].working_tree is None else None
    ends = (commit.hash, end.hash if end is not None else None)
    return replace(
        made,
        lines=_line_changes(repository, ends, result, files),
        touching=repository.touching(commit.hash, ends[1] or "HEAD", files),
        uncommitted=repository.uncommitted(files) if end is None else (),
    )


def _line_changes(
    repository: Repository, ends: tuple[str, str | None], result: Diff, files: Sequence[str]
) -> list[LineChange]:
    """The commits behind the first rows of each phase."""
    lines = []
    for phase in result.phases:
        for row in phase.rows[:_ROWS]:
            line = _line_change(repository, ends, phase.phase, row.before, row.after)
            if line is None and row.modules:
                line = _made_otherwise(repository, ends, files, phase.phase, row)
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
        ("wrote", after, origins.wrote),
        ("removed", before, origins.removed),
        ("lacks", before, origins.wrote),
    ):
        first, last = (ends[1] or "HEAD", ends[0]) if kind == "lacks" else ends
        commit = look(repository, first, last, source) if source else None
        if commit is not None and source is not None:
            made = commit if isinstance(commit, Commit) else None
            return LineChange(phase=phase, source=source, kind=kind, commit=made)
    return None


def _made_otherwise(
    repository: Repository,
    ends: tuple[str, str | None],
    files: Sequence[str],
    phase: str,
    row: changes.DiffRow,
) -> LineChange | None:
    """The commit that wrote the line which makes the module of a row."""
    source = origins.making(repository, *ends, files, row.modules[0])
    line = source and _line_change(repository, ends, phase, None, source)
    return replace(line, of=row.line or "") if line else None


# -- runs of sides ---------------------------------------------------------------------------------

EAGER = "eager"
"""The execution model that runs the ops which the code calls."""


@dataclass(frozen=True)
class Ran:
    """A side that ran: its estimates by phase, and their sources."""

    at: Placed
    estimates: Mapping[str, Estimate]
    eager: Mapping[str, Estimate]  # of the same step, with the ops that the code calls
    files: Mapping[str, str]  # digests of source files by path
    origin: SideOrigin
    reads: Reads = field(default_factory=Reads)


def run_sides(sides: Sequence[Placed]) -> list[Ran]:
    """Run both sides.  Raises TargetError for one that fails, with the costs of the other."""
    if any(at.place is not None for at in sides):
        return _run_placed(sides)
    jobs = [at.side.job for at in sides]
    ran = []
    for at, graphs_of_side in zip(sides, _makers(jobs), strict=True):
        # The rules in the code of one side do not hold for the other.
        with own_rules(), naming(_name(at)):
            ran.append(_priced(at, graphs_of_side()))
    return ran


def run_at(at: Placed) -> Ran | Failed:
    """Run one side; Failed where it does not build."""
    return _priced_apart(at, _outcomes([at])[0])


@dataclass(frozen=True)
class Failed:
    """A side that does not build."""

    error: Exception
    reads: Reads
    notes: Sequence[str] = ()

    @property
    def reason(self) -> str:
        """The first line of the error."""
        return str(self.error).partition("\n")[0]


def _name(at: Placed) -> str:
    return at.side.job.name if at.side.job.is_named else at.side.which


def _priced(at: Placed, made: Traced, reads: Reads | None = None) -> Ran:
    read = reads or Reads()
    origin = checked(at, read, made.graphs)
    check_groups(made.graphs.values, [at.side.model])
    plans = {p: Plan.each(graph, [at.side.model, EAGER]) for p, graph in made.graphs.items()}
    estimates, eager = (
        {phase: estimate_graph(each[number], at.side.chip) for phase, each in plans.items()}
        for number in range(2)
    )
    return Ran(at, estimates, eager, made.files, origin, read)


# -- sides in this process, or in one like it ------------------------------------------------------


def _makers(jobs: Sequence[Job]) -> list[Callable[[], Traced]]:
    """For each side a function that makes its graphs.  Code runs in separate processes, all at
    once, unless it brings cost rules, which are needed in this one."""
    code = [i for i, job in enumerate(jobs) if job.is_code]
    apart = dict(zip(code, trace_each_apart([jobs[i] for i in code]), strict=True))
    rules = any(made is not None and made.rules for made in apart.values())
    if rules or None in apart.values():
        apart = {}

    def with_rules(job: Job) -> Traced:
        try:
            return priced(job)
        except TargetError as error:
            raise TargetError(
                f"{error}\nThe code of the two brings cost rules, so both run in this process, and "
                "it cannot be run twice in one: put the rules into a file of their own (--rules)"
            ) from error

    return [
        partial(in_precisions, job, made)
        if (made := apart.get(i)) is not None
        else partial(with_rules if rules and i in code else priced, job)
        for i, job in enumerate(jobs)
    ]


# -- sides at a revision, or with another interpreter ----------------------------------------------


def _run_placed(sides: Sequence[Placed]) -> list[Ran]:
    """Run sides of which at least one runs from another folder."""
    outcomes = _outcomes(sides)
    results = [_priced_apart(at, outcome) for at, outcome in zip(sides, outcomes, strict=True)]
    failures = [(at, made) for at, made in zip(sides, results, strict=True)
                if isinstance(made, Failed)]  # fmt: skip
    if len(failures) == 1:
        at, failed = failures[0]
        others = [made for made in results if isinstance(made, Ran)]
        raise TargetError(f"{_does_not_build(at, failed)}\n{_builds(others[0])}") from failed.error
    if failures:
        first, second = (str(failed.error) for _, failed in failures)
        if first != second:
            raise TargetError("\n".join(_does_not_build(*failure) for failure in failures))
        notes = dict.fromkeys(note for at, failed in failures for note in _why(at, failed))
        raise TargetError("\n".join([f"neither side can be used: {first}", *notes]))
    return [made for made in results if isinstance(made, Ran)]


def _outcomes(sides: Sequence[Placed]) -> list[Outcome]:
    """The outcome of each side: from a separate process, or from this one if it is not code."""
    apart = []
    for at in sides:
        job = at.side.job
        if at.place is not None and not can_go_apart(job):
            raise RequestError(
                f"{at.side.which}: a side at a revision, or with another interpreter, runs in a "
                "process of its own, and phases or a loss of this process cannot go there"
            )
        if at.place is not None or (job.is_code and can_go_apart(job)):
            apart.append(at)
    made = run_apart([at.side.job for at in apart], [at.place or ProcessPlace() for at in apart])
    ready = {at.side.which: outcome for at, outcome in zip(apart, made, strict=True)}
    return [ready.get(at.side.which) or _outcome_here(at) for at in sides]


def _outcome_here(at: Placed) -> Outcome:
    try:
        with naming(_name(at)):
            return Outcome(priced(at.side.job))
    except (ValueError, LookupError, RuntimeError) as error:
        if not is_ours(error):
            raise
        return Outcome(None, error)


def _priced_apart(at: Placed, outcome: Outcome) -> Ran | Failed:
    if outcome.traced is None:
        assert outcome.error is not None
        return Failed(outcome.error, outcome.reads, pointers(at, outcome.reads))
    if outcome.traced.rules:
        raise TargetError(
            f"{at.label}: the code of the target brings cost rules, which have to hold for both "
            "sides: put them into a file of their own, and name it with --rules"
        )
    job, made = at.side.job, outcome.traced
    try:
        with naming(_name(at)):
            made = made if at.place is None and not job.is_code else in_precisions(job, made)
            return _priced(at, made, outcome.reads)
    except TargetError as error:
        return Failed(error, outcome.reads)


def _does_not_build(at: Placed, failed: Failed) -> str:
    """The message about a side that does not build, with possible reasons."""
    return "\n".join([f"{at.label}: {failed.error}", *_why(at, failed)])


def _why(at: Placed, failed: Failed) -> list[str]:
    """Possible reasons for a side that does not build."""
    if at.repository is None:
        return []
    added = _added_elsewhere(at) if at.origin.working_tree is None else []
    return [*at.origin.notes, *failed.notes, *added]


def _added_elsewhere(at: Placed) -> list[str]:
    """The commit that added the file of a target that a revision does not have."""
    assert at.repository is not None and at.origin.commit is not None
    name = at.side.job.name
    where = names.where_of(name) if at.side.job.is_code else name
    path = os.path.relpath(os.path.realpath(where), at.repository.root)
    files = at.repository.tree(at.origin.commit.hash)
    if path.startswith("..") or path in files or (at.side.job.is_code and where[-3:] != ".py"):
        return []
    commit = at.repository.added(path)
    return [f"{path} is not in that revision; {commit.signed} adds it"] if commit else []


def _builds(ran: Ran) -> str:
    """The total of the side that builds."""
    phases = ", ".join(
        f"{phase} {format_time(estimate.t_est)}" for phase, estimate in ran.estimates.items()
    )
    return f"{ran.at.label}: it builds ({phases})"
