"""What a script does, told to the finder of its steps."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import dataloader

from rooftrace.tracer.patches import original_of, put
from rooftrace.tracer.scripts.calls import ModuleCall

STEP = "step"
"""The mark that a profiler's `step()` is."""


class Watcher(Protocol):
    """What is told of a script's calls and batches."""

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module inside of another, or in a thread that does not lead."""

    def call(self, made: ModuleCall) -> Any:
        """A module is called from outside of any, and of any backward."""

    def leading(self, module: nn.Module | None = None) -> AbstractContextManager[bool]:
        """Whether calls of the running thread, as one of `module`, are told; inside of it no other
        thread's are."""

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch."""


class _Depth(threading.local):
    inside = 0  # how many calls of modules this thread is in
    begun: CodeType | None = None  # of a forward that was called by its name, and not seen to begin


def watch(finder: Watcher) -> None:
    """From here on a finder is told of calls and of batches.

    `model.forward(x)` is a call as well.  What runs in it tells so the first time; from then on
    the forward of that class does.
    """
    depth = _Depth()
    loaders: Any = dataloader._BaseDataLoaderIter
    next_ = original_of(loaders, "__next__")

    def is_inside() -> bool:  # of a call, or of a backward that computes again
        return depth.inside > 0 or torch._C._current_autograd_node() is not None

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = partial(finder.run, module, args, kwargs)
        inside = is_inside() or (depth.begun is not None and _runs(depth.begun))
        depth.inside += 1
        try:
            if inside:
                return run()
            with finder.leading(module) as leads:
                around = _forward_around(module) if leads else None
                depth.begun = None if around is None else around.f_code
                if around is not None:
                    whole, *arguments = _arguments(around)
                    put(*called_by_name(type(whole)))
                    return finder.call(ModuleCall(whole, arguments, {}, run, begun=True))
                if leads:
                    return finder.call(ModuleCall(module, args, kwargs, run))
            return run()
        finally:
            depth.inside -= 1

    def called_by_name(kind: type[nn.Module]) -> tuple[type, dict[str, Any]]:
        home = next(base for base in kind.__mro__ if "forward" in vars(base))
        forward = original_of(home, "forward")

        def told(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_inside() or module._forward_pre_hooks or module._forward_hooks:
                return forward(module, *args, **kwargs)
            return call(module, *args, **kwargs)

        return home, {"forward": told}

    def batch(loader: Any) -> Any:
        began = perf_counter()
        loaded = next_(loader)
        finder.loaded(perf_counter() - began)
        return loaded

    put(nn.Module, {"__call__": call})
    put(loaders, {"__next__": batch})


def _running() -> Iterator[FrameType]:
    """The functions that run now, the innermost first."""
    at: FrameType | None = sys._getframe(1)
    while at is not None:
        yield at
        at = at.f_back


def _runs(function: CodeType) -> bool:
    """Whether a function runs around this one."""
    return any(at.f_code is function for at in _running())


def _forward_around(part: nn.Module) -> FrameType | None:
    """The outermost running forward of a module that `part` belongs to; None without one."""
    outermost = None
    for at in _running():
        if at.f_code.co_name == "forward" and at.f_code.co_argcount:
            whole = _arguments(at)[0]
            if isinstance(whole, nn.Module) and whole is not part:
                outermost = at if any(part is m for m in whole.modules()) else outermost
    return outermost


def methods_around() -> frozenset[int]:
    """The running methods of the script's modules."""
    return frozenset(
        id(at)
        for at in _running()
        if at.f_code.co_varnames[:1] == ("self",) and _is_method(at.f_code, at.f_globals)
    )


_METHODS: dict[CodeType, bool] = {}  # code of functions with a `self`: whether it is a module's


def _is_method(code: CodeType, names: dict[str, Any]) -> bool:
    """Whether a function is a method of a module's class, which stands among these names."""
    if code not in _METHODS:
        kinds = [kind for kind in list(names.values()) if isinstance(kind, type)]
        methods = [
            inspect.unwrap(vars(kind)[code.co_name])
            for kind in kinds
            if issubclass(kind, nn.Module) and kind is not nn.Module and code.co_name in vars(kind)
        ]
        _METHODS[code] = any(getattr(method, "__code__", None) is code for method in methods)
    return _METHODS[code]


def _arguments(function: FrameType) -> list[Any]:
    """The arguments of a running function that have names."""
    code = function.f_code
    return [function.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]


def watch_marks(marked: Callable[[str], None]) -> None:
    """From here on `marked` is told of marks: names of ranges that begin in torch.profiler or NVTX,
    and "step" for the steps of a profiler."""

    def tell(home: Any, method: str, name_of: Callable[..., Any]) -> None:
        original = original_of(home, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            marked(str(name_of(*args, **kwargs)))
            return original(*args, **kwargs)

        put(home, {method: wrapped})

    nvtx: Any = torch.cuda.nvtx
    tell(torch.autograd.profiler.record_function, "__enter__", lambda region: region.name)
    tell(torch.profiler.profile, "step", lambda profiler: STEP)
    for name in ("range_push", "range_start", "mark"):
        tell(nvtx, name, lambda msg, *rest: msg)
