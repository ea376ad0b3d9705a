"""The pytest plugin, in runs of pytest inside this one."""

from __future__ import annotations

import pytest
import torch

import rooftrace as rt

pytest_plugins = ["pytester"]

PLUGIN = "rooftrace.reporting.gates.plugin"
HEAD = """
import pytest
from torch import nn
import torch

model, x = nn.Linear(64, 32, bias=False), torch.ones(16, 64)
"""
FLOPS = 2 * 16 * 64 * 32


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> None:
    """What a trace imports: a run inside forgets its own imports, and torch's ops stay."""
    rt.estimate(torch.nn.Linear(2, 2), torch.ones(1, 2), phase="training")


@pytest.fixture
def ran(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(test: str) -> pytest.RunResult:
        pytester.makepyfile(HEAD + test)
        return pytester.runpytest_inprocess("-p", PLUGIN, "--strict-markers", "-q")

    return run


def test_costs_are_plain_numbers(ran) -> None:  # type: ignore[no-untyped-def]
    ran(f"""
def test(cost_of):
    cost = cost_of(model, x, chip="l4", execution="eager")
    assert cost.flops == {FLOPS} and cost.params == 64 * 32 and cost.kernels == 1
    assert cost.bytes == 4 * (16 * 64 + 64 * 32 + 16 * 32)  # read, read, written
    assert 0 < cost.time < 1e-3 and cost.memory >= 4 * 64 * 32
    assert cost_of(model, x, phase="training").flops > 2 * cost.flops
    assert cost.estimate.chip.name == "l4"
""").assert_outcomes(passed=1)


def test_a_failing_assert_shows_the_step(ran) -> None:  # type: ignore[no-untyped-def]
    result = ran("def test(cost_of):\n    assert cost_of(model, x).flops <= 10\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*assert {FLOPS} <= 10", "*<Linear, forward on h200-sxm*FLOP*"])


def test_a_marker_holds_every_call(ran) -> None:  # type: ignore[no-untyped-def]
    result = ran(f"""
@pytest.mark.costs(flops={FLOPS}, time="<= 5 ms", params="<= 2.1 K", chip="l4")
def test_within(cost_of):
    assert cost_of(model, x).estimate.chip.name == "l4"

@pytest.mark.costs(flops={FLOPS - 1}, memory="<= 1 GiB")
def test_over(cost_of):
    cost_of(model, x)

@pytest.mark.costs(system="dgx-h100", what_if={{"stragglers": 0.1}})
def test_of_one_process(cost_of):
    with pytest.raises(ValueError, match="stragglers"):
        cost_of(model, x)
    assert cost_of(model, x, what_if=None).estimate.chip.name == "h100-sxm"
""")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [f"*flops is {FLOPS:,} (65.5 kFLOP), expected <= {FLOPS - 1:,} (65.5 kFLOP)"]
    )


@pytest.mark.parametrize(
    ("marker", "arguments", "message"),
    [
        ('flops="<= 1 GFLOP"', "", "*does not take it*"),
        ('flops="<= 1 GFLOP"', "cost_of", "*never called cost_of*"),
        ('flosp="<= 1 GFLOP"', "cost_of", "*did you mean 'flops'*"),
        ('time="5 ms"', "cost_of", "*there is no lock to grow from*"),
        ('time="<= 5 parsecs"', "cost_of", "*expected how much*"),
        ('"<= 1 GFLOP"', "cost_of", "*say it by name*"),
    ],
)
def test_a_marker_that_holds_nothing_is_refused(  # type: ignore[no-untyped-def]
    ran, marker: str, arguments: str, message: str
) -> None:
    result = ran(f"@pytest.mark.costs({marker})\ndef test({arguments}):\n    pass\n")
    assert result.parseoutcomes().get("errors", 0) == 1
    result.stdout.fnmatch_lines([message])
