"""Scaled dot-product attention as one kernel that never writes its score matrix.

FLOPs are those of the dense score matrix, split into pairs that a query may see ("useful") and the
rest: "masked" where the mask has a pattern (causal, window, padding) that a kernel skips by,
"masked_executed" where it has none.  The execution model decides which kernel runs, and whether the
scores are materialised.  A kernel skips whole blocks of pairs; here it skips single pairs.

Bytes are compulsory: query, key, value, mask once; key and value at their own number of heads
(grouped queries share them).  Kernels read key and value again per tile of queries; that comes from
L2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rooftrace.costmodels.costs import AttentionSizes, Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rewriting import marks
from rooftrace.costmodels.rules.common import product_precision, share, vector
from rooftrace.hardware.precisions import precision as format_of
from rooftrace.tracer.asking import RequestLengths

BOTTOM_RIGHT = 2
"""`custom_mask_type` of _efficient_attention_forward: 1 is causal from the top left corner."""
SOFTMAX = 5
"""Flop per visible pair: scale, compare with the running maximum, subtract it, exp, add to the sum.

Division by the sum is done once per output element.  Rescaling the running output, and a mask's
add, are counted apart or not at all: the former depends on the tile size.
"""


QKV = ("query", "key", "value")
UNSTRUCTURED = "full"
"""What the tracer calls a mask that has no pattern for a kernel to skip by."""
_PATTERNED = ("none", "causal", "sliding-window", "padding")
"""What the tracer calls the masks that have such a pattern."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention op, and which (query, key) pairs its kernel computes."""

    heads: int  # query heads over the whole batch
    e: int  # width of query and key
    ev: int  # width of value
    queries: int
    length: int
    dense: int  # (query, key) pairs of one head
    visible: int  # those that the mask lets through
    keys: int  # keys that some query sees
    rows: int  # queries that share one tile of keys
    skips: bool  # whether the kernel leaves out pairs that are not visible
    kernel: AttentionSizes | None  # for `attention_time`; None: hand-written, no known kernel

    @property
    def computed(self) -> int:
        """Pairs that the kernel computes."""
        return self.visible if self.skips else self.dense


def causal_pairs(queries: int, length: int) -> int:
    """sum_i min(i + 1, L): the diagonal starts top left, as torch aligns is_causal."""
    steps = min(queries, length)
    return steps * (steps + 1) // 2 + (queries - steps) * length


def _sizes(op: OpView, heads_first: bool = True) -> AttentionShape:
    """Sizes from query[..., Hq, S, E], key[..., Hk, L, E], value[..., Hk, L, Ev].

    With heads_first=False they are [B, S, H, E], or [S of all sequences, H, E] with `cum_seq_q`:
    then all sequences count as equally long, since offsets are data.
    """
    query, key, value = op.needed("query"), op.needed("key"), op.needed("value")
    e, ev = query.shape[-1], value.shape[-1]
    if heads_first:
        queries, length = query.shape[-2], key.shape[-2]
        q_heads = query.shape[-3] if query.dim > 2 else 1
        k_heads = key.shape[-3] if key.dim > 2 else 1
        batch = math.prod(map(max, query.shape[:-3], key.shape[:-3]))
    else:
        offsets = op.first("cum_seq_q", "cu_seqlens_q")
        parts = 1 if offsets is None else max(offsets.elements - 1, 1)
        queries, length = query.shape[-3] // parts, key.shape[-3] // parts
        q_heads, k_heads = query.shape[-2], key.shape[-2]
        batch = parts * math.prod(query.shape[:-3])
    return _shape(op, queries=queries, length=length, batch=int(batch), heads=(q_heads, k_heads),
                  widths=(e, ev), stored=key)


