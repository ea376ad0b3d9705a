"""Findings, each planted in a model: named, with line, at the mended model's price."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.graph import OpGraph
from rooftrace.studies.advice import Study, Variant
from tests.reporting.planted import (
    CHIP,
    HALF,
    PAIRS,
    Pair,
    Way,
    Written,
    WrittenMended,
    normal,
    optimizer_of,
)

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


class Projected(nn.Module):
    """Attention of three projections, in the way of `attend`."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.rows, self.attend = nn.Linear(1024, 3072, dtype=HALF), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(x).unflatten(-1, (3, 8, 128)).permute(2, 0, 3, 1, 4)
        return self.attend(*rows).transpose(1, 2).flatten(2)


def test_attention_that_is_written_out_is_told_of_a_compiled_training_step_too() -> None:
    """Its price is that of the step that calls the kernel, and a compiled step has no such call."""
    x = torch.empty(8, 2048, 1024, dtype=HALF, device="meta")
    written, mended = (
        rt.estimate(rt.trace(Projected(way), x, phase="training"), chip=CHIP, execution="efficient")
        for way in (Written(), WrittenMended())
    )
    told = [w for w in rt.tools.guidance(written).options if "one kernel" in w.action]
    assert told and told[0].t_after == pytest.approx(mended.t_est, rel=OFF)


def test_larger_kernels_do_not_repeat_the_line_of_a_change_that_saves_more() -> None:
    pair = next(pair for pair in PAIRS if pair.name == "width")
    step = rt.estimate(estimated(pair.planted).plan.source, chip=CHIP, execution="efficient")
    assert rt.tools.headroom(step).left
    told = {what_if.lever: what_if for what_if in rt.tools.guidance(step).options}
    assert "layout" in told and "kernels" not in told


def test_a_change_of_kernels_that_take_too_little_is_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Heads(nn.Module):
        """Wide products, and one of an odd size."""

        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.ModuleList(nn.Linear(4096, 4096, dtype=HALF) for _ in range(60))
            self.odd = nn.Linear(4096, 33, dtype=HALF)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.wide:
                x = layer(x)
            return self.odd(x)

    step = estimated(Way(make=Heads, inputs=normal(8192, 4096)))
    planned: list[OpGraph | None] = []
    whole = Study.estimate

    def noted(self: Study, variant: Variant) -> rt.types.Estimate:
        planned.append(variant.graph)
        return whole(self, variant)

    monkeypatch.setattr(Study, "estimate", noted)
    told = rt.tools.guidance(step).options
    assert planned and not any(planned) and "padding" not in {w.lever for w in told}


def test_work_that_is_done_again_is_of_equal_operands_and_draws_no_numbers() -> None:
    class Drawing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = x * (torch.rand_like(x[:1]) > 0.5) + torch.arange(4096.0).sin().cos()
            return x

    told = rt.tools.guidance(estimated(Way(make=Drawing, inputs=normal(4, 4096)))).options
    (once,) = [w for w in told if "Compute once" in w.action]
    assert once.kernels == 5 * 3  # of arange, sin and cos, and none of rand, > and *


def test_tf32_is_no_part_of_all_together_where_nothing_stays_in_fp32() -> None:
    pair = next(pair for pair in PAIRS if pair.name == "precision")
    told = rt.tools.guidance(estimated(pair.planted))
    both = [w for w in told.options if w.lever == "compute"]
    assert len(both) == 2
    assert "TF32" not in " ".join(told.options[rank - 1].action for rank in told.ranks)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-4, "foreach": False}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_an_optimizer_is_fused_where_torch_has_its_kernel_and_its_step_is_known(
    kind: type[torch.optim.Optimizer], how: dict[str, object]
) -> None:
    def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()

    def made(**more: object) -> rt.types.Estimate:
        with torch.device("meta"):
            module = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
            x = torch.zeros(64, 1024)
        optimizer = kind(module.parameters(), lr=0.1, **{**how, **more})  # type: ignore[call-arg]
        return rt.estimate(rt.trace(step, module, optimizer, x), chip=CHIP, execution="eager")

    told = [w for w in rt.tools.guidance(made()).options if w.lever == "optimizer"]
    assert bool(told) == ("momentum" in how and "nesterov" not in how)
    for what_if in told:
        assert what_if.t_after == pytest.approx(made(fused=True, foreach=False).t_est, rel=OFF)
