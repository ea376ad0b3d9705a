"""The optimizers of a script: which there are, and which have stepped."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
)

from rooftrace.tracer.patches import original_of, put
from rooftrace.tracer.phases import stepping
from rooftrace.tracer.scripts.recorders import ScriptRecorder

_WAITS_FOR_OTHERS = 8
"""An optimizer may step so often in one training step while another has not stepped at all."""


class Optimizers:
    """The optimizers of a run that step on tensors of the device, each by its first weight.

    there: whether a tensor is on the device.  No turn waits for the step of an optimizer that
    another thread steps, nor for that of an idle one until it steps again: that was made after
    others had stepped in a turn, or that has not stepped while another one did many times, or when
    one stepped for the first time that was made after it had: another model is trained now.
    """

    def __init__(self, there: Callable[[Tensor], bool] = lambda tensor: tensor.is_meta) -> None:
        self._there = there
        self._made: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._last: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._late: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # made after others had stepped
        self._threads: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # theirs
        self.steps: Counter[int] = Counter()  # of the open turn, by the identity of a weight

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self.required())

    def required(self) -> set[int]:
        """Those that have weights of the device to step on."""
        keys = (self._key(optimizer) for optimizer in list(self._made))
        return {key for key in keys if key is not None}

    def have_stepped(self) -> bool:
        """Whether all that the open turn waits for have stepped in it."""
        if not self.steps:
            return False
        there = [(o, key) for o in list(self._made) if (key := self._key(o)) is not None]
        threads = {None, *(self._threads.get(o) for o, key in there if key in self.steps)}
        awake = [key for o, key in there if o not in self._idle and self._threads.get(o) in threads]
        if self.steps.keys() >= set(awake):
            return True
        if max(self.steps.values()) < _WAITS_FOR_OTHERS:
            return False
        self._idle.update(o for o, key in there if key not in self.steps)
        return True

    def names(self) -> dict[int, str]:
        """The class of each of those, by the identity of its weight."""
        made = [(self._key(optimizer), type(optimizer).__name__) for optimizer in list(self._made)]
        return {key: name for key, name in made if key is not None}

    def enter(self, tape: ScriptRecorder) -> None:
        """The states of all of them are on the device, also where nothing reads them."""
        for optimizer in list(self._made):
            if self._key(optimizer) is not None:
                stepping.enter_states(tape, optimizer)

    def trains(self, module: nn.Module) -> bool:
        """Whether one of them steps on a weight of a module."""
        own = {id(p) for p in module.parameters()}
        return any(
            id(p) in own for o in list(self._made) for group in _groups(o) for p in group["params"]
        )

    def note_step(self, optimizer: Optimizer) -> None:
        """One of them has stepped."""
        self._made.add(optimizer)
        key = self._key(optimizer)
        if key is not None:
            self.steps[key] += 1
            if optimizer in self._late and optimizer not in self._last:
                former = list(self._last)
                self._idle.update(o for o in former if self._key(o) not in self.steps)
            self._last[optimizer] = key
            self._threads[optimizer] = threading.get_ident()
            self._idle.discard(optimizer)

    def meet(self) -> None:
        """From here on optimizers that are made are known."""
        made = original_of(Optimizer, "__init__")

        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._made.add(optimizer)
            if self._last:
                self._late.add(optimizer)
            if self.steps:
                self._idle.add(optimizer)
            if threading.current_thread() is not threading.main_thread():
                self._threads[optimizer] = threading.get_ident()

        put(Optimizer, {"__init__": init})

    def _key(self, optimizer: Any) -> int | None:
        """The identity of an optimizer's first weight on the device; None where it has none.

        One that has weights only while it steps is known by its last.
        """
        weights = [weight for group in _groups(optimizer) for weight in group["params"]]
        there = (w for w in weights if self._there(w) and w.requires_grad)
        first = next(there, None)
        if first is not None:
            return id(first)
        return None if weights else self._last.get(optimizer)

    def watch(
        self,
        recorder: ScriptRecorder,
        before: Callable[[], None],
        after: Callable[[], None],
        learnt: Callable[[], stepping.Learnt | None],
    ) -> None:
        """From here on ops of optimizers are the optimizer part of a step.

        before, after: are called before and after each step.  learnt: what is known of the open
        turn.
        """

        def begins(optimizer: Optimizer, closure: bool) -> None:
            with torch._C.DisableTorchFunction():
                before()
                stepping.enter_states(recorder, optimizer)
                if (known := learnt()) is not None:  # the script may drop what it is about to read
                    for weight in (w for group in optimizer.param_groups for w in group["params"]):
                        known.gradients.update(stepping.gradients_of(recorder, weight))
            self._made.add(optimizer)

        def ended(optimizer: Optimizer) -> None:
            with torch._C.DisableTorchFunction():
                self.note_step(optimizer)
            if (known := learnt()) is not None:
                known.step(optimizer)
            after()

        stepping.watched(recorder, begins, ended)
        self.meet()
        for home, names in stepping.on_meta():
            put(home, names)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return list(getattr(optimizer, "param_groups", ()))
