"""Scaled dot-product attention as one kernel that never writes its score matrix.

FLOPs are those of the dense score matrix, split into pairs that a query may see ("useful") and the
rest ("masked"), which a kernel that knows the mask skips.  Which kernel runs, and the materialised
form, are the execution model's business.  Block granularity of the skipping is not modelled.

Bytes are compulsory: query, key, value, mask once; key and value at their own number of heads
(grouped queries share them).  Kernels read key and value again per tile of queries; that comes from
L2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rooftrace.costmodels.cost import Cost, OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import (
    given,
    needed,
    operands,
    product_precision,
    read_all,
    share,
    vector,
    write_all,
)

SOFTMAX = 5
"""Flop per visible pair: scale, compare with the running maximum, subtract it, exp, add to the sum.

Division by the sum is done once per output element.  Rescaling the running output, and a mask's
add, are counted apart or not at all: the former depends on the tile size.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """heads: query heads over the whole batch.  pairs, dense: visible and all (query, key) pairs of
    one head.  keys: keys that some query sees.  rows: queries that share one tile of keys."""

    heads: int
    e: int  # width of query and key
    ev: int  # width of value
    queries: int
    length: int
    pairs: int
    keys: int
    rows: int

    @property
    def dense(self) -> int:
        return self.queries * self.length


def causal_pairs(queries: int, length: int) -> int:
    """sum_i min(i + 1, L): the diagonal starts top left, as torch aligns is_causal."""
    steps = min(queries, length)
    return steps * (steps + 1) // 2 + (queries - steps) * length


