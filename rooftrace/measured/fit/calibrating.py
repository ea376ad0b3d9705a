"""Fits knobs to measurements: traces the steps, chooses the numbers to free, reports errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rooftrace._shown import Shown, short
from rooftrace.costmodels.fusion import TYPICAL, ExecutionModel, Plan, plan
from rooftrace.costmodels.kernels import Knobs, dump_knobs, load_knobs
from rooftrace.errors import RequestError, UnusedError
from rooftrace.graph import pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import listed
from rooftrace.measured.alignment import (
    Graphs,
    MeasuredStep,
    is_compiled,
    pairing,
    read_measured,
    steps_of,
)
from rooftrace.measured.bench import Run
from rooftrace.measured.fit.byfactors import MeasuredFactors, StepBytes, byte_factors
from rooftrace.measured.fit.cases import (
    ByteSources,
    Case,
    Counts,
    Errors,
    SteppedPlan,
    alone_case,
    by_seconds,
    errors,
    kernel_cases,
    of_alignment,
    of_fused,
    of_ops,
    on_its_kernels,
    predict,
    profiled_cases,
    seconds_by_op,
    step_case,
    stepped,
    sustained,
)
from rooftrace.measured.fit.fitting import (
    Fit,
    Starts,
    fit,
    fitted,
)
from rooftrace.measured.fit.planning import (
    NOTHING,
    NextStep,
    beaten,
    beaten_words,
    check_bound,
    choose,
    next_step,
    other_steps,
)
from rooftrace.measured.profiles import StepTime, Trace

# -- calibrating -----------------------------------------------------------------------------------

Tell = Callable[[str], None]
CACHE = 2.0
"""Bandwidth of a GPU's last cache over that of its memory, where no other value is known.

Chosen by compiled steps of timm on RTX 4090 (72 MB of L2), of families that are kept for fits and
one eighth of the others: 1.5 to 3 do about as well there, and 1 does worse.
"""
_FEWEST = 3
"""A run of fewer steps is fitted to its single kernels.  So is one of fewer models whose kernels
were measured one by one, as no model can be left out to check it."""


@dataclass(frozen=True, kw_only=True)
class Calibration(Shown):
    """A fit, and the measurements that it could not use."""

    fit: Fit
    chip: str  # its name
    execution: str  # how the steps ran
    what: str  # "steps", or "kernels" of a trace
    measured: int  # number of steps or kernels
    failures: Mapping[str, str]  # {key or line of a step that was left out: reason}
    before: Errors  # of predictions without any knobs
    kernels: int = 0  # single kernels that shares of classes were fitted to
    # Errors on left-out groups, by the names that were free, where the measurements chose.
    tried: Mapping[str, Errors] = field(default_factory=dict)
    # Factors on bytes, which the knobs hold too; None where no single kernel was measured.
    traffic: MeasuredFactors | None = None
    notes: tuple[str, ...] = ()  # warnings
    # Makes the step to measure next.
    others: Callable[[], NextStep | None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def knobs(self) -> Knobs:
        """The fitted knobs, for `knobs=` of an execution model."""
        return self.fit.knobs

    @property
    def next(self) -> NextStep | None:
        """The step whose measurement would narrow the predictions most; None: none could be made.

        Candidates are the measured models in other executions and phases, and at other batches;
        after kernels of one step none, as it takes steps of other models to tell more.
        """
        return None if self.what == "kernels" else self.others()

    @property
    def choice(self) -> str:
        """A sentence on the numbers that were fitted, and the errors on left-out groups."""
        fit = self.fit
        names = " and ".join(p.name for p in fit.parameters if p.identified) or NOTHING
        if fit.left_out is None:
            return f"chosen: {names}; too few different {self.what} to check it by some left out"
        summed = " in sum" if self.what == "kernels" else ""
        said = f"chosen: {names}, {self._judged(fit.left_out):.1%} off{summed} on what was left out"
        others = [
            f"{self._judged(errors):.1%} with {label}"
            for label, errors in self.tried.items()
            if errors != fit.left_out
        ]
        return f"{said}, against {listed(others)}" if others else said

    @property
    def harms(self) -> bool:
        """Whether steps that were left out are predicted worse than by no fit."""
        none = self.tried.get(NOTHING)
        left = self.fit.left_out
        return none is not None and left is not None and self._judged(left) > self._judged(none)

    def _judged(self, of: Errors) -> float:
        return abs(of.bias) if self.what == "kernels" else of.mean

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the knobs as TOML; nothing is left half-written."""
        from rooftrace._writing import write_bytes

        path = Path(path)
        write_bytes(path, dump_knobs(self.knobs).encode())
        return path

    def __repr__(self) -> str:
        fit = self.fit
        unseen = "" if fit.left_out is None else f", {fit.left_out.mean:.1%} on those left out"
        return short(
            self,
            f"{self.chip}, {self.execution}: {fit.errors.count} of {self.measured} {self.what}; "
            f"mean error {self.before.mean:.1%} before, {fit.errors.mean:.1%} fitted{unseen}",
        )


