"""The counter graveyard: what other counters got wrong, each with the right value.

docs/counter-graveyard.md tells where each was reported; a test here has the number of its row.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.costmodels.ops.opview import RULES
from rooftrace.hardware.chipfile import available_chips

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[1] / "docs" / "counter-graveyard.md"
META = torch.device("meta")


def matrix(model: nn.Module, *inputs: torch.Tensor, **kwargs: object) -> int:
    """FLOP of the matrix products and convolutions of one forward pass."""
    return rt.estimate(rt.trace(model, *inputs, **kwargs), execution="eager").flops_matrix


class Attend(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class Plus(nn.Module):
    """x + f(x, weight) for any function."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


# -- silent zeros ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_01_attention_is_not_free(device: str) -> None:
    q = torch.empty(1, 12, 64, 64, device=device)
    assert matrix(Attend(), q, q, q) == 12_582_912
    # Twice the sequence is four times the attention, so more than twice a transformer.
    long = torch.empty(1, 12, 128, 64, device=device)
    assert matrix(Attend(), long, long, long) == 4 * 12_582_912


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_02_the_fast_path_of_a_transformer_layer_hides_nothing(device: str) -> None:
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        x = torch.zeros(2, 10, 64)
    with torch.no_grad():
        counts = [matrix(layer.train(mode), x) for mode in (True, False)]
    tokens, width = 2 * 10, 64
    linear = 2 * tokens * width * (3 * width + width + 2 * 256)
    assert counts == [linear + 2 * 2 * 2 * 10 * 10 * width] * 2


def test_02_heads_do_not_change_the_products_of_attention() -> None:
    x = torch.zeros(2, 10, 64)
    four, eight = (matrix(nn.MultiheadAttention(64, h, batch_first=True), x, x, x) for h in (4, 8))
    projections = 2 * 20 * 64 * 4 * 64
    assert four == eight == projections + 2 * 2 * 2 * 10 * 10 * 64


def test_03_inference_mode_counts_like_any_other() -> None:
    q = torch.zeros(1, 12, 64, 64)
    with torch.inference_mode():
        assert matrix(Attend(), q, q, q) == 12_582_912
        with META:
            inside = nn.Linear(8, 8)
        assert matrix(inside, torch.zeros(3, 8)) == 2 * 3 * 8 * 8

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, x):
            with torch.inference_mode():
                rows = (torch.arange(x.shape[0]) * 2)[:2].tolist()
                return self.lin(x)[: rows[1]]

    assert matrix(Inside(), torch.zeros(4, 8)) == 2 * 4 * 8 * 8


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.einsum("bsd,df->bsf", x, w),
        torch.matmul,
        lambda x, w: x @ w,
        lambda x, w: F.linear(x, w.T),
        lambda x, w: torch.tensordot(x, w, dims=1),
        lambda x, w: torch.stack([torch.mm(row, w) for row in x]),
    ],
    ids=["einsum", "matmul", "@", "F.linear", "tensordot", "mm in a loop"],
)
def test_04_a_product_is_a_product_however_it_is_written(function) -> None:
    assert matrix(Plus(function, 16, 32), torch.zeros(3, 5, 16)) == 2 * 3 * 5 * 16 * 32


library = torch.library.Library("graveyard", "DEF")
library.define("mystery(Tensor x, Tensor w) -> Tensor")
library.impl("mystery", lambda x, w: torch.empty_like(x), "Meta")


def test_05_a_custom_op_is_named_and_takes_a_rule() -> None:
    model, x = Plus(torch.ops.graveyard.mystery, 16, 16), torch.zeros(4, 16)
    graph = rt.trace(model, x)
    unknown = rt.estimate(graph)
    (op,) = unknown.unsupported_ops()
    assert (op.target, op.count) == ("graveyard.mystery.default", 1)
    assert op.bytes == 4 * (4 * 16 + 16 * 16 + 4 * 16) == unknown.bytes_hbm
    assert op.bytes_least == 4 * 4 * 16 and op.bytes_most == op.bytes  # the result; everything
    assert "@rooftrace.extend.rule" in op.stub

    @rt.extend.rule("graveyard::mystery")
    def mystery(op: rt.extend.OpView) -> rt.extend.Cost:
        return rt.extend.Cost.of(matmul=1000) + op.streamed()

    try:
        assert rt.estimate(graph).flops_matrix == 1000
        assert not rt.estimate(graph).unsupported_ops()
    finally:
        del RULES["graveyard.mystery"]


