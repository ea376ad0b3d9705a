"""Explanations: formulas give the numbers of estimates, and of counters that know no formula."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.graph.formulas.polynomials import FUNCTIONS
from rooftrace.studies.advice import Study
from rooftrace.studies.explaining import explained
from rooftrace.studies.explaining.steps import variants
from rooftrace.studies.forms import Conditions
from tests.conftest import mostly_heavy
from tests.costmodels.batch_support import Decoder

WIDTH = 64


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def mixer(device: str = "meta") -> nn.Module:
    return nn.Sequential(*[Mixer() for _ in range(5)]).to(device, torch.bfloat16)


def rows_of(batch: int, device: str = "meta") -> torch.Tensor:
    return torch.empty(batch, 8, WIDTH, dtype=torch.bfloat16, device=device)


@cache
def step(op: str | None = None, batch: int = 24, chip: str = "h200-sxm") -> rt.types.Explanation:
    return rt.explain(mixer(), rows_of(batch), op=op, chip=chip)


@cache
def form() -> rt.types.Form:
    """The form that explanations of one op are made of, here for many of them."""
    return rt.tools.form(mixer(), rows_of(24), over={"batch": range(1, 101)})


def of_op(op: str, batch: int = 24) -> rt.types.Explanation:
    conditions = Conditions.of("efficient")
    return explained(form(), {"batch": batch}, rt.load_chip("h200-sxm"), conditions, op)


def value_of(text: str, sizes: Mapping[str, int]) -> float:
    """What a formula is worth, by Python's own arithmetic.

    "8,192 batch kv^2 + (4) distinct(batch, 1, 96)": what stands side by side is multiplied.
    """
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("^", "**")
    text = re.sub(r"\b(\d+(?:\.\d+)?) byte\b", r"\1", text)
    text = re.sub(r"(?<=[\w)]) x (?=[\w(])", " * ", text)
    text = re.sub(r"(?<=[\w)]) (?=[A-Za-z0-9(])", " * ", text)
    functions = {name.replace(" ", "_"): function for name, function in FUNCTIONS.items()}
    return float(eval(text, {"__builtins__": {}}, {**functions, **sizes}))


# -- formulas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", mostly_heavy([3, 24, 100], [24]))
def test_formulas_give_the_rows_of_an_estimate(batch: int) -> None:
    sizes = {"batch": batch}
    estimate = rt.estimate(mixer(), rows_of(batch), chip="h200-sxm")
    names = {row.name for row in estimate.rows}
    for name in names:
        for kernel in of_op(name, batch).kernels:
            rows = [estimate.rows[place] for place in kernel.kernels]
            assert kernel.count == sum(row.count for row in rows)
            for row in rows:
                for item, whole in ((kernel.flops[-1], row.flops), (kernel.bytes[-1], row.bytes)):
                    assert item.value * row.count == whole
                    assert value_of(item.symbols, sizes) == item.value
                    assert value_of(item.numbers, {}) == item.value
                assert kernel.seconds.device * row.count == pytest.approx(row.timing.t_device)


def test_the_flop_of_products_are_those_that_pytorch_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        mixer("cpu")(rows_of(24, "cpu"))
    explained = step()
    assert explained.step is not None
    (products,) = [item for item in explained.step.flops if item.name == "matmul bf16"]
    assert value_of(products.symbols, {"batch": 24}) == counter.get_total_flops()


def test_a_linear_layer_is_what_a_hand_counts() -> None:
    (up,) = step("*.up").kernels
    assert up.count == 5
    flops = {item.name: item for item in up.flops}
    assert (
        flops["matmul bf16"].shapes == "2 x (8 batch) x 192 x 64"
        or value_of(flops["matmul bf16"].shapes, {"batch": 24}) == 2 * (24 * 8) * 64 * 192
    )
    moved = {item.name: item.value for item in up.bytes}
    assert moved["weights read"] == 2 * 64 * 192
    assert moved["activations read"] == 2 * (24 * 8) * 64
    assert moved["activations written"] == 2 * (24 * 8) * 192
    assert moved["all"] == sum(size for name, size in moved.items() if name != "all")


def test_products_of_shapes_are_the_formulas() -> None:
    for kernel in step("*").kernels:
        for item in (*kernel.flops, *kernel.bytes):
            if item.shapes:
                assert value_of(item.shapes, {"batch": 24}) == item.value


def test_the_whole_step_is_the_estimate() -> None:
    explained, sizes = step(), {"batch": 24}
    worked = explained.step
    assert worked is not None
    estimate = rt.estimate(mixer(), rows_of(24), chip="h200-sxm")
    assert worked.total_flops.value == estimate.flops
    assert worked.total_bytes.value == estimate.bytes_hbm
    assert worked.t_est == pytest.approx(estimate.t_est)
    for items in (worked.flops, worked.bytes):
        parts = [item for item in items if item.name != "all"]
        assert sum(item.value for item in parts) == items[-1].value
        for item in items:
            assert value_of(item.symbols, sizes) == pytest.approx(item.value, rel=1e-12)


def test_draws_are_written_with_their_function() -> None:
    def build(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return Decoder(2, 1, 16, False).to("meta"), torch.empty(
            batch, 4, dtype=torch.int64, device="meta"
        )

    model, tokens = build(1)
    explained = rt.explain(model, tokens, at={"0.1": 4})
    assert explained.step is not None
    whole = explained.step.total_bytes
    assert whole.value == rt.estimate(model, tokens).bytes_hbm


# -- seconds ---------------------------------------------------------------------------------------


def test_seconds_follow_from_the_rates_that_stand_beside_them() -> None:
    for kernel in step("*").kernels:
        s = kernel.seconds
        if s.compute_share is not None:
            ideal = sum(rate.flop / rate.rate for rate in s.rates)
            assert ideal / s.compute_share.whole == pytest.approx(s.compute)
            assert s.compute_share.knobs * s.compute_share.rest == pytest.approx(
                s.compute_share.whole
            )
        assert s.hbm_share is not None
        assert kernel.bytes[-1].value / (s.bandwidth * s.hbm_share.whole) == pytest.approx(s.hbm)
        assert max(s.compute, s.hbm, s.network) + s.more + s.gap == pytest.approx(s.device)


def test_the_limiter_is_the_largest_term() -> None:
    for kernel in step("*").kernels:
        s = kernel.seconds
        terms = {"compute": s.compute, "hbm": s.hbm, "network": s.network, "launch": s.gap}
        assert terms[kernel.limiter] == max(terms.values())


@pytest.mark.parametrize(
    ("chip", "word"), [("h200-sxm", "dram__"), ("mi300x", "TCC_"), ("l4", "dram__")]
)
def test_counters_are_those_of_the_vendor(chip: str, word: str) -> None:
    big = rt.explain(
        nn.Linear(4096, 4096, dtype=torch.bfloat16, device="meta"),
        torch.empty(8, 4096, dtype=torch.bfloat16, device="meta"),
        op="0",
        chip=chip,
    )
    (kernel,) = big.kernels
    assert kernel.limiter == "hbm"
    assert any(word in counter.metric for counter in kernel.counters)


# -- scaling tests ---------------------------------------------------------------------------------


def test_half_the_batch_takes_what_an_estimate_there_takes() -> None:
    explained = step()
    assert explained.step is not None
    tests = {test.name: test for test in explained.step.scaling}
    after, before = (rt.estimate(mixer(), rows_of(n), chip="h200-sxm") for n in (12, 24))
    assert tests["batch halved"].ratio == pytest.approx(after.t_est / before.t_est)
    assert tests["batch halved"].by_limiter["hbm"] == pytest.approx(
        after.times.t_hbm / before.times.t_hbm
    )
    narrow = rt.estimate(mixer(), rows_of(24), chip="h200-sxm", weights_dtype="fp8")
    assert tests["weights halved"].ratio == pytest.approx(narrow.t_est / before.t_est)


def test_half_the_clock_doubles_computing_alone() -> None:
    explanation = step("*.up")
    chip = rt.load_chip("h200-sxm")
    (slow,) = [v for v in variants(explanation.estimate, {}) if v.name == "clock halved"]
    _, half = Study(explanation.estimate).planned(slow)
    assert half.peak("matrix", "bf16") == chip.peak("matrix", "bf16") / 2
    assert half.memory_bandwidth == chip.memory_bandwidth
    (test,) = [t for t in explanation.kernels[0].scaling if t.name == "clock halved"]
    assert test.by_limiter["compute"] == pytest.approx(2, rel=0.01)
    # HBM has its own clock, but blocks walk over K at the pace of the L2.
    assert 0.99 < test.by_limiter["hbm"] < 2.01
    assert test.by_limiter["launch"] == 1


# -- the least batch -------------------------------------------------------------------------------


def test_the_critical_batch_is_the_first_of_a_scan() -> None:
    """Batch by batch through estimates, which know nothing of forms."""
    model = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16, device="meta")
    explained = rt.explain(
        model, torch.empty(2, 1024, dtype=torch.bfloat16, device="meta"), chip="l4"
    )
    assert explained.step is not None
    critical = explained.step.critical
    assert critical is not None and critical.by_peaks is not None
    chip = rt.load_chip("l4")
    peak, bandwidth = chip.peak("matrix", "bf16"), chip.memory_bandwidth.value

    def limited(batch: int) -> bool:
        flops = 2 * batch * 1024 * 1024
        moved = 2 * (1024 * 1024 + 2 * batch * 1024)  # weights, read and written rows
        return flops / peak >= moved / bandwidth

    assert critical.by_peaks == next(batch for batch in range(1, 4097) if limited(batch))
    if critical.expected is not None:
        for batch, wanted in ((critical.expected, True), (critical.expected - 1, False)):
            x = torch.empty(batch, 1024, dtype=torch.bfloat16, device="meta")
            regime = rt.estimate(model, x, chip="l4").times.regime
            assert (regime == "compute") is wanted


def test_a_sweep_has_the_rows_of_estimates() -> None:
    (sweep,) = step().sweeps
    assert [row.value for row in sweep.rows if row.value in (1, 2, 4, 8)] == [1, 2, 4, 8]
    for row in sweep.rows:
        if row.value in (2, 24, 128):
            estimate = rt.estimate(mixer(), rows_of(row.value), chip="h200-sxm")
            assert (row.flops, row.bytes) == (estimate.flops, estimate.bytes_hbm)
            assert row.t_est == pytest.approx(estimate.t_est)
            assert row.intensity == pytest.approx(estimate.flops / estimate.bytes_hbm)


# -- picking, errors, outputs ----------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["*.up", "up", "3.up", "*.*p"])
def test_a_module_is_named_by_its_path_or_the_end_of_it(pattern: str) -> None:
    assert {kernel.module for kernel in of_op(pattern).kernels} == {"*.up"}


def test_a_kernel_is_named_by_its_number() -> None:
    explained = rt.explain(mixer(), rows_of(24), op=1)
    assert explained.kernels[0].kernels == (1,)


def test_what_is_not_there_is_answered_with_what_is_near() -> None:
    with pytest.raises(rt.types.RequestError, match=r"--op 'upp': .*did you mean '\*\.up'\?"):
        of_op("upp")
    with pytest.raises(rt.types.RequestError, match="from 0 to"):
        of_op("999")


def test_a_plot_of_one_op_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rt.types.RequestError, match="leave --op out"):
        rt.explain(mixer(), rows_of(2), op="up", plot=tmp_path / "up.png")


def test_a_plot_is_a_figure_and_names_the_engine(tmp_path: Path) -> None:
    rt.explain(nn.Linear(8, 8), torch.empty(4, 8), chip="rtx-5090", plot=tmp_path / "step.svg")
    assert b"vector fp32 " in (tmp_path / "step.svg").read_bytes()


def test_everything_is_said_on_a_screen_and_in_json() -> None:
    import json

    text = str(step("*.up"))
    assert "limited by" in text and "24,576" in text and "weights halved" in text
    whole = str(step())
    assert "B_crit at peaks" in whole and "sweep" in whole
    document: dict[str, Any] = json.loads(json.dumps(step().to_dict()))
    assert document["step"]["critical"]["name"] == "batch"
    assert repr(step()).startswith("Explanation(")


def test_conditions_are_those_of_the_call() -> None:
    narrow = rt.explain(mixer(), rows_of(24), op="up", weights_dtype="fp8")
    moved = {item.name: item.value for item in narrow.kernels[0].bytes}
    assert moved["weights read"] == 64 * 192
    assert narrow.execution == Conditions.of("efficient").execution.name
