"""The report of a pipeline: whose numbers stand where, and what holds over all of its stages."""

from __future__ import annotations

import pytest

import rooftrace as rt
from rooftrace.costmodels.timing.pipelines import rows_for_weights
from rooftrace.hardware.units import format_capacity
from rooftrace.reporting.sections.memory import exchanged

SMALL = {
    "config.num_hidden_layers": 5,
    "config.hidden_size": 256,
    "config.intermediate_size": 512,
    "config.num_attention_heads": 4,
    "config.num_key_value_heads": 2,
    "config.head_dim": 64,
}


@pytest.fixture(scope="module")
def report() -> rt.types.Report:
    how = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 4, "schedule": "gpipe"}
    return rt.report(
        "llama-3.1-8b", phase="training", seq=64, system="dgx-h100", settings=SMALL, **how
    )


def test_every_row_says_of_which_stage_it_is(report):
    names = {"training stage 1 of 2", "training stage 2 of 2"}
    assert set(report.phases) == names
    assert {estimate.step for estimate in report.broken_down()} == names
    assert {row.phase for row in exchanged(report)} == names
    lines = [line.strip() for line in str(report).splitlines()]
    for name in names:
        assert lines.count(name) == 2  # above its times, and above its kernels


def test_parameters_are_those_of_all_stages(report):
    whole = rt.trace("llama-3.1-8b", phase="forward", settings=SMALL)
    assert report.model["params"] == whole.model["params"]
    assert report.model["params_trainable"] == whole.model["params_trainable"]


def test_it_fits_or_not_by_the_process_that_holds_most(report):
    (pipe,) = report.to_dict()["pipelines"]
    one = max(need.peak for need in report.memory.values())
    # Four microbatches are alive, not one; the optimizer may need as much as they do.
    assert pipe["peak"] >= one
    assert f"the peak is {format_capacity(pipe['peak'])}, in training" in str(report)
    assert "4 microbatches of 1 x 64 tokens" in str(report)


def test_gradients_of_weights_take_the_flop_of_forward(report):
    """Of a product of weights, each of both gradients takes as many FLOP as forward."""
    for estimate in report.broken_down():
        products = [row for row in estimate.rows if row.bytes_by_role.get("weights") and row.flops]
        forward = sum(r.flops for r in products if r.part == "forward" and r.name.endswith("mm"))
        backward = sum(r.flops for r in rows_for_weights(estimate) if r.name.endswith("mm"))
        assert backward == forward > 0
