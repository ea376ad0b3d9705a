"""Parts of one buffer that several weights are views of: bytes that are there once count once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.tape.tags import no_storage
from rooftrace.tracer.tensors import trees

_HELD = ("parameter", "buffer", "optimizer")
"""Kinds of what is there before a step and after it."""


class Spans:
    """Which bytes of which buffers have a storage number, by the tensors that entered."""

    def __init__(self) -> None:
        # By buffer: a reference to it, and (start, end, number) of what entered.
        self._spans: dict[int, tuple[Any, list[tuple[int, int, int]]]] = {}

    def number(self, tensor: Tensor, kind: str, new: Callable[[], int]) -> int:
        """The storage number of a tensor of this kind that enters: of bytes that have one, or new.

        A trainer that keeps all weights in one flat buffer steps on parts of that buffer.
        """
        if kind not in _HELD or tensor.layout is not torch.strided:
            return new()
        known = self._covered(tensor)
        number = new() if known is None else known
        self._add(tensor, number)
        return number

    def _covered(self, tensor: Tensor) -> int | None:
        """The number of the first bytes of a tensor, if all of its bytes have one; else None."""
        start, end = _span(tensor)
        first: int | None = None
        for begins, ends, number in sorted(self._of(tensor)):
            if begins > start or start >= end:
                break
            if ends > start:
                first = number if first is None else first
                start = ends
        return first if start >= end else None

    def _add(self, tensor: Tensor, number: int) -> None:
        """The bytes of a tensor have this number."""
        spans = self._of(tensor)
        spans.append((*_span(tensor), number))
        reference = weakref.ref(tensor.untyped_storage())
        self._spans[trees.bytes_of(tensor)] = reference, spans

    def _of(self, tensor: Tensor) -> list[tuple[int, int, int]]:
        """Of the buffer of a tensor; of none that lay there before and was freed."""
        key = trees.bytes_of(tensor)
        reference, spans = self._spans.get(key, (no_storage, []))
        buffer = reference()
        return spans if buffer is not None and buffer._cdata == key else []


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in its buffer [byte]."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (int(last) + 1) * size
