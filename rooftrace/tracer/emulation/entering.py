"""An emulated device, entered: from here on torch.cuda answers the threads of one scope.

What torch's own Python code asks of its C half is answered there, so that most of torch.cuda runs
as it is written, also where user code imported a function of it before.  Other threads see the
build that is installed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.emulation import (
    accelerator,
    backends,
    defaults,
    devices,
    extensions,
    files,
    generators,
    graphs,
    legacy,
    memory,
    scaler,
    streams,
    triton,
)
from rooftrace.tracer.emulation.facts import Device
from rooftrace.tracer.emulation.pinning import Calls, Pinned
from rooftrace.tracer.emulation.state import Assume, Clock, Emulation, Meter, Tell
from rooftrace.tracer.patches import (
    Scope,
    contexts,
    current_scope,
    original_of,
    replaced,
    shared,
)
from rooftrace.tracer.sharded import streams as queues

_cuda: Any = torch.cuda
_torch: Any = torch


@contextlib.contextmanager
def emulated(
    device: Device,
    meter: Meter,
    clock: Clock,
    index: int = 0,
    assume: Assume | None = None,
    tell: Tell | None = None,
) -> Iterator[None]:
    """Inside, the threads of the running scope see a CUDA device; at the end all is as before.

    Threads that they start see it too, and so do scopes that are entered inside: a recorder's.
    Where there is no scope, the running thread gets one.  index: the device of this process.
    assume: is told, once for each kind, of answers that follow a policy: kind and text.  tell: is
    told of CUDA graphs: "capture", "captured", "replay", "replayed".
    """
    here = Emulation(device, meter, clock, index, assume, tell)
    with contextlib.ExitStack() as undo:
        undo.callback(here.end)
        scope = current_scope()
        if scope is None:
            scope = Scope()
            undo.enter_context(scope.entered())
        undo.callback(setattr, scope, "spans", scope.spans)
        scope.spans = True
        _forget_answers()
        undo.callback(_forget_answers)
        undo.callback(queues.select, queues.DeviceModule.current_stream())
        undo.enter_context(backends.switches_put_back())
        undo.enter_context(defaults.put_back())
        pinned, own, types = Pinned(here), streams.Queues(here), legacy.classes()
        for module, values in _answers(here, own, types):
            undo.enter_context(shared.answered(module, values))
        for home, replacements in _replacements(here, own, pinned, types):
            undo.enter_context(replaced(home, replacements))
        undo.enter_context(extensions.compiled_code_refused(scope))
        undo.enter_context(triton.stood_in(here.assume))
        undo.enter_context(_followed(scope))
        undo.enter_context(_as_it_was(_cuda.graphs.graph, "default_capture_stream"))
        undo.enter_context(contexts.functions_on([Calls(pinned)]))
        _say(here)
        yield


def _say(here: Emulation) -> None:
    """What is assumed whatever the code asks."""
    for fact in here.device.guessed:
        here.assume(
            f"device {fact}",
            f"{here.device.name}: the {fact} is not in its chip file and was inferred",
        )


# -- what is answered, and what is replaced --------------------------------------------------------


def _answers(
    here: Emulation, own: streams.Queues, types: dict[str, Any]
) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    of_cuda = {
        **extensions.refused_names(),
        **backends.collective_names(),
        **backends.settings(here),
        **devices.names(here),
        **memory.names(here),
        **streams.names(own),
    }
    yield (
        _torch._C,
        {**of_cuda, **accelerator.names(here, of_cuda), **backends.names(here)},
    )
    yield _torch.version, backends.version(here)
    yield _torch, {"Generator": generators.kind(here)}
    own_names = {"default_generators": generators.default(here)}
    yield _cuda, {**own_names, **types, **legacy.storages()}


def _replacements(
    here: Emulation, own: streams.Queues, pinned: Pinned, types: dict[str, Any]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield from _wherever_bound(
        _cuda,
        {**devices.functions(here), **graphs.functions(here), **memory.functions(here)},
    )
    yield from _wherever_bound(
        _cuda.memory,
        {"memory_stats": memory.statistics_told(original_of(_cuda.memory, "memory_stats"))},
    )
    yield _cuda.Stream, streams.stream_methods(own)
    yield _cuda.Event, streams.event_methods(own)
    yield _cuda.CUDAGraph, graphs.graph_methods(here)
    yield _torch.backends.cudnn.m, backends.cudnn_functions(here)
    stub = type(_cuda.nvtx._nvtx)
    if not isinstance(_cuda.nvtx._nvtx, ModuleType):
        yield stub, backends.nvtx_functions()
    yield from backends.distributed(here)
    yield from backends.profilers(here)
    default = defaults.DefaultType(types)
    yield _torch, {**files.functions(here), **default.functions()}
    yield _torch.utils._device.DeviceContext, defaults.context_methods()
    yield _torch.serialization, {**files.functions(here), **files.placing()}
    rebuilt = files.rebuilding(here)
    yield _torch._utils, files.states(rebuilt)
    yield _torch._weights_only_unpickler, files.allowed(rebuilt)
    yield _torch.UntypedStorage, files.storage_methods()
    yield torch.amp.GradScaler, scaler.methods(here)
    yield from extensions.refused_classes()
    yield _cuda.CudaError, devices.error_methods()
    yield Tensor, {**pinned.methods(), **legacy.methods(types), **files.tensor_methods()}
    yield Tensor, default.methods()


def _wherever_bound(home: Any, functions: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Modules of torch that hold one of these functions of torch.cuda under its name.

    They import functions from each other, and call what they hold.
    """
    parts = [module for name, module in sys.modules.items() if name.startswith("torch.cuda")]
    unset = {name: functions[name] for name in _SET_BY_C if name in functions}
    for module in {id(part): part for part in (home, *parts) if part is not None}.values():
        held = {name: item for name, item in functions.items() if name in vars(module)}
        if module is home:  # once: another thread may put its own there meanwhile
            unset = {name: item for name, item in unset.items() if name not in held}
        if held:
            yield module, held
    if unset:
        yield home, unset


