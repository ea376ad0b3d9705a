"""What trainers of large models do: graphs, sharded weights, parallel groups, modules run."""

import contextlib
import io
import sys
from pathlib import Path

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.estimates import ScriptCost, TurnCost
from rooftrace.scripts.steps.presenting import Shapes
from tests.tracer.script_oracle import held, matrix_flops, training

if torch.cuda.is_available():
    pytest.skip("a GPU answers for itself", allow_module_level=True)


def run(folder: Path, text: str, *words: str, steps: int | None = 3) -> ScriptCost:
    script = folder / "train.py"
    script.write_text(text)
    with contextlib.redirect_stdout(io.StringIO()):
        return rt.run([*words, str(script)], chip="h100-sxm", steps=steps)


def steps_of(cost: ScriptCost) -> list[TurnCost]:
    return [row for row in training(cost) for _ in range(row.turns)]


# -- CUDA graphs -----------------------------------------------------------------------------------

FLEX = """
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

attend = torch.compile(flex_attention, options={"max_autotune": True})
stream, empty = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(empty, stream=stream):  # to make its pool, before any module runs
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def inside(self, x, mask):
        q = self.inner(x).view(2, 128, 4, 16).transpose(1, 2)
        return attend(q, q, q, block_mask=mask).transpose(1, 2).reshape(2, 128, 64)

    def forward(self, x, mask):
        return self.out(checkpoint(self.inside, x, mask, use_reentrant=False))

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 128, 128, device="cuda")
x = torch.randn(2, 128, 64, device="cuda")

def forward_backward():
    net(x, mask).sum().backward()

graph = None
for step in range(4):
    optimizer.zero_grad(set_to_none=False)
    if step == 1:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            forward_backward()
    if graph is None:
        forward_backward()
    else:
        graph.replay()
    optimizer.step()
"""


def test_replays_of_flex_attention_cost_what_running_it_costs(tmp_path: Path) -> None:
    cost = run(tmp_path, FLEX)
    linear = 2 * (2 * 128) * 64 * 64
    pairs = 2 * 4 * 128 * 128  # of queries and keys
    # Both layers forward and the gradient of each weight; of the input only for the second.
    wanted = 2 * linear + 3 * linear + 3 * (2 * 2 * pairs * 16)
    assert [matrix_flops(row) for row in steps_of(cost)] == [wanted] * 3
    assert cost.execution_name == "eager"  # its attention alone is compiled
    eager, replayed = (row.parts[0][0].graph for row in (training(cost)[0], training(cost)[-1]))
    parts = [{op.part for op in graph.expand().ops} for graph in (eager, replayed)]
    assert parts[0] <= parts[1] and "recompute" in parts[1]


# -- sharded weights -------------------------------------------------------------------------------

