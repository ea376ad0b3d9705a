"""Bytes alive: small graphs by hand, and training steps against torch's own memory tracker."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.memory.footprint import memory
from rooftrace.graph.records import ROLES, Ref
from rooftrace.hardware.chipfile import load_chip
from tests.conftest import in_turn
from tests.costmodels.graph_support import Builder
from tests.costmodels.memory_models import MODELS, allocated_peak, built, loss_of, tracked_peak
from tests.releases import LIFETIMES_ARE_EXACT, TORCH

SIZE = 2 * 64 * 64  # bytes of a bf16[64, 64]


# -- by hand ---------------------------------------------------------------------------------------


def test_a_chain_holds_its_input_and_two_links_at_a_time():
    b = Builder()
    x = b.input(64, 64)
    for _ in range(5):
        x = b.unary("exp", x)
    found = memory(b.graph(x))
    # The input stays (its owner may use it); the link before is there while the next is made.
    assert found.peak == found.activations_peak == 3 * SIZE
    assert found.where == 1 and found.weights == found.gradients == 0


def test_in_place_ops_and_views_take_no_room():
    b = Builder()
    x = b.unary("exp", b.input(64, 64))
    x = b.in_place("relu_", x)
    x = b.view(x, b.places[x].T)
    assert memory(b.graph(b.in_place("exp_", x))).peak == 2 * SIZE


def test_a_view_keeps_its_whole_storage():
    b = Builder()
    x = b.unary("exp", b.input(64, 64))
    row = b.view(x, b.places[x][:1])
    y = b.unary("exp", b.unary("exp", b.input(64, 64)))
    z = b.binary("add", row, row)
    assert memory(b.graph(y, z)).peak == (2 + 1 + 2) * SIZE  # inputs, x for its row, and the chain


def test_weights_that_are_not_read_are_there_all_the_same():
    b = Builder()
    y = b.mm(b.input(64, 64), b.weight(64, 64))
    graph = b.graph(y, model={"bytes_parameters": 10 * SIZE, "bytes_buffers": SIZE})
    found = memory(graph)
    assert found.weights == 11 * SIZE and found.peak == 13 * SIZE
    assert found.at_peak == {
        **dict.fromkeys(ROLES, 0), "weights": 11 * SIZE, "activations": 2 * SIZE
    }  # fmt: skip


def test_a_cache_that_grows_by_a_copy_is_there_twice_and_then_once():
    b = Builder()
    old, row = b.input(64, 64, role="kv"), b.input(1, 64)
    new = b.value((65, 64), "kv")
    b.op("aten.cat", {"tensors": (Ref(old), Ref(row))}, [new])
    y = b.input(64, 64)
    for _ in range(3):
        y = b.unary("exp", y)
    found = memory(b.graph(new, y))
    grown = SIZE + SIZE // 64
    assert found.kv == SIZE + grown  # both, while it is copied
    assert found.peak == SIZE // 64 + grown + 3 * SIZE  # later: the row, the new one, y's chain


def test_what_an_op_holds_is_there_as_it_runs():
    def peak(*held: int) -> int:
        b = Builder()
        x = b.unary("exp", b.value((64, 64)))
        y = b.unary("exp", x)
        z = b.unary("exp", b.unary("exp", y), holds=tuple(map(Ref, held)))
        return memory(b.graph(z)).peak

    assert peak() == 3 * SIZE  # the input that stays, and two links of the chain
    assert peak(1) == 4 * SIZE  # x, too, which nothing reads any more


def test_autograd_adds_a_gradient_to_the_one_before_in_its_place():
    def peak(part: str) -> int:
        b = Builder()
        x = b.input(64, 64)
        first = b.unary("exp", x, part=part, function="ExpBackward0")
        second = b.unary("neg", x, part=part, function="NegBackward0")
        return memory(b.graph(b.binary("add", first, second, part=part))).peak

    assert peak("forward") == 4 * SIZE
    assert peak("backward") == 3 * SIZE  # the sum has the bytes of the first


def test_fitting_a_chip():
    b = Builder()
    product = b.mm(b.input(64, 64), b.weight(64, 64))
    found = memory(b.graph(product, model={"bytes_parameters": 3e11}))
    chip = load_chip("h200-sxm")
    assert not found.fits(chip) and found.chips_needed(chip) == 2
    assert found.to_dict()["peak"] == found.peak


# -- training, by hand -----------------------------------------------------------------------------

BATCH, IN, HIDDEN, OUT = 512, 16, 256, 8
WEIGHTS = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * OUT + OUT)


class Mlp(nn.Module):
    """Two linears and a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def test_training_an_mlp_by_hand():
    found = memory(rt.trace(Mlp(), torch.empty(BATCH, IN), phase="training"))
    assert (found.weights, found.gradients) == (WEIGHTS, WEIGHTS)
    assert found.optimizer == 2 * WEIGHTS  # two moments; the step counts are on the host
    assert found.kv == 0
    x, out, hidden = 4 * BATCH * IN, 4 * BATCH * OUT, 4 * BATCH * HIDDEN
    # At the fullest moment backward makes the gradient before the relu: the input, the output and
    # the unit gradient that entered it, what relu saved, the gradient after it and the one before;
    # the second linear's are there already.
    at_once = x + 2 * out + 3 * hidden
    second = 4 * (HIDDEN * OUT + OUT)
    assert found.peak == WEIGHTS + found.optimizer + second + at_once


