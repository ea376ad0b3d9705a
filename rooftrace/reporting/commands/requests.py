"""Checked requests: of a step (its job, the options of its prices), and of both sides of a diff."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.fusion import ExecutionModel, usual_execution
from rooftrace.costmodels.rewrites import check_precisions, reprice
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip
from rooftrace.reporting.commands.calls import CALLS, conditions_of
from rooftrace.reporting.commands.pricing import (
    PRICES,
    PrecisionOptions,
    PricingOptions,
    check_groups,
)
from rooftrace.tracer import Job, names
from rooftrace.tracer.phases import kept_or_traced
from rooftrace.tracer.phases.apart import Traced

if TYPE_CHECKING:
    from rooftrace.graph import OpGraph
    from rooftrace.studies.forms import Conditions
    from rooftrace.studies.sweeps import Form


def priced(job: Job) -> Traced:
    """The graphs of a job, in the precisions of its request."""
    check_precisions(*job.precisions)
    return in_precisions(job, kept_or_traced(job))


def in_precisions(job: Job, made: Traced) -> Traced:
    """Graphs that were traced for a job, in the precisions of its request."""
    job.check_used(made.graphs)
    graphs = {phase: reprice(graph, *job.precisions) for phase, graph in made.graphs.items()}
    return replace(made, graphs=graphs)


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """A call, checked; nothing is traced yet."""

    job: Job
    pricing: PricingOptions
    models: tuple[ExecutionModel, ...]
    chips: tuple[Chip, ...]
    form: Form | None = None  # the source, or the file that it names; the job has its example

    @staticmethod
    def of(
        function: Callable[..., Any],
        source: Any,
        args: Sequence[Any] = (),
        named: Mapping[str, Any] = MappingProxyType({}),
        *,
        form: Form | None = None,
    ) -> StepRequest:
        """The request of a call of a public function.  form: the one that the source names.

        Raises RequestError for arguments that nothing takes, what loading chips and executions
        raises, and for precisions that there are not.
        """
        call = CALLS[function.__name__]
        taken = {each.name for each in call.options()}
        pricing, others = PricingOptions.parted(
            {n: v for n, v in named.items() if n in taken or n not in PRICES}
        )
        others |= {n: v for n, v in named.items() if n in PRICES and n not in taken}
        if "dtype" in call.several:
            others = {n: v for n, v in others.items() if n not in _PRECISIONS}
        phases = others.get("phases") or others.get("phase")
        first = next(iter(phases), None) if isinstance(phases, (list, tuple)) else phases
        models, chips = conditions_of(function, pricing, source, phase=first)
        ours = {name: others.pop(name) for name in _OURS if _is_text(others.get(name))}
        # An example, which is a graph, has no use for other arguments.
        runs = source if form is None else form.example
        job = Job.of(function, runs, args, others, **ours)
        if call.one_phase and len(job.phases or ()) > 1:
            raise RequestError(f"--phase {','.join(job.phases or ())}: expected one phase")
        if "dtype" in call.several:
            pricing.conditions(models)
        else:
            check_precisions(*job.precisions)
            pricing = replace(pricing, **job.precisions._asdict())
        return StepRequest(job=job, pricing=pricing, models=models, chips=chips, form=form)

    @property
    def model(self) -> ExecutionModel:
        """The execution model of a call that takes one."""
        return self.models[0]

    @property
    def chip(self) -> Chip:
        """The chip, or the first one."""
        return self.chips[0]

    @property
    def conditions(self) -> tuple[Conditions, ...]:
        """Every combination of executions and precisions."""
        return self.pricing.conditions(self.models)

    def of_one_phase(self) -> StepRequest:
        """This request, of the phase `forward` unless it names a phase or its source has one."""
        return replace(self, job=self.job.of_one_phase())

    def graphs(self) -> dict[str, OpGraph]:
        """The graphs of the job by phase, in its precisions; raises the errors of tracing."""
        graphs = dict(priced(self.job).graphs)
        check_groups(graphs.values, self.models)
        return graphs


_PRECISIONS = tuple(each.name for each in fields(PrecisionOptions))
_OURS = (*_PRECISIONS, "phase", "phases")
"""Arguments that are ours where they are words, also of a module whose forward has the name."""


def _is_text(value: Any) -> bool:
    several = isinstance(value, (list, tuple)) and bool(value)
    return isinstance(value, str) or (several and all(isinstance(each, str) for each in value))


# -- The two sides of a diff: the request of each, its chip, and its files -------------------------

BASE = ""
"""The revision where HEAD left the default branch."""
FILES = "."
"""The working tree in place of a revision."""
SIDES = ("before", "after")
_FILES_OF = ("git", "python")
OPTIONS = (*Job.ARGUMENTS, *PRICES, *_FILES_OF)
"""Options that may differ from side to side."""


@dataclass(frozen=True, kw_only=True)
class DiffSide(StepRequest):
    """One side of a diff."""

    which: str  # before or after
    revision: str | None = None  # a revision, BASE, FILES; None: its files, whatever they are
    python: str | None = None  # an interpreter; None: this one
    options: Mapping[str, str]  # of this side alone, as they are shown

    @property
    def is_placed(self) -> bool:
        """Whether it runs at a revision or with another interpreter."""
        return self.revision is not None or self.python is not None


def sides_of(
    function: Callable[..., Any],
    sources: tuple[Any, Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
    options: tuple[Mapping[str, Any], Mapping[str, Any]],
    git: Any,
) -> tuple[DiffSide, DiffSide]:
    """Both sides of a diff.

    function: the public one that was called.  args, named: arguments of both.  options: those of
    each side.  git: the revisions, as `diff` takes them.

    Raises RequestError for options that make no sense, and where nothing differs.
    """
    for which, changes in zip(SIDES, options, strict=True):
        _check_options(which, changes)
    before, after = sources
    if after is None:
        if not any(options) and git is None:
            raise RequestError(
                "one target alone: name a second one, revisions (git='main'; --git main), or what "
                "differs from side to side (after={'batch': 8}; --after batch=8)"
            )
        after = before
    first, second = _revisions(git)
    if named.get("execution") is None:
        named = {**named, "execution": usual_execution(*sources)}
    sides = []
    for which, side, other, changes, revision in (
        ("before", before, after, options[0], first),
        ("after", after, before, options[1], second),
    ):
        request = _request(function, side, other, args, _with(named, changes))
        shared = {**named, "chip": request.chip, "execution": request.model}
        made = DiffSide(
            **vars(request),
            which=which,
            revision=changes.get("git", revision),
            python=_interpreter(which, changes),
            options=_differing(changes, options, shared),
        )
        _check_place(made)
        sides.append(made)
    return _both_of_git(sides[0], sides[1])


def _with(named: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of both sides, with those of one; its rewrites and settings are added."""
    made = {**named, **{name: value for name, value in changes.items() if name not in _FILES_OF}}
    if "chip" in changes or "system" in changes:
        for name in {"chip", "system"} - changes.keys():
            made.pop(name, None)
    if "rewrites" in changes:
        made["rewrites"] = (*named.get("rewrites", ()), *changes["rewrites"])
    if "settings" in changes:
        made["settings"] = {**named.get("settings", {}), **changes["settings"]}
    return made


