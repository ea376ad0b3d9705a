"""Twelve findings, planted in twelve models: named, with line, at the mended model's price."""

from __future__ import annotations

import pytest

import rooftrace as rt
from tests.reporting.planted import CHIP, PAIRS, Pair, Way, optimizer_of

FIRST, OFF = 3, 0.2  # of what would help; of the mended model's time, and of what mending gains


def estimated(way: Way, chip: str = CHIP) -> rt.types.Estimate:
    """One side of a pair, priced by a trace of its own."""
    module, inputs = way.built("meta")
    if way.train is not None:
        graph = rt.trace(way.train, module, optimizer_of(module, way.train), *inputs)
    elif way.phase == "training":
        graph = rt.trace(module, *inputs, phase="training", optimizer="none")
    else:
        graph = rt.trace(module, *inputs)
    execution = rt.tools.execution_model("eager", **way.execution)
    return rt.estimate(graph, chip=chip, execution=execution)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_planted_finding_is_named_with_its_line_and_the_price_of_the_mended(pair: Pair) -> None:
    planted, mended = estimated(pair.planted), estimated(pair.mended)
    first = rt.tools.guidance(planted).options[:FIRST]
    named = [w for w in first if w.lever == pair.lever and pair.said in w.action]
    assert named, [w.action for w in first]
    assert named[0].source.endswith(pair.line)
    assert named[0].t_after == pytest.approx(mended.t_est, rel=OFF)
    assert named[0].gain == pytest.approx(planted.t_est - mended.t_est, rel=OFF)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_mended_model_is_not_told_again(pair: Pair) -> None:
    told = rt.tools.guidance(estimated(pair.mended)).options
    assert not [w for w in told if w.lever == pair.lever and pair.said in w.action]
