"""Bytes that libraries take inside of ops, from the same allocator as tensors.

They are no tensors of the graph, and `torch.cuda.max_memory_allocated` counts them.  What eager ops
make for themselves by kernels of their own, such as copies in order, are tensors of the graph that
is priced (costmodels/rewriting/eager_kernels).

BLAS: cuBLAS gets one workspace for each pair of a thread's handle and a stream, at the first
product, and keeps it (aten/src/ATen/cuda/CublasHandlePool.cpp).  Backward runs in a thread of
autograd's own, so a training step has two.

Attention: the backward of FlashAttention 2 sums the gradient of the queries in fp32, and keeps a
number for each row (`mha_bwd`, flash_attn/flash_api.cpp: `dq_accum`, `softmax_d`).

Norms: the backward of a group norm keeps three numbers for each sample and channel and two for
each group, in fp32 (group_norm_kernel.cu, `ds`, `db`, `c1` to `c3`).

Sorting rows of more than 4,096: by segments, with indices made first and a second buffer for keys
and indices; few rows are sorted as one, with pairs of row and place (SortStable.cu).

Convolutions: kernels for tensor cores want channels last.  Where channels come first, cuDNN copies
what it reads and writes into its workspace (cuDNN developer guide, "Tensor Transformations").
Which engine it takes is its own choice, so this is the most; it may be nothing.  Beside the copies
an engine may take about a mebibyte for any size, which is nearly all that tiny ones take: measured,
0.97 MiB on an RTX 3090, 0.7 to 1.1 for the smallest (Liger-Kernel's peaks of
`multi_token_attention`).  Other algorithms (FFT,
Winograd with transformed tiles) may take more, and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.traffic import layouts
from rooftrace.hardware.precisions import storage_bytes
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

Kind = Literal["BLAS", "attention", "norms", "sorting", "convolutions"]

HALF = ("fp16", "bf16")
_ROWS = 128
"""FlashAttention's backward rounds sequences up to this, and heads' widths to 32."""
_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes that an op takes beside its tensors while it runs."""

    kind: Kind
    bytes: int
    sure: bool  # else the most: the library may take less


_ENGINE = 994 * 2**10
"""Bytes that an engine of cuDNN may take beside copies, whatever the size; measured."""


def is_product(op: Op) -> bool:
    """Whether BLAS runs the op: a matrix product that is no grouped one."""
    rule = find_rule(op.target) if op.kind == "kernel" else None
    return rule is not None and rule.kind in ("mm", "bmm") and "grouped" not in op.name


def scratch(op: Op, graph: OpGraph) -> Scratch | None:
    """What an op takes while it runs, None where it takes nothing that we know of."""
    rule = find_rule(op.target) if op.kind == "kernel" else None
    if rule is None:
        return None
    if rule.kind == "attention" and "backward" in op.name:
        query = _named(op, graph, "query")
        return _attention(query) if query is not None else None
    if rule.kind == "conv":
        return _convolution(op, graph)
    if rule.kind == "sort":
        return _sort(op, graph)
    return _group_norm(op) if op.name == "aten.native_group_norm_backward" else None


_SMALL_SORT = 4096
"""Rows of so many elements are sorted in place (Sort.cpp, `should_use_small_sort`)."""


def _sort(op: Op, graph: OpGraph) -> Scratch | None:
    """n rows of keys of e bytes: indices of 8 bytes, and a second buffer of e + 8."""
    data = _named(op, graph, "self")
    if data is None or not data.shape or op.name not in ("aten.sort", "aten.argsort"):
        return None
    dimension = op.arguments.get("dim", -1)
    if data.shape[dimension] <= _SMALL_SORT:
        return None
    size = 16 * data.elements + storage_bytes(data.dtype, data.elements)
    return Scratch("sorting", size, sure=True)


def _group_norm(op: Op) -> Scratch | None:
    """Sums of its backward by sample and channel."""
    samples, channels, groups = (op.arguments.get(name) for name in ("N", "C", "group"))
    if not (samples and channels and groups):
        return None
    return Scratch("norms", 4 * samples * (3 * channels + 2 * groups), sure=True)


def _named(op: Op, graph: OpGraph, name: str) -> Tensor | None:
    reference = op.arguments.get(name)
    return graph.values[reference.id] if isinstance(reference, Ref) else None


def _attention(query: Tensor) -> Scratch | None:
    """query[B, H, S, E]: fp32 [B, H, S', E'] and fp32 [B, H, S'], sizes rounded up.

    Kernels for fp32 sum in the gradient itself.
    """
    if query.dtype not in HALF or len(query.shape) != 4:
        return None
    batch, heads, rows, width = query.shape
    rows, width = _up(rows, _ROWS), _up(width, _WIDTH)
    return Scratch("attention", 4 * batch * heads * rows * (width + 1), sure=True)


def _convolution(op: Op, graph: OpGraph) -> Scratch | None:
    """What an engine takes, and copies with channels last of the largest product: forward, or one
    of the two of backward."""
    weight = _named(op, graph, "weight")
    data = _named(op, graph, "input")
    if weight is None or data is None or data.dtype not in (*HALF, "fp32", "tf32"):
        return None
    groups = op.arguments.get("groups", 1)
    if groups == data.shape[1] > 1:
        return None  # depthwise convolutions have kernels of PyTorch's own
    if len(data.shape) < 4 or layouts.has_channels_last(data):
        return Scratch("convolutions", _ENGINE, sure=False)
    copied = _copied((data, weight))
    gradient = _named(op, graph, "grad_output")
    if gradient is None:
        copied += _copied(graph.values[value] for value in op.outputs)
    else:
        copied += _copied((gradient,))  # either product reads two of three, and makes the third
    return Scratch("convolutions", _ENGINE + copied, sure=False)


def _copied(tensors: Iterable[Tensor]) -> int:
    """Bytes of copies with channels last: whole vectors of 16 bytes of channels."""
    total = 0
    for tensor in tensors:
        vector = max(1, 16 // storage_bytes(tensor.dtype, 1))
        places = math.prod((tensor.shape[0], *tensor.shape[2:]))
        total += storage_bytes(tensor.dtype, places * _up(tensor.shape[1], vector))
    return total


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
