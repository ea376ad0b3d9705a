"""Elasticities beside real traces, beside Euler's theorem, and beside functions by plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.graph.formulas import Formula, leaves
from rooftrace.graph.formulas.polynomials import expected_distinct, skewed_shares
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.studies.advice import NamedNumbers, UnknownNumberError
from rooftrace.studies.forms import Conditions
from rooftrace.studies.forms.kernelforms import Amount
from rooftrace.studies.sensitivity import Elasticities, elasticities
from rooftrace.studies.sensitivity.elasticity import watched
from rooftrace.studies.sensitivity.slopes import SLOPES, _by_steps, dual_of
from rooftrace.studies.sweeps import grids
from tests.conftest import in_turn

WIDTH = 256
BATCH, LENGTH = 12, 64
CHIP = rt.load_chip("h200-sxm")
ROUGH = "efficient"


class Attention(nn.Module):
    """Linear in the batch, quadratic in the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(b, n, WIDTH))
        return result


def made(kind: type[nn.Module]) -> nn.Module:
    return kind().to("meta", torch.bfloat16)


def rows(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, WIDTH, dtype=torch.bfloat16, device="meta")


@cache
def form() -> rt.types.Form:
    levels = {"0.0": range(1, 33), "0.1": range(16, 129)}
    return rt.tools.form(made(Attention), rows(BATCH, LENGTH), over=levels)


@cache
def answers(execution: str = ROUGH, knobs: str = "typical", chip: str = "h200-sxm") -> Elasticities:
    model = rt.tools.execution_model(execution, knobs=knobs)
    sizes = {"0.0": BATCH, "0.1": LENGTH}
    return elasticities(form(), sizes, rt.load_chip(chip), Conditions(model))


@cache
def traced(batch: int, length: int) -> rt.types.Estimate:
    return rt.estimate(made(Attention), rows(batch, length), chip="h200-sxm", execution=ROUGH)


# -- sizes -----------------------------------------------------------------------------------------


def test_the_base_is_an_estimate() -> None:
    here, result = traced(BATCH, LENGTH), answers()
    assert (result.flops, result.bytes, result.peak_memory) == (
        here.flops,
        here.bytes_hbm,
        here.memory.peak,
    )
    assert (result.t_est, result.t_bound) == (here.t_est, here.times.t_bound)


def test_flops_that_grow_with_the_batch_have_an_elasticity_of_exactly_1() -> None:
    slope = answers().of("0.0").flops
    assert slope is not None
    assert slope.exact == 1
    # Of degree 1 the finite difference of two traces is exact, too.
    more = traced(BATCH + 1, LENGTH).flops - traced(BATCH, LENGTH).flops
    assert slope.exact == Fraction(BATCH * more, traced(BATCH, LENGTH).flops)


@pytest.mark.parametrize("quantity", ["flops", "bytes", "peak_memory"])
def test_slopes_by_the_length_are_those_of_a_parabola_through_traces(quantity: str) -> None:
    def at(length: int) -> int:
        estimate = traced(BATCH, length)
        known = {"flops": estimate.flops, "bytes": estimate.bytes_hbm}
        return known.get(quantity, estimate.memory.peak)

    # Everything is of degree 2 at most: the central difference is the derivative.
    slope = getattr(answers().of("0.1"), quantity)
    derivative = Fraction(at(LENGTH + 1) - at(LENGTH - 1), 2)
    assert slope.exact == LENGTH * derivative / at(LENGTH)
    assert slope.value == float(slope.exact)


