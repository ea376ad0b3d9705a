"""The checked request of a step: the job to trace, and the options to price it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.rewrites import check_precisions, reprice
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.reporting.commands.calls import CALLS, conditions_of
from rooftrace.reporting.commands.pricing import (
    PRICES,
    PrecisionOptions,
    PricingOptions,
    check_groups,
)
from rooftrace.tracer import Job
from rooftrace.tracer.phases import traced
from rooftrace.tracer.phases.apart import Traced

if TYPE_CHECKING:
    from rooftrace.graph import OpGraph
    from rooftrace.studies.forms import Conditions
    from rooftrace.studies.sweeps import Form


def priced(job: Job) -> Traced:
    """The graphs of a job, in the precisions of its request."""
    check_precisions(*job.precisions)
    return in_precisions(job, traced(job))


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
