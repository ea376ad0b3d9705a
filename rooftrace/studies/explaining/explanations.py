"""Explanations of a step's time: kernel formulas, what limits it, and counters to confirm that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.kernels import engines
from rooftrace.errors import RequestError, near
from rooftrace.graph.formulas import FormulaError
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.units import format_time, format_traffic
from rooftrace.studies.advice import Study, VariantOutcome
from rooftrace.studies.explaining import quantities, steps as scaling
from rooftrace.studies.explaining.quantities import Quantity, Rate, Seconds, SizedPlace, seconds_of
from rooftrace.studies.explaining.steps import (
    Critical,
    ExplainedStep,
    ScalingTest,
    SizeSweep,
    step_of,
)
from rooftrace.studies.forms import Conditions, PlanForm, Points
from rooftrace.studies.forms.kernelforms import KernelForm
from rooftrace.studies.sweeps import Form

# -- counters --------------------------------------------------------------------------------------
# Which counters of a device would confirm what limits a kernel, and what they should then read.


_TIME = "gpu__time_duration.sum"
_READ = "dram__bytes_read.sum,dram__bytes_write.sum"
_DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
_FMA = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"


@dataclass(frozen=True, slots=True)
class Counter:
    """metric: as the tool calls it.  expected: what it should read if the prediction is right."""

    tool: str
    metric: str
    expected: str


@dataclass(frozen=True, slots=True)
class Busy:
    """What a kernel does in one launch: seconds without its gap, byte, and shares of peaks."""

    seconds: float
    bytes: float
    net: float
    memory: float  # of the memory's bandwidth
    matrix: float  # of the matrix engine's rate
    vector: float  # of the vector engine's rate


def counters_of(chip: Chip, limiter: str, busy: Busy, gap: float) -> tuple[Counter, ...]:
    """Counters that confirm a limiter on a chip; names as of Nsight Compute 2024 and ROCm 6.

    limiter: a name in REGIMES.  Of other vendors' chips only what a clock can tell.
    """
    vendor = chip.vendor.lower()
    moved = format_traffic(busy.bytes)
    common: tuple[Counter, ...]
    dram: tuple[Counter, ...]
    math: tuple[Counter, ...] = ()
    net: tuple[Counter, ...] = ()
    launch: tuple[Counter, ...] = ()
    if vendor == "nvidia":
        common = (Counter("ncu", _TIME, format_time(busy.seconds)),)
        dram = (
            Counter("ncu", _READ, f"{moved} together"),
            Counter("ncu", _DRAM, f"{_percent(busy.memory)} of the peak"),
        )
        pipes: Mapping[str, float] = {_TENSOR: busy.matrix, _FMA: busy.vector}
        math = tuple(
            Counter("ncu", name, f"at least {_percent(share)}: padding of tiles adds to it")
            for name, share in pipes.items()
            if share > 0.0005
        )
        net = (Counter("ncu", "nvltx__bytes.sum,nvlrx__bytes.sum", format_traffic(busy.net)),)
        launch = (Counter("nsys", "time between kernels", format_time(gap)),)
    elif vendor == "amd":
        common = (Counter("rocprofv3 --kernel-trace", "duration", format_time(busy.seconds)),)
        dram = (Counter("rocprofv3 --pmc", "TCC_EA0_RDREQ_sum, TCC_EA0_WRREQ_sum",
                        f"{moved} together, at 32 to 128 byte each"),)  # fmt: skip
        math = (Counter("rocprofv3 --pmc", "MfmaUtil", f"at least {_percent(busy.matrix)}"),)
        launch = (Counter("rocprofv3", "time between kernels", format_time(gap)),)
    elif chip.kind == "cpu":
        common = (Counter("a clock", "seconds", format_time(busy.seconds)),)
        dram = (Counter("perf stat", "uncore_imc/cas_count_read/, uncore_imc/cas_count_write/",
                        f"{moved} together, at 64 byte each"),)  # fmt: skip
    else:
        return (Counter("a clock", "seconds", format_time(busy.seconds)),)
    by_limiter = {"hbm": dram + math[:1], "compute": math + dram[1:], "network": net}
    return common + by_limiter.get(limiter, launch)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


# -- explanations ----------------------------------------------------------------------------------


_REFUSALS = (RequestError, MissingPeakError)
"""What says that there is no such variant of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedKernel:
    """Kernels that are alike: one launch in formulas and numbers, `count` launches in a step.

    flops: of each kind of work, then their sum ("all").  bytes: of each access, by role and
    direction, then their sum through HBM ("all").  sizes: of the largest product, in symbols.
    limiter: the largest of the terms; margin: over the next one.
    """

    name: str
    module: str
    kernels: Alike  # places in the plan
    count: int
    flops: tuple[Quantity, ...]
    bytes: tuple[Quantity, ...]
    sizes: Mapping[str, str]
    seconds: Seconds
    limiter: str
    margin: float
    share: float  # of the time of the step
    counters: tuple[Counter, ...]
    scaling: tuple[ScalingTest, ...]

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        size = self.bytes[-1].value
        return self.flops[-1].value / size if size else float("inf")


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation(Plain, Shown):
    """Where the numbers of a step, or of some of its kernels, come from.

    sizes: by name, as asked.  kernels: those that were asked for, most time first.  step: the whole
    step, where no kernel was asked for.  sweeps: over one size each.
    print() shows it; `to_dict()` is for JSON.
    """

    title: str
    phase: str
    sizes: Mapping[str, int]
    chip: Chip
    execution: str
    knobs: str  # title; "" for peaks
    op: str | None
    kernels: tuple[ExplainedKernel, ...]
    step: ExplainedStep | None
    sweeps: tuple[SizeSweep, ...]
    estimate: Estimate

    KEYS = "title phase sizes chip=chip.name execution knobs op kernels step sweeps"

    def __repr__(self) -> str:
        what = f"{len(self.kernels)} kinds of kernels" if self.step is None else "the step"
        return short(self, f"{self.title}, {self.phase} on {self.chip.name}: {what}")