@pytest.mark.parametrize(
    ("change", "batch"), [("+1", BATCH + 1), ("x2", 2 * BATCH), ("x0.5", BATCH // 2)]
)
def test_finite_steps_by_sizes_are_ratios_of_estimates(change: str, batch: int) -> None:
    step = answers().of("0.0").step(change)
    assert step is not None
    assert step.value == batch
    assert step.t_est == pytest.approx(traced(batch, LENGTH).t_est / answers().t_est, rel=1e-9)


def test_a_size_outside_of_what_is_proven_is_a_step_with_a_reason() -> None:
    alone = replace(form(), trace=None)
    result = elasticities(
        alone, {"0.0": 32, "0.1": LENGTH}, CHIP, Conditions(rt.tools.execution_model(ROUGH))
    )
    step = result.of("0.0").step("x2")
    assert step is not None
    assert step.t_est is None
    assert "nothing is proven there" in step.note


def test_bytes_of_rows_that_are_drawn_have_an_analytic_derivative() -> None:
    """512 bytes a row, of a table of 500 rows; each of n tokens takes one of them."""
    one, classes = Formula.constant(1), Formula.constant(500)
    draw = leaves.Draw("distinct", Formula.symbol(0), one, classes)
    amount = Amount(leaves.TOUCHED, Formula.constant(512), draw)
    slope = dual_of(amount, (200,), 0).elasticity(200)
    assert (slope.exact, slope.functions) == (None, ("distinct",))
    read = [512 * expected_distinct(n, 1, 500) for n in (199, 200, 201)]
    assert slope.value == pytest.approx(200 * (read[2] - read[0]) / 2 / read[1], rel=1e-5)
    beside_all = leaves.Draw("distinct", Formula.symbol(0), one, classes, classes)
    zeroed = Amount(leaves.TOUCHED, Formula.constant(512), beside_all)
    beside = dual_of(zeroed, (200,), 0).elasticity(200)
    whole = 512 * 500 + read[1]
    assert beside.value == pytest.approx(200 * (read[2] - read[0]) / 2 / whole, rel=1e-5)


@given(
    name=st.sampled_from(sorted(SLOPES)),
    rows=st.integers(2, 300),
    chosen=st.integers(1, 8),
    classes=st.integers(16, 256),
)
def test_slopes_of_named_functions_are_those_of_small_steps(
    name: str, rows: int, chosen: int, classes: int
) -> None:
    def smooth(t: float, c: float, v: float) -> float:
        missed = 1.0
        reached = v * (1 - math.pow(missed - c / v, t))
        return {
            "distinct": reached,
            "drawn": reached,
            "largest": t * c / reached,
            "balanced": min(t * c, v),
            "balanced largest": t * c / v,
            "rows": c * (1 - math.pow(1 - 1 / v, t)) + 1 - math.pow(c / v, t),
        }[name]

    if name == "balanced" and rows * chosen == classes:
        return  # a kink
    at = (float(rows), float(chosen), float(classes))
    for place, slope in enumerate(SLOPES[name](*at)):
        step = 1e-5 * at[place]
        low, high = (
            tuple(v + sign * step if i == place else v for i, v in enumerate(at))
            for sign in (-1, 1)
        )
        expected = (smooth(*high) - smooth(*low)) / (2 * step)
        assert slope == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_slopes_of_skewed_choices_are_those_of_their_shares() -> None:
    shares = skewed_shares(1.0, 4, 16)
    for rows in (8, 40):
        exact = -((1 - shares) ** rows * np.log1p(-shares)).sum()
        by_rows, by_chosen, by_classes = _by_steps(rows, 4, 16, 1.0)
        assert by_rows == pytest.approx(exact, rel=0.02)
        assert by_chosen > 0 < by_classes  # more choices, and more classes, reach more


# -- facts and knobs -------------------------------------------------------------------------------


def of_rates(result: Elasticities, quantity: str) -> float:
    """The sum over all rates less that over all times."""
    signs = {"FLOP/s": 1, "byte/s": 1, "hertz": 1, "second": -1}
    return sum(
        signs[row.unit] * (getattr(row, quantity) or 0.0)
        for row in result.rows
        if row.unit in signs and row.kind != "size"
    )


@pytest.mark.parametrize(
    ("execution", "chip"),
    in_turn(["efficient", "eager", "compiled", "seed-efficient"], ["h200-sxm", "mi300x", "l4"]),
)
def test_elasticities_by_all_rates_and_times_add_up_to_minus_1(execution: str, chip: str) -> None:
    """Euler: rates twice as high and times half as long make a step twice as fast."""
    knobs = "none" if execution.startswith("seed") else "typical"
    result = answers(execution, knobs, chip)
    assert of_rates(result, "t_bound") == pytest.approx(-1, abs=1e-3)
    assert of_rates(result, "t_est") == pytest.approx(-1, abs=2e-2)  # a central difference of 1 %


def test_everything_twice_as_fast_is_exactly_twice_as_fast() -> None:
    plan = traced(BATCH, LENGTH).plan
    named = NamedNumbers.of(CHIP, plan.execution)
    rates, times = ("FLOP/s", "byte/s", "hertz"), ("second",)
    values = {
        name: value * (2 if named.unit(name) in rates else 0.5)
        for name, value in named.values.items()
        if named.unit(name) in rates + times and value
    }
    fast = named.changed(values)
    step = time_plan(replace(plan, execution=fast.execution), fast.chip).step
    assert step.t_est == pytest.approx(answers().t_est / 2, rel=1e-12)
    assert step.t_bound == pytest.approx(answers().t_bound / 2, rel=1e-12)


def test_a_step_by_a_fact_is_an_estimate_on_that_chip() -> None:
    row = answers().of("chip.memory_bandwidth")
    fact = CHIP.memory_bandwidth
    other = replace(CHIP, memory_bandwidth=replace(fact, value=2 * fact.value))
    step = row.step("x2")
    assert step is not None
    expected = rt.estimate(made(Attention), rows(BATCH, LENGTH), chip=other, execution=ROUGH)
    assert step.t_est == pytest.approx(expected.t_est / answers().t_est, rel=1e-12)


def test_what_is_not_read_is_exactly_0_and_says_so() -> None:
    for name in ("chip.price", "chip.power", "chip.matrix.fp8", "chip.dispatch_eager"):
        row = answers().of(name)
        assert (row.t_est, row.t_bound, row.steps, row.note) == (0.0, 0.0, (), "not read")
    assert answers().of("knobs.share.pooling.memory").note == "no such kernel"
    assert answers("eager").of("chip.module_call").note != "not read"


def test_changing_a_fact_that_is_not_read_changes_no_time() -> None:
    plan = traced(BATCH, LENGTH).plan
    named = NamedNumbers.of(CHIP, plan.execution)
    spy, read = watched(CHIP)
    assert time_plan(plan, spy).step == time_plan(plan, CHIP).step
    for name, value in named.facts.items():
        if name not in read:
            other = named.changed({name: 3 * value.value}).chip
            assert time_plan(plan, other).step == time_plan(plan, CHIP).step, name


def test_a_knob_on_bytes_moves_bytes_and_others_do_not() -> None:
    result = answers("seed-efficient", "none")
    slope = result.of("execution.weight_residency.attention").bytes
    assert slope is not None
    assert slope.finite
    assert slope.value < 0
    assert result.of("execution.utilization.b_sat").bytes == result.of("chip.price").bytes


def test_rows_are_ranked_and_plain_data_comes_out() -> None:
    effects = [row.effect for row in answers().rows]
    assert effects == sorted(effects, reverse=True)
    assert {tuple(row) for row in answers().to_rows()} == {tuple(answers().to_rows()[0])}
    assert answers().to_dict()["rows"][0]["name"] == answers().rows[0].name


# -- names -----------------------------------------------------------------------------------------


def test_every_number_can_be_changed_by_its_name_and_nothing_else_changes() -> None:
    named = NamedNumbers.of(CHIP, rt.tools.execution_model("seed-efficient"))
    for name, value in named.values.items():
        changed = named.changed({name: 1.5 * value})
        expected = {**named.values, name: 1.5 * value}
        assert changed.values == expected, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chip.memory_bandwith", "did you mean 'chip.memory_bandwidth'"),
        ("knobs.sharee", "no number of"),
        ("execution.activation_fusio", "did you mean 'execution.activation_fusion'"),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(name: str, message: str) -> None:
    named = NamedNumbers.of(CHIP, rt.tools.execution_model(ROUGH))
    with pytest.raises(UnknownNumberError, match=message):
        named.named(name)


def test_a_value_that_a_record_refuses_is_told() -> None:
    named = NamedNumbers.of(CHIP, rt.tools.execution_model(ROUGH))
    with pytest.raises(UnknownNumberError, match=r"knobs.cache=0.5"):
        named.changed({"knobs.cache": 0.5})
    with pytest.raises(UnknownNumberError, match="above 0"):
        named.changed({"chip.clock": 0.0})


def test_the_beginning_of_names_is_all_of_them() -> None:
    named = NamedNumbers.of(CHIP, rt.tools.execution_model(ROUGH))
    assert named.named("chip.matrix") == tuple(
        f"chip.matrix.{peak.precision}" for peak in CHIP.peaks if peak.engine == "matrix"
    )


# -- grids -----------------------------------------------------------------------------------------


def base() -> tuple[dict[str, int], rt.types.Chip, Conditions]:
    return {"0.0": BATCH, "0.1": LENGTH}, CHIP, Conditions(rt.tools.execution_model(ROUGH))


def factors() -> list[grids.Factor]:
    change = grids.LevelChange.parsed
    return [
        grids.Factor.alone("0.0", grids.SIZE, [1, 8]),
        grids.Factor.alone(
            "chip.memory_bandwidth",
            grids.NUMBER,
            [change("b", text) for text in ("x0.5", "x1")],
            ["x0.5", "x1"],
        ),
        grids.Factor.alone(
            "knobs.launch", grids.NUMBER, [change("l", t) for t in ("x1", "x2")], ["x1", "x2"]
        ),
        grids.Factor.alone("chip", grids.CHIP, [CHIP, rt.load_chip("l4")], ["h200-sxm", "l4"]),
        grids.Factor.alone("dtype", grids.DTYPE, [None, "fp8"], ["none", "fp8"]),
    ]


def test_every_cell_of_a_grid_is_an_estimate_of_its_own() -> None:
    result = grids.grid_effects(factors(), *base(), lambda settings: form())
    assert len(result) == 32
    for line in result.frame().to_dict("records"):
        named = NamedNumbers.of(rt.load_chip(line["chip"]), rt.tools.execution_model(ROUGH))
        before = named.values
        share = float(str(line["chip.memory_bandwidth"])[1:])
        gap = float(str(line["knobs.launch"])[1:])
        there = named.changed(
            {
                "chip.memory_bandwidth": share * before["chip.memory_bandwidth"],
                "knobs.launch": gap * before["knobs.launch"],
            }
        )
        dtype = None if line["dtype"] == "none" else line["dtype"]
        graph = rt.tools.reprice(traced(line["0.0"], LENGTH).graph, dtype=dtype)
        estimate = rt.estimate(graph, there.chip, there.execution)
        assert line["t_est"] == pytest.approx(estimate.t_est, rel=1e-9)
        assert (line["flops"], line["bytes_hbm"]) == (estimate.flops, estimate.bytes_hbm)


def test_flops_do_not_depend_on_a_chip_and_shares_add_up() -> None:
    result = grids.grid_effects(factors(), *base(), lambda settings: form(), "flops", log=True)
    assert result.effects.of("chip").share == 0
    assert result.effects.of("0.0").share == pytest.approx(1)


def test_knobs_that_only_times_read_do_not_stand_for_each_other() -> None:
    """Two sets of knobs with one title: times of a form are those of each."""
    sizes = {"0.0": BATCH, "0.1": LENGTH}
    named = NamedNumbers.of(CHIP, rt.tools.execution_model(ROUGH))
    slow = named.changed({"knobs.share.mm.memory": 0.3}).execution
    for model in (named.execution, slow):
        result = elasticities(form(), sizes, CHIP, Conditions(model))
        step = result.of("0.0").step("+1")
        assert step is not None
        assert step.t_est is not None
        graph = rt.trace(made(Attention), rows(BATCH + 1, LENGTH))
        expected = rt.estimate(graph, CHIP, model).t_est / result.t_est
        assert step.t_est == pytest.approx(expected, rel=1e-9)


def test_a_chip_without_a_rate_is_told() -> None:
    model = rt.tools.execution_model(ROUGH)
    conditions = Conditions(model, "fp8")
    with pytest.raises(MissingPeakError, match="fp8"):
        elasticities(form(), {"0.0": 2, "0.1": 16}, rt.load_chip("a100"), conditions)


@pytest.mark.parametrize(
    ("many", "response", "message"),
    [
        ([], "t_est", "the grid is empty"),
        (factors()[:1] * 2, "t_est", "stands twice"),
        (factors()[:1], "t_bond", "did you mean 't_bound'"),
        ([grids.Factor.alone("0.0", grids.SIZE, [1, 1])], "t_est", "a level stands there twice"),
    ],
)
def test_a_grid_that_is_none_is_told(many: list[grids.Factor], response: str, message: str) -> None:
    with pytest.raises(rt.types.RequestError, match=message):
        grids.grid_effects(many, *base(), lambda settings: form(), response)


@pytest.mark.parametrize("text", ["", "fast", "x", "-1", "nan", "x0", "4.8 TB"])
def test_a_level_that_is_no_number_is_told(text: str) -> None:
    with pytest.raises(UnknownNumberError, match="expected a number above 0"):
        grids.LevelChange.parsed("chip.memory_bandwidth", text, "byte/s")
