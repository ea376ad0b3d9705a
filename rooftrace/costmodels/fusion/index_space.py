"""Index spaces of ops: how each goes through its elements, and which values Inductor stores."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import GraphError, Op, OpGraph, Ref, Tensor, marks
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.recording import Release, read_release


def release_of(graph: OpGraph) -> Release | None:
    """The release of PyTorch that a graph was traced for; None where none was asked for."""
    release = graph.workload.get("torch")
    return read_release(release) if release else None


BATCH_NORMS = frozenset({
    "aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._batch_norm_with_update",
})  # fmt: skip
"""Batch norms that may take mean and variance of the batch."""


def is_batch_norm_native(op: Op, graph: OpGraph) -> bool:
    """Whether PyTorch's own kernels run a batch norm of images on a GPU of NVIDIA, and not cuDNN.

    So for bf16, and for fp16 with weights of fp16, and without weights
    (`_select_batch_norm_backend` in Normalization.cpp of ATen); autocast keeps weights in fp32.
    """
    image, weight = (op.arguments.get(name) for name in ("input", "weight"))
    if "cudnn" in op.name or not isinstance(image, Ref) or len(graph.values[image.id].shape) < 3:
        return False
    if not isinstance(weight, Ref):
        return True
    dtypes = graph.values[image.id].dtype, graph.values[weight.id].dtype
    return "bf16" in dtypes or dtypes == ("fp16", "fp16")


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
    rereading = {op.id for op in graph.ops if _may_reread(op, values)}
    if not rereading:
        return {}
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
        rule = find_rule(op.target)
        if (
            op.id in rereading
            and op.id not in eager
            and any(len(reads[values[i].storage]) >= MANY_READS for i in op.inputs)
            and not any(opaque.get(s, -1) > op.id or s in results for s in made)
        ):
            wider[op.id] = 32 // int(precision(values[op.outputs[0]].dtype).bits)
        pointwise = rule is not None and _is_pointwise(rule.fusion, op.arguments.get("training"))
        taken = set[int]()
        for i in op.inputs if pointwise else ():
            storage = values[i].storage
            taken |= reads[storage] or {storage}
        for storage in made:
            reads[storage] = taken
    return wider


def _may_reread(op: Op, values: Sequence[Tensor]) -> bool:
    """Whether an op uses its input twice, and its result is narrower than fp32."""
    rule = find_rule(op.target) if op.kind == "kernel" and op.outputs else None
    rereads = rule is not None and "rereads" in rule.traits
    return rereads and precision(values[op.outputs[0]].dtype).bits < 32


def _is_pointwise(fusion: str, training: object) -> bool:
    return fusion == "pointwise" or (fusion == "reduction" and training is False)


_ALIGNED = 8
"""Rows of masks begin at multiples of so many numbers (`sdpa_constraint` of Inductor's
lowering.py)."""


def expanded_masks(graph: OpGraph) -> dict[int, int]:
    """Masks that are written for each batch and head, and how many times as large they are then.

    Until torch 2.7 (`Release.views_masks`) Inductor copies the broadcast view of a mask that it
    computes for one attention.  Inputs are viewed, as are masks that are padded to aligned rows.
    """
    release = release_of(graph)
    if release is None or release.views_masks:
        return {}
    values, made, readers = graph.values, set[int](), Counter[int]()
    larger: dict[int, int] = {}
    for op in graph.ops:
        rule = find_rule(op.target) if op.kind == "kernel" else None
        if rule is None:
            continue
        readers.update({values[i].storage for i in op.inputs})
        if rule.fusion != "opaque":
            made.update(values[i].storage for i in op.outputs)
        refs = [op.arguments.get(name) for name in ("mask", "query", "key")]
        if rule.kind == "attention" and all(isinstance(ref, Ref) for ref in refs):
            mask, query, key = (values[ref.id] for ref in refs if isinstance(ref, Ref))
            length = key.shape[-2]
            if mask.storage in made and length % _ALIGNED == 0:
                pairs = math.prod(query.shape[:-1]) * length
                larger[mask.storage] = pairs // max(mask.elements, 1)
    return {storage: times for storage, times in larger.items() if readers[storage] == 1}


def widths(
    graph: OpGraph, groups: Sequence[Sequence[int]], wide: Mapping[int, int]
) -> dict[int, int]:
    """Storages that leave their group larger than their values, and how many times as large:
    `expanded_masks`, and `wide` of `stored_wide`."""
    return {**expanded_masks(graph), **_wide(graph, groups, wide)}


def _wide(
    graph: OpGraph, groups: Sequence[Sequence[int]], wide: Mapping[int, int]
) -> dict[int, int]:
    """Storages that leave their group as such an input, and how many times as wide they are."""
    group_of = {op: index for index, group in enumerate(groups) for op in group}
    made = {graph.values[i].storage: op for op in wide for i in graph.ops[op].outputs}
    wider: dict[int, int] = {}
    for op in graph.ops:
        for i in op.inputs if op.kind == "kernel" else ():
            maker = made.get(graph.values[i].storage)
            if maker is not None and op.id > maker and group_of.get(op.id) != group_of.get(maker):
                wider[graph.values[i].storage] = wide[maker]
    return wider


# -- computed again --------------------------------------------------------------------------------


def computed_again(graph: OpGraph, wide: Mapping[int, int]) -> dict[int, int]:
    """Ops whose result Inductor never stores, by its storage.  wide: `stored_wide` of the graph.

    Each kernel that reads such a result computes it from its one large operand, which takes as many
    bytes: the result of a library, or an input.  No library and no caller reads it, and it has few
    operands (`realize_reads_threshold`).
    """
    values, eager = graph.values, marks.eager_ops(graph.ops)
    there = {values[i].storage for i in graph.external}  # stored anyway
    again: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == "view":
            continue
        rule = find_rule(op.target) if op.kind == "kernel" else None
        read, written = ({values[i].storage for i in ids} for ids in (op.inputs, op.outputs))
        library = rule is None or rule.fusion == "opaque" or op.id in eager
        for storage in (read | written if library else written) & again.keys():
            del again[storage]
        if rule is None or library:
            there |= written
        elif rule.fusion == "pointwise" and len(written) == 1 and op.id not in wide:
            large = [values[i] for i in op.inputs if values[i].elements > 1]
            alone = len(large) == 1 and large[0].storage in there and written.isdisjoint(read)
            if alone and large[0].nbytes == values[op.outputs[0]].nbytes:
                again[min(written)] = op.id
    outputs = {values[i].storage for i in graph.outputs}
    return {storage: op for storage, op in again.items() if storage not in outputs}


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
    return size > SPLIT_ROW * rows and (rows < FEW_ROWS or size > LONGEST_ROW * rows)


def writes_split_rows(graph: OpGraph, op: Op, size: int, reduced: int | None) -> bool:
    """Whether the op reduces rows that are split over SMs, and writes full rows (a group norm)."""
    if not reduced or not is_split(size, reduced):
        return False
    return max((graph.values[i].elements for i in op.outputs), default=0) == size


def writes_many(op: Op) -> bool:
    """Whether the op joins so many tensors that its result is stored and read again."""
    rule = find_rule(op.target) if len(op.inputs) > FEW_PLACED else None
    return rule is not None and "places" in rule.traits


def goes_down(graph: OpGraph, op: Op, channels_last: bool = False) -> bool:
    """Whether the op reduces many rows, each column by itself, to one.

    channels_last: whether a compiler lays out images so: then channels are columns of positions.
    """
    dimensions = op.arguments.get("dim")
    if isinstance(dimensions, int):
        dimensions = (dimensions,)
    if not op.inputs or not isinstance(dimensions, tuple) or not dimensions:
        return False
    if not all(isinstance(dimension, int) for dimension in dimensions):
        raise GraphError(f"op {op.id} ({op.target:.60}): dim={dimensions!r:.60}: expected numbers")
    shape = graph.values[op.inputs[0]].shape
    reduced = {d % len(shape) for d in dimensions} if shape else set()
    if channels_last and len(shape) == 4 and reduced == {2, 3}:
        shape, reduced = (shape[0], *shape[2:], shape[1]), {1, 2}
    if not shape or len(shape) - 1 in reduced or shape[-1] == 1:
        return False
    left = max((graph.values[i].elements for i in op.outputs), default=0)
    return math.prod(shape[d] for d in reduced) > DOWN and left < math.prod(shape)
