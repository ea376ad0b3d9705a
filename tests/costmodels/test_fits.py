"""Changes that make a step fit: each against the same change, made by hand and traced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.costmodels.rewrites.mends import without_checkpoints
from rooftrace.graph import OpGraph
from rooftrace.hardware import chip
from rooftrace.studies.advice.fits import fitting, with_checkpoints, with_small_states
from rooftrace.types import Estimate

WIDTH = 1024
CONTEXT = 2**29  # bytes of a process on a GPU, beside the step


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Projected(Layer):
    """Three products of one input, for each of which forward makes a view."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).unsqueeze(0)
        q, k, v = (part(rows).unflatten(-1, (8, -1)).transpose(1, 2) for part in self.parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return super().forward(x + mixed.transpose(1, 2).flatten(2)[0])


class Transposed(Layer):
    """A product whose weight has its inputs as rows, as in GPT-2: backward turns the input over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(*s)) for s in ([WIDTH] * 2, [WIDTH]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, super().forward(x).tanh(), self.weight)


class Shifted(Layer):
    """Backward reads the input moved by 1, not the input, which a checkpoint holds all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1)


class Stack(nn.Module):
    def __init__(self, again: int, layer: type[Layer] = Layer) -> None:
        super().__init__()
        self.layers, self.again = nn.ModuleList(layer() for _ in range(5)), again
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            runs_again = number < self.again
            x = checkpoint(layer, x, use_reentrant=False) if runs_again else layer(x)
        return self.head(x)


def stack(
    again: int = 0, rows: int = 16384, repeats: bool = True, layer: type[Layer] = Layer
) -> OpGraph:
    with torch.device("meta"):
        module, x = Stack(again, layer).bfloat16(), torch.empty(rows, WIDTH, dtype=torch.bfloat16)
    return rt.trace(module, x, phase="training", repeats=repeats)


def on_a_chip(graph: OpGraph, gigabytes: float = 80.0) -> Estimate:
    """The step on a chip with so much memory."""
    chip = rt.load_chip("h100-sxm")
    fact = replace(chip.memory_capacity, value=gigabytes * 1e9)
    return rt.estimate(graph, chip=replace(chip, memory_capacity=fact), execution="eager")


@pytest.mark.parametrize("layer", [Layer, Transposed, Shifted])
@pytest.mark.parametrize("repeats", [True, False])
def test_checkpoints_cost_what_those_of_torch_cost(repeats: bool, layer: type[Layer]) -> None:
    ours = on_a_chip(with_checkpoints(stack(repeats=repeats, layer=layer)))
    torchs = on_a_chip(stack(again=5, repeats=repeats, layer=layer))
    assert ours.kernels == torchs.kernels
    assert ours.t_est == pytest.approx(torchs.t_est, rel=1e-3)
    assert ours.memory.peak == pytest.approx(torchs.memory.peak, rel=1e-3)
    assert ours.flops_recompute == torchs.flops_recompute > 0


@pytest.mark.parametrize("layer", [Layer, Projected])
@pytest.mark.parametrize("execution", ["eager", "efficient"])
def test_checkpoints_left_out_leave_the_step_without_them(
    layer: type[Layer], execution: str
) -> None:
    ours = without_checkpoints(stack(again=5, rows=4096, layer=layer))
    plain = stack(rows=4096, layer=layer)
    times = [rt.estimate(graph, "h100-sxm", execution=execution).t_est for graph in (ours, plain)]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_states_of_eight_bits_take_a_quarter_of_their_bytes() -> None:
    wide, small = stack(), with_small_states(stack())
    before, after = (on_a_chip(graph).memory.optimizer for graph in (wide, small))
    moments = sum(2 * p.numel() for p in Stack(False).parameters())
    masters = before - 4 * moments  # of weights in bf16, which stay
    assert after == pytest.approx(masters + moments, rel=0.01)


def test_a_step_that_fits_is_told_nothing() -> None:
    assert fitting(on_a_chip(stack())) == ()


