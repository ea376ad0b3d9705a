"""Differences of two targets, runs or checkpoints, and the commit of a range that brought one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.estimates import Comparison, compare as compare_counts
from rooftrace.costmodels.ops import own_rules
from rooftrace.costmodels.rewrites import check_precisions
from rooftrace.diffs.costs import Diff, compare_sources, diff_estimates
from rooftrace.diffs.git import RevisionError, first_bad
from rooftrace.diffs.git.origins import Bisection, SideOrigin
from rooftrace.diffs.git.repositories import GITLINK, Commit, Repository
from rooftrace.diffs.runs import RunDiff, RunQuestion, diff_runs, is_measured
from rooftrace.errors import RequestError, TargetError, UnusedError, naming
from rooftrace.graph import OpGraph
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.pricing import CHANGES, PLAIN, PricingOptions
from rooftrace.reporting.commands.requests import FILES, DiffSide, in_precisions, priced, sides_of
from rooftrace.reporting.commands.revisions import (
    EAGER,
    Failed,
    Ran,
    at_commit,
    commit_of,
    origins_of,
    placed,
    repository_of,
    run_at,
    run_sides,
)
from rooftrace.tracer import Job
from rooftrace.tracer.names import are_weights, configs, is_checkpoint
from rooftrace.tracer.phases.apart import trace_each_apart
from rooftrace.weights import ParameterDiff, compare_parameters
from rooftrace.weights.inventory import ModelInfo

if TYPE_CHECKING:
    from rooftrace.weights import CheckpointDiff


@dataclass(frozen=True)
class _TracedCommit:
    """The result of a commit, and the files that decided it."""

    names: Mapping[str, str]  # modes of all files by path
    read: Mapping[str, str]  # contents of the files that were read, and commits of submodules
    result: Ran | Failed

    def holds_for(self, tree: Mapping[str, tuple[str, str]]) -> bool:
        """Whether a commit with this tree has the same result.

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
    """The state of a search: the commits that were traced so far."""

    side: DiffSide
    repository: Repository
    condition: str
    traced: list[_TracedCommit] = field(default_factory=list)
    results: dict[str, Ran | Failed] = field(default_factory=dict)  # by hash
    reused: int = 0
    skipped: dict[Commit, str] = field(default_factory=dict)
    commits: int = 0

    def result(self, commit: Commit) -> Ran | Failed:
        """The result of a commit, from a trace of it or of one with equal files."""
        if commit.hash in self.results:
            return self.results[commit.hash]
        tree = self.repository.tree(commit.hash)
        result = next((old.result for old in self.traced if old.holds_for(tree)), None)
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
            self.traced.append(_TracedCommit(names, read, result))
        self.results[commit.hash] = result
        return result

    def ran(self, commit: Commit) -> Ran:
        """The run of a commit.  Raises TargetError where it does not build."""
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


