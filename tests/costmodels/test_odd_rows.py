"""Rows that begin at no multiple of 16 bytes: which work has them, and what they cost."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.kernels.engines import ACCESS, LONG, misaligned
from rooftrace.costmodels.kernels.knobs import Knobs, KnobsError, Share, load_knobs
from rooftrace.costmodels.kernels.numbers import ProductKnobs, TileRule
from rooftrace.costmodels.kernels.seconds import kernel_table
from rooftrace.costmodels.kernels.tiles import SPLITS, TILES, tile_terms
from rooftrace.hardware.chipfile import load_chip

H100, A100 = load_chip("h100-sxm"), load_chip("a100-sxm-80")
STEP = Knobs("step", overlap=3.0, shares={"mm": Share(odd=2.0), "softmax": Share(odd=3.0)})


def works(graph: rt.types.OpGraph) -> list:
    return [work for cost in plan(graph, "eager").costs for work in cost.work]


def device(graph: rt.types.OpGraph, knobs: Knobs = STEP, chip=H100) -> float:
    """Seconds of all kernels of a step, without launches."""
    table, _ = kernel_table(plan(graph, "eager"), chip)
    return float((table.data["count"] * table.seconds(knobs, False).device).sum())


def traced(function, *sizes, dtype=torch.bfloat16, **options) -> rt.types.OpGraph:
    class Call(nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    with torch.device("meta"):
        return rt.trace(Call(), *(torch.empty(size, dtype=dtype) for size in sizes), **options)


def row_starts(tensor: torch.Tensor) -> set[int]:
    """Where rows of a real matrix begin, in bytes from the next multiple of ACCESS."""
    across = [d for d in range(tensor.dim()) if tensor.stride(d) != 1]
    (step,) = (tensor.stride(d) * tensor.element_size() for d in across)
    return {row * step % ACCESS for row in range(3)}


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(*[st.integers(2, 40)] * 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_product_is_odd_where_rows_of_real_tensors_begin_so(sizes, turn_a, turn_b, dtype) -> None:
    m, k, n = sizes
    shapes = ((k, m) if turn_a else (m, k)), ((n, k) if turn_b else (k, n))

    def multiply(a, b):
        return torch.mm(a.t() if turn_a else a, b.t() if turn_b else b)

    a, b = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    starts = set().union(*(row_starts(t) for t in (a, b, multiply(a, b))))
    (work,) = works(traced(multiply, *shapes, dtype=dtype))
    sizes = {"M": work.rows, "N": work.columns, "K": work.inner}
    assert misaligned(work, sizes) == (starts != {0})


def test_a_padded_vocabulary_is_faster_although_it_computes_more() -> None:
    """Of GPT-2: 50,257 tokens, and 50,304, a multiple of 64."""
    for execution in ("eager", "compiled"):
        took = {}
        for words in (50257, 50304):
            graph = traced(F.linear, (8192, 768), (words, 768))
            found = rt.estimate(graph, chip="a100", execution=execution)
            took[words] = found.t_est, found.flops
        assert took[50304][1] > took[50257][1]
        assert took[50304][0] < 0.8 * took[50257][0]


def test_softmax_over_one_column_more_reads_its_rows_three_times() -> None:
    def seconds(n: int) -> float:
        return device(traced(lambda x: x.softmax(-1), (4096, n)))

    assert 1.5 * seconds(50256) < seconds(50257) < 2.1 * seconds(50256)
    assert seconds(LONG - 3) < seconds(LONG)  # rows that stay in registers
    turned = (device(traced(lambda x: x.softmax(0), (n, 4096))) for n in (50257, 50256))
    assert next(turned) == pytest.approx(next(turned), rel=0.01)  # columns are no rows


def test_the_vector_engine_and_aligned_rows_pay_nothing() -> None:
    plain = replace(STEP, shares={})
    for sizes in (((512, 512), (512, 512)), ((512, 511), (511, 512))):
        wide = traced(torch.mm, *sizes, dtype=torch.float32)
        assert device(wide) == device(wide, plain)
    even, odd = (traced(torch.mm, (512, k), (k, 512)) for k in (512, 511))
    assert device(even) == device(even, plain)
    assert device(odd) > 1.3 * device(odd, plain)


def test_sizes_in_columns_are_odd_one_by_one() -> None:
    (work,) = works(traced(torch.mm, (64, 96), (96, 50257)))
    widths = np.array([50256.0, 50257, 50264, 50264.5, 1])
    found = misaligned(work, {"M": 64.0, "N": widths, "K": 96.0})
    assert found.tolist() == [0, 1, 0, 0, 0]


def test_a_sweep_takes_odd_rows_as_single_estimates_do() -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            x = self.inner(x)
            return (x @ x.mT).softmax(-1) @ x

    with torch.device("meta"):
        model = Attend().to(torch.bfloat16)
    sizes = (2040, 2041, 2048, 2051)
    with torch.device("meta"):
        x = torch.empty(4, 2040, 64, dtype=torch.bfloat16)
    swept = rt.sweep(model, x, over={"0.1": sizes}, chip="h100", execution="eager")
    alone = []
    for size in sizes:
        with torch.device("meta"):
            graph = rt.trace(model, torch.empty(4, size, 64, dtype=torch.bfloat16))
        alone.append(rt.estimate(graph, chip="h100", execution="eager").t_est)
    assert swept.columns["t_est"] == pytest.approx(alone, rel=1e-9)
    assert alone[1] > 1.05 * alone[0]  # the products


# -- numbers of knobs ------------------------------------------------------------------------------


def test_an_engine_with_a_share_of_its_own_takes_that_of_no_class() -> None:
    graph = traced(torch.mm, (4096, 4096), (4096, 4096), dtype=torch.float32)
    ideal = device(graph, replace(STEP, overlap=float("inf")))
    for share in (0.5, 0.75):
        own = replace(STEP, overlap=float("inf"), engines={"vector fp32": share})
        own = own.with_shares(compute={"mm": 0.1})
        assert device(graph, own) == pytest.approx(ideal / share, rel=0.05)
    other = replace(STEP, engines={"matrix fp16": 0.1})
    assert device(graph, other) == device(graph)
    for name, value in (("vectr fp32", 0.5), ("vector fp32", 0), ("vector fp32", 3)):
        with pytest.raises(KnobsError, match=name):
            Knobs("wrong", engines={name: value})


def test_typical_numbers_go_by_the_generation_and_by_what_the_chip_sustains() -> None:
    for name in ("a100", "h100", "h200", "b200", "l40s", "rtx-4090", "mi300x"):
        chip = load_chip(name)
        eager, alone = (Knobs.typical(chip, False, sustained=s) for s in (True, False))
        fact = chip.sustained_compute
        share = fact.value if fact else 1
        assert eager.compute == pytest.approx(alone.compute * max(1, share))
        assert (eager.power, alone.power) == (min(1, share), 1)
        base = load_knobs("typical-eager")
        same = name == "rtx-4090"
        assert (alone.tiling == base.tiling) == same
        assert alone.share("bmm").compute == base.share("bmm").compute
    assert execution_model("eager").knobs_on(A100).title == "typical A100 kernels (eager)"


def test_a_limit_on_power_slows_what_keeps_matrix_engines_busy_and_nothing_else() -> None:
    full = Knobs.typical(A100, compiled=False)
    limited = replace(full, power=0.7)
    unlimited = replace(full, power=1.0)

    def slower(*args, dtype=torch.bfloat16, function=torch.mm) -> float:
        graph = traced(function, *args, dtype=dtype)
        return device(graph, limited) / device(graph, unlimited)

    square = [slower((m, 4096), (4096, 4096)) for m in (1, 64, 256, 1024, 8192)]
    assert square == sorted(square)
    assert square[0] == 1
    assert 1.15 < square[-1] < slower((32768, 16384), (16384, 16384)) <= 1 / 0.7
    assert slower((8192, 4096), (4096, 4096), dtype=torch.float32) == 1
    assert slower((8192, 4096), (8192, 4096), function=torch.add) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 600), st.integers(1, 600), st.integers(32, 4096))
def test_a_library_takes_the_tile_of_its_first_rule_that_fits_and_no_other(m, n, k) -> None:
    rules = (TileRule(64, 64, 64, 256), TileRule(64, 64, 128), TileRule(256, 128, 128))
    flop = _flop_of_tiles(m, n, k, ProductKnobs(whole=True, tiles=rules))
    allowed = set()
    for place in np.flatnonzero(np.isfinite(flop)):
        tile, split = divmod(int(place), len(SPLITS))
        allowed.add((*TILES[tile], SPLITS[split]))
    assert allowed == {(128, 128, 1) if m > 64 else (64, 128, 1) if n > 256 else (64, 64, 1)}


def _flop_of_tiles(m: int, n: int, k: int, kernel: ProductKnobs, width: int = 1) -> np.ndarray:
    """FLOP of full waves of a product by each tile and split on 132 multiprocessors.

    width: bytes of an element; usually of fp8.
    """
    sizes = {"rows": m, "columns": n, "inner": k, "products": 1, "width_a": width,
             "width_b": width, "padded": 1}  # fmt: skip
    arrays = {name: np.array([float(value)]) for name, value in sizes.items()}
    return tile_terms(arrays, 132, kernels=[(kernel, np.array([True]))]).flop[0]


def test_a_tile_has_its_own_prologue_and_its_share_of_the_engine() -> None:
    def flop(n: int, k: int, common: float, **said: float) -> float:
        rule = TileRule(math.inf, 128, 128, **said)
        kernel = ProductKnobs(whole=True, prologue=0, common=common, tiles=(rule,))
        return _flop_of_tiles(128, 128 * n, k, kernel).min()

    wave = 2 * 128 * 128 * 132
    assert flop(1, 64, 0) == flop(132, 64, 0) == wave * 64
    assert flop(1, 64, 0, share=0.5) == wave * 128
    # Bytes of fp8 take half the time of those of bf16, in which steps of a prologue are counted.
    assert flop(1, 64, 0, prologue=10) == flop(132, 64, 1, prologue=10) == wave * (64 + 20)
    assert flop(33, 64, 1, prologue=10) == wave * (64 + 20 / 4)


def test_a_prologue_is_half_as_many_steps_of_tf32_as_of_fp16() -> None:
    kernel = ProductKnobs(whole=True, prologue=10, tiles=(TileRule(math.inf, 128, 128),))
    flop = {width: _flop_of_tiles(128, 128, 64, kernel, width).min() for width in (2, 4)}
    assert [flop[width] / (2 * 128 * 128 * 132) for width in (2, 4)] == [64 + 10, 64 + 5]
