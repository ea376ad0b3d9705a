"""Memory of scripts on a GPU that is not there, beside the same scripts run for real on the CPU.

Without what only CUDA's kernels make for themselves.  That leaves losses out whose result keeps the
bytes of all its terms (`mse_loss`): here are means of squares and cross entropies.
"""

from pathlib import Path
from textwrap import dedent

import pytest
import torch

from rooftrace.costmodels.estimates.scripts import ScriptCost
from rooftrace.costmodels.fusion.executions import execution_model
from tests.conftest import mostly_heavy
from tests.tracer.script_memory import alive_while_run
from tests.tracer.script_oracle import ours

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

HEAD = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
device = sys.argv[1]
torch.manual_seed(0)
"""

PLAIN = """
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.Tanh(),
                      nn.Linear(128, 10)).to(device)
kind = dict(foreach=True) if sys.argv[2] == "foreach" else dict(fused=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
for step in range(5):
    x, y = torch.randn(32, 64, device=device), torch.randn(32, 10, device=device)
    loss = (model(x) - y).square().mean()
    if sys.argv[3] == "after":
        opt.zero_grad()
    loss.backward()
    opt.step()
    if sys.argv[3] == "end":
        opt.zero_grad()
"""

IMAGES = """
import numpy
model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                      nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
images, labels = numpy.random.rand(40, 3, 32, 32).astype("float32"), numpy.arange(40) % 10
running = 0.0
for step in range(5):
    x = torch.from_numpy(images[step * 8:step * 8 + 8]).to(device, copy=True)
    y = torch.from_numpy(labels[step * 8:step * 8 + 8]).to(device, copy=True)
    out = model(x)
    loss = F.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    running += loss.item()
    hits = (out.argmax(1) == y).sum().item()
"""

GAN = """
G = nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(),
                  nn.Linear(256, 64), nn.Tanh()).to(device)
D = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(device)
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, foreach=True)
opt_g = torch.optim.RMSprop(G.parameters(), lr=2e-4, foreach=True)
for step in range(5):
    D.zero_grad()
    real = torch.randn(32, 64, device=device)
    ones, zeros = torch.ones(32, 1, device=device), torch.zeros(32, 1, device=device)
    F.binary_cross_entropy_with_logits(D(real), ones).backward()
    fake = G(torch.randn(32, 16, device=device))
    F.binary_cross_entropy_with_logits(D(fake.detach()), zeros).backward()
    opt_d.step()
    G.zero_grad()
    loss = F.binary_cross_entropy_with_logits(D(fake), ones)
    loss.backward()
    opt_g.step()
"""

BLOCKS = """
from torch.utils.checkpoint import checkpoint
passes, again = int(sys.argv[2]), sys.argv[3] == "checkpoint"
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) * 0.1).softmax(-1)
        x = x + self.out(scores @ v)
        return x + self.down(F.gelu(self.up(self.last(x))))

class Net(nn.Module):
    def __init__(self, width=32, layers=4):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(x)

