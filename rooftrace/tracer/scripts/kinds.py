"""Which turn a call of a module belongs to: a training step, or a turn of its own."""

from __future__ import annotations

import torch
from torch import nn

from rooftrace.tracer.scripts.optimizers import Optimizers
from rooftrace.tracer.scripts.records import INFERENCE, TRAINING
from rooftrace.tracer.scripts.turns import OpenTurn


class Kinds:
    """Tells training steps from calls without gradients, by the optimizers that there are.

    A model that nothing trains may help to train another, as a teacher does, or be tried by itself,
    as an average of weights is.  It is tried if it is called again on new data of the host and no
    call with gradients came between.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._tried: set[int] = set()  # models that nothing trains and that are called alone

    def of(self, module: nn.Module) -> str:
        """The kind of the turn that a call of a module begins."""
        known = self._optimizers.known
        if not known or not torch.is_grad_enabled():
            if not known or torch.is_inference_mode_enabled() or id(module) in self._tried:
                return INFERENCE
            if self._optimizers.trains(module) or not _weighs(module):
                return INFERENCE
        return TRAINING

    def goes_on(self, turn: OpenTurn, module: nn.Module, stepped: bool, brought: int) -> bool:
        """Whether a call belongs to the open turn; if not, the kind of that turn may change.

        stepped: the optimizers have all stepped in it.  brought: bytes from the host so far.
        """
        if not torch.is_grad_enabled() and not _weighs(module):
            return True  # a loss or a score of what was computed
        if turn.kind == INFERENCE or stepped:
            return False
        if turn.helps is None:
            return True
        if not torch.is_grad_enabled() and self.of(module) == INFERENCE:
            turn.kind = INFERENCE
        elif id(module) in turn.helps and brought != turn.had:
            self._tried |= turn.helps
            turn.kind = INFERENCE
        return turn.kind == TRAINING

    def note(self, turn: OpenTurn, module: nn.Module, brought: int) -> None:
        """A call belongs to a turn."""
        turn.had = brought
        if torch.is_grad_enabled():
            turn.helps = None
        elif turn.helps is not None and _weighs(module):
            turn.helps.add(id(module))


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
