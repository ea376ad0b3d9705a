"""Processes that are not there: one process stands for all of a mesh."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.sharded import meshes
from rooftrace.tracer.sharded.ddp import replicas_on_meta


@contextlib.contextmanager
def fake_mesh(sizes: Mapping[str, int], rank: int = 0) -> Iterator[Any]:
    """A `DeviceMesh` of processes that are not there, for the length of the block.

    sizes: how many there are along each axis, outermost first: `{"dp": 4, "tp": 8}`.  rank: which
    of them this one is.  `build(mesh)` shards a module over it (`fully_shard`,
    `parallelize_module`), and a trace of that module is the step of one process.  Raises
    RequestError for sizes that are no mesh, for an axis that it has not, and where this process
    belongs to a process group already.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = _world(sizes, rank)
    if dist.is_initialized():
        raise RequestError(
            f"a mesh {_shown(sizes)}: this process is in a process group of "
            f"{dist.get_world_size()} already; call torch.distributed.destroy_process_group() "
            "before, or shard the module over that group yourself and trace it"
        )
    meshes.begin_group(dist.init_process_group, world, rank)
    meshes.running.append(sizes)
    try:
        with replicas_on_meta():
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            meshes._devices.append(mesh)
            yield mesh
    except KeyError as error:
        if "mesh_dim_name" not in str(error):
            raise
        raise RequestError(f"the mesh {_shown(sizes)}: {error.args[0]}") from error
    finally:
        meshes.running.remove(sizes)
        meshes._devices.clear()
        meshes.axes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _world(sizes: Mapping[str, int], rank: int) -> int:
    """How many processes a mesh has."""
    if not isinstance(sizes, Mapping):
        raise RequestError(f"a mesh {sizes!r:.80}: expected sizes by axis, as in {{'dp': 4}}")
    for axis, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RequestError(
                f"mesh axis {axis!r} has size {size!r}: expected a whole number of at least 1"
            )
    if not sizes:
        raise RequestError("a mesh without axes: name some, as in {'dp': 4, 'tp': 8}")
    world = math.prod(sizes.values())
    if not isinstance(rank, int) or not 0 <= rank < world:
        raise RequestError(
            f"rank {rank!r} of a mesh {_shown(sizes)}: expected a rank from 0 to {world - 1}"
        )
    return world


def _shown(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
