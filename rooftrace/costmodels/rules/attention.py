"""Rules of attention ops: packed sequences, scaled dot-product attention, and encoder layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rooftrace.costmodels.ops import AttentionSizes, Cost, OpView, TensorView, builtin
from rooftrace.costmodels.ops.cost import BY_LENGTHS, EFFICIENT, LIBRARY, WRITTEN_OUT
from rooftrace.costmodels.rules.common import product_precision, share, vector
from rooftrace.costmodels.rules.elementwise import GELU, flop_per_element
from rooftrace.costmodels.rules.matmul import product
from rooftrace.costmodels.rules.norm import standardise_flop
from rooftrace.hardware.precisions import precision as format_of
from rooftrace.tracer import RequestLengths

# -- bands -----------------------------------------------------------------------------------------
# Sequences that one attention kernel runs together: pairs that a band lets through, and lengths.
#
# A band shows query i of n the keys j of m with -behind <= j - (i + shift) <= ahead; None: no
# bound.


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a query sees; see above.  from_end: the last query stands at the last key."""

    behind: int | None = None
    ahead: int | None = None
    from_end: bool = True
    least_shift: int | None = None  # for kernels that never move the diagonal to the left

    def _shift(self, queries: int, keys: int) -> int:
        shift = keys - queries if self.from_end else 0
        return shift if self.least_shift is None else max(shift, self.least_shift)

    def pairs(self, queries: int, keys: int) -> int:
        """How many (query, key) pairs of one head the band shows."""
        shift = self._shift(queries, keys)
        above = 0 if self.behind is None else _below(queries, keys, shift - self.behind - 1)
        if self.ahead is None:
            return queries * keys - above
        return _below(queries, keys, shift + self.ahead) - above

    def seen(self, queries: int, keys: int) -> int:
        """How many keys some query sees."""
        shift = self._shift(queries, keys)
        first = 0 if self.behind is None else max(0, shift - self.behind)
        end = keys if self.ahead is None else min(keys, queries + shift + self.ahead)
        return max(0, end - first) if queries else 0


