"""Runs the sides of a diff where they are placed: the graphs of each, and what they cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rooftrace.costmodels.estimating import Estimate, estimate as estimate_graph
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.registry import own_rules
from rooftrace.errors import RequestError, TargetError, is_ours, naming
from rooftrace.hardware.units import format_time
from rooftrace.reporting.requests.pricing import check_groups
from rooftrace.reporting.revisions import Placed, checked, pointers
from rooftrace.reporting.traces import in_precisions, priced
from rooftrace.tracer.asking import Job, names
from rooftrace.tracer.revisions.origins import SideOrigin
from rooftrace.tracer.sources.apart import (
    Outcome,
    Reads,
    Traced,
    can_go_apart,
    run_apart,
    trace_each_apart,
)
from rooftrace.tracer.sources.places import ProcessPlace

EAGER = "eager"
"""The execution model that runs the ops which the code calls."""


@dataclass(frozen=True)
class Ran:
    """A side that ran: its estimates by phase, and what it was made of."""

    at: Placed
    estimates: Mapping[str, Estimate]
    eager: Mapping[str, Estimate]  # of the same step, with the ops that the code calls
    files: Mapping[str, str]  # digests of source files by path
    origin: SideOrigin
    reads: Reads = field(default_factory=Reads)


def run_sides(sides: Sequence[Placed]) -> list[Ran]:
    """Run both sides.  Raises TargetError, which says of a side that fails what the other costs."""
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
    """Run one side, or say why it does not build."""
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


# -- sides at a revision, or with another interpreter ----------------------------------------------


def _run_placed(sides: Sequence[Placed]) -> list[Ran]:
    """Run sides of which at least one has a place of its own."""
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
    """What became of each side: in a process of its own, or here where it is not code."""
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
    """The message about a side that does not build, with what may explain it."""
    return "\n".join([f"{at.label}: {failed.error}", *_why(at, failed)])


def _why(at: Placed, failed: Failed) -> list[str]:
    """What may explain that a side does not build."""
    if at.repository is None:
        return []
    added = _added_elsewhere(at) if at.origin.working_tree is None else []
    return [*at.origin.notes, *failed.notes, *added]


def _added_elsewhere(at: Placed) -> list[str]:
    """Which commit added the file of a target that a revision does not have."""
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
