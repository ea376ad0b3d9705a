"""Findings, each planted in a model: named, with line, at the mended model's price."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.graph import OpGraph
from rooftrace.studies.advice import Study, Variant
from rooftrace.studies.advice.variants import most_saved
from rooftrace.studies.advice.whatifs import by_rules, changes_of
from tests.reporting.planted import PAIRS
from tests.reporting.planted_calls import Rms, RmsNamed
from tests.reporting.planted_kernels import Written, WrittenMended
from tests.reporting.planted_ways import CHIP, HALF, Pair, Way, normal, optimizer_of

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


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_no_mended_graph_saves_more_than_is_said_without_a_plan_of_it(pair: Pair) -> None:
    for step in (estimated(pair.planted), estimated(pair.mended)):
        for change in changes_of(step):
            graph = change.edited(step.plan.source)
            if graph is None:
                continue
            before = by_rules(step) if change.regroups else step
            execution = change.applied(before.execution)
            variant = Variant(graph=graph, precisions=change.precisions, execution=execution)
            saved = 1 - Study(step).estimate(variant).t_est / before.t_est
            assert most_saved(step, graph) >= saved - 1e-9, change.action


class Spelled(nn.Module):
    """A function that torch has no name for, and one that it has."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(1024, 1024), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x * torch.sigmoid(x), "F.silu"),
        (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), "F.gelu"),
        (lambda x: x / (x * x).mean(-1, keepdim=True).sqrt(), "F.rms_norm"),
        (lambda x: x * torch.sigmoid(1.702 * x), ""),  # a GELU of OpenAI's
        (lambda x: x * torch.rsqrt((x * x).mean(1, keepdim=True)), ""),  # over tokens
        (lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 0.5), ""),
        (lambda x: x / torch.sqrt(torch.tensor(64.0) * 3), ""),  # a number, not rows
    ],
)
def test_functions_with_a_name_are_told_by_what_they_compute(
    function: Callable[[torch.Tensor], torch.Tensor], name: str, phase: str
) -> None:
    with torch.device("meta"):
        model, x = Spelled(function).to(HALF), torch.empty(64, 512, 1024, dtype=HALF)
    graph = rt.trace(model, x, phase=phase)
    told = rt.tools.guidance(rt.estimate(graph, chip=CHIP, execution="eager")).options
    named = [w.action for w in told if w.action.startswith("Call by its name")]
    assert named == ([f"Call by its name what is written out: {name}"] if name else [])


class Block(nn.Module):
    """A residual layer behind a norm."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.layer = norm(), nn.Linear(2048, 2048)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(self.norm(x))


def test_norms_that_are_written_out_in_layers_that_repeat_are_named_whole() -> None:
    """Each reads what the layer before made, and its gradient is added to that of the sum."""
    steps = []
    for norm in (Rms, RmsNamed):
        with torch.device("meta"):
            model = nn.Sequential(*(Block(norm) for _ in range(9))).to(HALF)
            x = torch.empty(8, 1024, 2048, dtype=HALF)
        graph = rt.trace(model, x, phase="training", optimizer="none")
        assert graph.repeats
        steps.append(rt.estimate(graph, chip=CHIP, execution="eager"))
    told = rt.tools.guidance(steps[0]).options
    (named,) = [w for w in told if "F.rms_norm" in w.action]
    assert named.after.kernels == steps[1].kernels
    assert named.t_after == pytest.approx(steps[1].t_est, rel=0.01)


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


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "RMSprop"])
def test_a_loop_over_tensors_costs_as_lists_what_torch_does_with_foreach(kind: str) -> None:
    def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        module(x).sum().backward()
        optimizer.step()

    def made(foreach: bool) -> rt.types.Estimate:
        with torch.device("meta"):
            module = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
            x = torch.zeros(64, 512)
        optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.1, foreach=foreach)
        return rt.estimate(rt.trace(step, module, optimizer, x), chip=CHIP, execution="eager")

    (told,) = [w for w in rt.tools.guidance(made(False)).options if "in one call" in w.action]
    assert told.after.kernels == made(True).kernels
    assert told.t_after == pytest.approx(made(True).t_est, rel=0.01)


class Used(nn.Module):
    """What looks like a finding, and is none: all of it is read, or made of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1024, 32000, bias=False)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(x)
        shares, _ = torch.sort(logits[:, -1], descending=True)
        longer = torch.cat([rows, x], 1)
        return logits.logsumexp(-1), shares[:, :50], shares.cumsum(-1), longer, longer.exp()


def test_a_sort_that_is_read_whole_and_rows_that_no_attention_reads_are_left_alone() -> None:
    shapes = (16, 128, 1024), (16, 4096, 1024)
    inputs = lambda: tuple(torch.zeros(shape, dtype=HALF) for shape in shapes)  # noqa: E731
    step = estimated(Way(make=lambda: Used().to(HALF), inputs=inputs))
    told = " ".join(w.action for w in rt.tools.guidance(step).options)
    assert "Compile" in told
    assert not any(word in told for word in ("topk", "have room", "one position"))


def test_a_checkpoint_without_which_a_step_does_not_fit_is_not_told() -> None:
    pair = next(pair for pair in PAIRS if pair.name == "checkpoints")
    again, whole = (estimated(way).memory.peak for way in (pair.planted, pair.mended))
    assert again < whole
    chip = rt.load_chip(CHIP)
    context = chip.memory_capacity.value - chip.room()
    for room, told in (((again + whole) / 2, False), (2 * whole, True)):
        small = chip.with_facts({"memory_capacity": room + context})
        step = rt.estimate(estimated(pair.planted).plan.source, chip=small, execution="eager")
        assert told == any(w.lever == "memory" for w in rt.tools.guidance(step).options)


def test_tf32_is_no_part_of_all_together_where_nothing_stays_in_fp32() -> None:
    pair = next(pair for pair in PAIRS if pair.name == "precision")
    told = rt.tools.guidance(estimated(pair.planted))
    both = [w for w in told.options if w.lever == "compute"]
    assert len(both) == 3  # also autocast
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
    assert bool(told) == ("momentum" in how)
    for what_if in told:
        assert what_if.t_after == pytest.approx(made(fused=True, foreach=False).t_est, rel=OFF)
