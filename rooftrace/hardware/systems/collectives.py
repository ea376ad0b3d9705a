"""The kinds of collectives: one record of each, from which all that names a kind is made.

A new kind is a record here and a rule of the bytes it moves (`costmodels/rules/collective.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Pattern = Literal["twice", "ring", "tensor", "apart", "pair"]
"""How the bytes of a buffer travel between n ranks:
twice   around the ring two times, (n - 1) / n of them each time (a reduction, then a gathering);
ring    around the ring once;
tensor  all of them from rank to rank, or up and down a tree;
apart   each rank sends a different part to each other one, at once: (n - 1) / n of them;
pair    all of them from one rank to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveKind:
    """A collective operation, in the words of nccl."""

    name: str
    pattern: Pattern
    torch: tuple[str, ...]  # ops that one rule prices, as "namespace.name"
    variants: tuple[str, ...] = ()  # ops that do the same another way: other rules price them
    spellings: tuple[str, ...] = ()  # other names, in the text of nccl-tests and in tables
    like: str = ""  # the kind whose fitted constants it takes where it has none
    as_measured: bool = False  # whether constants of `like` hold for it: both are one kernel
    chakra: int | None = None  # its number in MLCommons Chakra; None: none, or two processes
    payload: int | None = None  # byte, where it is not the buffer's


_KINDS = (
    CollectiveKind(
        name="all_reduce",
        pattern="twice",
        torch=(
            "_c10d_functional.all_reduce",
            "_c10d_functional.all_reduce_",
            "_c10d_functional.all_reduce_coalesced",
            "_c10d_functional.all_reduce_coalesced_",
            "c10d.allreduce_",
            "c10d.allreduce_coalesced_",
            "symm_mem.two_shot_all_reduce_",
            "symm_mem.two_shot_all_reduce_out",
        ),
        variants=(
            "symm_mem.one_shot_all_reduce",
            "symm_mem.one_shot_all_reduce_out",
            "symm_mem.one_shot_all_reduce_copy",
            "symm_mem.one_shot_all_reduce_copy_out",
            "symm_mem.multimem_all_reduce_",
            "symm_mem.multimem_one_shot_all_reduce",
            "symm_mem.multimem_one_shot_all_reduce_out",
        ),
        spellings=("allreduce",),
        chakra=0,
    ),
    CollectiveKind(
        name="all_gather",
        pattern="ring",
        torch=(
            "_c10d_functional.all_gather_into_tensor",
            "_c10d_functional.all_gather_into_tensor_out",
            "_c10d_functional.all_gather_into_tensor_coalesced",
            "_c10d_functional_autograd.all_gather_into_tensor",
            "c10d.allgather_",
            "c10d._allgather_base_",
            "c10d.allgather_coalesced_",
            "c10d.allgather_into_tensor_coalesced_",
            "symm_mem.multimem_all_gather_out",
        ),
        variants=(
            "symm_mem._low_contention_all_gather",
            "symm_mem.fused_all_gather_matmul",
            "symm_mem.fused_all_gather_scaled_matmul",
        ),
        spellings=("allgather",),
        chakra=2,
    ),
    CollectiveKind(
        name="reduce_scatter",
        pattern="ring",
        torch=(
            "_c10d_functional.reduce_scatter_tensor",
            "_c10d_functional.reduce_scatter_tensor_out",
            "_c10d_functional.reduce_scatter_tensor_coalesced",
            "_c10d_functional_autograd.reduce_scatter_tensor",
            "c10d.reduce_scatter_",
            "c10d._reduce_scatter_base_",
            "c10d.reduce_scatter_tensor_coalesced_",
            "symm_mem.reduce_scatter_out",
        ),
        variants=(
            "symm_mem._low_contention_reduce_scatter",
            "symm_mem.fused_matmul_reduce_scatter",
            "symm_mem.fused_scaled_matmul_reduce_scatter",
        ),
        spellings=("reducescatter",),
        chakra=7,
    ),
    CollectiveKind(
        name="all_to_all",
        pattern="apart",
        torch=(
            "_c10d_functional.all_to_all_single",
            "_c10d_functional_autograd.all_to_all_single",
            "c10d.alltoall_base_",
            "c10d.alltoall_",
            "_dtensor.shard_dim_alltoall",
            "symm_mem.all_to_all_vdev",
            "symm_mem.nvshmem_all_to_all",
        ),
        variants=("symm_mem.all_to_all_vdev_2d", "symm_mem.all_to_all_vdev_2d_offset"),
        spellings=("alltoall", "alltoall_base"),
        chakra=6,
    ),
    CollectiveKind(
        name="broadcast",
        pattern="tensor",
        torch=(
            "_c10d_functional.broadcast",
            "_c10d_functional.broadcast_",
            "c10d.broadcast_",
            "symm_mem.nvshmem_broadcast",
        ),
        like="all_gather",
        chakra=5,
    ),
    CollectiveKind(
        name="reduce",
        pattern="tensor",
        torch=("c10d.reduce_",),
        like="reduce_scatter",
        chakra=1,
    ),
    CollectiveKind(
        name="gather",
        pattern="apart",
        torch=("c10d.gather_", "c10d.gather_into_tensor_"),
        like="all_to_all",
        chakra=3,
    ),
    CollectiveKind(
        name="scatter", pattern="apart", torch=("c10d.scatter_",), like="all_to_all", chakra=4
    ),
    CollectiveKind(
        name="send",
        pattern="pair",
        torch=("c10d.send", "_c10d_functional.isend"),
        spellings=("sendrecv", "send_recv"),
    ),
    CollectiveKind(
        name="recv",
        pattern="pair",
        torch=("c10d.recv_", "c10d.recv_any_source_", "_c10d_functional.irecv"),
        like="send",
        as_measured=True,
    ),
    CollectiveKind(
        name="barrier",
        pattern="twice",
        torch=("c10d.barrier", "c10d.monitored_barrier_"),
        like="all_reduce",
        as_measured=True,
        chakra=9,
        payload=4,  # an all_reduce of one number
    ),
)
COLLECTIVES: Mapping[str, CollectiveKind] = {kind.name: kind for kind in _KINDS}
"""The kinds by their name."""


def collective_kind(name: str) -> CollectiveKind:
    """The kind of this name.  Raises ValueError for a word that is no collective."""
    if name not in COLLECTIVES:
        raise ValueError(f"collective {name!r}: expected one of {', '.join(COLLECTIVES)}")
    return COLLECTIVES[name]


def torch_ops(*names: str) -> tuple[str, ...]:
    """The ops of torch that one rule prices for these kinds."""
    return tuple(op for name in names for op in COLLECTIVES[name].torch)
