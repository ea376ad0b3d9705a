"""torch.compile while we record: code runs as it is written, and tells what would be compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.tape import records


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, what torch.compile has wrapped runs as it is written: here, not in other threads.

    `records.compiling` is where Dynamo would compile: the callback that it is given stays here.
    """
    import torch._dynamo.eval_frame as frames

    stance = original_of(frames, "_callback_from_stance")
    if not callable(stance):
        with torch.compiler.set_stance("force_eager"):
            yield
        return

    def set_callback(callback: Any) -> Any:
        before = records.compiling.call
        call = callback if isinstance(callback, records.CompiledCall) else None
        if call is None:
            caller = sys._getframe(2).f_locals  # of torch's wrapper, behind our guard
            outer, function = caller.get("prior"), caller.get("fn")
            if isinstance(outer, records.CompiledCall):
                # What is compiled in compiled code is a part of that.
                call = outer if callable(callback) or _is_looked_through(function) else None
            elif callable(callback) and not _module_of(function).startswith(_ATTENTION):
                call = records.CompiledCall(_name_of(function))
        records.compiling.call = call
        return before

    def by_stance(callback: Any) -> Any:
        if isinstance(callback, records.CompiledCall) or not callable(callback):
            return callback
        return None if frames._stance.stance == "force_eager" else callback

    stand_ins: dict[str, Any] = {
        "set_eval_frame": set_callback,
        "_maybe_set_eval_frame": set_callback,
        "_callback_from_stance": by_stance,
    }
    counter = original_of(frames, _COUNTER)
    if callable(counter):

        def count(frames: int) -> int:
            """What it was: 0 where a count begins, so that nobody counts; then as if some were."""
            return 0 if frames == 0 else max(counter(frames), 1)

        stand_ins[_COUNTER] = count
    autograd: Any = torch._C._dynamo.compiled_autograd
    none = {"set_autograd_compiler": lambda compiler, dynamic: (None, False)}
    with replaced(frames, stand_ins), replaced(autograd, none):
        yield


def _is_looked_through(function: Any) -> bool:
    """Whether Dynamo compiles what this function does, although torch disables it there: a
    checkpoint, and the ops of a subclass of Tensor."""
    name = getattr(function, "__name__", "")
    return name == "__torch_dispatch__" or _module_of(function) == "torch.utils.checkpoint"


def _module_of(function: Any) -> str:
    return str(getattr(function, "__module__", ""))


def _name_of(function: Any) -> str:
    """What a compiled callable is called: a module by its class, a function as it was defined."""
    name = str(getattr(function, "__qualname__", "")).rpartition("<locals>.")[2]
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type):
        return name or type(function).__name__
    kind, name = type(owner).__name__, name.rpartition(".")[2]
    called = isinstance(owner, nn.Module) and name in _CALLS
    return kind if called or not name else f"{kind}.{name}"


_CALLS = ("", "_call_impl", "_wrapped_call_impl", "__call__", "forward")
_ATTENTION = "torch.nn.attention."
"""Where torch has functions of attention, each of which is one kernel, compiled or not."""
_COUNTER = "set_fullgraph_compiled_frame_count"
"""Counts the frames that fullgraph=True compiles, which must not be none, from torch 2.12 on."""
