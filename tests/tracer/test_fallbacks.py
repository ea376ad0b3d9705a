"""What code runs because a package is missing is on record, with the ops that run instead."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.graph.assumptions import FALLBACK
from rooftrace.graph.graph import OpGraph
from rooftrace.reporting.views import as_markdown

logger = logging.getLogger(__name__)
SAYS = "`squares` is falling back to plain PyTorch because `fastsquares` is not installed"


def with_kernel(instead: Callable[..., Any]) -> Callable[..., Any]:
    """As libraries have it: the function runs in place of a kernel that is not there."""

    @functools.wraps(instead)
    def call(*args: Any) -> Any:
        logger.warning(SAYS)
        return instead(*args)

    return call


@with_kernel
def squares(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True)


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() + squares(x)


class OldWay(nn.Module):
    """Warns in its own code, and runs a method."""

    def forward(self, x: Tensor) -> Tensor:
        logger.warning("The fast path is not available. Falling back to the naive one.")
        return x.tanh()


class Hinting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        logger.warning("This model is old.")
        return x.tanh()


def resting(graph: OpGraph) -> set[str]:
    """The names of the ops that rest on a fallback."""
    ids = {item.id for item in graph.assumptions if item.kind == FALLBACK}
    return {op.name for op in graph.ops if ids & set(op.assumptions)}


@pytest.mark.parametrize("again", (False, True))
def test_the_ops_of_the_function_that_runs_instead_rest_on_it(again: bool) -> None:
    graph = rt.trace(Squares(), torch.empty(4, 8))  # a second trace is warned, too
    (item,) = graph.assumptions
    assert (item.kind, item.text, item.where) == (FALLBACK, SAYS, "")
    assert resting(graph) == {"aten.mul", "aten.sum"}


def test_a_module_that_warns_itself_is_the_fallback() -> None:
    graph = rt.trace(nn.Sequential(nn.ReLU(), OldWay()), torch.empty(4, 8))
    assert resting(graph) == {"aten.tanh"}


def test_other_warnings_are_no_fallback() -> None:
    assert rt.trace(Hinting(), torch.empty(4, 8)).assumptions == ()


def test_an_estimate_says_the_share_of_the_step() -> None:
    estimate = rt.estimate(rt.trace(Squares(), torch.empty(2**12, 2**12)), "h100-sxm", "eager")
    seconds = {row.name: row.timing.t_device for row in estimate.rows}
    share = (seconds["aten.mul"] + seconds["aten.sum"]) / estimate.t_est
    (note,) = estimate.notes
    number, rest = note.split(" % of the step runs in place of a kernel: ")
    assert float(number) == pytest.approx(100 * share, abs=0.1) and rest == SAYS


def test_warnings_reach_the_log_as_before(caplog: pytest.LogCaptureFixture) -> None:
    rt.trace(Squares(), torch.empty(4, 8))
    assert SAYS in caplog.text
    squares(torch.ones(2, 2))
    assert caplog.text.count(SAYS) >= 2


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_what_would_help_training_names_the_missing_package(phase: str) -> None:
    """Named rewrites price it for inference; they have no backward."""
    net, x = nn.Sequential(nn.Linear(64, 64), Squares()), torch.empty(2**16, 64)
    page = as_markdown(rt.report(net, x, phases=[phase], chip="h100-sxm"))
    helping = page.partition("## What would help")[2].partition("## ")[0]
    assert (f"of the step runs in place of a kernel: {SAYS}" in helping) == (phase == "training")
