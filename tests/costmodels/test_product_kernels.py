"""Products in narrow formats by the kernels of inference engines, and the rounding before them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion import LIBRARIES, execution_model
from rooftrace.costmodels.kernels.engines import FORMATS, KERNELS, library_kernel, product_format
from rooftrace.costmodels.kernels.knobs import Knobs, library_products
from rooftrace.costmodels.kernels.numbers import KnobsError, ProductKnobs
from rooftrace.costmodels.kernels.seconds import table_of
from rooftrace.costmodels.kernels.tiles import SIZES, tile_terms
from rooftrace.costmodels.kernels.works import SizedKernel, kernels_of
from rooftrace.costmodels.ops import Access, Cost, Work
from rooftrace.hardware import load_chip
from rooftrace.hardware.precisions import precision, storage_bytes, widest

CHIPS = {
    name: replace(load_chip(name), sustained_compute=None)  # no limit on power: at one clock
    for name in ("a100", "h100", "h200", "b200", "l40s", "rtx-4090")
}
STORED = {
    "fp8": "fp8_afp8",
    "fp8_block": "fp8_g128x128_s32_afp8",
    "fp4": "nvfp4_afp4",
    "narrow": "int4_g128_s16",
}
ROUNDED = {"fp8": 1.0, "fp8_block": 1.0, "fp4": 0.5}
"""Bytes of a number of the activations, as a product loads it."""


def estimated(chip: str, stored: str | None, library: str, m: int, n: int, k: int) -> Any:
    """A linear layer as users price it."""
    layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
    x = torch.zeros(m, k, dtype=torch.bfloat16, device="meta")
    return rt.estimate(layer, x, chip=CHIPS[chip], library=library, weights_dtype=stored)


def device(estimate: Any) -> float:
    """Seconds of its one kernel, without a launch."""
    (row,) = estimate.rows
    return max(row.timing.t_comp, row.timing.t_hbm) + row.timing.more


def by_hand(chip: str, form: str, library: str, m: int, n: int, k: int) -> float:
    """The same of a product whose cost is written out."""
    stored = STORED[form]
    narrow = precision(stored).width / 8
    cost = Cost.of(
        matmul=2 * m * n * k, precision=widest("bf16", stored), rows=m, columns=n, inner=k,
        widths=(ROUNDED.get(form, 2.0), narrow), lined="NK",
    )  # fmt: skip
    sizes = (2 * m * k, storage_bytes(stored, n * k), 2 * m * n)
    traffic = {Access(i, i == 2): size for i, size in enumerate(sizes)}
    amounts, _ = kernels_of([SizedKernel(Cost(cost.work, traffic), "mm")])
    table = table_of(amounts, CHIPS[chip], execution_model("efficient", library=library))
    return float(table.seconds(Knobs.typical(CHIPS[chip], compiled=True), False).device[0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("chip", ["h100", "b200"])
@pytest.mark.parametrize("library", [*LIBRARIES])
def test_a_layer_costs_what_its_product_does(chip: str, form: str, library: str) -> None:
    sizes = (96, 8192, 4096)
    found = estimated(chip, STORED[form], library, *sizes)
    assert device(found) == pytest.approx(by_hand(chip, form, library, *sizes), rel=1e-6)


def test_formats_are_told_by_their_scales_and_by_what_the_chip_computes_in() -> None:
    for form, stored in STORED.items():
        work = Work("matmul", widest("bf16", stored), widths=(2.0, precision(stored).width / 8))
        assert product_format(work, CHIPS["b200"]) == form
        # Without the engine weights are widened, and nothing is rounded.
        assert product_format(work, CHIPS["a100"]) == "narrow"
        assert not library_kernel(work, CHIPS["a100"], "vllm")[1]
        assert library_kernel(work, CHIPS["b200"], "torch") == (0, False)
        _, rounds = library_kernel(work, CHIPS["b200"], "vllm")
        assert rounds == (form != "narrow")
    plain = Work("matmul", "bf16", widths=(2.0, 2.0))
    assert product_format(plain, CHIPS["b200"]) == ""
    both = Work("matmul", "fp8", widths=(1.0, 1.0))
    assert product_format(both, CHIPS["h100"]) == "fp8"
    assert library_kernel(both, CHIPS["h100"], "vllm") == (KERNELS.index("fp8 vllm"), False)


def test_scales_that_a_checkpoint_has_are_rounded_by_in_the_kernel_before() -> None:
    static = Work("matmul", widest("bf16", "fp8_afp8_static"), widths=(2.0, 1.0))
    found = Work("matmul", widest("bf16", "fp8_afp8"), widths=(2.0, 1.0))
    for library, rounds in (("trtllm", False), ("vllm", True), ("sglang", True)):
        assert library_kernel(static, CHIPS["h100"], library)[1] == rounds
        assert library_kernel(found, CHIPS["h100"], library)[1]
    assert widest("fp8_afp8_static", "fp8_afp8") == "fp8_afp8"  # one of both is found
    graph = rt.trace(nn.Linear(512, 512, bias=False, device="meta"), torch.zeros(8, 512))
    times = [
        rt.estimate(
            rt.tools.reprice(graph, weights_dtype=stored), "h100",
            rt.tools.execution_model("serving", library="trtllm"),
        ).t_est
        for stored in ("fp8_afp8", "fp8_afp8_static")
    ]  # fmt: skip
    start = library_products(CHIPS["h100"])["fp8 trtllm"].start
    assert times[0] - times[1] == pytest.approx(start, rel=0.2)


def test_an_engine_that_was_not_measured_takes_the_nearest() -> None:
    work = Work("matmul", "bf16_afp8", widths=(1.0, 1.0))
    place, rounds = library_kernel(work, CHIPS["h100"], "sglang")
    assert (KERNELS[place], rounds) == ("fp8 vllm", True)
    block = Work("matmul", "bf16_g128_afp8", widths=(1.0, 1.0))
    assert KERNELS[library_kernel(block, CHIPS["h100"], "sglang")[0]] == "fp8_block vllm"
    assert KERNELS[library_kernel(block, CHIPS["b200"], "sglang")[0]] == "fp8_block sglang"
    assert KERNELS[library_kernel(block, CHIPS["l40s"], "trtllm")[0]] == "fp8_block vllm"
    assert library_kernel(work, CHIPS["rtx-4090"], "vllm") == (0, False)


@pytest.mark.parametrize("chip", ["h100", "b200", "l40s"])
def test_rounding_takes_its_kernels_and_grows_with_the_activations(chip: str) -> None:
    """Between small and large M, by the formula in the docstring of ProductKnobs."""
    kernel = library_products(CHIPS[chip])["fp8 vllm"]
    knobs, units = Knobs.typical(CHIPS[chip], compiled=True), CHIPS[chip].sm_count.value
    bandwidth = CHIPS[chip].memory_bandwidth.value * knobs.memory
    for m in (1, 128, 8192):
        rounded = device(estimated(chip, STORED["fp8"], "vllm", m, 256, 4096))
        layer = nn.Linear(4096, 256, bias=False, dtype=torch.bfloat16, device="meta")
        x = torch.zeros(m, 4096, dtype=torch.bfloat16, device="meta")
        whole = rt.estimate(layer, x, chip=chip, library="vllm", dtype="fp8")
        held = 3 * m * 4096 <= CHIPS[chip].l2_capacity.value
        sent = kernel.reads * m * 4096 / (bandwidth * (knobs.cache if held else 1))
        row = kernel.row + 2 * kernel.chunk
        before = kernel.start + max(sent, row * max(m / units, kernel.row > 0))
        assert rounded >= before
        assert rounded - before <= device(whole) + 2 * m * (4096 + 256) / bandwidth + 1e-6


@pytest.mark.parametrize(
    ("k", "seconds"), [(128, 0.92e-6), (2048, 0.97e-6), (4096, 1.53e-6), (8192, 2.6e-6)]
)
def test_rows_are_rounded_in_chunks(k: int, seconds: float) -> None:
    """Seconds that a multiprocessor takes for a row more: slopes over M, of rows on H100, H200."""
    units = CHIPS["h100"].sm_count.value
    for chip in ("h100", "h200"):
        few, many = (by_hand(chip, "fp8", "vllm", m, 32, k) for m in (132 * 8, 132 * 32))
        assert (many - few) * units / (132 * 24) == pytest.approx(seconds, rel=0.15)


def test_tiles_of_a_cluster_come_together() -> None:
    """vLLM's kernel for more than 128 rows has clusters of 2 x 1 tiles: three of them take four."""
    rows = np.array([256.0, 257.0, 384.0, 512.0, 513.0])
    sizes = dict.fromkeys(SIZES, np.ones(5)) | {
        "rows": rows, "columns": np.full(5, 128.0), "inner": np.full(5, 4096.0)
    }  # fmt: skip
    kernel = library_products(CHIPS["h100"])["fp8 vllm"]
    flop = tile_terms(sizes, 1, kernels=[(kernel, rows > 0)]).flop.min(axis=1)
    assert [round(each) for each in 2 * flop / flop[0]] == [2, 4, 4, 4, 6]


