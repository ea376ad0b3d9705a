"""Matrix products: dense, quantised, grouped by expert, and matrix-vector products.

Matrix FLOPs equal torch.utils.flop_counter: one multiply-add is 2, adding a bias is vector work.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import (
    as_integer,
    is_complex,
    lined,
    number_of,
    product_precision,
    share,
    stored_width,
    vector,
    widths,
)
from rooftrace.costmodels.rules.elementwise import GELU, flop_per_element
from rooftrace.costmodels.rules.linalg import sparse_product


def product(batch: int, m: int, k: int, n: int, a: TensorView, b: TensorView,
            rows: int | None = None, stored: tuple[str, str] = ("MK", "KN")) -> Cost:
    """C[batch, M, N] = A[batch, M, K] B[batch, K, N]: 2 M K N flop each.

    A complex multiply-add is 4 real ones.  stored: the last two sizes of a and b.
    """
    parts = 4 if is_complex(a) and is_complex(b) else 2 if is_complex(a) or is_complex(b) else 1
    return Cost.of(matmul=2 * batch * m * k * n * parts, precision=product_precision(a, b),
                   rows=m if rows is None else rows, columns=n, inner=k, widths=widths(a, b),
                   lined=lined(a, b, *stored))


def epilogue(op: OpView, elements: int) -> Cost:
    """beta * self + alpha * C: one add per element, and a product for each factor that is not 1.

    With beta = 0 there is nothing to add, as in BLAS.
    """
    alpha, beta = op.attribute("alpha", 1), op.attribute("beta", 1)
    each = (alpha != 1) + (0 if beta == 0 else 1 + (beta != 1))
    return vector(op, elements * each) if each else Cost()


@builtin("aten.mm", kind="mm")
def mm(op: OpView) -> Cost:
    """C[M, N] = A[M, K] B[K, N]: 2 M K N flop; of a sparse A only its stored elements."""
    a, b = op.needed("self"), op.needed("mat2")
    (m, k), n = a.shape, b.shape[1]
    if op.fact("stored") is not None:
        return sparse_product(op, "self", n)
    return product(1, m, k, n, a, b) + op.streamed()


@builtin("aten.addmm", "aten.addmm_", "aten._addmm_activation", kind="mm")
def addmm(op: OpView) -> Cost:
    """C[M, N] = beta D + alpha A[M, K] B[K, N]: 2 M K N flop, and M N adds on the vector engine.

    With an activation, relu or gelu, of every C.
    """
    a, b = op.needed("mat1"), op.needed("mat2")
    (m, k), n = a.shape, b.shape[1]
    cost = product(1, m, k, n, a, b) + epilogue(op, m * n) + op.streamed()
    if "_activation" not in op.target:
        return cost
    activation = flop_per_element(GELU["tanh"]) if op.attribute("use_gelu") else 1
    return cost + vector(op, m * n * activation)


@builtin("aten.bmm", kind="bmm")
def bmm(op: OpView) -> Cost:
    """C[B, M, N] = A[B, M, K] B[B, K, N]: 2 B M K N flop, M rows per weight tile.

    With one column it is A that no other row shares: the experts' weights of one token.
    """
    a, b = op.needed("self"), op.needed("mat2")
    (batch, m, k), n = a.shape, b.shape[2]
    return product(batch, m, k, n, a, b, rows=1 if n == 1 else m) + op.streamed()


@builtin("rooftrace.index_scores", kind="bmm", label="index scores")
def index_scores(op: OpView) -> Cost:
    """I[B, S, L] = sum over h of w[B, S, h] relu(scale q[B, S, h, D] k[B, L, D]), for H heads.

    2 B S H L D flop of matrix work, S H rows a batch; a comparison, a product and an add for each
    of B S H L scores, which stay on chip; B S H to scale the weights.
    """
    q, k = op.needed("query"), op.needed("key")
    (batch, s, heads, width), length = q.shape, k.shape[1]
    cost = product(batch, s * heads, width, length, q, k, stored=("MK", "NK"))
    return cost + vector(op, batch * s * heads * (3 * length + 1)) + op.streamed()


@builtin("aten.baddbmm", "aten.baddbmm_", kind="bmm")
def baddbmm(op: OpView) -> Cost:
    """C[B, M, N] = beta D + alpha A[B, M, K] B[B, K, N]."""
    a, b = op.needed("batch1"), op.needed("batch2")
    (batch, m, k), n = a.shape, b.shape[2]
    return product(batch, m, k, n, a, b) + epilogue(op, batch * m * n) + op.streamed()


@builtin("aten.addbmm", "aten.addbmm_", kind="mm")
def addbmm(op: OpView) -> Cost:
    """C[M, N] = beta D + alpha sum_B A[B, M, K] B[B, K, N]: one product with inner size B K."""
    a, b = op.needed("batch1"), op.needed("batch2")
    (batch, m, k), n = a.shape, b.shape[2]
    return product(1, m, batch * k, n, a, b) + epilogue(op, m * n) + op.streamed()


@builtin("aten.matmul", "aten.linalg_matmul", kind="bmm")
def matmul(op: OpView) -> Cost:
    """The composite: batch dimensions broadcast, a vector counts as one row or column.

    Without batch dimensions of B, those of A fold into its rows, as torch does.
    """
    a, b = op.needed("self", "input"), op.needed("other")
    k = a.shape[-1]
    m = a.shape[-2] if a.dim > 1 else 1
    n = b.shape[-1] if b.dim > 1 else 1
    batch = op.outputs[0].elements // (m * n) if m * n else 0
    rows = m * batch if b.dim <= 2 else m
    return product(batch, m, k, n, a, b, rows) + op.streamed()


@builtin("aten.linear", "aten.mkldnn_linear", kind="mm")
def linear(op: OpView) -> Cost:
    """y[..., N] = x[..., K] W[N, K]^T + bias[N]: 2 M K N flop for M rows of x, M N adds of bias."""
    x, weight = op.needed("input", "self"), op.needed("weight")
    k = x.shape[-1]
    n = weight.shape[0] if weight.dim > 1 else 1
    m = math.prod(x.shape[:-1])
    bias = vector(op, m * n) if op.tensor("bias") is not None else Cost()
    stored = ("MK", "NK")
    return product(1, m, k, n, x, weight, stored=stored) + bias + op.streamed()


@builtin("aten.linear_backward", kind="mm")
def linear_backward(op: OpView) -> Cost:
    """dx = dy W, dW = dy^T x, db = sum dy: 2 M K N flop for each matrix gradient in the mask."""
    x, weight = op.needed("self"), op.needed("weight")
    (n, k), m = weight.shape, math.prod(x.shape[:-1])
    wanted = op.attribute("output_mask", (True, True, True))
    cost = op.streamed()
    if wanted[0]:
        cost += product(1, m, n, k, x, weight, stored=("MN", "KN"))
    if wanted[1]:
        cost += product(1, n, m, k, x, x, stored=("KM", "KN"))
    if wanted[2]:
        cost += vector(op, max(m - 1, 0) * n)
    return cost


# Matrix-vector products run on the vector engine (there is no reuse for a tile to exploit), and
# torch.utils.flop_counter has no formula for them.


@builtin("aten.mv", family="dense")
def mv(op: OpView) -> Cost:
    """y[M] = A[M, K] x[K]: K products and K-1 adds per row, counted as 2 M K like every product."""
    m, k = op.needed("self").shape
    if op.fact("stored") is not None:
        return sparse_product(op, "self", 1)
    return vector(op, 2 * m * k) + op.streamed()


@builtin("aten.addmv", "aten.addmv_", family="dense")
def addmv(op: OpView) -> Cost:
    """y[M] = beta z[M] + alpha A[M, K] x[K]: 2 M K flop and M adds."""
    m, k = op.needed("mat").shape
    return vector(op, 2 * m * k) + epilogue(op, m) + op.streamed()


@builtin("aten.dot", "aten.vdot", "aten.linalg_vecdot", family="dense")
def dot(op: OpView) -> Cost:
    """s = sum_K x[K] y[K]: 2 K flop."""
    return vector(op, 2 * op.inputs[0].elements) + op.streamed()


@builtin("aten.ger", "aten.outer")
def outer(op: OpView) -> Cost:
    """C[M, N] = x[M] y[N]: one product per output."""
    return vector(op, op.outputs[0].elements) + op.streamed()


@builtin("aten.addr", "aten.addr_")
def addr(op: OpView) -> Cost:
    """C[M, N] = beta D + alpha x[M] y[N]: one product and one add per output."""
    m, n = op.needed("vec1").elements, op.needed("vec2").elements
    return vector(op, m * n) + epilogue(op, m * n) + op.streamed()


@builtin("aten._trilinear")
def trilinear(op: OpView) -> Cost:
    """out = sum over `sumdim` of i1 * i2 * i3 (nn.Bilinear): two products and an add per term.

    The sizes of the terms come from the three operands after `expand1..3` inserted unit dimensions.
    """
    sizes: list[int] = []
    for position in ("1", "2", "3"):
        shape = list(op.needed("i" + position).shape)
        for dim in sorted(op.attribute("expand" + position, ())):
            shape.insert(dim, 1)
        sizes = [max(pair) for pair in zip(sizes or shape, shape, strict=True)]
    return vector(op, 3 * math.prod(sizes)) + op.streamed()


@builtin("aten._int_mm", kind="mm")
def int_mm(op: OpView) -> Cost:
    """C[M, N] = A[M, K] B[K, N] of int8 with int32 sums, on the matrix engine: 2 M K N flop."""
    a, b = op.needed("self"), op.needed("mat2")
    (m, k), n = a.shape, b.shape[1]
    return Cost.of(matmul=2 * m * k * n, precision=product_precision(a, b), rows=m,
                   columns=n, inner=k, widths=widths(a, b), lined=lined(a, b)) + op.streamed()


@builtin("aten._scaled_mm", "aten._scaled_mm_v2", kind="mm")
def scaled_mm(op: OpView) -> Cost:
    """C[M, N] = (A[M, K] B[K, N]) * scale_a * scale_b + bias: 2 M K N flop in the type of A and B.

    Applying the scales is 2 flop per output, once (block scales apply them once per block of K).
    Two values per byte (fp4_x2) double the inner size that the shape says.
    """
    a, b = op.needed("self"), op.needed("mat2")
    (m, k), n = a.shape, b.shape[1]
    k *= 2 if a.dtype == "fp4_x2" else 1
    bias = 1 if op.tensor("bias") is not None else 0
    return product(1, m, k, n, a, b) + vector(op, (2 + bias) * m * n) + op.streamed()


@builtin("aten._weight_int8pack_mm", "aten._weight_int4pack_mm", "aten._weight_int4pack_mm_for_cpu",
         "aten._weight_int4pack_mm_with_scales_and_zeros", "aten._dyn_quant_matmul_4bit", kind="mm")
def weight_only_mm(op: OpView) -> Cost:
    """C[M, N] = A[M, K] W[K, N] with W stored in 4 or 8 bits: 2 M K N flop in the type of A.

    Unpacking is vector work: per weight a scale (int8), or a scale and a zero point (int4).
    """
    a, packed = op.needed("self", "inp"), op.needed("mat2", "packed_weights")
    m, k = a.shape
    n = op.outputs[0].shape[1]
    unpack = 1 if "int8" in op.target else 2
    return (Cost.of(matmul=2 * m * k * n, precision=product_precision(a), rows=m,
                    columns=n, inner=k, widths=(stored_width(a), packed.nbytes / max(k * n, 1)))
            + vector(op, unpack * k * n) + op.streamed())


# -- moe -------------------------------------------------------------------------------------------

@builtin("aten._grouped_mm", "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2",
         kind="grouped mm")
def grouped_mm(op: OpView) -> Cost:
    """One product per group g of the rows that `offs` gives it; T rows over all groups.

    2d x 3d: C[T, N] = A[T, K] B[G, K, N]        forward, and the gradient of the rows
    3d x 2d: C[M, T] = A[G, M, K] B[K, T]        the same, transposed
    2d x 2d: C[G, M, N] = A[M, T] B[T, N]        the gradient of the weights
    3d x 3d: C[G, M, N] = A[G, M, K] B[G, K, N]  a batched product
    Each is 2 T K N flop (M for the side that is not grouped), whatever the sizes of the groups; T
    are the rows before the last offset (`rows_routed`), which may leave some of A out; of experts
    over processes an expected number, which may be no integer.  A product
    has the rows of a group that got some, on average: T over those groups.
    """
    a, b = op.needed("self"), op.needed("mat2")
    offsets = op.tensor("offs")
    out = op.outputs[0]
    scales = [t for name in ("scale_a", "scale_b") for t in op.tensors(name)]
    k = a.shape[-1] * (2 if a.dtype == "fp4_x2" else 1)
    n = b.shape[-1]
    weights = None
    t: float
    rows: float
    inner: float
    if a.dim == 2 and b.dim == 3:
        t, groups, weights = _routed(op, a.shape[0]), b.shape[0], b
        flop, touched = round(2 * t * k * n), _touched(op, groups, t)
        rows, columns, inner = _each(t, touched), n, k
    elif a.dim == 3 and b.dim == 2:
        t, groups, weights = _routed(op, n), a.shape[0], a
        flop, touched = round(2 * a.shape[1] * k * t), _touched(op, groups, t)
        rows, columns, inner = _each(t, touched), a.shape[1], k
    elif a.dim == 2:
        groups = offsets.shape[0] if offsets is not None else out.shape[0]
        t = _routed(op, k)
        flop, touched, rows = round(2 * a.shape[0] * t * n), _touched(op, groups, t), a.shape[0]
        columns, inner = n, _each(t, touched)
    else:
        groups = a.shape[0]
        flop, touched, rows = 2 * groups * a.shape[1] * k * n, groups, a.shape[1]
        columns, inner = n, k
    others = [t for t in (a, b) if t is not weights]
    cost = (Cost.of(matmul=flop, precision=product_precision(a, b), rows=max(rows, 1),
                    columns=columns, inner=inner,
                    widths=widths(a, b) if weights is not a else widths(b, a))
            + op.read_all((*others, offsets, op.tensor("bias"), *scales)) + op.write_all((out,)))
    if weights is not None:
        cost += op.read(weights, share(weights, touched, groups))
    epilogue = (op.tensor("bias") is not None) + (2 if any(scales) else 0)
    return cost + (vector(op, epilogue * out.elements) if epilogue else Cost())


def _touched(op: OpView, groups: int, rows: float) -> float:
    if op.fact("groups_touched") is None:
        return min(groups, rows)
    return min(number_of(op, "groups_touched", groups), groups)


def _each(rows: float, touched: float) -> float:
    """Rows of a group that has some."""
    return as_integer(rows / max(touched, 1))


def _routed(op: OpView, rows: int) -> float:
    return min(number_of(op, "rows_routed", rows), rows)


@builtin("rooftrace.route_experts", kind="sort", label="expert routing")
def route_experts(op: OpView) -> Cost:
    """k of E experts for each of T tokens: logits[T, E] read, weights[T, k] and indices written.

    Scores of all logits: softmax 5 E - 2, sigmoid 4 E, the root of a softplus 6 E flop a token; E
    for a bias.  G groups by the sum of their b best: (b - 1) G; by their best: E - G comparisons.
    Weights over their sum: k - 1 adds, one of a least number, k divisions; else a softmax or
    sigmoid of k.  k to scale.  Choosing moves bytes only.
    """
    logits, weights = op.needed("logits"), op.outputs[0]
    experts, k = logits.shape[-1], weights.shape[-1]
    each = _scored(op.attribute("score"), experts)
    each += experts if op.tensor("bias") is not None else 0
    groups = op.attribute("groups")
    if op.attribute("kept") < groups:
        best = op.attribute("best")
        each += (best - 1) * groups if best > 1 else experts - groups
    after, least = op.attribute("after"), op.attribute("least")
    if after in ("sum", "clamped sum"):
        each += 2 * k - 1 + (1 if least else 0)
    else:
        each += _scored(after, k)
    each += k if op.attribute("scale") != 1 else 0
    return vector(op, logits.elements // experts * each) + op.streamed()


def _scored(name: str, n: int) -> int:
    """Flop of the scores of n logits."""
    each = {"softmax": 5 * n - 2, "sigmoid": 4 * n, "root of softplus": 6 * n}
    return each.get(name, 0)


@builtin("rooftrace.align_experts", kind="sort", label="expert alignment")
def align_experts(op: OpView) -> Cost:
    """The rows of each expert: the choice is read, the rows in order and their ends written."""
    return op.streamed()


@builtin("rooftrace.expert_mm", kind="grouped mm", label="expert product")
def expert_mm(op: OpView) -> Cost:
    """out[p] = (rows[p // share] W[e] + bias[e]) score[p] for each of the T rows p of expert e.

    rows[R, K], W[E, K, N], out[share R, N].  2 T K N flop, as of `_grouped_mm`; N a row for a bias,
    N for a score.  Rows of experts that are here (`rows_routed`) are read once, of as many tokens
    as these can be of, and written; the weights of experts that have some are read.
    """
    a, b = op.needed("rows"), op.needed("mat2")
    bias, scores = op.tensor("bias"), op.tensor("scores")
    (out,) = op.outputs
    groups, k, n = b.shape
    t = _routed(op, out.shape[0])
    touched = _touched(op, groups, t)
    epilogue = round(t * n) * sum(item is not None for item in (bias, scores))
    cost = Cost.of(matmul=round(2 * t * k * n), precision=product_precision(a, b),
                   rows=max(_each(t, touched), 1), columns=n, inner=k, widths=widths(a, b))
    cost += op.read_all((op.needed("order"), op.needed("offs"), scores))
    cost += op.read(a, share(a, t, a.shape[0])) + op.write(out, share(out, t, out.shape[0]))
    for weight in (b, bias):
        cost += op.read(weight, share(weight, touched, groups)) if weight is not None else Cost()
    return cost + vector(op, epilogue)


@builtin("rooftrace.combine_experts", kind="reduction", label="expert sum")
def combine_experts(op: OpView) -> Cost:
    """out[T, N] = sum over the k rows of a token: k - 1 adds a number, rows read once."""
    rows, (out,) = op.needed("rows"), op.outputs
    return vector(op, rows.elements - out.elements) + op.streamed()
