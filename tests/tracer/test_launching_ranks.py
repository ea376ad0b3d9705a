"""Programs of many processes: one rank runs, the process group is fake, others do not run."""

import json
from pathlib import Path

import pytest
import torch

from rooftrace.errors import RequestError
from rooftrace.scripts.launch import Ended, Ranks
from tests.tracer.launched_here import recorded_of


def run(
    tmp_path: Path, text: str, *words: str, world: int | None = None, rank: int = 0
) -> tuple[Ended, list[str]]:
    """Runs a script under a recorder: how it ended, and the names of the ops that it ran."""
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    return recorded_of([*words, "train.py"], tmp_path, world, rank)


DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("nccl")
assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (3, 8, "nccl")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
model = DistributedDataParallel(model)
data = TensorDataset(torch.arange(64.0).reshape(16, 4))
loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, shuffle=False),
                    num_workers=2, persistent_workers=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
seen = []
for epoch in range(2):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        seen.append(x[0, 0].item())
assert seen == [12.0, 44.0] * 2, seen   # rows 3 and 11 of 16
dist.destroy_process_group()
"""


def test_a_script_of_ddp_exchanges_its_gradients(tmp_path: Path) -> None:
    ended, names = run(tmp_path, DDP, "torchrun", "--nproc_per_node=8", rank=3)
    assert ended.exception is None
    assert names.count("c10d.allreduce_.default") == 4  # one bucket in each of four steps
    assert ("loading", "num_workers=0") in {(k, t[-14:].strip("()")) for k, t in ended.assumed}
    assert ended.ranks == Ranks(3, 8, 3, 8)


VALUES = """
import torch, torch.distributed as dist
from torch.distributed import ReduceOp
dist.init_process_group()
for device in ("cpu", "meta"):
    def five(*shape, value=5): return torch.full(shape, value, device=device)
    for op, value in ((ReduceOp.SUM, 20), (ReduceOp.MAX, 5), (ReduceOp.MIN, 5),
                      (ReduceOp.PRODUCT, 625), (ReduceOp.BXOR, 0)):
        x = five(2); dist.all_reduce(x, op); assert x.tolist() == [value] * 2, (device, op, x)
    every = [torch.zeros(2, dtype=torch.long, device=device) for _ in range(4)]
    dist.all_gather(every, five(2)); assert [x.tolist() for x in every] == [[5, 5]] * 4
    part = torch.zeros(1, dtype=torch.long, device=device)
    dist.reduce_scatter(part, [five(1, value=n) for n in range(4)]); assert part.item() == 8
    x = five(1); dist.all_reduce(x, group=dist.new_group([1, 2])); assert x.item() == 10
    x = five(1); dist.broadcast(x, 3); assert x.item() == 5
every = [None] * 4
dist.all_gather_object(every, {"a": [1]}); assert every == [{"a": [1]}] * 4
part = [None]; dist.scatter_object_list(part, ["a", "b", "c", "d"]); assert part == ["c"]
dist.barrier(); dist.monitored_barrier()
"""


def test_what_ranks_exchange_is_known_where_each_has_the_same(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, VALUES, world=4, rank=2)
    assert ended.exception is None
    assert any("objects that ranks send" in said for _, said in ended.assumed)


SPAWN = """
import json, os, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, world, folder):
    dist.init_process_group("gloo", init_method="tcp://localhost:1", rank=rank, world_size=world)
    json.dump([rank, dist.get_world_size(), dist.get_backend()], open(f"{rank}.json", "w"))
    dist.destroy_process_group()
"""
STARTS = {
    "spawn": "mp.spawn(main, args=(4, '.'), nprocs=4)",
    "processes": (
        "all = [mp.Process(target=main, args=(r, 4, '.')) for r in range(4)]\n"
        "    [p.start() for p in all]; [p.join() for p in all]\n"
        "    assert [p.exitcode for p in all] == [0] * 4"
    ),
}


@pytest.mark.parametrize("how", STARTS)
def test_of_the_processes_that_a_script_starts_one_runs_here(how: str, tmp_path: Path) -> None:
    text = f"{SPAWN}\nif __name__ == '__main__':\n    {STARTS[how]}\n"
    ended, _ = run(tmp_path, text)
    assert ended.exception is None
    assert ended.ranks.world == 4
    assert [path.name for path in tmp_path.glob("*.json")] == ["0.json"]
    assert json.loads((tmp_path / "0.json").read_text()) == [0, 4, "gloo"]


def test_a_process_that_is_spawned_says_that_the_device_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import multiprocessing, torch\n"
        "def work(): torch.ones(2, device='cuda')\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    process.start(); process.join(); raise SystemExit(process.exitcode)\n"
    )
    ended, _ = run(tmp_path, text)
    assert ended.code == 1
    said = "a process that the script spawns has no device"
    assert said in dict(ended.assumed)["spawned processes"]
    assert torch.cuda.is_available() or f"RequestError: {said}" in capfd.readouterr().err


def test_the_variables_are_those_of_the_launcher(tmp_path: Path) -> None:
    text = "import os, json; json.dump(dict(os.environ), open('env.json', 'w'))"
    words = ("--nnodes=2", "--nproc_per_node=4", "--master_addr=a", "--master_port=7")
    run(tmp_path, text, "torchrun", *words, rank=6)
    seen = json.loads((tmp_path / "env.json").read_text())
    wanted = {"RANK": "6", "LOCAL_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    wanted |= {"GROUP_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert {name: seen[name] for name in wanted} == wanted
    assert "TORCHELASTIC_RUN_ID" in seen


def test_a_mesh_of_the_script_names_the_axes(tmp_path: Path) -> None:
    text = (
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from rooftrace.tracer.sharding import fsdp as meshes\n"
        "mesh = init_device_mesh('cpu', (2, 4), mesh_dim_names=('dp', 'tp'))\n"
        "assert meshes.mesh_of([]) == {'dp': 2, 'tp': 4}\n"
        "assert mesh['tp'].size() == 4 and dist.get_backend(mesh['tp'].get_group())\n"
    )
    ended, _ = run(tmp_path, text, world=8)
    assert ended.exception is None


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("rank=0, world_size=2", "process group of 2, and the launch has 4 ranks"),
        ("rank=1, world_size=4", "joins its process group as rank 1, and runs here as rank 0"),
    ],
)
def test_a_group_of_another_size_is_refused(call: str, said: str, tmp_path: Path) -> None:
    text = f"import torch.distributed as dist; dist.init_process_group('gloo', {call})"
    ended, _ = run(tmp_path, text, world=4)
    assert isinstance(ended.exception, RequestError)
    assert said in str(ended.exception)
