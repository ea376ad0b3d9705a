"""Index spaces of ops: how each goes through its elements, and which values Inductor stores."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from rooftrace.costmodels.fusion.runs import copies
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import GraphError, Op, OpGraph, Ref, marks, references
from rooftrace.hardware.precisions import precision

# -- stored wide -----------------------------------------------------------------------------------
# Inductor writes the fp32 input of some ops in place of their result.
#
# An activation that uses its input twice (x sigmoid(x)) makes Inductor store this input, if it
# takes more reads than `realize_reads_threshold` (a batch norm takes five), and casts between the
# two are dropped: it is stored in fp32.  Kernels that use the activation then read that, and
# compute the activation again.  Where a library kernel reads the result it is stored as usual.

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


# -- index space -----------------------------------------------------------------------------------
# Iteration space, dependencies and stored results of each op, before `fuse` puts it into kernels.

LONG_CHAIN = 14
"""A result that is used several times and takes at least this many ops per element is written
first, and not computed again where a part of it is read or where it is broadcast
(realize_opcount_threshold, of 30 of Inductor's smaller ops)."""

FEW_PLACED = 8
"""A cat of more tensors than this is written before it is used (max_pointwise_cat_inputs)."""

UNROLLED = 8
"""A reduction of fewer elements is written out as pointwise code (unroll_reductions_threshold)."""

LONGEST_ROW = 1 << 18
"""Rows up to this length stay near the SM that reduces them, so that the same kernel can go over
them again.  The result of a longer reduction (the norm of all gradients) exists only when its
kernel has ended.
"""

SPLIT_ROW, FEW_ROWS = 8192, 264
"""Longer rows than this are split over SMs when there are fewer of them than two per SM (of 132, an
H100's): a second kernel then reduces the results of the first (Inductor's split reductions)."""


DOWN = 32
"""A sum over more rows than this, down the columns, is split over SMs too: its kernel takes
nothing that others need (Inductor's outer reductions)."""


def is_split(size: int, rows: int) -> bool:
    """Whether rows are so long, or so long and few, that one kernel cannot go over them again."""
    return size > LONGEST_ROW * rows or (rows < FEW_ROWS and size > SPLIT_ROW * rows)


def writes_split_rows(graph: OpGraph, op: Op, size: int, reduced: int | None) -> bool:
    """Whether the op reduces rows that are split over SMs, and writes full rows (a group norm)."""
    if not reduced or not is_split(size, reduced):
        return False
    return max((graph.values[i].elements for i in op.outputs), default=0) == size


def writes_many(op: Op) -> bool:
    """Whether the op joins so many tensors that its result is stored and read again."""
    rule = find_rule(op.target) if len(op.inputs) > FEW_PLACED else None
    return rule is not None and "places" in rule.traits


def goes_down(graph: OpGraph, op: Op) -> bool:
    """Whether the op reduces many rows, each column by itself, to one."""
    dimensions = op.arguments.get("dim")
    if isinstance(dimensions, int):
        dimensions = (dimensions,)
    if not op.inputs or not isinstance(dimensions, tuple) or not dimensions:
        return False
    if not all(isinstance(dimension, int) for dimension in dimensions):
        raise GraphError(f"op {op.id} ({op.target:.60}): dim={dimensions!r:.60}: expected numbers")
    shape = graph.values[op.inputs[0]].shape
    reduced = {d % len(shape) for d in dimensions} if shape else set()
    if not shape or len(shape) - 1 in reduced or shape[-1] == 1:
        return False
    left = max((graph.values[i].elements for i in op.outputs), default=0)
    return math.prod(shape[d] for d in reduced) > DOWN and left < math.prod(shape)


def index_space(graph: OpGraph, op: Op, kind: str | None) -> tuple[int, int | None]:
    """How many elements an op goes over, and how many its reduction leaves (None without one)."""
    outputs = [graph.values[i].elements for i in op.outputs]
    # A batch norm in evaluation knows its mean and variance: nothing is left to reduce.
    if kind != "reduction" or op.arguments.get("training") is False:
        # A list of unequal outputs (_foreach_add) is one iteration space.
        if len(outputs) > 1 and any(
            type(item) is tuple and references(item) for item in op.arguments.values()
        ):
            return sum(copies(graph, op, i) * graph.values[i].elements for i in op.outputs), None
        return max(outputs, default=0), None
    target, rule = op.arguments.get("target"), find_rule(op.target)
    if isinstance(target, Ref) and rule is not None and "picks" in rule.traits:
        return graph.values[target.id].elements, 1
    inputs = [graph.values[i].elements for i in op.inputs]
    size = max([*inputs, *outputs], default=0)
    smallest = min((n for n in outputs if n), default=1)
    if smallest < size:
        if size < UNROLLED * smallest and max(outputs) == smallest:
            return smallest, None
        return size, smallest
    # Writes full rows back (softmax): the reduction runs along `dim`, or along the last dimension.
    shape = graph.values[op.inputs[0]].shape if op.inputs else ()
    dimension = op.arguments.get("dim", -1)
    axis = dimension if isinstance(dimension, int) and -len(shape) <= dimension < len(shape) else -1
    length = shape[axis] if shape else 1
    return size, size // max(length, 1)


def needed_by(needs: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each op the ones that need it."""
    users: list[list[int]] = [[] for _ in needs]
    for op, before in enumerate(needs):
        for other in before:
            users[other].append(op)
    return users


def stored(
    graph: OpGraph,
    classes: Sequence[str | None],
    needs: Sequence[Sequence[int]],
    segments: Sequence[int] = (),
) -> set[int]:
    """Ops whose results a library kernel, a wait or the caller reads: they are written to HBM.

    segments: the compiled graph of each op; results that another one reads are stored.
    """
    outputs = {graph.values[i].storage for i in graph.outputs}
    stored = _leaving(graph, needs, segments) if segments else set[int]()
    for op in graph.ops:
        if op.kind == "sync" or classes[op.id] == "opaque":
            stored.update(needs[op.id])
        if any(graph.values[i].storage in outputs for i in op.outputs):
            stored.add(op.id)
    return stored


def _leaving(graph: OpGraph, needs: Sequence[Sequence[int]], segments: Sequence[int]) -> set[int]:
    """Ops whose results another compiled graph reads."""
    storage = [value.storage for value in graph.values]
    leaves: set[tuple[int, int]] = set()  # compiled graph and storage
    for op in graph.ops:
        read = {storage[i] for i in op.inputs}
        for other in needs[op.id]:
            if segments[other] != segments[op.id]:
                made = read.intersection(storage[i] for i in graph.ops[other].outputs)
                leaves.update((segments[other], place) for place in made)
    return {
        op.id
        for op in graph.ops
        if any((segments[op.id], storage[i]) in leaves for i in op.outputs)
    }


def long_chains(
    graph: OpGraph,
    classes: Sequence[str | None],
    needs: Sequence[Sequence[int]],
    segments: Sequence[int] = (),
) -> set[int]:
    """Ops whose result is used several times, and takes LONG_CHAIN pointwise ops or more.

    segments: the compiled graph of each op, in which a chain ends.
    """
    uses = Counter(
        graph.values[i].storage for op in graph.ops if op.kind != "view" for i in op.inputs
    )
    lengths = [0] * len(graph.ops)
    long: set[int] = set()
    for op in graph.ops:
        if classes[op.id] != "pointwise":
            continue
        before = (n for n in needs[op.id] if not segments or segments[n] == segments[op.id])
        length = 1 + sum(lengths[n] for n in before)
        if length >= LONG_CHAIN and any(uses[graph.values[i].storage] > 1 for i in op.outputs):
            long.add(op.id)
            length = 0  # it is written, and read from there
        lengths[op.id] = min(length, LONG_CHAIN)
    return long


def dependencies(graph: OpGraph, classes: Sequence[str | None]) -> list[list[int]]:
    """For each op the kernels that have to run before it: writers of its operands, and earlier
    readers of a storage that it overwrites."""
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    needs: list[list[int]] = []
    values = graph.values
    for op in graph.ops:
        if op.kind == "view" or classes[op.id] == "free":
            needs.append([])
            continue
        read = {values[i].storage for i in op.inputs}
        before = {writer[s] for s in read if s in writer}
        if op.kind == "kernel":
            for storage in {values[i].storage for i in op.outputs}:
                if storage in read or storage in writer:
                    before.update(readers.pop(storage, ()))
                    if storage in writer:
                        before.add(writer[storage])
                writer[storage] = op.id
            for storage in read:
                readers[storage].append(op.id)
        before.discard(op.id)
        needs.append(sorted(before))
    return needs
