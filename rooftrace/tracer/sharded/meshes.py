"""The device mesh of a module, from its sharded weights."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.errors import RequestError
from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.sharded import fsdp
from rooftrace.tracer.sharded.ddp import replicas_on_meta
from rooftrace.tracer.tensors import owners

_BACKENDS = "cpu:fake,cuda:fake,meta:fake"
"""Collectives of these devices return at once, with what is there."""


def begin_group(init: Callable[..., Any], world: int, rank: int, **options: Any) -> None:
    """Let this process be one of `world` that are not there: it gets a default process group.

    init: torch's own `init_process_group`.  options: further ones of it.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shown = sys.excepthook
    init(_BACKENDS, store=FakeStore(), rank=rank, world_size=world, **options)
    sys.excepthook = shown  # torch's own names a rank before every error, to the end of the process
    # A group finds its backend where it is asked for hooks; else torch warns at the end.
    kind = dist.ProcessGroup.BackendType.CUSTOM
    dist.distributed_c10d._get_default_group()._set_default_backend(kind)


running: list[Mapping[str, int]] = []
"""The meshes that stand for processes that are not there, innermost last."""


def mesh_of(roots: Iterable[nn.Module]) -> dict[str, int]:
    """How many processes there are along each axis of the largest mesh of these modules.

    It is that of the running `fake_mesh`, if there is one.  Axes without a name are called "axis 0"
    and so on.  {} where no module is sharded.
    """
    if running:
        return dict(running[-1])
    meshes = [*_meshes(list(roots))]
    if not meshes:
        return {}
    largest = max(meshes, key=lambda mesh: int(mesh.mesh.numel()))
    sizes = list(largest.mesh.shape)
    names = largest.mesh_dim_names or [f"axis {place}" for place in range(len(sizes))]
    return dict(zip(names, map(int, sizes), strict=True))


def _meshes(roots: list[nn.Module]) -> list[Any]:
    """The root meshes of the weights of modules."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    over: dict[int, Any] = {}
    for root in roots:
        for tensor in owners.weights_in(root):
            if kind is not None and isinstance(tensor, kind):
                over[id(tensor.device_mesh)] = tensor.device_mesh
    for state in fsdp._states(roots):
        for group in fsdp._groups(state):
            over[id(group.mesh_info.mesh)] = group.mesh_info.mesh
    return [_root(mesh) for mesh in over.values()]


def _root(mesh: Any) -> Any:
    """The mesh that a submesh was cut from."""
    cut_from = getattr(mesh, "_get_root_mesh", None)
    return mesh if cut_from is None else cut_from()


def named_groups(mesh: Any, renamed: Mapping[str, str]) -> dict[str, str]:
    """The names of the groups along each axis of a mesh, with the axis as the user calls it."""
    sizes = zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=False)
    return {
        str(mesh.get_group(axis).group_name): renamed.get(axis, axis)
        for axis, size in sizes
        if size > 1
    }


_devices: list[Any] = []


def devices() -> Any:
    """The DeviceMesh of the running `fake_mesh`."""
    return _devices[-1]


axes: dict[str, str] = {}
"""Axes of groups by their name, where ranks do not say it: experts share the ranks of data."""


# -- how torch finds the sizes of results of sharded tensors ---------------------------------------

_HOME = "torch.distributed.tensor._sharding_prop"
_NAME = "_propagate_tensor_meta_non_cached"
_SCHEMA = "torch.distributed.tensor._op_schema"
_FAKE = "_rebuild_tensor_from_dtensor_meta"


@contextlib.contextmanager
def sizes_unseen() -> Iterator[None]:
    """Inside, sizes of whole tensors are found outside of any mode of the code and of ours."""
    home = sys.modules.get(_HOME)
    propagator: Any = getattr(home, "ShardingPropagator", None)
    if propagator is None or not hasattr(propagator, _NAME):
        yield
        return
    original = original_of(propagator, _NAME)

    def sizes(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return original(self, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(propagator, {_NAME: sizes}))
        schema = sys.modules[_SCHEMA]
        if hasattr(schema, _FAKE):
            undo.enter_context(replaced(schema, {_FAKE: _on_meta}))
        yield


def _on_meta(spec: Any) -> torch.Tensor:
    """A tensor of the size of a sharded one; its mesh may be of a device that torch lacks here."""
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


# -- processes that are not there: one stands for all of a mesh ------------------------------------


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
            f"a mesh {shown(sizes)}: this process is in a process group of "
            f"{dist.get_world_size()} already; call torch.distributed.destroy_process_group() "
            "before, or shard the module over that group yourself and trace it"
        )
    begin_group(dist.init_process_group, world, rank)
    running.append(sizes)
    try:
        with replicas_on_meta():
            mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            _devices.append(mesh)
            yield mesh
    except KeyError as error:
        if "mesh_dim_name" not in str(error):
            raise
        raise RequestError(f"the mesh {shown(sizes)}: {error.args[0]}") from error
    finally:
        running.remove(sizes)
        _devices.clear()
        axes.clear()
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
            f"rank {rank!r} of a mesh {shown(sizes)}: expected a rank from 0 to {world - 1}"
        )
    return world


def shown(sizes: Mapping[str, int]) -> str:
    """A mesh in a message: "dp=4,tp=8"."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())