model = Net().to(device)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
for step in range(5):
    opt.zero_grad()
    for _ in range(passes):
        ids = torch.randint(50, (8, 33), device=device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / passes
        loss.backward()
    opt.step()
"""

SCALED = """
import copy
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
average = copy.deepcopy(model)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
scaler = torch.amp.GradScaler(device)
outs = []
for step in range(5):
    x, y = torch.randn(32, 64, device=device), torch.randint(10, (32,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    outs.append(out.detach())
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters()):
            a.lerp_(p, 0.1)
"""

CARRIED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(50, 32), nn.GRUCell(32, 64)
        self.head = nn.Linear(64, 50)
    def forward(self, ids, h):
        outs = []
        for t in range(ids.shape[1]):
            h = self.cell(self.embed(ids[:, t]), h)
            outs.append(self.head(h))
        return torch.stack(outs, 1), h
model = Net().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
h = torch.zeros(16, 64, device=device)
total = torch.zeros((), device=device)
for step in range(6):
    ids = torch.randint(50, (16, 9), device=device)
    h = h.detach()
    model.zero_grad()
    out, h = model(ids[:, :-1], h)
    loss = F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with torch.no_grad():
        total += loss
    opt.step()
"""

FLAT = """
net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(device)
size, place = sum(p.numel() for p in net.parameters()), 0
flat, grads = torch.empty(size, device=device), torch.zeros(size, device=device)
for p in net.parameters():
    part = slice(place, place + p.numel())
    flat[part].copy_(p.detach().view(-1))
    p.data, p.grad = flat[part].view_as(p), grads[part].view_as(p)
    place += p.numel()
shard = nn.Parameter(flat[: size // 4])
shard.grad = grads[: size // 4]
opt = torch.optim.SGD([shard], lr=0.1, momentum=0.9, foreach=True)
for step in range(5):
    grads.zero_()
    net(torch.randn(16, 64, device=device)).square().mean().backward()
    opt.step()
"""

DROPPED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    def forward(self, x):
        for layer in self.inner:
            q = layer(x).view(8, 2, 16, 24).transpose(-1, -2)  # no kernel of CUDA's takes it whole
            y = F.scaled_dot_product_attention(q, q, q)
            y.square()  # a number to look at, which nobody keeps
            x = x + y.transpose(-1, -2).reshape(8, 24, 32)
        return x
model = Net().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
for step in range(5):
    x = torch.randn(8, 24, 32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=sys.argv[2] == "autocast"):
        loss = model(x).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""

CASES = {
    "flat": (FLAT, ()),
    "foreach-dropped-late": (PLAIN, ("foreach", "after")),
    "foreach-dropped-at-the-end": (PLAIN, ("foreach", "end")),
    "fused-dropped-late": (PLAIN, ("fused", "after")),
    "fused-dropped-at-the-end": (PLAIN, ("fused", "end")),
    "images": (IMAGES, ()),
    "gan": (GAN, ()),
    "blocks": (BLOCKS, ("1", "plain")),
    "accumulated-2": (BLOCKS, ("2", "plain")),
    "accumulated-4": (BLOCKS, ("4", "plain")),
    "checkpoints": (BLOCKS, ("1", "checkpoint")),
    "checkpoints-accumulated": (BLOCKS, ("3", "checkpoint")),
    "carried": (CARRIED, ()),
    "dropped": (DROPPED, ("plain",)),
    "dropped-autocast": (DROPPED, ("autocast",)),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(dedent(HEAD) + text, encoding="utf-8")
    return path


def plainly(path: Path, *words: str) -> ScriptCost:
    """What the script costs, without what only CUDA's kernels make for themselves."""
    return ours(path, *words, execution=execution_model("eager").as_called)


FURTHER = ("foreach-dropped-at-the-end", "fused-dropped-late", "accumulated-4")
"""Cases that are made of what others have, too."""


@pytest.mark.parametrize("case", mostly_heavy(CASES, [c for c in CASES if c not in FURTHER]))
def test_the_peak_of_a_step_is_that_of_a_real_one(case: str, tmp_path: Path) -> None:
    text, words = CASES[case]
    path = written(tmp_path, text)
    real, steady = alive_while_run(path, *words).steps[-1], plainly(path, *words).steady
    assert steady is not None and steady.turns >= 4
    fullest = max((step.memory for step, _ in steady.parts), key=lambda memory: memory.peak)
    roles = {role: fullest.at_peak[role] for role in ("weights", "gradients", "optimizer")}
    assert {**roles, "rest": fullest.peak - sum(roles.values())} == real


def test_averages_scalers_and_what_a_list_keeps_are_in_the_peak(tmp_path: Path) -> None:
    path = written(tmp_path, SCALED)
    real, cost = alive_while_run(path), ours(path)
    assert cost.steady is not None and cost.steady.turns == 4
    # The list grows by one output a step: the third step is the last that is recorded.
    assert cost.steady.peak == sum(real.steps[2].values())
    assert sum(real.steps[3].values()) - sum(real.steps[2].values()) == 32 * 10 * 2
    assert [row.turns for row in cost.rows] == [1, 4]