def _sizes(op: OpView, heads_first: bool = True) -> Sizes:
    """Sizes from query[..., Hq, S, E], key[..., Hk, L, E], value[..., Hk, L, Ev].

    With heads_first=False they are [B, S, H, E], or [S of all sequences, H, E] with `cum_seq_q`:
    then all sequences count as equally long, since offsets are data.
    """
    query, key, value = needed(op, "query"), needed(op, "key"), needed(op, "value")
    e, ev = query.shape[-1], value.shape[-1]
    if heads_first:
        queries, length = query.shape[-2], key.shape[-2]
        q_heads = query.shape[-3] if query.dim > 2 else 1
        k_heads = key.shape[-3] if key.dim > 2 else 1
        batch = max(math.prod(query.shape[:-3]), math.prod(key.shape[:-3]))
    else:
        offsets = given(op, "cum_seq_q", "cu_seqlens_q")
        parts = 1 if offsets is None else max(offsets.elements - 1, 1)
        queries, length = query.shape[-3] // parts, key.shape[-3] // parts
        q_heads, k_heads = query.shape[-2], key.shape[-2]
        batch = parts * math.prod(query.shape[:-3])
    causal = bool(op.attribute("is_causal", False)) or op.attribute("custom_mask_type", 0) != 0
    keys = length
    pairs = queries * length
    if causal:
        pairs = causal_pairs(queries, length)
        keys = min(queries, length)
    visible = op.fact("visible_pairs")
    if visible is not None:
        pairs = min(int(visible), queries * length)
        keys = min(length, pairs)
    rows = queries * max(q_heads // max(k_heads, 1), 1)
    return Sizes(int(batch) * q_heads, e, ev, queries, length, pairs, keys, rows)


def _products(s: Sizes, flop_per_pair: int, precision: str) -> Cost:
    """`flop_per_pair` of matrix work over the dense score matrix, split by visibility."""
    return (Cost.of(matmul=s.heads * s.pairs * flop_per_pair, precision=precision, rows=s.rows)
            + Cost.of(matmul=s.heads * (s.dense - s.pairs) * flop_per_pair, precision=precision,
                      rows=s.rows, count="masked"))


def _keys_read(op: OpView, s: Sizes, tensor: TensorView) -> Cost:
    """Key or value: the rows that some query sees (one query with a window reads the window)."""
    return op.read(tensor, share(tensor, s.keys, max(s.length, 1)))


def _mask(op: OpView) -> TensorView | None:
    return given(op, "mask", "attn_mask", "attn_bias", "bias")


def _per_pair_extras(op: OpView) -> int:
    """An additive mask is one add per pair; dropout compares with a random number and scales."""
    mask = _mask(op)
    additive = mask is not None and mask.floating
    return (1 if additive else 0) + (2 if op.attribute("dropout_p", 0.0) > 0 else 0)


def _forward(op: OpView, s: Sizes) -> Cost:
    query, key, value = needed(op, "query"), needed(op, "key"), needed(op, "value")
    softmax = (SOFTMAX + _per_pair_extras(op)) * s.heads * s.pairs + s.heads * s.queries * s.ev
    known = ("query", "key", "value")
    return (_products(s, 2 * s.e + 2 * s.ev, product_precision(query, key, value))
            + vector(op, softmax)
            + op.read(query) + _keys_read(op, s, key) + _keys_read(op, s, value)
            + read_all(op, (t for name, t in operands(op) if name not in known))
            + write_all(op, op.outputs))


def _backward(op: OpView, s: Sizes) -> Cost:
    query, key, value = needed(op, "query"), needed(op, "key"), needed(op, "value")
    precision = product_precision(query, key, value)
    per_pair = 3 + _per_pair_extras(op)
    again = Cost.of(matmul=2 * s.heads * s.pairs * s.e, precision=precision, rows=s.rows,
                    count="recompute")
    known = ("query", "key", "value")
    return (_products(s, 4 * s.e + 4 * s.ev, precision) + again
            + vector(op, 3 * s.heads * s.pairs, count="recompute")
            + vector(op, per_pair * s.heads * s.pairs + 2 * s.heads * s.queries * s.ev)
            + op.read(query) + _keys_read(op, s, key) + _keys_read(op, s, value)
            + read_all(op, (t for name, t in operands(op) if name not in known))
            + write_all(op, op.outputs))


@builtin(
    "rooftrace.attention", "rooftrace.flex_attention",
    "aten.scaled_dot_product_attention",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
def attention(op: OpView) -> Cost:
    """out[H, S, Ev] = softmax(scale query[H, S, E] key[H, L, E]^T + mask) value[H, L, Ev].

    Dense: 2 H S L E + 2 H S L Ev flop of matrix work (H: query heads over the batch), of which the
    visible pairs are useful.  Vector: SOFTMAX per visible pair and one division per output.
    """
    return _forward(op, _sizes(op))


@builtin("aten._flash_attention_forward", "aten._efficient_attention_forward")
def attention_heads_last(op: OpView) -> Cost:
    """`attention` on [B, S, H, E], or on packed sequences [T, H, E] with their offsets.

    torch.utils.flop_counter reads these shapes as [B, H, S, E] and so counts H for S here.
    """
    return _forward(op, _sizes(op, heads_first=False))


@builtin(
    "rooftrace.attention_backward", "rooftrace.flex_attention_backward",
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_fused_attention_overrideable_backward",
)
def attention_backward(op: OpView) -> Cost:
    """Flash backward, algorithm 4 of arXiv 2205.14135: P = exp(scale Q K^T - lse), recomputed.

    dV = P^T dO, dP = dO V^T: 2 Ev flop per pair each.  dQ = dS K, dK = dS^T Q: 2 E each. Together
    exactly twice the forward.  Recomputing Q K^T is 2 E per visible pair ("recompute"). Vector:
    scale, subtract, exp of the recompute; dS = scale P (dP - D) is 3, and rounding of P to the
    storage type is free, D_i = sum dO O is 2 Ev per query; the mask adds, dropout acts as before.
    """
    return _backward(op, _sizes(op))


@builtin("aten._flash_attention_backward", "aten._efficient_attention_backward")
def attention_backward_heads_last(op: OpView) -> Cost:
    """`attention_backward` on [B, S, H, E], or on packed sequences."""
    return _backward(op, _sizes(op, heads_first=False))


@builtin("aten._fill_mem_eff_dropout_mask_")
def fill_dropout_mask(op: OpView) -> Cost:
    """Writes random numbers."""
    return write_all(op, op.outputs)
