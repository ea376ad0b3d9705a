"""One graph of a whole turn, from the graphs of its pieces."""

import contextlib
import io
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates import ScriptCost
from rooftrace.costmodels.ops import MATRIX
from tests.tracer.script_oracle import all_flops, ours, really, training

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

ACCUMULATED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = nn.Sequential(nn.Linear(16, 32), *[Block() for _ in range({layers})]).cuda()
opt = torch.optim.AdamW(model.parameters())
for step in range(5):
    for micro in range({passes}):
        loss = model(torch.randn(8, 16).cuda()).square().mean() / {passes}
        loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
"""


DECODED = """
import torch
from torch import nn
torch.set_default_tensor_type(torch.cuda.HalfTensor)

class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(outputs, inputs))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), Linear(64, 100)
        self.layers = nn.ModuleList(Linear(64, 64) for _ in range(3))

    @torch.inference_mode()
    def forward(self, tokens, start):
        h = self.embed(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h)

decoder, tokens = Decoder(), torch.zeros(2, 7, dtype=torch.long)
for start in range(5):
    decoder.forward(tokens if start == 0 else tokens[:, :1], start)
"""

SUMMED = """
import torch
from torch import nn
model = nn.Linear(64, 32).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 64).cuda()
for step in range(3):
    for micro in range(8):
        loss = model(x).square().mean() / 8
        loss.backward()
    opt.step()
    opt.zero_grad()
    print(loss.item())
with torch.no_grad():
    print(sum(model(x).mean().item() for _ in range(6)))
"""


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_a_forward_called_by_its_name_is_a_call(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(DECODED)
    cost = rt.run([str(script)], chip="a100-sxm-40", steps=5)
    labels = [row.label for row in cost.rows for _ in range(row.turns)]
    assert labels == ["Decoder([2, 7])"] + 4 * ["Decoder([2, 1])"]
    products = 2 * 2 * (3 * 64 * 64 + 64 * 100)
    for row, tokens in zip(cost.rows[:2], (7, 1), strict=True):
        assert row.parts[0][0].plan.total.flops(MATRIX) == tokens * products
        assert row.parts[0][0].memory.weights == 2 * (2 * 64 * 100 + 3 * 64 * 64)


def test_what_reads_the_result_of_a_call_that_was_counted_is_no_gap(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(SUMMED)
    with contextlib.redirect_stdout(io.StringIO()):
        cost = rt.run([str(script)], chip="a100-sxm-40", steps=None)
    kinds = [row.kind for row in cost.rows for _ in range(row.turns)]
    assert kinds == 3 * ["training"] + 6 * ["inference"]
    assert cost.steady is not None
    assert cost.steady.flops > 8 * 2 * 2 * 8 * 64 * 32
    assert "not everything was recorded" not in str(cost)


def run(folder: Path, layers: int, passes: int) -> ScriptCost:
    script = folder / "t.py"
    script.write_text(ACCUMULATED.format(layers=layers, passes=passes))
    with contextlib.redirect_stdout(io.StringIO()):
        return rt.run([str(script)], chip="a100-sxm-40", steps=4)


@pytest.mark.parametrize("layers", [2, 8], ids=["few", "rolled"])
def test_one_graph_costs_what_its_pieces_cost(layers: int, tmp_path: Path) -> None:
    cost = run(tmp_path, layers, 6)
    row = cost.steady
    assert row is not None and len(row.parts) > 1
    graph = cost.script.by_phase()["training"]
    for whole in (graph, graph.expand()):
        step = rt.estimate(whole, cost.chip, cost.execution)
        assert (step.flops, step.kernels) == (row.flops, row.kernels)
        assert step.plan.total.flops(MATRIX) == sum(
            part.plan.total.flops(MATRIX) * times for part, times in row.parts
        )
        assert step.bytes_hbm == row.bytes_hbm
        assert step.t_est == pytest.approx(row.t_est, rel=0.02)
        weights = 4 * (16 * 32 + 32 + layers * (2 * 32 * 64 + 96))
        assert step.memory.weights == pytest.approx(weights, abs=4096)
        assert step.memory.optimizer == pytest.approx(2 * weights, abs=8192)
        assert step.memory.peak == pytest.approx(row.peak, rel=0.1)
    assert graph.phase == "training"
    assert graph.workload["items"] == 6 * 8
    assert graph.workload["optimizer"] == "adamw"


def test_gradients_of_a_further_pass_are_those_of_the_first(tmp_path: Path) -> None:
    cost = run(tmp_path, 2, 6)
    weights = 4 * (16 * 32 + 32 + 2 * (2 * 32 * 64 + 96))
    assert cost.steady is not None
    for step, _ in cost.steady.parts:
        graph = step.plan.source
        names = [
            tensor.name
            for place, tensor in enumerate(graph.values)
            if tensor.role == "gradients" and tensor.storage == place
        ]
        assert len(names) == len(set(names)) <= 10
        assert step.memory.gradients <= weights + 4096


TRACED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16 * 16, 10)

    def forward(self, x):
        x = self.conv(x).relu()
        return self.fc(x.view(x.size(0), -1))

model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
image = torch.zeros(2, 3, 16, 16, device="cuda")
traced = torch.jit.trace(model, image, check_trace=False)
assert "aten::_convolution" in str(traced.inlined_graph)
assert "aten::linear" in str(traced.inlined_graph)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(3, 3, 16, 16, device="cuda")).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    traced(torch.ones(5, 3, 16, 16, device="cuda"))
"""