def calibrated(
    measured: str | os.PathLike[str] | Run | Trace | Sequence[StepTime],
    chip: Chip,
    model: ExecutionModel,
    graphs_of: Callable[[], Graphs] | None = None,
    template: str | None = None,
    trust_targets: bool = False,
    start: Knobs | str | None = None,
    free: Sequence[str] | None = None,
    title: str = "",
    progress: Tell | None = None,
    counters: str | os.PathLike[str] | None = None,
    counted_steps: int | None = None,
    factors: bool = True,
    by_layer: bool = False,
) -> Calibration:
    """Knobs from whatever was measured.

    measured: a file of any kind of `source_of` except counters, or its reader's result.
    graphs_of, template, trust_targets: as in `validated`.  start: where the fit begins (default:
    the knobs typical of the chip and the execution).  free: knobs to fit; None takes as many as
    the measurements support (see `choose`).  Steps that do not trace are left out and reported.
    counters: a file of a hardware profiler, of one of the measured steps; a total is of
    `counted_steps` steps.  factors: whether to fit factors on bytes too; by_layer: also those of
    the weights of each layer.

    Raises RequestError where no step is left, and for fewer measurements than knobs to fit.
    """
    if isinstance(measured, (str, os.PathLike)):
        measured = read_measured(os.fspath(measured), "a fit")
    if not isinstance(measured, (Run, Trace)):
        _check_no_kernels(counters, counted_steps, by_layer)
    begin = start_of(start, chip, model)
    run = measured if isinstance(measured, Run) else None
    counts = Counts.of(counters, counted_steps)
    wanted = _FitRequest(
        chip=chip,
        model=model,
        start=begin,
        free=free,
        title=title or f"{chip.name}, {model.name}",
        tell=progress or (lambda _: None),
        ground=ByteSources(chip, begin, sustained(run, chip, begin), counts),
        factors=factors,
        by_layer=by_layer,
        usual=usual_knobs(chip, model) if start is None else None,
    )
    if isinstance(measured, Trace):
        return _of_trace(measured, graphs_of, wanted)
    target = template if graphs_of is None else graphs_of()
    steps = steps_of(measured, model, target, trust_targets)
    wanted = replace(wanted, others=partial(other_steps, steps, chip, model))
    if isinstance(measured, Run):
        return _of_run(measured, steps, wanted)
    made, failures = _graphs(steps, wanted)
    cases, _ = _cases(made, wanted, failures)
    return _calibration(cases, [], wanted, len(steps), failures)


