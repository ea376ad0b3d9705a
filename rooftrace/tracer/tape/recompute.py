"""Which ops of a backward run a forward again: recomputation by checkpoints or custom backwards.

The autograd engine sets the grad mode of all code that it calls.  If such code turns gradients on
itself, it builds a graph of its own: it runs a forward again.  That holds for checkpoints of
either kind, for reversible blocks and for any custom backward, also where the engine's own mode is
on (gradients of gradients).  What runs inside, with gradients off too (the forward of an
`autograd.Function`, a `no_grad` block), belongs to it.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd import grad_mode

SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled
"""What every change of the grad mode calls; a function mode sees it."""

_FILE = grad_mode.__file__
_LEAVING = ("__exit__", "__call__")
"""Methods of torch's grad-mode contexts that set the mode back."""
_FAR = 12
"""The most frames of other function modes between a change of the grad mode and our handler."""

Node = tuple[str, int]
"""An autograd node: its name and its number, which no other node of a thread has."""


def running_node() -> Node | None:
    """The autograd node whose backward runs now; None outside of the engine."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


@dataclass(frozen=True, slots=True)
class _Switch:
    """One change of the grad mode by code that the engine called.

    owner: the context that made it; a dead reference means a plain statement, which holds until
    the next change.
    """

    node: Node
    on: bool
    changed: bool
    owner: weakref.ref[Any]


class Recomputation:
    """Follows where code that the autograd engine runs turns gradients on."""

    def __init__(self) -> None:
        self._switches: list[_Switch] = []

    def switched(self, on: bool) -> None:
        """The grad mode is about to be set: called by the handler of that call."""
        owner, method = _owner(sys._getframe(1))
        if owner is None:
            return
        if method in _LEAVING:
            self._switches = [s for s in self._switches if s.owner() is not owner]
            return
        node = running_node()
        if node is None:
            self._switches.clear()
        elif not any(s.owner() is owner for s in self._switches):
            changed = on != torch.is_grad_enabled()
            self._switches.append(_Switch(node, on, changed, weakref.ref(owner)))

    def active(self, node: Node | None) -> bool:
        """Whether code called for this running node has turned gradients on for itself."""
        plain = False
        for switch in self._switches:
            if switch.node == node:
                if switch.owner() is None:
                    plain = switch.on and switch.changed
                elif switch.on:
                    return True
        return plain


def _owner(frame: FrameType | None) -> tuple[Any, str]:
    """The grad-mode context that a change of the mode comes from, and which method of it."""
    for _ in range(_FAR):
        if frame is None or frame.f_code.co_filename == _FILE:
            break
        frame = frame.f_back
    owner: Any = None
    method = ""
    while frame is not None and frame.f_code.co_filename == _FILE:  # no_grad is made of another
        owner, method = frame.f_locals.get("self"), frame.f_code.co_name
        frame = frame.f_back
    return owner, method
