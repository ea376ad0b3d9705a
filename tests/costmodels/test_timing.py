"""Seconds: engines and rates of a made-up chip, and the two-track queue worked out on paper."""

import dataclasses

import pytest

from rooftrace.costmodels.fusion.executions import ExecutionModel, Utilization
from rooftrace.costmodels.fusion.plans import Launch
from rooftrace.costmodels.kernels.engines import engine_of
from rooftrace.costmodels.kernels.seconds import peak_seconds
from rooftrace.costmodels.kernels.works import SizedKernel, kernels_of
from rooftrace.costmodels.ops.cost import Cost
from rooftrace.costmodels.timing.queue import HostSeconds, schedule
from rooftrace.costmodels.timing.timings import Timing
from rooftrace.hardware.chip import Chip, MissingPeakError
from rooftrace.hardware.chipfile import load_chip
from tests.costmodels.batch_support import times_of_kernels

pytestmark = pytest.mark.quick

PLAIN = ExecutionModel()
H200, A100 = load_chip("h200-sxm"), load_chip("a100-sxm-80")
OLD = dataclasses.replace(
    H200, peaks=tuple(p for p in H200.peaks if p.engine == "vector" or p.precision == "fp16")
)
"""A chip whose matrix engine knows fp16 only."""


def enqueued(*dispatches: int) -> list[Launch]:
    return [Launch(count, on_device=True) for count in dispatches]


# -- the queue -------------------------------------------------------------------------------------


def test_a_fast_host_keeps_the_device_busy():
    # Enqueued at 1, 2, 3; each takes 5: 1-6, 6-11, 11-16.
    assert schedule([5, 5, 5], enqueued(1, 1, 1), HostSeconds(1)) == ([1, 6, 11], 16)


def test_a_slow_host_makes_the_device_wait():
    # Enqueued at 10, 20, 30; each takes 5: 10-15, 20-25, 30-35.
    assert schedule([5, 5, 5], enqueued(1, 1, 1), HostSeconds(10)) == ([10, 20, 30], 35)


def test_the_host_runs_ahead_while_a_long_kernel_runs():
    # Enqueued at 2, 4 and (after a view) 8, all while the first runs: 2-22, 22-23, 23-24.
    assert schedule([20, 1, 1], enqueued(1, 1, 2), HostSeconds(2)) == ([2, 22, 23], 24)


def test_a_kernel_enqueued_just_when_the_device_is_idle_starts_then():
    assert schedule([4, 4], enqueued(1, 1), HostSeconds(4)) == ([4, 8], 12)


def test_after_a_wait_the_host_starts_again_when_the_device_is_idle():
    # Kernel 1-11; the wait is enqueued at 2 and over at 11; the next kernel is there at 12.
    launches = [Launch(1, True), Launch(1, False, sync=True), Launch(1, True)]
    assert schedule([10, 3], launches, HostSeconds(1)) == ([1, 12], 15)


def test_a_wait_of_the_host_itself_costs_its_dispatch_only():
    launches = [Launch(1, False, sync=True), Launch(1, True)]
    assert schedule([3], launches, HostSeconds(2)) == ([4], 7)


def test_a_value_comes_back_after_the_device_is_done_in_every_turn():
    # Kernel 1-11; the wait is enqueued at 2, and its value is there at 15; so in each of 3 turns.
    launches = [Launch(1, True, repeats=(0,)), Launch(1, False, sync=True, repeats=(0,))]
    assert schedule([10], launches, HostSeconds(1, read_back=4), (1,)) == ([1], 15)
    assert schedule([10], launches, HostSeconds(1, read_back=4), (3,)) == ([1], 45)


def test_views_after_the_last_kernel_can_be_what_ends_last():
    assert schedule([1], [Launch(1, True), Launch(9, False)], HostSeconds(1)) == ([1], 10)


def test_nothing_takes_no_time():
    assert schedule([], [], HostSeconds(1)) == ([], 0)
    none = times_of_kernels([], end=0.0)
    assert (none.t_bound, none.t_serial, none.t_est, none.t_launch) == (0, 0, 0, 0)
    assert set(none.regime_shares.values()) == {0.0}


def test_views_and_calls_of_modules_take_the_host_their_own_time():
    # Two kernels, five views and three modules: 2 x 8 + 5 x 1 + 3 x 3 before the kernel starts.
    launch = Launch(2, True, views=5, calls=3)
    assert schedule([4], [launch], HostSeconds(8, 1, 3)) == ([30], 34)


def test_a_bound_takes_the_faster_of_both_rates_kernel_by_kernel():
    # By the datasheet 2 x (4 | 2) and (1 | 6); a cache makes the second faster: (1 | 5).
    fast = [Timing(4, 2, 0, 1), Timing(1, 6, 0, 1)]
    real = [Timing(5, 3, 0, 1), Timing(1, 5, 0, 1)]
    step = times_of_kernels(real, end=30.0, fast=fast, times=(2, 1))
    assert step.t_bound == max(2 * 4 + 1, 2 * 2 + 5)


def test_as_many_durations_as_kernels():
    with pytest.raises(ValueError, match="1 durations for 2 groups"):
        schedule([1.0], enqueued(1, 1), HostSeconds(1))


# -- a step ----------------------------------------------------------------------------------------


