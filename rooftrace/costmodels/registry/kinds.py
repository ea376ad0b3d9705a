"""What an op can be: its kind, its family and its traits.  A rule says it, or its cost tells.

kind: the class of kernels whose fitted shares of the chip's peaks apply (see `opclass`, which
splits "conv" by sizes).  family: the part of a model that reports put the op under.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from rooftrace.costmodels.costs import Cost
from rooftrace.errors import hint

FusionClass = Literal["opaque", "pointwise", "reduction", "gather", "free"]
"""How a compiler may fuse the op.

opaque: its own kernel (matrix products, sorts, scatters).  pointwise: output[i] needs inputs[i]
(after broadcasting), copies and casts included.  reduction: reads rows, may write rows back (norms,
softmax).  gather: pointwise with indirect reads (embedding, index).  free: no kernel at all.
"""
FUSION_CLASSES = ("opaque", "pointwise", "reduction", "gather", "free")

KINDS = (
    "conv",
    "attention",
    "rnn",
    "scan",
    "state update",
    "ssd",
    "grouped mm",
    "mm",
    "bmm",
    "batch norm",
    "layer norm",
    "softmax",
    "pooling",
    "upsample",
    "sort",
    "gather",
    "reduction",
    "copy",
    "cast",
    "elementwise",
)
"""Every kind, the heaviest first: a kernel of several ops is of the first that any of them is."""

FAMILIES = (
    "attention",
    "moe",
    "dense",
    "head",
    "convolution",
    "rnn",
    "norm",
    "embedding",
    "elementwise",
    "loss",
    "optimizer",
    "communication",
)

TRAITS = (
    "rereads",  # an activation that uses its input more than once, computing in fp32: x sigmoid(x)
    "places",  # puts its inputs into a larger result: what makes an input computes it there
    "picks",  # reads one number for each element of its `target`, not all of its input
)

_FAMILY_OF: Mapping[str, str] = {
    "conv": "convolution",
    "attention": "attention",
    "rnn": "rnn",
    "scan": "rnn",
    "state update": "rnn",
    "ssd": "rnn",
    "grouped mm": "dense",
    "mm": "dense",
    "bmm": "dense",
    "batch norm": "norm",
    "layer norm": "norm",
}


def kind_of(cost: Cost, fusion: str) -> str:
    """The kind of an op whose rule names none: by its largest matrix work, else by how it fuses.

    Products with `AttentionSizes` are attention, one product of known M, N, K is "mm", several
    equal ones are "bmm".
    """
    matrix = {work: flop for work, flop in cost.work.items() if work.operation != "vector"}
    if matrix:
        work = max(matrix, key=lambda key: matrix[key])
        if any(key.attention is not None for key in matrix):
            return "attention"
        if work.operation == "convolution":
            return "conv"
        each = 0 if work.shape is None else 2 * work.shape[0] * work.shape[1] * work.shape[2]
        return "bmm" if each and matrix[work] > each else "mm"
    return fusion if fusion in ("reduction", "gather") else "elementwise"


def family_of(cost: Cost, kind: str) -> str:
    """The family of an op whose rule names none: by its kind; over a link it is communication."""
    if any(access.wire == "link" for access in cost.traffic):
        return "communication"
    return _FAMILY_OF.get(kind, "elementwise")


def check(what: str, value: str | None, known: Collection[str]) -> None:
    """Raise ValueError for a kind, family, trait or fusion class that does not exist."""
    if value is None or value in known:
        return
    raise ValueError(
        f'{what} "{value}": expected one of {", ".join(known)}{hint(str(value), known)}'
    )
