"""`torch.distributed` in a program of which one rank runs, and the processes that it starts."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import context as contexts
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.utils.data import dataloader

from rooftrace.errors import RequestError
from rooftrace.scripts.launch import records
from rooftrace.scripts.launch.records import CommandLine, HardExit, Ranks
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import original_of, put, when_imported
from rooftrace.tracer.sharding import ddp, fsdp

# -- distributed -----------------------------------------------------------------------------------
# `torch.distributed` in a program that runs as one rank of many, whose others are not there.
#
# Its process group is a fake one of the size that the program asks for: collectives return at once,
# and a recording sees them.  Objects that ranks tell each other are taken to be the same on each.

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
    launcher or the user said how many there are.  say: takes each assumption.
    """

    def __init__(self, ranks: Ranks, fixed: bool, say: Say) -> None:
        self.ranks, self.fixed, self.say = ranks, fixed, say
        self._backends: dict[int, str] = {}  # the chosen backend, by group
        self._mesh: dict[str, int] = {}

    def stand_alone(self) -> None:
        """From here on the process groups of the program are fake ones."""
        replaced: dict[str, Any] = {
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
            stand_ins = (replaced | stores).items()
            put(home, {name: new for name, new in stand_ins if hasattr(home, name)})
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
        stated = _stated(init_method, world_size, rank)
        self._agree(*stated)
        named = {"timeout": timeout} if timeout is not None else {}
        device = options.get("device_id")
        fsdp.begin_group(
            original_of(dist.distributed_c10d, "init_process_group"),
            self.ranks.world,
            self.ranks.rank,
            **named,
        )
        if backend is None:
            kind = getattr(device, "type", None) or ("cuda" if torch.cuda.is_available() else "cpu")
            backend = "nccl" if kind == "cuda" else "gloo"
        self._backends[id(dist.group.WORLD)] = _name(backend)
        self._mesh.clear()
        self._mesh["dp"] = self.ranks.world
        if not any(mesh is self._mesh for mesh in fsdp.running):
            fsdp.running.append(self._mesh)
        when_imported(
            fsdp.STAGE, lambda _: fsdp.stages_alone(lambda _, text: self.say(("bubble", text)))
        )

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
            chosen = _name(backend) if backend else self._backends.get(id(dist.group.WORLD), "nccl")
            self._backends[id(group)] = chosen
        return group

    def backend(self, group: Any = None) -> str:
        """The result of `get_backend`: the backend that the program chose."""
        original = original_of(dist.distributed_c10d, "get_backend")
        backend = original(group)  # raises the errors of torch
        world = self._backends.get(id(dist.group.WORLD))
        name = self._backends.get(id(group or dist.group.WORLD), world)
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
        covers_world = int(mesh.mesh.numel()) == self.ranks.world
        if names and covers_world and (self.axis_assumed or len(names) > len(self._mesh)):
            self._mesh.clear()
            self._mesh.update(zip(names, map(int, mesh.mesh.shape), strict=True))
        return mesh

    # -- objects -----------------------------------------------------------------------------------

    def _all_gather_object(self, object_list: list[Any], obj: Any, group: Any = None) -> None:
        self.say(OBJECTS)
        for position in range(len(object_list)):
            object_list[position] = _copied(obj)

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
            position = max(dist.get_rank(group), 0) % len(scatter_object_input_list)
            scatter_object_output_list[0] = _copied(scatter_object_input_list[position])

    def _no_objects(self, object_list: Sequence[Any], *args: Any, **kwargs: Any) -> int:
        self.say(OBJECTS)
        peer = kwargs.get("src", args[0] if args else 0)
        return int(peer or 0)


def _barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None
) -> Any:
    """Stands for `torch.distributed.barrier`, which would make a tensor on the device."""
    home: Any = dist.distributed_c10d
    group = group or torch_private.get_default_group()
    if torch_private.rank_not_in_group(group):
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


