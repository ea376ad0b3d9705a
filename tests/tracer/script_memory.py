"""Bytes that are alive while a script runs for real on CPU tensors, outside of any recorder.

Every storage that an op makes is counted until Python and autograd have let go of it.  Views and
ops in place make none.  What no op makes, such as an array of the host, is not counted, so a script
that keeps its data in arrays and copies batches to its device counts what a GPU would hold.
"""

import contextlib
import io
import runpy
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tracer.script_oracle import its_own_garbage

ROLES = ("weights", "gradients", "optimizer")


@dataclass
class Peak:
    """The fullest moment between two steps of the optimizer: bytes, by storage, and the op."""

    alive: dict[int, int] = field(default_factory=dict)
    size: int = 0
    op: str = ""


class Counted(TorchDispatchMode):
    """Bytes of the storages that ops have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.made = 0
        self.size = 0
        self.peak = Peak()
        self.op = ""
        self.log: list[tuple[str, int]] | None = None
        self._numbers: dict[int, int] = {}  # of storages that are alive, by their places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func is torch.ops.aten.lift_fresh.default  # torch.tensor, which no other op tells of
        tensors = () if made else tree_leaves((args, kwargs))
        given = {storage(t) for t in tensors if isinstance(t, Tensor)}
        out = func(*args, **kwargs)
        self.op = str(func)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and storage(tensor) not in given:
                self.add(tensor)
        self.look()
        if self.log is not None:
            self.log.append((self.op, self.size))
        return out

    def add(self, tensor: Tensor) -> None:
        """An op has made a tensor."""
        key, kept = storage(tensor), tensor.untyped_storage()
        if key in self._numbers:
            return
        self.made += 1
        self._numbers[key] = self.made
        self.alive[self.made] = kept.nbytes()
        self.size += kept.nbytes()
        weakref.finalize(kept, self._gone, key)

    def _gone(self, key: int) -> None:
        self.size -= self.alive.pop(self._numbers.pop(key))

    def number(self, tensor: Tensor) -> int | None:
        """Of the storage of a tensor; None where no op has made it."""
        return self._numbers.get(storage(tensor))

    def look(self) -> None:
        """Whether this is the fullest moment so far."""
        if self.size > self.peak.size:
            self.peak = Peak(dict(self.alive), self.size, self.op)

    def window(self) -> Peak:
        """The fullest moment since the last window, which ends here."""
        done, self.peak = self.peak, Peak()
        self.look()
        return done


def storage(tensor: Tensor) -> int:
    """The place of the bytes of a tensor."""
    return tensor.untyped_storage()._cdata


@dataclass
class RealMemory:
    """Bytes by role at the fullest moment of each training step."""

    steps: list[dict[str, int]] = field(default_factory=list)
    ops: list[str] = field(default_factory=list)


def alive_while_run(path: Path, *words: str) -> RealMemory:
    """Run a script on the CPU; its first argument is the device."""
    counted = Counted()
    roles: dict[int, str] = {}
    host: set[int] = set()  # counters of steps, which stay on the host beside a GPU
    windows: list[tuple[int, Peak]] = []

    def note(tensor: Tensor | None, role: str) -> None:
        number = None if tensor is None else counted.number(tensor)
        if number is not None:
            roles[number] = role

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        group = optimizer.param_groups[0]
        for weight in (w for g in optimizer.param_groups for w in g["params"]):
            note(weight, "weights")
            note(weight.grad, "gradients")
            for name, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor):
                    note(value, "optimizer")
                    number = counted.number(value)
                    if name == "step" and not group.get("fused") and number is not None:
                        host.add(number)
        windows.append((id(optimizer), counted.window()))

    with contextlib.ExitStack() as undo:
        undo.enter_context(its_own_garbage())
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the ops are small
        patch = undo.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", [str(path), "cpu", *words])
        undo.enter_context(contextlib.redirect_stdout(io.StringIO()))
        undo.callback(register_optimizer_step_post_hook(stepped).remove)
        undo.enter_context(sdpa_kernel(SDPBackend.MATH))
        with counted:
            names = runpy.run_path(str(path), run_name="__main__")
        for module in names.values():
            if isinstance(module, nn.Module):
                for tensor in (*module.parameters(), *module.buffers()):
                    note(tensor, "weights")
    found = RealMemory()
    for peak in _cycles(windows):
        bytes_of = dict.fromkeys((*ROLES, "rest"), 0)
        for number, size in peak.alive.items():
            if number not in host:
                bytes_of[roles.get(number, "rest")] += size
        found.steps.append(bytes_of)
        found.ops.append(peak.op)
    return found


def _cycles(windows: list[tuple[int, Peak]]) -> Iterator[Peak]:
    """The fullest moment from one step of the optimizer that steps last to the next."""
    most = Peak()
    for key, peak in windows:
        most = max(most, peak, key=lambda other: other.size)
        if key == windows[-1][0]:
            yield most
            most = Peak()
