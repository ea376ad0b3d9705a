"""Turns of scripts that train one model after the other, and of steps that are all one CUDA graph.

Products of a step are counted by hand.
"""

from pathlib import Path

import pytest
import torch

import rooftrace as rt

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

IN_A_ROW = """
import torch
from torch import nn
kept = []
for width in (32, 64, 128, 256):
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 1)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    average = torch.optim.swa_utils.AveragedModel(net)
    kept.append((net, optimizer))
    for _ in range(5):
        net(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(net)
    EVALUATION
"""
EVALUATION = """
    with torch.no_grad():
        net(torch.randn(16, 64, device="cuda"))
"""
WHOLE_GRAPH = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).cuda()
optimizer = torch.optim.Adam(net.parameters(), capturable=True)
x, graph = torch.randn(16, 64, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    net(x).sum().backward()
    optimizer.step()
for _ in range(5):
    x.copy_(torch.randn(16, 64))
    graph.replay()
"""


def products(tmp_path: Path, script: str) -> list[int]:
    """FLOP of matrix products of each training step."""
    path = tmp_path / "train.py"
    path.write_text(script)
    cost = rt.run([str(path)], chip="l4", steps=None)
    return [
        sum(op.flops_torch or 0 for step, _ in row.parts for op in step.plan.source.ops)
        for row in cost.rows
        for _ in range(row.turns)
        if row.kind == "training"
    ]


def of_step(width: int) -> int:
    """Both layers forward and for their weights, and the second one for its input."""
    return 2 * 16 * width * (2 * 64 + 3)


@pytest.mark.parametrize("evaluation", ["", EVALUATION])
def test_a_model_after_another_has_steps_of_its_own(tmp_path: Path, evaluation: str) -> None:
    script = IN_A_ROW.replace("    EVALUATION\n", evaluation)
    assert products(tmp_path, script) == [
        of_step(width) for width in (32, 64, 128, 256) for _ in range(5)
    ]


def test_each_replay_of_a_whole_step_is_a_turn(tmp_path: Path) -> None:
    assert products(tmp_path, WHOLE_GRAPH) == [of_step(128)] * 5
