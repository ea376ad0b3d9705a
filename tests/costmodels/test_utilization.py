"""Tiles and waves: against blocks placed one by one, and against what quantisation must do."""

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import ExecutionError, ExecutionModel, Utilization
from rooftrace.costmodels.kernels import engines, experts, tiles
from rooftrace.costmodels.kernels.attention_rows import COLUMNS
from rooftrace.costmodels.kernels.knobs import CLASSES, Knobs
from rooftrace.costmodels.kernels.seconds import KernelTable, _Products
from rooftrace.costmodels.kernels.tiles import (
    SPLITS,
    TILES,
    MatrixEngine,
    matrix_engine,
    tile_shares,
)
from rooftrace.hardware.chipfile import load_chip
from tests.costmodels.tile_support import tile_efficiency

FREE = MatrixEngine(
    132, float("inf"), float("inf")
)  # tiles are fed, and partial results written, at no cost
SIZES = st.integers(1, 3000)


def h100() -> MatrixEngine:
    found = matrix_engine(load_chip("h100-sxm"))
    assert found is not None
    return found


def placed(rows: int, columns: int, inner: int, units: int) -> float:
    """FLOP time of the fastest tile and split: every block goes to the SM that is free first."""
    best = float("inf")
    for a, b in TILES:
        blocks = -(-rows // a) * -(-columns // b)
        for split in SPLITS:
            depth = -(-inner // (split * 32)) * 32 if split > 1 else inner
            free = [0] * units
            for _ in range(blocks * split):
                heapq.heappushpop(free, free[0] + a * b * depth)
            best = min(best, max(free))
    return best


@pytest.mark.parametrize(
    "shape", [(256, 512, 512), (1, 300, 64), (700, 130, 1000), (1500, 900, 96)]
)
def test_waves_are_those_of_blocks_placed_one_by_one(shape: tuple[int, int, int]) -> None:
    rows, columns, inner = shape
    useful = rows * columns * inner / FREE.units
    expected = useful / placed(rows, columns, inner, FREE.units)
    assert tile_efficiency(shape, FREE) == pytest.approx(min(1, expected))


@given(SIZES, SIZES, SIZES, st.integers(1, 64), st.sampled_from([0.5, 1, 2, 4]))
def test_it_is_a_share(rows: int, columns: int, inner: int, products: int, size: float) -> None:
    numbers = {"products": products, "widths": (size, size)}
    found = tile_efficiency((rows, columns, inner), h100(), **numbers)
    assert 0 < found <= 1
    assert found <= tile_efficiency((rows, columns, inner), FREE, **numbers) * (1 + 1e-12)


def test_whole_tiles_in_whole_waves_lose_nothing() -> None:
    assert tile_efficiency((12 * 256, 11 * 128, 4096), FREE) == 1
    assert tile_efficiency((8192, 8192, 8192), h100()) > 0.95


def test_one_row_uses_a_sixteenth_of_a_tile_at_most() -> None:
    assert tile_efficiency((1, 4096, 4096), h100()) <= 1 / 16


def test_many_small_products_fill_the_chip_where_one_cannot() -> None:
    one = tile_efficiency((128, 128, 64), h100())
    many = tile_efficiency((128, 128, 64), h100(), products=1320)
    assert one < 0.2 < many


def test_it_never_beats_the_peak_and_can_be_left_out() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 777), nn.Linear(777, 513)).to(torch.bfloat16)
        graph = rt.trace(model, torch.empty(321, 1000, dtype=torch.bfloat16))
    whole = rt.estimate(graph, "h100-sxm", "eager")
    ideal = ExecutionModel(utilization=Utilization(tiles=False))
    without = rt.estimate(graph, "h100-sxm", ideal)
    assert whole.times.t_comp > without.times.t_comp
    assert whole.flops == without.flops and whole.bytes_hbm == without.bytes_hbm
    vector = without.flops - without.flops_matrix
    rate = without.chip.peak("vector", "fp32")
    assert without.times.t_comp == pytest.approx(
        without.flops_matrix / without.peak + vector / rate
    )


def test_a_chip_without_an_sm_count_has_no_tiles() -> None:
    chip = load_chip("h100-sxm")
    assert matrix_engine(replace(chip, sm_count=None)) is None
    assert matrix_engine(replace(chip, kind="cpu")) is None


def test_the_knob_is_checked() -> None:
    with pytest.raises(ExecutionError, match=r"utilization\.tiles='yes': expected true or false"):
        ExecutionModel(utilization=Utilization(tiles="yes"))  # type: ignore[arg-type]


SIZE = st.integers(1, 300) | st.sampled_from([320, 768, 1024, 4096, 14336])


