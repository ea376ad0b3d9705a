"""Scripts on a GPU that is not there, against the same scripts run for real on the CPU."""

import tempfile
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates import ScriptCost
from tests.conftest import mostly_heavy
from tests.tracer.script_oracle import (
    all_flops,
    held,
    matrix_flops,
    ours,
    really,
    trained,
    training,
)

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

AMP = """
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)).to(device)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device)
data = torch.utils.data.TensorDataset(torch.randn(96, 32), torch.randint(0, 10, (96,)))
for x, y in torch.utils.data.DataLoader(data, batch_size=16):
    opt.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    print(loss.item())
"""

ACCUMULATED = """
passes = int(sys.argv[2])
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    for _ in range(passes):
        x, y = torch.randn(8, 32, device=device), torch.randint(10, (8,), device=device)
        (F.cross_entropy(model(x), y) / passes).backward()
    opt.step()
    opt.zero_grad()
"""

GAN = """
G = nn.Sequential(nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(),
                  nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh()).to(device)
D = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4),
                  nn.Flatten()).to(device)
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4)
opt_g = torch.optim.RMSprop(G.parameters(), lr=2e-4)
for step in range(5):
    D.zero_grad()
    real = torch.randn(8, 3, 8, 8).to(device)
    ones, zeros = torch.ones(8, 1, device=device), torch.zeros(8, 1, device=device)
    F.binary_cross_entropy_with_logits(D(real), ones).backward()
    fake = G(torch.randn(8, 16, 1, 1, device=device))
    F.binary_cross_entropy_with_logits(D(fake.detach()), zeros).backward()
    opt_d.step()
    G.zero_grad()
    loss = F.binary_cross_entropy_with_logits(D(fake), ones)
    loss.backward()
    opt_g.step()
    print(loss.item())
"""

PPO = """
from torch.distributions import Categorical

class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))

    def act(self, x, action=None):
        chances = Categorical(logits=self.actor(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)

agent = Agent().to(device)
opt = torch.optim.Adam(agent.parameters(), lr=3e-4)
for update in range(2):
    seen, done, logs, rewards = [], [], [], []
    x = torch.randn(4, 8, device=device)
    for t in range(8):
        with torch.no_grad():
            action, log, _, value = agent.act(x)
        seen.append(x), done.append(action), logs.append(log)
        reward = action.cpu().numpy().astype("float32") * 0.1
        rewards.append(torch.tensor(reward).to(device))
        x = torch.randn(4, 8).to(device)
    b, a, old, r = torch.cat(seen), torch.cat(done), torch.cat(logs), torch.cat(rewards)
    for epoch in range(2):
        for part in torch.randperm(32).split(16):
            part = part.to(device)
            _, log, entropy, value = agent.act(b[part], a[part])
            ratio = (log - old[part]).exp()
            gain = r[part] - value.view(-1)
            loss = -(ratio.clamp(0.8, 1.2) * gain.detach()).mean() + gain.square().mean()
            opt.zero_grad()
            (loss - 0.01 * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            opt.step()
"""

EVALUATED = """
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)).to(device)
opt = torch.optim.Adagrad(net.parameters(), lr=0.1)
for step in range(6):
    net.train()
    loss = F.cross_entropy(net(torch.randn(8, 16).to(device)), torch.zeros(8).long().to(device))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 2 == 1:
        net.eval()
        hits = 0
        with torch.no_grad():
            for batch in (32, 32, 20):
                hits += (net(torch.randn(batch, 16).to(device)).argmax(-1) == 1).sum().item()
        print(step, loss.item(), hits)
"""

IMAGES = """
class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outer)
        self.two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.last = nn.BatchNorm2d(outer)
        self.side = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.norm(self.one(x)), inplace=True)
        return F.relu(self.last(self.two(h)) + self.side(x), inplace=True)

model = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                      nn.MaxPool2d(3, 2, 1), Block(16, 16, 1), Block(16, 32, 2),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
model = model.to(device, memory_format=torch.channels_last)
decay = [p for p in model.parameters() if p.ndim > 1]
other = [p for p in model.parameters() if p.ndim <= 1]
opt = torch.optim.SGD([{"params": decay, "weight_decay": 1e-4}, {"params": other}], lr=0.1,
                      momentum=0.9, nesterov=True)
plan = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10)
for step in range(5):
    x = torch.randn(4, 3, 32, 32).to(device, memory_format=torch.channels_last)
    y = torch.randint(10, (4,)).to(device, non_blocking=True)
    with torch.amp.autocast(device_type=device, dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    plan.step()
    top = out.topk(5, 1)[1].eq(y[:, None]).float().sum().item()
    print(loss.item(), top)
"""