def bisect_range(before: DiffSide, after: DiffSide, condition: str) -> tuple[Ran, Ran, Bisection]:
    """The last commit without a condition, the first with it, and the record of the search.

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
    bisection = Bisection(
        condition=search.condition,
        against=start,
        first=first,
        last_without=last,
        commits=search.commits,
        traced=len(search.traced) - 1,  # without the first, which is outside of the range
        reused=search.reused,
        skipped=tuple(search.skipped.items()),
        untold=tuple(untold),
        merges=tuple(merges),
    )
    return _as(search, last, "before"), _as(search, first, "after"), bisection


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


# -- measured runs ---------------------------------------------------------------------------------

Graphs = Mapping[str, OpGraph]
_SIZES = "a measured run is what it is; this is for what --target names (in Python: graphs=)"


def diff_measured(
    before: Any,
    after: Any,
    args: Sequence[Any] = (),
    *,
    graphs: Any = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> RunDiff:
    """The changes from one measured run to another; see `rooftrace.diff`.

    graphs: of the runs: a graph, graphs by phase, a module or a target, or two of them, one for
    each side; targets at the sizes in `kwargs`.  Raises RequestError where one side alone is
    measured.
    """
    for one_side, other in ((before, after), (after, before)):
        if not is_measured(one_side):
            if isinstance(one_side, (str, os.PathLike)) and not _may_be_target(one_side):
                raise RequestError(f"{_shown(one_side)}: there is no such file")
            raise RequestError(
                f"{_shown(other)} is measured and {_shown(one_side)} is not: give two measured "
                "runs, or two graphs; `rooftrace validate` sets a measurement beside what is "
                f"predicted: rooftrace validate {_shown(other)} --target {_shown(one_side)}"
            )
    if args:
        raise RequestError(f"diff of two measured runs: nothing takes the argument {args[0]!r:.60}")
    sources = _two(graphs)
    pricing, sizes = PricingOptions.parted(kwargs)
    if sources is None and sizes.keys() - {"phases"}:
        name = min(sizes.keys() - {"phases"})
        raise UnusedError(name, f"{sizes[name]!r:.60}", _SIZES)
    changed = [name for name in CHANGES if getattr(pricing, name) != getattr(PLAIN, name)]
    if changed and pricing.execution is None:
        raise RequestError(
            f"{changed[0]} (--{changed[0].replace('_', '-')}): it changes an execution model; say "
            "with --execution how the runs ran"
        )
    models, chips = conditions_of(diff_measured, pricing)
    with telling(progress):
        made = (None, None) if sources is None else _made(sources, sizes)
        question = RunQuestion(
            graphs=made,
            chip=chips[0] if pricing.chip is not None or pricing.system is not None else None,
            execution=None if pricing.execution is None else models[0],
            phases=sizes.get("phases"),
            names=names,
            tell=tell,
        )
        return diff_runs(before, after, question)


def _may_be_target(source: str | os.PathLike[str]) -> bool:
    """Whether a name is a file, or may name code or a config."""
    return os.path.exists(source) or ":" in os.fspath(source) or os.fspath(source) in configs()


def _shown(source: Any) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"{source!r:.60}"


def _two(graphs: Any) -> tuple[Source, Source] | None:
    """The graphs or targets of each side; None without any."""
    if graphs is None:
        return None
    if not isinstance(graphs, (tuple, list)):
        return graphs, graphs
    if len(graphs) not in (1, 2):
        raise RequestError(f"graphs: {len(graphs)} of them: expected one, or one for each side")
    return graphs[0], graphs[-1]


def _made(sources: tuple[Source, Source], kwargs: Mapping[str, Any]) -> tuple[Graphs, Graphs]:
    """The graphs of both sides by phase; code runs in a separate process, under its rules."""
    distinct = sources[:1] if sources[0] is sources[1] or sources[0] == sources[1] else sources
    jobs = [Job.of(diff_measured, source, (), kwargs) for source in distinct]
    for job in jobs:
        check_precisions(*job.precisions)
    code = [job for job in jobs if job.is_code]
    apart = iter(trace_each_apart(code))
    made: list[Graphs] = []
    for job in jobs:
        traced = next(apart) if job.is_code else None
        with own_rules(), naming(job.name):
            made.append((priced(job) if traced is None else in_precisions(job, traced)).graphs)
    return made[0], made[-1]


# -- differences -----------------------------------------------------------------------------------


def diff(
    first: Source,
    second: Source | None = None,
    /,
    *args: Any,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    git: str | Sequence[str] | bool | None = None,
    bisect: str | None = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Diff | RunDiff | CheckpointDiff | ParameterDiff:
    """The changes in cost from `first` to `second`; in time of measured runs, weights of files.

    Each is a module (called with the same arguments), a graph, graphs by phase, a saved graph or a
    target.  The code of a target runs from its files in a separate process.  Sizes and
    precisions, as for `report`, hold for both sides; if one is a graph, for the other side only.

    before, after: options of one side by name: sizes, precisions, chip, execution, knobs, rewrites,
    tf32, optimizer, assume, torch, python (another interpreter), git (a revision).  With these, or
    with git, one target is enough.  git: "main" compares that revision with the working tree,
    ("v1", "v2") two revisions, True where HEAD left the default branch with the working tree.
    bisect: "time>5%" finds the first commit of that range at which it holds, and returns its diff.
    names: titles of the two sides.

    Measured runs are traces of torch.profiler, run files and Runs; of one alone the result says
    where its time goes.  graphs= says what ran, to
    predict the difference: a graph, a target or a module, or two of them, one for each side.

    Checkpoints (safetensors, torch.save, their indexes and folders) and inventories take names.

    Raises RequestError for an argument that no side takes, RevisionError for a revision that cannot
    be used, TargetError for a side that does not build.
    """
    if names is not None and (isinstance(names, str) or len(names) != 2):
        raise RequestError(f"names={names!r:.60}: expected two, for example ('main', 'branch')")
    ours = {"before": before, "after": after, "git": git, "bisect": bisect}
    if has_no_cost(first, second):
        return diff_checkpoints(first, second, args, {**ours, **kwargs}, names, progress)
    if is_measured(first) or is_measured(second):
        _check_measured(**ours)
        # One alone is set beside itself: its view says where its time goes.
        other = first if second is None else second
        return diff_measured(first, other, args, names=names, progress=progress, **kwargs)
    options = ({} if before is None else before, {} if after is None else after)
    sides = sides_of(diff, (first, second), args, kwargs, options, git)
    with telling(progress):
        if bisect is not None:
            Diff.limits([bisect], "--bisect")
            return _difference(*bisect_range(*sides, bisect), names=names)
        with placed(sides) as places:
            made, other = run_sides(places)
            return _difference(made, other, names=names)


def _check_measured(**ours: Any) -> None:
    """Raise RequestError for arguments that a measured run does not take."""
    for name, value in ours.items():
        if value is not None:
            raise UnusedError(name, f"{value!r:.60}", "a measured run is what it is; leave it out")


def _difference(
    before: Ran,
    after: Ran,
    bisection: Bisection | None = None,
    *,
    names: tuple[str, str] | None,
) -> Diff:
    """The diff of two sides that ran, with where they come from."""
    both = all(ran.at.side.model.name == EAGER for ran in (before, after))
    result = diff_estimates(
        before.estimates,
        after.estimates,
        names or _names(before, after),
        None if both else (before.eager, after.eager),
    )
    sources = compare_sources(before.files, after.files)
    first, second = ((ran.at, ran.origin, ran.reads) for ran in (before, after))
    origins = origins_of(first, second, result, bisection)
    steps = {
        f"{side}: {name}, {phase}": estimate
        for side, name, ran in zip(("before", "after"), result.names, (before, after), strict=True)
        for phase, estimate in ran.estimates.items()
    }
    return replace(result, sources=sources, origins=origins, steps=steps)


def _names(before: Ran, after: Ran) -> tuple[str, str]:
    """The names of the sides: their targets, else their differences."""
    sides = [(ran, ran.at.side.job) for ran in (before, after)]
    usual = [job.name if job.is_named else ran.at.side.which for ran, job in sides]
    (_, first), (_, second) = sides
    same = first.source is second.source or usual[0] == usual[1]
    if same or before.at.repository is not None or after.at.repository is not None:
        usual = [ran.origin.name or ran.at.side.which for ran in (before, after)]
    return usual[0], usual[1]


def compare(
    model: Source,
    *args: Any,
    peers: Sequence[str] = ("flopcounter", "fvcore"),
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> list[Comparison]:
    """Our matrix FLOPs and those of other counters, with every difference by module and op.

    model: a module, called with these arguments, or a target (a string or path) at batch, seq, kv
    and inputs.  peers: flopcounter (torch.utils.flop_counter) and fvcore.  phases: by default
    forward and training; for a target those that fit the model.  A module with real weights runs
    on them; afterwards its tensors hold what they held, and random numbers go on as before.

    Raises RequestError for an unknown
    peer, for a graph (no counter can run it), and for an argument that neither the model nor
    rooftrace takes; TargetError and TraceError as `trace` does.
    """
    from rooftrace.tracer.phases import count_phases

    job = Job.of(compare, model, args, kwargs)
    if job.is_graph or job.is_step:
        raise RequestError(
            "other counters have to run the module itself: give the module or the target that it "
            "was traced from"
        )
    job.refuse(job.precisions._fields, "FLOPs do not depend on it; leave it out")
    with telling(progress):
        return [compare_counts(graph, peer) for graph, peer in count_phases(job, peers)]


# -- weights ---------------------------------------------------------------------------------------


def has_no_cost(before: Any, after: Any) -> bool:
    """Whether two sources have weights to compare, and no step: checkpoints or inventories."""
    infos = [isinstance(source, ModelInfo) for source in (before, after)]
    return any(infos) or are_weights(before, after)


def diff_checkpoints(
    before: Any,
    after: Any,
    args: Sequence[Any] = (),
    named: Mapping[str, Any] | None = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> CheckpointDiff | ParameterDiff:
    """The changes in the values and names of two checkpoints, or in the parameters of two models.

    Each side is a file of safetensors or torch.save, the index.json of a sharded one, a folder with
    one, or both are inventories.  args, named: other arguments of the call: any that is not None is
    refused.  Raises RequestError for that and for two sides of different kinds; CheckpointError;
    OSError.
    """
    unused = ["arguments of a call"] if args else []
    unused += [name for name, value in (named or {}).items() if value is not None]
    if isinstance(before, ModelInfo) and isinstance(after, ModelInfo):
        _refuse(unused, "an inventory has parameters, and no step that is run")
        return compare_parameters(before, after, names)
    if not (is_checkpoint(before) and is_checkpoint(after)):
        raise RequestError(
            f"diff: {_said(before)} and {_said(after)} are of two kinds; expected two "
            "checkpoints, two inventories, or two sources with a step (targets, modules, graphs)"
        )
    _refuse(
        unused,
        "a checkpoint has weights, and no step that is run; name its config.json to compare costs",
    )
    from rooftrace.weights import compare_checkpoints

    with telling(progress):
        return compare_checkpoints(before, after, names)


def _said(side: Any) -> str:
    if isinstance(side, (str, os.PathLike)):
        return repr(os.fspath(side))
    return repr(side) if isinstance(side, ModelInfo) else f"a {type(side).__name__}"


def _refuse(unused: Sequence[str], reason: str) -> None:
    if unused:
        raise RequestError(f"{', '.join(unused)}: {reason}")
