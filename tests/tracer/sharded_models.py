"""A small model of tokens, and the ways in which processes share it, for meta and for real."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, WORDS, LAYERS, BATCH, SEQ = 32, 8, 64, 2, 2, 16
MICROBATCHES = 4
PROCESSES = 4


def on_processes(run: Callable[..., None], *args: Any) -> list[str]:
    """What each of the real processes, forked with all imports, writes into a file.

    run: of a rank, these arguments and a folder; the file there has the name of the rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(run, (*args, folder), PROCESSES, start_method="fork")
        return [Path(folder, f"{rank}").read_text() for rank in range(PROCESSES)]


def in_fresh_interpreter(module: str, name: str) -> list[str]:
    """The lines that a function prints in an interpreter in which no mesh has been."""
    code = f"from {module} import {name}; {name}()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


class Attention(nn.Module):
    """Self-attention of as many heads as its projections have rows for."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two products, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Net(nn.Module):
    """Words in, words out."""

    def __init__(self, layers: int = LAYERS, again: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def allocated(run: Callable[[], None]) -> int:
    """The most that is allocated during a call, above what was there before it, in bytes."""
    with profile(profile_memory=True, use_kineto=True) as profiled:
        run()
    now = most = 0
    assert profiled.kineto_results is not None
    events = [e for e in profiled.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def fsdp(net: nn.Module, mesh: DeviceMesh, **how: Any) -> nn.Module:
    for block in net.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **how)
    return fully_shard(net, mesh=mesh, **how)


def low(net: nn.Module, mesh: DeviceMesh, **how: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fsdp(net, mesh, mp_policy=policy, **how)


def tp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in net.blocks:  # type: ignore[union-attr]
        columns = {f"attention.qkv.{n}": ColwiseParallel() for n in range(3)}
        rows = {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, {**columns, **rows, "up": ColwiseParallel()})
    return parallelize_module(net, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def sp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    rows, whole = Shard(1), Replicate()
    parallelize_module(
        net,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=whole, output_layouts=rows),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=rows, output_layouts=whole),
        },
    )
    gathered = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,))
    for block in net.blocks:  # type: ignore[union-attr]
        plan = {
            "first": SequenceParallel(),
            "second": SequenceParallel(),
            "attention": gathered,
            "up": ColwiseParallel(input_layouts=rows),
            "attention.out": RowwiseParallel(output_layouts=rows),
            "down": RowwiseParallel(output_layouts=rows),
            **{f"attention.qkv.{n}": ColwiseParallel() for n in range(3)},
        }
        parallelize_module(block, mesh, plan)
    return net


def both(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fsdp(sp(net, mesh["tp"]), mesh["dp"])


def ddp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.02)  # type: ignore[arg-type]


class Piece(nn.Module):
    """A stage of blocks, hidden states in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def piped(mesh: DeviceMesh, schedule: str, device: str) -> tuple[Any, list[nn.Module], Any]:
    """The schedule, stages and step of one process of a pipeline whose stages FSDP2 shards."""
    from torch.distributed.pipelining import PipelineStage, schedules

    kind = getattr(schedules, schedule)
    ranks, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
    count = ranks * (2 if issubclass(kind, schedules.PipelineScheduleMulti) else 1)
    with torch.device(device):
        places = range(rank, count, ranks)
        pieces = [fsdp(Piece(), mesh["dp"], reshard_after_forward=True) for _ in places]
        hidden, batch = torch.zeros(2, SEQ, WIDTH), torch.zeros(2 * MICROBATCHES, SEQ, WIDTH)
        stages = [
            PipelineStage(
                piece,
                place,
                count,
                torch.device(device),
                input_args=(hidden.clone().requires_grad_(place > 0),),
                output_args=(hidden.clone().requires_grad_(),),
                group=mesh["pp"].get_group(),
            )
            for piece, place in zip(pieces, places, strict=True)
        ]
    stage = stages if count > ranks else stages[0]
    made = kind(stage, MICROBATCHES, loss_fn=lambda out, wanted: (out - wanted).square().mean())

    def run(*pieces: nn.Module) -> None:
        given = (batch,) if rank == 0 else ()
        made.step(*given, **({"target": batch} if rank == ranks - 1 else {}))

    return made, pieces, run


Way = tuple[dict[str, int], Callable[[nn.Module, DeviceMesh], nn.Module], bool]

WAYS: dict[str, Way] = {
    "fsdp": ({"dp": 4}, fsdp, False),
    "fsdp-bf16": ({"dp": 4}, low, False),
    "fsdp-kept": ({"dp": 4}, functools.partial(fsdp, reshard_after_forward=False), False),
    "fsdp-again": ({"dp": 4}, fsdp, True),
    "hsdp": ({"replicate": 2, "shard": 4}, fsdp, False),
    "tp": ({"tp": 4}, tp, False),
    "tp-again": ({"tp": 4}, tp, True),
    "sp": ({"tp": 4}, sp, False),
    "fsdp-sp": ({"dp": 2, "tp": 4}, both, False),
    "ddp": ({"dp": 4}, ddp, False),
}
"""Axes of a mesh, how a model is spread over it, and whether activations are made again."""


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(net(ids).flatten(0, 1).float(), ids.flatten())


def step(net: nn.Module, ids: Tensor) -> None:
    loss_of(net, ids).backward()
