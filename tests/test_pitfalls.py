"""Mistakes of hand-made roofline reports; docs/roofline-pitfalls.md tells what each one did.

A test has the number of its row on that page; rows without one are about what is not modelled.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import ExecutionModel, Utilization
from rooftrace.costmodels.kernels.seconds import peak_seconds
from rooftrace.costmodels.kernels.works import SizedKernel, kernels_of
from rooftrace.costmodels.ops.cost import Cost, Work
from rooftrace.hardware.units import format_capacity, format_traffic
from rooftrace.reporting.commands.reportfolder import build_report
from rooftrace.studies.sensitivity import factorial
from tests.releases import with_transformers_5

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[1] / "docs" / "roofline-pitfalls.md"
META = torch.device("meta")
BF16 = torch.bfloat16
H200 = rt.load_chip("h200-sxm")


def traced(model: type[nn.Module] | nn.Module, *args: object, **kwargs: object) -> rt.types.OpGraph:
    with META:
        made = model() if isinstance(model, type) else model
        return rt.trace(made.to(BF16), *args, **kwargs)


def ones(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=BF16, device="meta")


class Mlp(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.fixture(scope="module")
def latent() -> dict[str, rt.types.OpGraph]:
    """Prefill and decode of one layer with multi-head latent attention."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=8, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, vocab_size=500,
    )  # fmt: skip
    with META:
        model = transformers.DeepseekV3ForCausalLM(config)
        ids = torch.zeros(1, 128, dtype=torch.long)
        return {
            phase: rt.trace(model, input_ids=ids, phase=phase) for phase in ("prefill", "decode")
        }


def test_01_every_weight_crosses_hbm_once_a_use() -> None:
    graph = traced(Mlp, ones(4, 512))
    weights = 2 * (2 * 4 * 512 * 512 + 5 * 512)
    for name in ("naive", "eager", "compiled", "efficient"):
        estimate = rt.estimate(graph, H200, name)
        assert estimate.bytes.weights == weights and not estimate.below_floor
    promised = rt.estimate(graph, H200, "seed-efficient")
    assert promised.bytes.weights < weights and promised.below_floor


@with_transformers_5  # before, the cache of DeepSeek holds the expanded keys and values
def test_02_flops_and_cache_belong_to_one_algorithm(latent: dict[str, rt.types.OpGraph]) -> None:
    decode = rt.estimate(latent["decode"], H200, "efficient")
    # The cache holds 32 + 8 numbers a token; this code expands all of it again, which is counted.
    expanded = 129 * 2 * 32 * 8 * (16 + 16)
    assert decode.bytes.kv >= 4 * 128 * (32 + 8)
    assert decode.flops_matrix > expanded
    assert any("absorbing those weights into the query" in note for note in decode.notes)


