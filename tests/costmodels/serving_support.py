"""Modules written by hand for the named rewrites, and a run of both graphs on real tensors."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.rewrites.rewrites import rewrite
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.rebuild import to_fx

TOKENS, BATCH, LENGTH = 60, 2, 6


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module with weights that matter: of the order of one after every product."""
    generator = torch.Generator().manual_seed(0)
    module = module.to(dtype).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return module


def traced(module: nn.Module, phase: str, batch: int = BATCH, length: int = LENGTH) -> OpGraph:
    """A step of the module on meta: a prompt, or a token behind a cache of as many positions."""
    blank = copy.deepcopy(module).to("meta")
    if hasattr(module, "config"):
        return rt.trace(blank, phase=phase, batch=batch, seq=length)
    return rt.trace(blank, torch.zeros(batch, length, dtype=torch.long), phase=phase)


def changed(graph: OpGraph, *names: str) -> tuple[OpGraph, tuple[str, ...]]:
    """The graph after some named rewrites and nothing else, and their notes."""
    result, notes = rewrite(graph, execution_model("eager", rewrites=names).as_called)
    return result.verify(), notes


class Caches(dict[str, Tensor]):
    """What caches hold, by name: numbers that follow from the name."""

    def of(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            self[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return self[name]


def run(graph: OpGraph, module: nn.Module, caches: Caches | None = None) -> tuple[Tensor, ...]:
    """The outputs of a graph on the weights of a module."""
    state = {**dict(module.named_buffers()), **module.state_dict()}
    caches = Caches() if caches is None else caches
    dtype = next(module.parameters()).dtype
    flat = graph.expand()
    for index in (*flat.external, *flat.inputs):
        tensor = flat.values[index]
        if tensor.role == "kv" and tensor.name not in state:
            state[tensor.name] = caches.of(tensor.name, tensor.shape, dtype)
        elif "+" in tensor.name:
            parts = [state[name] for name in _parts(tensor.name)]
            state[tensor.name] = torch.cat(parts, _joined_along(tensor.shape, parts))
    inputs = []
    for index in flat.inputs:
        tensor = flat.values[index]
        numbers = torch.randint(0, TOKENS, tensor.shape, generator=torch.Generator().manual_seed(5))
        inputs.append(state[tensor.name] if tensor.role == "kv" else numbers)
    outputs: tuple[Tensor, ...] = to_fx(graph, state)(*inputs)
    return outputs


def _parts(name: str) -> Iterator[str]:
    """The names of the weights side by side: "a.q+k.weight" -> a.q.weight, a.k.weight."""
    path = name.split(".")
    place = next(i for i, word in enumerate(path) if "+" in word)
    return (".".join([*path[:place], word, *path[place + 1 :]]) for word in path[place].split("+"))


def _joined_along(shape: tuple[int, ...], parts: list[Tensor]) -> int:
    return 0 if sum(part.shape[0] for part in parts) == shape[0] else 1


def differences(
    graph: OpGraph, other: OpGraph, module: nn.Module, caches: Caches | None = None
) -> float:
    """The largest relative difference of the outputs of two graphs; NaN where sizes differ."""
    worst = 0.0
    for one, two in zip(run(graph, module, caches), run(other, module, caches), strict=True):
        if one.shape != two.shape:
            return float("nan")
        scale = max(float(one.abs().max()), 1e-30) if one.numel() else 1.0
        worst = max(worst, float((one - two).abs().max()) / scale if one.numel() else 0.0)
    return worst


# -- modules ---------------------------------------------------------------------------------------


class LatentLayer(nn.Module):
    """Latent attention: one projection makes the keys of all heads, and behind them the values.

    by_head: the cache holds keys and values of each head, not the latents.  own_turns: each head
    has a rotated key of its own.
    """

    heads, nope, rope, width, rank = 4, 16, 8, 16, 16

    def __init__(self, size: int, by_head: bool, own_turns: bool) -> None:
        super().__init__()
        self.by_head, self.own_turns = by_head, own_turns
        turned = self.rope * (self.heads if own_turns else 1)
        self.ask = nn.Linear(size, self.heads * (self.nope + self.rope), bias=False)
        self.down = nn.Linear(size, self.rank + turned, bias=False)
        self.up = nn.Linear(self.rank, self.heads * (self.nope + self.width), bias=False)
        self.out = nn.Linear(self.heads * self.width, size, bias=False)

    def forward(self, x: Tensor, memory: Any) -> tuple[Tensor, Any]:
        batch, rows, _ = x.shape
        query = self.ask(x).view(batch, rows, self.heads, -1).transpose(1, 2)
        latent, turned = self.down(x).split([self.rank, self.down.out_features - self.rank], -1)
        turned = turned.view(batch, rows, -1, self.rope).transpose(1, 2).sin()
        if not self.by_head:
            latent, turned = latent[:, None], turned
            if memory is not None:
                latent = torch.cat((memory[0], latent), 2)
                turned = torch.cat((memory[1], turned), 2)
            kept = (latent, turned)
            latent = latent[:, 0]
        keys, values = self.up(latent).split([self.heads * self.nope, self.heads * self.width], -1)
        keys = keys.unflatten(-1, (self.heads, self.nope)).transpose(1, 2)
        values = values.unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        keys = torch.cat((turned.expand(-1, self.heads, -1, -1), keys), -1)  # rotated part first
        if self.by_head:
            if memory is not None:
                keys = torch.cat((memory[0], keys), 2)
                values = torch.cat((memory[1], values), 2)
            kept = (keys, values)
        causal = rows > 1
        mixed = F.scaled_dot_product_attention(query, keys, values, is_causal=causal, scale=0.31)
        return self.out(mixed.transpose(1, 2).reshape(batch, rows, -1)), kept


class Latent(nn.Module):
    """Two layers of latent attention with a cache."""

    def __init__(self, by_head: bool = False, own_turns: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 32)
        self.layers = nn.ModuleList(LatentLayer(32, by_head, own_turns) for _ in range(2))

    def forward(self, ids: Tensor, memory: Any = None) -> dict[str, Any]:
        x, kept = self.table(ids), []
        for number, layer in enumerate(self.layers):
            mixed, pair = layer(x, None if memory is None else memory[2 * number : 2 * number + 2])
            x = x + mixed
            kept += pair
        return {"logits": x @ self.table.weight.T, "memory": kept}


class Experts(nn.Module):
    """Experts that see every token; what they say is weighed by scores, zero for all but two.

    open_gate: every expert has a score, so that none can be left out.  shifted: a number is added
    between the products, and the tokens are weighed before them.  overwritten: the tokens change
    before the sum.
    """

    def __init__(
        self, open_gate: bool = False, shifted: bool = False, overwritten: bool = False
    ) -> None:
        super().__init__()
        self.open_gate, self.shifted, self.overwritten = open_gate, shifted, overwritten
        self.table = nn.Embedding(TOKENS, 16)
        self.gate = nn.Linear(16, 8, bias=False)
        self.up = nn.Parameter(torch.empty(8, 16, 24))
        self.down = nn.Parameter(torch.empty(8, 24, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).flatten(0, 1)
        best, chosen = self.gate(x).topk(2, -1)
        scores = torch.zeros(len(x), 8, dtype=x.dtype, device=x.device)
        scores = scores.scatter(1, chosen, best.softmax(-1))
        if self.open_gate:
            scores = self.gate(x).softmax(-1)
        by_expert = scores.t().unsqueeze(-1)
        rows = x.expand(8, -1, -1)
        if self.shifted:
            rows = rows * by_expert
        inner = torch.relu(torch.bmm(rows, self.up))
        if self.shifted:
            inner = inner + 1
        said = torch.bmm(inner, self.down)
        if self.overwritten:
            x.mul_(2)
        return (said if self.shifted else said * by_expert).sum(0)


class Seen(nn.Linear):
    """A product that reads its weight and bias through views, as shards of a mesh are read."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.view_as(self.weight), self.bias.view(-1))


class Gated(nn.Module):
    """Attention and a gated unit, with biases; and a head that bends and scales its logits.

    tied: the gate's weight is that of the unit beside it too.  overwritten: the input changes
    between the two products.  read_twice: the logits are used in the step.  product: of the class.
    """

    def __init__(
        self,
        tied: bool = False,
        overwritten: bool = False,
        read_twice: bool = False,
        product: type[nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.tied, self.overwritten, self.read_twice = tied, overwritten, read_twice
        self.table = nn.Embedding(TOKENS, 16)
        self.ask, self.key, self.value = product(16, 16), product(16, 8), product(16, 8)
        self.gate, self.up, self.down = product(16, 24), product(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, TOKENS)

    def forward(self, ids: Tensor, memory: Any = None) -> dict[str, Any]:
        x = self.table(ids)
        batch, rows, _ = x.shape
        query, key, value = (
            part(x).view(batch, rows, -1, 4).transpose(1, 2)
            for part in (self.ask, self.key, self.value)
        )
        if memory is not None:
            key = torch.cat((memory[0], key), 2)
            value = torch.cat((memory[1], value), 2)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=rows > 1, enable_gqa=True
        )
        x = x + mixed.transpose(1, 2).reshape(batch, rows, -1)
        gate = F.gelu(self.gate(x))
        if self.overwritten:
            x.mul_(2)
        x = x + self.down(gate * (self.gate if self.tied else self.up)(x))
        logits = 30 * torch.tanh(self.head(x).float() / 30)
        if self.read_twice:
            return {"logits": logits, "best": logits.argmax(-1), "memory": [key, value]}
        return {"logits": logits, "memory": [key, value]}