def _below(queries: int, keys: int, most: int) -> int:
    """Pairs with j - i <= most: the sum over i of i + most + 1, cut to 0 ... keys."""
    ends = (queries + most, most, queries + most - keys, most - keys)
    first, second, third, fourth = (max(end, 0) * (max(end, 0) + 1) // 2 for end in ends)
    return first - second - third + fourth


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of one size, as they stand in a kernel."""

    count: int
    queries: int  # of each
    keys: int
    visible: int  # pairs of one head of each


def together(kinds: Sequence[Packed]) -> dict[str, float]:
    """Fields of `AttentionSizes` for sequences of these kinds: their means, and the long ones.

    The long ones are as many sequences of the longest kind as give, with equal others, the mean and
    the variance of lengths (queries and keys together) that all have.  For two kinds that is how
    many there are of the longer.  Totals of sequences, queries, keys and pairs are kept.
    """
    first = kinds[0]
    if len(kinds) == 1:
        return {"batch": first.count, "queries": first.queries, "keys": first.keys,
                "visible": first.visible}  # fmt: skip
    count = sum(kind.count for kind in kinds)
    names = ("queries", "keys", "visible")
    totals = {name: sum(kind.count * getattr(kind, name) for kind in kinds) for name in names}
    fields = {"batch": count, **{name: total / count for name, total in totals.items()}}
    mean = fields["queries"] + fields["keys"]
    spread = sum(kind.count * (kind.queries + kind.keys - mean) ** 2 for kind in kinds)
    longest = max(kinds, key=lambda kind: (kind.queries + kind.keys, kind.visible))
    long = spread / (spread / count + (longest.queries + longest.keys - mean) ** 2) if spread else 0
    for name, total in totals.items():  # the others keep at least the minimum of all
        most, least = getattr(longest, name), min(getattr(kind, name) for kind in kinds)
        if most > least:
            long = min(long, (total - count * least) / (most - least))
    of_longest = {f"long_{name}": float(getattr(longest, name)) for name in names}
    return {**fields, "long": long, **of_longest} if long else fields


# -- attention -------------------------------------------------------------------------------------
# Scaled dot-product attention as one kernel that never writes its score matrix.
#
# FLOPs are those of the dense score matrix, split into pairs that a query may see ("useful") and
# others: "masked" where a kernel skips by a mask of numbers, "masked_executed" where it
# reads a mask, or where that has no pattern.  The execution model decides which kernel runs, and
# whether the scores are materialised.  A kernel skips blocks of pairs; here it skips single pairs.
#
# Bytes are compulsory: query, key, value, mask once; key and value at their number of heads
# (grouped queries share them).  Kernels read key and value again per tile of queries, from L2.

TOP_LEFT = 1
"""`custom_mask_type` of _efficient_attention_forward: 2 is causal from the bottom right corner."""
_OFFSETS = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
_PACKAGE = ("flash_attn", "flashattn")
"""Namespaces of flash_attn's ops, from 2.7 on (github.com/Dao-AILab/flash-attention)."""
SOFTMAX = 5
"""Flop per visible pair: scale, compare with the running maximum, subtract it, exp, add to the sum.

Division by the sum is done once per output element.  Rescaling the running output, and a mask's
add, are counted apart or not at all: the former depends on the tile size.
"""


_QUERY, _KEY, _VALUE = ("query", "q"), ("key", "k"), ("value", "v")
QKV = ("query", "key", "value", "q", "k", "v")
UNSTRUCTURED = "full"
"""The tracer's name of a mask without a pattern for a kernel to skip by."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention op, and which (query, key) pairs its kernel computes."""

    heads: int  # query heads over the batch
    e: int  # width of query and key
    ev: int  # width of value
    queries: int
    length: int
    dense: int  # (query, key) pairs of one head
    visible: int  # pairs that the mask shows
    keys: int  # keys that some query sees
    rows: float  # queries that share one tile of keys, the mean by pairs
    skips: bool  # whether the kernel leaves out pairs that are not visible
    kernel: AttentionSizes | None  # for `attention_time`; None: hand-written

    @property
    def computed(self) -> int:
        """Pairs that the kernel computes."""
        return self.visible if self.skips else self.dense


def causal_pairs(queries: int, length: int) -> int:
    """sum_i min(i + 1, L): the diagonal starts top left, as torch aligns is_causal."""
    steps = min(queries, length)
    return steps * (steps + 1) // 2 + (queries - steps) * length


def _sizes(op: OpView) -> AttentionShape:
    """Sizes from query[..., Hq, S, E], key[..., Hk, L, E], value[..., Hk, L, Ev]."""
    query, key, value = op.needed("query"), op.needed("key"), op.needed("value")
    q_heads = query.shape[-3] if query.dim > 2 else 1
    k_heads = key.shape[-3] if key.dim > 2 else 1
    batch = math.prod(map(max, query.shape[:-3], key.shape[:-3]))
    return _shape(op, queries=query.shape[-2], length=key.shape[-2], batch=batch,
                  heads=(q_heads, k_heads), widths=(query.shape[-1], value.shape[-1]), stored=key)


def _shape(
    op: OpView, *, queries: int, length: int, batch: int, heads: tuple[int, int],
    widths: tuple[int, int], stored: TensorView,
) -> AttentionShape:  # fmt: skip
    """Sizes with the pairs that the mask of the op lets through.

    heads: of queries, and of keys.  widths: of query and key, and of value.  stored: the keys.
    """
    (q_heads, k_heads), (e, ev) = heads, widths
    keys = length
    pairs = queries * length
    if op.attribute("is_causal", False):
        pairs = causal_pairs(queries, length)
        keys = min(queries, length)
    visible = op.fact("visible_pairs")
    skips = op.fact("mask") != UNSTRUCTURED and _mask(op) is None
    if visible is not None:
        pairs = min(visible, queries * length)
        most = (op.fact("window") or length) + queries - 1  # keys that some query sees
        keys = min(length, pairs, op.fact("visible_keys") or most) if skips else length
    rows = queries * max(q_heads // max(k_heads, 1), 1)
    kernel = None if op.fact(WRITTEN_OUT) else _kernel(
        op, (Packed(batch, queries, length, pairs if skips else queries * length),),
        heads, widths, stored)  # fmt: skip
    return AttentionShape(
        heads=batch * q_heads, e=e, ev=ev, queries=queries, length=length,
        dense=queries * length, visible=pairs, keys=keys, rows=rows, skips=skips, kernel=kernel,
    )  # fmt: skip


def _kernel(
    op: OpView, kinds: Sequence[Packed], heads: tuple[int, int], widths: tuple[int, int],
    stored: TensorView,
) -> AttentionSizes:  # fmt: skip
    """The sizes for the time of a kernel.  kinds: its sequences."""
    return AttentionSizes(
        **together(kinds),  # type: ignore[arg-type]
        heads=heads[0],
        kv_heads=heads[1],
        width=widths[0],
        value_width=widths[1],
        kv_size=float(format_of(stored.dtype).bits / 8),
        masked=op.fact(LIBRARY) == EFFICIENT
        or _mask(op) is not None,
        paged=op.first("block_table") is not None,
        backward="backward" in op.target,
    )  # fmt: skip


def _heads_last(op: OpView) -> AttentionShape:
    """Sizes from query[B, S, Hq, E], key[B, L, Hk, E], or packed [S of all sequences, H, E].

    The tracer tells how long packed sequences are (`sequences`); else they count as equally long.
    """
    query, key, value = _operands(op)
    sequences = op.fact("sequences")
    if sequences is None:
        offsets = op.first(*_OFFSETS)
        parts = 1 if offsets is None else max(offsets.elements - 1, 1)
        batch = parts * math.prod(query.shape[:-3])
        sequences = ((batch, query.shape[-3] // parts, key.shape[-3] // parts),)
    return _of_sequences(
        op,
        [Packed(count, n, m, _band(op).pairs(n, m)) for count, n, m in sequences],
        seen=sum(count * _band(op).seen(n, m) for count, n, m in sequences),
        heads=(query.shape[-2], key.shape[-2]),
        widths=(query.shape[-1], value.shape[-1]),
        stored=math.prod(key.shape[:-2]),
    )  # fmt: skip


def _of_sequences(
    op: OpView, kinds: Sequence[Packed], *, seen: int, heads: tuple[int, int],
    widths: tuple[int, int], stored: int,
) -> AttentionShape:  # fmt: skip
    """Sizes of sequences in one kernel, each with separate keys.

    seen: keys that are read, of all that are stored.
    """
    dense = sum(kind.count * kind.queries * kind.keys for kind in kinds)
    shared = heads[0] // max(heads[1], 1)
    rows = kinds[0].queries if len(kinds) == 1 else (
        sum(kind.count * kind.queries**2 * kind.keys for kind in kinds) / max(dense, 1))
    return AttentionShape(
        heads=heads[0], e=widths[0], ev=widths[1],
        queries=sum(kind.count * kind.queries for kind in kinds), length=stored, dense=dense,
        visible=sum(kind.count * kind.visible for kind in kinds), keys=seen,
        rows=rows * max(shared, 1), skips=True,
        kernel=_kernel(op, kinds, heads, widths, op.needed(*_KEY, "latent")),
    )  # fmt: skip


def _band(op: OpView) -> Band:
    """The keys that a query sees by the arguments of a kernel; the alignment is the kernel's."""
    kind = op.attribute("custom_mask_type", None)
    if kind is not None:  # the memory-efficient kernel: its window includes the query's position
        window = int(op.attribute("window_size", None) or 0)
        ahead = 0 if kind else None
        return Band(window - 1 if window > 0 else None, ahead, kind != TOP_LEFT, least_shift=0)
    names = ("window_size_left", "window_size_right")
    ends = op.attribute("window_size", None) or [op.attribute(name, None) for name in names]
    behind, ahead = (None if end is None or end < 0 else int(end) for end in ends)
    causal = op.attribute("is_causal", op.attribute("causal", False))
    return Band(behind, 0 if causal else ahead)


def _of_requests(
    op: OpView, heads: int, widths: tuple[int, int], key: TensorView
) -> AttentionShape:
    """Sizes of requests packed in one row, each with separate rows.

    heads: of queries.  widths: of query and key, and of value.  key: the keys [1, H, L, E].
    """
    lengths = RequestLengths(tuple(op.attribute("cached")), tuple(op.attribute("new")))
    window = int(op.attribute("window"))
    kinds = [
        Packed(count, new, min(held, window - 1) + new if window else held + new,
               RequestLengths((held,), (new,)).visible(window))
        for held, new, count in lengths.groups()
    ]  # fmt: skip
    length = lengths.keys(window)
    return _of_sequences(op, kinds, seen=length, heads=(heads, key.shape[1]), widths=widths,
                         stored=length)


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
    if op.fact(BY_LENGTHS):
        return None
    return op.first("mask", "attn_mask", "attn_bias", "bias")


def _per_pair_extras(op: OpView) -> int:
    """An additive mask is one add per pair; dropout compares with a random number and scales.

    A soft cap is tanh and a product; its division is in the scale.
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


def _operands(op: OpView) -> tuple[TensorView, TensorView, TensorView]:
    """Query, key and value, as torch or flash_attn name them."""
    return op.needed(*_QUERY), op.needed(*_KEY), op.needed(*_VALUE)


def _moved(op: OpView, s: AttentionShape, written: tuple[str, ...]) -> Cost:
    """Operands and results.  written: operands that the kernel writes and does not read."""
    query, key, value = _operands(op)
    others = list(op.operands(but=(*QKV, "mask") if op.fact(BY_LENGTHS) else QKV))
    return (op.read(query) + _keys_read(op, s, key) + _keys_read(op, s, value)
            + op.read_all(tensor for name, tensor in others if name not in written)
            + op.write_all(tensor for name, tensor in others if name in written)
            + op.write_all(op.outputs))


def _forward(op: OpView, s: AttentionShape) -> Cost:
    return (_products(s, 2 * s.e + 2 * s.ev, product_precision(*_operands(op)))
            + vector(op, _softmax_flop(op, s)) + _moved(op, s, ("out",)))


def _backward(op: OpView, s: AttentionShape) -> Cost:
    precision = product_precision(*_operands(op))
    per_pair = 3 + _per_pair_extras(op)
    again = Cost.of(matmul=2 * s.heads * s.computed * s.e, precision=precision, rows=s.rows,
                    count="recompute")
    return (_products(s, 4 * s.e + 4 * s.ev, precision) + again
            + vector(op, 3 * s.heads * s.computed, count="recompute")
            + vector(op, per_pair * s.heads * s.computed + 2 * s.heads * s.queries * s.ev)
            + _moved(op, s, ("dq", "dk", "dv")))


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
    return _forward(op, _of_requests(op, query.shape[1], widths, op.needed("key")))


@builtin("rooftrace.packed_latent_attention", kind="attention", label="packed latent attention")
def packed_latent_attention(op: OpView) -> Cost:
    """`latent_attention` of several requests in one kernel; pairs as in `packed_attention`."""
    query, rope, latent = op.needed("query"), op.needed("query_rope"), op.needed("latent")
    widths = query.shape[-1] + rope.shape[-1], latent.shape[-1]
    return _latent(op, _of_requests(op, query.shape[1], widths, latent))


@builtin("torch_attn._varlen_attn", "torch_attn._varlen_attn_out",
         *(f"{name}._flash_attn{kind}_forward" for name in _PACKAGE for kind in ("", "_varlen")),
         kind="attention", label="flash attention")
@builtin("aten._flash_attention_forward", "aten._flash_attention_forward_no_dropout_inplace",
         "aten._efficient_attention_forward", kind="attention")
def attention_heads_last(op: OpView) -> Cost:
    """`attention` on [B, S, H, E], or on packed sequences [T, H, E] with their offsets.

    torch.utils.flop_counter reads these shapes as [B, H, S, E] and so counts H for S here.
    """
    return _forward(op, _heads_last(op))


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


@builtin("torch_attn._varlen_attn_backward",
         *(f"{name}._flash_attn{kind}_backward" for name in _PACKAGE for kind in ("", "_varlen")),
         kind="attention", label="flash attention backward")
@builtin("aten._flash_attention_backward", "aten._efficient_attention_backward", kind="attention")
def attention_backward_heads_last(op: OpView) -> Cost:
    """`attention_backward` on [B, S, H, E], or on packed sequences."""
    return _backward(op, _heads_last(op))


@builtin("aten._fill_mem_eff_dropout_mask_")
def fill_dropout_mask(op: OpView) -> Cost:
    """Writes random numbers."""
    return op.write_all(op.outputs)


# -- encoder ---------------------------------------------------------------------------------------
# A transformer layer as one op: the "fast path" of nn.MultiheadAttention and
# nn.TransformerEncoderLayer on real tensors, in eval mode and without gradients.
#
# The kernels materialise the score matrix; their inner values do not count as traffic.

def _attention(op: OpView, query: TensorView, key: TensorView, masked: bool) -> Cost:
    """Projections of query, key and value, two products per head, softmax, output projection.

    query[B, S, D], key[B, L, D]: 2 B (S + 2 L) D^2 + 4 B S L D + 2 B S D^2 flop, with biases.
    """
    (batch, s, d), length = query.shape, key.shape[1]
    heads = int(op.attribute("num_head", op.attribute("num_heads", 1)))
    weight, out = op.needed("qkv_weight"), op.needed("proj_weight")
    rows = batch * (s + 2 * length)
    pairs = batch * heads * s * length
    each = SOFTMAX + (1 if masked else 0)
    return (product(1, rows, d, d, query, weight) + product(1, batch * s, d, d, query, out)
            + product(batch * heads, s, d // heads, length, query, key, rows=s)
            + product(batch * heads, s, length, d // heads, query, key, rows=s)
            + vector(op, rows * d + batch * s * d + each * pairs + batch * s * d))


@builtin("aten._native_multi_head_attention", kind="attention")
def native_multi_head_attention(op: OpView) -> Cost:
    """nn.MultiheadAttention of packed weights; averaging the heads' weights is an add per pair."""
    query, key = op.needed("query"), op.needed("key")
    batch, s, _ = query.shape
    averaged = op.attribute("need_weights", True) and op.attribute("average_attn_weights", True)
    pairs = batch * int(op.attribute("num_head", 1)) * s * key.shape[1]
    return (_attention(op, query, key, op.tensor("mask") is not None)
            + (vector(op, pairs) if averaged else Cost()) + op.streamed())


@builtin("aten._transformer_encoder_layer_fwd")
def transformer_encoder_layer(op: OpView) -> Cost:
    """Attention, x + attention, two products around an activation, the other sum, and two norms.

    src[B, S, D], inner width F: 4 B S D F flop besides the attention's.
    """
    x, up, down = op.needed("src"), op.needed("ffn_weight_1"), op.needed("ffn_weight_2")
    rows, d, inner = x.elements // x.shape[-1], x.shape[-1], up.shape[0]
    activation = flop_per_element(GELU["none"]) if op.attribute("use_gelu") else 1
    norms = 2 * (standardise_flop(rows, d) + 2 * x.elements)
    return (_attention(op, x, x, op.tensor("mask") is not None)
            + Cost.of(matmul=2 * 2 * rows * d * inner,
                      precision=product_precision(x, up, down), rows=rows)
            + vector(op, norms + rows * (inner * (1 + activation) + d) + 2 * x.elements)
            + op.streamed())
