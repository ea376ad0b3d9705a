"""Recurrences written by hand: delta rules and linear attention, token by token and in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.costmodels.serving_support import TOKENS

WIDTH, HEADS, KEY, VALUE = 16, 2, 4, 6


class Recurrence(nn.Module):
    """Tokens mixed by a recurrence, from projections of its input; `mix` says how.

    The state is kept from one call to the next.
    """

    channels = True  # a decay for each channel of the keys
    turned = False  # the state has the channels of the values first

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.query, self.key = (nn.Linear(WIDTH, HEADS * KEY, bias=False) for _ in range(2))
        self.value = nn.Linear(WIDTH, HEADS * VALUE, bias=False)
        self.decay = nn.Linear(WIDTH, HEADS * (KEY if self.channels else 1))
        self.beta = nn.Linear(WIDTH, HEADS)
        self.out = nn.Linear(HEADS * VALUE, WIDTH, bias=False)

    def forward(self, ids: Tensor, memory: Any = None) -> dict[str, Any]:
        x = self.table(ids)
        batch, rows, _ = x.shape
        q, k, v = (
            part(x).view(batch, rows, HEADS, -1) for part in (self.query, self.key, self.value)
        )
        g = F.logsigmoid(self.decay(x))
        g = g.view(batch, rows, HEADS, KEY) if self.channels else g
        beta = torch.sigmoid(self.beta(x))
        shape = (batch, HEADS, VALUE, KEY) if self.turned else (batch, HEADS, KEY, VALUE)
        state = x.new_zeros(shape) if memory is None else memory[0]
        mixed, state = self.mix(q, F.normalize(k, dim=-1), v, g, beta, state)
        return {"logits": self.out(mixed.flatten(2)) @ self.table.weight.T, "memory": [state]}

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        raise NotImplementedError


class ByEinsum(Recurrence):
    """A delta rule with a decay for each head, its state turned, its results stacked."""

    channels, turned = False, True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state
            missed = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            missed = missed * beta[:, t, :, None]
            state = state + torch.einsum("bhv,bhk->bhvk", missed, k[:, t])
            said.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
        return torch.stack(said, 1), state


class Householder(Recurrence):
    """The same as a product with I - beta k k^T, with no decay."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = torch.zeros_like(v)
        for t in range(q.shape[1]):
            key, rate = k[:, t, :, :, None], beta[:, t, :, None, None]
            read = (key * state).sum(-2, keepdim=True)
            state = state - rate * key * read
            state = state + rate * key * v[:, t, :, None]
            said[:, t] = (q[:, t, :, None] @ state).squeeze(-2)
        return said, state


class Gated(Recurrence):
    """Gated linear attention in chunks, with a decay for each channel."""

    chunk = 4

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        rows = q.shape[1]
        short = -rows % self.chunk
        q, k, v, g = (
            F.pad(x, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, self.chunk)).permute(0, 3, 1, 2, 4)
            for x in (q, k, v, g)
        )
        sums = g.cumsum(-2)
        causal = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=q.device).tril()
        scores = (q * sums.exp()) @ (k * (-sums).exp()).transpose(-1, -2)
        inside = self.masked(scores, causal) @ v
        said = []
        for i in range(q.shape[2]):
            said.append(inside[:, :, i] + (q * sums.exp())[:, :, i] @ state)
            last = sums[:, :, i, -1:]
            kept = (k[:, :, i] * (last - sums[:, :, i]).exp()).transpose(-1, -2)
            state = last.transpose(-1, -2).exp() * state + kept @ v[:, :, i]
        return torch.stack(said, 2).flatten(2, 3)[:, :, :rows].transpose(1, 2), state

    def masked(self, scores: Tensor, causal: Tensor) -> Tensor:
        return scores.masked_fill(~causal, 0)


class Retention(Recurrence):
    """Linear attention whose heads decay by a number each, token by token."""

    channels = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.log(1 - 2.0 ** (-2 - torch.arange(HEADS))))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = []
        for t in range(q.shape[1]):
            state = (
                state * self.rate.exp()[None, :, None, None]
                + k[:, t, :, :, None] * v[:, t, :, None]
            )
            said.append((q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(said, 1) * KEY**-0.5, state


class Bonus(Recurrence):
    """The state before the token and a bonus for what it adds (RWKV-6)."""

    def __init__(self) -> None:
        super().__init__()
        self.bonus = nn.Parameter(torch.empty(HEADS, KEY))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = []
        for t in range(q.shape[1]):
            new = k[:, t, :, :, None] @ v[:, t, :, None]
            said.append((q[:, t, :, None] @ (self.bonus[..., None] * new + state)).squeeze(2))
            state = new + g[:, t].exp()[..., None] * state
        return torch.stack(said, 1), state


# -- what is no such recurrence --------------------------------------------------------------------


class Bent(ByEinsum):
    """A delta that is bent."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state
            missed = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            missed = torch.tanh(missed) * beta[:, t, :, None]
            state = state + torch.einsum("bhv,bhk->bhvk", missed, k[:, t])
            said.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
        return torch.stack(said, 1), state


class Squared(ByEinsum):
    """A delta of which a square is added: made of the same ops."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state
            missed = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            missed = (missed + missed * missed) * beta[:, t, :, None]
            state = state + torch.einsum("bhv,bhk->bhvk", missed, k[:, t])
            said.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
        return torch.stack(said, 1), state


class Clamped(ByEinsum):
    """A state whose decay has a least value, of which small numbers know nothing.

    early: the decays are clamped for all tokens, before the recurrence.
    """

    early = False

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        if self.early:
            return super().mix(q, k, v, g.clamp_min(-0.5), beta, state)
        said = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].clamp_min(-0.5).exp() * state
            missed = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            missed = missed * beta[:, t, :, None]
            state = state + torch.einsum("bhv,bhk->bhvk", missed, k[:, t])
            said.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
        return torch.stack(said, 1), state


class ClampedEarly(Clamped):
    """Decays that are clamped before the recurrence are decays like others."""

    early = True


class Watched(ByEinsum):
    """The size of every state is read, too."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said, seen = [], q.new_zeros(())
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state
            missed = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhv,bhk->bhvk", missed * beta[:, t, :, None], k[:, t])
            seen = seen + state.abs().amax()
            said.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
        return torch.stack(said, 1) + seen, state


class BothWays(Gated):
    """Inside of a chunk, tokens see those behind them."""

    def masked(self, scores: Tensor, causal: Tensor) -> Tensor:
        return scores


class Swapped(Householder):
    """The state is read with the beta of the token before: a stream is shifted."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Any:
        said = torch.zeros_like(v)
        for t in range(q.shape[1]):
            key, rate = k[:, t, :, :, None], beta[:, max(t - 1, 0), :, None, None]
            state = state - rate * key * (key * state).sum(-2, keepdim=True)
            state = state + rate * key * v[:, t, :, None]
            said[:, t] = (q[:, t, :, None] @ state).squeeze(-2)
        return said, state
