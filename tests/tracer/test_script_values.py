"""What a script brings from the host is known at any size; what it draws, and asks in loops."""

from pathlib import Path

import pytest
import torch

from tests.tracer.script_oracle import matrix_flops, ours, trained, training

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

HEAD = """
import sys
import torch
from torch import nn
model = nn.Linear(300, 300).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 300, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
"""

COUNTED = """
def counts(x, device):
    there = x.to(device)
    picked = there > 0
    part, kept = there[1:-1].view(-1, 1), picked.clone()
    made = [list(picked.nonzero().shape), list(there[picked].shape), int(part.sum())]
    made += [int(picked.cpu().sum()), there.max().item(), bool((part < 0).any())]
    kept[:50] = False
    return [*made, int(kept.sum()), int((there[:, None] * 1).flatten().argmax())]

torch.manual_seed(0)
x = (torch.rand(int(sys.argv[2])) < 0.01).to(getattr(torch, sys.argv[3]))
real = counts(x, "cpu")
for turn in range(5):
    assert counts(x, "cuda") == real, (turn, counts(x, "cuda"), real)
    step()

there = x.cuda()
x.zero_()
assert len(there.nonzero()), "what the host wrote later is no value of the copy"
"""

CLIPPED = """
scales = [torch.rand(1, device="cuda") for _ in range(100)]
step()
for turn in range(4):
    clipped = 0
    for scale in scales:
        norm = (model.weight * scale).sum()
        if norm < 1:
            clipped += 1
    assert clipped == 0, clipped
    step()
asked = 0
while not (model.weight.sum() > asked).all():
    asked += 1
assert asked == 256

scores = model(torch.ones(97, 300, device="cuda")).sum(1)
scores[0] = 0
best = scores.topk(5).indices.cpu().tolist()
assert len({*best}) == 5 and 0 not in best, best
for rows in range(2, 9):
    model(torch.ones(rows, 300, device="cuda")).cpu()
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return path


FLOATS, INTEGERS = 1 << 16, 1 << 22  # up to so many elements are carried along


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (FLOATS, "float32"),
        (FLOATS, "float16"),
        pytest.param(INTEGERS, "int64", marks=pytest.mark.slow),
        pytest.param(INTEGERS, "bool", marks=pytest.mark.slow),
    ],
)
def test_what_the_host_brings_is_counted_as_on_the_host(
    tmp_path: Path, size: int, dtype: str, more: int
) -> None:
    cost = ours(written(tmp_path, COUNTED), str(size + more), dtype)
    assert trained(cost) == 5


def test_a_question_for_each_weight_is_no_endless_loop_and_a_place_ruled_out_is_not_drawn(
    tmp_path: Path,
) -> None:
    cost = ours(written(tmp_path, CLIPPED))
    said = [line for line in str(cost).splitlines() if "a copy to the host: an" in line]
    assert len(said) == 1


DRAWN = """
import random

def drawn():
    return random.random(), torch.rand(1).item()

def seed():
    random.seed(3)
    torch.manual_seed(3)

seed()
wanted = [drawn() for _ in range(4)]
seed()
for there in wanted:
    assert drawn() == there
    step()
"""


def test_what_the_host_draws_goes_on_from_turn_to_turn(tmp_path: Path) -> None:
    assert trained(ours(written(tmp_path, DRAWN))) == 4


MASKED = """
x = torch.ones(1, 1, int(sys.argv[2]), 8)
mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
if sys.argv[3] == "float":
    mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.mix(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, mask)

layer = Attention().cuda()
opt = torch.optim.SGD(layer.parameters(), lr=0.1)
for turn in range(3):
    layer(x.cuda(), mask.cuda()).sum().backward()
    opt.step()
"""


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_host_hides_as_much_at_any_size(tmp_path: Path, kind: str) -> None:
    for size in (256, 257):  # 65,536 numbers, and more
        row = training(ours(written(tmp_path, MASKED), str(size), kind))[-1]
        pairs = size * (size + 1) // 2  # a query looks back
        layer, attention = 2 * 2 * size * 8 * 8, 6 * 2 * 8 * pairs  # with their gradients
        assert matrix_flops(row, ["useful"]) == layer + attention