def test_gradients_stay_through_the_optimizer_step():
    graph = rt.trace(Mlp(), torch.empty(1, IN), phase="training")
    found = memory(graph)
    assert graph.ops[found.where].part == "optimizer"
    assert found.at_peak["gradients"] == WEIGHTS


class Block(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v)
        return x + self.mlp(F.silu(x) * x)


# -- against what torch says -----------------------------------------------------------------------

PHASES = ("forward", "training")
CLOSE = 0.005 if LIFETIMES_ARE_EXACT and TORCH >= (2, 11) else 0.03
"""Of a peak.  Python 3.10 keeps variables of a module longer while its repeats are looked for; of
training steps of language models with torch 2.8, up to 3 % is not explained."""
TRACKED = {("mamba", "training"): 0.05}
"""Autograd sums gradients in place, but not while a mode looks on, as the tracker is: in a real run
(below) we are right."""
WORKSPACE = {
    ("resnet50", "forward"): 0.07,
    ("convnext", "training"): 0.25,
    ("unet", "forward"): 0.13,
    ("unet", "training"): 0.05,
}
"""Convolutions of the CPU take room to reorder what they read; no tensor of the step is in it."""


@cache
def peak_of(name: str, phase: str) -> int:
    model, inputs = built(name, phase)
    graph = rt.trace(model, **inputs, phase=phase, loss=loss_of if phase == "training" else None)
    found = memory(graph)
    assert found.peak == sum(found.at_peak.values()) == sum(one.bytes for one in found.tensors)
    assert found.peak == max(moment.total for moment in found.timeline.moments)
    return found.peak


@cache
def tracked(name: str, phase: str) -> int:
    return tracked_peak(*built(name, phase), phase)


@pytest.mark.parametrize(("name", "phase"), in_turn(MODELS, PHASES))
def test_the_peak_is_that_of_torchs_tracker(name: str, phase: str) -> None:
    expected = tracked(name, phase)
    assert peak_of(name, phase) == pytest.approx(expected, rel=TRACKED.get((name, phase), CLOSE))


@pytest.mark.parametrize(("name", "phase"), in_turn(MODELS, PHASES))
def test_the_peak_is_what_a_real_run_allocates(name: str, phase: str) -> None:
    allocated = allocated_peak(*built(name, phase), phase)
    assert peak_of(name, phase) == pytest.approx(allocated, rel=WORKSPACE.get((name, phase), CLOSE))


@pytest.mark.parametrize("name", ["llama", "gated"])
def test_checkpoints_lower_the_peak(name: str) -> None:
    saved = peak_of(f"{name} checkpointed", "training") / peak_of(name, "training")
    real = [tracked(n, "training") for n in (f"{name} checkpointed", name)]
    assert saved == pytest.approx(real[0] / real[1], rel=CLOSE)
    assert saved < 0.6


# -- over time -------------------------------------------------------------------------------------


def test_the_timeline_of_a_chain():
    b = Builder()
    x = b.input(64, 64)
    for _ in range(3):
        x = b.unary("exp", x)
    line = memory(b.graph(x)).timeline
    assert [moment.total for moment in line.moments] == [2 * SIZE, 3 * SIZE, 3 * SIZE]
    assert [moment.time for moment in line.moments] == [0, 1, 2]
    assert line.parts() == [("forward", 0, 3)]
    frame = line.to_frame()
    assert list(frame["total"]) == list(frame["activations"]) == [2 * SIZE, 3 * SIZE, 3 * SIZE]


