"""State-space layers by several hands, for the rewrites of their kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.costmodels.serving_support import TOKENS


class Mixer(nn.Module):
    """A layer around a recurrence: embedding, projections, convolution, recurrence, projection.

    What differs is how the recurrence is written: `scan` of a subclass.
    """

    width, inner, state, rank, window = 8, 12, 5, 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, self.width)
        self.enter = nn.Linear(self.width, 2 * self.inner, bias=False)
        self.conv = nn.Conv1d(self.inner, self.inner, self.window, groups=self.inner,
                              padding=self.window - 1)  # fmt: skip
        self.choose = nn.Linear(self.inner, self.rank + 2 * self.state, bias=False)
        self.step = nn.Linear(self.rank, self.inner)
        self.decays = nn.Parameter(torch.empty(self.inner, self.state))
        self.skip = nn.Parameter(torch.empty(self.inner))
        self.leave = nn.Linear(self.inner, self.width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, gate = self.enter(self.table(ids)).chunk(2, -1)
        x = self.convolved(x)
        dt, keys, queries = self.choose(x).split([self.rank, self.state, self.state], -1)
        y = self.scan(x, F.softplus(self.step(dt)), -self.decays.exp(), keys, queries)
        y = y + x * self.skip
        out: Tensor = self.leave(y * F.silu(gate))
        return out

    def convolved(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x.mT)[..., : x.shape[1]].mT)

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """y [B, S, D] of x, dt [B, S, D], a [D, N] and b, c [B, S, N]."""
        raise NotImplementedError


class Minimal(Mixer):
    """As teaching code has it: einsum for the discretisation, a loop, a list of results."""

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(torch.einsum("bsd,dn->bsdn", dt, a))
        entered = torch.einsum("bsd,bsn,bsd->bsdn", dt, b, x)
        h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
        made = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + entered[:, t]
            made.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
        return torch.stack(made, 1)


class ByToken(Mixer):
    """Everything inside the loop, the terms the other way round, product and sum by hand."""

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], a.shape[1], x.shape[2], dtype=x.dtype, device=x.device)
        made = []
        for t in range(x.shape[1]):
            step = dt[:, t].unsqueeze(1)
            entered = (x[:, t] * dt[:, t]).unsqueeze(1) * b[:, t].unsqueeze(-1)
            h = entered + h * (a.t() * step).exp()
            made.append((c[:, t].unsqueeze(-1) * h).sum(1, keepdim=True))
        return torch.cat(made, 1)


class Watched(Minimal):
    """The same, but the mean of a state in the middle leaves the layer."""

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(dt.unsqueeze(-1) * a)
        entered = (dt * x).unsqueeze(-1) * b.unsqueeze(2)
        h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
        made, seen = [], x.new_zeros(())
        for t in range(x.shape[1]):
            h = decay[:, t] * h + entered[:, t]
            seen = seen + h.mean()
            made.append((h @ c[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(made, 1) + seen


class Squashed(Minimal):
    """A nonlinearity inside the recurrence."""

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(dt.unsqueeze(-1) * a)
        entered = (dt * x).unsqueeze(-1) * b.unsqueeze(2)
        h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
        made = []
        for t in range(x.shape[1]):
            h = torch.tanh(decay[:, t] * h + entered[:, t])
            made.append((h @ c[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(made, 1)


class Sigmoid(Minimal):
    """A decay that is no exponential."""

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.sigmoid(dt.unsqueeze(-1) * a)
        entered = (dt * x).unsqueeze(-1) * b.unsqueeze(2)
        h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
        made = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + entered[:, t]
            made.append((h @ c[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(made, 1)


class Backwards(Minimal):
    """From the last token to the first: no kernel for prompts runs so."""

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(dt.unsqueeze(-1) * a)
        entered = (dt * x).unsqueeze(-1) * b.unsqueeze(2)
        h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
        made = []
        for t in reversed(range(x.shape[1])):
            h = decay[:, t] * h + entered[:, t]
            made.append((h @ c[:, t].unsqueeze(-1)).squeeze(-1))
        return torch.stack(made, 1)


class Centred(Minimal):
    """A convolution that sees later tokens."""

    def convolved(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(x.mT)[..., 1 : x.shape[1] + 1].mT)


class Mixing(Minimal):
    """A convolution over channels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(self.inner, self.inner, self.window, padding=self.window - 1)