def explained(
    form: Form,
    sizes: Mapping[str, int],
    chip: Chip,
    conditions: Conditions,
    op: str | int | None = None,
    critical: Critical | None = None,
    sweeps: Sequence[SizeSweep] = (),
) -> Explanation:
    """Explain a step at some sizes, or the kernels of it that `op` means (see `picked`).

    critical: of the whole step, if known.  Raises RequestError for sizes that the form does not
    have, and for an `op` that no kernel answers to.
    """
    place = SizedPlace(form.names, form.numbers(sizes))
    plan = plan_at(form, place.values, conditions)
    chosen = () if op is None else picked(plan, op)
    study = Study.of_form(form, sizes, chip, conditions)
    base = study.step
    changed = tuple(study.tried(scaling.variants(base, sizes), _REFUSALS))
    kernels = [_kernel(plan, alike, place, base, changed) for alike in chosen]
    kernels.sort(key=lambda kernel: -kernel.count * kernel.seconds.device)
    step = None
    if op is None:
        tests = tuple(scaling.step_test(base, outcome) for outcome in changed)
        step = step_of(plan, place, base, critical, tests)
    return Explanation(
        title=form.title,
        phase=form.phase,
        sizes=dict(sizes),
        chip=chip,
        execution=base.execution.name,
        knobs=base.knobs.title if base.knobs else "",
        op=None if op is None else str(op),
        kernels=tuple(kernels),
        step=step,
        sweeps=tuple(sweeps),
        estimate=base,
    )


