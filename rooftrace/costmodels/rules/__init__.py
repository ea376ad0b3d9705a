"""What every operator costs: one module per kind of operator, imported once by `registry`.

A rule knows shapes, precisions and attributes of one call.  It knows no chip, no fusion and no
other op.  Where its FLOPs come from is said at the rule; how FLOPs of elementwise arithmetic are
counted is said once, in `elementwise`.  Bytes are the compulsory ones: each distinct byte that the
kernel needs once, whatever its caches make of the rest.
"""

from rooftrace.costmodels.rules import (
    attention,
    cache,
    collective,
    convolution,
    copying,
    creation,
    elementwise,
    encoder,
    fourier,
    indexing,
    linalg,
    loss,
    matmul,
    moe,
    norm,
    optimizer,
    pooling,
    prims,
    random,
    reduction,
    rnn,
    scan,
    shape,
    softmax,
    sort,
    sparse,
    upsample,
    vision,
)

__all__ = [
    "attention",
    "cache",
    "collective",
    "convolution",
    "copying",
    "creation",
    "elementwise",
    "encoder",
    "fourier",
    "indexing",
    "linalg",
    "loss",
    "matmul",
    "moe",
    "norm",
    "optimizer",
    "pooling",
    "prims",
    "random",
    "reduction",
    "rnn",
    "scan",
    "shape",
    "softmax",
    "sort",
    "sparse",
    "upsample",
    "vision",
]