def _check_no_kernels(
    counters: str | os.PathLike[str] | None, counted_steps: int | None, by_layer: bool
) -> None:
    """Raise UnusedError for options on bytes of kernels, with a table of step times."""
    why = "a table of step times has no kernels; calibrate by --run TARGET, a run or a trace"
    if counters is not None:
        raise UnusedError("counters", os.fspath(counters), why)
    if counted_steps is not None:
        raise UnusedError("counted_steps", str(counted_steps), why)
    if by_layer:
        raise UnusedError("by_layer", "True", why)


@dataclass(frozen=True, kw_only=True)
class _FitRequest:
    """The request of a fit."""

    chip: Chip
    model: ExecutionModel  # how the steps ran
    start: Knobs  # where the fit begins
    free: Sequence[str] | None  # knobs to fit; None: as many as the measurements support
    title: str  # of the knobs
    tell: Tell
    ground: ByteSources  # of the measured bytes
    factors: bool = True
    by_layer: bool = False
    traffic: MeasuredFactors | None = None
    plain: Sequence[Case] = ()  # the cases with bytes by rule, where the others have factors
    usual: Knobs | None = None  # knobs of estimates without a fit; None: the start
    # Makes cases of steps that were not measured (see `other_steps`).
    others: Callable[[], Sequence[Case]] = tuple

    def with_traffic(self, steps: Sequence[StepBytes], label: str) -> _FitRequest:
        """The request with the factors of these steps in the start of the fit."""
        if not self.factors:
            return self
        self.tell("comparing bytes")
        if not steps:
            if self.by_layer:
                raise UnusedError("by_layer", "True", "no single kernels were measured")
            return self
        made = byte_factors(steps, label, self.model.fusion, self.by_layer)
        start = replace(self.start, traffic=made.factors)
        return replace(self, start=start, traffic=made, model=replace(self.model, knobs=start))


@dataclass(frozen=True)
class _PlannedStep:
    """A measured step with its graph, and its kernels where they were measured."""

    step: MeasuredStep
    planned: Plan  # under the execution model of the request
    kernels: SteppedPlan | None


def _graphs(
    measured: Sequence[MeasuredStep], wanted: _FitRequest
) -> tuple[list[_PlannedStep], dict[str, str]]:
    """The steps that trace, and why others do not, by step.

    Raises RequestError where none does.
    """
    made: list[_PlannedStep] = []
    failures: dict[str, str] = {}
    for number, step in enumerate(measured):
        wanted.tell(f"tracing {step.label} ({number + 1} of {len(measured)})")
        try:
            graph = step.graph()
            model = wanted.model if step.row is None else wanted.model.as_called
            planned = plan(graph, model)
            made.append(_PlannedStep(step, planned, stepped(step, graph, planned)))
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            failures[step.place] = step.why_not(error)
    if not made:
        first = next(iter(failures.values()), "the table is empty")
        raise RequestError(
            f"none of {len(measured)} measured steps could be traced; the first: {first}"
        )
    return made, failures


def _cases(
    made: Sequence[_PlannedStep], wanted: _FitRequest, failures: dict[str, str]
) -> tuple[list[Case], list[Case]]:
    """Cases of the steps, and cases of their measured kernels."""
    chip, model = wanted.chip, wanted.model
    cases: list[Case] = []
    alone: list[Case] = []
    for each in made:
        step, row = each.step, each.step.row
        try:
            planned = each.planned.as_run(model)
            cases.append(step_case(step.label, planned, chip, model, step.seconds, step.group))
        except (ValueError, LookupError, RuntimeError) as error:
            failures[step.place] = step.why_not(error)
            continue
        if each.kernels is not None:
            ran = on_its_kernels(each.kernels, wanted.start)
            alone += kernel_cases(ran, chip, each.kernels.seconds, step.label, step.group)
        elif row is not None and row.source == "replay":
            seconds = of_ops(planned, seconds_by_op(row))
            alone += kernel_cases(planned, chip, seconds, step.label, step.group)
        elif row is not None:
            alone += profiled_cases(planned, chip, row.ops, step.label, step.group)
    if not cases:
        raise RequestError(
            f"none of {len(made)} measured steps could be priced; the first: "
            f"{next(iter(failures.values()))}"
        )
    return cases, alone