class Padded(Minimal):
    """Zeros are put before the first token by hand; no bias, no activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(self.inner, self.inner, self.window, groups=self.inner, bias=False)

    def convolved(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, (self.window - 1, 0))).mT


class Heads(nn.Module):
    """A layer whose heads decay each by one number: what differs is `scan` of a subclass."""

    width, heads, inner, state, groups, chunk = 8, 4, 3, 5, 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, self.width)
        self.enter = nn.Linear(self.width, self.heads * (self.inner + 1), bias=False)
        self.choose = nn.Linear(self.width, 2 * self.groups * self.state, bias=False)
        self.decays = nn.Parameter(torch.empty(self.heads))
        self.leave = nn.Linear(self.heads * self.inner, self.width, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        x, dt = self.enter(hidden).split([self.heads * self.inner, self.heads], -1)
        x, dt = x.unflatten(-1, (self.heads, self.inner)), F.softplus(dt)
        b, c = self.choose(hidden).unflatten(-1, (2, self.groups, self.state)).unbind(2)
        b, c = (t.repeat_interleave(self.heads // self.groups, 2) for t in (b, c))
        y = self.scan(x * dt.unsqueeze(-1), -self.decays.exp() * dt, b, c)
        out: Tensor = self.leave(y.flatten(2))
        return out

    def scan(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        """y [B, S, H, P] of x [B, S, H, P], a [B, S, H], b and c [B, S, H, N]."""
        raise NotImplementedError


class Listing(Heads):
    """The chunked form with einsum: differences of running sums, and the same over chunks."""

    def scan(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x, a, b, c = (t.unflatten(1, (-1, self.chunk)) for t in (x, a, b, c))
        a = a.permute(0, 3, 1, 2)
        sums = a.cumsum(-1)
        inside = torch.exp(differences_of(a))
        y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, inside, x)
        left = torch.exp(sums[..., -1:] - sums)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, left, x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        across = torch.exp(differences_of(F.pad(sums[..., -1], (1, 0))))
        begun = torch.einsum("bhzc,bchpn->bzhpn", across, states)[:, :-1]
        y = y + torch.einsum("bclhn,bchpn,bhcl->bclhp", c, begun, sums.exp())
        return y.flatten(1, 2)


def differences_of(a: Tensor) -> Tensor:
    """[..., l, s]: the sum of a over s < k <= l; minus infinity where s > l."""
    sums, size = a.cumsum(-1), a.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=a.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(later, -torch.inf)


class Forgetful(Listing):
    """States decay from the start of their chunk, where they should to its end."""

    def scan(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        x, a, b, c = (t.unflatten(1, (-1, self.chunk)) for t in (x, a, b, c))
        a = a.permute(0, 3, 1, 2)
        sums = a.cumsum(-1)
        y = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, torch.exp(differences_of(a)), x)
        states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, torch.exp(sums[..., :1] - sums), x)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        across = torch.exp(differences_of(F.pad(sums[..., -1], (1, 0))))
        begun = torch.einsum("bhzc,bchpn->bzhpn", across, states)[:, :-1]
        y = y + torch.einsum("bclhn,bchpn,bhcl->bclhp", c, begun, sums.exp())
        return y.flatten(1, 2)


class Decayed(Heads):
    """One decay for each head, token by token."""

    def scan(self, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.heads, self.inner, self.state)
        made = []
        for t in range(x.shape[1]):
            entered = torch.einsum("bhp,bhn->bhpn", x[:, t], b[:, t])
            h = h * a[:, t].exp()[..., None, None] + entered
            made.append(torch.einsum("bhpn,bhn->bhp", h, c[:, t]))
        return torch.stack(made, 1)


class Gates(nn.Module):
    """Recurrent cells by hand: gates are sigmoids, and states have no outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 8)
        self.cell = nn.Linear(16, 32)
        self.leave = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        h = c = x.new_zeros(x.shape[0], 8)
        made = []
        for t in range(x.shape[1]):
            i, f, o, g = self.cell(torch.cat((x[:, t], h), -1)).chunk(4, -1)
            c = f.exp() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            made.append(h)
        out: Tensor = self.leave(torch.stack(made, 1))
        return out