def test_06_flex_attention_is_counted_dense_and_by_its_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seq = 256

    class Flex(nn.Module):
        def forward(self, q):
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, seq, seq, device=q.device
            )
            return flex_attention(q, q, q, block_mask=mask)

    estimate = rt.estimate(rt.trace(Flex(), torch.zeros(1, 2, seq, 64)), execution="eager")
    dense = 2 * 2 * 2 * seq * seq * 64
    assert estimate.flops_matrix == dense
    assert dense / 2 < estimate.flops_causal - (estimate.flops - dense) < dense


def test_07_what_has_no_rule_says_how_much_rests_on_it() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 16))

        def forward(self, x):
            return torch.ops.graveyard.mystery(x.relu() + x * 2, self.weight)

    coverage = rt.estimate(rt.trace(Mixed(), torch.zeros(4, 16)), execution="eager").coverage
    assert [u.target for u in coverage.unsupported] == ["graveyard.mystery.default"]
    assert 0 < coverage.bytes_with_rule_share < 1 and coverage.ops_with_rule == coverage.ops - 1


# -- wrong numbers ---------------------------------------------------------------------------------


def test_08_macs_and_flops_have_two_names() -> None:
    profile = rt.profile(nn.Linear(10, 20), (torch.zeros(3, 10),))
    macs, params = profile  # as thop returns them
    assert macs == profile.macs == 3 * 10 * 20 and params == 10 * 20 + 20
    assert profile.estimate.flops_matrix == 2 * macs
    assert profile.flops == 2 * macs + 3 * 20  # the bias is added on the vector engine


def test_09_causal_attention_is_counted_both_ways() -> None:
    q = torch.zeros(1, 4, 128, 64)
    estimate = rt.estimate(rt.trace(Attend(is_causal=True), q, q, q), execution="eager")
    whole = rt.estimate(rt.trace(Attend(), q, q, q), execution="eager")
    pairs, visible = 128 * 128, 128 * 129 // 2
    assert estimate.flops_matrix == whole.flops_matrix == 4 * 2 * 2 * pairs * 64
    vector = estimate.flops - estimate.flops_matrix
    hidden = estimate.flops - estimate.flops_causal
    assert 0 <= hidden - 4 * 2 * 2 * (pairs - visible) * 64 <= vector
    assert whole.flops_causal == whole.flops


def test_10_grouped_query_attention_reads_the_heads_that_are_there() -> None:
    q, kv = torch.zeros(2, 32, 16, 64), torch.zeros(2, 8, 16, 64)
    grouped = rt.estimate(rt.trace(Attend(enable_gqa=True), q, kv, kv), execution="eager")
    full = rt.estimate(rt.trace(Attend(), q, q, q), execution="eager")
    assert grouped.flops_matrix == full.flops_matrix
    assert full.bytes_hbm - grouped.bytes_hbm == 2 * 4 * (32 - 8) * 2 * 16 * 64


def test_11_the_layout_of_heads_and_tokens_does_not_matter() -> None:
    class Transposed(nn.Module):
        def forward(self, q):  # [B, S, H, D]
            q = q.transpose(1, 2)
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.zeros(2, 5, 96, 64)
    assert matrix(Attend(), q, q, q) == 2 * 5 * 2 * 2 * 96 * 96 * 64
    assert matrix(Transposed(), q.transpose(1, 2)) == matrix(Attend(), q, q, q)