def test_a_memory_of_more_bandwidth_shortens_no_walk() -> None:
    """H100 and H200 have the same SMs: 9 x 32 x 8,192 in bf16 takes 5.7 us on both (measured)."""
    chips = (estimated(chip, None, "vllm", 9, 32, 8192) for chip in ("h100", "h200"))
    one, other = map(device, chips)
    assert one == pytest.approx(other, rel=0.03)


def test_scales_of_rows_that_are_no_multiple_of_four_are_copied() -> None:
    even, odd = (
        device(estimated("b200", STORED["fp8_block"], "trtllm", m, 1024, 1024)) for m in (128, 127)
    )
    extra = library_products(CHIPS["b200"])["fp8_block trtllm"].ragged
    assert odd - even == pytest.approx(extra, rel=0.05)


def test_fp4_weights_run_on_the_fp4_engine_where_there_is_one() -> None:
    assert estimated("b200", "nvfp4_afp4", "vllm", 64, 512, 512).rows[0].precision == "fp4"
    assert estimated("b200", "mxfp4", "vllm", 64, 512, 512).rows[0].precision == "bf16"
    large = (8192, 8192, 8192)
    fp4, fp8, half = (
        device(estimated("b200", s, "trtllm", *large)) for s in ("nvfp4_afp4", "fp8_afp8", None)
    )
    assert fp4 < fp8 < half


