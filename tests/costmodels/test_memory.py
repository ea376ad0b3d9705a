"""Bytes alive: small graphs by hand, and training steps against torch's own memory tracker."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

import rooftrace as rt
from rooftrace.costmodels.memory import memory
from rooftrace.hardware.chipfile import load_chip
from rooftrace.tracer.graph import ROLES, Ref
from tests.costmodels.conftest import build
from tests.costmodels.graph_support import Builder

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


# -- against torch's tracker -----------------------------------------------------------------------


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


def tracked(model: nn.Module, x: torch.Tensor, optimizer: bool) -> int:
    """Peak bytes of a training step, as torch counts them on the CPU."""
    step = torch.optim.AdamW(model.parameters(), foreach=True)
    if optimizer:  # the states that it has after its first step
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step.step()
        step.zero_grad(set_to_none=True)
    tracker = MemTracker()
    tracker.track_external(model, step, x)
    with tracker:
        out = model(x)
        out = getattr(out, "logits", out)
        out.sum().backward()
        if optimizer:
            step.step()
    return max(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values())


def small_gpt2() -> tuple[nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), torch.randint(0, 96, (8, 64))


STEPS = {
    "mlp": lambda: (Mlp(), torch.randn(BATCH, IN)),
    "blocks": lambda: (nn.Sequential(Block(), Block()), torch.randn(16, 128, 64)),
    "resnet": lambda: (build("resnet")[0], torch.randn(8, 3, 64, 64)),
    "gpt2": small_gpt2,
}


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_the_peak_is_that_of_torchs_tracker(name, optimizer):
    model, x = STEPS[name]()
    graph = rt.trace(
        model, x, phase="training", optimizer="adamw" if optimizer else "none",
        loss=lambda out: getattr(out, "logits", out).sum(),
    )  # fmt: skip
    assert memory(graph).peak == pytest.approx(tracked(model, x, optimizer), rel=0.01)
