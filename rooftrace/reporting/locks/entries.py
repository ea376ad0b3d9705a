"""From estimates to what a lock keeps of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.estimating.breakdowns import BreakdownRow, sums_by
from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.knobs import Knobs
from rooftrace.hardware import Chip
from rooftrace.reporting.locks.records import (
    ROOT,
    WAITING,
    LockedCosts,
    LockedModule,
    Ops,
    TimeScale,
)
from rooftrace.tracer.graph import Op, OpGraph
from rooftrace.tracer.paths import pattern_of

_SLACK = 1e-9
"""Share of a step below which time between kernels is the rounding of sums."""


def cut(path: str, depth: int) -> str:
    """A module path after `depth` names, its numbers starred: "h.3.mlp.up" -> "h.*.mlp"."""
    kept: list[str] = []
    left = depth
    for name in pattern_of(path).split("."):
        left -= name != "*"
        if left < 0:
            break
        kept.append(name)
    return ".".join(kept) or ROOT


def locked_costs(estimate: Estimate, depth: int) -> LockedCosts:
    """The totals of an estimate, and its modules down to a depth, whose sums are the totals."""
    clock = TimeScale(estimate.t_est)
    total = clock.rounded(estimate.t_est)
    totals: dict[str, Any] = {**estimate.totals, "time": clock.written(total)}
    return LockedCosts(
        **totals,
        modules=_modules(estimate, clock, total, depth),
    )


def _modules(
    estimate: Estimate, clock: TimeScale, total: Decimal, depth: int
) -> dict[str, LockedModule]:
    """FLOP in the module of each op; bytes, kernels and time in that of the kernel's main op."""
    flops: Counter[str] = Counter()
    graph = estimate.graph
    for op, cost in zip(graph.ops, estimate.plan.op_costs, strict=True):
        if cost.work:
            for path, times in _calls(graph, op).items():
                flops[cut(path, depth)] += times * cost.flops()
    kernels = sums_by(estimate.rows, lambda row: [cut(path, depth) for path in row.modules], 0.0)
    sums = {path: BreakdownRow(key=path) for path in flops} | {row.key: row for row in kernels}
    seconds = _times(estimate, clock, total, {path: row.t_device for path, row in sums.items()})
    modules = {
        path: LockedModule(clock.written(seconds[path]), flops[path], row.bytes, row.calls)
        for path, row in sums.items()
    }
    if seconds[WAITING]:
        modules[WAITING] = LockedModule(clock.written(seconds[WAITING]))
    return dict(sorted(modules.items()))


def _times(
    estimate: Estimate, clock: TimeScale, total: Decimal, seconds: dict[str, float]
) -> dict[str, Decimal]:
    """Rounded seconds by module and of waiting; what rounding leaves over has the longest one."""
    waiting = estimate.t_est - sum(seconds.values())
    if waiting <= _SLACK * estimate.t_est:
        waiting = 0.0
    times = {path: clock.rounded(each) for path, each in {**seconds, WAITING: waiting}.items()}
    longest = max(times, key=lambda path: (times[path], path))
    times[longest] += total - sum(times.values())
    return times


def locked_ops(graph: OpGraph, depth: int) -> Ops:
    """How many ops of each name and precision run in each module of a traced graph."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for op in graph.kernels():
        name = op.name.removeprefix("aten.")
        dtype = graph.values[op.outputs[0]].dtype if op.outputs else ""
        for path, times in _calls(graph, op).items():
            counts[cut(path, depth)][f"{name} {dtype}".rstrip()] += times
    return {path: dict(sorted(ops.items())) for path, ops in sorted(counts.items())}


def _calls(graph: OpGraph, op: Op) -> dict[str, int]:
    """How often an op runs in each module."""
    paths = runs.kernel_modules(graph, (op.id,), op)
    return dict.fromkeys(paths, graph.times(op) // len(paths))


def chip_digest(chip: Chip) -> str:
    """A digest of the numbers of a chip that times are computed from; words may change."""
    facts = [(name, fact.value) for name, fact in chip.facts()]
    return digest([fact for fact in facts if not fact[0].startswith("measured ")])


def knobs_digest(knobs: Knobs) -> str:
    """A digest of constants; what they were fitted to is not among them."""
    return digest({name: value for name, value in knobs.to_dict().items() if name != "source"})


def file_digest(path: Path) -> str:
    """A digest of what stands in a file."""
    return shortened(hashlib.sha256(path.read_bytes()).hexdigest())


def digest(data: Any) -> str:
    """A digest of plain values."""
    return shortened(hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest())


def shortened(sha256: str) -> str:
    """The part of a SHA-256 that a lock keeps: 64 bits, enough to tell that a file changed."""
    return sha256[:16]
