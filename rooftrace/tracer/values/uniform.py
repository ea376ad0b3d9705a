"""Draws of whole numbers that are all equally likely, and what becomes of them.

A part of a vocabulary reads ids as where(own, id - first, 0).  What each class becomes under such
ops is followed, so that what is reached counts as expected, and not as in the one draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rooftrace.tracer.metacopies import trees
from rooftrace.tracer.recording import Call
from rooftrace.tracer.values.known import KnownTensors

_OF_EACH = ("aten.clone", "aten.index_put", "aten.index_put_")
"""Ops besides torch's pointwise ones that make each number of those in its place."""


class FollowedDraw(NamedTuple):
    """becomes: what each class is, [classes].  origin: the bytes that were drawn, whose numbers
    are independent of those of others."""

    becomes: Tensor
    origin: int


class UniformDraws:
    """The draws of one capture, by their bytes.  known: the values of tensors."""

    def __init__(self, known: KnownTensors) -> None:
        self._known = known
        self._draws: dict[
            int, tuple[FollowedDraw, int, Tensor]
        ] = {}  # with the epoch; a view holds bytes

    def of(self, tensor: Tensor) -> FollowedDraw | None:
        """The draw that a tensor, or a view of it, holds; None of another tensor.

        A draw ends where something unknown is written to it.
        """
        draw, epoch, _ = self._draws.get(trees.bytes_of(tensor), (None, 0, None))
        return draw if epoch == self._known.epoch(tensor) else None

    def learn(self, tensor: Tensor, draw: FollowedDraw) -> None:
        """Remember that `tensor` holds a draw."""
        self._draws[trees.bytes_of(tensor)] = draw, self._known.epoch(tensor), tensor

    def learn_classes(self, tensor: Tensor, classes: range) -> None:
        """Remember that each number of `tensor` is one of these, all equally likely."""
        numbers = torch.arange(classes.start, classes.stop)
        self.learn(tensor, FollowedDraw(numbers, trees.bytes_of(tensor)))

    @contextmanager
    def followed(self, call: Call, outputs: Sequence[Tensor]) -> Iterator[None]:
        """Follow draws through a call; inside, what is known of its outputs changes."""
        draw = self._made(call, outputs)
        yield
        if draw is not None:
            self.learn(outputs[0], draw)

    def _made(self, call: Call, outputs: Sequence[Tensor]) -> FollowedDraw | None:
        """The draw in the output of a call that makes each number of those in its place."""
        if not self._draws or len(outputs) != 1 or outputs[0].dtype.is_floating_point:
            return None
        if call.name not in _OF_EACH and torch.Tag.pointwise not in call.func.tags:
            return None
        values, origins = dict[int, Tensor](), set[int]()
        for tensor in call.tensors:
            draw = self.of(tensor)
            if draw is not None and tensor.shape == outputs[0].shape and _is_whole(tensor):
                origins.add(draw.origin)
                values[id(tensor)] = draw.becomes.clone() if call.info.mutated else draw.becomes
                continue
            entry = self._known.known(tensor) if tensor.dim() == 0 else None
            if entry is None:
                return None
            values[id(tensor)] = entry.value
        becomes = self._known.results.of(call, values) if len(origins) == 1 else None
        return FollowedDraw(becomes, *origins) if isinstance(becomes, Tensor) else None


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its bytes, in order."""
    size = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == size
