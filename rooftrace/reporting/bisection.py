"""Finds the commit of a range from which a condition holds, by tracing few of its commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from rooftrace._progress import tell
from rooftrace.costmodels.findings.diffs import diff_estimates
from rooftrace.errors import RequestError, TargetError
from rooftrace.reporting.revisions import at_commit, commit_of, repository_of
from rooftrace.reporting.sideruns import Failed, Ran, run_at
from rooftrace.reporting.sides import FILES, DiffSide
from rooftrace.tracer.revisions import RevisionError, first_bad
from rooftrace.tracer.revisions.origins import Bisection, SideOrigin
from rooftrace.tracer.revisions.repositories import GITLINK, Commit, Repository


@dataclass(frozen=True)
class _Traced:
    """What became of a commit, and the files that decided it."""

    names: Mapping[str, str]  # modes of all files by path
    read: Mapping[str, str]  # contents of the files that were read, and commits of submodules
    result: Ran | Failed

    def holds_for(self, tree: Mapping[str, tuple[str, str]]) -> bool:
        """Whether a commit with this tree gives what this one gave.

        A run depends on the files it reads.  It can read others only after one of these changed,
        or after a file came, went or changed its mode.
        """
        if not self.read or len(tree) != len(self.names):
            return False
        return all(self.names.get(path) == mode for path, (mode, _) in tree.items()) and all(
            tree[path][1] == content for path, content in self.read.items()
        )


@dataclass
class _Search:
    """The state of a search: what was traced so far."""

    side: DiffSide
    repository: Repository
    condition: str
    known: list[_Traced] = field(default_factory=list)
    results: dict[str, Ran | Failed] = field(default_factory=dict)  # by hash
    reused: int = 0
    skipped: dict[Commit, str] = field(default_factory=dict)
    commits: int = 0

    def result(self, commit: Commit) -> Ran | Failed:
        """What a commit gives, from a trace of it or of one with equal files."""
        if commit.hash in self.results:
            return self.results[commit.hash]
        tree = self.repository.tree(commit.hash)
        result = next((old.result for old in self.known if old.holds_for(tree)), None)
        if result is not None:
            self.reused += 1
        else:
            tell(f"tracing {commit}")
            with ExitStack() as stack:
                origin = SideOrigin(target=self.side.job.name, options=self.side.options)
                result = run_at(at_commit(self.side, self.repository, origin, commit, stack))
            read = {path: tree[path][1] for path in result.reads.inside if path in tree}
            if read:
                read |= {path: h for path, (mode, h) in tree.items() if mode == GITLINK}
            names = {path: mode for path, (mode, _) in tree.items()}
            self.known.append(_Traced(names, read, result))
        self.results[commit.hash] = result
        return result

    def ran(self, commit: Commit) -> Ran:
        """What a commit gives.  Raises TargetError where it does not build."""
        result = self.result(commit)
        if isinstance(result, Failed):
            raise TargetError(f"{commit}: {result.error}")
        return result

    def holds(self, against: Commit, commit: Commit) -> bool | None:
        """Whether the condition holds at a commit; None where that does not build."""
        result = self.result(commit)
        if isinstance(result, Failed):
            self.skipped[commit] = result.reason
            return None
        change = diff_estimates(self.ran(against).estimates, result.estimates)
        return bool(change.violations([self.condition]))

    def holding(self, against: Commit, commits: Sequence[Commit]) -> Callable[[int], bool | None]:
        """Whether the condition holds at a commit, by its number among these."""
        return lambda number: self.holds(against, commits[number])


def bisect(before: DiffSide, after: DiffSide, condition: str) -> tuple[Ran, Ran, Bisection]:
    """The last commit without a condition, the first with it, and how they were found.

    Raises RequestError for sides that differ in more than their revisions, and RevisionError for a
    range over which the condition does not hold.
    """
    if before.revision is None or after.revision is None:
        raise RequestError(
            f"bisect {condition!r}: it looks through revisions; name a range (git=('v1', 'main'); "
            "--git v1 main)"
        )
    same = before.job.source == after.job.source and before.options == after.options
    if not same or before.revision == FILES:
        raise RequestError(
            f"bisect {condition!r}: expected one target at two revisions, with the same options"
        )
    repository = repository_of(after.job.name)
    start = commit_of(repository, before.revision)[0]
    files = after.revision == FILES
    end = repository.commit("HEAD") if files else commit_of(repository, after.revision)[0]
    if not repository.is_ancestor(start.hash, end.hash):
        raise RevisionError(
            f"{start} is not part of the history of {end}: bisect from their last common commit, "
            f"git='{start.short}...{end.short}'"
        )
    search = _Search(after, repository, condition)
    search.ran(start)
    search.ran(end)  # both have to build
    if not search.holds(start, end):
        dirty = files and not repository.state().is_clean
        raise RevisionError(
            f"{condition!r} does not hold from {start} to {end}: there is nothing to find"
            + "; what is not committed yet is not looked at (diff it against HEAD)" * dirty
        )
    return _crossing(search, start, repository.commits(start.hash, end.hash))


def _crossing(
    search: _Search, start: Commit, commits: Sequence[Commit]
) -> tuple[Ran, Ran, Bisection]:
    """Search a range by first parents, then the branches of a merge that is found."""
    last, merges = start, []
    untold: Sequence[Commit] = ()
    while True:
        search.commits += len(commits)
        crossing = first_bad(len(commits), search.holding(start, commits))
        last = commits[crossing.good] if crossing.good >= 0 else last
        first = commits[crossing.bad]
        untold = [commits[number] for number in crossing.untold]
        branch = _branch(search, start, first)
        if branch is None:
            break
        merges.append(first)
        last, commits = branch
    told = Bisection(
        condition=search.condition,
        against=start,
        first=first,
        last_without=last,
        commits=search.commits,
        traced=len(search.known) - 1,  # without the first, which is outside of the range
        reused=search.reused,
        skipped=tuple(search.skipped.items()),
        untold=tuple(untold),
        merges=tuple(merges),
    )
    return _as(search, last, "before"), _as(search, first, "after"), told


def _branch(search: _Search, start: Commit, merge: Commit) -> tuple[Commit, list[Commit]] | None:
    """For a merge of a branch that brought the condition: where it left, and its commits."""
    repository = search.repository
    main, *others = repository.parents(merge.hash)
    for other in others:
        base = repository.commit(repository.merge_base(main, other))
        commits = repository.commits(base.hash, other)
        if commits and search.holds(start, commits[-1]) and search.holds(start, base) is False:
            return base, commits
    return None


def _as(search: _Search, commit: Commit, which: str) -> Ran:
    """The run of a commit as one side; its trace may be of a commit with equal files."""
    ran = search.ran(commit)
    origin = replace(ran.origin, commit=commit)
    at = replace(ran.at, origin=origin, side=replace(ran.at.side, which=which))
    return replace(ran, at=at, origin=origin)