def test_what_makes_it_fit_stands_by_seconds_and_is_what_a_trace_by_hand_gives() -> None:
    whole = on_a_chip(stack())
    step = on_a_chip(stack(), (whole.memory.peak * 0.75 + CONTEXT) * 1e-9)
    ways = fitting(step, lambda rows: stack(rows=rows))
    assert all(way.fits and not step.memory.fits(step.chip) for way in ways)
    assert [way.t_after for way in ways] == sorted(way.t_after for way in ways)
    (batches,) = [way for way in ways if way.runs > 1]
    by_hand = on_a_chip(stack(rows=16384 // batches.runs))
    optimizer = by_hand.by_part()["optimizer"].seconds
    expected = batches.runs * (by_hand.t_est - optimizer) + optimizer
    assert batches.t_after == pytest.approx(expected, rel=1e-6)
    assert batches.peak >= by_hand.memory.peak
    (again,) = [way for way in ways if "torch.utils.checkpoint" in way.action]
    (number,) = re.findall(r"Run the first (\d) of 5 layers of layers again", again.action)
    traced, fewer = (on_a_chip(stack(again=n), 80.0) for n in (int(number), int(number) - 1))
    assert again.t_after == pytest.approx(traced.t_est, rel=1e-3)
    assert again.peak == pytest.approx(traced.memory.peak, rel=1e-3)
    assert 1 < int(number) < 5 and fewer.memory.peak > step.chip.room()


@pytest.mark.slow
def test_the_fewest_layers_are_those_of_a_loop() -> None:
    whole = stack(rows=6144)
    step, peaks = on_a_chip(whole), [on_a_chip(whole).memory.peak]
    peaks += [on_a_chip(with_checkpoints(whole, first=n)).memory.peak for n in range(1, 6)]
    for share in (0.99, 0.95, 0.85, 0.7):
        room = peaks[0] * share + peaks[-1] * (1 - share)
        least = next(number for number, peak in enumerate(peaks) if peak <= room)
        some = "each layer" if least == 5 else f"the first {least} of 5 layers"
        ways = fitting(on_a_chip(step.plan.source, (room + CONTEXT) * 1e-9))
        (told,) = [way.action for way in ways if way.action.endswith("(torch.utils.checkpoint)")]
        assert told.startswith(f"Run {some}"), share


def test_several_changes_are_tried_where_none_alone_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chip, "COPIED", 1e-9)  # states on the host take years
    parts = stack(again=5), with_small_states(stack())
    alone = [on_a_chip(graph).memory.peak for graph in parts]
    both = on_a_chip(with_small_states(stack(again=5))).memory.peak
    way, _ = fitting(on_a_chip(stack(), (both + CONTEXT) * 1.01e-9))
    assert way.lever == "together" and way.peak == pytest.approx(both, rel=1e-3)
    assert way.peak < min(alone)


def test_two_changes_are_told_where_they_take_less_than_one_that_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chip, "HOST_LINKS", {"sm_90": 1e9})  # a slow link
    both = on_a_chip(with_small_states(stack(again=5, rows=4096)))
    step = on_a_chip(stack(rows=4096), (both.memory.peak + CONTEXT) * 1.01e-9)
    first, second = fitting(step)
    assert first.lever == "together" and first.t_after == pytest.approx(both.t_est, rel=1e-3)
    assert "host's memory" in second.action and second.t_after > first.t_after


OWN = """
from functools import partial
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


def build():
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Linear(512, 512), nn.ModuleDict({"all": nn.Sequential(*layers)})["all"])


def inputs():
    return (torch.zeros(2, 64, 512),)


def alone():
    return build().bfloat16(), tuple(x.bfloat16() for x in inputs())


def by_hand(mesh):
    model, given = alone()
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, given


def again(mesh):
    model, given = by_hand(mesh)
    for layer in model[1]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model, given
"""


