"""What tells calls of a module apart, and how many items they have, by their arguments alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rooftrace.tracer.tensors import tensors_in

_PLAIN = (int, float, bool, str, type(None))
_NO_SIZE = frozenset(("num_items_in_batch",))
"""Arguments whose value changes from step to step, and no work with it."""
_SIMPLE = (Tensor, *_PLAIN)
_TOKENS = ("input_ids", "decoder_input_ids")

CallSizes = tuple[
    tuple[tuple[torch.Size, torch.dtype, bool], ...], tuple[Any, ...], tuple[str, ...]
]
"""Size, dtype and need of a gradient of each tensor among arguments; plain values; names."""


@dataclass(frozen=True, slots=True)
class ItemCount:
    """How many items a call has, and what they are."""

    samples: int = 0
    tokens: int = 0


def sizes_of(args: Sequence[Any], kwargs: dict[str, Any]) -> CallSizes:
    """What tells calls apart: sizes of tensors, plain values, names.  It runs in every step."""
    leaves: list[Any] = [*args, *(kwargs[name] for name in kwargs if name not in _NO_SIZE)]
    tensors: list[Any] = [item for item in leaves if isinstance(item, Tensor)]
    if not all(isinstance(item, _SIMPLE) for item in leaves):
        tree = tuple(leaves)
        tensors = tensors_in(tree)
        leaves = tree_leaves(tree, is_leaf=lambda item: item is None)
    plain = tuple(
        leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__
        for leaf in leaves
        if not isinstance(leaf, Tensor)
    )
    return tuple((t.shape, t.dtype, t.requires_grad) for t in tensors), plain, tuple(kwargs)


def counted_in(args: Sequence[Any], kwargs: dict[str, Any]) -> ItemCount:
    """Samples, and tokens where the call has any: whole numbers [batch, length], or embeddings.

    Tokens are those that the call runs, padding included.
    """
    tensors = tensors_in((tuple(args), kwargs))
    if not tensors:
        return ItemCount()
    ids = next((kwargs[n] for n in _TOKENS if isinstance(kwargs.get(n), Tensor)), None)
    embedded = kwargs.get("inputs_embeds")
    if ids is None and isinstance(embedded, Tensor) and embedded.dim() == 3:
        return ItemCount(int(embedded.shape[0]), int(embedded.shape[0] * embedded.shape[1]))
    first = tensors[0] if ids is None else ids
    if not first.dim():
        return ItemCount()
    whole = first.dtype in (torch.int32, torch.int64) and first.dim() == 2
    return ItemCount(int(first.shape[0]), int(first.numel()) if whole else 0)