_SET_BY_C = ("_get_device_properties",)
"""Functions that the C half puts into torch.cuda when it is initialized."""


# -- threads and the process -----------------------------------------------------------------------


@contextlib.contextmanager
def _followed(scope: Scope) -> Iterator[None]:
    """Inside, threads that threads of the scope start belong to it, too."""
    start, submit = (
        original_of(threading.Thread, "start"),
        original_of(ThreadPoolExecutor, "submit"),
    )

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            if current_scope() is not None:
                return function(*args, **kwargs)
            with scope.entered():
                return function(*args, **kwargs)

        return run

    def started(thread: threading.Thread) -> Any:
        vars(thread)["run"] = inside(thread.run)
        return start(thread)

    def submitted(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(pool, inside(function), *args, **kwargs)

    with (
        replaced(threading.Thread, {"start": started}),
        replaced(ThreadPoolExecutor, {"submit": submitted}),
    ):
        yield


@contextlib.contextmanager
def _as_it_was(home: Any, name: str) -> Iterator[None]:
    """An attribute of a class that torch sets for good is put back at the end."""
    before = vars(home).get(name)
    try:
        yield
    finally:
        if name in vars(home):
            setattr(home, name, before)


_ASKING = ("torch.cuda", "torch.accelerator", "torch.utils._triton", "torch._utils", "torch.amp")
"""Modules of torch that keep what they once heard of a device."""


def _forget_answers() -> None:
    """Clear the caches of functions that ask for a device: their answers change here."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_ASKING) and module is not None:
            for item in list(vars(module).values()):
                clear = getattr(item, "cache_clear", None)
                if clear is not None and getattr(item, "__module__", "").startswith("torch"):
                    clear()