def test_code_that_shards_nothing_is_shared_over_a_mesh_of_replicas(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    how = {"phase": "training", "mesh": {"dp": 2}, "chip": "h100-sxm", "execution": "eager"}
    ours, hands = (rt.report(f"{tmp_path}/own.py:{name}", **how) for name in ("alone", "by_hand"))
    step, other = (report.estimate("training") for report in (ours, hands))
    assert step.processes == 2 and step.t_est == pytest.approx(other.t_est, rel=1e-9)
    assert step.memory.peak == other.memory.peak
    assert [a for a in step.graph.assumptions if "fully_shard (FSDP2) on 2 items" in a.text]
    with pytest.raises(rt.types.RequestError, match=r"--mesh dp=2,tp=2: .* takes no `mesh`"):
        rt.report(f"{tmp_path}/own.py:alone", phase="training", mesh={"dp": 2, "tp": 2})


def test_checkpoints_of_sharded_layers_are_left_out(tmp_path: Path) -> None:
    """Backward gathers weights again, with checkpoints and without."""
    (tmp_path / "own.py").write_text(OWN)
    again, once = (
        rt.trace(f"{tmp_path}/own.py:{name}", phase="training", mesh={"dp": 2})
        for name in ("again", "by_hand")
    )
    ours = without_checkpoints(again)
    assert all(op.kind == "view" for op in ours.ops if op.part == "recompute")
    steps = [rt.estimate(graph, "h100-sxm") for graph in (again, ours, once)]
    assert steps[1].t_est == pytest.approx(steps[2].t_est, rel=1e-9)
    assert steps[1].t_est < steps[0].t_est
    assert steps[1].memory.peak == pytest.approx(steps[2].memory.peak, rel=0.03)


def test_a_report_on_code_tells_of_shards_over_chips(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    chip = rt.load_chip("h100-sxm")
    tight = replace(chip, memory_capacity=replace(chip.memory_capacity, value=7.5e8))
    how = {"phase": "training", "execution": "eager"}
    told = rt.report(f"{tmp_path}/own.py:alone", chip=tight, **how).fitting["training"]
    assert "--mesh dp=2" in [way.option for way in told]


def test_a_report_says_it_on_its_page_and_screen() -> None:
    with torch.device("meta"):
        module, x = Stack(False).bfloat16(), torch.empty(2**20, WIDTH, dtype=torch.bfloat16)
    report = rt.report(module, x, phase="training", chip="h100-sxm", execution="eager")
    ways = report.guidance["training"].fitting
    assert ways and ways == report.fitting["training"]
    assert "to fit 1. " in str(report)


def test_states_of_the_host_come_and_go_over_its_link() -> None:
    whole = on_a_chip(stack())
    away = whole.memory.optimizer
    step = on_a_chip(stack(), (whole.memory.peak - away + CONTEXT) * 1.01e-9)
    (way,) = [way for way in fitting(step) if "host's memory" in way.action]
    assert way.peak == whole.memory.peak - away
    seconds = 2 * away / 55.6e9  # NVIDIA's nvbandwidth, PCIe 5.0, there and back
    assert way.t_after == pytest.approx(whole.t_est + seconds, rel=0.01)
    unknown = replace(step.chip, architecture="")
    ways = fitting(rt.estimate(stack(), chip=unknown, execution="eager"))
    (slow,) = [way for way in ways if "host's memory" in way.action]
    assert slow.t_after == pytest.approx(whole.t_est + 2 * seconds, rel=0.01)  # by PCIe 4.0


@pytest.mark.slow
def test_shards_over_chips_cost_what_a_report_on_them_says(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
    config = {"model_type": "llama", "vocab_size": 8192, "num_attention_heads": 8, **wide}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chip = rt.load_chip("h100-sxm")
    tight = replace(chip, memory_capacity=replace(chip.memory_capacity, value=9e8))

    def report(chip: rt.types.Chip = tight, **more: Any) -> rt.types.Report:
        how = {"phase": "training", "batch": 1, "seq": 64, "dtype": "bf16", **more}
        return rt.report(tmp_path / "config.json", chip=chip, execution="eager", **how)

    alone = report()
    (way,) = [way for way in alone.fitting["training"] if "chips" in way.action]
    assert way.option == "--mesh dp=2" and way.needs.startswith("2 chips")
    by_hand = report(mesh={"dp": 2}).estimate("training")
    assert way.t_after == pytest.approx(by_hand.t_est, rel=1e-9)
    assert way.peak == by_hand.memory.peak < tight.room() < alone.estimate("training").memory.peak

    # weights that each chip gathers: over 4 chips it does not fit, though a quarter would
    most = report(mesh={"dp": 4}).estimate("training").memory.peak + CONTEXT - 1
    tighter = replace(chip, memory_capacity=replace(chip.memory_capacity, value=most))
    (way,) = [way for way in report(tighter).fitting["training"] if "chips" in way.action]
    number = int(way.option.removeprefix("--mesh dp="))
    assert number > 4 and way.peak < tighter.room()
    half = report(mesh={"dp": number // 2}).estimate("training")
    assert half.memory.peak > tighter.room()


def traces(folder: Path, config: dict[str, Any], **sizes: int) -> Callable[..., OpGraph]:
    """Makes training steps of a config over chips, each once."""
    (folder / "config.json").write_text(json.dumps(config))

    @cache
    def over(chips: int, again: bool = False) -> OpGraph:
        mesh = {"mesh": {"dp": chips}} if chips > 1 else {}
        how = {"dtype": "bf16", "checkpoint": "full" if again else "none", **sizes}
        return rt.trace(folder / "config.json", phase="training", **how, **mesh)

    return over


@pytest.mark.slow
def test_the_fewest_chips_are_those_of_a_loop_over_traces(tmp_path: Path) -> None:
    wide = {"n_embd": 384, "n_layer": 4, "n_head": 6, "vocab_size": 5000}
    over = traces(tmp_path, {"model_type": "gpt2", **wide}, batch=2, seq=512)
    peaks = {2**n: on_a_chip(over(2**n)).memory.peak for n in range(1, 6)}
    for room in (peak + less for peak in [*peaks.values()][:4] for less in (0, -1)):
        step = on_a_chip(over(1), (room + CONTEXT) * 1e-9)
        least = next(number for number, peak in peaks.items() if peak <= room)
        assert f"--mesh dp={least}" in [way.option for way in fitting(step, over_chips=over)]


@pytest.mark.slow
def test_one_number_of_chips_is_traced_where_the_room_is_between_two_peaks(tmp_path: Path) -> None:
    """Over 32 chips, too, where what layers gather takes most of the room."""
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = {"model_type": "llama", "vocab_size": 512, "num_attention_heads": 8, **wide}
    over = traces(tmp_path, config, batch=1, seq=64)
    peaks = {2**n: on_a_chip(over(2**n)).memory.peak for n in range(1, 6)}
    for (_, more), (number, peak) in pairwise(peaks.items()):
        asked = []

        def noted(*way: Any, asked: list[Any] = asked) -> OpGraph:
            asked.append(way)
            return over(*way)

        step = on_a_chip(over(1), ((more + peak) // 2 + CONTEXT) * 1e-9)
        assert f"--mesh dp={number}" in [way.option for way in fitting(step, over_chips=noted)]
        assert asked == [(number, False)]
