"""What a change costs, or does to weights, and what other counters say of the same step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace._progress import telling
from rooftrace.costmodels.findings.counters import Comparison, compare as compare_counts
from rooftrace.costmodels.findings.diffs import Diff, compare_sources, diff_estimates
from rooftrace.errors import RequestError, UnusedError
from rooftrace.measured.rundiffs import is_measured
from rooftrace.reporting.bisection import bisect as bisect_range
from rooftrace.reporting.estimates import Source
from rooftrace.reporting.revisions import origins_of, placed
from rooftrace.reporting.sideruns import EAGER, Ran, run_sides
from rooftrace.reporting.sides import sides_of
from rooftrace.tracer.asking import Job
from rooftrace.tracer.inventory import ParameterDiff, compare_parameters
from rooftrace.tracer.inventory.records import ModelInfo
from rooftrace.tracer.revisions.origins import Bisection
from rooftrace.tracer.weightfiles.filenames import are_weights, is_checkpoint

if TYPE_CHECKING:
    from rooftrace.measured.rundiffs import RunDiff
    from rooftrace.tracer.checkpoints import CheckpointDiff


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
    """What changed in cost from `first` to `second`; in time of measured runs, weights of files.

    Each is a module (called with the same arguments), a graph, graphs by phase, a saved graph or a
    target.  The code of a target runs from its own files in a process of its own.  Sizes and
    precisions, as for `report`, hold for both sides; beside a graph, for the other side only.

    before, after: options of one side by name: sizes, precisions, chip, execution, knobs, rewrites,
    tf32, optimizer, assume, torch, python (another interpreter), git (a revision).  With these, or
    with git, one target is enough.  git: "main" compares that revision with the working tree,
    ("v1", "v2") two revisions, True where HEAD left the default branch with the working tree.
    bisect: "time>5%" finds the first commit of that range at which it holds, and returns its diff.
    names: what to call the two.

    Measured runs are traces of torch.profiler, run files and Runs.  graphs= says what ran, to
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
        _check_measured(second, **ours)
        from rooftrace.reporting.rundifferences import diff_measured

        return diff_measured(first, second, args, names=names, progress=progress, **kwargs)
    options = ({} if before is None else before, {} if after is None else after)
    sides = sides_of(diff, (first, second), args, kwargs, options, git)
    with telling(progress):
        if bisect is not None:
            Diff.limits([bisect])
            return _difference(*bisect_range(*sides, bisect), names=names)
        with placed(sides) as places:
            made, other = run_sides(places)
            return _difference(made, other, names=names)


def _check_measured(second: Any, **ours: Any) -> None:
    """Raise RequestError for what a measured run has no use for."""
    for name, value in ours.items():
        if value is not None:
            raise UnusedError(name, f"{value!r:.60}", "a measured run is what it is; leave it out")
    if second is None:
        raise RequestError("one measured run alone: name a second one")


def _difference(
    before: Ran,
    after: Ran,
    told: Bisection | None = None,
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
    origins = origins_of(first, second, result, told)
    steps = {
        f"{side}: {name}, {phase}": estimate
        for side, name, ran in zip(("before", "after"), result.names, (before, after), strict=True)
        for phase, estimate in ran.estimates.items()
    }
    return replace(result, sources=sources, origins=origins, steps=steps)


def _names(before: Ran, after: Ran) -> tuple[str, str]:
    """What to call the sides: by their targets, else by what differs."""
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
    """Our matrix FLOPs beside those of other counters, with every difference by module and op.

    model: a module, called with these arguments, or a target (a string or path) at batch, seq, kv
    and inputs.  peers: flopcounter (torch.utils.flop_counter) and fvcore.  phases: by default
    forward and training; for a target those that fit the model.  A module with real weights runs
    on them; afterwards its tensors hold what they held, and random numbers go on as before.

    Raises RequestError for an unknown
    peer, for a graph (no counter can run it), and for an argument that neither the model nor
    rooftrace takes; TargetError and TraceError as `trace` does.
    """
    from rooftrace.tracer.peers import count_phases

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
    """What changed in the values and names of two checkpoints, or in the parameters of two models.

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
            f"diff: {_shown(before)} and {_shown(after)} are of two kinds; expected two "
            "checkpoints, two inventories, or two sources with a step (targets, modules, graphs)"
        )
    _refuse(
        unused,
        "a checkpoint has weights, and no step that is run; name its config.json to compare costs",
    )
    from rooftrace.tracer.checkpoints import compare_checkpoints

    with telling(progress):
        return compare_checkpoints(before, after, names)


def _shown(side: Any) -> str:
    if isinstance(side, (str, os.PathLike)):
        return repr(os.fspath(side))
    return repr(side) if isinstance(side, ModelInfo) else f"a {type(side).__name__}"


def _refuse(unused: Sequence[str], reason: str) -> None:
    if unused:
        raise RequestError(f"{', '.join(unused)}: {reason}")