def _of_run(run: Run, steps: Sequence[MeasuredStep], wanted: _FitRequest) -> Calibration:
    """Knobs from the steps of a run, and from single kernels: those of few steps alone."""
    made, failures = _graphs(steps, wanted)
    kernels = [each.kernels for each in made if each.kernels is not None]
    wanted.ground.counted.check(run, len(kernels))
    by_rules = wanted
    bytes_of = [step.bytes(wanted.ground) for step in kernels]
    wanted = wanted.with_traffic(
        bytes_of, ", ".join((str(run.device.get("name", "a device")), *run.dates[-1:]))
    )
    cases, alone = _cases(made, wanted, failures)
    models = {case.group for case in cases}
    few = bool(alone) and (len(cases) < _FEWEST or (bool(kernels) and len(models) < _FEWEST))
    if wanted.traffic is not None:
        wanted = replace(wanted, plain=_cases(made, by_rules, {})[few])
    if few:
        return _of_kernels(alone, wanted, len(alone), failures)
    if wanted.model.dispatch == "eager" and wanted.free is None:
        alone += _of_operations(run, wanted, failures)
    elif not kernels:
        alone = []  # kernels of other executions are fused, unlike operations alone
    return _calibration(cases, alone, wanted, len(steps), failures)


def _of_operations(run: Run, wanted: _FitRequest, failures: dict[str, str]) -> list[Case]:
    """Cases of the operations that the run measured alone."""
    from rooftrace.measured.bench import traced_micro

    wanted.tell(f"tracing {len(run.micro)} operations")
    model = wanted.model.by_rules  # an operation alone moves what rules count
    cases: list[Case] = []
    for row in run.micro:
        if row.bytes is None and row.flops is None:
            continue  # a launch
        try:
            planned = plan(traced_micro(row, run.device.get("type") == "cuda"), model)
            case = alone_case(row.key, planned, wanted.chip, row.median)
        except (ValueError, LookupError, RuntimeError) as error:
            failures[row.key] = str(error).splitlines()[0]
            continue
        if case is not None:
            cases.append(case)
    return cases


def _of_trace(
    trace: Trace, graphs_of: Callable[[], Graphs] | None, wanted: _FitRequest
) -> Calibration:
    """Knobs from the kernels of one trace; equal kernels are left out together."""
    device = next(iter(trace.devices.values()), wanted.chip.name)
    if wanted.model.fusion != "none" and is_compiled(trace):
        best, _ = pairing.best_fused(trace, graphs_of, wanted.tell)
        kernels = of_fused(best)
        wanted = wanted.with_traffic([kernels.bytes(wanted.ground)], device)
        planned, ran = kernels.ran, on_its_kernels(kernels, wanted.start)
        seconds, phase = kernels.seconds, best.detected.source.phase
    else:
        match = pairing.best_match(trace, graphs_of, wanted.chip, wanted.model, wanted.tell)
        planned, phase = match.estimate.plan, match.estimate.phase
        moved = of_alignment(match.alignment, planned, wanted.ground)
        wanted = wanted.with_traffic([moved], device)
        ran, seconds = planned.as_run(wanted.model), of_ops(planned, match.alignment.seconds)
    plain = kernel_cases(planned, wanted.chip, seconds, phase)
    cases = kernel_cases(ran, wanted.chip, seconds, phase)
    if not cases:
        raise RequestError(
            f"{trace.source or 'the trace'}: no kernel of it is long enough to fit to"
        )
    steps = [MeasuredStep.of_graph(graph) for graph in (graphs_of() if graphs_of else {}).values()]
    others = partial(other_steps, steps, wanted.chip, wanted.model)
    asked = replace(wanted, plain=plain, others=others)
    return _of_kernels(cases, asked, len(planned.groups), {})


