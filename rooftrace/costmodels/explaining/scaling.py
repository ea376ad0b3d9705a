"""Scaling tests: what a step and its kernels take when one thing is halved, by estimates there.

Each also says what the time would do if one term alone were the limit, so that a measured ratio
tells which one it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rooftrace.costmodels.estimating import Estimate, Row
from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.sweeping import Form
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import Fact, MissingPeakError
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.paths import pattern_of

HALF: Mapping[str, str] = {
    "fp64": "fp32", "fp32": "bf16", "tf32": "bf16", "bf16": "fp8", "fp16": "fp8",
    "fp8": "fp4", "fp8_e4m3": "fp4", "fp8_e5m2": "fp4", "int16": "int8", "int8": "int4",
}  # fmt: skip
"""A precision of half the bits."""
Key = tuple[str, str]
"""The module, with its indices starred, and the name of a kernel."""


@dataclass(frozen=True, slots=True)
class ScalingTest:
    """One change, and the time after it over the time before.

    ratio: of the whole time; None where the kernel is another one after the change.  by_limiter:
    the ratio if this term alone took time; terms that take none are left out.
    """

    name: str
    change: str
    ratio: float | None
    by_limiter: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Variation:
    """The estimate after one change; None where there is none, with the reason."""

    name: str
    change: str
    estimate: Estimate | None
    note: str = ""


def estimate_at(
    form: Form, sizes: Mapping[str, int], chip: Chip, conditions: Conditions
) -> Estimate:
    """The estimate at one place under some conditions."""
    c = conditions
    return form.estimate(chip, c.execution, c.dtype, c.weights_dtype, c.kv_dtype, **sizes)


def variations(
    form: Form, base: Estimate, sizes: Mapping[str, int], conditions: Conditions
) -> tuple[Variation, ...]:
    """The step with weights of half the bytes, half of each size, and clocks at half."""
    chip = base.chip

    def tried(name: str, change: str, made: Callable[[], Estimate]) -> Variation:
        try:
            return Variation(name, change, made())
        except (RequestError, MissingPeakError) as error:
            return Variation(name, change, None, str(error))

    def changes() -> Iterator[Variation]:
        stored = stored_precision(base.graph, "weights")
        if stored in HALF:
            half = replace(conditions, weights_dtype=HALF[stored])
            yield tried(
                "weights halved",
                f"weights {stored} -> {HALF[stored]}",
                lambda: estimate_at(form, sizes, chip, half),
            )
        for name, size in sizes.items():
            if size >= 2:
                smaller = {**sizes, name: size // 2}
                yield tried(
                    f"{name} halved",
                    f"{name} {size:,} -> {size // 2:,}",
                    lambda smaller=smaller: estimate_at(  # type: ignore[misc]
                        form, smaller, chip, conditions
                    ),
                )
        slow = slowed(chip, 0.5)
        yield tried(
            "clock halved",
            "engines at half their clock, memory as it is",
            lambda: estimate_at(form, sizes, slow, conditions),
        )

    return tuple(changes())


def stored_precision(graph: OpGraph, role: str) -> str:
    """The precision in which most bytes of a role are stored; "" without any."""
    sizes: Counter[str] = Counter()
    for index, tensor in enumerate(graph.values):
        if tensor.role == role and tensor.storage == index:
            sizes[tensor.dtype] += tensor.nbytes * graph.times(tensor)
    return sizes.most_common(1)[0][0] if sizes else ""


def slowed(chip: Chip, share: float) -> Chip:
    """The chip with its engines and caches at a share of their clock."""

    def scaled(fact: Fact) -> Fact:
        value = fact.value * share
        return replace(fact, value=value, kind="derived", note=f"{share:g} of {fact.text}")

    peaks = tuple(replace(peak, rate=scaled(peak.rate)) for peak in chip.peaks)
    return replace(chip, peaks=peaks, clock=None if chip.clock is None else scaled(chip.clock))


def step_test(base: Estimate, variation: Variation) -> ScalingTest:
    """What a change does to the whole step."""
    after = variation.estimate
    if after is None:
        return ScalingTest(variation.name, variation.change, None, {}, variation.note)
    terms = {
        "compute": (base.times.t_comp, after.times.t_comp),
        "hbm": (base.times.t_hbm, after.times.t_hbm),
        "network": (base.times.t_net, after.times.t_net),
        "launch": tuple(estimate.times.regime_seconds["launch"] for estimate in (base, after)),
    }
    ratio = after.times.t_est / base.times.t_est if base.times.t_est else None
    by_limiter = {name: new / old for name, (old, new) in terms.items() if old > 0}
    return ScalingTest(variation.name, variation.change, ratio, by_limiter)


def kernel_test(base: Estimate, rows: tuple[Row, ...], variation: Variation) -> ScalingTest:
    """What a change does to kernels of one key, all of them together."""
    after = variation.estimate
    if after is None:
        return ScalingTest(variation.name, variation.change, None, {}, variation.note)
    keys = {key_of(row) for row in rows}
    before = [row for row in base.rows if key_of(row) in keys]
    others = [row for row in after.rows if key_of(row) in keys]
    if sum(r.count for r in others) != sum(r.count for r in before):
        note = "other kernels do this work then"
        return ScalingTest(variation.name, variation.change, None, {}, note)
    old, new = (_sums(part) for part in (before, others))
    ratio = new["device"] / old["device"] if old["device"] else None
    by_limiter = {
        name: new[name] / old[name] for name in ("compute", "hbm", "network", "launch") if old[name]
    }
    return ScalingTest(variation.name, variation.change, ratio, by_limiter)


def key_of(row: Row) -> Key:
    """What is the same for a kernel at all sizes."""
    return pattern_of(row.module), row.name


def _sums(rows: list[Row]) -> dict[str, float]:
    sums = {"device": 0.0, "compute": 0.0, "hbm": 0.0, "network": 0.0, "launch": 0.0}
    for row in rows:
        for name, seconds in row.timing.terms.items():
            sums[name] += seconds
        sums["device"] += row.timing.t_device
    return sums
