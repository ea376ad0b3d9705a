"""The choices of topk, argmax, multinomial ... by unknown scores, as a policy has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.values import distinct

EXPECTED = asked.Policy()


@dataclass(frozen=True, slots=True)
class Choices:
    """Indices for the code that runs, what is said of them, and what they are expected to reach."""

    indices: Tensor
    text: str  # what stands behind the name of the op
    facts: Mapping[str, Any]  # see `Assumption.facts`


def in_order(shape: tuple[int, ...], classes: int, dimension: int) -> Choices:
    """The indices of a full sort: the order stays."""
    sizes = [-1 if i == dimension % len(shape) else 1 for i in range(len(shape))]
    indices = torch.arange(classes).reshape(sizes).expand(shape).contiguous()
    return Choices(indices, f"over {classes} classes on unknown scores keeps their order", {})


def chosen(
    policy: asked.Policy, shape: tuple[int, ...], classes: int, dimension: int | None
) -> Choices:
    """Indices of a shape, chosen among `classes` by a policy.

    dimension: along which a row has its choices; None where each row has one.  A histogram of other
    classes leaves the choice to the policy `expected`.  Raises RequestError for a histogram that a
    row cannot choose by.
    """
    aside = "" if policy.fits(classes) else f" ({policy} has other classes)"
    policy = EXPECTED if aside else policy
    rows, k = sizes_of(shape, classes, dimension)
    shares = distinct.shares_of(policy, k, classes)
    reached = distinct.expected_distinct(rows, k, classes, shares)
    hit = min(max(round(reached), min(k, classes)), rows * k)
    if policy.name == "balanced":
        indices = (torch.arange(rows * k) % classes).reshape(shape)
    elif policy.name == "uniform":
        indices = uniform(shape, classes, dimension)
    elif shares is None:
        indices = placed(spread(rows, k, classes, hit), shape, dimension)
    else:
        choices = in_proportion(rows, k, shares, hit)
        indices = placed(choices, shape, dimension)
    drawn = distinct.counted(indices)
    if policy.name in ("balanced", "uniform"):
        reached = float(drawn)
    facts = {
        "policy": str(policy),
        "rows": rows,
        "chosen": k,
        "classes": classes,
        "distinct": reached,
        "drawn": drawn,
    }
    return Choices(indices, f"{asked.said_of_routing(facts)}{aside}", facts)


# -- one concrete draw for the code that runs ------------------------------------------------------

_MAX_DRAWN = 1 << 22
"""The most random numbers that are drawn at once."""
_DRAWS = 32
"""The most draws that are tried."""


def sizes_of(shape: tuple[int, ...], classes: int, dimension: int | None) -> tuple[int, int]:
    """(rows, k): how many rows choose, and how many different classes each.

    shape: of the indices; the choices of a row stand along `dimension`, None for one choice each.
    A row that chooses more than there are classes chooses with replacement, so each choice counts
    as a row.
    """
    k = 1 if dimension is None else shape[dimension]
    k = 1 if k > classes else k
    return math.prod(shape) // max(k, 1), k


def placed(chosen: Tensor, shape: tuple[int, ...], dimension: int | None) -> Tensor:
    """The choices [rows, k] in the shape of the indices."""
    if dimension is None or chosen.shape[1] != shape[dimension]:
        return chosen.reshape(shape)
    along = dimension % len(shape)
    others = [n for i, n in enumerate(shape) if i != along]
    return chosen.reshape(*others, chosen.shape[1]).movedim(-1, along).contiguous()


def uniform(shape: tuple[int, ...], classes: int, dimension: int | None) -> Tensor:
    """Indices of this shape into equally likely `classes`, distinct along `dimension` (if any).

    The number of classes that a draw hits varies.  Of several draws by fixed seeds this is the one
    whose number is nearest to the expected number.
    """
    rows, k = sizes_of(shape, classes, dimension)
    expected = classes * (1 - (1 - k / classes) ** rows)
    best, distance = torch.zeros(rows, k, dtype=torch.long), math.inf
    for seed in range(_DRAWS):
        chosen = _chosen(rows, k, classes, torch.Generator().manual_seed(seed))
        off = abs(int((torch.bincount(chosen.flatten()) > 0).sum()) - expected)
        if off < distance:
            best, distance = chosen, off
        if distance <= 0.5 or rows * classes > _MAX_DRAWN:
            break
    return placed(best, shape, dimension)


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


def spread(rows: int, k: int, classes: int, hit: int) -> Tensor:
    """Choices [rows, k] that reach `hit` classes, in the middle of equal steps through all of them.

    Each is chosen as often as another, or once more.  hit: from k to rows k.
    """
    places = ((torch.arange(rows * k) % hit) * classes + classes // 2) // hit
    return places.reshape(rows, k)


def in_proportion(rows: int, k: int, shares: Tensor, hit: int) -> Tensor:
    """Choices [rows, k], different in each row, that reach the `hit` likeliest classes.

    shares: how likely each class is.  Each is chosen in proportion to that, once to `rows` times.
    """
    order = shares.argsort(descending=True, stable=True)[:hit]
    counts = _apportioned(rows * k, shares[order], rows)
    # A class fills up to `rows` places in a row of places, which are those of different rows.
    places = order.repeat_interleave(counts)
    return places.reshape(k, rows).T.contiguous()


def _apportioned(total: int, shares: Tensor, most: int) -> Tensor:
    """Whole numbers from 1 to `most` that sum to `total`, as near to the shares as can be."""
    counts = torch.ones(len(shares), dtype=torch.long)
    wanted = shares * (total / float(shares.sum()))
    while (left := total - int(counts.sum())) > 0:
        free = counts < most
        short = torch.where(free, (wanted - counts).clamp(min=0), 0.0)
        if not bool(short.any()):
            short = free.double()
        more = (short * (left / float(short.sum()))).floor().long()
        if not bool(more.any()):  # one each to those that are shortest of their share
            more[short.argsort(descending=True, stable=True)[:left]] = 1
            more = torch.where(free, more, 0)
        counts = (counts + more).clamp(max=most)
    return counts
