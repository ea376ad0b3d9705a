"""A phase that a user adds: it is traced, priced and reported as those of rooftrace are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.ops.opview import own_rules

ROOT = Path(__file__).resolve().parents[2]
GPT2 = ROOT / "examples" / "configs" / "gpt2.json"


@pytest.fixture(autouse=True)
def phases() -> Iterator[None]:
    with own_rules():

        @rt.extend.phase("verify", tokens=4)
        def verify(runner, recorder):
            return runner.decode(recorder)

        @rt.extend.phase("evaluation")
        def evaluation(runner, recorder):
            step = runner.forward(recorder)
            step.output = step.output.square().mean()
            return step

        yield


def test_four_tokens_are_verified_in_one_call_with_a_cache() -> None:
    sizes = {"batch": 2, "kv": 60}
    one, four = (rt.trace(GPT2, phase=name, **sizes) for name in ("decode", "verify"))
    assert four.phase == "verify" and four.workload["kv"] == 60
    assert four.workload["items"] == 4 * one.workload["items"]

    (tokens,) = (four.values[i] for i in four.inputs if four.values[i].role == "activations")
    assert tokens.shape == (2, 4)

    def products(graph: rt.types.OpGraph) -> int:
        names = ("aten.addmm", "aten.mm")
        return sum(op.flops_torch * graph.times(op) for op in graph.ops if op.name in names)

    assert products(four) == 4 * products(one)  # of the weights: by tokens
    plans = [rt.plan(graph, "efficient") for graph in (one, four)]
    assert plans[0].bytes.weights == pytest.approx(plans[1].bytes.weights, rel=1e-3)  # read once
    assert 1 <= plans[1].bytes.kv / plans[0].bytes.kv < 1.2  # read once, three tokens more written


def test_a_phase_from_outside_stands_beside_the_others_in_a_report() -> None:
    report = rt.report(GPT2, phases=("decode", "verify"), batch=2, kv=60, chip="h100-sxm")
    assert "\nverify" in str(report)
    assert list(report.to_dict()["phases"]) == ["decode", "verify"]


def test_what_an_evaluation_adds_to_a_forward_is_recorded() -> None:
    model, x = nn.Linear(8, 8), torch.empty(4, 8)
    forward, evaluation = (rt.trace(model, x, phase=n) for n in ("forward", "evaluation"))
    added = [op.name for op in evaluation.ops[len(forward.ops) :]]
    assert added == ["aten.pow", "aten.mean"]


def test_a_phase_that_cannot_be_is_refused_in_words() -> None:
    model, x = nn.Linear(8, 8), torch.empty(4, 8)
    with pytest.raises(rt.types.RequestError, match=r"phase 'verfy': expected one of .*, verify"):
        rt.trace(model, x, phase="verfy")
    with pytest.raises(rt.types.RequestError, match="verify of Linear"):
        rt.trace(model, x, phase="verify")
    with pytest.raises(
        rt.types.RequestError, match="kv=9: it is the cached length of a decode step"
    ):
        rt.trace(GPT2, phase="evaluation", kv=9)
    with pytest.raises(
        rt.types.RequestError, match="phase 'evaluation' can be traced only; on a device"
    ):
        rt.measure(model, x, phase="evaluation")
    with pytest.raises(ValueError, match="'decode' is a phase of rooftrace's own"):
        rt.extend.phase("decode")
    with pytest.raises(ValueError, match=r"'verify' already is a phase, .*override=True"):
        rt.extend.phase("verify")(lambda runner, recorder: None)
