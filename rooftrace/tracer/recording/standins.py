"""Stand-ins for functions and classes of torch that need a device, during a trace.

User code may import these names meanwhile and keep them.  So a class stays the same object, with
other methods during the trace, and a stand-in function calls the original after the trace.  Other
threads of the process see neither (see `patches`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nested._internal import nested_tensor, sdpa
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.tracer.emulation import handles
from rooftrace.tracer.patches import Scope, contexts, original_of, replaced, shared
from rooftrace.tracer.source import spec_after
from rooftrace.tracer.tensors import trees


class _PlainImports:
    """A finder that lets modules run as they would outside: none of their tensors is on meta."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec: Any = spec_after(self, name, path, target)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module") and not isinstance(loader, type):
            loader.exec_module = _plainly(loader)
        return spec


def _plainly(loader: Any) -> Callable[[Any], None]:
    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        if Scope.current() is None:  # a thread of somebody else imports it
            loader.exec_module(module)
            return
        with contexts.plainly():
            loader.exec_module(module)

    return exec_module


@contextlib.contextmanager
def plain_imports() -> Iterator[None]:
    """Inside, a module that is imported for the first time is not part of what is traced."""
    finder: Any = _PlainImports()
    with _disable_current_modes():  # it imports what it needs the first time
        nested_tensor._nt_view_dummy()  # torch makes it in the first nested tensor of a process
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _NoDevice:
    """Stands for contexts of a GPU that is not there: does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> _NoDevice:
        return self

    def __getattr__(self, name: str) -> _NoDevice:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _NoDevice:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


def _made(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """An instance of a class of streams or events without its device."""
    return handles.made(kind, _NoDevice)


_HANDLE: dict[str, Any] = {
    "__new__": staticmethod(_made),
    "__init__": handles.nothing,
    "__eq__": lambda self, other: type(self) is type(other),
    "__hash__": lambda self: 0,
    "__repr__": lambda self: f"<{type(self).__name__} of no device>",
    "__reduce__": lambda self: (type(self), ()),
    "query": lambda self: True,
    "synchronize": handles.nothing,
    "device": property(lambda self: torch.device("cuda", 0)),
}
_STREAM = {
    **_HANDLE,
    "wait_event": handles.nothing,
    "wait_stream": handles.nothing,
    "record_event": lambda self, event=None: event or _made(torch.cuda.Event),
    "stream_id": 0,
    "cuda_stream": 0,
    "priority": 0,
}
_EVENT = {
    **_HANDLE,
    "record": handles.nothing,
    "wait": handles.nothing,
    "elapsed_time": lambda self, end: 1.0,  # ms: no time passes, and nobody may divide by it
}
_REGION = {"__init__": handles.nothing, "__enter__": handles.nothing, "__exit__": handles.nothing}


def _stream(*args: Any, **kwargs: Any) -> Any:
    return _made(torch.cuda.Stream)


_CUDA = {
    "synchronize": handles.nothing,
    "set_device": handles.nothing,
    "set_stream": handles.nothing,
    "stream": lambda stream: _NoDevice(),
    "current_stream": _stream,
    "default_stream": _stream,
    "current_device": lambda: 0,
}


@contextlib.contextmanager
def jagged_attention_fused() -> Iterator[None]:
    """Inside, attention of jagged tensors takes flash attention on meta, as it does on a GPU.

    PyTorch asks the device, and does so itself where a FlopCounterMode looks on.
    """
    home: Any = sdpa
    name = "_is_computing_meta_flops"
    original = getattr(home, name, None)
    if original is None:
        yield
        return
    with replaced(home, {name: trees.on_meta}):
        yield


@contextlib.contextmanager
def device_calls_quiet() -> Iterator[None]:
    """Inside, on a machine without a GPU, calls that wait for one or choose its streams do nothing.

    A trace needs no device, but these calls would fail without one.  Where a device is emulated
    (see `emulation`) it answers them.
    """
    cuda = torch.cuda
    with contextlib.ExitStack() as undo:
        if not cuda.is_available():
            for home, replacements in (
                (cuda.Stream, _STREAM),
                (cuda.Event, _EVENT),
                (cuda.device, _REGION),
                (cuda, _CUDA),
                (cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), handles.nothing)),
            ):
                undo.enter_context(replaced(home, replacements))
        yield


class _OursToIgnore:
    """The pattern of a filter of warnings: matches only in threads that are recorded."""

    def match(self, text: str) -> bool:
        """Whether a warning of this text is not to be shown."""
        return Scope.current() is not None and text.startswith(_NOT_OURS)


_NOT_OURS = (
    "Using `torch.compile(module)` when there are",
    "Sparse CSR",
    "Sparse invariant",
    "To copy construct from a tensor",
    "FSDP2-wrapped module (",
)
"""Warnings that torch would give with a line of ours or its own, for what a trace does not harm."""


def _ignored() -> Callable[[], None]:
    """Add a filter of warnings; returns what takes it away."""
    entry: Any = ("ignore", _OursToIgnore(), Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]

    def undo() -> None:
        with contextlib.suppress(ValueError):  # somebody has set other filters since
            warnings.filters.remove(entry)  # type: ignore[attr-defined]

    return undo


_WARNINGS = shared.Shared(_ignored)


def warnings_quiet() -> contextlib.AbstractContextManager[None]:
    """Inside, warnings that would name a line of ours are not shown; other threads' are."""
    return _WARNINGS.used()


# -- caches ----------------------------------------------------------------------------------------

_LENGTH = "_rooftrace_length"
"""Attribute of a layer of a cache: the tokens that recorded calls have put into it."""


@contextlib.contextmanager
def static_caches_counted() -> Iterator[None]:
    """Inside, a layer of a static cache knows its length from the calls that filled it.

    Transformers 4 counts the slots that are not zero, which no trace knows.  The calls that fill a
    cache say it too.
    """
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "StaticLayer", None)
    if kind is None or "cumulative_length" in kind.__init__.__code__.co_names:
        yield
        return
    update, length = original_of(kind, "update"), original_of(kind, "get_seq_length")

    def counted(layer: Any, key_states: Any, *args: Any, **kwargs: Any) -> Any:
        before = vars(layer).get(_LENGTH) if layer.is_initialized else 0
        filled = update(layer, key_states, *args, **kwargs)
        if before is not None:  # else the user has filled it
            setattr(layer, _LENGTH, before + key_states.shape[-2])
        return filled

    def told(layer: Any) -> Any:
        known = vars(layer).get(_LENGTH)
        return length(layer) if known is None else known

    with replaced(kind, {"update": counted, "get_seq_length": told}):
        yield
