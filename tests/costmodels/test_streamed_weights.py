"""Products of few rows wait for their weights: their time follows the bytes that are stored."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import ExecutionModel, execution_model
from rooftrace.costmodels.kernels.engines import stored_widths
from rooftrace.costmodels.kernels.knobs import load_knobs
from rooftrace.costmodels.kernels.tiles import matrix_engine
from rooftrace.costmodels.ops.cost import Work
from rooftrace.graph.graph import OpGraph
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile import available_chips, load_chip
from tests.conftest import in_turn
from tests.costmodels.tile_support import tile_efficiency

STORED = ("bf16", "mxfp8", "fp8", "int8", "mxfp6", "nvfp4", "mxfp4", "int4", "int3", "int2")
"""By falling size; equal ones take equally long."""
IN, OUT = 8192, 28672


def one_layer(rows: int, dtype: torch.dtype = torch.bfloat16) -> OpGraph:
    with torch.device("meta"):
        return rt.trace(
            nn.Linear(IN, OUT, bias=False, dtype=dtype), torch.empty(rows, IN).to(dtype)
        )


def as_run(execution: str, knobs: str | None) -> ExecutionModel:
    return replace(execution_model(execution), knobs=load_knobs(knobs) if knobs else None)


def streaming(graph: OpGraph, stored: str) -> OpGraph:
    return graph if stored == "bf16" else rt.tools.reprice(graph, weights_dtype=stored)


BF16 = [name for name in available_chips() if load_chip(name).has_peak("matrix", "bf16")]


@pytest.fixture(scope="module")
def graphs() -> dict[tuple[int, str], OpGraph]:
    made = {rows: one_layer(rows) for rows in (1, 4)}
    return {(rows, s): streaming(made[rows], s) for rows in made for s in STORED}


@pytest.mark.parametrize(
    ("chip_name", "knobs"),
    in_turn(BF16, ["typical-eager", "typical-compiled", None]),
)
def test_time_falls_with_the_bytes_of_the_weights(
    graphs: dict[tuple[int, str], OpGraph], chip_name: str, knobs: str | None
) -> None:
    chip = load_chip(chip_name)
    for execution in (as_run(name, knobs) for name in ("eager", "compiled", "efficient")):
        for rows in (1, 4):
            found = [rt.estimate(graphs[rows, stored], chip, execution) for stored in STORED]
            device = [e.times.t_serial for e in found]
            weights = [e.bytes.weights for e in found]
            for wide, narrow in zip(range(len(STORED)), range(1, len(STORED)), strict=False):
                if weights[narrow] < weights[wide]:
                    # H20 has so much bandwidth that narrow weights wait for four rows of products.
                    computes = found[wide].times.t_comp > found[wide].times.t_hbm
                    assert device[narrow] < device[wide] or (rows > 1 and computes)
                    assert device[narrow] <= device[wide]
                else:
                    assert device[narrow] == pytest.approx(device[wide])
            for estimate, seconds in zip(found, device, strict=True):
                assert seconds >= estimate.bytes_hbm / chip.memory_bandwidth.value


@pytest.mark.parametrize("chip_name", available_chips())
def test_a_row_in_fp32_is_fed_by_narrow_weights_too(chip_name: str) -> None:
    """The vector engine has no tile of 16 rows to fill: a matrix-vector kernel runs there."""
    graph = one_layer(1, torch.float32)
    whole = rt.estimate(graph, chip_name, "compiled").times.t_serial
    narrow = rt.estimate(rt.tools.reprice(graph, weights_dtype="int4"), chip_name, "compiled")
    assert narrow.times.t_serial < whole / 3


def test_the_operands_are_fed_as_they_are_stored() -> None:
    plain = Work("matmul", "bf16", 16, columns=64, inner=64)
    assert stored_widths(plain) == (2, 2)
    chip: Chip = load_chip("b200-sxm")
    engine, rate = matrix_engine(chip), chip.peak("matrix", "bf16")
    assert engine is not None
    shares = [tile_efficiency((16, 4096, 8192), engine, rate, widths=(2, b)) for b in (2, 1, 0.5)]
    assert shares[0] < shares[1] < shares[2]
    # With as many rows as columns it does not matter which side is the narrow one.
    pairs = ((2, 0.5), (0.5, 2))
    sides = [tile_efficiency((64, 64, 8192), engine, rate, widths=pair) for pair in pairs]
    assert sides[0] == sides[1]


def test_experts_stored_in_four_bits_are_faster() -> None:
    """Grouped products: 8 experts, a token each."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 4096, 14336, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weight, offs=offsets)

    with torch.device("meta"):
        experts = Experts()
        rows = torch.empty(8, 4096, dtype=torch.bfloat16)
    offsets = torch.arange(1, 9, dtype=torch.int32)
    graph = rt.trace(experts, rows, offsets)
    for chip in ("b200-sxm", "h100-sxm", "l4"):
        times = [
            rt.estimate(streaming(graph, s), chip, "compiled").times.t_serial
            for s in ("bf16", "fp8", "int4")
        ]
        assert times[0] > 1.8 * times[1] > 1.8 * 1.8 * times[2]


def test_a_cache_in_fp8_halves_the_decode_of_attention() -> None:
    q = torch.empty(8, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(8, 32, 16384, 128, dtype=torch.bfloat16, device="meta")

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.v = nn.Parameter(kv), nn.Parameter(kv.clone())

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(query, self.k, self.v)

    graph = rt.trace(Attention(), q)
    for name in ("eager", "compiled"):
        for knobs in (None, "typical-eager"):
            execution = as_run(name, knobs)
            whole = rt.estimate(graph, "h100-sxm", execution).times.t_serial
            narrow = rt.tools.reprice(graph, weights_dtype="fp8")
            half = rt.estimate(narrow, "h100-sxm", execution).times.t_serial
            # FlashAttention 2 on Hopper is near the limit of its instructions.
            assert half < (0.75 if knobs else 0.6) * whole, (name, knobs)