def test_a_traced_model_costs_what_it_runs(tmp_path: Path) -> None:
    """torch.jit.trace runs the model once; by hand, as PyTorch's counter breaks such a trace."""
    script = tmp_path / "train.py"
    script.write_text(TRACED, encoding="utf-8")
    cost = rt.run([str(script)], chip="l4", steps=None)
    convolution, linear = 2 * 8 * 27 * 16 * 16, 2 * 8 * 16 * 16 * 10  # of one image, forward
    forward = convolution + linear
    step = 3 * (3 * forward - convolution)  # images have no gradient
    assert all_flops(cost) == 2 * forward + 3 * step + 5 * forward
    assert [row.turns for row in cost.rows if row.kind == "inference"] == [1]


TRACES = """
import re, sys, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    def forward(self, x):
        return torch.relu(self.conv(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.fc = nn.ModuleList(Block() for _ in "abc"), nn.Linear(12, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.fc(x.view(x.size(0), -1)) + 1

model, image = Net().to(sys.argv[1]), torch.Tensor(1, 3, 8, 8).fill_(1).to(sys.argv[1])
with torch.no_grad():
    traces = [torch.jit.trace(model, image) for _ in range(3)]
with open(sys.argv[2], "w") as file:
    for part in (part for trace in traces for part in (trace, trace.fc, *trace.blocks.children())):
        file.write(f"{re.findall('aten::[a-z_]+', str(part.graph))}\\n")
"""


def test_traces_have_the_ops_of_a_trace_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them, with the check that torch makes of it, though calls repeat."""
    script = tmp_path / "train.py"
    script.write_text(TRACES, encoding="utf-8")
    rt.run([str(script), "cuda", str(tmp_path / "ours")], chip="l4", steps=None)
    monkeypatch.setattr(sys, "argv", [str(script), "cpu", str(tmp_path / "real")])
    runpy.run_path(str(script))
    assert (tmp_path / "ours").read_text() == (tmp_path / "real").read_text()


PAIR = """
import sys
import torch
from torch import nn

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Half(), Half()

    def forward(self, x):
        return self.other(self.one(x))

pair = Pair().to(sys.argv[1])
for step in range(3):
    pair.one.forward(torch.randn(4, 8).to(sys.argv[1]))
    pair.forward(torch.randn(4, 8).to(sys.argv[1]))
"""


def calls(cost: ScriptCost) -> Counter[str]:
    """How many turns without gradients have which label."""
    rows = [row for row in cost.rows if row.kind == "inference"]
    return sum((Counter({row.label: row.turns}) for row in rows), Counter())


def test_a_forward_called_by_its_name_calls_others_that_were(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(PAIR)
    real, cost = really(script), ours(script)
    assert all_flops(cost) == real.flops > 0
    assert calls(cost) == {"Half([4, 8])": 3, "Pair([4, 8])": 3}


PARTS = """
import sys
import torch
from torch import nn
device = sys.argv[1]

class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.body, self.value = nn.Flatten(), nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.value(torch.relu(self.body(self.flat(x))))

    @torch.no_grad()
    def worth(self, x):
        return self.value(torch.relu(self.body(self.flat(x))))

class Loss(nn.Module):
    def forward(self, out):
        return out.square().mean()

actor, loss = Actor().to(device), Loss()
opt = torch.optim.SGD(actor.parameters(), lr=0.1)
for update in range(4):
    with torch.no_grad():
        for step in range(6):
            actor(torch.randn(4, 2, 4).to(device))
        actor.worth(torch.randn(4, 2, 4).to(device))
        actor.worth(torch.randn(4, 2, 4).to(device))
    h = actor.body(actor.flat(torch.randn(6, 2, 4).to(device)))
    loss(actor.value(torch.relu(h))).backward()
    opt.step()
    opt.zero_grad()
"""


def test_parts_that_one_method_calls_are_one_call(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(PARTS)
    real, cost = really(script), ours(script)
    assert all_flops(cost) == real.flops > 0
    assert calls(cost) == {"Actor([4, 2, 4])": 24, "Linear([4, 8])": 8}
    assert {row.label for row in training(cost)} == {"Linear([6, 8])"}
