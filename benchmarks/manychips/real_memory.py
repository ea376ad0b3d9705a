"""Peaks of real processes on this machine beside our prediction: python real_memory.py

Small models over 2 to 4 processes of gloo on the CPU, each of which adds up what it allocates and
frees in a second forward and backward.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import rooftrace as rt

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.tracer import sharded_models as models

Way = tuple[dict[str, int], Callable[..., nn.Module], bool]
WAYS: dict[str, Way] = {
    "fsdp": ({"dp": 4}, models.fsdp, False),
    "fsdp, kept": ({"dp": 2}, models.WAYS["fsdp-kept"][1], False),
    "fsdp, made again": ({"dp": 4}, models.fsdp, True),
    "tp": ({"tp": 2}, models.tp, False),
    "sp": ({"tp": 4}, models.sp, False),
    "fsdp and sp": ({"dp": 2, "tp": 2}, models.both, False),
    "ddp": ({"dp": 2}, models.ddp, False),
}


def widened() -> None:
    """Sizes at which tensors, and not what is around them, take the memory."""
    models.WIDTH, models.WORDS, models.BATCH, models.SEQ = 256, 1024, 4, 128


def ids() -> Tensor:
    return torch.zeros(models.BATCH, models.SEQ, dtype=torch.long)


def process(rank: int, folder: str, name: str) -> None:
    """One process: writes its peak, with what it holds between steps, to a file."""
    warnings.filterwarnings("ignore")
    widened()
    torch.set_num_threads(1)
    sizes, spread, again = WAYS[name]
    world = torch.Size(sizes.values()).numel()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    net, x = spread(models.Net(again=again), mesh), ids()
    models.step(net, x)
    net.zero_grad()
    peak = models.allocated(lambda: models.step(net, x))
    if rank == 0:
        held = sum(local(p).numel() * p.element_size() for p in net.parameters())
        Path(folder, "peak").write_text(str(peak + held + x.nbytes))
    dist.barrier()
    dist.destroy_process_group()


def local(tensor: Any) -> Tensor:
    """The shard of a tensor of a mesh; another one as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def real(name: str) -> int:
    """The peak of the first of several real processes, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        count = torch.Size(WAYS[name][0].values()).numel()
        torch.multiprocessing.spawn(process, (folder, name), nprocs=count)
        return int(Path(folder, "peak").read_text())


def predicted(name: str) -> int:
    """The peak that an estimate has."""
    sizes, spread, again = WAYS[name]
    with rt.tools.fake_mesh(sizes) as mesh, torch.device("meta"):
        graph = rt.trace(models.step, spread(models.Net(again=again), mesh), ids())
    return rt.estimate(graph, execution="eager").memory.peak


def main() -> None:
    """Print both for each way of sharding."""
    widened()
    for name in WAYS:
        truth, ours = real(name), predicted(name)
        print(
            f"{name}: {ours / 2**20:.2f} MiB, real {truth / 2**20:.2f} MiB: {ours / truth - 1:+.1%}"
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    main()
