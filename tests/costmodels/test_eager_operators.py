"""Operators of eager PyTorch beside calls that were measured on an H100."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.kernels.works import kernel_bytes
from tests.costmodels.script_support import loaded

KERNELS = Path(__file__).parents[2] / "benchmarks" / "kernels"
WITHIN = {  # the least and the most of measured over expected, over all sizes
    "max_pool_3_2": (0.8, 1.35),
    "max_pool_2_2": (0.7, 1.2),
    "max_pool_3_2_backward": (0.85, 1.2),
    "max_pool_2_2_backward": (0.85, 1.2),
    "avg_pool_2_2": (0.85, 1.15),
    "avg_pool_3_1": (0.9, 1.1),
    "avg_pool_2_2_backward": (0.9, 1.05),
    "adaptive_pool_7_backward": (0.7, 1.2),
    "nearest": (0.85, 1.15),
    "nearest_backward": (0.6, 1.2),
    "bilinear": (0.75, 1.2),
    "bilinear_backward": (0.8, 1.3),
    "pad": (0.85, 1.0),
    "channel_sums": (0.95, 1.35),
    "sum_columns": (0.85, 1.35),
    "roll": (0.9, 1.0),
    "glu": (0.95, 1.2),
    "cumsum_columns": (0.85, 1.4),
    "index_add": (0.8, 1.05),
    "scatter_add": (0.6, 1.0),
    "embedding": (0.8, 2.1),
    "masked_fill": (0.9, 1.2),
    "logsumexp": (0.8, 1.3),
    "convolution": (0.7, 1.9),
    "convolution_backward": (0.65, 1.8),
}


@pytest.fixture(scope="module")
def compare() -> Iterator[Any]:
    with loaded(KERNELS / "compare.py", "kernels_compare") as module:
        yield module


@pytest.fixture(scope="module")
def rows(compare: Any) -> list[dict[str, Any]]:
    """The calls that were measured."""
    rows = [*compare.load(KERNELS / "operators-h100-2026-11-27.jsonl.gz")][1:]
    return [row for row in rows if row.get("factor") != 64]  # one place made to 4,096


@pytest.mark.parametrize("kernel", WITHIN)
def test_one_call_of_an_operator_takes_as_long_as_measured(
    compare: Any, rows: list[dict[str, Any]], kernel: str
) -> None:
    row = next(row for row in rows if row["kernel"] == kernel)
    least, most = WITHIN[kernel]
    assert least <= compare.compared(row, "h100-sxm").ratio <= most


@pytest.mark.parametrize("size", [[224, 224], [90, 90], [16, 56, 56]])
def test_convolutions_copy_by_the_tiles_that_cudnn_launches(
    compare: Any, rows: list[dict[str, Any]], size: list[int]
) -> None:
    row = next(row for row in rows if row.get("size") == size and row["kernel"] == "convolution")
    blocks = row["grids"][1][1]  # of the copies of the image, or of the result, which is as large
    assert "Kernel<" in row["kernels"][1][0] and row["kernels"][1][0].startswith("cudnn::engines")

    def turned(**sizes: Any) -> int:
        module, given = compare.module_of(row["kernel"], {**compare.sizes_of(row), **sizes})
        ((_, _, issued),) = kernel_bytes(plan(rt.trace(module, *given), "eager"), None)
        return issued.turned

    assert turned() / 32**2 == pytest.approx(2 * blocks, rel=5e-3)  # filters beside
    assert not turned(layout="last")


@pytest.mark.parametrize(("kernel", "width"), [("lstm", 512), ("lstm_training", 1024)])
def test_the_host_enqueues_every_step_of_a_recurrent_layer(
    compare: Any, rows: list[dict[str, Any]], kernel: str, width: int
) -> None:
    cases = (row for row in rows if row["kernel"] == kernel and row["how"] == "events")
    row = next(row for row in cases if row["width"] == width)
    module, given = compare.module_of(kernel, compare.sizes_of(row))
    step = rt.estimate(rt.trace(module, *given), chip="h100-sxm", execution="eager")
    assert step.t_est * 1e3 == pytest.approx(row["ms"], rel=0.35)
    assert step.t_est > 3 * sum(
        row.timing.t_device for row in step.rows
    )  # the host is what takes so long


def test_a_sweep_over_the_length_enqueues_the_steps_of_each() -> None:
    layer = torch.nn.LSTM(64, 64, batch_first=True, device="meta")
    inputs = {length: torch.empty(4, length, 64, device="meta") for length in (32, 50)}
    swept = rt.sweep(
        layer, inputs[32], over={"0.1": [*inputs]}, chip="h100-sxm", execution="eager"
    ).to_dict()["lines"]
    alone = [rt.estimate(rt.trace(layer, x), "h100-sxm", "eager").t_est for x in inputs.values()]
    assert [line["t_est"] for line in swept] == pytest.approx(alone)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", WITHIN)
def test_calls_of_all_sizes_take_as_long_as_measured(
    compare: Any, rows: list[dict[str, Any]], kernel: str
) -> None:
    ratios = [compare.compared(r, "h100-sxm").ratio for r in rows if r["kernel"] == kernel]
    least, most = WITHIN[kernel]
    assert least <= min(ratios) and max(ratios) <= most
    assert statistics.median(ratios) == pytest.approx(1, abs=0.2)
