"""What Inductor writes in place of an op's result: the fp32 value that the op is computed from.

An activation that uses its input twice (x sigmoid(x)) makes Inductor store this input, if it takes
more reads than `realize_reads_threshold` (a batch norm takes five), and casts between the two are
dropped: it is stored in fp32.  Kernels that use the activation then read that, and compute the
activation again.  Where a library kernel reads the result it is stored as usual.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rooftrace.costmodels.registry import find_rule
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import OpGraph

MANY_READS = 5
"""An input that takes as many reads is stored (realize_reads_threshold is 4)."""


def stored_wide(graph: OpGraph) -> dict[int, int]:
    """Activations whose input is stored in their stead, and how many times as wide it is."""
    values = graph.values
    opaque: dict[int, int] = {}  # the last library kernel, or eager op, that reads a storage
    eager = marks.eager_ops(graph.ops)
    for op in graph.ops:
        rule = find_rule(op.target) if op.kind == "kernel" else None
        if (
            op.kind == "sync"
            or op.id in eager
            or (op.kind == "kernel" and (rule is None or rule.fusion == "opaque"))
        ):
            opaque.update(dict.fromkeys((values[i].storage for i in op.inputs), op.id))
    results = {values[i].storage for i in graph.outputs}
    reads: dict[int, set[int]] = defaultdict(set)
    wider: dict[int, int] = {}
    for op in graph.ops:
        if op.kind != "kernel":
            continue
        made = [values[i].storage for i in op.outputs]
        bits = precision(values[op.outputs[0]].dtype).bits if op.outputs else 32
        rule = find_rule(op.target)
        if (
            rule is not None
            and "rereads" in rule.traits
            and bits < 32
            and op.id not in eager
            and any(len(reads[values[i].storage]) >= MANY_READS for i in op.inputs)
            and not any(opaque.get(s, -1) > op.id or s in results for s in made)
        ):
            wider[op.id] = 32 // int(bits)
        pointwise = rule is not None and _is_pointwise(rule.fusion, op.arguments.get("training"))
        taken = set[int]()
        for i in op.inputs if pointwise else ():
            storage = values[i].storage
            taken |= reads[storage] or {storage}
        for storage in made:
            reads[storage] = taken
    return wider


def _is_pointwise(fusion: str, training: object) -> bool:
    return fusion == "pointwise" or (fusion == "reduction" and training is False)


def widths(graph: OpGraph, groups: Sequence[Sequence[int]]) -> dict[int, int]:
    """Storages that leave their group as such an input, and how many times as wide they are."""
    wide = stored_wide(graph)
    if not wide:
        return {}
    group_of = {op: index for index, group in enumerate(groups) for op in group}
    made = {graph.values[i].storage: op for op in wide for i in graph.ops[op].outputs}
    wider: dict[int, int] = {}
    for op in graph.ops:
        for i in op.inputs if op.kind == "kernel" else ():
            maker = made.get(graph.values[i].storage)
            if maker is not None and op.id > maker and group_of.get(op.id) != group_of.get(maker):
                wider[graph.values[i].storage] = wide[maker]
    return wider
