"""What several chips send to each other when the products of a step are split over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.pricing import price_ops, with_families
from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.rewriting import reprice
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import bytes_per_element
from rooftrace.tracer.graph import Op, OpGraph

NODE = 8
"""Chips that the link inside a node joins; more of them also use the one between nodes."""
_MIXERS = ("attention",)
_CHANNELS = ("dense", "moe")


@dataclass(frozen=True)
class Exchange:
    """All-reduces of a step: so many, of so many bytes each on every chip."""

    times: int
    size: int

    def seconds(self, chip: Chip, count: int) -> float:
        """Seconds for `count` chips: 2 (n - 1) / n of the bytes and 2 log2(n) messages.

        A ring moves that many bytes over each link, and a tree needs that many messages one after
        the other; collective libraries choose by size, and nothing is faster than both (Thakur,
        Rabenseifner and Gropp, 2005).  inf where the chip has no link.
        """
        if count == 1:
            return 0.0
        link = chip.link("intra" if count <= NODE else "inter")
        if link is None:
            return math.inf
        messages = 2 * math.ceil(math.log2(count))
        latency = link.latency.value if link.latency is not None else 0.0
        moved = 2 * (count - 1) / count * self.size / link.bandwidth.value
        return self.times * (moved + messages * latency)


def exchanges(graph: OpGraph, conditions: Conditions) -> tuple[Exchange, ...]:
    """The all-reduces of a step whose products are split over chips, as in Megatron-LM.

    One after each attention and one after each MLP or mixture of experts, of what its first product
    reads: the residual stream.  Empty for steps without such blocks, and for those with a backward
    pass: how they split is not known here.
    """
    priced = reprice(graph, conditions.dtype, conditions.weights_dtype, conditions.kv_dtype)
    costs, _ = price_ops(priced)
    classified = with_families(priced, costs)
    firsts = list(_firsts(classified, costs))
    if not firsts or any(op.part != "forward" for op in graph.ops):
        return ()
    width = min(bytes_per_element(classified.values[value].dtype) for _, value in firsts)
    sizes: dict[int, int] = {}
    for op, value in firsts:
        size = int(classified.values[value].elements * width)
        sizes[size] = sizes.get(size, 0) + _times(classified, op)
    return tuple(Exchange(times, size) for size, times in sizes.items())


def _firsts(graph: OpGraph, costs: Sequence[Cost]) -> Iterator[tuple[Op, int]]:
    """The first product with weights of each block, and the activation that it reads."""
    before: tuple[str, tuple[int, ...]] | None = None
    for op in graph.ops:
        block = _block(op, costs[op.id])
        if not block:
            continue
        activation = _activation(graph, op)
        if activation is None:
            continue
        if (block, op.repeats) != before:
            yield op, activation
        before = block, op.repeats


def _block(op: Op, cost: Cost) -> str:
    """The kind of block that a product is in; empty for other ops."""
    if op.kind != "kernel":
        return ""
    rule = find_rule(op.target)
    if rule is None or rule.kind_of(cost) != "mm":
        return ""
    if op.family in _MIXERS:
        return "attention"
    return "mlp" if op.family in _CHANNELS else ""


def _activation(graph: OpGraph, op: Op) -> int | None:
    """What a product of an activation and weights reads besides the weights."""
    values = graph.values
    roles = [values[values[value].storage].role for value in op.inputs]
    if "weights" not in roles:
        return None
    others = [v for v, role in zip(op.inputs, roles, strict=True) if role != "weights"]
    return others[0] if others else None


def _times(graph: OpGraph, op: Op) -> int:
    return math.prod(graph.repeats[repeat].count for repeat in op.repeats)
