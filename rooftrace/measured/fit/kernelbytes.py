"""Bytes that kernels of a measured step move, and why fewer bytes of weights are read than used."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.costmodels.kernels.seconds import kernel_table
from rooftrace.costmodels.kernels.works import warm_accesses
from rooftrace.costmodels.ops import MATRIX, Access, Cost, bytes_by_kind, kinds_of
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.hardware import Chip

# -- causes ----------------------------------------------------------------------------------------
# Causes of reading fewer bytes of weights than used.  Used bytes are complete matrices and tables,
# all experts, as wide as the other operand, once for each op that uses them.

CAUSES = ("rows", "experts", "precision")
_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Causes:
    """Bytes of weights by kind, by rule, and the bytes that each cause saves."""

    used: Mapping[str, float] = field(default_factory=dict)  # byte by kind, by rule
    # By cause, byte by kind that it saves.
    saved: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def causes_of(unfused: Plan) -> Causes:
    """Savings of weights by row look-ups, by routing to few experts, and by narrow storage.

    unfused: the step with a kernel for each op.
    """
    used: dict[str, float] = defaultdict(float)
    saved: dict[str, dict[str, float]] = {cause: defaultdict(float) for cause in CAUSES}
    graph = unfused.graph
    for group, cost in zip(unfused.groups, unfused.costs, strict=True):
        op = graph.ops[group.ops[0]]
        kind = kinds_of(graph, group.ops, unfused.op_costs)
        for access, size in cost.traffic.items():
            name = kind(access)
            if access.wire != "hbm" or access.write or not name.endswith(_WEIGHTS):
                continue
            full = max(_largest(graph, op, access.storage), size)
            times = group.times
            used[name] += times * size
            cause = "experts" if op.family == "moe" else "rows"
            saved[cause][name] += times * (full - size)
            wider = _wider(graph, op, cost, access.storage)
            saved["precision"][name] += times * full * (wider - 1)
    return Causes(dict(used), {cause: dict(by_kind) for cause, by_kind in saved.items()})


def factors_of(causes: Sequence[Causes], kind: str) -> dict[str, float]:
    """By cause: bytes without it over bytes with it, of one kind in several steps.

    Their product is used bytes over bytes by rule.
    """
    after = sum(cause.used.get(kind, 0.0) for cause in causes)
    factors: dict[str, float] = {}
    for name in CAUSES:
        saved = sum(cause.saved.get(name, {}).get(kind, 0.0) for cause in causes)
        factors[name] = (after + saved) / after if after else 1.0
        after += saved
    return factors


def _largest(graph: OpGraph, op: Op, storage: int) -> float:
    """Bytes of the largest view through which an op reads a storage."""
    views = (graph.values[i] for i in op.inputs)
    return max((view.nbytes for view in views if view.storage == storage), default=0)


def _wider(graph: OpGraph, op: Op, cost: Cost, storage: int) -> float:
    """The width at which an op uses a weight, over its stored width: in a product, or by a cast."""
    for work in cost.work:
        if work.operation in MATRIX and work.widths is not None and work.widths[1]:
            return work.widths[0] / work.widths[1]
    weight = next((graph.values[i] for i in op.inputs if graph.values[i].storage == storage), None)
    result = graph.values[op.outputs[0]] if len(op.outputs) == 1 else None
    if weight is None or result is None or weight.shape != result.shape or not weight.nbytes:
        return 1.0
    return max(result.nbytes / weight.nbytes, 1.0)


# -- bytes of kernels ------------------------------------------------------------------------------

MEMORY_BOUND = 1.5
"""Least ratio of memory to compute seconds of a kernel whose seconds tell its bytes."""
_MOSTLY = 0.5
SHORTEST = 20e-6
"""Seconds: on a CPU a shorter kernel is mostly its call, and time of the profiler."""
_LEAST_LAUNCHES, _BRIEF = 4.0, 2e-6
"""Least launch times, and seconds, of a kernel on a GPU whose seconds tell its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBytes:
    """One kernel of a measured step; bytes are of all its launches."""

    layer: str  # "layers.3"; "" outside of layers
    used: Mapping[str, float]  # byte by kind, by its rules
    held: Mapping[str, float]  # byte by kind of these that a cache answered
    moved: float | None  # byte, measured; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The kernels of one measured step, and the bytes of the same step in other kernels."""

    kernels: tuple[KernelBytes, ...]
    by: str  # "counters" or "seconds": the source of `moved`
    detected: Mapping[str, float]  # byte by kind, in the kernels that we detect
    unfused: Mapping[str, float]  # byte by kind, with a kernel for each op
    causes: Causes  # of reading fewer bytes of weights than used
    # Byte by kind that a cache of the chip's size holds, whether or not `held` has them.
    cached: Mapping[str, float] = field(default_factory=dict)
    flushed: bool = False  # whether the counters were read on empty caches
    moved: float | None = None  # byte of the step, where a counter has only this


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the kernels of a plan; a list has an entry for each group."""

    seconds: Sequence[float | None] = ()  # s, all its launches
    counted: Sequence[float | None] = ()  # byte, all its launches
    flushed: bool = False  # whether the caches were emptied before each counted kernel
    total: float | None = None  # byte of the step


def step_bytes(
    ran: Plan,
    detected: Plan,
    measured: Measured,
    chip: Chip,
    knobs: Knobs,
    bandwidth: float,
) -> StepBytes:
    """The bytes of each kernel of `ran`, the plan in the kernels that ran.

    detected: the same step in the kernels that we detect.  bandwidth: byte/s that the device
    sustains.  Without counters the bytes of a memory-bound kernel are its seconds times that
    bandwidth, times the share of it that kernels of its class reach by `knobs`.  With a total alone
    no kernel's bytes are known.
    """
    counters = any(size is not None for size in measured.counted)
    held_by = _held(ran, chip)
    # DRAM counters do not see cache hits; these save seconds by the bandwidth of the cache.
    part = 1 - 1 / knobs.cache
    if counters or measured.total is not None:
        part = 0.0 if measured.flushed else 1.0
        moved = list(measured.counted)
    else:
        moved = _derived(ran, measured, chip, knobs, bandwidth)
        if knobs.cache == 1:  # the bandwidth of the cache is unknown
            moved = [
                None if _is_mostly(held, cost.bytes()) else size
                for size, held, cost in zip(moved, held_by, ran.costs, strict=False)
            ]
    used = _by_kind(ran, [cost.traffic for cost in ran.costs])
    held = _by_kind(ran, held_by)
    leads = (ran.graph.ops[group.ops[0]] for group in ran.groups)
    return StepBytes(
        kernels=tuple(
            KernelBytes(
                layer=_layer(lead.module),
                used=used[index],
                held=_times(held[index], part),
                moved=moved[index] if moved else None,
            )
            for index, lead in enumerate(leads)
        ),
        by="counters" if counters or measured.total is not None else "seconds",
        detected=_summed(_by_kind(detected, [cost.traffic for cost in detected.costs])),
        unfused=_summed(_by_kind(detected.unfused, [c.traffic for c in detected.unfused.costs])),
        causes=causes_of(detected.unfused),
        cached=_summed(held),
        flushed=counters and measured.flushed,
        moved=measured.total,
    )


def _by_kind(planned: Plan, amounts: Sequence[Mapping[Access, float]]) -> list[dict[str, float]]:
    """Amounts by kind of bytes, of each kernel all its launches."""
    return [
        _times(
            bytes_by_kind(each, kinds_of(planned.graph, group.ops, planned.op_costs)), group.times
        )
        for group, each in zip(planned.groups, amounts, strict=True)
    ]


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for kind, size in part.items():
            total[kind] += size
    return dict(total)


def _held(planned: Plan, chip: Chip) -> Sequence[Mapping[Access, float]]:
    """Bytes of each access of each kernel that the last cache still holds; none if unknown."""
    if chip.l2_capacity is None:
        return [{} for _ in planned.groups]
    return warm_accesses(planned, chip.l2_capacity.value)


def _is_mostly(held: Mapping[Access, float], size: float) -> bool:
    """Whether a cache holds most bytes of a kernel, so that its seconds do not tell its bytes."""
    return sum(held.values()) > _MOSTLY * size


def _derived(
    planned: Plan, measured: Measured, chip: Chip, knobs: Knobs, bandwidth: float
) -> list[float | None]:
    """The bytes of each kernel by its seconds; None of one that is not memory-bound."""
    if not measured.seconds:
        return []
    table, rows = kernel_table(planned, chip, reuse=False)
    compute = table.seconds(knobs, planned.copies_layouts).compute
    launch = knobs.launch_on(chip)
    least = SHORTEST if chip.host_waits else max(_LEAST_LAUNCHES * launch, _BRIEF)
    moved: list[float | None] = []
    for group, cost, row, seconds in zip(
        planned.groups, planned.costs, rows, measured.seconds, strict=True
    ):
        share = knobs.share(CLASSES[table.kind[row]]).memory
        work = float(compute[row])
        memory = cost.bytes() / (bandwidth * share)
        each = 0.0 if seconds is None else seconds / group.times
        bound = memory >= MEMORY_BOUND * work
        if not bound or each < least:
            moved.append(None)
            continue
        alone = _without(each - launch, work, knobs.overlap)
        moved.append(alone * bandwidth * share * group.times)
    return moved


def _without(seconds: float, work: float, p: float) -> float:
    """Seconds without the part of the work that memory does not hide."""
    if math.isinf(p) or seconds <= work:
        return seconds
    rest: float = (seconds**p - work**p) ** (1 / p)
    return rest


def _times(sizes: Mapping[str, float], factor: float) -> dict[str, float]:
    return {kind: size * factor for kind, size in sizes.items() if size * factor}


def _layer(module: str) -> str:
    """The first part of a path up to its first index: "layers.3" of "layers.3.mlp.up"."""
    steps = module.split(".")
    for number, step in enumerate(steps):
        if pattern_of(step) == "*":
            return ".".join(steps[: number + 1])
    return ""
