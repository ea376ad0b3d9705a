"""Attention written by hand in the forms that models have, and what tracers say of its masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

from rooftrace.graph.graph import OpGraph

B, H, KV, S, E = 2, 4, 2, 6, 8
CAP, SCALE = 5.0, 0.37


class Written(nn.Module):
    """Attention over [B, S, H E] with two query heads for each key head.

    sinks: how each head's sink takes its share of the softmax.  cap: how scores are bent.  mask:
    how it is put on; the mask is an argument of the call.  scale: a number is the beta of
    `baddbmm`, which scales its product.
    """

    def __init__(
        self, sinks: str = "", cap: str = "", mask: str = "added", scale: str | int = ""
    ) -> None:
        super().__init__()
        self.how, self.cap, self.mask, self.scale = sinks, cap, mask, scale
        self.ask, self.key, self.value = (nn.Linear(H * E, n * E) for n in (H, KV, KV))
        self.sinks = nn.Parameter(torch.randn(S if sinks == "by query" else H))
        self.heat = nn.Parameter(torch.rand(H, 1, 1) + 0.5)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        q, k, v = (
            part(x).unflatten(-1, (-1, E)).transpose(1, 2)
            for part in (self.ask, self.key, self.value)
        )
        k, v = (t[:, :, None].expand(-1, -1, H // KV, -1, -1).flatten(1, 2) for t in (k, v))
        if self.scale in (0, 1):
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            scores = torch.baddbmm(q @ k.mT, q, k.mT, beta=self.scale, alpha=SCALE)
            return (self._masked(scores, mask[0]).softmax(-1) @ v).flatten(1)
        scores = self._masked(self._scaled(q @ k.transpose(-2, -1)), mask)
        if self.cap == "after the mask":
            scores = CAP * torch.tanh(scores / CAP)
        weights = self._softmax(scores)
        out = (weights[0] @ v).transpose(1, 2).flatten(2)
        return (out, *weights[1:]) if weights[1:] else out

    def _scaled(self, scores: Tensor) -> Tensor:
        if self.scale == "by head":
            scores = scores * self.heat
        elif self.scale == "tensor":
            scores = scores / self.heat[0]
        elif self.cap != "folded":
            scores = scores * SCALE
        if self.cap == "divided":
            return torch.tanh(scores / CAP) * CAP
        if self.cap == "in place":
            return scores.div_(CAP).tanh_().mul_(CAP)
        return CAP * torch.tanh(scores * (SCALE / CAP)) if self.cap == "folded" else scores

    def _masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        if self.mask == "filled":
            return scores.masked_fill(~mask, -math.inf)
        if self.mask == "filled with a number":
            return scores.masked_fill_(~mask, -3.0)
        if self.mask == "where":
            return torch.where(mask, scores, -math.inf)
        if self.mask == "where not":
            return torch.where(~mask, torch.finfo(scores.dtype).min, scores)
        if self.mask == "twice":
            return scores + mask + mask
        return scores if self.mask == "none" else scores + mask

    def _softmax(self, scores: Tensor) -> tuple[Tensor, ...]:
        sinks = self.sinks.view(1, -1, 1, 1)
        column = sinks.expand(*scores.shape[:-1], 1) if self.how != "by query" else scores[..., :1]
        if self.how == "column" or self.how == "by query":
            return (torch.cat((scores, column), -1).softmax(-1)[..., :-1],)
        if self.how == "shifted column":  # as gpt-oss
            both = torch.cat((scores, column), -1)
            both = both - both.max(-1, keepdim=True).values
            return (both.softmax(-1, dtype=both.dtype)[..., :-1],)
        if self.how == "first column":
            return (torch.cat((column, scores), -1).softmax(-1)[..., 1:],)
        if self.how == "denominator":
            most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
            raised = torch.exp(scores - most)
            return (raised / (raised.sum(-1, keepdim=True) + torch.exp(sinks - most)),)
        if self.how == "bare denominator":
            raised = scores.exp()
            return (raised / (sinks.exp() + raised.sum(-1, keepdim=True)),)
        if self.how == "other shift":  # not the same number above and below
            most = scores.amax(-1, keepdim=True)
            raised = torch.exp(scores - most)
            return (raised / (raised.sum(-1, keepdim=True) + torch.exp(sinks)),)
        if self.how == "read again":
            both = torch.cat((scores, column), -1).softmax(-1)
            return both[..., :-1], both[..., -1]
        if self.how == "wrong column":
            return (torch.cat((scores, column), -1).softmax(-1)[..., 1:],)
        return (F.softmax(scores, -1),)


def shown(kind: str, queries: int, length: int, number: int = 0) -> Tensor:
    """bool[S, L]: a plain loop over the pairs of a mask of this kind."""
    rows = []
    for query in range(length - queries, length):
        first = {"causal": 0, "sliding-window": query - number + 1}.get(kind)
        first = query - query % number if first is None else first
        rows.append([first <= key <= query for key in range(length)])
    return torch.tensor(rows)


def told(graph: OpGraph, mask: Tensor, kind: str) -> OpGraph:
    """The graph with what a tracer knows of a mask [S, L] on the ops that put it on the scores."""
    facts = {
        "visible_pairs": int(mask.sum()),
        "mask": "none" if bool(mask.all()) else kind,
        "window": int(mask.sum(-1).max()),
    }
    names = (
        "aten.add",
        "aten.where",
        "aten.masked_fill",
        "aten.masked_fill_",
        "rooftrace.attention",
    )
    ops = [
        replace(op, facts={**op.facts, **facts})
        if op.name in names and graph.values[op.outputs[0]].shape[1:2] == (H,)
        else op
        for op in graph.ops
    ]
    return graph.replace(ops=tuple(ops))