def _of_kernels(
    cases: Sequence[Case], wanted: _FitRequest, measured: int, failures: Mapping[str, str]
) -> Calibration:
    """Knobs from single kernels; those of one op and one module pattern are left out together."""
    apart = by_seconds([replace(case, group=pattern_of(case.name)) for case in cases])
    return _calibration(apart, apart, wanted, measured, failures, "kernels")


def _calibration(
    cases: Sequence[Case],
    alone: Sequence[Case],
    wanted: _FitRequest,
    measured: int,
    failures: Mapping[str, str],
    what: str = "steps",
) -> Calibration:
    wanted.tell("fitting")
    start, free, title = wanted.start, wanted.free, wanted.title
    below = beaten(alone)
    alone = [case for index, case in enumerate(alone) if index not in below]
    cases, told = check_bound(cases)
    usual = None if wanted.usual is None else replace(wanted.usual, traffic=start.traffic)
    tried: Mapping[str, Errors] = {}
    if free is None:
        result, tried = choose(cases, start, alone, title, usual)
    else:
        result = fit(cases, start, free, title)
        if result.left_out is not None:
            none = fitted(cases, Starts((), usual or start), (), title).left_out
            assert none is not None  # as it is of the same groups
            tried = {NOTHING: none, ", ".join(free): result.left_out}
    source = {
        "chip": wanted.chip.name,
        "execution": wanted.model.name,
        "cases": len(cases),
        "error_fitted": result.errors.mean,
        **({"error_left_out": result.left_out.mean} if result.left_out else {}),
        "not_identified": list(result.unidentified),
    }
    knobs = replace(result.knobs, source=source)
    if what == "kernels":  # single kernels do not tell the residuals of steps
        knobs = replace(knobs, residuals={})
    result = replace(result, knobs=knobs)
    plain = wanted.plain or cases
    before = errors(
        [case.name for case in plain],
        predict(plain, Knobs("datasheet")),
        [case.seconds for case in plain],
    )
    return Calibration(
        fit=result,
        chip=wanted.chip.name,
        execution=wanted.model.name,
        what=what,
        measured=measured,
        failures={**failures, **told},
        before=before,
        kernels=len(alone),
        tried=tried,
        traffic=wanted.traffic,
        notes=tuple(_notes(told, wanted)),
        others=lambda: next_step(cases, wanted.others(), result.knobs),
    )


def _notes(told: Mapping[str, str], wanted: _FitRequest) -> Iterator[str]:
    """Warnings about measurements below a bound, and a borrowed start."""
    if told:
        yield beaten_words(told, wanted.chip)
    if wanted.start.is_fit and (borrowed := wanted.start.borrowed(wanted.chip)):
        yield f"the start: {borrowed}"


def start_of(start: Knobs | str | None, chip: Chip, model: ExecutionModel) -> Knobs:
    """The start of a fit: knobs, the name or path of a knob file, or None for the usual knobs."""
    if start is None:
        return usual_start(chip, model)
    return start if isinstance(start, Knobs) else load_knobs(start)


def usual_start(chip: Chip, model: ExecutionModel) -> Knobs:
    """The start of a fit without another one: `usual_knobs` with the gain of a GPU's last cache.

    Measured steps have that gain (see `CACHE`), so a fit accounts for it.
    """
    usual = usual_knobs(chip, model)
    cached = chip.kind == "gpu" and chip.l2_capacity is not None and usual.cache == 1
    return replace(usual, cache=CACHE) if cached else usual


def usual_knobs(chip: Chip, model: ExecutionModel) -> Knobs:
    """The knobs of estimates without a fit: typical of the chip and the execution."""
    usual = replace(model, knobs=TYPICAL, utilization=ExecutionModel().utilization).knobs_on(chip)
    assert usual is not None  # as knobs are typical
    return usual