def test_totals_of_a_step_on_paper():
    kernels = [Timing(4, 2, 0, 1), Timing(1, 6, 0, 1), Timing(0, 1, 3, 1)]
    step = times_of_kernels(kernels, end=20.0)
    assert (step.t_comp, step.t_hbm, step.t_net) == (5, 9, 3)
    assert step.t_bound == 9  # of the totals
    assert step.t_serial == (4 + 1) + (6 + 1) + (3 + 1)
    assert step.t_launch == 20 - 16
    # compute has the first, hbm the second, network the third, launch 3 gaps and 4 of waiting.
    assert step.regime_seconds == {"compute": 4, "hbm": 6, "network": 3, "launch": 7}
    assert (step.regime, step.next_regime) == ("launch", "hbm")
    assert step.margin == 7 / 6
    assert sum(step.regime_shares.values()) == pytest.approx(1)
    assert step.regime_shares["hbm"] == 6 / 20


def test_an_end_that_rounding_puts_before_the_sum_is_the_sum():
    step = times_of_kernels([Timing(0.1, 0, 0, 0)] * 3, end=0.3)
    assert step.t_est == step.t_serial and step.t_launch == 0


def test_regimes_of_one_kernel():
    assert Timing(4, 2, 0, 1).regime == "compute"
    assert Timing(1, 2, 0, 1).regime == "hbm"
    assert Timing(1, 2, 3, 1).regime == "network"
    assert Timing(1, 2, 0, 3).regime == "launch"
    assert Timing(1, 2, 0, 3).margin == 3 / 2
    assert Timing(2, 0, 0, 0).margin == float("inf")


def test_ties_go_to_compute_then_hbm_then_network():
    assert Timing(2, 2, 2, 2).regime == "compute"
    assert Timing(1, 2, 2, 2).regime == "hbm"
    assert Timing(1, 1, 2, 2).regime == "network"
    tied = times_of_kernels([Timing(3, 3, 0, 0), Timing(0, 3, 3, 0)], end=6.0)
    assert tied.regime_seconds == {"compute": 3, "hbm": 3, "network": 0, "launch": 0}
    assert (tied.regime, tied.next_regime, tied.margin) == ("compute", "hbm", 1)


# -- engines and rates -----------------------------------------------------------------------------


def engine(cost: Cost, chip=H200, execution=PLAIN) -> tuple[str, str]:
    (work,) = cost.work
    return engine_of(work, chip, execution)


def test_torchs_defaults_for_fp32_are_vector_products_and_tf32_convolutions():
    product, convolution = Cost.of(matmul=1), Cost.of(convolution=1)
    assert engine(product) == ("vector", "fp32")
    assert engine(convolution) == ("matrix", "tf32")
    tf32 = ExecutionModel(tf32=True)
    assert engine(product, execution=tf32) == ("matrix", "tf32")
    # Without TF32 both run on the vector engine, whatever is asked for.
    assert engine(product, OLD, tf32) == engine(convolution, OLD) == ("vector", "fp32")


def test_wide_and_complex_products():
    assert engine(Cost.of(matmul=1, precision="bf16")) == ("matrix", "bf16")
    assert engine(Cost.of(matmul=1, precision="fp64")) == ("matrix", "fp64")
    assert engine(Cost.of(matmul=1, precision="fp64"), OLD) == ("vector", "fp64")
    assert engine(Cost.of(matmul=1, precision="complex64")) == ("vector", "fp32")
    assert engine(Cost.of(vector=1, precision="bf16")) == ("vector", "bf16")


def compute_seconds(cost: Cost, chip: Chip, execution: ExecutionModel, headline: float) -> float:
    return float(
        peak_seconds(kernels_of([SizedKernel(cost, "mm")])[0], chip, execution, headline)[0]
    )


def test_seconds_are_work_over_rate():
    work = Cost.of(matmul=10**15, precision="bf16", rows=32) + Cost.of(vector=10**12)
    expected = 10**15 / H200.peak("matrix", "bf16") + 10**12 / H200.peak("vector", "fp32")
    assert compute_seconds(work, H200, PLAIN, 1.0) == expected


def test_utilization_slows_products_by_their_rows_and_vector_work_to_a_share_of_the_headline():
    seed = ExecutionModel(utilization=Utilization(b_sat=64, eta_scalar=0.35))
    product = Cost.of(matmul=10**12, precision="bf16", rows=16)
    full = 10**12 / H200.peak("matrix", "bf16")
    assert compute_seconds(product, H200, seed, 1.0) == full * 64 / 16
    assert compute_seconds(Cost.of(vector=7), H200, seed, 10.0) == 7 / (0.35 * 10.0)
    wide = Cost.of(matmul=10**12, precision="bf16", rows=64)
    assert compute_seconds(wide, H200, seed, 1.0) == full


def test_masked_work_takes_no_time_and_recomputation_does():
    def seconds(count: str) -> float:
        return compute_seconds(Cost.of(matmul=8, precision="bf16", count=count), H200, PLAIN, 1.0)

    assert seconds("masked") == 0
    assert seconds("masked_executed") == seconds("recompute") == seconds("useful") > 0


def test_a_chip_without_the_rate_says_what_it_has():
    with pytest.raises(MissingPeakError, match=r"a100-sxm-80 has no \(matrix, fp8\).*bf16"):
        compute_seconds(Cost.of(matmul=1, precision="fp8"), A100, PLAIN, 1.0)


def test_timing_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Timing(1, 1, 1, 1).gap = 2  # type: ignore[misc]