def test_what_backward_reads_is_saved_from_when_it_is_made():
    found = memory(rt.trace(Mlp(), torch.empty(BATCH, IN), phase="training"))
    frame = found.timeline.to_frame()
    hidden = 4 * BATCH * HIDDEN
    forward, optimizer = (frame[frame["part"] == part] for part in ("forward", "optimizer"))
    assert forward["saved"].max() >= hidden > forward["saved"].iloc[0]
    assert optimizer["saved"].max() < hidden  # the output is there still; what relu saved is not
    assert found.saved == pytest.approx(hidden, rel=0.05)
    assert [part for part, _, _ in found.timeline.parts()] == ["forward", "backward", "optimizer"]


def test_a_checkpoint_saves_its_input_and_makes_the_rest_again():
    lines = {}
    for name in ("gated", "gated checkpointed"):
        model, inputs = built(name, "training")
        graph = rt.trace(model, **inputs, phase="training", loss=loss_of)
        lines[name] = memory(graph).timeline.to_frame()
    plain, again = lines.values()
    assert again["saved"].max() < 0.4 * plain["saved"].max()
    assert {*plain["part"]} == {"forward", "backward", "optimizer"}
    assert "recompute" in {*again["part"]}


def test_a_coarse_timeline_keeps_the_peak():
    b = Builder()
    x = b.input(64, 64)
    for _ in range(500):
        x = b.unary("exp", x)
    x = b.binary("add", b.unary("exp", x), b.unary("neg", x))
    found = memory(b.graph(x))
    coarse = found.timeline.coarse(20)
    assert len(coarse.moments) == 20
    assert max(moment.total for moment in coarse.moments) == found.peak
    assert coarse.coarse(20) == coarse


# -- what the peak is made of ----------------------------------------------------------------------


def test_tensors_alike_are_listed_together():
    layers = [Block(32) for _ in range(6)]
    graph = rt.trace(nn.Sequential(*layers), torch.empty(2, 16, 32))
    found = memory(graph)
    (weight,) = (
        one for one in found.tensors if one.name == "*.mlp.*.weight" and one.shape == (128, 32)
    )
    assert (weight.count, weight.dtype) == (6, "fp32")
    assert weight.bytes == 6 * 4 * 128 * 32
    assert (weight.role, weight.module, weight.op) == ("weights", "*.mlp.*", "")
    blocks = {group["module"]: group for group in found.by_block()}
    params = sum(p.numel() for p in layers[0].mlp.parameters())
    assert blocks["*.mlp"]["roles"]["weights"] == 6 * 4 * params
    assert sum(group["bytes"] for group in found.by_module()) == found.peak
    assert found.to_frame()["bytes"].sum() == found.peak


def test_states_and_gradients_belong_to_the_module_of_their_weight():
    found = memory(rt.trace(Mlp(), torch.empty(1, IN), phase="training"))
    first = [one for one in found.tensors if one.module == "first"]
    assert {one.role for one in first} == {"weights", "gradients", "optimizer"}
    assert {one.name for one in first if one.role == "optimizer"} == {
        "first.weight.exp_avg", "first.weight.exp_avg_sq", "first.bias.exp_avg",
        "first.bias.exp_avg_sq"}  # fmt: skip


def test_weights_that_are_not_read_have_a_line():
    b = Builder()
    y = b.mm(b.input(64, 64), b.weight(64, 64, name="fc.weight"))
    found = memory(b.graph(y, model={"bytes_parameters": 3 * SIZE}))
    lines = {one.name: one.bytes for one in found.tensors if one.role == "weights"}
    assert lines == {"fc.weight": SIZE, "(not read in this step)": 2 * SIZE}


class Tagger(nn.Module):
    """A recurrent network that stays one op."""

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 128)
        self.inner = getattr(nn, kind)(128, 256, layers, batch_first=True)
        self.head = nn.Linear(256, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(x))[0])


@pytest.mark.parametrize(("kind", "layers"), in_turn(["LSTM", "GRU", "RNN"], [1, 2]))
def test_a_recurrent_network_keeps_its_gates_for_backward(kind: str, layers: int) -> None:
    """Not more than the CPU's cells, which keep what a fused one computes again, and not much less;
    oneDNN's own kernel keeps more."""
    model, inputs = Tagger(kind, layers), {"x": torch.randint(0, 512, (16, 128))}
    found = memory(rt.trace(model, **inputs, phase="training", loss=loss_of))
    with torch.backends.mkldnn.flags(enabled=False):
        real = allocated_peak(model.train(), inputs, "training")
    assert 0.7 * real < found.peak <= 1.01 * real
    forward = memory(rt.trace(model, **inputs))
    assert forward.peak < 0.6 * found.peak and forward.saved == 0
    gates = {"LSTM": 5, "GRU": 5, "RNN": 0}[kind]
    assert found.timeline.to_frame()["saved"].max() >= gates * layers * 4 * (16 * 128 * 256)
