"""Attention as one kernel and as products: equal FLOPs, bytes by hand, equal numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.attention_kernels import flash_from_products
from rooftrace.costmodels.rewrites.attention_products import materialise_attention
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.rebuild import to_fx

pytestmark = pytest.mark.quick

B, H, S, L, E, V = 2, 4, 5, 7, 16, 24
FP32 = 4  # bytes


class Sdpa(nn.Module):
    """Scaled dot-product attention of its arguments."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, mask=None):
        return F.scaled_dot_product_attention(query, key, value, mask, **self.options)


def operands(queries=S, length=L, heads=H, key_heads=H, lead=(B,)):
    shapes = ((heads, queries, E), (key_heads, length, E), (key_heads, length, V))
    return [torch.randn(*lead, *shape) for shape in shapes]


def flops(graph: OpGraph, *counts: str) -> int:
    costs, _ = price_ops(graph)
    return sum(c.flops(MATRIX, counts) if counts else c.flops(MATRIX) for c in costs)


MASKS = {
    "none": None,
    "bool [S, L]": torch.ones(S, L, dtype=torch.bool).tril(2),
    "float [S, L]": torch.randn(S, L),
    "bool [B, 1, 1, L]": torch.arange(L).expand(B, 1, 1, L) < 6,
    "float [B, H, S, L]": torch.randn(B, H, S, L),
    "float [H, 1, L]": torch.randn(H, 1, L),
}


# -- the same attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("key_heads", [H, 2, 1])
def test_products_give_the_numbers_of_sdpa(mask, key_heads):
    tensors = operands(key_heads=key_heads)
    given = [*tensors, MASKS[mask]] if MASKS[mask] is not None else tensors
    model = Sdpa(enable_gqa=key_heads != H)
    graph, count = materialise_attention(rt.trace(model, *given))
    assert count == 1 and not any("attention" in op.target for op in graph.ops)
    torch.testing.assert_close(to_fx(graph)(*given)[0], model(*given))


def test_a_causal_mask_is_a_constant_that_all_attentions_share():
    class Twice(nn.Module):
        def forward(self, q, k, v):
            once = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.scaled_dot_product_attention(once, k, v, is_causal=True)

    q, k, v = torch.randn(3, B, H, S, E).unbind()
    graph, count = materialise_attention(rt.trace(Twice(), q, k, v))
    assert count == 2
    (name,) = {t.name for t in graph.values if t.dtype == "bool"}
    state = {name: torch.ones(S, S, dtype=torch.bool).tril()}
    torch.testing.assert_close(to_fx(graph, state)(q, k, v)[0], Twice()(q, k, v))


@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_backward_of_products_gives_the_gradients_of_sdpa(key_heads, masked):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            q, k, v = operands(key_heads=key_heads)
            self.q, self.k, self.v = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)
            self.bias = nn.Parameter(torch.randn(H, 1, L)) if masked else None

        def forward(self, x):
            out = F.scaled_dot_product_attention(
                self.q, self.k, self.v, self.bias, enable_gqa=key_heads != H
            )
            return (out * x).sum()

    model, x = Attention(), torch.randn(B, H, S, V)
    captured = rt.trace(model, x, phase="training", optimizer="none", loss=lambda out: out)
    graph, count = materialise_attention(captured)
    assert count == 1 and not any("attention" in op.target for op in graph.ops)
    gradients = sorted({t.storage for t in graph.values if t.role == "gradients"})
    assert len(gradients) == (4 if masked else 3)
    shown = graph.replace(outputs=tuple(gradients))
    found = to_fx(shown, dict(model.named_parameters()))(x)
    model(x).backward()
    wanted = {tuple(p.shape): p.grad for p in model.parameters()}
    for gradient in found:
        torch.testing.assert_close(gradient, wanted[tuple(gradient.shape)])


# -- FLOPs -----------------------------------------------------------------------------------------


def dense(queries=S, length=L, heads=H) -> int:
    """Q K^T and P V of the whole score matrix."""
    return 2 * B * heads * queries * length * (E + V)


@pytest.mark.parametrize("lead, key_heads", [((B,), H), ((B,), 1), ((), H)])
def test_dense_flops_are_those_of_the_kernel(lead, key_heads):
    graph = rt.trace(Sdpa(enable_gqa=key_heads != H), *operands(lead=lead, key_heads=key_heads))
    products, _ = materialise_attention(graph)
    assert flops(products) == flops(graph) == dense() // (1 if lead else B)


