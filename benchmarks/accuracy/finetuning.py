"""Fine-tuning steps as torchtune's recipe for one device runs them: full, in bf16, on packed rows.

The decoder is rebuilt from its public definition: norms and rotary embeddings in fp32, keys and
values expanded to all heads, logits in fp32, embeddings tied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNKS = 8
"""Pieces of the logits, with the loss that takes them one by one."""


class Norm(nn.Module):
    """The root of the mean square in fp32; the scale in the input's precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Attention(nn.Module):
    """Grouped queries; pairs of neighbours are turned."""

    def __init__(self, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.output_proj = nn.Linear(width, width, bias=False)
        turns = torch.empty(length, self.size // 2, 2, dtype=torch.float32)
        self.register_buffer("turns", turns, persistent=False)

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        """The rotary embedding of x[b, s, h, e], computed in fp32."""
        cache = self.turns[places]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack(
            [
                pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
                pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        turned = turned.flatten(3)
        return turned.type_as(x)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x)
        q = q.view(batch, length, self.heads, self.size)
        q = self.turned(q, places)
        q = q.transpose(1, 2)
        k = self.k_proj(x)
        v = self.v_proj(x)
        k = k.view(batch, length, -1, self.size)
        v = v.view(batch, length, -1, self.size)
        k = self.turned(k, places)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        shape = (batch, self.groups, self.heads // self.groups, -1, self.size)
        k = k.unsqueeze(2).expand(shape).flatten(1, 2)
        v = v.unsqueeze(2).expand(shape).flatten(1, 2)
        # Packed rows take FlexAttention with a mask of blocks; it keeps what this one keeps.
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output = output.transpose(1, 2).contiguous().view(batch, length, -1)
        return self.output_proj(output)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind its norm."""

    def __init__(self, width: int, inside: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.attn = Attention(width, heads, groups, length)
        self.w1 = nn.Linear(width, inside, bias=False)
        self.w2 = nn.Linear(inside, width, bias=False)
        self.w3 = nn.Linear(width, inside, bias=False)
        self.sa_norm, self.mlp_norm = Norm(width), Norm(width)

    def mlp(self, x: Tensor) -> Tensor:
        """SiLU of one product times the other."""
        h = F.silu(self.w1(x))
        h = h * self.w3(x)
        h = self.w2(h)
        return h

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        h = self.attn(self.sa_norm(x), places)
        h = h + x
        out = self.mlp(self.mlp_norm(h))
        return h + out


class Decoder(nn.Module):
    """Llama 3.2 of 3 B parameters."""

    def __init__(self, length: int, chunked: bool, again: bool) -> None:
        super().__init__()
        width, vocabulary = 3072, 128256
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, 8192, 24, 8, length) for _ in range(28))
        self.norm = Norm(width)
        self.chunked, self.again = chunked, again

    def forward(self, tokens: Tensor, places: Tensor) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = (
                checkpoint(layer, h, places, use_reentrant=False)
                if self.again
                else layer(h, places)
            )
        h = self.norm(h)
        weight = self.tok_embeddings.weight
        if self.chunked:
            return [F.linear(chunk, weight) for chunk in h.chunk(CHUNKS, dim=1)]
        return F.linear(h, weight).float()


def step(model: nn.Module, tokens: Tensor, places: Tensor, labels: Tensor, optimizer: Any) -> None:
    """One batch: loss, backward, optimizer."""
    logits = model(tokens, places)
    if isinstance(logits, list):
        pieces = zip(logits, labels.chunk(CHUNKS, dim=1), strict=True)
        loss = sum(
            F.cross_entropy(piece.reshape(-1, piece.size(-1)).float(), part.reshape(-1))
            for piece, part in pieces
        )
    else:
        logits = logits.transpose(1, 2)
        loss = F.cross_entropy(logits, labels)
    del logits
    loss.backward()  # type: ignore[union-attr]
    optimizer.step()


def made(batch: int, length: int, chunked: bool, again: bool) -> tuple[Any, ...]:
    """What a trace takes: the step and its arguments."""
    with torch.device("meta"):
        model = Decoder(length, chunked, again).bfloat16().train()
        for layer in model.layers:
            layer.attn.turns = layer.attn.turns.float()
        tokens, places, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(3))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return step, model, tokens, places, labels, optimizer