def _stated(init_method: str | None, world: int, rank: int) -> tuple[int | None, int | None]:
    """The size and the rank that a call of `init_process_group` asks for, or the environment."""
    parts = parse_qs(urlsplit(init_method or "").query)
    numbers: list[int | None] = []
    for value, name in ((world, "world_size"), (rank, "rank")):
        texts = [str(value)] if value >= 0 else parts.get(name, [])
        texts = texts or [os.environ.get(name.upper(), "")]
        numbers.append(int(texts[0]) if texts[0].lstrip("-").isdigit() else None)
    return numbers[0], numbers[1]


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


# -- starting --------------------------------------------------------------------------------------
# Processes that a program starts: of its ranks one runs, here; workers of loaders work here.

OTHERS = ("ranks", "processes that the program starts for other ranks do not run")
WORKERS = (
    "loading",
    "workers of data loaders: what they load is loaded in this process, one batch at a time "
    "(num_workers=0)",
)
SPAWNED = (
    "spawned processes",
    "a process that the script spawns has no device, and what it runs is not counted: have it "
    "forked (multiprocessing.set_start_method('fork')), or do its work in the script's own process",
)
_RANK_NAMES = frozenset(
    (
        *("rank", "local_rank", "rank_id", "worker_rank", "gpu", "gpu_id", "device_id", "proc_id"),
        *("process_id", "process_index", "local_process_index", "index", "idx", "i"),
    )
)
"""Names of the first parameter of a function of one rank."""


class OtherProcesses:
    """The other processes that a program starts, by the ways of starting them."""

    def __init__(self, launch: CommandLine, processes: Processes) -> None:
        self._launch, self._processes = launch, processes

    def stay_away(self) -> None:
        """From here on processes of other ranks are not started; that of this rank runs here."""
        import torch.distributed.launcher.api as elastic

        kinds = ("ForkProcess", "SpawnProcess", "ForkServerProcess")
        spawns = {"start_processes": self._start_processes, "spawn": self._spawn}
        loading = {"_get_iterator": self._load_here, "__iter__": self._load_again}
        loose: Any = torch.multiprocessing
        for home in (loose, sys.modules["torch.multiprocessing.spawn"]):
            put(home, {name: new for name, new in spawns.items() if callable(vars(home).get(name))})
        for name in kinds:
            kind = getattr(contexts, name, None)
            if kind is not None:
                forks = name == "ForkProcess"
                start = staticmethod(self._process(original_of(kind, "_Popen"), forks))
                put(kind, {"_Popen": start})
        put(subprocess.Popen, {"__init__": self._subprocess})
        put(elastic.elastic_launch, {"__call__": self._elastic})
        put(dataloader.DataLoader, loading)

    # -- ranks -------------------------------------------------------------------------------------

    def _spawn(
        self, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kw: Any
    ) -> Any:
        return self._start_processes(fn, args, nprocs, join)

    def _start_processes(
        self, fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **kw: Any
    ) -> Any:
        """Stands for `torch.multiprocessing.spawn`: calls `fn` with the rank that runs here."""
        processes = self._processes
        if not processes.fixed and nprocs > 1 and processes.ranks.world == 1:
            processes.spread(nprocs)
        if nprocs > 1:
            processes.say(OTHERS)
        fn(processes.ranks.local_rank % nprocs, *args)
        return None if join else _Done()

    def _elastic(self, launcher: Any, *args: Any) -> dict[int, Any]:
        """Stands for torchrun's Python function: the entry point runs here, with its variables."""
        config = launcher._config
        world = int(config.nproc_per_node) * int(config.max_nodes)
        processes = self._processes
        if not processes.fixed and world > processes.ranks.world:
            processes.spread(world, int(config.nproc_per_node))
        processes.say(OTHERS)
        launch = CommandLine(program="", launcher="torchrun", master=self._launch.master)
        os.environ.update(records.of_ranks(launch, processes.ranks))
        return {processes.ranks.local_rank: launcher._entrypoint(*args)}

    def _process(self, original: Any, forks: bool) -> Callable[[Any], Any]:
        start = getattr(original, "__func__", original)

        def popen(process: Any) -> Any:
            rank = _rank_of(process)
            if rank is None:
                if not forks:
                    self._processes.say(SPAWNED)
                    process._target = process._target and _Spawned(process._target)
                return start(process)
            self._processes.say(OTHERS)
            return _Done(process.run if rank == self._processes.ranks.local_rank else None)

        return popen

    def _subprocess(self, process: Any, args: Any, *rest: Any, **kw: Any) -> None:
        """Stands for the start of a program: one that is to be another rank is not started."""
        env = kw.get("env")
        variables = ("LOCAL_RANK", "RANK", "NODE_RANK")
        if isinstance(env, Mapping) and any(
            env.get(n, "") != os.environ.get(n, "") for n in variables
        ):
            self._processes.say(OTHERS)
            vars(process).update(args=args, returncode=0, pid=0, _child_created=False)
            vars(process).update(stdin=None, stdout=None, stderr=None, _communication_started=False)
            return
        original_of(subprocess.Popen, "__init__")(process, args, *rest, **kw)

    # -- loading -----------------------------------------------------------------------------------

    def _load_here(self, loader: Any) -> Any:
        """Stands for `DataLoader._get_iterator`."""
        if not loader.num_workers:
            return original_of(dataloader.DataLoader, "_get_iterator")(loader)
        self._processes.say(WORKERS)
        return torch_private.SingleProcessDataLoaderIter(_WithoutWorkers(loader))

    def _load_again(self, loader: Any) -> Any:
        """Stands for `DataLoader.__iter__`: workers that persist would be asked for new indices."""
        if not loader.num_workers:
            return original_of(dataloader.DataLoader, "__iter__")(loader)
        return loader._get_iterator()


