"""Randomly drawn indices, for a router that shall choose as if its scores were random."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MAX_DRAWN = 1 << 22
"""The most random numbers that are drawn at once."""
_DRAWS = 32
"""The most draws that are tried."""


def drawn(shape: tuple[int, ...], classes: int, dimension: int | None) -> Tensor:
    """Indices of this shape into equally likely `classes`, distinct along `dimension` (if any).

    The number of classes that a draw hits varies.  Of several draws by fixed seeds this is the one
    whose number is nearest to the expected number.
    """
    k = 1 if dimension is None else shape[dimension]
    if k > classes:  # drawn with replacement
        k, dimension = 1, None
    rows = math.prod(shape) // max(k, 1)
    expected = classes * (1 - (1 - k / classes) ** rows)
    best, distance = torch.zeros(rows, k, dtype=torch.long), math.inf
    for seed in range(_DRAWS):
        chosen = _chosen(rows, k, classes, torch.Generator().manual_seed(seed))
        off = abs(int((torch.bincount(chosen.flatten()) > 0).sum()) - expected)
        if off < distance:
            best, distance = chosen, off
        if distance <= 0.5 or rows * classes > _MAX_DRAWN:
            break
    if dimension is None:
        return best.reshape(shape)
    along = dimension % len(shape)
    others = [n for i, n in enumerate(shape) if i != along]
    return best.reshape(*others, k).movedim(-1, along).contiguous()


def _chosen(rows: int, k: int, classes: int, generator: torch.Generator) -> Tensor:
    """k distinct classes in each row."""
    if k == 1:
        return torch.randint(classes, (rows, 1), generator=generator)
    step = max(1, _MAX_DRAWN // classes)
    return torch.cat(
        [
            torch.rand(min(step, rows - first), classes, generator=generator).topk(k).indices
            for first in range(0, rows, step)
        ]
        or [torch.zeros(0, k, dtype=torch.long)]
    )