class Shared(nn.Module):
    """One layer, called many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.lin, self.times = nn.Linear(64, 64, bias=False), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.lin(x)
        return x


def test_12_a_module_called_a_hundred_times_is_computed_a_hundred_times_and_stored_once() -> None:
    model, x = Shared(100), torch.zeros(8, 64)
    estimate = rt.estimate(rt.trace(model, x), execution="eager")
    assert estimate.flops_matrix == 100 * 2 * 8 * 64 * 64
    assert estimate.graph.model["params"] == 64 * 64
    assert rt.memory(estimate.graph).weights == 4 * 64 * 64
    assert estimate.bytes.weights == 100 * 4 * 64 * 64  # every call reads it
    # A second trace starts from nothing, and leaves nothing in the model.
    assert matrix(model, x) == estimate.flops_matrix and not model._forward_hooks


@pytest.mark.parametrize("shape", [(7, 16), (3, 7, 16), (2, 3, 7, 16), (16,)])
def test_13_a_linear_layer_takes_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    estimate = rt.estimate(rt.trace(nn.Linear(16, 32), torch.zeros(*shape)), execution="eager")
    # A vector is no matrix product for PyTorch: it counts as vector work, and as much of it.
    flops = estimate.flops_matrix or estimate.flops - 32
    assert flops == 2 * math.prod(shape) * 32


def test_14_model_flops_are_those_of_the_palm_paper() -> None:
    layers, width, heads, seq, batch, words = 3, 128, 4, 64, 2, 1000

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(x).view(batch, seq, 3, heads, -1).permute(2, 0, 3, 1, 4)
            a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            x = x + self.out(a)
            return x + self.down(F.gelu(self.up(x)))

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(words, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, ids):
            return self.head(self.blocks(self.words(ids)))

    with META:
        model = Language()
        graph = rt.trace(model, torch.zeros(batch, seq, dtype=torch.long), phase="training")
    estimate = rt.estimate(graph, "h100-sxm", "eager")
    n = sum(p.numel() for p in model.parameters()) - words * width  # without the embedding
    palm = batch * seq * (6 * n + 12 * layers * width * seq)  # Chowdhery et al. 2022, appendix B
    assert estimate.flops_matrix == palm
    assert estimate.mfu == pytest.approx(palm / estimate.t_est / estimate.peak)


def test_15_peaks_are_dense() -> None:
    h100 = rt.load_chip("h100-sxm")
    assert h100.peak("matrix", "bf16") == 989.4e12  # and not 1,979e12, which is with 2:4 sparsity
    assert h100.peak("matrix", "fp8") == pytest.approx(2 * h100.peak("matrix", "bf16"), rel=1e-3)
    for name in available_chips():
        assert all("spars" not in peak.rate.text for peak in rt.load_chip(name).peaks), name


# -- missing scope ---------------------------------------------------------------------------------


def test_16_backward_is_traced_not_doubled() -> None:
    class Two(nn.Module):
        def __init__(self, again: bool = False) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU())
            self.b = nn.Linear(16, 4, bias=False)
            self.again = again

        def forward(self, x):
            hidden = checkpoint(self.a, x, use_reentrant=False) if self.again else self.a(x)
            return self.b(hidden)

    first, second = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    graph = rt.trace(Two(), torch.zeros(5, 8), phase="training", optimizer="none")
    # The input needs no gradient: the first layer has one product in backward, not two.
    assert rt.estimate(graph, execution="eager").flops_matrix == 2 * first + 3 * second
    graph = rt.trace(Two(again=True), torch.zeros(5, 8), phase="training", optimizer="none")
    recomputed = rt.estimate(graph, execution="eager")
    assert recomputed.flops_matrix == 2 * first + 3 * second
    assert recomputed.flops_recompute == first + 5 * 16  # the product, and the ReLU


def test_17_experts_fill_memory_by_their_number_and_compute_by_those_chosen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, vocab_size=100,
    )  # fmt: skip
    with META:
        model = transformers.MixtralForCausalLM(config)
        graph = rt.trace(model, input_ids=torch.zeros(1, 16, dtype=torch.long))
    estimate = rt.estimate(graph, execution="eager")
    experts = [row for row in estimate.rows if ".experts" in row.module and row.flops]
    active = sum(row.flops for row in experts if "mm" in row.name)
    assert active == 16 * 2 * 3 * 2 * 64 * 128  # tokens, experts each, products
    assert rt.memory(graph).weights >= 8 * 3 * 64 * 128 * 4


def test_18_bytes_stand_beside_flops() -> None:
    estimate = rt.estimate(rt.trace(nn.Linear(64, 32, bias=False), torch.zeros(8, 64)))
    assert estimate.bytes.to_dict() == {
        **dict.fromkeys(estimate.bytes.to_dict(), 0),
        "weights": 4 * 64 * 32,
        "activations": 4 * 8 * (64 + 32),
    }
    assert estimate.ai_hbm == estimate.flops / estimate.bytes_hbm


def test_19_whether_it_fits_needs_no_gpu() -> None:
    with META:
        model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(25)))
        graph = rt.trace(model, torch.zeros(4, 16384), phase="training")
    memory = rt.memory(graph)
    weights = 25 * 16384**2 * 4
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        weights, weights, pytest.approx(2 * weights, rel=1e-6),
    )  # fmt: skip
    assert memory.fits(rt.load_chip("h200-sxm")) and not memory.fits(rt.load_chip("h100-sxm"))


def test_20_bytes_follow_the_width_of_a_number() -> None:
    with META:
        model = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
        graph = rt.trace(model, torch.zeros(1, 1024, dtype=torch.bfloat16))
    numbers = 1024 * 1024
    for precision, bits in {"bf16": 16, "fp8": 8, "int4": 4, "nvfp4": 4.5, "mxfp4": 4.25}.items():
        estimate = rt.estimate(rt.tools.reprice(graph, weights_dtype=precision))
        assert estimate.bytes.weights == numbers * bits / 8, precision
        assert estimate.graph.model["params"] == numbers


def test_21_a_compiled_model_counts_like_the_one_inside() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.zeros(3, 8)
    assert matrix(torch.compile(model), x) == matrix(model, x) == 2 * 3 * (8 * 16 + 16 * 4)


# -- inputs and ease -------------------------------------------------------------------------------


def test_22_any_arguments_are_fine() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 4)

        def forward(self, batch, *rest, scale=1.0, mode="sum", options=None):
            x = torch.cat([self.lin(batch["x"]), self.lin(batch["more"][0])])
            return {mode: x * scale + sum(rest), "kept": options}

    x = torch.zeros(3, 8)
    arguments = ({"x": x, "more": [x, None]}, torch.ones(4), 2)
    assert matrix(Picky(), *arguments, scale=0.5, mode="mean", options=("a", None)) == 384


def test_23_control_flow_on_values_runs() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(8, 4), nn.Linear(8, 400)

        def forward(self, x, lengths):
            for n in lengths.tolist():  # known: it came with the call
                x = x[:n]
            small = self.small(x)
            if small.sum() > 0:  # unknown: there are no weights, so it is assumed, and said
                return self.large(x)
            return small

    graph = rt.trace(Branches().to("meta"), torch.zeros(9, 8), torch.tensor([7, 5]))
    assert rt.estimate(graph, execution="eager").flops_matrix == 2 * 5 * 8 * 4
    (assumed,) = graph.assumptions
    assert assumed.kind == "branch" and assumed.value is False
    other = rt.trace(Branches(), torch.zeros(9, 8), torch.tensor([7, 5]), assume={"branch": True})
    assert rt.estimate(other, execution="eager").flops_matrix == 2 * 5 * 8 * (4 + 400)


def test_24_every_row_of_the_page_has_its_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*$", PAGE.read_text(), re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 26))
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    tests = {name for name in globals() if name.startswith("test_")}
    assert tests == named


def test_25_a_diff_matches_modules_not_names_of_kernels() -> None:
    class Old(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 32)

        def forward(self, x):
            return torch.relu(self.up(x))

    class New(Old):
        def forward(self, x):
            return F.relu(x @ self.up.weight.T + self.up.bias)  # mm and add instead of addmm

    found = rt.diff(Old(), New(), torch.zeros(4, 16), execution="efficient", phases=["forward"])
    (phase,) = found.phases
    assert phase.totals["flops"].delta == 0
    assert {module.path for module in phase.modules} <= {"", "up"}
