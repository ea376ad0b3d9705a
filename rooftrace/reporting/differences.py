"""What a change costs, and what other counters say of the same step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rooftrace._progress import telling
from rooftrace.costmodels.estimating import Estimate, estimate as estimate_graph
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.findings.comparing import compare_sources, diff_estimates
from rooftrace.costmodels.findings.counters import Comparison, compare as compare_counts
from rooftrace.costmodels.findings.diffs import Diff
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.registry import own_rules
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.errors import RequestError, TargetError, naming
from rooftrace.hardware import Chip, load_chip
from rooftrace.measured.rundiffs import is_measured
from rooftrace.reporting.checkpoints import diff_checkpoints, has_no_cost
from rooftrace.reporting.estimates import CHIP, Source, in_precisions, priced
from rooftrace.tracer.asking import Job
from rooftrace.tracer.sources import Traced, trace_each_apart

if TYPE_CHECKING:
    from rooftrace.measured.rundiffs import RunDiff
    from rooftrace.tracer.checkpoints import CheckpointDiff
    from rooftrace.tracer.inventory import ParameterDiff


def diff(
    before: Source,
    after: Source,
    *args: Any,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    phases: Sequence[str] | None = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Diff | RunDiff | CheckpointDiff | ParameterDiff:
    """What changed in cost from `before` to `after`; in time of measured runs, weights of files.

    Each is a module (called with the same arguments), a graph, graphs by phase, a saved graph or a
    target.  The code of a target runs from its own files in a process of its own.  Sizes and
    precisions, as for `report`, hold for both sides.  A graph has its own sizes, so beside a graph
    they hold for the other side.  names: what to call the two.  Raises RequestError for an argument
    that neither side takes.

    Measured runs are traces of torch.profiler, run files and Runs.  graphs= says what ran, to
    predict the difference: a graph, a target or a module, or two of them, one for each side.

    Checkpoints (safetensors, torch.save, their indexes and folders) and inventories take names.
    """
    if names is not None and (isinstance(names, str) or len(names) != 2):
        raise RequestError(f"names={names!r:.60}: expected two, for example ('main', 'branch')")
    asked: dict[str, Any] = {"chip": chip, "execution": execution, "phases": phases}
    if has_no_cost(before, after):
        return diff_checkpoints(before, after, args, {**asked, **kwargs}, names, progress)
    if is_measured(before) or is_measured(after):
        from rooftrace.reporting.rundifferences import diff_measured

        return diff_measured(before, after, args, **asked, names=names, progress=progress, **kwargs)
    named = kwargs if phases is None else {**kwargs, "phases": phases}
    jobs = [_of_side(before, after, args, named), _of_side(after, before, args, named)]
    loaded, model = load_chip(chip or CHIP), execution_model(execution or "efficient")
    sides = [job.name if job.is_named else usual for job, usual in zip(jobs, SIDES, strict=True)]
    placed: list[dict[str, Estimate]] = []
    eager: list[dict[str, Estimate]] = []
    files: list[Mapping[str, str]] = []
    with telling(progress):
        for graphs_of_side, name in zip(_sides(jobs), sides, strict=True):
            # The rules in the code of one side do not hold for the other.
            with own_rules(), naming(name):
                made = graphs_of_side()
                plans = {phase: Plan.each(g, [model, EAGER]) for phase, g in made.graphs.items()}
                for number, side in enumerate((placed, eager)):
                    side.append(
                        {p: estimate_graph(each[number], loaded) for p, each in plans.items()}
                    )
            files.append(made.files)
    result = diff_estimates(
        placed[0],
        placed[1],
        names or (sides[0], sides[1]),
        None if model.name == EAGER else (eager[0], eager[1]),
    )
    return replace(result, sources=compare_sources(files[0], files[1]))


SIDES = ("before", "after")
EAGER = "eager"
"""The execution model that runs the ops which the code calls."""


def _of_side(side: Source, other: Source, args: Sequence[Any], named: Mapping[str, Any]) -> Job:
    """The job of one side of a diff.  Sizes and arguments go only to a side that takes them."""
    this, that = Job(source=side), Job(source=other)
    if this.is_graph and not that.is_graph:
        keep = ("phase", "phases", *this.precisions._fields)
        args, named = (), {name: value for name, value in named.items() if name in keep}
    elif this.is_named and not that.is_named and not that.is_graph:
        args = ()  # the arguments of the module on the other side
    job = Job.of(diff, side, args, named)
    check_precisions(*job.precisions)
    return job


def _sides(jobs: Sequence[Job]) -> list[Callable[[], Traced]]:
    """For each side a function that makes its graphs.  Code runs in processes of its own, all at
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


def compare(
    model: Source,
    *args: Any,
    peers: Sequence[str] = ("flopcounter", "fvcore"),
    phases: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> list[Comparison]:
    """Our matrix FLOPs beside those of other counters, with every difference by module and op.

    model: a module, called with these arguments, or a target (a string or path) at batch, seq, kv
    and inputs.  peers: flopcounter (torch.utils.flop_counter) and fvcore.  phases: by default
    forward and training; for a target those that fit the model.  Raises RequestError for an unknown
    peer, for a graph (no counter can run it), and for an argument that neither the model nor
    rooftrace takes; TargetError and TraceError as `trace` does.
    """
    from rooftrace.tracer.peers import count_phases

    job = Job.of(compare, model, args, kwargs, phases=phases)
    if job.is_graph or job.is_step:
        raise RequestError(
            "other counters have to run the module itself: give the module or the target that it "
            "was traced from"
        )
    job.refuse(job.precisions._fields, "FLOPs do not depend on it; leave it out")
    with telling(progress):
        return [compare_counts(graph, peer) for graph, peer in count_phases(job, peers)]
