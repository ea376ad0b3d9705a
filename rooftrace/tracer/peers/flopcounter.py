"""PyTorch's own FlopCounterMode: formulas for the ops that reach the dispatcher."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.module_tracker import ModuleTracker

from rooftrace.tracer.peers.counts import PeerCount, exclusive
from rooftrace.tracer.phases import PlainCall

_ROOT = "Global"
"""The name under which torch's tracker counts everything."""
_FORWARD_HOOKS = (
    "the hooks of FlopCounterMode's module tree fail here: counted with hooks of ours on modules"
)


def by_tensor_hooks(call: PlainCall) -> PeerCount:
    """FlopCounterMode's counts, with torch's tensor hooks that tell the modules of a backward."""
    return _counted(call, ModuleTracker)


def by_module_hooks(call: PlainCall) -> PeerCount:
    """FlopCounterMode's counts without tensor hooks: only the modules of a forward are known."""
    counted = _counted(call, lambda: _ForwardTracker(call.module))
    return replace(counted, note=_FORWARD_HOOKS)


def _counted(call: PlainCall, tracker: Callable[[], Any]) -> PeerCount:
    seen = _Uncounted(tracker())
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = tracker()
    # The mode entered last sees ops first: what FlopCounterMode takes apart comes to `seen` after.
    with seen.tracker, seen, counter:
        call()
    root = type(call.module).__name__
    inclusive = {
        _own_path(name, root): {str(op): int(n) for op, n in counts.items()}
        for name, counts in counter.get_flop_counts().items()
        if name != root  # Global has what it has, and what backward does outside of every module
    }
    uncounted: Counter[tuple[str, str]] = Counter()
    for (name, op), calls in seen.calls.items():
        uncounted[_own_path(name, root), op] += calls
    version = torch.__version__.partition("+")[0]
    return PeerCount("", version, flops=exclusive(inclusive), uncounted=uncounted)


class _Uncounted(TorchDispatchMode):
    """The calls of ops without a formula in torch's registry, counted by module."""

    def __init__(self, tracker: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if packet not in flop_registry:
            where = max(self.tracker.parents - {_ROOT}, key=len, default=_ROOT)
            self.calls[where, str(func)] += 1
        return func(*args, **(kwargs or {}))


class _ForwardTracker:
    """The modules whose forward runs, by the names that torch's tracker gives them.

    It puts no hooks on tensors, as torch's does to know them in backward too: those fail on a
    tensor that requires a gradient and was made without one, such as a view of a parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        root = type(module).__name__
        self.parents = {_ROOT}
        self._names = {
            part: f"{root}.{path}" if path else root for path, part in module.named_modules()
        }
        self._handles: list[Any] = []
        self._thread = 0  # the hooks are of the whole process, and act in this thread only

    def __enter__(self) -> _ForwardTracker:
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(lambda part, args: self._enter(part)),
            register_module_forward_hook(lambda part, args, output: self._leave(part)),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, part: nn.Module) -> None:
        if part in self._names and threading.get_ident() == self._thread:
            self.parents.add(self._names[part])

    def _leave(self, part: nn.Module) -> None:
        if threading.get_ident() == self._thread:
            self.parents.discard(self._names.get(part, ""))


def _own_path(name: str, root: str) -> str:
    """ "GPT2.h.0" as "h.0"; what torch calls Global is the root too."""
    if name in (_ROOT, root):
        return ""
    return name.removeprefix(f"{root}.")
