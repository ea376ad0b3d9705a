"""Grouped matrix products: one product per expert, of which only the experts with tokens are read.

The tracer may say how many groups got rows (`groups_touched`), or how many are expected to, which
is no whole number; otherwise as many as can have.
"""

from __future__ import annotations

from rooftrace.costmodels.ops import Cost, OpView, builtin
from rooftrace.costmodels.rules.common import (
    number_of,
    product_precision,
    share,
    vector,
    whole,
    widths,
)


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
    over processes an expected number, which is no whole one.  A product
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
    """Rows of a group that got some; a whole number stays one."""
    return whole(rows / max(touched, 1))


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
    """Flop of what is made of n logits."""
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