def test_products_compute_what_a_causal_kernel_skips():
    graph = rt.trace(Sdpa(is_causal=True), *operands(queries=S, length=S))
    products, _ = materialise_attention(graph)
    pairs = S * (S + 1) // 2
    useful = 2 * B * H * pairs * (E + V)
    assert flops(graph, "useful") == flops(products, "useful") == useful
    assert flops(graph, "masked") == dense(length=S) - useful
    assert flops(products, "masked_executed") == dense(length=S) - useful
    assert flops(products, "masked") == 0


def trained(**options) -> OpGraph:
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            q, k, v = operands(key_heads=options.get("key_heads", H))
            self.q, self.k, self.v = nn.Parameter(q), nn.Parameter(k), nn.Parameter(v)

        def forward(self, x):
            return x * F.scaled_dot_product_attention(
                self.q, self.k, self.v, enable_gqa="key_heads" in options,
                dropout_p=options.get("dropout", 0.0),
            )  # fmt: skip

    return rt.trace(Attention(), torch.randn(B, H, S, V), phase="training", optimizer="none")


@pytest.mark.parametrize("options", [{}, {"key_heads": 2}, {"dropout": 0.1}])
def test_backward_is_twice_forward_and_products_recompute_nothing(options):
    graph = trained(**options)
    products, _ = materialise_attention(graph)
    assert flops(graph) == flops(products) == 3 * dense()
    assert flops(graph, "recompute") == 2 * B * H * S * L * E  # the kernel makes Q K^T again
    assert flops(products, "recompute") == 0


# -- bytes -----------------------------------------------------------------------------------------


def score_bytes(graph: OpGraph) -> int:
    """Bytes of everything in the temporary role: scores and probabilities."""
    return plan(graph, "naive").bytes.temporary


def test_score_bytes_by_hand():
    # Written and read: q k^T, scaled, probabilities.
    graph = rt.trace(Sdpa(), *operands())
    assert score_bytes(graph) == 6 * B * H * S * L * FP32
    # And masked.
    graph = rt.trace(Sdpa(), *operands(), MASKS["bool [S, L]"])
    assert score_bytes(graph) == 8 * B * H * S * L * FP32


def test_shared_heads_are_copied():
    graph = rt.trace(Sdpa(enable_gqa=True), *operands(key_heads=2))
    copies = B * H * L * (E + V) * FP32  # of keys and values for every query head
    assert score_bytes(graph) == 6 * B * H * S * L * FP32 + 2 * copies


def test_dropout_writes_its_mask():
    plain, dropped = (
        materialise_attention(trained(**options))[0] for options in ({}, {"dropout": 0.1})
    )
    scores = B * H * S * L
    more = sum(c.bytes() for c in price_ops(dropped)[0]) - sum(
        c.bytes() for c in price_ops(plain)[0]
    )
    # Forward reads P, writes P' and a mask of a byte each; backward reads dP' and it, writes dP.
    assert more == 2 * (2 * FP32 + 1) * scores


def test_attention_over_batches_that_broadcast_is_left():
    q, k, v = operands()
    graph = rt.trace(Sdpa(), q, k[:1], v[:1])
    assert materialise_attention(graph) == (graph, 0)


# -- hand-written attention ------------------------------------------------------------------------


