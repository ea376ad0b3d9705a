"""Scripts that differentiate with torch.func have the FLOPs of a real step on the CPU."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.scripts.steps import ScriptError

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

HEAD = """
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def loss(weights, x, y):
    return (functional_call(net, weights, (x,)) - y).square().mean()

def step():
    x, y = torch.randn(8, 16, device=device), torch.randn(8, 1, device=device)
    weights = dict(net.named_parameters())
"""
PER_SAMPLE = """
    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)
    for name, weight in weights.items():
        weight.grad = each[name].mean(0)
"""
META = """
    gradients = grad(loss)(weights, x, y)
    loss({n: w - 0.1 * gradients[n] for n, w in weights.items()}, x, y).backward()
"""
TAIL = """
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("body", [PER_SAMPLE, META])
def test_a_step_in_transforms_has_the_flops_of_a_real_one(tmp_path: Path, body: str) -> None:
    text = HEAD + body + TAIL
    path = tmp_path / "train.py"
    path.write_text("device = 'cuda'" + text + "\nfor _ in range(4):\n    step()\n")
    cost = rt.run([str(path)], chip="l4", steps=None)
    there: dict[str, object] = {"device": "cpu"}
    exec(text, there)
    with FlopCounterMode(display=False) as counter:
        there["step"]()  # type: ignore[operator]
    assert [row.kind for row in cost.rows for _ in range(row.turns)] == ["training"] * 4
    for step in cost.steps:
        ran = sum(op.flops_torch or 0 for op in step.plan.source.ops)
        assert ran == counter.get_total_flops()


@pytest.mark.slow
def test_an_export_of_what_is_on_the_device_is_refused_and_one_from_the_host_runs(
    tmp_path: Path,
) -> None:
    text = "import torch\nnet, x = torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
    path = tmp_path / "export.py"
    path.write_text(f"{text}torch.export.export(net.cuda(), (x.cuda(),))\n")
    with pytest.raises(ScriptError, match="with the module and its inputs on the CPU"):
        rt.run([str(path)], chip="l4")
    path.write_text(f"{text}torch.export.export(net, (x,)).module().cuda()(x.cuda())\n")
    (row,) = rt.run([str(path)], chip="l4").rows
    assert row.flops == 2 * 2 * 4 * 4 + 2 * 4  # with the bias
