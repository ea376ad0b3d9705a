"""Processes that a program starts: of its ranks one runs, here; workers of loaders work here."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import context as contexts
from typing import Any

import torch.multiprocessing
from torch.utils.data import dataloader

from rooftrace.errors import RequestError
from rooftrace.tracer.launching import environment
from rooftrace.tracer.launching.distributed import Processes
from rooftrace.tracer.launching.records import CommandLine, HardExit
from rooftrace.tracer.patches import original_of, put

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
"""What the first parameter of a function of one rank is called."""


class OtherProcesses:
    """What a program starts, by the processes that it has."""

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
        os.environ.update(environment.of_ranks(launch, processes.ranks))
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
        told = ("LOCAL_RANK", "RANK", "NODE_RANK")
        if isinstance(env, Mapping) and any(env.get(n, "") != os.environ.get(n, "") for n in told):
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
        return dataloader._SingleProcessDataLoaderIter(_WithoutWorkers(loader))

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
        """Close what stands for the end of the process."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    __del__ = close


def _rank_of(process: Any) -> int | None:
    """The rank that a process is started for, by the name of what its function takes first."""
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
