"""In which memory layout convolutions run: with channels last where a compiler chooses that.

The choice is Inductor's, for a whole graph (`torch/_inductor/graph.py`, `decide_layout_opt`): its
weights are how much longer each kind of convolution was measured to take with channels last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rooftrace.costmodels.registry import find_rule
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

LAST_OVER_FIRST = {"grouped": 1.358, "in_out": 0.725, "small": 0.783, "default": 0.823}
"""Time with channels last over that with channels first, by kind of convolution."""
FEW = 300
"""A graph with at least this many nodes for each convolution is left as it is."""
SMALL = 64
"""Up to this many channels are few."""


def keeps_channels_last(graph: OpGraph) -> bool:
    """Whether a compiler lays out the whole step with channels last.

    Steps without a backward choose by FLOPs.  Training steps keep channels first where one
    convolution has groups of several channels, or makes half its channels or fewer, or where all
    have few channels.
    """
    convolutions = [
        (op, shape, graph.times(op))
        for op in graph.ops
        if _is_forward(op) and (shape := weight_shape(op, graph)) is not None
    ]
    count = sum(times for _, _, times in convolutions)
    if not count or sum(map(graph.times, graph.ops)) >= FEW * count:
        return False
    kinds = [_kind(op, shape) for op, shape, _ in convolutions]
    if any(op.part == "backward" for op in graph.ops):
        return not {"grouped", "in_out"} & set(kinds) and set(kinds) != {"small"}
    flop: Counter[str] = Counter()
    for kind, (op, shape, times) in zip(kinds, convolutions, strict=True):
        out = graph.values[op.outputs[0]].shape
        flop[kind] += times * math.prod(shape) * out[0] * math.prod(out[2:])
    return sum(LAST_OVER_FIRST[kind] * n for kind, n in flop.items()) <= flop.total()


def _is_forward(op: Op) -> bool:
    """Whether the op is a convolution, and no gradient of one."""
    rule = find_rule(op.target) if op.kind == "kernel" else None
    return rule is not None and rule.kind == "conv" and "grad_output" not in op.arguments


def _kind(op: Op, shape: Sequence[int]) -> str:
    if op.arguments.get("groups", 1) > 1 and shape[1] > 1:
        return "grouped"
    if max(shape[:2]) <= SMALL:
        return "small"
    return "in_out" if 2 * shape[0] <= shape[1] and shape[2] > 1 else "default"


def weight_shape(op: Op, graph: OpGraph) -> tuple[int, ...] | None:
    """The shape of a convolution's weight, None where the op names none."""
    weight = op.arguments.get("weight")
    return graph.values[weight.id].shape if isinstance(weight, Ref) else None


def has_channels_last(value: Tensor) -> bool:
    """Whether an image's channels lie side by side in memory."""
    return len(value.shape) > 3 and value.stride[1] == 1 and value.shape[1] > 1