SHARDED = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("dp",))
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)]).cuda()
for part in net:
    fully_shard(part, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    for chunk in range(2):  # the second forward is of states that know their streams
        net(torch.randn(16, 64, device="cuda")).sum().backward()
        torch.accelerator.current_stream().wait_stream(torch.cuda.current_stream())
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier(device_ids=[torch.cuda.current_device()])
    if step == 0:
        dist.distributed_c10d._set_pg_timeout(__import__("datetime").timedelta(seconds=9))
    assert net[0][0].weight.device_mesh.device_type == "cuda"
"""


def test_sharded_modules_of_a_script_keep_their_streams(tmp_path: Path) -> None:
    cost = run(tmp_path, SHARDED, "torchrun", "--nproc_per_node=8")
    linear = 2 * 16 * 64 * 64
    assert [matrix_flops(row) for row in steps_of(cost)] == [2 * (5 * linear)] * 3
    weights = 2 * 4 * (64 * 64 + 64) // 8
    assert held(training(cost)[-1], "optimizer") == 2 * weights


OFFLOADED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("dp",))
policy = {policy}()
net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2)])
for part in (*net, net):
    fully_shard(part, mesh=mesh, offload_policy=policy)
net.to_empty(device="cpu" if isinstance(policy, CPUOffloadPolicy) else "cuda")
optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
for step in range(4):
    for chunk in range({chunks}):
        net(torch.randn(16, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COPIES = ("rooftrace.from_host", "rooftrace.to_host")


def exchanged(graph: rt.types.OpGraph) -> list[object]:
    return [(op.part, op.name) for op in graph.expand().ops if op.collective]


def test_weights_that_fsdp_keeps_on_the_host_are_copied_there_and_back(tmp_path: Path) -> None:
    shards, made = 2 * 4 * (64 * 64 + 64) // 4, []
    for policy, chunks in (("OffloadPolicy", 1), ("CPUOffloadPolicy", 1), ("CPUOffloadPolicy", 2)):
        text = OFFLOADED.format(policy=policy, chunks=chunks)
        cost = run(tmp_path, text, "torchrun", "--nproc_per_node=4")
        made.append(training(cost)[-1].parts[0][0])
    plain, once, twice = made
    assert exchanged(plain.graph) == exchanged(once.graph) and exchanged(plain.graph)
    for estimate, chunks in ((once, 1), (twice, 2)):
        ops = estimate.graph.expand().ops
        values = estimate.graph.expand().values
        back, there = (
            sum(values[op.outputs[0]].nbytes for op in ops if op.name == name) for name in COPIES
        )
        assert (back, there) == (2 * shards * chunks, shards * chunks)
        memory = estimate.memory
        assert memory.weights == memory.gradients == memory.optimizer == 0
        assert not any(op.kind in ("kernel", "sync") for op in ops if op.part == "optimizer")
    # Copies of shards are there until they are gathered, gradients until they are on the host.
    freed = plain.memory.weights + plain.memory.gradients + plain.memory.optimizer
    assert freed == shards * 4
    assert 0 <= once.memory.peak - (plain.memory.peak - freed) <= shards


COPIED = """
import torch
from torch import nn
net = nn.Linear(64, 64).cuda()
optimizer, kept = torch.optim.SGD(net.parameters(), 0.1), torch.empty(16, 64, pin_memory=True)
for step in range(4):
    y = net(torch.randn(16, 64, device="cuda"))
    {copy}
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("copy", "waits"),
    [
        ("y.detach().cpu()", 1),
        ('y.detach().to("cpu", non_blocking=True)', 0),
        ("kept.copy_(y.detach())", 1),
        ("kept.copy_(y.detach(), non_blocking=True)", 0),
    ],
)
def test_a_copy_to_the_host_goes_over_its_link(copy: str, waits: int, tmp_path: Path) -> None:
    graph = training(run(tmp_path, COPIED.format(copy=copy)))[-1].parts[0][0].graph.expand()
    (there,) = (op for op in graph.ops if op.name == "rooftrace.to_host")
    assert graph.values[there.inputs[0]].nbytes == 4 * 16 * 64
    assert sum(op.kind == "sync" for op in graph.ops) == waits


TENSOR_PARALLEL = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.distributed.tensor import Shard

mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))

plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel()}
net = parallelize_module(Net().cuda(), mesh, plan)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    net(torch.randn(4, 8, 32, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_rms_norm_over_shards_of_a_sequence(tmp_path: Path) -> None:
    if torch.__version__ < "2.9":
        pytest.skip("RMS norm is spelled out before torch 2.9")
    cost = run(tmp_path, TENSOR_PARALLEL, "torchrun", "--nproc_per_node=2")
    linear = 2 * (4 * 2 * 8) * 32 * 64 // 2  # each of two ranks has 8 of 16 tokens, half the width
    assert [matrix_flops(row) for row in steps_of(cost)] == [2 * 3 * linear] * 3


COALESCED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager

class Replicas(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.buffers = module, [torch.zeros(3)]  # the name of a method

    def forward(self, x):
        return self.module(x)

dist.init_process_group("nccl")
net = Replicas(nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    net(torch.randn(4, 8, device="cuda")).sum().backward()
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as work:
        for weight in net.parameters():
            dist.all_reduce(weight.grad)
    work.wait()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_coalesced_collectives_are_one_and_can_be_waited_for(tmp_path: Path) -> None:
    cost = run(tmp_path, COALESCED, "torchrun", "--nproc_per_node=4")
    sent = [e.collective for e in steps_of(cost)[-1].parts[0][0].graph.ops if e.collective]
    assert [(item.kind, item.bytes) for item in sent] == [("all_reduce", 4 * (8 * 8 + 8))]


# -- steps and optimizers --------------------------------------------------------------------------

LOANED = """
import torch
from torch import nn

net = nn.Linear(8, 8).cuda()
weights = list(net.parameters())
optimizer = torch.optim.Adam(weights)
optimizer.param_groups[0]["params"] = []  # they are there while it steps
for step in range(4):
    net(torch.randn(4, 8, device="cuda")).sum().backward()
    bad = torch.zeros([1], device="cuda")
    for weight in weights:
        grad = weight.grad
        bad += torch.isfinite(grad.amax()).logical_and(torch.isfinite(grad.amin())).logical_not()
    if bad.bool().byte()[0].item():
        continue
    optimizer.param_groups[0]["params"] = weights
    optimizer.step()
    optimizer.param_groups[0]["params"] = []
    net.zero_grad()
"""


def test_an_optimizer_that_has_weights_only_while_it_steps(tmp_path: Path) -> None:
    cost = run(tmp_path, LOANED)
    assert len(steps_of(cost)) == 3 and len(training(cost)) == len(cost.rows)
    assert held(training(cost)[-1], "optimizer") == 2 * 4 * (8 * 8 + 8)
    assert "finite" in " ".join(text for step in cost.steps for text in _assumed(step.graph))


def _assumed(graph: object) -> list[str]:
    return [item.text for item in graph.assumptions]  # type: ignore[attr-defined]


MOVED = """
import weakref
import torch
from torch import nn

net = nn.Linear(4, 4)
net.weight.parallel, calls = True, []
net.weight.register_post_accumulate_grad_hook(lambda weight: calls.append("after"))
net.bias.register_hook(lambda gradient: calls.append("on"))
weak = weakref.ref(net.bias)
net.cuda()
assert net.weight.parallel and net.weight.is_cuda and weak() is net.bias
net(torch.ones(2, 4, device="cuda")).sum().backward()
assert sorted(calls) == ["after", "on"], calls
"""


def test_weights_that_move_keep_what_hangs_on_them(tmp_path: Path) -> None:
    run(tmp_path, MOVED, steps=None)


def test_a_tensor_on_meta_is_known_under_vmap() -> None:
    shapes, there = Shapes(), list[bool]()
    own, other = torch.empty(3, 4, device="meta"), torch.empty(3, 4, device="meta")
    shapes.add(own)
    torch.vmap(lambda x, y: there.extend((x in shapes, y in shapes)) or x)(own, other)
    assert there == [True, False]


# -- modules ---------------------------------------------------------------------------------------

TRAIN = """
import torch
from package_of_test import HAS
assert HAS and __spec__.name == "package_of_test.train"
torch.nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
"""


def test_packages_of_a_module_that_is_run_see_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\nHAS = torch.cuda.is_available()\n")
    (package / "train.py").write_text(TRAIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    rt.run(["python", "-m", "package_of_test.train"], chip="h100-sxm", steps=None)
    sys.modules.pop("package_of_test", None)


def test_words_of_deepspeed_are_read_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for a GPU when it is imported, and keeps the answer."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("raise AssertionError('too early')\n")
    monkeypatch.syspath_prepend(tmp_path)
    cost = run(tmp_path, LOANED, "deepspeed", "--num_gpus", "2")
    assert cost.script.world == 2


PIPELINE = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
rank = dist.get_rank()
wide = 64 * (rank + 1)
part = nn.Sequential(nn.Linear(32, wide), nn.ReLU(), nn.Linear(wide, 32)).cuda()
inner = torch.empty(8, 32, device="cuda", requires_grad=True)
given = inner if rank else torch.empty(8, 32, device="cuda")
stage = PipelineStage(part, rank, 2, torch.device("cuda", rank), (given,), (inner,))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, wanted: (out - wanted).square().mean())
optimizer = torch.optim.SGD(part.parameters(), 0.1)
for step in range(4):
    x = torch.randn(32, 32, device="cuda")
    schedule.step(target=x) if rank else schedule.step(x)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_each_stage_of_a_pipeline_is_a_run(rank: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PIPELINE, encoding="utf-8")
    words = ["torchrun", "--nproc_per_node=2", str(tmp_path / "train.py")]
    cost = rt.run(words, system="dgx-a100", rank=rank, steps=None)
    product = 2 * 32 * 32 * 64 * (rank + 1)  # of all four microbatches
    # Forward, gradients of weights, and of inputs, but for those of the first stage.
    wanted = 2 * product + 2 * product + (2 if rank else 1) * product
    assert {matrix_flops(row) for row in training(cost)} == {wanted}
    assert sum(row.turns for row in training(cost)) == 4
    # Activations, or their gradients, of 32 x 32 numbers are sent, and others received.
    assert cost.steady is not None and cost.steady.bytes_net >= 32 * 32 * 4
    assert "bubble" in dict(cost.script.said)


INTERLEAVED = (
    PIPELINE.replace("ScheduleGPipe", "ScheduleInterleaved1F1B")
    .replace(
        "schedule = ",
        "stages = [stage, PipelineStage(part, rank + 2, 4, stage.device, "
        "(inner,), (inner,))]\nschedule = ",
    )
    .replace("(stage, 4", "(stages, 4")
    .replace("rank, 2, torch", "rank, 4, torch")
)


def test_interleaved_stages_send_to_each_neighbour(tmp_path: Path) -> None:
    """Forward of both stages and gradients of the second, in four microbatches each."""
    (tmp_path / "train.py").write_text(INTERLEAVED, encoding="utf-8")
    words = ["torchrun", "--nproc_per_node=2", str(tmp_path / "train.py")]
    cost = rt.run(words, system="dgx-a100", rank=0, steps=2)
    ops = [op for estimate, _ in training(cost)[-1].parts for op in estimate.graph.expand().ops]
    kinds = [op.collective.kind for op in ops if op.collective]
    assert (kinds.count("send"), kinds.count("recv")) == (12, 12)
    assert "bubble" in dict(cost.script.said)


ASKING = PIPELINE.replace(", (given,), (inner,))", ")")


def test_a_stage_that_asks_others_for_its_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ASKING, encoding="utf-8")
    with pytest.raises(Exception, match=r"PipelineStage 0 of 2.*input_args and output_args"):
        rt.run(["torchrun", "--nproc_per_node=2", str(tmp_path / "train.py")], system="dgx-a100")


KEPT_GRADIENTS = """
import torch
from torch import nn
net = nn.Linear(64, 32).cuda()
for weight in net.parameters():
    weight.main_grad = torch.zeros(weight.shape, device="cuda")
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    net(torch.randn(8, 64, device="cuda")).sum().backward()
    for weight in net.parameters():
        weight.main_grad.copy_(weight.grad)
        weight.grad = weight.main_grad
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_gradient_that_a_trainer_keeps_on_a_weight_is_no_weight(tmp_path: Path) -> None:
    for row in training(run(tmp_path, KEPT_GRADIENTS, steps=None)):
        assert held(row, "weights") == 4 * (64 * 32 + 32)
