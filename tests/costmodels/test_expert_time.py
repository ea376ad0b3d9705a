"""Seconds of products of experts: tiles, weights and rows; and of experts in a traced step."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import LIBRARIES, ExecutionModel, execution_model
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.kernels.experts import (
    EXPERT_KERNELS,
    IDEAL,
    ExpertKernel,
    expert_seconds,
    expert_tiles,
    kernel_of,
    kernel_on,
)
from rooftrace.costmodels.kernels.knobs import CLASSES, Knobs
from rooftrace.costmodels.kernels.seconds import kernel_table
from rooftrace.costmodels.kernels.tiles import MatrixEngine, matrix_engine
from rooftrace.costmodels.rewrites.rewrites import reprice
from rooftrace.graph.graph import OpGraph
from rooftrace.hardware.chipfile import load_chip
from tests.releases import with_grouped_products

pytestmark = pytest.mark.quick

H100 = load_chip("h100-sxm")
RATE = H100.peak("matrix", "bf16")
ON = matrix_engine(H100)
assert isinstance(ON, MatrixEngine)
TRITON = EXPERT_KERNELS["vllm triton", "half", "hopper"]
N, K = 2048, 4096


def seconds(
    rows: object, experts: object, kernel: ExpertKernel = IDEAL, columns: int = N, inner: int = K
) -> np.ndarray:
    """Seconds of bf16 products of experts with so many rows each."""
    each, count = np.broadcast_arrays(
        np.asarray(rows, dtype=float), np.asarray(experts, dtype=float)
    )
    each, count = np.atleast_1d(each), np.atleast_1d(count)
    moved = 2 * count * (columns * inner + each * (columns + inner))
    fixed = {"columns": columns, "inner": inner, "width_b": 2.0, "rate": RATE}
    sizes = {name: np.full(len(each), float(value)) for name, value in fixed.items()}
    sizes |= {"rows": each, "products": count, "bytes": moved}
    assert ON is not None
    return expert_seconds(sizes, ON, kernel, overlap=3.0).device


# -- the formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EXPERT_KERNELS.values(), ids=map(" ".join, EXPERT_KERNELS))
def test_more_rows_and_more_experts_take_longer(kernel: ExpertKernel) -> None:
    rows = np.arange(1.0, 3000.0)
    for experts in (8, 64, 512):
        steps = np.diff(seconds(rows, experts, kernel)) / seconds(rows[1:], experts, kernel)
        assert steps.min() > -1e-9
        assert steps.max() < 0.35  # one row more is no cliff
    assert np.diff(seconds(40, np.arange(1.0, 513.0), kernel)).min() > -1e-9


def test_an_expert_with_all_rows_is_a_dense_product() -> None:
    rows = 16_384  # 128 x 16 tiles: 15.5 waves of 132
    dense = 2 * rows * N * K / RATE
    assert ON is not None
    passed = 2 * rows * (N + K) / ON.memory
    assert seconds(rows, 1)[0] == pytest.approx(dense + passed, rel=0.01)


def test_few_rows_take_the_time_of_the_weights_of_experts_that_have_some() -> None:
    assert ON is not None
    weights = 2 * N * K / ON.memory
    assert seconds(1, 64)[0] == pytest.approx(64 * weights, rel=0.02)
    assert seconds(1, 128)[0] == pytest.approx(2 * seconds(1, 64)[0], rel=0.02)


@pytest.mark.parametrize("mean", [0.5, 3, 12, 40, 300])
def test_expected_tiles_are_those_of_drawn_rows(mean: float) -> None:
    """Rows of experts with exponential shares; experts without rows are left out."""
    rng = np.random.default_rng(0)
    rows = np.ceil(rng.exponential(mean, 100_000))
    for tile in (16, 64, 128):
        expected = expert_tiles(np.array([rows.mean()]), np.array([1e5]), tile)[0]
        assert expected == pytest.approx(np.ceil(rows / tile).sum(), rel=0.12)


def test_rows_of_one_expert_are_known() -> None:
    assert expert_tiles(np.array([65.0]), np.array([1.0]), 64.0)[0] == 2


def test_kernels_of_triton_are_slow_where_rows_do_not_divide_by_sixteen() -> None:
    even, uneven = seconds(8, 64, TRITON, inner=240)[0], seconds(8, 64, TRITON, inner=232)[0]
    assert uneven > 2 * even - 2 * TRITON.start


# -- whose kernel ----------------------------------------------------------------------------------


def test_every_engine_has_a_kernel_on_every_gpu() -> None:
    for name in ("a100-sxm-80", "h100-sxm", "b200-sxm", "b300-sxm", "gb200", "l40s", "rtx-4090"):
        chip = load_chip(name)
        for library in LIBRARIES:
            for form in ("half", "fp8", "fp8 blocks", "int4", "fp4"):
                kernel = kernel_of(library, chip, form)
                assert bool(kernel) == (library != "torch")
                assert not kernel or 1 <= kernel_on(chip, kernel, form) <= len(EXPERT_KERNELS)
    with pytest.raises(ValueError, match="kernel 'cublas': expected one of"):
        kernel_on(H100, "cublas", "half")


def test_constants_are_shares() -> None:
    for kernel in EXPERT_KERNELS.values():
        assert 0 < kernel.products <= 1
        assert 0 < kernel.stream <= 1
        assert 0 < kernel.rows <= 1


# -- in a step -------------------------------------------------------------------------------------

EXPERTS, CHOSEN, WIDTH, INNER, TOKENS = 32, 4, 512, 256, 48


class Experts(nn.Module):
    """One layer of routed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN, -1)
        order = chosen.view(-1).argsort()
        counts = torch.histc(chosen.view(-1)[order].int(), EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = torch._grouped_mm(x[order // CHOSEN], self.up, offs=ends).chunk(2, -1)
        rows = torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        rows = rows * weights.view(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add_(0, order // CHOSEN, rows)


@cache
def traced(tokens: int = TOKENS) -> OpGraph:
    with torch.device("meta"):
        layer = Experts().to(torch.bfloat16)
        return rt.trace(layer, torch.empty(tokens, WIDTH, dtype=torch.bfloat16))


def serving(library: str) -> ExecutionModel:
    return execution_model("serving", library=library)


@with_grouped_products
@pytest.mark.parametrize("library", ["vllm", "sglang", "trtllm"])
def test_traced_experts_take_the_seconds_of_their_sizes(library: str) -> None:
    graph, execution = traced(), serving(library)
    table, _ = kernel_table(plan(graph, execution), H100)
    knobs = Knobs.typical(H100, compiled=True, sustained=False)
    products = np.flatnonzero(table.kind == CLASSES.index("grouped mm"))
    assert len(products) == 2
    device = table.seconds(knobs, layouts=False).device[products]
    hit = round(EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** TOKENS))
    kernel = EXPERT_KERNELS[kernel_of(library, H100, "half"), "half", "hopper"]
    for columns, inner in ((2 * INNER, WIDTH), (WIDTH, INNER)):
        expected = seconds(TOKENS * CHOSEN / hit, hit, kernel, columns, inner)[0]
        assert min(abs(device / expected - 1)) < 0.05  # tokens are read once, and numbers of rows


@with_grouped_products
@pytest.mark.parametrize(
    ("library", "name", "stored", "kernel"),
    [
        ("trtllm", "b200-sxm", "mxfp4_afp8", "trtllm-gen fp8 blackwell"),
        ("vllm", "b200-sxm", "mxfp4_afp8", "trtllm-gen fp8 blackwell"),
        ("trtllm", "b200-sxm", "fp8_afp8", "cutlass fp8 blackwell"),
        ("trtllm", "b200-sxm", "mxfp4", "trtllm-gen int4 blackwell"),
        ("trtllm", "h100-sxm", "mxfp4_afp8", "cutlass fp8 hopper"),
    ],
)
def test_weights_of_four_bits_in_fp8_products_have_their_own_kernel_on_blackwell(
    library: str, name: str, stored: str, kernel: str
) -> None:
    graph = reprice(traced(), weights_dtype=stored)
    table, _ = kernel_table(plan(graph, serving(library)), load_chip(name))
    (place,) = set(table.data["experts"][table.data["experts"] > 0])
    assert " ".join(list(EXPERT_KERNELS)[int(place) - 1]) == kernel


@with_grouped_products
@pytest.mark.parametrize(("library", "name"), [("torch", "h100-sxm"), ("vllm", "mi300x")])
def test_products_of_torch_and_on_amd_keep_the_shares_of_their_class(
    library: str, name: str
) -> None:
    table, _ = kernel_table(plan(traced(), serving(library)), load_chip(name))
    assert not table.data["experts"].any()


@with_grouped_products
def test_a_sweep_over_tokens_and_estimates_agree() -> None:
    sizes = (1, 48, 300)
    with torch.device("meta"):
        layer, rows = Experts().to(torch.bfloat16), torch.empty(1, WIDTH, dtype=torch.bfloat16)
    swept = rt.sweep(layer, rows, over={"0.0": sizes}, chip="h100-sxm", execution=serving("vllm"))
    alone = [rt.estimate(traced(n), "h100-sxm", serving("vllm")).t_est for n in sizes]
    assert swept.columns["t_est"] == pytest.approx(alone, rel=1e-9)
