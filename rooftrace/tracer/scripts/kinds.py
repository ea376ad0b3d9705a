"""Which turn a call of a module belongs to: a training step, or a turn of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.records import INFERENCE, TRAINING
from rooftrace.tracer.scripts.turns import OpenTurn
from rooftrace.tracer.scripts.watching import methods_around
from rooftrace.tracer.tensors import tensors_in


class Kinds:
    """Tells training steps from calls without gradients, by the optimizers that there are.

    Without any, a script may still train by hand: a call that a backward follows is a step then,
    and ends with that backward.

    A model that nothing trains may help to train another, as a teacher does, or be tried by itself,
    as an average of weights is.  It is tried if it is called again on new data of the host and no
    call with gradients came between.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._tried: set[int] = set()  # models that nothing trains and that are called alone
        self._by_hand = False  # a backward ran, and there is no optimizer

    @property
    def train(self) -> bool:
        """Whether the script is known to train something."""
        return self._by_hand or self._optimizers.known

    def of(self, module: nn.Module) -> str:
        """The kind of the turn that a call of a module begins."""
        known = self._optimizers.known
        if not known and self._by_hand and torch.is_grad_enabled():
            return TRAINING
        if not known or not torch.is_grad_enabled():
            if not known or torch.is_inference_mode_enabled() or id(module) in self._tried:
                return INFERENCE
            if self._optimizers.trains(module) or not weighs(module):
                return INFERENCE
        return TRAINING

    def differentiated(self, turn: OpenTurn) -> None:
        """A backward has run in a turn, which makes it a step if there is no optimizer."""
        turn.backwards += 1
        if not self._optimizers.known:
            self._by_hand = True
            turn.kind = TRAINING

    def whole(self, turn: OpenTurn) -> bool:
        """Whether all of a turn has run, but for what follows its last call."""
        if turn.kind != TRAINING:
            return True
        if self._by_hand and not self._optimizers.known:
            return turn.backwards > 0
        return self._optimizers.have_stepped()

    def goes_on(self, turn: OpenTurn, module: nn.Module, arguments: Any, brought: int) -> bool:
        """Whether a call belongs to the open turn; if not, the kind of that turn may change.

        brought: bytes from the host so far.
        """
        if not torch.is_grad_enabled() and not weighs(module):
            # A loss or a score of what was computed, if no other method of a model begins with it.
            known = id(module) in turn.modules and turn.methods
            return not known or bool(turn.methods & methods_around())
        if turn.kind == INFERENCE and id(module) not in turn.modules:
            alone = not (self.train and torch.is_grad_enabled())
            if alone and turn.methods & methods_around():
                return True  # one method calls both, as `generate` does that runs part by part
        if turn.kind == INFERENCE and not self.train and id(module) not in turn.modules:
            # Another part of a model, which may yet be trained by hand.
            return any(tensor.grad_fn is not None for tensor in tensors_in(arguments))
        if self.whole(turn):
            return False
        if turn.helps is None:
            return True
        if not torch.is_grad_enabled() and self.of(module) == INFERENCE:
            turn.kind = INFERENCE
        elif id(module) in turn.helps and brought != turn.had:
            self._tried |= turn.helps
            turn.kind = INFERENCE
        return turn.kind == TRAINING

    def settle(self, turn: OpenTurn) -> None:
        """A turn has ended: it was a training step if a backward ran or an optimizer has stepped.

        One that has weights only while it steps is known from its first step on.
        """
        stepped = turn.helps is None and self._optimizers.have_stepped()
        if turn.backwards or stepped:
            turn.kind = TRAINING

    def note(self, turn: OpenTurn, module: nn.Module, brought: int) -> None:
        """A call belongs to a turn."""
        turn.had = brought
        turn.modules.add(id(module))
        if turn.kind == INFERENCE and not turn.methods:
            turn.methods = methods_around()
        if torch.is_grad_enabled():
            turn.helps = None
        elif turn.helps is not None and weighs(module):
            turn.helps.add(id(module))


def weighs(module: nn.Module) -> bool:
    """Whether a module has weights."""
    return next(module.parameters(), None) is not None
