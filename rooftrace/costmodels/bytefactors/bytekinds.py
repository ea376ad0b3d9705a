"""The kinds of bytes that a run can tell apart: roles, with weights by the family that reads them.

What an optimizer's kernels move is one kind: they always move states, weights and gradients in the
same proportions, so no measurement tells these apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rooftrace.costmodels.costs import Access, Cost
from rooftrace.tracer.graph import OpGraph

WEIGHTS = {name: f"{name} weights" for name in ("attention", "dense", "moe")}
"""The kinds of weights by family; families other than attention and moe are dense."""
BYTE_KINDS = (
    *WEIGHTS.values(), "activations", "temporary", "kv", "gradients", "optimizer", "constants"
)  # fmt: skip
"""Every kind, in the order in which reports list them."""


def kinds_of(
    graph: OpGraph, ops: Sequence[int], op_costs: Sequence[Cost]
) -> Callable[[Access], str]:
    """The kind of each access of a kernel that has these ops.

    Its family is that of the op that moves most.
    """
    lead = graph.ops[max(ops, key=lambda op: op_costs[op].bytes())]
    if lead.part == "optimizer":
        return lambda access: "optimizer"
    weights = WEIGHTS.get(lead.family, WEIGHTS["dense"])

    def kind(access: Access) -> str:
        role = graph.values[access.storage].role
        return weights if role == "weights" else role

    return kind


def bytes_by_kind(
    amounts: Mapping[Access, float], kind: Callable[[Access], str]
) -> dict[str, float]:
    """HBM bytes by kind; a kind of which there are none is left out."""
    sums: dict[str, float] = {}
    for access, size in amounts.items():
        if access.wire == "hbm" and size:
            name = kind(access)
            sums[name] = sums.get(name, 0.0) + size
    return sums
