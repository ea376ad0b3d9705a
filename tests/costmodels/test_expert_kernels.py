"""Routing, and routed experts, as a server's kernels: the same results, and costs by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.rewrites import reprice
from rooftrace.graph.graph import OpGraph
from tests.costmodels.serving_support import (
    BATCH,
    LENGTH,
    TOKENS,
    changed,
    differences,
    filled,
    traced,
)
from tests.releases import with_grouped_products, with_transformers_5

EXACT, FP32 = 1e-12, 1e-5
WIDTH, EXPERTS, CHOSEN, INNER = 16, 8, 2, 8
ROWS = BATCH * LENGTH
ROUTING, KERNELS = "fused-routing", "fused-experts"


def names(graph: OpGraph) -> list[str]:
    return [op.name for op in graph.ops if op.kind == "kernel"]


# -- the choice of experts -------------------------------------------------------------------------

Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def normed(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def picked(scores: Tensor, choice: Tensor, k: int = CHOSEN) -> tuple[Tensor, Tensor]:
    chosen = choice.topk(k, -1, sorted=False).indices
    return scores.gather(-1, chosen), chosen


def best_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = scores.topk(CHOSEN, dim=-1)
    return weights, chosen


def mixtral(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, chosen = best_first(F.softmax(logits, dim=-1))
    weights /= weights.sum(-1, keepdim=True)
    return weights, chosen


def gpt_oss(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = best_first(logits)
    return F.softmax(best, dim=-1), chosen


def within_groups(choice: Tensor, groups: int, kept: int, by: Callable[[Tensor], Tensor]) -> Tensor:
    best = by(choice.view(-1, groups, EXPERTS // groups))
    mask = torch.zeros_like(best).scatter_(1, best.topk(kept, dim=-1, sorted=False).indices, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, EXPERTS // groups).reshape(-1, EXPERTS)
    return choice.masked_fill(~mask.bool(), float("-inf"))


def deepseek_v3(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    two = within_groups(scores + bias, 4, 2, lambda parts: parts.topk(2, dim=-1).values.sum(-1))
    weights, chosen = picked(scores, two)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, chosen


def deepseek_v2(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    weights, chosen = best_first(within_groups(scores, 2, 1, lambda parts: parts.amax(-1)))
    return weights * 16.0, chosen


def mask_by_where(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    choice = bias + torch.sigmoid(logits)  # the bias first, the mask the other way round
    best = choice.unflatten(-1, (2, 4)).max(-1).values
    mask = torch.zeros_like(best).scatter(1, best.topk(1).indices, 1.0)
    mask = mask[..., None].expand(-1, 2, 4).flatten(1).bool()
    weights, chosen = picked(torch.sigmoid(logits), torch.where(mask, choice, -math.inf))
    return normed(weights), chosen


def llama4(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = logits.topk(1, dim=-1)
    return best.sigmoid(), chosen


def deepseek_v4(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softplus(logits).sqrt()
    weights, chosen = picked(scores, scores + bias)
    return normed(weights) * 1.5, chosen


def ernie(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().softmax(-1).to(logits.dtype)
    weights, chosen = picked(scores, scores + bias[None])
    return weights / weights.sum(-1, keepdim=True).clamp(min=0.6), chosen


ROUTES: tuple[Route, ...] = (
    mask_by_where,
    mixtral, gpt_oss, deepseek_v3, deepseek_v2, llama4, deepseek_v4, ernie,
)  # fmt: skip


class Router(nn.Module):
    """Tokens that read the weights of the experts that were chosen, one matrix each."""

    def __init__(self, route: Route, leaves: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.bias = nn.Parameter(torch.empty(EXPERTS))
        self.experts = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.route, self.leaves = route, leaves

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens).flatten(0, -2)
        logits = self.gate(x)
        weights, chosen, *scores = self.route(logits, self.bias)
        made = (x[:, None, None] @ self.experts[chosen])[:, :, 0]
        made = (made * weights[..., None].to(made.dtype)).sum(1)
        return (made, logits, *scores) if self.leaves else made


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
def test_a_routing_kernel_chooses_the_same_experts_with_the_same_weights(route: Route) -> None:
    wide = torch.float32 if route is ernie else torch.float64
    model = filled(Router(route), wide)
    graph = traced(model, "forward")
    result, notes = changed(graph, ROUTING)
    assert notes == ("fused-routing: 1 router",)
    assert not {"aten.topk", "aten.gather", "aten.scatter_"} & set(names(result))
    assert differences(graph, result, model) < (FP32 if wide == torch.float32 else EXACT)
    before, after = (sum(cost.flops() for cost in price_ops(g)[0]) for g in (graph, result))
    again = ROWS * 4 * EXPERTS if route is mask_by_where else 0  # its sigmoid is written twice
    assert before == after + again  # one kernel does what all of them did


def test_the_bytes_of_a_routing_kernel_are_those_of_logits_and_results() -> None:
    graph = reprice(traced(filled(Router(deepseek_v3)), "forward"), "bf16")
    result, _ = changed(graph, ROUTING)
    (cost,) = [
        cost for op, cost in zip(result.ops, price_ops(result)[0], strict=True)
        if op.name == "rooftrace.route_experts"
    ]  # fmt: skip
    read, written = ROWS * EXPERTS * 2 + EXPERTS * 2, ROWS * CHOSEN * (2 + 8)  # int64 indices
    assert cost.bytes() == read + written
    each = 4 * EXPERTS + EXPERTS + 4  # sigmoid, bias, sums of two in 4 groups
    each += (CHOSEN - 1) + 1 + CHOSEN + CHOSEN  # sum, 1e-20, divisions, scale
    assert cost.flops() == ROWS * each


def scores_leave(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    scores = F.softmax(logits, dim=-1)
    return *best_first(scores), scores


def balanced_by_loss(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    scores = F.softmax(logits, dim=-1)
    weights, chosen = best_first(scores)
    return weights, chosen, (scores.mean(0) * EXPERTS).square().sum()


def expert_choice(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    weights, chosen = F.softmax(logits, dim=-1).t().topk(CHOSEN, dim=-1)  # of tokens
    return weights[:1].expand(ROWS, -1), chosen[:1].expand(ROWS, -1) % EXPERTS


def bias_of_the_input(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    scores = logits.sigmoid()
    return picked(scores, scores + logits.mean(0))


def masked_before(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return best_first(F.softmax(logits, dim=-1).masked_fill(logits < 0, 0.0))


def over_all_tokens(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return best_first(F.softmax(logits, dim=0))


def no_top_k(logits: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    best, chosen = logits.softmax(-1).max(-1, keepdim=True)
    return best, chosen


@pytest.mark.parametrize(
    "route",
    [scores_leave, balanced_by_loss, expert_choice, bias_of_the_input, no_top_k],
    ids=lambda route: route.__name__,
)
def test_other_structures_are_no_routing_kernel(route: Any) -> None:
    graph = traced(filled(Router(route, leaves=True)), "forward")
    assert names(changed(graph, ROUTING)[0]) == names(graph)


@pytest.mark.parametrize("route", [masked_before, over_all_tokens], ids=lambda r: r.__name__)
def test_what_a_kernel_does_not_do_stays_in_front_of_it(route: Any) -> None:
    model = filled(Router(route), torch.float64)
    graph = traced(model, "forward")
    result, _ = changed(graph, ROUTING)
    assert differences(graph, result, model) < EXACT
    assert "aten._softmax" in names(result)


def test_logits_may_leave_the_step() -> None:
    model = filled(Router(mixtral, leaves=True), torch.float64)
    graph = traced(model, "forward")
    result, notes = changed(graph, ROUTING)
    assert notes == ("fused-routing: 1 router",)
    assert differences(graph, result, model) < EXACT


def test_the_best_words_of_a_head_are_no_experts() -> None:
    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)

        def forward(self, tokens: Tensor) -> Any:
            best, chosen = self.head(self.embed(tokens)[:, -1]).topk(5)
            return chosen.gather(1, best.softmax(-1).argmax(-1, keepdim=True))

    graph = traced(filled(Sampler()), "forward")
    assert names(changed(graph, ROUTING)[0]) == names(graph)


# -- experts ---------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Routed experts, their products grouped, written in one of several ways."""

    def __init__(self, how: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.more = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.biases = nn.ParameterList(
            [torch.empty(EXPERTS, 2 * INNER), torch.empty(EXPERTS, WIDTH)]
        )
        self.how = how

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens).flatten(0, -2)
        weights, chosen = F.softmax(self.gate(x), dim=-1).topk(CHOSEN, dim=-1)
        result: Tensor = getattr(self, self.how)(x, weights, chosen.flatten())
        return result

    def products(self, rows: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        """rows: sorted by expert, as their numbers `ids`."""
        made = torch._grouped_mm(rows, self.up, offs=ends)
        if "bias" in self.how:
            made = made + self.biases[0][ids]
        if "gate" in self.how:
            made = F.silu(made) * torch._grouped_mm(rows, self.more, offs=ends)
        elif "mixed" in self.how:
            made = made.cumsum(0)  # over rows of all tokens
        else:
            made = made.clamp(max=7).sigmoid() * made
        made = torch._grouped_mm(made, self.down, offs=ends)
        return made + self.biases[1][ids] if "bias" in self.how else made

    def ends(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids, minlength=EXPERTS).cumsum(0).to(torch.int32)

    def transformers(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids, order = torch.sort(chosen)
        made = self.products(x[order // CHOSEN], self.ends(ids), ids)
        made = made * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        return made[back].view(len(x), CHOSEN, -1).sum(dim=1)

    transformers_bias = transformers_mixed = transformers

    def added_gate(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = torch.argsort(chosen, stable=True)
        token = order // CHOSEN
        made = self.products(x.index_select(0, token), self.ends(chosen), chosen[order])
        made = made * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, token, made)

    def weighed_late_gate(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort()
        rows = x.repeat_interleave(CHOSEN, 0)[order]
        made = self.products(rows, self.ends(chosen), chosen[order])[order.argsort()]
        return (made.view(-1, CHOSEN, WIDTH) * weights[..., None]).sum(1)

    def weighed_first(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids, order = torch.sort(chosen)
        rows = x[order // CHOSEN] * weights.view(-1)[order][:, None]
        made = torch.empty_like(rows)
        made[order] = self.products(rows, self.ends(ids), ids)
        return made.view(-1, CHOSEN, WIDTH).sum(1)

    weighed_first_bias = weighed_first

    def elsewhere(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Half of the experts are of another process; their rows come last and are zero."""
        here = EXPERTS // 2
        weights = weights.masked_fill(chosen.view(-1, CHOSEN) >= here, 0.0)
        ids, order = torch.sort(torch.where(chosen < here, chosen, here))
        ends = torch.histc(ids.int(), bins=here, min=0, max=here - 1).cumsum(0, dtype=torch.int32)
        others = (ids >= here).unsqueeze(-1)
        ids.clamp_(max=here - 1)
        rows = x[order // CHOSEN].masked_fill_(others, 0.0)
        made = torch._grouped_mm(rows, self.up[:here], offs=ends).masked_fill(others, 0.0)
        made = torch._grouped_mm(made.cos(), self.down[:here], offs=ends).masked_fill(others, 0.0)
        made = made * weights.flatten()[order].unsqueeze(-1)
        return made[order.argsort()].view(-1, CHOSEN, WIDTH).sum(1)

    def read_twice(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids, order = torch.sort(chosen)
        rows = x[order // CHOSEN]
        made = self.products(rows, self.ends(ids), ids) * weights.view(-1)[order][:, None]
        return made[order.argsort()].view(-1, CHOSEN, WIDTH).sum(1) + rows.sum(0)

    def other_order(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        ids, order = torch.sort(chosen, descending=True)
        made = self.products(x[order // CHOSEN], self.ends(ids), ids)
        return made[order.argsort()].view(-1, CHOSEN, WIDTH).sum(1)


@cache
def layer(how: str) -> tuple[nn.Module, OpGraph]:
    model = filled(Layer(how))
    return model, traced(model, "forward")


@with_grouped_products
@pytest.mark.parametrize(
    "how",
    [
        "transformers",
        "transformers_bias",
        "added_gate",
        "weighed_late_gate",
        "weighed_first",
        "elsewhere",
    ],
)
def test_experts_run_as_five_kernels_or_so_with_the_same_results(how: str) -> None:
    model, graph = layer(how)
    result, notes = changed(graph, KERNELS)
    assert notes == ("fused-experts: 1 expert layer",)
    assert differences(graph, result, model) < FP32
    after = names(result)
    products = 3 if "gate" in how else 2
    assert after.count("rooftrace.expert_mm") == products and "aten._grouped_mm" not in after
    alone = {"aten.sort", "aten.argsort", "aten.index", "aten.index_put_", "aten.cumsum"}
    assert not alone & set(after)
    assert after.count("rooftrace.align_experts") == after.count("rooftrace.combine_experts") == 1


@with_grouped_products
@pytest.mark.parametrize(
    "how", ["transformers_mixed", "weighed_first_bias", "read_twice", "other_order"]
)
def test_rows_that_something_else_reads_or_orders_stay_as_they_are(how: str) -> None:
    """Rows that are mixed, read again or in another order; a bias that would be weighed."""
    _, graph = layer(how)
    assert names(changed(graph, KERNELS)[0]) == names(graph)


@with_grouped_products
def test_costs_of_the_kernels_by_hand() -> None:
    _, graph = layer("transformers_bias")
    result, _ = changed(graph, KERNELS)
    costs = [
        (op, cost)
        for op, cost in zip(result.ops, price_ops(result)[0], strict=True)
        if op.name.startswith("rooftrace.")
    ]
    (_, align), (up, first), (_, second), (_, combine) = costs
    routed = ROWS * CHOSEN
    read = up.facts["groups_touched"] / EXPERTS  # share of the weights, as the trace assumed it
    numbers = 4 * (routed + EXPERTS)  # int32: rows in order, ends
    assert align.bytes() == 8 * routed + numbers and align.flops() == 0
    weights = 4 * EXPERTS * (WIDTH * 2 * INNER + 2 * INNER) * read
    assert first.bytes() == pytest.approx(
        numbers + 4 * ROWS * WIDTH + weights + 4 * routed * 2 * INNER, abs=2
    )  # tokens once; each row written once
    weights = 4 * EXPERTS * (WIDTH * 2 * INNER + WIDTH) * read
    assert second.bytes() == pytest.approx(
        numbers + 4 * routed * 2 * INNER + weights + 4 * routed + 4 * routed * WIDTH, abs=2
    )  # with a score for each row
    product = 2 * routed * WIDTH * 2 * INNER
    assert first.flops() == product + routed * 2 * INNER  # the bias
    assert second.flops() == product + 2 * routed * WIDTH  # the bias, the score
    assert combine.bytes() == 4 * (routed + ROWS) * WIDTH
    assert combine.flops() == ROWS * WIDTH * (CHOSEN - 1)


@with_grouped_products
@pytest.mark.parametrize(("stored", "bits"), [("fp8", 8), ("mxfp4", 4.25), ("int4_g32", 4.5)])
def test_weights_are_read_as_they_are_stored(stored: str, bits: float) -> None:
    """MXFP4 has 8 bits for 32 numbers; int4_g32 a scale of 16 bits."""
    _, graph = layer("transformers")
    result, _ = changed(reprice(graph, weights_dtype=stored), KERNELS)
    for op, cost in zip(result.ops, price_ops(result)[0], strict=True):
        if op.name == "rooftrace.expert_mm":
            read = sum(
                size for access, size in cost.traffic.items()
                if result.values[access.storage].role == "weights"
            )  # fmt: skip
            experts = op.facts["groups_touched"]
            assert read == pytest.approx(experts * WIDTH * 2 * INNER * bits / 8, abs=1)
    written = [op for op in result.ops if op.kind == "kernel" and op.outputs]
    assert not any(result.owner(i).role == "weights" for op in written for i in op.outputs)


@with_grouped_products
@pytest.mark.parametrize("routing", ["uniform", "balanced", "skewed:1.5"])
def test_experts_that_were_assumed_to_be_reached_are_read(routing: str) -> None:
    blank = Layer("transformers").to("meta")
    graph = rt.trace(blank, torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta"),
                     phase="forward", assume={"routing": routing})  # fmt: skip
    result, _ = changed(graph, KERNELS)
    before, after = (
        [(op.facts["groups_touched"], op.facts["rows_routed"], op.assumptions)
         for op in g.ops if op.name == name]
        for g, name in ((graph, "aten._grouped_mm"), (result, "rooftrace.expert_mm"))
    )  # fmt: skip
    assert before == after and len(after) == 2


class Gathered(nn.Module):
    """Experts whose weights are copied for each row, as transformers' batched products do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.how = how

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens).flatten(0, -2)
        weights, chosen = F.softmax(self.gate(x), dim=-1).topk(CHOSEN, dim=-1)
        ids = chosen.flatten()
        rows = x.repeat_interleave(CHOSEN, 0)
        up = self.up[ids] if self.how != "scaled" else self.up[ids] * 2.0
        if self.how == "behind":
            made = torch.bmm(up, rows.unsqueeze(-1)).squeeze(-1).unsqueeze(1).cos()
        else:
            made = torch.bmm(rows.unsqueeze(1), up.transpose(1, 2)).cos()
        made = torch.bmm(made, self.down.index_select(0, ids)).squeeze(1) * weights.view(-1, 1)
        made = made.view(-1, CHOSEN, WIDTH).sum(1)
        return (made, up) if self.how == "kept" else made


@pytest.mark.parametrize("how", ["plain", "behind"])
def test_weights_that_are_copied_for_each_row_are_read_once(how: str) -> None:
    model = filled(Gathered(how), torch.float64)
    graph = traced(model, "forward")
    result, notes = changed(graph, KERNELS)
    assert notes == ("fused-experts: 1 expert layer",)
    assert differences(graph, result, model) < EXACT
    products = [op for op in result.ops if op.name == "rooftrace.expert_mm"]
    assert [op.arguments["share"] for op in products] == [CHOSEN, 1]
    assert names(result).count("rooftrace.align_experts") == 1
    saved = sum(c.bytes() for c in price_ops(graph)[0]) - sum(
        c.bytes() for c in price_ops(result)[0]
    )
    assert saved > 2 * 2 * 8 * (ROWS * CHOSEN - EXPERTS) * WIDTH * 2 * INNER  # copies, both ways


@pytest.mark.parametrize(("how", "left"), [("scaled", 1), ("kept", 1)])
def test_copies_that_something_else_reads_or_changes_stay(how: str, left: int) -> None:
    graph = traced(filled(Gathered(how)), "forward")
    result, _ = changed(graph, KERNELS)
    assert names(result).count("aten.bmm") == left


# -- models of transformers ------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, moe_intermediate_size=16, num_experts=8, n_routed_experts=8,
    num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=64, n_group=2, topk_group=1,
    n_shared_experts=1, first_k_dense_replace=0, pad_token_id=0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
MODELS = {  # of as many authors; how many layers route
    "Mixtral": 2, "GptOss": 2, "Glm4Moe": 2, "Olmoe": 2, "NemotronH": 1, "HunYuanMoEV1": 2,
    "GraniteMoe": 2, "MiniMaxM2": 2,
}  # fmt: skip


@with_transformers_5
@pytest.mark.parametrize("family", MODELS)
def test_models_of_many_authors_run_the_kernels(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"{family} is of another release")
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = filled(getattr(transformers, f"{family}ForCausalLM")(config))
    graph = traced(model, "decode")
    result, notes = changed(graph, ROUTING, KERNELS)
    layers = MODELS[family]
    routers, experts = (
        f"{layers} {word}{'s' * (layers > 1)}" for word in ("router", "expert layer")
    )
    assert notes == (f"fused-routing: {routers}", f"fused-experts: {experts}")
    assert differences(graph, result, model) < FP32
    assert not {"aten.topk", "aten.sort", "aten._grouped_mm"} & set(names(result))


# -- products of widened numbers -------------------------------------------------------------------


class WideRouter(nn.Module):
    """A product in fp32 of tokens and weights that are narrower."""

    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.narrow = narrow

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        weight = self.weight.float()
        return F.linear(x.float() if self.narrow else x.float() + 1e-3, weight)


def test_a_product_reads_what_was_widened_for_it() -> None:
    model = filled(WideRouter(narrow=True), torch.bfloat16)
    graph = traced(model, "forward")
    result, notes = changed(graph, "narrow-operands")
    assert notes == ("narrow-operands: 1 product",)
    assert names(result) == ["aten.embedding", "aten.mm"]
    assert differences(graph, result, model) == 0
    (cost,) = [c for op, c in zip(result.ops, price_ops(result)[0], strict=True) if "mm" in op.name]
    assert {work.precision for work in cost.work} == {"bf16"}
    assert cost.bytes() == 2 * (ROWS + EXPERTS) * WIDTH + 4 * ROWS * EXPERTS


def test_a_product_of_numbers_that_are_wide_stays_wide() -> None:
    graph = traced(filled(WideRouter(narrow=False), torch.bfloat16), "forward")
    assert names(changed(graph, "narrow-operands")[0]) == names(graph)
