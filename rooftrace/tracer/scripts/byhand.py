"""Weights that a script steps itself, without an optimizer of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ByHand:
    """What a script writes into weights of the device after a backward.

    updated: it has in the open turn.  ever: it has in some turn.
    """

    def __init__(self) -> None:
        self.updated = self.ever = False
        self._places: set[int] = set()  # of the bytes of the weights

    def begin(self) -> None:
        """A turn begins."""
        self.updated = False
        self._places.clear()

    def watch(self, module: nn.Module) -> None:
        """A module is called, and no optimizer of torch is known."""
        weights = (weight for weight in module.parameters() if weight.requires_grad)
        places = map(_place, weights)
        self._places.update(place for place in places if place is not None)

    def ran(self, func: Any, args: Any) -> None:
        """An op has run after a backward."""
        schema = getattr(func, "_schema", None)
        if not self._places or schema is None or not schema.is_mutable or not args:
            return
        written = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        if any(isinstance(t, Tensor) and _place(t) in self._places for t in written):
            self.updated = self.ever = True


def _place(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
