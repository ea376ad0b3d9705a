"""Why a step reads fewer bytes of its weights than it uses: what rules know of it.

As used are whole matrices and tables, all experts, as wide as what they are multiplied with, once
for each op that uses them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rooftrace.costmodels.bytefactors import kinds_of
from rooftrace.costmodels.costs import MATRIX, Cost
from rooftrace.costmodels.planning import Plan
from rooftrace.tracer.graph import Op, OpGraph

CAUSES = ("rows", "experts", "precision")
_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Causes:
    """Bytes of weights by kind: as used, and after each cause in turn; the last are by rule."""

    used: Mapping[str, float] = field(default_factory=dict)  # byte by kind, by rule
    # By cause, byte by kind that it saves.
    saved: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def causes_of(unfused: Plan) -> Causes:
    """What looking up rows, sending tokens to few experts, and storing narrowly save of weights.

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
            whole = max(_largest(graph, op, access.storage), size)
            times = group.times
            used[name] += times * size
            cause = "experts" if op.family == "moe" else "rows"
            saved[cause][name] += times * (whole - size)
            wider = _wider(graph, op, cost, access.storage)
            saved["precision"][name] += times * whole * (wider - 1)
    return Causes(dict(used), {cause: dict(by_kind) for cause, by_kind in saved.items()})


def factors_of(causes: Sequence[Causes], kind: str) -> dict[str, float]:
    """By cause: bytes without it over bytes with it, of one kind in several steps.

    Their product is bytes as used over bytes by rule.
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
    """How many times as wide as stored an op uses a weight: a product, or a cast that it feeds."""
    for work in cost.work:
        if work.operation in MATRIX and work.widths is not None and work.widths[1]:
            return work.widths[0] / work.widths[1]
    weight = next((graph.values[i] for i in op.inputs if graph.values[i].storage == storage), None)
    result = graph.values[op.outputs[0]] if len(op.outputs) == 1 else None
    if weight is None or result is None or weight.shape != result.shape or not weight.nbytes:
        return 1.0
    return max(result.nbytes / weight.nbytes, 1.0)