def _request(
    function: Callable[..., Any],
    side: Any,
    other: Any,
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> StepRequest:
    """The request of one side.  Sizes and arguments of both go only to a side that takes them."""
    this, that = Job(source=side), Job(source=other)
    if this.is_graph and not that.is_graph:
        keep = ("phase", "phases", *PRICES, *this.precisions._fields)
        args, named = (), {name: value for name, value in named.items() if name in keep}
    elif this.is_named and not that.is_named and not that.is_graph:
        args = ()  # the arguments of the module on the other side
    return StepRequest.of(function, side, args, named)


def _check_options(which: str, options: Any) -> None:
    if not isinstance(options, Mapping):
        raise RequestError(
            f"{which}={options!r:.60}: expected options of that side by name, for example "
            f"{which}={{'batch': 8}}"
        )
    for name in options:
        if name not in OPTIONS:
            raise RequestError(
                f"{which}: {name!r} cannot differ from side to side{hint(str(name), OPTIONS)}; "
                f"expected some of {', '.join(OPTIONS)}"
            )


def _interpreter(which: str, options: Mapping[str, Any]) -> str | None:
    python = options.get("python")
    if python is None:
        return None
    path: str = os.path.abspath(os.path.expanduser(os.fspath(python)))
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        raise RequestError(
            f"python of {which}: {os.fspath(python)!r}: expected the path of a Python interpreter"
        )
    return path


def _revisions(git: Any) -> tuple[str | None, str | None]:
    """The revisions of both sides, from the value of `git=`."""
    if git is None or git is False:
        return None, None
    if git is True:
        return BASE, FILES
    revisions = tuple(git) if isinstance(git, (list, tuple)) else (git,)
    if not 1 <= len(revisions) <= 2 or not all(isinstance(each, str) for each in revisions):
        raise RequestError(f"git={git!r:.60}: expected one revision or two, for example 'main'")
    if len(revisions) == 1 and ".." in revisions[0] and revisions[0] != "..":
        before, dots, after = revisions[0].partition("...")
        if not dots:
            before, _, after = revisions[0].partition("..")
            return before or "HEAD", after or "HEAD"
        return f"{before or 'HEAD'}...{after or 'HEAD'}", after or "HEAD"
    return revisions[0], revisions[1] if len(revisions) == 2 else FILES


def _check_place(side: DiffSide) -> None:
    """Raise RequestError for a side that has no revisions, or that no other process can run."""
    if not side.is_placed:
        return
    if side.revision is not None and side.revision.startswith("-"):
        raise RequestError(
            f"git of {side.which}: {side.revision!r}: expected a commit, a branch or a tag, for "
            "example main or HEAD~1"
        )
    option = "git" if side.revision is not None else "python"
    if not side.job.is_named:
        raise RequestError(
            f"{option} of {side.which}: a module or a graph in memory is of this process; name a "
            "target, for example model.py:build"
        )
    name = side.job.name
    if side.revision is not None and (name.startswith("hf:") or name in names.configs()):
        raise RequestError(
            f"git of {side.which}: {name!r} is in no repository of yours; name a file of one"
        )
    if option == "python" and side.job.is_graph:
        raise RequestError(f"python of {side.which}: {name}: a graph is traced already")


def _both_of_git(before: DiffSide, after: DiffSide) -> tuple[DiffSide, DiffSide]:
    """The sides; where one has a revision, the other without one is of the working tree."""
    sides = (before, after)
    with_files = [
        replace(side, revision=FILES)
        if side.revision is None and other.revision is not None and _may_have_files(side)
        else side
        for side, other in zip(sides, sides[::-1], strict=True)
    ]
    return with_files[0], with_files[1]


def _may_have_files(side: DiffSide) -> bool:
    name = side.job.name
    return side.job.is_named and not name.startswith("hf:") and name not in names.configs()


def _differing(
    changes: Mapping[str, Any], options: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]
) -> dict[str, str]:
    """The values on one side of every option that either side changes, as text."""
    names_ = dict.fromkeys(name for each in options for name in each if name != "git")
    usual = {"python": sys.executable, **shared}
    values = {name: changes.get(name, usual.get(name)) for name in names_}
    return {name: _shown(value) for name, value in values.items() if value is not None}


def _shown(value: Any) -> str:
    if isinstance(value, (Chip, ExecutionModel)):
        return value.name
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={part}" for name, part in value.items())
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return f"{value}"
