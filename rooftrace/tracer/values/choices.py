"""The choices of topk, argmax, multinomial ... by unknown scores, as a policy has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.values import distinct, drawing

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
    rows, k = drawing.sizes_of(shape, classes, dimension)
    shares = distinct.shares_of(policy, k, classes)
    reached = distinct.expected_distinct(rows, k, classes, shares)
    hit = min(max(round(reached), min(k, classes)), rows * k)
    if policy.name == "balanced":
        indices = (torch.arange(rows * k) % classes).reshape(shape)
    elif policy.name == "uniform":
        indices = drawing.drawn(shape, classes, dimension)
    elif shares is None:
        indices = drawing.placed(drawing.spread(rows, k, classes, hit), shape, dimension)
    else:
        choices = drawing.in_proportion(rows, k, shares, hit)
        indices = drawing.placed(choices, shape, dimension)
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
