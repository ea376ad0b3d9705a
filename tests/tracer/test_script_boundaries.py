"""Where turns begin: steps by hand, steps without modules, and boundaries that a user asks for."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.errors import RequestError
from tests.tracer.script_oracle import all_flops, matrix_flops, really, training

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)

BY_HAND = """
import sys
import torch
from torch import nn
device = sys.argv[1]
encoder, decoder = nn.Linear(16, 32).to(device), nn.Linear(32, 4).to(device)
weights = [*encoder.parameters(), *decoder.parameters()]
for step in range(7):
    x, y = torch.randn(8, 16).to(device), torch.randint(4, (8,)).to(device)
    nn.functional.cross_entropy(decoder(encoder(x).relu()), y).backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 0.1 * weight.grad
            weight.grad = None
    if step % 3 == 2:
        with torch.no_grad():
            decoder(encoder(torch.randn(4, 16).to(device)).relu())
"""

WITHOUT_MODULES = """
import sys
import torch
from torch.profiler import record_function
device = sys.argv[1]
up = torch.randn(16, 32, device=device, requires_grad=True)
down = torch.randn(32, 4, device=device, requires_grad=True)
optimizer = torch.optim.SGD([up, down], lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randint(4, (48,)))
profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    with record_function("one step"):
        out = (x.to(device) @ up).relu() @ down
        torch.nn.functional.cross_entropy(out, y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if len(sys.argv) > 2:
        torch.cuda.nvtx.range_push("between")
        torch.cuda.nvtx.range_pop()
        profiler.step()
"""

SAMPLING = """
import torch
from torch import nn
text, image = nn.Linear(16, 16).cuda(), nn.Linear(16, 16).cuda()
prompts = torch.utils.data.DataLoader(torch.randn(40, 16), batch_size=4)
with torch.inference_mode():
    for prompt in prompts:
        known, x = text(prompt.cuda()), torch.randn(4, 16, device="cuda")
        for step in range(5):
            x = image(x + known)
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


@cache
def real_flops(text: str) -> int:
    """FLOPs of a script that runs for real."""
    with tempfile.TemporaryDirectory() as folder:
        return really(written(Path(folder), text)).flops


def test_a_step_by_hand_ends_with_its_backward(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    cost = rt.run([str(path), "cuda"], chip="l4", steps=None)
    assert sum(row.turns for row in training(cost)) == 7
    assert sum(row.turns for row in cost.rows if row.kind == "inference") == 2 * 2
    assert all_flops(cost) == real_flops(BY_HAND) > 0
    (graph,) = [g for phase, g in cost.script.by_phase().items() if phase == "training"]
    assert {"forward", "backward", "optimizer"} == {op.part for op in graph.ops}


def test_steps_by_hand_are_counted_for_the_end(tmp_path: Path) -> None:
    cost = rt.run([str(written(tmp_path, BY_HAND)), "cuda"], chip="l4", steps=4)
    assert sum(row.turns for row in training(cost)) == 4


def test_a_script_without_modules_has_the_steps_of_its_optimizer(tmp_path: Path) -> None:
    path = written(tmp_path, WITHOUT_MODULES)
    cost = rt.run([str(path), "cuda"], chip="l4", steps=None)
    (row,) = cost.rows
    assert (row.kind, row.turns) == ("training", 5)  # the first is before the optimizer is known
    assert 6 * matrix_flops(row) == real_flops(WITHOUT_MODULES) > 0
    assert "the first one is not recorded" in "".join(cost.script.said.values())


@pytest.mark.parametrize(
    ("boundary", "turns"),
    [("batch", 6), ("optimizer", 5), ("mark=one step", 6), ("mark=between", 6), ("mark=step", 6)],
)
def test_a_turn_begins_where_the_user_says(boundary: str, turns: int, tmp_path: Path) -> None:
    path = written(tmp_path, WITHOUT_MODULES)
    cost = rt.run([str(path), "cuda", "marks"], chip="l4", steps=None, boundary=boundary)
    # What runs after the last mark of this kind is a turn of its own only if it does something.
    before = boundary in ("mark=between", "mark=step")
    assert sum(row.turns for row in cost.rows) == turns - before
    steady = cost.steady
    assert steady is not None and steady.kind == "training"
    assert 6 * matrix_flops(steady) == real_flops(WITHOUT_MODULES)


def test_a_batch_may_be_a_turn_of_many_calls(tmp_path: Path) -> None:
    path = written(tmp_path, SAMPLING)
    calls = rt.run([str(path)], chip="l4", steps=None)
    assert sum(row.turns for row in calls.rows) == 10 * (1 + 5)
    batches = rt.run([str(path)], chip="l4", steps=None, boundary="batch")
    first, row = batches.rows  # in the first, the second module has no name yet
    assert (first.turns, row.turns, row.stretch.run) == (1, 9, 2)  # equal ones are counted
    assert matrix_flops(row) == (1 + 5) * 2 * 4 * 16 * 16
    assert all_flops(batches) == all_flops(calls)


def test_a_call_may_be_a_turn(tmp_path: Path) -> None:
    path = written(tmp_path, BY_HAND)
    cost = rt.run([str(path), "cuda"], chip="l4", steps=None, boundary="call")
    assert all_flops(cost) == real_flops(BY_HAND)
    assert sum(row.turns for row in cost.rows) == 2 * 7 + 2 * 2


def test_a_mark_that_never_comes_names_those_that_came(tmp_path: Path) -> None:
    path = written(tmp_path, WITHOUT_MODULES)
    with pytest.raises(RequestError, match=r"never came to it; .*did you mean 'one step'\?"):
        rt.run([str(path), "cuda"], chip="l4", boundary="mark=one_step")
    with pytest.raises(RequestError, match=r"--boundary 'bach'.*did you mean 'batch'\?"):
        rt.run([str(path), "cuda"], chip="l4", boundary="bach")
    with pytest.raises(RequestError, match="--boundary 'mark': expected"):
        rt.run([str(path), "cuda"], chip="l4", boundary="mark")


def test_what_a_thread_runs_counts_in_the_turn_in_which_it_runs(tmp_path: Path) -> None:
    text = """
import queue, threading
import torch
net, other = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(net.parameters())
asked, done = queue.Queue(), queue.Queue()

def serve():
    while asked.get(timeout=60):
        with torch.no_grad():
            other(torch.ones(4, 8, device="cuda"))
        done.put(1)

thread = threading.Thread(target=serve)
for step in range(5):
    net(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    if step == 0:
        thread.start()
    asked.put(1)
    done.get(timeout=60)
asked.put(0)
thread.join()
"""
    cost = rt.run([str(written(tmp_path, text))], chip="l4", steps=None)
    product = 2 * 4 * 8 * 8
    assert sum(row.turns for row in cost.rows) == 5
    # Forward, the gradient of the weights, and what the thread computes.
    assert {matrix_flops(row) for row in cost.rows} == {3 * product}


def test_ops_outside_of_turns_are_told(tmp_path: Path) -> None:
    path = written(tmp_path, "import torch\na = torch.ones(8, 8, device='cuda')\nb = a @ a\n")
    cost = rt.run([str(path)], chip="l4")
    assert not cost.rows and cost.script.outside == 2
    assert "2 ops ran on the device, none of them in a call" in str(cost)
