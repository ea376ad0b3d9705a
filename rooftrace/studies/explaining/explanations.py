"""Explanations of a step's time: kernel formulas, limiters, and counters that confirm them."""

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
from rooftrace.graph.formulas import FormulaError, Regime
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.units import format_time, format_traffic
from rooftrace.studies.advice import Study, VariantOutcome
from rooftrace.studies.explaining import quantities, steps
from rooftrace.studies.explaining.quantities import (
    Quantity,
    Seconds,
    SizedPlace,
    once,
    seconds_of,
)
from rooftrace.studies.explaining.steps import (
    Critical,
    ExplainedStep,
    ScalingTest,
    SizeSweep,
    step_of,
)
from rooftrace.studies.forms import Conditions, PlanForm, Points
from rooftrace.studies.forms.kernelforms import KernelForm, bytes_of, flops_of
from rooftrace.studies.sweeps import Form

# -- counters --------------------------------------------------------------------------------------
# Counters of a device that would confirm the limiter of a kernel, and their expected values.


_TIME = "gpu__time_duration.sum"
_READ = "dram__bytes_read.sum,dram__bytes_write.sum"
_DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
_TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
_FMA = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"


@dataclass(frozen=True, slots=True)
class Counter:
    """metric: as the tool calls it.  expected: its value if the prediction is right."""

    tool: str
    metric: str
    expected: str


def counters_of(
    chip: Chip, limiter: str, seconds: Seconds, size: float, sent: float
) -> tuple[Counter, ...]:
    """Counters that confirm a limiter on a chip; names as of Nsight Compute 2024 and ROCm 6.

    limiter: a name in REGIMES.  seconds: of one launch.  size, sent: its bytes through HBM and over
    links.  For other vendors' chips a clock alone.
    """
    work = seconds.device - seconds.gap

    def busy(engine: str) -> float:
        """The share of an engine's rate that one launch takes."""
        rates = (rate for rate in seconds.rates if rate.engine == engine)
        return sum(rate.seconds for rate in rates) / work if work else 0.0

    memory = size / seconds.bandwidth / work if work else 0.0
    vendor, clock = chip.vendor.lower(), format_time(work)
    moved, gap = format_traffic(size), format_time(seconds.gap)
    common: tuple[Counter, ...]
    dram: tuple[Counter, ...]
    math: tuple[Counter, ...] = ()
    net: tuple[Counter, ...] = ()
    launch: tuple[Counter, ...] = ()
    if vendor == "nvidia":
        common = (Counter("ncu", _TIME, clock),)
        dram = (
            Counter("ncu", _READ, f"{moved} together"),
            Counter("ncu", _DRAM, f"{_percent(memory)} of the peak"),
        )
        pipes: Mapping[str, float] = {_TENSOR: busy("matrix"), _FMA: busy("vector")}
        math = tuple(
            Counter("ncu", name, f"at least {_percent(share)}: padding of tiles adds to it")
            for name, share in pipes.items()
            if share > 0.0005
        )
        net = (Counter("ncu", "nvltx__bytes.sum,nvlrx__bytes.sum", format_traffic(sent)),)
        launch = (Counter("nsys", "time between kernels", gap),)
    elif vendor == "amd":
        common = (Counter("rocprofv3 --kernel-trace", "duration", clock),)
        dram = (Counter("rocprofv3 --pmc", "TCC_EA0_RDREQ_sum, TCC_EA0_WRREQ_sum",
                        f"{moved} together, at 32 to 128 byte each"),)  # fmt: skip
        math = (Counter("rocprofv3 --pmc", "MfmaUtil", f"at least {_percent(busy('matrix'))}"),)
        launch = (Counter("rocprofv3", "time between kernels", gap),)
    elif chip.kind == "cpu":
        common = (Counter("a clock", "seconds", clock),)
        dram = (Counter("perf stat", "uncore_imc/cas_count_read/, uncore_imc/cas_count_write/",
                        f"{moved} together, at 64 byte each"),)  # fmt: skip
    else:
        return (Counter("a clock", "seconds", clock),)
    by_limiter = {"hbm": dram + math[:1], "compute": math + dram[1:], "network": net}
    return common + by_limiter.get(limiter, launch)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


# -- explanations ----------------------------------------------------------------------------------