DISTILLED = """
teacher = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 10)).to(device).eval()
student = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
for p in teacher.parameters():
    p.requires_grad_(False)
opt = torch.optim.Adam(student.parameters())
for step in range(5):
    x = torch.randn(8, 16, device=device)
    with torch.no_grad():
        wanted = teacher(x).softmax(-1)
    loss = F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
"""

ATTENTION = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))

model = nn.Sequential(nn.Embedding(100, 32), Attention(), nn.LayerNorm(32), nn.Linear(32, 100))
model = model.to(device)
opt = torch.optim.AdamW(model.parameters(), amsgrad=True)
for step in range(5):
    ids = torch.randint(100, (4, 17)).to(device)
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
"""

SCORED = """
import copy
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
average, criterion = copy.deepcopy(model), nn.CrossEntropyLoss(label_smoothing=0.1)
opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
for epoch in range(2):
    for step in range(6):
        x, y = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)
        loss = criterion(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if len(sys.argv) > 2:
            print(loss.item())
    for tried in (model, average):
        with torch.no_grad():
            for batch in range(3):
                x, y = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)
                criterion(tried(x), y).item()
"""

CASES = {
    "amp": (AMP, (), 6),
    "accumulated-2": (ACCUMULATED, ("2",), 5),
    "accumulated-3": (ACCUMULATED, ("3",), 5),
    "accumulated-6": (ACCUMULATED, ("6",), 5),
    "gan": (GAN, (), 5),
    "ppo": (PPO, (), 8),
    "evaluated": (EVALUATED, (), 6),
    "scored": (SCORED, (), 12),
    "images": (IMAGES, (), 5),
    "distilled": (DISTILLED, (), 5),
    "attention": (ATTENTION, (), 5),
}


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(dedent(HEAD) + text, encoding="utf-8")
    return path


@cache
def cost_of(case: str) -> ScriptCost:
    text, words, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        return ours(written(Path(folder), text), *words)


@pytest.mark.parametrize("case", mostly_heavy(CASES, [c for c in CASES if c != "accumulated-3"]))
def test_a_script_does_what_it_does_for_real(case: str, tmp_path: Path) -> None:
    text, words, steps = CASES[case]
    real, cost = really(written(tmp_path, text), *words), cost_of(case)
    assert real.trained == trained(cost) == steps
    assert all_flops(cost) == real.flops > 0
    steady = cost.steady
    assert steady is not None and steady.kind == "training"
    assert matrix_flops(steady) == min(real.steps())
    assert held(steady, "weights") >= sum(real.weights.values())
    assert held(steady, "optimizer") == sum(real.states.values())


REGION = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
region = torch.autocast("cuda", dtype=torch.bfloat16)
for step in range(4):
    for micro in range(2):
        with region:
            loss = model(torch.randn(4, 32, device="cuda")).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(4, 32, device="cuda"))
"""


def test_a_region_of_autocast_stays_on_where_a_turn_begins_inside_of_it(tmp_path: Path) -> None:
    (tmp_path / "region.py").write_text(REGION)
    cost = rt.run([str(tmp_path / "region.py")], chip="l4", steps=4)
    for graph in cost.script.graphs:
        products = [op for op in graph.ops if op.name == "aten.addmm"]
        kinds = [graph.values[op.outputs[0]].dtype for op in products]
        # Two passes in the region; the call after the step, outside of it, begins the next turn.
        assert set(kinds[-4:]) == {"bf16"} and set(kinds[:-4]) <= {"fp32"}, kinds


def test_a_script_that_steps_its_weights_itself_trains(tmp_path: Path) -> None:
    text = """
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
criterion = nn.CrossEntropyLoss()
for step in range(6):
    model.train()
    for part in range(int(sys.argv[2])):
        x, y = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)
        model.zero_grad()
        criterion(model(x), y).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    model.eval()
    with torch.no_grad():
        criterion(model(x), y).item()
"""
    cost = ours(written(tmp_path, text), "3")
    product = 2 * 8 * 32 * (16 + 4)
    step = 2 * product + 2 * 8 * 32 * 4  # the input needs no gradient
    assert trained(cost) == 18 and {matrix_flops(row) for row in training(cost)} == {step}
    tries = [row for row in cost.rows if row.kind == "inference"]
    assert sum(row.turns for row in tries) == 6
    assert {matrix_flops(row) for row in tries} == {product}


