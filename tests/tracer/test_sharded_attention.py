"""Attention over several processes, and attention that the policies of checkpoints name."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.placement_types import Shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rooftrace as rt
from rooftrace.costmodels.ops.price import price_ops

WIDTH, HEADS, SEQ = 64, 4, 128
_aten = torch.ops.aten
FLASH = _aten._scaled_dot_product_flash_attention.default


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def blocks(count: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        net = nn.Sequential(*(Block() for _ in range(count))).bfloat16()
        return net, torch.zeros(2, SEQ, WIDTH, dtype=torch.bfloat16)


def over_context(net: nn.Module, x: Tensor, mesh: Any) -> None:
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        net(x).float().sum().backward()


def useful(graph: Any) -> int:
    """FLOPs of the products of scores that are not masked."""
    works = (work.items() for work in (cost.work for _, cost in attention_of(graph)))
    return sum(
        flops
        for items in works
        for work, flops in items
        if work.operation == "matmul" and work.count == "useful"
    )


def attention_of(graph: Any) -> list[Any]:
    costs, _ = price_ops(graph.expand())
    ops = zip(graph.expand().ops, costs, strict=True)
    return [(op, cost) for op, cost in ops if "attention" in op.target]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_of_processes_does_the_attention_of_the_whole(ranks: int) -> None:
    net, x = blocks(2)
    with rt.tools.fake_mesh({"cp": ranks}) as mesh:
        graph = rt.trace(over_context, net, x, mesh)
    whole = rt.trace(lambda net, x: net(x).float().sum().backward(), *blocks(2))
    # Each process has a chunk from the front and its mirror image: all work alike.
    assert useful(graph) * ranks == useful(whole)
    for part in ("forward", "backward"):
        of_part = [op for op, _ in attention_of(graph) if op.part == part]
        assert len(of_part) == 2 * ranks
    assert {graph.groups[op.collective.group].axis for op in graph.ops if op.collective} == {"cp"}


def test_keys_and_values_go_around_the_ring() -> None:
    net, x = blocks(1)
    with rt.tools.fake_mesh({"cp": 4}) as mesh:
        graph = rt.trace(over_context, net, x, mesh)
    gathered = [op.collective for op in graph.ops if op.collective and op.part == "forward"]
    # Keys and values of all processes: of two sequences, in bf16.
    assert sum(c.bytes for c in gathered) == 2 * 2 * SEQ * WIDTH * 2
    assert {c.kind for c in gathered} <= {"all_gather", "all_to_all", "send", "recv"}


def test_attention_of_sharded_heads_stays_whole() -> None:
    with rt.tools.fake_mesh({"tp": 4}) as mesh, torch.device("meta"):
        full = torch.zeros(2, HEADS, SEQ, 16, dtype=torch.bfloat16)
        heads = distribute_tensor(full, mesh, [Shard(1)])

        class Plain(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x)

        graph = rt.trace(Plain(), heads)
    ((op, _),) = attention_of(graph)
    assert graph.values[op.inputs[0]].shape == (2, 1, SEQ, 16)
    assert not any(op.collective for op in graph.ops)


def policy(kept: set[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("kept", "again"), [({FLASH}, 0), ({_aten.addmm.default}, 3)])
def test_policies_that_name_the_kernel_of_attention_are_kept_to(kept: set[Any], again: int) -> None:
    contexts = functools.partial(
        create_selective_checkpoint_contexts, functools.partial(policy, kept)
    )

    class Again(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:  # type: ignore[attr-defined]
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return x

    net, x = blocks(3)
    graph = rt.trace(Again(net), x, phase="training")
    parts = Counter(op.part for op, _ in attention_of(graph))
    assert parts == {"forward": 3, "backward": 3, **({"recompute": again} if again else {})}