class HandWritten(nn.Module):
    """q k^T / sqrt(d), mask, softmax, v: as many repositories have it."""

    def __init__(self, style="plain", returns_scores=False):
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.style, self.returns_scores = style, returns_scores

    def forward(self, x, mask):
        q, k, v = (
            t.unflatten(-1, (H, E // H)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1)
        if self.style == "in place":
            scores = scores.div_(math.sqrt(E // H)).masked_fill_(mask, float("-inf"))
            weights = scores.softmax(-1)
        elif self.style == "cast":
            scores = scores / math.sqrt(E // H) + mask
            weights = scores.softmax(-1, dtype=torch.float64).to(x.dtype)
        elif self.style == "two masks":
            weights = (scores + mask + 2 * mask).softmax(-1)
        elif self.style == "over queries":
            weights = scores.softmax(-2)
        elif self.style == "turned":
            weights = scores.softmax(-1).transpose(-2, -1)
        elif self.style == "gated":
            weights = scores.softmax(-1) * scores
        else:
            weights = (scores / math.sqrt(E // H)).masked_fill(mask, float("-inf")).softmax(-1)
        out = (weights @ v).transpose(1, 2).flatten(2)
        return (out, weights) if self.returns_scores else out


def written(style="plain", phase="forward", **options) -> OpGraph:
    numbers = style in ("cast", "two masks")
    mask = torch.zeros(1, 1, S, S, dtype=torch.float32 if numbers else torch.bool)
    return rt.trace(HandWritten(style, **options), torch.randn(B, S, E), mask, phase=phase)


@pytest.mark.parametrize("style", ["plain", "in place", "cast"])
def test_hand_written_attention_becomes_flash(style):
    graph = written(style)
    flash, count = flash_from_products(graph)
    (attention,) = (op for op in flash.ops if op.name == "rooftrace.attention")
    assert count == 1 and not any(op.name in ("aten.bmm", "aten._softmax") for op in flash.ops)
    assert attention.arguments["scale"] == pytest.approx(1 / math.sqrt(E // H))
    assert flash.values[attention.arguments["key"].id].shape == (B, H, S, E // H)
    assert flops(flash) == flops(graph)
    assert sum(c.bytes() for c in price_ops(flash)[0]) < sum(c.bytes() for c in price_ops(graph)[0])
    assert plan(graph, "efficient").bytes.total < plan(graph, "eager").bytes.total


def test_the_compiler_of_torch_2_0_leaves_hand_written_attention_as_it_is():
    named = {}
    for release in ("2.0", "2.1"):
        mask = torch.zeros(1, 1, S, S, dtype=torch.bool)
        graph = rt.trace(HandWritten(), torch.randn(B, S, E), mask, torch=release)
        named[release] = {row.name for row in rt.estimate(graph, "l4", "compiled").rows}
    assert "aten.bmm" in named["2.0"] and "flash attention" not in named["2.0"]
    assert "aten.bmm" not in named["2.1"] and "flash attention" in named["2.1"]


@pytest.mark.parametrize("style", ["two masks", "over queries", "turned", "gated"])
def test_what_only_looks_like_attention_stays(style):
    graph = written(style)
    assert flash_from_products(graph) == (graph, 0)


def test_what_ends_one_attention_does_not_begin_another():
    class Chained(nn.Module):
        def forward(self, q, k, v, w):
            return ((q @ k).softmax(-1) @ v).softmax(-1) @ w

    graph = rt.trace(Chained(), *(torch.randn(2, S, S) for _ in range(4)))
    flash, count = flash_from_products(graph)
    assert count == 1
    assert [op.name for op in flash.kernels()] == [
        "rooftrace.attention", "aten._softmax", "aten.bmm"
    ]  # fmt: skip
    assert flops(flash) == flops(graph)


def test_scores_that_are_returned_or_that_backward_needs_stay():
    for graph in (written(returns_scores=True), written(phase="training")):
        assert flash_from_products(graph) == (graph, 0)


def test_materialising_and_finding_again_gives_the_same_kernel():
    graph = rt.trace(Sdpa(), *operands())
    products, _ = materialise_attention(graph)
    again, count = flash_from_products(products)
    assert count == 1 and flops(again) == flops(graph)
    moved = [sum(c.bytes() for c in price_ops(one)[0]) for one in (graph, again)]
    assert moved[0] == moved[1]


def test_a_product_takes_as_long_whichever_pairs_a_mask_shows():
    tensors = [torch.empty(B, H, 512, 64) for _ in range(3)]
    estimates = [
        rt.estimate(rt.trace(Sdpa(is_causal=causal), *tensors), "h200-sxm", "naive")
        for causal in (False, True)
    ]
    times = [[row.timing.t_device for row in each.rows if "bmm" in row.name] for each in estimates]
    assert times[0] == times[1]
    assert estimates[1].flops_causal < estimates[0].flops_causal


def test_a_copy_in_fp32_is_not_read_whatever_copies_put_it_in_order():
    class Widened(nn.Module):
        def forward(self, x):
            q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for _ in range(3))
            scores = q.float() @ k.float().transpose(-2, -1)
            return scores.softmax(-1).to(x.dtype) @ v

    flash, _ = flash_from_products(rt.trace(Widened(), torch.zeros(B, S, E, dtype=torch.bfloat16)))
    (attention,) = (op for op in flash.ops if op.name == "rooftrace.attention")
    operands = [flash.values[attention.arguments[name].id] for name in ("query", "key", "value")]
    assert [tensor.dtype for tensor in operands] == ["bf16"] * 3
    assert not any(op.name in ("aten.clone", "aten._to_copy") for op in flash.ops)
