"""What a script does, told to the finder of its steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.data import dataloader

from rooftrace.tracer.patches import current_scope, original_of, replaced
from rooftrace.tracer.scripts.finding import Finder


class _Depth(threading.local):
    inside = 0  # how many calls of modules this thread is in


@contextlib.contextmanager
def watched(finder: Finder) -> Iterator[None]:
    """Inside, in the threads of the current scope, a finder is told of calls and of batches."""
    depth = _Depth()
    main = threading.get_ident()
    loaders: Any = dataloader._BaseDataLoaderIter
    next_ = original_of(loaders, "__next__")

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if depth.inside or threading.get_ident() != main:
            return finder.run(module, args, kwargs)
        depth.inside += 1
        try:
            return finder.call(module, args, kwargs)
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


_ATTENTION = "torch.nn.attention."


@contextlib.contextmanager
def compiling(said: list[str]) -> Iterator[None]:
    """Inside, torch.compile leaves code as it is written, and `said` has a line for each call.

    Torch's own functions of attention are left out: they are one kernel, compiled or not.
    """
    compile_ = original_of(torch, "compile")

    def compiled(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, **options)
        if not str(getattr(model, "__module__", "")).startswith(_ATTENTION):
            said.append(type(model).__name__ if isinstance(model, nn.Module) else repr(model))
        return compile_(model, **options)

    with replaced(torch, {"compile": compiled}):
        yield
