"""What a script does, told to the finder of its steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import dataloader

from rooftrace.tracer.patches import current_scope, original_of, replaced

STEP = "step"
"""The mark that a profiler's `step()` is."""


class Watcher(Protocol):
    """What is told of a script's calls and batches."""

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module inside of another, or in a thread that does not lead."""

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module that is called from outside of any."""

    def leading(self, module: nn.Module | None = None) -> AbstractContextManager[bool]:
        """Whether calls of the running thread, as one of `module`, are told; inside of it no other
        thread's are."""

    def loaded(self, seconds: float) -> None:
        """A data loader gave a batch."""


class _Depth(threading.local):
    inside = 0  # how many calls of modules this thread is in


@contextlib.contextmanager
def watched(finder: Watcher) -> Iterator[None]:
    """Inside, in the threads of the current scope, a finder is told of calls and of batches."""
    depth = _Depth()
    loaders: Any = dataloader._BaseDataLoaderIter
    next_ = original_of(loaders, "__next__")

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if depth.inside:
            return finder.run(module, args, kwargs)
        depth.inside += 1
        try:
            with finder.leading(module) as leads:
                if leads:
                    return finder.call(module, args, kwargs)
            return finder.run(module, args, kwargs)
        finally:
            depth.inside -= 1

    def batch(loader: Any) -> Any:
        began = perf_counter()
        loaded = next_(loader)
        finder.loaded(perf_counter() - began)
        return loaded

    assert current_scope() is not None
    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced(nn.Module, {"__call__": call}))
        undo.enter_context(replaced(loaders, {"__next__": batch}))
        yield


@contextlib.contextmanager
def marks_told(marked: Callable[[str], None]) -> Iterator[None]:
    """Inside, `marked` is told of marks: names of ranges that begin, in torch.profiler or NVTX, and
    "step" for the steps of a profiler."""

    def told(name: Any) -> None:
        marked(str(name))

    def telling(home: Any, method: str, name_of: Callable[..., Any]) -> dict[str, Any]:
        original = original_of(home, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            told(name_of(*args, **kwargs))
            return original(*args, **kwargs)

        return {method: wrapped}

    nvtx: Any = torch.cuda.nvtx
    with contextlib.ExitStack() as undo:
        region = torch.autograd.profiler.record_function
        begins = telling(region, "__enter__", lambda region: region.name)
        undo.enter_context(replaced(region, begins))
        steps = telling(torch.profiler.profile, "step", lambda profiler: STEP)
        undo.enter_context(replaced(torch.profiler.profile, steps))
        for name in ("range_push", "range_start", "mark"):
            undo.enter_context(replaced(nvtx, telling(nvtx, name, lambda msg, *rest: msg)))
        yield
