"""Scripts whose weights are computed, updated in hooks, or have sparse gradients, as they really
are."""

from pathlib import Path

import pytest
import torch

import rooftrace as rt
from tests.tracer.script_oracle import all_flops, held, ours, really, trained, training
from tests.tracer.test_scripts import written

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]

NORMED = """
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
norm = dict(old_weight=weight_norm, old_spectral=spectral_norm,
            weight=parametrizations.weight_norm, spectral=parametrizations.spectral_norm)
model = nn.Sequential(norm[sys.argv[2]](nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4))
first = next(model.parameters())
moved = getattr(model, sys.argv[3])().to(device) if sys.argv[3] != "late" else model
if sys.argv[3] == "late":
    model(torch.randn(2, 16))
    moved = model.to(device)
assert next(model.parameters()) is first and moved is model
dtype = first.dtype
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    opt.zero_grad()
    model(torch.randn(8, 16, dtype=dtype).to(device)).float().square().mean().backward()
    opt.step()
"""


@pytest.mark.parametrize("move", ["float", "double", "late"])
@pytest.mark.parametrize("norm", ["old_weight", "old_spectral", "weight", "spectral"])
def test_weights_that_are_computed_from_others_move(norm: str, move: str, tmp_path: Path) -> None:
    script = written(tmp_path, NORMED)
    real, cost = really(script, norm, move), ours(script, norm, move)
    assert trained(cost) == real.trained == 4
    before = 2 * 2 * 16 * 32 + 2 * 2 * 32 * 4  # on the host, before the model moved
    assert all_flops(cost) == real.flops - (before if move == "late" else 0) > 0


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_computed_weights_move_in_low_precision(cast: str, tmp_path: Path) -> None:
    cost = ours(written(tmp_path, NORMED), "old_weight", cast)
    assert trained(cost) == 4
    assert held(training(cost)[-1], "weights") >= 2 * (16 * 32 + 32 + 32 + 32 * 4 + 4)


STALE = """
model = torch.nn.utils.weight_norm(nn.Linear(4, 4))
loss = model(torch.randn(2, 4)).sum()
model.to(device)
loss.backward()
"""


def test_a_backward_through_weights_that_moved_since_says_so(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="move the module first, then run its forward and backward"):
        ours(written(tmp_path, STALE))


HOOKED = """
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def hook(p):
    opts[p].step()
    opts[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(hook)
for step in range(5):
    model(torch.randn(4, 64).to(device)).square().mean().backward()
"""


def test_optimizers_in_hooks_step_in_a_script(tmp_path: Path) -> None:
    script = written(tmp_path, HOOKED)
    cost = ours(script)
    assert all_flops(cost) == really(script).flops * sum(r.turns for r in cost.rows) // 5 > 0
    row = training(cost)[-1]
    assert held(row, "gradients") == 4 * (64 * 64 + 64)  # one layer's at a time


SPARSE = """
model = nn.EmbeddingBag(5000, 16, mode="sum", sparse=True).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
offsets = torch.arange(0, 64, 4).to(device)
for step in range(6):
    loss = model(torch.randint(0, 5000, (64,)).to(device), offsets).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_sparse_gradients_live_until_a_script_zeroes_them(tmp_path: Path) -> None:
    cost = ours(written(tmp_path, SPARSE))
    assert trained(cost) == 6
    row = training(cost)[-1]
    step = row.parts[-1][0]
    assert held(row, "gradients") <= 2 * 64 * (16 * 4 + 8)
    assert step.memory.peak < 4 * 5000 * 16 + 6 * 64 * 16 * 4
    assert not [a for a in step.graph.assumptions if a.kind == "sparse"]


WHOLE = """
@torch.compile(dynamic=False, fullgraph=True)
def update(p, g):
    p.add_(g, alpha=-0.1)
model = nn.Linear(64, 64).to(device)
for step in range(6):
    model(torch.randn(4, 64).to(device)).sum().backward()
    for p in model.parameters():
        update(p.data, p.grad)
    model.zero_grad()
"""


def test_whole_graphs_outside_of_modules_run_in_a_script(tmp_path: Path) -> None:
    cost = ours(written(tmp_path, WHOLE))
    product = 2 * 4 * 64 * 64
    assert all_flops(cost) == 2 * product * sum(row.turns for row in cost.rows) > 0


TEMPERATURE = """
model = nn.Linear(8, 4).to(device)
log_alpha = nn.Parameter(torch.tensor(0.5))  # stays on the host
gain = nn.Parameter(torch.tensor(1.0))
gain.data = gain.data.to(device)
opts = [torch.optim.Adam(weights) for weights in (model.parameters(), [log_alpha], [gain])]
for step in range(4):
    for opt in opts:
        opt.zero_grad()
    out = model(torch.randn(16, 8).to(device)) * gain
    (log_alpha * (out + 1.0).detach() + out * log_alpha.exp()).mean().backward()
    assert log_alpha.grad.device.type == "cpu" and gain.grad.device.type == device
    for opt in opts:
        opt.step()
"""


def test_a_value_of_the_host_is_trained_beside_the_device(tmp_path: Path) -> None:
    script = written(tmp_path, TEMPERATURE)
    real, cost = really(script), ours(script)
    assert trained(cost) == real.trained == 4
    assert all_flops(cost) == real.flops > 0
    assert held(training(cost)[-1], "optimizer") == 2 * 4 * (8 * 4 + 4 + 1)


MAPPED = """
import torch
torch.save({"weight": torch.arange(4.0)}, "mine.pt")
assert torch.load("mine.pt", mmap=True)["weight"].tolist() == [0, 1, 2, 3]
torch.nn.Linear(4, 4).cuda()(torch.ones(1, 4, device="cuda"))
"""


def test_a_checkpoint_in_the_scratch_folder_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maps.py").write_text(MAPPED)
    cost = rt.run(["maps.py"], scratch=tmp_path / "scratch")
    assert len(cost.rows) == 1
    assert not (tmp_path / "mine.pt").exists()