@pytest.mark.parametrize("name", ["a100-sxm-80", "h200-sxm", "b200-sxm", "l4", "mi300x"])
@given(SIZE, SIZE, SIZE, st.sampled_from([1, 4, 32]), st.sampled_from("MNK"), st.booleans(),
    st.sampled_from([("matrix", "bf16"), ("vector", "fp32")]),
)  # fmt: skip
def test_no_product_takes_less_for_more(
    name: str, m: int, n: int, k: int, products: int, grows: str, warm: bool, on: tuple[str, str]
) -> None:
    """M, N or K grows one by one: at the peaks, and by what kernels of the chip usually reach.

    warm: whether the cache still holds A.
    """
    chip, grown = load_chip(name), np.arange(1.0, 200.0)
    rate, sizes = chip.peak(*on), {"M": m, "N": n, "K": k, grows: grown}
    rows, columns, inner = (np.broadcast_to(sizes[size], grown.shape) for size in "MNK")
    a, b, c = (2 * products * x * y for x, y in ((rows, inner), (inner, columns), (rows, columns)))
    flop = 2 * products * rows * columns * inner
    alike = [np.broadcast_to(number, grown.shape) for number in (products, 2, 2, on[0] == "matrix")]
    product = (rows, columns, inner, *alike)
    zero, one = np.zeros_like(grown), np.ones_like(grown)
    data = dict(zip(tiles.SIZES, product, strict=True))
    data |= {"bytes": a + b + c, "warm": a * warm, "flop": flop, "rate": one * rate}
    data |= dict.fromkeys(("turned", "issue", "wait", "left", "vector", "matrix", "odd"), zero)
    data |= {f"attention {name}": zero for name in COLUMNS} | dict.fromkeys(experts.COLUMNS, zero)
    data["unit"] = one * engines.unit_of(*on)
    kernels = KernelTable(chip, np.full(len(grown), CLASSES.index("mm")), data)
    device = kernels.seconds(Knobs.typical(chip, compiled=False), False).device
    engine = matrix_engine(chip)
    assert engine is not None
    arrays = dict(zip(tiles.SIZES, product, strict=True))
    ideal = flop / tile_shares(arrays, one * rate, engine)
    for seconds in (device, ideal):
        assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all()


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["h100-sxm", "a100-sxm-80", "l4", "rtx-3090", "b200-sxm"]))
def test_products_whose_splits_are_not_timed_have_no_faster_one(data: Any, name: str) -> None:
    """`fastest` against every tile with every split, by knobs and at the datasheet's rates."""
    chip = load_chip(name)
    knobs, count = Knobs.typical(chip, compiled=False), 40
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows, columns, inner = np.exp(draw.uniform(0, np.log(30_000), (3, count))).round()
    padded = draw.integers(0, 2, count).astype(float)
    width = draw.choice([0.5, 1.0, 2.0, 4.0], count)
    sizes = dict(zip(tiles.SIZES, (rows, columns, inner, draw.integers(1, 9, count) * 1.0, width,
                                   width, padded), strict=True))  # fmt: skip
    flop = 2 * sizes["products"] * rows * columns * inner
    rate = np.where(padded > 0, 8.0, 1.0) * chip.peak("vector", "fp32")
    zero = np.zeros(count)
    table = KernelTable(chip, np.zeros(count, dtype=int), {**sizes, "kernel": zero, "flop": flop})
    bytes_ = (rows * inner + inner * columns + rows * columns) * width
    sent = bytes_ / chip.memory_bandwidth.value
    product = _Products(table, knobs, np.arange(count), rate, zero, zero + 1, sent, zero)
    every = product.by_tiles(table.tiles(knobs))
    assert product.by_tiles() == pytest.approx(every, rel=1e-12)
    engine = matrix_engine(chip)
    assert engine is not None
    seconds = tiles.tile_seconds(sizes, rate, engine).min(axis=1)
    shares = np.minimum(1, flop / rate / seconds)
    assert tile_shares(sizes, rate, engine) == pytest.approx(shares, rel=1e-12)


@pytest.mark.parametrize("chip", ["h100-sxm", "h200-sxm", "a100-sxm-80"])
def test_seventeen_tokens_take_no_less_than_sixteen(chip: str) -> None:
    """A product of GPT-2 that decodes: on H100 the whole step was 2.5 % shorter."""
    with torch.device("meta"):
        model = nn.Linear(768, 768).bfloat16()
        graphs = [
            rt.trace(model, torch.empty(n, 768, dtype=torch.bfloat16)) for n in (1, 16, 17, 33)
        ]
    found = [rt.estimate(graph, chip, "serving").t_est for graph in graphs]
    assert found == sorted(found)


def test_a_product_in_fp32_has_few_blocks() -> None:
    """ViT at batch 1 in fp32 on A100, compiled: 7.6 ms are published (transformers docs)."""
    chip = load_chip("a100-sxm-40")
    with torch.device("meta"):
        graph = rt.trace(nn.Linear(768, 768), torch.empty(197, 768))
    blocks = sum(1 for _ in range(0, 197, 128) for _ in range(0, 768, 64))
    block = 2 * 128 * 64 * 768 / (chip.peak("vector", "fp32") / 108)
    assert blocks < 108
    assert block < rt.estimate(graph, chip, "serving").t_est < 1.6 * block
