"""`torch.distributed` in a program that runs as one rank of many, whose others are not there.

Its process group is a fake one of the size that the program asks for: collectives return at once,
and a recording sees them.  Objects that ranks tell each other are taken to be the same on each.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.records import Ranks
from rooftrace.tracer.patches import original_of, put
from rooftrace.tracer.sharded import ddp, meshes

OBJECTS = (
    "ranks",
    "objects that ranks send each other: every rank is taken to have the same as this one",
)
AXIS = (
    "ranks",
    "the program made no device mesh with names: all its ranks are taken to work on data, along "
    "one axis dp",
)
_BACKENDS = ("nccl", "gloo", "mpi", "ucc", "xccl", "fake")

Say = Callable[[tuple[str, str]], object]


class Processes:
    """The processes of a program: one that is here, and others that are not.

    ranks: which one runs here; replaced when the program starts processes itself.  fixed: a
    launcher or the user said how many there are.  say: told what is assumed.
    """

    def __init__(self, ranks: Ranks, fixed: bool, say: Say) -> None:
        self.ranks, self.fixed, self.say = ranks, fixed, say
        self._asked: dict[int, str] = {}  # the backend that was asked for, by group
        self._mesh: dict[str, int] = {}

    def stand_alone(self) -> None:
        """From here on the process groups of the program are fake ones."""
        ours: dict[str, Any] = {
            "init_process_group": self.init,
            "get_backend": self.backend,
            "new_group": self._new_group,
            "barrier": _barrier,
            "_set_pg_timeout": _nobody_waits,
            "set_timeout": _nobody_waits,
            "monitored_barrier": _nobody_waits,
            "all_gather_object": self._all_gather_object,
            "gather_object": self._gather_object,
            "broadcast_object_list": self._broadcast_objects,
            "scatter_object_list": self._scatter_objects,
            "send_object_list": self._no_objects,
            "recv_object_list": self._no_objects,
            "is_nccl_available": lambda: True,
            "is_torchelastic_launched": lambda: "TORCHELASTIC_RUN_ID" in os.environ,
        }
        from torch.distributed import device_mesh, distributed_c10d

        loose: Any = dist
        homes: list[Any] = [dist, distributed_c10d, loose.rendezvous]
        stores = dict.fromkeys(("TCPStore", "FileStore"), _store)
        meshed = {"init_device_mesh": self._init_device_mesh}
        for home in homes:
            put(home, {name: new for name, new in (ours | stores).items() if hasattr(home, name)})
        put(device_mesh, meshed)
        put(dist, meshed)
        ddp.replicas_of_program(lambda *pair: self.say(pair))

    # -- groups ------------------------------------------------------------------------------------

    def init(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *others: Any,
        **options: Any,
    ) -> None:
        """Stands for `torch.distributed.init_process_group`: nobody is waited for."""
        if dist.is_initialized():
            original = original_of(dist, "init_process_group")
            original(backend, init_method)  # raises the error of torch
        asked = _asked(init_method, world_size, rank)
        self._agree(*asked)
        named = {"timeout": timeout} if timeout is not None else {}
        device = options.get("device_id")
        meshes.begin_group(
            original_of(dist.distributed_c10d, "init_process_group"),
            self.ranks.world,
            self.ranks.rank,
            **named,
        )
        if backend is None:
            kind = getattr(device, "type", None) or ("cuda" if torch.cuda.is_available() else "cpu")
            backend = "nccl" if kind == "cuda" else "gloo"
        self._asked[id(dist.group.WORLD)] = _name(backend)
        self._mesh.clear()
        self._mesh["dp"] = self.ranks.world
        if not any(mesh is self._mesh for mesh in meshes.running):
            meshes.running.append(self._mesh)

    @property
    def axis_assumed(self) -> bool:
        """Whether the program has several ranks and named no axes for them."""
        return self._mesh.get("dp") == self.ranks.world > 1 and len(self._mesh) == 1

    def _agree(self, world: int | None, rank: int | None) -> None:
        """Take the size and the rank that the program says, unless the launch says others."""
        if world is None and not self.fixed and rank is None:
            raise RequestError(
                "the program joins a process group and nothing says of how many processes: "
                "say it as --ranks, or launch it with torchrun"
            )
        if world is not None and world != self.ranks.world:
            if self.fixed:
                raise RequestError(
                    f"the program joins a process group of {world}, and the launch has "
                    f"{self.ranks.world} ranks: make --ranks or the launcher say {world}"
                )
            self.spread(world)
        if rank is not None and rank != self.ranks.rank:
            if self.ranks.rank == 0 and not self.fixed and rank < self.ranks.world:
                here = self.ranks.local_world
                self.ranks = Ranks(rank, self.ranks.world, rank % here, here)
            else:
                raise RequestError(
                    f"the program joins its process group as rank {rank}, and runs here as rank "
                    f"{self.ranks.rank}"
                )

    def spread(self, world: int, local_world: int | None = None) -> None:
        """The program itself says how many processes it has."""
        local = min(local_world or world, world)
        if self.ranks.rank >= world:
            raise RequestError(
                f"rank {self.ranks.rank}: the program starts {world} processes; expected a rank "
                f"from 0 to {world - 1}"
            )
        self.ranks = Ranks(self.ranks.rank, world, self.ranks.rank % local, local)

    def _new_group(
        self, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kw: Any
    ) -> Any:
        make = original_of(dist.distributed_c10d, "new_group")
        kw.pop("device_id", None)
        kw.pop("pg_options", None)
        group = make(ranks, timeout, None, *(None for _ in args[:1]), *args[1:], **kw)
        if isinstance(group, dist.ProcessGroup):
            asked = _name(backend) if backend else self._asked.get(id(dist.group.WORLD), "nccl")
            self._asked[id(group)] = asked
        return group

    def backend(self, group: Any = None) -> str:
        """What `get_backend` says: the backend that the program asked for."""
        original = original_of(dist.distributed_c10d, "get_backend")
        backend = original(group)  # raises the errors of torch
        world = self._asked.get(id(dist.group.WORLD))
        name = self._asked.get(id(group or dist.group.WORLD), world)
        return str(backend) if name is None else name

    def _init_device_mesh(self, device_type: str, mesh_shape: Any, *args: Any, **kw: Any) -> Any:
        """Make a mesh, and call the axes of all ranks by its names."""
        from torch.distributed import device_mesh

        if not dist.is_initialized():
            self.init()
        mesh: Any = original_of(device_mesh, "init_device_mesh")(
            device_type, mesh_shape, *args, **kw
        )
        names = mesh.mesh_dim_names
        whole = int(mesh.mesh.numel()) == self.ranks.world
        if names and whole and (self.axis_assumed or len(names) > len(self._mesh)):
            self._mesh.clear()
            self._mesh.update(zip(names, map(int, mesh.mesh.shape), strict=True))
        return mesh

    # -- objects -----------------------------------------------------------------------------------

    def _all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self.say(OBJECTS)
        for place in range(len(object_list)):
            object_list[place] = _copied(obj)

    def _gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if object_gather_list is not None:
            self._all_gather_object(object_gather_list, obj)

    def _broadcast_objects(self, object_list: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        self.say(OBJECTS)

    def _scatter_objects(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: Sequence[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.say(OBJECTS)
        if scatter_object_input_list:
            place = max(dist.get_rank(group), 0) % len(scatter_object_input_list)
            scatter_object_output_list[0] = _copied(scatter_object_input_list[place])

    def _no_objects(self, object_list: Sequence[Any], *args: Any, **kwargs: Any) -> int:
        self.say(OBJECTS)
        peer = kwargs.get("src", args[0] if args else 0)
        return int(peer or 0)


def _barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
) -> Any:
    """Stands for `torch.distributed.barrier`, which would make a tensor on the device."""
    home: Any = dist.distributed_c10d
    group = group or home._get_default_group()
    if home._rank_not_in_group(group):
        return original_of(home, "barrier")(group)  # warns, as torch does
    options = home.BarrierOptions()
    options.device = torch.device("cpu")
    work = group.barrier(opts=options)
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


def _nobody_waits(*args: Any, **kwargs: Any) -> None:
    """Stands for limits of time, and for meeting other ranks: all are where this one is."""


def _asked(init_method: str | None, world: int, rank: int) -> tuple[int | None, int | None]:
    """The size and the rank that a call of `init_process_group` asks for, or the environment."""
    parts = parse_qs(urlsplit(init_method or "").query)
    asked: list[int | None] = []
    for value, name in ((world, "world_size"), (rank, "rank")):
        said = [str(value)] if value >= 0 else parts.get(name, [])
        said = said or [os.environ.get(name.upper(), "")]
        asked.append(int(said[0]) if said[0].lstrip("-").isdigit() else None)
    return asked[0], asked[1]


def _name(backend: str) -> str:
    """A backend as `get_backend` calls it: of "cpu:gloo,cuda:nccl" that of the GPU."""
    parts = dict(part.split(":", 1) for part in str(backend).lower().split(",") if ":" in part)
    return parts.get("cuda", next(iter(parts.values()), str(backend).lower()))


def _store(*args: Any, **kwargs: Any) -> Any:
    """Stands for stores through which processes find each other."""
    home: Any = dist
    return home.HashStore()


def _copied(thing: Any) -> Any:
    try:
        return copy.deepcopy(thing)
    except (TypeError, RuntimeError, ValueError, NotImplementedError, copy.Error):
        return thing