def test_a_model_that_is_called_under_gradients_and_never_trained_is_no_training(
    tmp_path: Path,
) -> None:
    text = """
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
for step in range(5):
    model(torch.randn(8, 16).to(device)).sum().item()
"""
    cost = ours(written(tmp_path, text))
    assert [row.kind for row in cost.rows] == ["inference"] * len(cost.rows)
    assert sum(row.turns for row in cost.rows) == 5


def test_a_model_that_is_tried_is_no_training_step() -> None:
    tries = [row for row in cost_of("scored").rows if row.kind == "inference"]
    assert sum(row.turns for row in tries) == 2 * 2 * 3  # epochs, models, batches


def test_a_loss_of_a_step_that_was_not_run_is_the_one_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rt.run([str(written(tmp_path, SCORED)), "cuda", "say"], chip="l4", steps=None)
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert len(losses) == 12 and set(losses[1:]) == {1.0}


BATCHES = """
model = nn.Linear(16, 4).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(12, 16))
for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
    model(x.to(device)).sum().backward()
    opt.step()
"""


def test_a_batch_is_that_of_the_step_that_it_is_loaded_for(tmp_path: Path) -> None:
    cost = ours(written(tmp_path, BATCHES))
    assert all(stretch.batches == stretch.turns for stretch in cost.script.stretches)


def test_synchronised_batch_norm_has_statistics_of_channels(tmp_path: Path) -> None:
    text = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).cuda()
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    model(torch.randn(4, 3, 8, 8, device="cuda")).square().sum().backward()
    opt.step()
    assert [p.grad.shape for p in model[1].parameters()] == [(8,), (8,)]
"""
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    words = ["torchrun", "--nproc_per_node=4", str(tmp_path / "train.py")]
    graph = rt.run(words, chip="l4", steps=None).script.graphs[0]
    (stats,) = [op for op in graph.ops if op.name == "aten.batch_norm_stats"]
    assert [graph.values[value].shape for value in stats.outputs] == [(8,), (8,)]


def test_finding_the_sizes_of_sharded_tensors_is_no_work_of_the_step(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).cuda()
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
net = parallelize_module(net, mesh["tp"], plan)
with torch.device("meta"):
    sharded = fully_shard(nn.Linear(16, 16), mesh=mesh["dp"])
sharded.to_empty(device="cuda")
sharded.reset_parameters()
opt = torch.optim.AdamW(net.parameters(), foreach=True)
for step in range(4):
    net(torch.rand(20, 16, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
"""
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    words = ["torchrun", "--nproc_per_node=8", str(tmp_path / "train.py")]
    cost = rt.run(words, chip="l4", steps=None)
    first, second = 2 * 20 * 16 * 8, 2 * 20 * 8 * 8  # of a rank: a quarter of the inner features
    wanted = first + second + first + 2 * second  # the input needs no gradient
    assert [matrix_flops(row) for row in cost.rows] == [wanted] * len(cost.rows)
    assert trained(cost) == 4


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_a_sparse_tensor_of_the_host_has_on_the_device_what_it_stores(
    tmp_path: Path, layout: str
) -> None:
    stored, rows, width = 500, 100, 32
    text = f"""
import torch
places = torch.randperm({rows * rows})[:{stored}]
places = torch.stack([places // {rows}, places % {rows}])
graph = torch.sparse_coo_tensor(places, torch.ones({stored}), ({rows}, {rows}))
graph = graph.coalesce().to_sparse(layout=torch.{layout}).cuda()
assert graph.values().numel() == {stored} and graph.is_cuda
assert graph.cpu().values().numel() == {stored} and not graph.cpu().is_cuda
model = torch.nn.Linear({width}, {width}, bias=False).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    (graph @ model(torch.ones({rows}, {width}, device="cuda"))).sum().backward()
    opt.step()
"""
    cost = ours(written(tmp_path, text))
    ops = cost.script.graphs[-1].ops
    products = [op.facts["stored"] for op in ops if op.name == "aten.mm" and "stored" in op.facts]
    assert products == [stored, stored]  # forward, and the transposed one in backward
    assert cost.steps[-1].flops < 2 * (2 * rows * width * width + 2 * stored * width) * 1.1
