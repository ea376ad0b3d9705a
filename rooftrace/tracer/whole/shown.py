"""Ops that stay whole, as the dispatch modes of the user's own code see them.

On a GPU a mode (a selective checkpoint's policy, a counter, a logger) is shown the op that PyTorch
chooses there, and not ours.  While such a mode stands before the recorder, an op of ours calls that
public op; the recorder, which gets it last, runs and records ours in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class _Showing(threading.local):
    """The public op that is being shown, and what the recorder runs for it."""

    now: tuple[Any, Callable[..., Any]] | None = None


_showing = _Showing()


def watched() -> bool:
    """Whether a dispatch mode of the user's code sees the next op before the recorder does."""
    count = torch._C._len_torch_dispatch_stack()
    if not count:
        return False
    return not getattr(torch._C._get_dispatch_stack_at(count - 1), "runs_whole", False)


def show(public: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a public op; where the recorder gets it, it does `run` with the same arguments."""
    outer, _showing.now = _showing.now, (public, run)
    try:
        return public(*args, **kwargs)
    finally:
        _showing.now = outer


def behind(func: Any) -> Callable[..., Any] | None:
    """What the recorder runs for an op that is only shown; None for an op that is called."""
    now = _showing.now
    return now[1] if now is not None and now[0] is func else None


def unrecorded() -> Tensor:
    """A stand-in for a tensor that only a GPU's kernel has (random state, reserve)."""
    with _disable_current_modes():
        return torch.empty((), device="meta")
