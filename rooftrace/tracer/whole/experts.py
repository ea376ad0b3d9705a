"""What servers run around experts as operators of our own: the choice of experts, the rows of each
expert, products that take and put back rows by their numbers, and the sum of what a token's experts
make."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rooftrace.tracer.whole.library import define

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "root of softplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    "none": lambda x: x,
}
"""What is made of the logits of a token; in place of it, or of those that were chosen."""


def _route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, kept: int, best: int,
    fill: float, after: str, least: float, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    scores = _SCORES[score](wide)
    choice = scores if bias is None else scores + bias
    if kept < groups:
        parts = choice.view(*choice.shape[:-1], groups, -1)
        whole = parts.topk(best, -1).values.sum(-1)
        allowed = torch.zeros_like(whole).scatter(-1, whole.topk(kept, -1).indices, 1).bool()
        choice = parts.masked_fill(~allowed[..., None], fill).flatten(-2)
    chosen = choice.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if after == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + least)
    elif after == "clamped sum":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=least)
    else:
        weights = _SCORES[after](weights)
    return (weights * scale).to(dtype), chosen


def _align(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The rows in the order of their experts, and where the rows of each expert end."""
    flat = chosen.flatten()
    ends = torch.bincount(flat, minlength=experts)[:experts].cumsum(0)
    return flat.argsort(stable=True).int(), ends.int()


def _align_meta(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return (
        chosen.new_empty((chosen.numel(),), dtype=torch.int32),
        chosen.new_empty((experts,), dtype=torch.int32),
    )


def _product(
    rows: Tensor, mat2: Tensor, order: Tensor, offs: Tensor, bias: Tensor | None,
    scores: Tensor | None, share: int,
) -> Tensor:  # fmt: skip
    out = rows.new_zeros((len(order), mat2.shape[2]))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        where = order[start:end].long()
        made = rows[where // share] @ mat2[expert]
        made = made if bias is None else made + bias[expert]
        out[where] = made if scores is None else (made * scores.flatten()[where, None]).to(out)
        start = end
    return out


def _product_meta(
    rows: Tensor, mat2: Tensor, order: Tensor, offs: Tensor, bias: Tensor | None,
    scores: Tensor | None, share: int,
) -> Tensor:  # fmt: skip
    return rows.new_empty((len(order), mat2.shape[2]))


def _combine(rows: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return rows.view(-1, k, rows.shape[1]).to(dtype).sum(1)


define(
    "route_experts(Tensor logits, Tensor? bias, int k, str score, int groups, int kept, int best, "
    "float fill, str after, float least, float scale, ScalarType dtype) -> (Tensor, Tensor)",
    CPU=_route,
)
define(
    "align_experts(Tensor chosen, int experts) -> (Tensor, Tensor)", Meta=_align_meta, CPU=_align
)
define(
    "expert_mm(Tensor rows, Tensor mat2, Tensor order, Tensor offs, Tensor? bias, Tensor? scores, "
    "int share) -> Tensor",
    Meta=_product_meta,
    CPU=_product,
)
define("combine_experts(Tensor rows, int k, ScalarType dtype) -> Tensor", CPU=_combine)