_REFUSALS = (RequestError, MissingPeakError)
"""Exceptions where there is no such variant of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedKernel:
    """Kernels that are alike: one launch in formulas and numbers, `count` launches in a step.

    flops: of each kind of work, then their sum ("all").  bytes: of each access, by role and
    direction, then their sum through HBM ("all").  sizes: of the largest product, in symbols.
    limiter: the largest of the terms; margin: over the next one.
    """

    name: str
    module: str
    kernels: Alike  # indices in the plan
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
    """The origins of the numbers of a step, or of some of its kernels.

    sizes: by name.  kernels: the requested ones, most time first.  step: where no kernel was
    requested.  sweeps: over one size each.
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
        part = f"{len(self.kernels)} kinds of kernels" if self.step is None else "the step"
        return short(self, f"{self.title}, {self.phase} on {self.chip.name}: {part}")


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

    critical: of the step, if at hand.  Raises RequestError for sizes that the form does not
    have, and for an `op` that no kernel answers to.
    """
    place = SizedPlace(form.names, form.numbers(sizes))
    plan = plan_at(form, place.values, conditions)
    chosen = () if op is None else picked(plan, op)
    study = Study.of_form(form, sizes, chip, conditions)
    base = study.step
    changed = tuple(study.tried(steps.variants(base, sizes), _REFUSALS))
    kernels = [_kernel(plan, alike, place, base, changed) for alike in chosen]
    kernels.sort(key=lambda kernel: -kernel.count * kernel.seconds.device)
    step = None
    if op is None:
        tests = tuple(steps.step_test(base, outcome) for outcome in changed)
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
    """The form of the plan that holds at a place with the most symbols.

    A plan may be proven at one place alone, or its form may leave out a size that is constant where
    it was proven.  Forms of nearby places where more sizes are open may give the same plan here.
    """
    values = tuple(numbers)
    alone = Points({n: [v] for n, v in zip(form.names, values, strict=True)})
    ((single, _),) = form.plans(alone, conditions)
    known = frozenset[int]().union(*(kernel.depends for kernel in single.kernels))
    around = [sorted({max(1, v // 2), max(1, v - 1), v, v + 1, 2 * v}) for v in values]
    varying = [r for r in form.regimes if not known.issuperset(_varying(r))]
    inside = [where for where in product(*around) if any(r.holds(where) for r in varying)]
    if not inside:
        return single
    here = conditions.numbers(form.graph(**dict(zip(form.names, values, strict=True))))
    columns = zip(*inside, strict=True)
    points = Points({name: list(c) for name, c in zip(form.names, columns, strict=True)})
    plans = [plan for plan, _ in form.plans(points, conditions)]
    same = [plan for plan in plans if _is(plan, values, here)]
    return max([single, *same], key=lambda plan: sum(len(k.depends) for k in plan.kernels))


def _varying(regime: Regime) -> set[int]:
    """The places of the sizes that a regime leaves open."""
    return {n for n, (a, b) in enumerate(zip(regime.low, regime.high, strict=True)) if a < b}


def _is(plan: PlanForm, values: tuple[int, ...], here: Any) -> bool:
    try:
        return bool(plan.form.at(values) == here)
    except FormulaError:
        return False


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
    total_flops = place.total("all", once(flops_of([kernel])), "FLOP")
    total_bytes = place.total("all", once(bytes_of([kernel])), "byte")
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
        counters=counters_of(base.chip, limiter, seconds, total_bytes.value, row.bytes_net),
        scaling=tuple(steps.kernel_test(base, rows, outcome) for outcome in changed),
    )


# -- which kernels ---------------------------------------------------------------------------------


MOST_NAMES = 8
Alike = tuple[int, ...]
"""Indices in a plan of kernels that are the same op of the same module with the same numbers."""


def picked(plan: PlanForm, pattern: str | int) -> tuple[Alike, ...]:
    """The kernels that a pattern matches, equal ones together.

    pattern: a module's path or its end, with * as in file names (indices of layers are *, too); the
    name of an op or of a fused kernel; or the index of a kernel in the plan.
    Raises RequestError where there is no such kernel: it names the nearest.
    """
    alike: dict[object, list[int]] = {}
    for index in _indices(plan, str(pattern).strip()):
        kernel = plan.kernels[index]
        key = (kernel.numbers.module, kernel.numbers.name, kernel.key)
        alike.setdefault(key, []).append(index)
    return tuple(tuple(many) for many in alike.values())


def _indices(plan: PlanForm, pattern: str) -> Sequence[int]:
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
