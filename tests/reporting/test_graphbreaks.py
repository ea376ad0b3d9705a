"""Graph breaks priced and shown: every number is that of an estimate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.reporting.cli import main
from tests.releases import needs_torch
from tests.tracer import broken_models as models

pytestmark = needs_torch(2, 11, "the Dynamo whose inner parts are read")


@pytest.fixture(autouse=True)
def compiled_code_of_this_test_alone() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def x() -> torch.Tensor:
    return torch.randn(64, models.WIDTH)


class Two(nn.Module):
    """A layer that prints, three times, and a layer that asks for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(models.Printing() for _ in range(3)))
        self.last = models.Item()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize(
    ("execution", "phase"), [("compiled", "forward"), ("efficient", "training")]
)
def test_without_breaks_a_step_is_the_compiled_one(execution: str, phase: str) -> None:
    module = models.Stack(models.Whole, 4)
    breaks = rt.graph_breaks(module, x(), execution=execution, phase=phase)
    compiled = rt.estimate(module, x(), execution=execution, phase=phase)
    assert breaks.rows == ()
    assert breaks.together == breaks.total == 0
    for step in (breaks.broken, breaks.whole):
        assert step.times == compiled.times
        assert step.plan.groups == compiled.plan.groups
    assert breaks.eager.times == rt.estimate(module, x(), execution="eager", phase=phase).times
    assert "no graph breaks" in str(breaks)


@pytest.mark.parametrize(
    ("execution", "phase"), [("compiled", "training"), ("efficient", "forward")]
)
def test_each_line_costs_what_the_step_without_it_is_shorter(execution: str, phase: str) -> None:
    breaks = rt.graph_breaks(Two(), x(), execution=execution, phase=phase)
    assert [row.cause.times for row in breaks.rows] == [3, 1]
    assert [row.cause.module for row in breaks.rows] == ["first.*", "last"]
    for row in breaks.rows:
        assert row.before is breaks.broken
        assert row.gain == breaks.broken.t_est - row.after.t_est > 0
        assert row.cuts > 0
    assert breaks.whole.t_est < min(row.after.t_est for row in breaks.rows)
    assert breaks.total == sum(row.gain for row in breaks.rows)
    assert breaks.together == breaks.broken.t_est - breaks.whole.t_est
    steps = (breaks.whole, breaks.rows[0].after, breaks.broken)
    for less, more in pairwise(steps):
        assert less.kernels <= more.kernels
        assert less.bytes_hbm <= more.bytes_hbm
        assert less.flops == more.flops


def test_one_line_removed_from_the_code_is_the_step_without_its_row() -> None:
    """The oracle is another module: the same layers, of which only the last one breaks."""
    both = rt.graph_breaks(Two(), x())
    changed = Two()
    for layer in changed.first:
        layer.between = lambda y: y + 1  # type: ignore[method-assign]
    one = rt.graph_breaks(changed, x())
    assert len(one.rows) == 1
    assert both.rows[0].after.t_est == pytest.approx(one.broken.t_est, rel=1e-9)
    assert both.rows[0].after.kernels == one.broken.kernels
    assert both.rows[0].after.bytes_hbm == one.broken.bytes_hbm
    assert both.whole.t_est == pytest.approx(one.whole.t_est, rel=1e-9)


def test_the_entry_of_a_graph_is_what_the_chip_says() -> None:
    from dataclasses import replace

    chip = rt.load_chip("h200-sxm")
    slow = replace(chip, graph_entry=replace(chip.graph_entry, value=1.0))
    breaks = rt.graph_breaks(models.Asked(), x(), chip=slow)
    assert breaks.together == pytest.approx(1.0, rel=1e-3)  # one second for the one cut


SOURCE = f"""
import torch
from tests.tracer import broken_models as models

def broken():
    return models.Stack(models.Printing, 3), (torch.zeros(8, {models.WIDTH}),)

def refused():
    return models.Refuses(), (torch.zeros(8, {models.WIDTH}),)
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(SOURCE)
    return str(tmp_path / "model.py")


def test_the_command_names_line_and_cost(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["breaks", f"{target}:broken"])
    shown = capsys.readouterr().out
    assert "broken_models.py:" in shown
    assert "layers.*" in shown
    assert "compiled, as it breaks" in shown
    assert "(derived: host times" in shown, "what entering a graph takes says where it is from"
    main(["breaks", f"{target}:broken", "--format", "json"])
    told = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["times"]) for row in told["breaks"]] == [("break", 3)]
    assert told["together"] == pytest.approx(
        told["steps"]["as it breaks"]["t_est"] - told["steps"]["without breaks"]["t_est"]
    )
    main(["breaks", f"{target}:broken", "--format", "csv"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("kind,reason,source")
    assert len(rows) == 1


def test_an_error_in_dynamo_ends_the_command_with_the_line(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["breaks", f"{target}:refused"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "broken_models.py:" in said
    assert "graph breaks of Refuses" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--execution", "eager"], "nothing is compiled"),
        (["--phase", "forward,training"], "expected one phase"),
        (["--phase", "decode"], "cache"),
        (["--chip", "h2000"], "h2000"),
    ],
)
def test_a_wrong_request_is_one_line(
    target: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["breaks", f"{target}:broken", *arguments])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