def plan_at(form: Form, numbers: Sequence[int], conditions: Conditions) -> PlanForm:
    """A form of the plan that holds at a place, the one that says most in symbols.

    A plan may be known at one place alone, or its form may leave out a size that cannot change
    where it was proven.  Forms of places around it are asked whether they give the same plan here:
    then they say the same numbers, with more symbols.
    """
    values = tuple(numbers)
    here = conditions.numbers(form.graph(**dict(zip(form.names, values, strict=True))))
    around = [sorted({max(1, v // 2), max(1, v - 1), v, v + 1, 2 * v}) for v in values]
    inside = [
        where
        for where in product(*around)
        if where == values or any(r.holds(where) for r in form.regimes)
    ]
    columns = zip(*inside, strict=True)
    points = Points({name: list(c) for name, c in zip(form.names, columns, strict=True)})
    plans = [plan for plan, _ in form.plans(points, conditions)]
    alone = Points({n: [v] for n, v in zip(form.names, values, strict=True)})
    ((own, _),) = form.plans(alone, conditions)
    same = [plan for plan in plans if _is(plan, values, here)]
    return max([own, *same], key=_symbols)


def _is(plan: PlanForm, values: tuple[int, ...], here: Any) -> bool:
    try:
        return bool(plan.form.at(values) == here)
    except FormulaError:
        return False


def _symbols(plan: PlanForm) -> int:
    return sum(len(kernel.depends) for kernel in plan.kernels)


# -- kernels ---------------------------------------------------------------------------------------


def _kernel(
    plan: PlanForm,
    alike: Alike,
    place: SizedPlace,
    base: Estimate,
    changed: Sequence[VariantOutcome],
) -> ExplainedKernel:
    kernel = plan.kernels[alike[0]]
    rows = tuple(base.rows[index] for index in alike)
    row, numbers = rows[0], kernel.numbers
    seconds = seconds_of(base, row, numbers.kind)
    terms = row.timing.terms
    limiter = row.timing.regime
    flops = [
        place.quantity(
            f"{work.key.operation} {engines.precision_on(base.chip, work.key.precision)}"
            + ("" if work.key.count == "useful" else f" ({work.key.count.replace('_', ' ')})"),
            work.flop,
            "FLOP",
            quantities.shapes_of_work(work, place.names),
        )
        for work in kernel.works
    ]
    accesses = [
        place.quantity(
            f"{item.access.role} {'written' if item.access.write else 'read'}"
            + (" over a link" if item.access.wire == "link" else ""),
            item,
            "byte",
            quantities.shapes_of_access(kernel, item, place.names),
        )
        for item in kernel.traffic
    ]
    total_flops = place.total("all", quantities.flops_of([kernel], once=True), "FLOP")
    total_bytes = place.total("all", quantities.bytes_of([kernel], once=True), "byte")
    return ExplainedKernel(
        name=row.name,
        module=numbers.module,
        kernels=alike,
        count=sum(r.count for r in rows),
        flops=(*flops, total_flops),
        bytes=(*accesses, total_bytes),
        sizes=quantities.legend(kernel, place),
        seconds=seconds,
        limiter=limiter,
        margin=row.timing.margin if terms[limiter] else float("inf"),
        share=sum(r.timing.t_device for r in rows) / base.times.t_est if base.times.t_est else 0.0,
        counters=counters_of(
            base.chip, limiter, _busy(seconds, total_bytes.value, row.bytes_net), seconds.gap
        ),
        scaling=tuple(scaling.kernel_test(base, rows, outcome) for outcome in changed),
    )


def _busy(seconds: Seconds, size: float, net: float) -> Busy:
    work = seconds.device - seconds.gap

    def share(engine: str) -> float:
        own: list[Rate] = [rate for rate in seconds.rates if rate.engine == engine]
        return sum(rate.seconds for rate in own) / work if work else 0.0

    memory = size / seconds.bandwidth / work if work else 0.0
    return Busy(work, size, net, memory, share("matrix"), share("vector"))


# -- which kernels ---------------------------------------------------------------------------------
# Which kernels of a plan a pattern means: by path of a module, name of an op, or place.


MOST_NAMES = 8
Alike = tuple[int, ...]
"""Places in a plan of kernels that are the same op of the same module with the same numbers."""


def picked(plan: PlanForm, pattern: str | int) -> tuple[Alike, ...]:
    """The kernels that a pattern means, those that are alike together.

    pattern: a module's path, whole or its end, with * as in file names (indices of layers are *,
    too); the name of an op or of a fused kernel; or the place of a kernel in the plan.
    Raises RequestError where there is no such kernel: it names the nearest.
    """
    places = _places(plan, str(pattern).strip())
    alike: dict[object, list[int]] = {}
    for place in places:
        kernel = plan.kernels[place]
        key = (kernel.numbers.module, kernel.numbers.name, kernel.key)
        alike.setdefault(key, []).append(place)
    return tuple(tuple(many) for many in alike.values())


def _places(plan: PlanForm, pattern: str) -> Sequence[int]:
    kernels = plan.kernels
    if pattern.lstrip("-").isdigit():
        if 0 <= int(pattern) < len(kernels):
            return (int(pattern),)
        raise RequestError(f"--op {pattern}: kernels have numbers from 0 to {len(kernels) - 1}")
    chosen = [place for place, kernel in enumerate(kernels) if _meant(kernel, pattern)]
    if chosen:
        return chosen
    names = _names(kernels)
    ends = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    last = pattern.rsplit(".", 1)[-1].strip("*") or pattern
    close = near(pattern, names) or ends.get(near(last, ends), "")
    said = f"; did you mean {close!r}?" if close else ""
    shown = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    raise RequestError(
        f"--op {pattern!r}: no kernel of this step is called so or runs in such a module{said}; "
        f"there are {shown}"
    )


def _meant(kernel: KernelForm, pattern: str) -> bool:
    module, name = kernel.numbers.module, kernel.numbers.name
    plain = name.removeprefix("aten.")
    tails = (module, *(module.split(".", part)[-1] for part in range(1, module.count(".") + 1)))
    starred = ".".join("*" if part.isdigit() else part for part in pattern.split("."))
    return any(fnmatchcase(text, starred) for text in (*tails, name, plain)) or starred in tails


def _names(kernels: Sequence[KernelForm]) -> list[str]:
    """Paths of modules, then names of kernels, each once."""
    modules = [k.numbers.module for k in kernels if k.numbers.module]
    return list(dict.fromkeys([*modules, *(k.numbers.name for k in kernels)]))
