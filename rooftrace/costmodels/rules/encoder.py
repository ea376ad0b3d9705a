"""A whole transformer layer as one op: what nn.MultiheadAttention and nn.TransformerEncoderLayer
call on real tensors, in eval mode and without gradients (their "fast path").

The kernels materialise the score matrix; their inner values do not count as traffic.
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.attention import SOFTMAX
from rooftrace.costmodels.rules.common import product_precision, vector
from rooftrace.costmodels.rules.elementwise import GELU, flop_per_element
from rooftrace.costmodels.rules.matmul import product
from rooftrace.costmodels.rules.norm import standardise_flop


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