class _Spawned:
    """The function of a process that is spawned: there the device says why it is not there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cuda: Any = torch.cuda

        def refuse() -> None:
            raise RequestError(SPAWNED[1])

        if not cuda.is_available():
            cuda._lazy_init = refuse
        return self._function(*args, **kwargs)


class _WithoutWorkers:
    """A data loader as one that has no workers."""

    num_workers = 0
    timeout = 0
    prefetch_factor = None
    persistent_workers = False
    multiprocessing_context = None

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)


class _Done:
    """A process that has run here, or that does not run: it has ended well."""

    def __init__(self, run: Callable[[], object] | None = None) -> None:
        self.pid, self.returncode = os.getpid(), 0
        self.sentinel, other = os.pipe()
        os.close(other)  # so that who waits for it sees its end
        self.processes: list[Any] = []
        if run is not None:
            try:
                run()
            except SystemExit as error:
                self.returncode = error.code if isinstance(error.code, int) else bool(error.code)
            except HardExit as error:
                self.returncode = error.code

    def join(self, *args: Any, **kwargs: Any) -> bool:
        """There is nothing to wait for."""
        return True

    def poll(self, *args: Any) -> int:
        """The exit code."""
        return self.returncode

    wait = poll

    def pids(self) -> list[int]:
        """No process was started."""
        return []

    def terminate(self) -> None:
        """It has ended already."""

    kill = interrupt = terminate

    def close(self) -> None:
        """Close the stand-in for the end of the process."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    __del__ = close


def _rank_of(process: Any) -> int | None:
    """The rank that a process is started for, by the name of its function's first parameter."""
    target, args = process._target, process._args
    if target is None:
        return None
    try:
        bound = inspect.signature(target).bind_partial(*args, **process._kwargs).arguments
    except (TypeError, ValueError):
        return None
    for name, value in list(bound.items())[: 2 if "rank" in bound else 1]:
        if name in _RANK_NAMES and isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
