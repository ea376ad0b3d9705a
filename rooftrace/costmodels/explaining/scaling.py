"""Scaling tests: what a step and its kernels take when one thing is halved, by estimates there.

Each also says what the time would do if one term alone were the limit, so that a measured ratio
tells which one it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rooftrace.costmodels.estimating import Estimate, Row
from rooftrace.costmodels.studies import Variant, VariantOutcome
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


def variants(step: Estimate, sizes: Mapping[str, int]) -> Iterator[Variant]:
    """The step with weights of half the bytes, half of each size, and clocks at half."""
    stored = stored_precision(step.graph, "weights")
    if stored in HALF:
        half = HALF[stored]
        yield Variant(
            name="weights halved",
            change=f"weights {stored} -> {half}",
            precisions={"weights_dtype": half},
        )
    for name, size in sizes.items():
        if size >= 2:
            yield Variant(
                name=f"{name} halved",
                change=f"{name} {size:,} -> {size // 2:,}",
                sizes={name: size // 2},
            )
    facts = step.chip.facts_by_name()
    clocked = [n for n in facts if n == "clock" or n.startswith(("matrix.", "vector."))]
    yield Variant(
        name="clock halved",
        change="engines at half their clock, memory as it is",
        numbers={f"chip.{name}": facts[name].value / 2 for name in clocked},
    )


def stored_precision(graph: OpGraph, role: str) -> str:
    """The precision in which most bytes of a role are stored; "" without any."""
    sizes: Counter[str] = Counter()
    for index, tensor in enumerate(graph.values):
        if tensor.role == role and tensor.storage == index:
            sizes[tensor.dtype] += tensor.nbytes * graph.times(tensor)
    return sizes.most_common(1)[0][0] if sizes else ""


def step_test(base: Estimate, outcome: VariantOutcome) -> ScalingTest:
    """What a change does to the whole step."""
    after = outcome.estimate
    if after is None:
        return _test(outcome, None, {}, outcome.note)
    old, new = (
        {
            "compute": times.t_comp,
            "hbm": times.t_hbm,
            "network": times.t_net,
            "launch": times.regime_seconds["launch"],
        }
        for times in (base.times, after.times)
    )
    return _test(outcome, after.t_est / base.t_est if base.t_est else None, _ratios(old, new))


def kernel_test(base: Estimate, rows: tuple[Row, ...], outcome: VariantOutcome) -> ScalingTest:
    """What a change does to kernels of one key, all of them together."""
    after = outcome.estimate
    if after is None:
        return _test(outcome, None, {}, outcome.note)
    keys = {key_of(row) for row in rows}
    before = [row for row in base.rows if key_of(row) in keys]
    others = [row for row in after.rows if key_of(row) in keys]
    if sum(r.count for r in others) != sum(r.count for r in before):
        return _test(outcome, None, {}, "other kernels do this work then")
    old, new = (_sums(part) for part in (before, others))
    device, seconds = old.pop("device"), new.pop("device")
    ratio = seconds / device if device else None
    return _test(outcome, ratio, _ratios(old, new))


def _test(
    outcome: VariantOutcome, ratio: float | None, by_limiter: Mapping[str, float], note: str = ""
) -> ScalingTest:
    return ScalingTest(outcome.variant.name, outcome.variant.change, ratio, by_limiter, note)


def _ratios(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """The ratio of each term that takes time."""
    return {name: new[name] / seconds for name, seconds in old.items() if seconds > 0}


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
