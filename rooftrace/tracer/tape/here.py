"""The position of each thread in the recorded code, and which threads are recorded."""

from __future__ import annotations

import queue
import selectors
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.tracer.tape.recompute import running_node
from rooftrace.tracer.tensors import owners


class Here(threading.local):
    """The position of one thread in the recorded code."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []  # the running modules: path and number of the call
        self.modules: list[nn.Module] = []  # these modules
        self.called_for: list[Any] = []  # the autograd node that ran when each module was called
        self.part = "forward"  # of the step
        self.function = ""  # the torch-level function that runs now
        self.after_backward = False  # a backward of the user's has run, and no module since
        self.wants_gradients = False  # a backward failed, as gradients are off
        self.inside = 0  # how many ops that the recorder takes apart are being run
        self.paused = False  # what runs does not enter the graph
        self.devices: tuple[Any, ...] = ()  # the modes that chose a device as a module was called
        self.functions: tuple[Any, ...] = ()  # the function modes under which autograd runs
        self.source = ""  # the line that handed this thread its work
        self.device: torch.device | None = None  # where another thread makes tensors
        self.submitting = False  # the thread hands work to a pool
        self.leave: Callable[[], None] | None = None  # ends what a module's call has begun

    def restart(self) -> None:
        """This thread begins a step: what it ran before belongs to another one."""
        self.stack, self.modules, self.called_for = [], [], []
        self.part, self.function, self.source = "forward", "", ""
        self.after_backward = self.wants_gradients = False

    def call(self, module: nn.Module, path: str, number: int) -> None:
        """A module begins to run: the one at `path`, for the `number`-th time."""
        self.after_backward = False
        self.stack.append((path, number))
        self.called_for.append(running_node())
        self.modules.append(module)

    def end_call(self) -> None:
        """The innermost module has ended."""
        for running in (self.stack, self.modules, self.called_for):
            running.pop()

    def place_of(self, tensor: Tensor) -> tuple[str, str] | None:
        """Kind and name of a parameter or buffer of the running modules; None for other tensors."""
        for (path, _), module in zip(reversed(self.stack), reversed(self.modules), strict=True):
            inside = module.named_modules() if isinstance(tensor, nn.Parameter) else [("", module)]
            for place, part in inside:
                for kind, group in (("parameter", part._parameters), ("buffer", part._buffers)):
                    for name, own in group.items():
                        if own is tensor:
                            steps = (step for step in (path, place, name) if step)
                            return kind, owners.shown_path(".".join(steps))
        return None

    @property
    def path(self) -> str:
        """The path of the running module; "" outside of any."""
        return self.stack[-1][0] if self.stack else ""


_WAITING = frozenset({threading.__file__, queue.__file__, selectors.__file__})
"""Files of the standard library in which a thread stands that waits for others."""
_WAYS = frozenset({"acquire", "get", "join", "put", "select", "wait", "_wait_for_tstate_lock"})
"""Functions of these files in which it does."""


class RecordedThreads:
    """The threads that one recorder follows, each with the thread whose work it does.

    leader: the thread whose work is recorded: that which entered the recorder, unless another one
    has taken the lead.
    """

    def __init__(self) -> None:
        self.leader = 0
        self.idents: dict[int, int] = {}
        self.entered = 0  # how often another thread began to be recorded

    @staticmethod
    def awaits_others(ident: int) -> bool:
        """Whether a thread waits for others, or has ended."""
        frame = sys._current_frames().get(ident)
        if frame is None:
            return True
        return frame.f_code.co_filename in _WAITING and frame.f_code.co_name in _WAYS

    @property
    def running(self) -> bool:
        """Whether another thread than the recorder's own is recorded now."""
        return len(self.idents) > 1

    def here(self) -> bool:
        """Whether the running thread is recorded."""
        return threading.get_ident() in self.idents

    def led(self) -> bool:
        """Whether the running thread does the work of the one that leads."""
        return self.idents.get(threading.get_ident()) == self.leader

    def own(self) -> bool:
        """Whether only the thread that leads is recorded, and runs."""
        return self.led() and list(self.idents.values()).count(self.leader) == 1
