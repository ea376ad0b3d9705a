"""Classes of kernels that reach alike shares of a chip's peaks.

A group's class is that of its heaviest op: a convolution with its epilogue is a convolution.  The
classes are those between which measured efficiencies differ; which op is in which is data.
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftrace.tracer.graph import Op, OpGraph, Ref

LARGE_WINDOW = 5
"""Depthwise convolutions with a wider window run on slower kernels."""

_BY_NAME: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("attention", "flex")),
    ("rnn", ("rnn", "lstm", "gru")),
    ("grouped mm", ("_grouped_mm", "_scaled_grouped_mm")),
    ("mm", ("aten.mm", "aten.addmm", "aten.linear", "_scaled_mm", "pack_mm", "_int_mm")),
    ("bmm", ("aten.bmm", "aten.baddbmm", "aten.matmul")),
    ("batch norm", ("batch_norm",)),
    ("layer norm", ("layer_norm", "rms_norm", "group_norm")),
    ("softmax", ("softmax",)),
    ("pooling", ("pool",)),
    ("upsample", ("upsample", "grid_sampler")),
    ("sort", ("aten.sort", "aten.topk", "aten.argsort", "aten.msort", "kthvalue")),
    ("gather", ("embedding", "aten.index", "gather", "scatter", "_unsafe_index", "index_")),
    ("reduction", ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min",
                   "aten.var", "aten.std", "aten.prod", "aten.any", "aten.all", "vector_norm",
                   "aten.cumsum", "argmax", "argmin", "logsumexp")),
    ("copy", ("aten.clone", "aten.cat", "aten.roll", "pad", "aten.stack", "aten.flip",
              "aten.repeat", "aten.tril", "aten.triu")),
    ("cast", ("aten._to_copy", "aten.copy_")),
)  # fmt: skip

CLASSES = (
    "conv",
    "conv 1x1",
    "conv 3d",
    "grouped conv",
    "depthwise conv",
    "depthwise conv, large",
    "depthwise conv backward",
    "grouped conv backward",
    *(name for name, _ in _BY_NAME),
    "elementwise",
)
"""Every class, those of matrix work first; a group of the first that any of its ops is in."""


def op_class(op: Op, graph: OpGraph) -> str:
    """The class of one op."""
    name = op.name
    if "conv" in name:
        return _convolution(op, graph)
    for found, words in _BY_NAME:
        if any(word in name for word in words):
            return found
    return "elementwise"


def group_class(graph: OpGraph, ops: Sequence[int]) -> str:
    """The class of a kernel group: the heaviest of those of its ops."""
    return min((op_class(graph.ops[i], graph) for i in ops), key=CLASSES.index)


def _convolution(op: Op, graph: OpGraph) -> str:
    weight = op.arguments.get("weight")
    if not isinstance(weight, Ref):
        return "conv"
    shape = graph.values[weight.id].shape
    groups, window = op.arguments.get("groups", 1), shape[2:]
    if groups > 1:
        alone = shape[1] == 1 or shape[0] == groups
        back = " backward" if "backward" in op.name else ""
        if not alone:
            return f"grouped conv{back}"
        large = max(window) > LARGE_WINDOW
        return "depthwise conv, large" if large else f"depthwise conv{back}"
    if all(size == 1 for size in window):
        return "conv 1x1"
    return "conv 3d" if len(window) == 3 else "conv"