@pytest.mark.parametrize("chip", ["a100", "h100", "b200", "l40s"])
def test_narrow_weights_help_where_their_bytes_are_the_limit(chip: str) -> None:
    narrow, plain = (estimated(chip, s, "vllm", 8, 16384, 16384) for s in ("int4_g128_s16", None))
    assert 2.0 < device(plain) / device(narrow) < 4.0
    narrow, plain = (estimated(chip, s, "vllm", 8192, 8192, 8192) for s in ("int4_g128_s16", None))
    assert device(narrow) > device(plain)


def test_more_rows_never_cost_less_than_their_tiles_allow() -> None:
    """A row more may open a tile, whose cost stays: no size falls below the one before by a lot."""
    for library in ("vllm", "trtllm"):
        times = [by_hand("h100", "fp8", library, m, 4096, 4096) for m in range(1, 300, 3)]
        assert all(b > 0.8 * a for a, b in pairwise(times))


def test_kernels_of_generations_are_read_and_checked() -> None:
    for chip in ("a100", "h100", "b200", "l40s"):
        found = library_products(CHIPS[chip])
        assert found
        assert set(found) <= {*KERNELS}
        assert all(kernel.compute <= 1.1 for kernel in found.values())
        assert Knobs.generation(CHIPS[chip]) is not None
    assert Knobs.generation(CHIPS["b200"]) == "blackwell"
    assert Knobs.generation(CHIPS["l40s"]) == "ada"
    assert not library_products(CHIPS["rtx-4090"])
    with pytest.raises(KnobsError, match="compute=0"):
        ProductKnobs(compute=0)


def test_products_of_odd_rows_are_slower_on_hopper_than_on_ampere() -> None:
    """cuBLAS has kernels of sm_80 alone for them, which do not reach the rate of Hopper."""
    for kind in ("mm", "bmm"):
        ampere, hopper = (
            Knobs.typical(CHIPS[c], compiled=False).share(kind).odd for c in ("a100", "h100")
        )
        assert hopper == pytest.approx(ampere / 0.62, rel=0.02)


def test_rows_of_one_table_take_each_their_kernel() -> None:
    """Kernels of several formats in one table cost what they do alone."""
    sizes = (33, 2048, 2048)
    costs = []
    for form in ("fp8", "narrow"):
        stored = STORED[form]
        cost = Cost.of(
            matmul=2 * 33 * 2048 * 2048, precision=widest("bf16", stored), rows=33, columns=2048,
            inner=2048, widths=(ROUNDED.get(form, 2.0), precision(stored).width / 8), lined="NK",
        )  # fmt: skip
        bytes_ = (2 * 33 * 2048, storage_bytes(stored, 2048 * 2048), 2 * 33 * 2048)
        costs.append(Cost(cost.work, {Access(i, i == 2): b for i, b in enumerate(bytes_)}))
    amounts, places = kernels_of(SizedKernel(cost, "mm") for cost in costs)
    table = table_of(amounts, CHIPS["h100"], execution_model("efficient", library="vllm"))
    seconds = table.seconds(Knobs.typical(CHIPS["h100"], compiled=True), False).device[places]
    alone = [by_hand("h100", form, "vllm", *sizes) for form in ("fp8", "narrow")]
    np.testing.assert_allclose(seconds, alone)


def test_products_of_experts_are_no_products_of_layers() -> None:
    cost = Cost.of(matmul=2 * 64**3, precision="bf16_afp8", rows=64, columns=64, inner=64)
    kernels = [SizedKernel(cost, kind) for kind in ("mm", "grouped mm")]
    amounts, places = kernels_of(kernels)
    table = table_of(amounts, CHIPS["h100"], execution_model("efficient", library="vllm"))
    assert [bool(table.data["kernel"][place]) for place in places] == [True, False]
    assert [bool(table.data["rounded"][place]) for place in places] == [True, False]


def test_a_sweep_takes_kernels_of_libraries_as_single_estimates_do() -> None:
    rows = (1, 17, 126, 127, 128, 700)
    layer = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device="meta")
    x = torch.zeros(16, 1024, dtype=torch.bfloat16, device="meta")
    how: dict[str, Any] = {
        "chip": CHIPS["b200"],
        "library": "trtllm",
        "weights_dtype": STORED["fp8_block"],
    }
    swept = rt.sweep(layer, x, over={"0.0": rows}, **how)
    alone = [estimated("b200", STORED["fp8_block"], "trtllm", m, 1024, 1024).t_est for m in rows]
    assert swept.columns["t_est"] == pytest.approx(alone, rel=1e-9)
    assert alone[3] > 1.3 * alone[4]