def _shape(
    op: OpView, *, queries: int, length: int, batch: int, heads: tuple[int, int],
    widths: tuple[int, int], stored: TensorView,
) -> AttentionShape:  # fmt: skip
    """Sizes with the pairs that the mask of the op lets through.

    heads: of queries, and of keys.  widths: of query and key, and of value.  stored: the keys.
    """
    (q_heads, k_heads), (e, ev) = heads, widths
    corner = int(op.attribute("custom_mask_type", op.attribute("is_causal", False)))
    keys = length
    pairs = queries * length
    if corner == BOTTOM_RIGHT:
        ahead = max(length - queries, 0)
        pairs = queries * ahead + causal_pairs(queries, length - ahead)
    elif corner:
        pairs = causal_pairs(queries, length)
        keys = min(queries, length)
    visible = op.fact("visible_pairs")
    skips = op.fact("mask") != UNSTRUCTURED
    if visible is not None:
        pairs = min(int(visible), queries * length)
        most = int(op.fact("window") or length) + queries - 1  # keys that some query sees
        keys = min(length, pairs, int(op.fact("visible_keys") or most)) if skips else length
    rows = queries * max(q_heads // max(k_heads, 1), 1)
    kernel = None if op.fact(marks.WRITTEN_OUT) else AttentionSizes(
        batch=batch,
        queries=queries,
        keys=length,
        visible=pairs if skips else queries * length,
        heads=q_heads,
        kv_heads=k_heads,
        width=e,
        value_width=ev,
        kv_size=float(format_of(stored.dtype).bits / 8),
        masked=op.fact(marks.LIBRARY) == marks.EFFICIENT
        or (_mask(op) is not None and op.fact("mask") not in _PATTERNED),
        backward="backward" in op.target,
    )  # fmt: skip
    return AttentionShape(
        heads=batch * q_heads, e=e, ev=ev, queries=queries, length=length,
        dense=queries * length, visible=pairs, keys=keys, rows=rows, skips=skips, kernel=kernel,
    )  # fmt: skip


def _packed_shape(
    op: OpView, heads: int, widths: tuple[int, int], key: TensorView
) -> AttentionShape:
    """Sizes of requests packed in one row: each sees its own rows.

    heads: of queries.  widths: of query and key, and of value.  key: the keys [1, H, L, E].  The
    kernel's time is that of as many equal requests, with the mean of their sizes.
    """
    lengths = RequestLengths(tuple(op.attribute("cached")), tuple(op.attribute("new")))
    window, count = int(op.attribute("window")), len(lengths.new)
    tokens, length, visible = lengths.tokens, lengths.keys(window), lengths.visible(window)
    kernel = AttentionSizes(
        batch=count, queries=tokens / count, keys=length / count, visible=visible / count,
        heads=heads, kv_heads=key.shape[1], width=widths[0], value_width=widths[1],
        kv_size=float(format_of(key.dtype).bits / 8),
    )  # fmt: skip
    return AttentionShape(
        heads=heads, e=widths[0], ev=widths[1], queries=tokens, length=length,
        dense=lengths.pairs(window), visible=visible, keys=length,
        rows=max(1, tokens // count * heads // key.shape[1]), skips=True, kernel=kernel,
    )  # fmt: skip


def _products(s: AttentionShape, flop_per_pair: int, precision: str) -> Cost:
    """`flop_per_pair` of matrix work over the dense score matrix, split by visibility."""
    hidden = "masked" if s.skips else "masked_executed"
    return (Cost.of(matmul=s.heads * s.visible * flop_per_pair, precision=precision, rows=s.rows,
                    attention=s.kernel)
            + Cost.of(matmul=s.heads * (s.dense - s.visible) * flop_per_pair, precision=precision,
                      rows=s.rows, count=hidden, attention=s.kernel))


def _keys_read(op: OpView, s: AttentionShape, tensor: TensorView) -> Cost:
    """Key or value: the rows that some query sees (one query with a window reads the window)."""
    return op.read(tensor, share(tensor, s.keys, max(s.length, 1)))


def _mask(op: OpView) -> TensorView | None:
    """The mask that a kernel reads."""
    if op.fact(marks.BY_LENGTHS):
        return None
    return op.first("mask", "attn_mask", "attn_bias", "bias")


def _per_pair_extras(op: OpView) -> int:
    """An additive mask is one add per pair; dropout compares with a random number and scales.

    A soft cap is tanh and a product; what it divides by is in the scale.
    """
    mask = _mask(op)
    additive = mask is not None and mask.floating
    capped = bool(op.attribute("softcap", 0.0))
    dropped = bool(op.attribute("dropout_p", 0.0) > 0)
    return additive + 2 * dropped + 2 * capped


def _softmax_flop(op: OpView, s: AttentionShape) -> int:
    """Of each pair, and of each row: a division of each output; a sink is subtracted from, exp,
    added to the sum."""
    per_row = s.ev + (3 if op.first("sinks") is not None else 0)
    return s.heads * ((SOFTMAX + _per_pair_extras(op)) * s.computed + s.queries * per_row)


def _forward(op: OpView, s: AttentionShape) -> Cost:
    query, key, value = op.needed("query"), op.needed("key"), op.needed("value")
    but = (*QKV, "mask") if op.fact(marks.BY_LENGTHS) else QKV
    return (_products(s, 2 * s.e + 2 * s.ev, product_precision(query, key, value))
            + vector(op, _softmax_flop(op, s))
            + op.read(query) + _keys_read(op, s, key) + _keys_read(op, s, value)
            + op.read_all((t for _, t in op.operands(but=but)))
            + op.write_all(op.outputs))


def _backward(op: OpView, s: AttentionShape) -> Cost:
    query, key, value = op.needed("query"), op.needed("key"), op.needed("value")
    precision = product_precision(query, key, value)
    per_pair = 3 + _per_pair_extras(op)
    again = Cost.of(matmul=2 * s.heads * s.computed * s.e, precision=precision, rows=s.rows,
                    count="recompute")
    return (_products(s, 4 * s.e + 4 * s.ev, precision) + again
            + vector(op, 3 * s.heads * s.computed, count="recompute")
            + vector(op, per_pair * s.heads * s.computed + 2 * s.heads * s.queries * s.ev)
            + op.read(query) + _keys_read(op, s, key) + _keys_read(op, s, value)
            + op.read_all((t for _, t in op.operands(but=QKV)))
            + op.write_all(op.outputs))


@builtin("rooftrace.attention", kind="attention", label="flash attention")
@builtin(
    "rooftrace.flex_attention",
    "aten.scaled_dot_product_attention",
    "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_fused_attention_overrideable",
    kind="attention")
def attention(op: OpView) -> Cost:
    """out[H, S, Ev] = softmax(scale query[H, S, E] key[H, L, E]^T + mask) value[H, L, Ev].

    Dense: 2 H S L E + 2 H S L Ev flop of matrix work (H: query heads over the batch), of which the
    visible pairs are useful.  Vector: SOFTMAX per visible pair and one division per output.
    """
    return _forward(op, _sizes(op))


@builtin("rooftrace.latent_attention", kind="attention", label="latent attention")
def latent_attention(op: OpView) -> Cost:
    """softmax(scale (query latent^T + query_rope rope^T) + mask) latent: one latent for all heads.

    query[B, H, S, R], query_rope[B, H, S, D], latent[B, 1, L, R], rope[B, 1, L, D].  Dense:
    2 H S L (2 R + D) flop of matrix work (H: query heads over the batch).  The latent is key and
    value, and is read once.
    """
    query, latent, rope = op.needed("query"), op.needed("latent"), op.needed("rope")
    return _latent(op, _shape(
        op, queries=query.shape[-2], length=latent.shape[-2], batch=query.shape[0],
        heads=(query.shape[1], 1), widths=(query.shape[-1] + rope.shape[-1], latent.shape[-1]),
        stored=latent,
    ))  # fmt: skip


def _latent(op: OpView, s: AttentionShape) -> Cost:
    query, turned = op.needed("query"), op.needed("query_rope")
    latent, rope = op.needed("latent"), op.needed("rope")
    return (_products(s, 2 * s.e + 2 * s.ev, product_precision(query, turned, latent, rope))
            + vector(op, _softmax_flop(op, s))
            + op.read_all((query, turned, _mask(op), op.first("sinks")))
            + _keys_read(op, s, latent) + _keys_read(op, s, rope)
            + op.write_all(op.outputs))


@builtin("rooftrace.packed_attention", kind="attention", label="packed attention")
def packed_attention(op: OpView) -> Cost:
    """`attention` of several requests in one kernel: query[1, Hq, S, E] of all their new tokens,
    key[1, Hk, L, E], value[1, Hk, L, Ev] of all their rows.

    Pairs are those of each request alone: dense new (rows + new), visible as far as a token sees.
    """
    query, value = op.needed("query"), op.needed("value")
    widths = query.shape[-1], value.shape[-1]
    return _forward(op, _packed_shape(op, query.shape[1], widths, op.needed("key")))


@builtin("rooftrace.packed_latent_attention", kind="attention", label="packed latent attention")
def packed_latent_attention(op: OpView) -> Cost:
    """`latent_attention` of several requests in one kernel; pairs as in `packed_attention`."""
    query, rope, latent = op.needed("query"), op.needed("query_rope"), op.needed("latent")
    widths = query.shape[-1] + rope.shape[-1], latent.shape[-1]
    return _latent(op, _packed_shape(op, query.shape[1], widths, latent))


@builtin("aten._flash_attention_forward", "aten._efficient_attention_forward", kind="attention")
def attention_heads_last(op: OpView) -> Cost:
    """`attention` on [B, S, H, E], or on packed sequences [T, H, E] with their offsets.

    torch.utils.flop_counter reads these shapes as [B, H, S, E] and so counts H for S here.
    """
    return _forward(op, _sizes(op, heads_first=False))


@builtin("rooftrace.attention_backward", kind="attention", label="flash attention backward")
@builtin(
    "rooftrace.flex_attention_backward",
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_fused_attention_overrideable_backward",
    kind="attention")
def attention_backward(op: OpView) -> Cost:
    """Flash backward, algorithm 4 of arXiv 2205.14135: P = exp(scale Q K^T - lse), recomputed.

    dV = P^T dO, dP = dO V^T: 2 Ev flop per pair each.  dQ = dS K, dK = dS^T Q: 2 E each. Together
    exactly twice the forward.  Recomputing Q K^T is 2 E per visible pair ("recompute"). Vector:
    scale, subtract, exp of the recompute; dS = scale P (dP - D) is 3, and rounding of P to the
    storage type is free, D_i = sum dO O is 2 Ev per query; the mask adds, dropout acts as before.
    """
    return _backward(op, _sizes(op))


@builtin("aten._flash_attention_backward", "aten._efficient_attention_backward", kind="attention")
def attention_backward_heads_last(op: OpView) -> Cost:
    """`attention_backward` on [B, S, H, E], or on packed sequences."""
    return _backward(op, _sizes(op, heads_first=False))


@builtin("aten._fill_mem_eff_dropout_mask_")
def fill_dropout_mask(op: OpView) -> Cost:
    """Writes random numbers."""
    return op.write_all(op.outputs)