def test_06_a_mask_halves_what_flash_attention_computes() -> None:
    class Causal(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    graph = traced(Causal, ones(1, 8, 4096, 64))
    estimate = rt.estimate(graph, H200, "efficient")
    assert 1.9 < estimate.flops / estimate.flops_causal < 2
    executed = sum(
        flop for work, flop in estimate.plan.total.work.items() if work.count != "masked"
    )
    assert executed < 0.6 * estimate.flops


def test_07_times_add_not_rows() -> None:
    seed = ExecutionModel(utilization=Utilization(b_sat=64, eta_scalar=None, tiles=False))
    few, many = Work("matmul", "bf16", 4), Work("matmul", "bf16", 4096)
    flop, peak = 10**12, H200.peak("matrix", "bf16")
    kernels, _ = kernels_of([SizedKernel(Cost({few: flop, many: flop}), "mm")])
    (both,) = peak_seconds(kernels, H200, seed, peak)
    assert both == pytest.approx(flop / peak * (64 / 4 + 1))  # not 2 flop at the mean of the rows


def test_08_guessed_efficiencies_are_off_unless_asked_for() -> None:
    for name in ("naive", "eager", "compiled", "efficient"):
        utilization = rt.tools.execution_model(name).utilization
        assert (utilization.b_sat, utilization.eta_scalar) == (None, None)
        assert utilization.tiles  # which is arithmetic on the sizes and the SM count


def test_09_training_moves_gradients_and_optimizer_states() -> None:
    estimate = rt.estimate(traced(Mlp, ones(4, 512), phase="training"), H200, "efficient")
    weights = estimate.graph.model["params"] * 2
    # Weights are read forward, for the gradient of the hidden layer, and by the optimizer.
    assert estimate.bytes.weights > 2 * weights
    assert estimate.bytes.gradients > 1.99 * weights  # written by backward, read by the optimizer
    assert estimate.bytes.optimizer >= 2 * 3 * 2 * weights  # fp32 moments and masters, both ways
    assert set(estimate.by_part()) == {"forward", "backward", "optimizer"}


def test_10_activations_are_those_at_the_edge_of_every_kernel(
    latent: dict[str, rt.types.OpGraph],
) -> None:
    estimate = rt.estimate(latent["prefill"], H200, "eager")
    attention = [row for row in estimate.rows if ".self_attn" in row.module]
    moved = sum(row.bytes_by_role.get("activations", 0) for row in attention)
    assert moved > 5 * 4 * 128 * 256  # five times the hidden states is what the short formula has


def test_11_norms_residuals_and_rotations_move_bytes(latent: dict[str, rt.types.OpGraph]) -> None:
    families = rt.estimate(latent["prefill"], H200, "efficient").by_family()
    assert families["norm"]["bytes"] > 0
    elementwise = [f for f in ("elementwise", "rotary", "residual", "activation") if f in families]
    assert elementwise and all(families[f]["bytes"] > 0 for f in elementwise)


def test_12_naive_attention_passes_over_its_scores_more_than_twice() -> None:
    class Attend(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    graph = traced(Attend, ones(1, 8, 1024, 64))
    scores = 2 * 8 * 1024 * 1024
    naive, flash = (rt.estimate(graph, H200, name).bytes_hbm for name in ("naive", "eager"))
    assert naive - flash >= 4 * scores
    assert flash == 2 * 4 * 8 * 1024 * 64 + 4 * 8 * 1024  # q, k, v, the result; a number a row


def test_13_an_embedding_reads_the_rows_it_looks_up() -> None:
    with META:
        graph = rt.trace(nn.Embedding(50_000, 64), torch.tensor([[1, 2, 3, 2]], device="cpu"))
    estimate = rt.estimate(graph, H200, "eager")
    assert estimate.bytes.weights == 3 * 64 * 4  # three different rows
    assert estimate.flops == 0


def test_14_every_tensor_has_its_own_width() -> None:
    class Upcast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 1000, bias=False)

        def forward(self, x):
            return self.head(x).float()

    graph = rt.tools.reprice(traced(Upcast, ones(8, 64)), dtype="fp8")
    estimate = rt.estimate(graph, H200, "eager")
    assert estimate.bytes.weights == 64 * 1000  # one byte each
    assert graph.values[graph.outputs[0]].dtype == "fp32"  # what the model asked for by name


def test_15_the_maximum_of_totals_is_a_lower_bound() -> None:
    estimate = rt.estimate(
        traced(Mlp, ones(64, 512)), H200, rt.tools.execution_model("naive", knobs=None)
    )
    times = estimate.times
    assert times.t_bound == pytest.approx(max(times.t_comp, times.t_hbm, times.t_net))
    assert times.t_bound < times.t_serial < times.t_est


def test_16_capacity_and_traffic_have_units_of_their_own() -> None:
    assert format_capacity(141 * 2**30) == "141.0 GiB"
    assert format_traffic(141 * 2**30) == "151.4 GB"
    assert H200.memory_capacity.value < 141 * 2**30  # what is sold as 141 GB


def test_17_sentences_are_made_from_the_numbers() -> None:
    pages = []
    for width, batch in ((64, 1), (4096, 8192)):
        with META:
            model = nn.Linear(width, width, dtype=BF16)
            graph = rt.trace(model, ones(batch, width))
        report = build_report({"forward": graph}, [H200], ["efficient"])
        pages.append(report.to_dict()["phases"]["forward"]["efficient"]["regime"])
    assert pages == ["launch", "compute"]


def test_18_an_effect_names_its_levels_and_shares_add_up() -> None:
    result = factorial({"experts": (2, 8), "width": (0.75, 1.25)}, [[1, 2], [4, 7]])
    rows = result.to_rows()
    assert [(row["low_level"], row["high_level"]) for row in rows[:2]] == [(2, 8), (0.75, 1.25)]
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_19_what_does_not_fit_says_so_beside_its_speed() -> None:
    with META:
        model = nn.Linear(400_000, 400_000, bias=False, dtype=BF16)
        graph = rt.trace(model, ones(1, 400_000))
    memory = rt.memory(graph)
    assert not memory.fits(H200) and memory.chips_needed(H200) == 3
    document = build_report({"forward": graph}, [H200], ["efficient"]).to_dict()
    assert document["memory"]["forward"]["fits"] is False


def test_21_families_come_from_what_an_op_does() -> None:
    class Misnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_norm, self.ffn_norm = nn.LayerNorm(64), nn.RMSNorm(64)
            self.norm = nn.Linear(64, 64)

        def forward(self, x):
            return self.norm(self.ffn_norm(self.attn_norm(x)))

    rows = rt.estimate(traced(Misnamed, ones(8, 64)), H200, "eager").rows
    assert {row.module: row.family for row in rows} == {
        "attn_norm": "norm",
        "ffn_norm": "norm",
        "norm": "head",  # the last product of the model
    }


def test_every_row_of_the_page_names_its_test_or_says_why_not() -> None:
    lines = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in lines] == list(range(1, 22))
    named = {name for _, last in lines for name in re.findall(r"`(test_\w+)`", last)}
    here = {name for name in globals() if re.match(r"test_\d", name)}
    elsewhere = {"test_10_grouped_query_attention_reads_the_heads_that_are_there"}
    assert named == here | elsewhere
    assert all("`test_" in last or last.startswith("none:") for _, last in lines)