class Steps(nn.Module):
    """A layer with a state of the last columns: a convolution for prompts, a sum for a token.

    new: the columns are put together anew, where else the state is rolled and written in place.
    """

    width, window, new = 6, 4, False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, self.width)
        self.conv = nn.Conv1d(self.width, self.width, self.window, groups=self.width,
                              padding=self.window - 1)  # fmt: skip

    def forward(self, ids: Tensor, memory: Any = None) -> dict[str, Any]:
        x = self.table(ids).mT
        if memory is None:
            kept = F.pad(x, (self.window - x.shape[-1], 0)) if x.shape[-1] < self.window else x
            y = self.conv(x)[..., : x.shape[-1]]
            return {"logits": F.silu(y).mT, "memory": [kept[..., -self.window :].clone()]}
        (state,) = memory
        if self.new:
            state = torch.cat((state[..., 1:], x), -1)
        else:
            self.moved(state, x[..., 0])
        y = (state * self.conv.weight[:, 0]).sum(-1) + self.conv.bias
        return {"logits": F.silu(y)[:, None], "memory": [state]}

    def moved(self, state: Tensor, x: Tensor) -> None:
        state.copy_(state.roll(-1, -1))
        state[..., -1] = x


class NewSteps(Steps):
    new = True


class WrongSteps(Steps):
    """The new column is written where the oldest one was."""

    def moved(self, state: Tensor, x: Tensor) -> None:
        state.copy_(state.roll(-1, -1))
        state[..., 0] = x


class Parallel(Mixer):
    """All tokens at once: pairs of neighbours are combined in place, upwards and then downwards.

    skew: how far off the partner of each pair stands in the last sweep: no scan unless 0.  reach: 4
    leaves out the last sweep upwards.
    """

    skew, reach = 0, 2

    def scan(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(dt.unsqueeze(-1) * a)
        entered = (dt.unsqueeze(-1) * b.unsqueeze(2)) * x.unsqueeze(-1)
        h = self.combined(decay.clone().transpose(1, 2), entered.clone().transpose(1, 2))
        return (h.transpose(1, 2) @ c.unsqueeze(-1)).squeeze(-1)

    def combined(self, a: Tensor, h: Tensor) -> Tensor:
        """h_t of all tokens; a and h are [B, D, S, N], with a power of two of tokens."""
        tokens, step = h.shape[2], 1
        while self.reach * step <= tokens:
            left, right = slice(step - 1, None, 2 * step), slice(2 * step - 1, None, 2 * step)
            h[:, :, right].add_(a[:, :, right] * h[:, :, left])
            a[:, :, right].mul_(a[:, :, left])
            step *= 2
        while step > 1:
            step //= 2
            left, right = (
                slice(2 * step - 1, tokens - step, 2 * step),
                slice(3 * step - 1, None, 2 * step),
            )
            if self.skew and step == 1:
                left = slice(left.start - self.skew, left.stop - self.skew, left.step)
            h[:, :, right].add_(a[:, :, right] * h[:, :, left])
            a[:, :, right].mul_(a[:, :, left])
        return h


class Remembering(Parallel):
    """The state behind the last token leaves, too."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids), self.last

    def combined(self, a: Tensor, h: Tensor) -> Tensor:
        h = super().combined(a, h)
        self.last = h[:, :, -1]
        return h


class Skewed(Parallel):
    skew = 1


class Nearsighted(Parallel):
    """Late tokens do not see the first ones."""

    reach = 4
