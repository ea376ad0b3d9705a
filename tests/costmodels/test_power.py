"""The clock that a chip holds by its limit on power."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.kernels.seconds import GROWTH, REST, clock_of
from rooftrace.hardware import load_chip

H100 = load_chip("h100-sxm")
FREE = replace(H100, sustained_compute=None)


def clock(busy: float, paced: float, seconds: float, power: float, rest: float = REST) -> float:
    return float(clock_of(*(np.array([n]) for n in (busy, paced, seconds)), power, rest)[0])


def mean_power(busy: float, paced: float, seconds: float, rest: float, at: float) -> float:
    """Mean power at a clock, over that of busy engines at the full one."""
    lasts = seconds - paced + paced / at
    return (busy / at * at**GROWTH + rest * (lasts - busy / at)) / lasts


@pytest.mark.parametrize(
    ("products", "additions", "rate"),
    [
        (25.943, 0.001, 678.1), (24.966, 5.715, 704.6), (24.465, 11.427, 719.1),
        (17.873, 11.422, 738.2), (11.45, 11.422, 768.2),
    ],
)  # fmt: skip
def test_products_in_turns_with_additions_run_at_the_clock_that_was_measured(
    products: float, additions: float, rate: float
) -> None:
    """Milliseconds and TFLOP/s on an H100 (benchmarks/measurements/mixed-h100-2026-11-27.jsonl).

    833 TFLOP/s are expected at the full clock.
    """
    busy = products * rate / 833
    held = clock(busy, busy, busy + additions, 678.1 / 833)
    assert held * 833 == pytest.approx(rate, rel=0.015)


shares = st.floats(0.01, 1.0)


@given(shares, shares, st.floats(0.5, 0.99), st.sampled_from([0.0, 0.2, REST]))
def test_the_mean_power_is_at_its_limit_or_the_clock_is_full(
    busy: float, paced: float, power: float, rest: float
) -> None:
    busy, paced = busy * max(busy, paced), max(busy, paced)
    held = clock(busy, paced, 1.0, power, rest)
    drawn, limit = mean_power(busy, paced, 1.0, rest, held), power**GROWTH
    assert power <= held <= 1
    if rest > limit:  # the rest alone draws it
        assert held == pytest.approx(power) or drawn <= limit * (1 + 1e-9)
    elif held < 1:
        assert drawn == pytest.approx(limit, rel=1e-6)
    else:
        assert drawn <= limit * (1 + 1e-6)
    assert clock(1.0, 1.0, 1.0, power, rest) == pytest.approx(power)
    assert clock(busy, paced, 1.5, power, rest) >= held - 1e-9


class Mixed(nn.Module):
    """Products, with additions between them."""

    def __init__(self, additions: int) -> None:
        super().__init__()
        self.additions = additions
        self.layer = nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for _ in range(self.additions):
            x = x + 1
        return x


def test_a_step_with_other_work_holds_more_of_its_clock_and_estimates_say_so() -> None:
    with torch.device("meta"):
        x = torch.empty(8192, 8192, dtype=torch.bfloat16)
        alone, among = (rt.trace(Mixed(n), x) for n in (0, 40))
    clocks, products = [], []
    for graph in (alone, among):
        made = rt.estimate(graph, chip=H100, execution="eager")
        free = rt.estimate(graph, chip=FREE, execution="eager")
        rows = [one.rows[0].timing.t_device for one in (made, free)]
        assert free.times.clock == 1
        clocks.append(made.times.clock)
        products.append(rows[0] / rows[1])
        for mine, theirs in zip(made.rows[1:], free.rows[1:], strict=True):
            assert mine.timing.t_device == theirs.timing.t_device, "bound by memory"
        assert sum(row.timing.t_device for row in made.rows) == pytest.approx(made.times.t_serial)
    assert clocks[0] < 0.8 < 0.95 < clocks[1] <= 1
    assert products == pytest.approx([1 / held for held in clocks], rel=0.01)


def test_a_sweep_holds_the_clock_of_each_of_its_points() -> None:
    """Each point is estimated alone, too."""

    def steps(rows: int) -> torch.Tensor:
        return torch.empty(rows, 2048, device="meta", dtype=torch.bfloat16)

    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048)
        ).to(torch.bfloat16)
    rows = [64, 1024, 4096, 65536]
    swept = rt.sweep(model, steps(64), over={"0.0": rows}, chip="h100-sxm", execution="eager")
    alone = [rt.estimate(rt.trace(model, steps(n)), chip=H100, execution="eager") for n in rows]
    clocks = [one.times.clock for one in alone]
    assert clocks[0] == 1 and len({round(clock, 3) for clock in clocks}) >= 3
    assert swept.columns["t_est"] == pytest.approx([one.t_est for one in alone], rel=1e-9)
    for name in ("t_low", "t_high"):
        expected = [(one.times.within(one.knobs) or ())[name == "t_high"] for one in alone]
        assert swept.columns[name] == pytest.approx(expected, rel=1e-9)
    shares = [max(one.times.regime_shares.values()) for one in alone]
    assert swept.columns["regime_share"] == pytest.approx(shares, rel=1e-9)
