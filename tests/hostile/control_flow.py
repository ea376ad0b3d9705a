"""Code that looks at what it computed to decide what to compute next."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case, pattern
from .policies import trained
from .training_steps import mlp


@pattern
def branch_on_a_sum() -> Case:
    """The dearer of two branches is taken where the sum of real data is positive."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(6, 3), nn.Linear(6, 40)

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) if (x.sum() > 0).item() else self.small(x)

    return Case(Branch(), (torch.rand(7, 6),), expected=2 * 7 * 240)


@pattern
def early_exit() -> Case:
    """Layers stop when the entropy of the classes is low; each exit has a head."""

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for layer, head in zip(self.layers, self.heads, strict=True):
                x = 2 * torch.tanh(layer(x))
                out = head(x).softmax(-1)
                entropy = -(out * out.log()).sum(-1).mean()
                if entropy < 0.93:
                    break
            return out

    return Case(Exits(), (torch.randn(4, 6),))


@pattern
def while_norm_is_large() -> Case:
    """A Python while on a norm, bounded by a counter."""

    class Shrink(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            turns = 0
            while x.norm() > 1.0 and turns < 30:
                x = 0.8 * torch.tanh(self.linear(x))
                turns += 1
            return x

    return Case(Shrink(), (torch.randn(7, 6),))


class Experts(nn.Module):
    """Top-2 routing in eager loops, as the first Mixtral in transformers had it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(mlp(6, 10, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, 4).permute(2, 1, 0)
        for index, expert in enumerate(self.experts):
            rank, rows = torch.where(mask[index])
            if len(rows) == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, rank, None])
        return out


@pattern
def routed_experts() -> Case:
    """Rows per expert come from topk of real data; an expert without rows is skipped."""
    return Case(Experts(), (torch.randn(9, 6),), expected=2 * 9 * 24 + 2 * 9 * 2 * 120)


@pattern
def routed_experts_trained() -> Case:
    """The same in training, from data of which all rows choose alike."""
    model = Experts()
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([9.0, 0.0, 9.0, 0.0]))
    flops = 2 * 9 * 24 * 2 + 2 * 9 * 2 * 120 * 3 - 2 * 9 * 2 * 60
    return trained(model, torch.randn(9, 6), expected=flops)


@pattern
def capacity_and_dropped_tokens() -> Case:
    """Switch routing by cumsum positions; tokens over capacity are dropped by a mask."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.w = nn.Parameter(torch.randn(3, 6, 10))

        def forward(self, x: Tensor) -> Tensor:
            expert = self.gate(x).argmax(-1)
            hot = F.one_hot(expert, 3)
            position = (hot.cumsum(0) * hot).sum(-1) - 1
            keep = position < 4
            slots = x.new_zeros(3, 4, 6)
            slots[expert[keep], position[keep]] = x[keep]
            out = torch.bmm(slots, self.w)
            result = x.new_zeros(len(x), 10)
            result[keep] = out[expert[keep], position[keep]]
            return result

    return Case(Switch(), (torch.randn(11, 6),), expected=2 * 11 * 18 + 2 * 12 * 60)


@pattern
def masked_rows_only() -> Case:
    """BERT's head runs on masked positions alone: boolean indexing sets the number of rows."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(6, 10), nn.Linear(10, 13)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            keep = labels != -100
            return F.cross_entropy(self.head(self.body(x)[keep]), labels[keep])

    labels = torch.full((3, 5), -100)
    labels[0, 1], labels[0, 3], labels[2, 2] = 4, 12, 7
    flops = 2 * 2 * 15 * 60 + 3 * 2 * 3 * 130
    return Case(
        Head(), (torch.randn(3, 5, 6), labels), expected=flops,
        options={"phase": "training", "loss": lambda loss: loss},
    )  # fmt: skip


@pattern(named=("routing",))
def beam_search() -> Case:
    """Beams are reordered by topk; finished ones are noticed by `.all()` and `.tolist()`."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.cell = nn.Embedding(9, 5), nn.GRUCell(5, 6)
            self.head = nn.Linear(6, 9)

        def forward(self, h: Tensor, width: int, most: int) -> list[list[int]]:
            h = h.expand(width, -1)
            scores = torch.full((width,), float("-inf"))
            scores[0] = 0.0
            beams = torch.zeros(width, 1, dtype=torch.long)
            done = torch.zeros(width, dtype=torch.bool)
            for _ in range(most):
                h = self.cell(self.embedding(beams[:, -1]), h)
                logits = self.head(h).log_softmax(-1)
                logits[done] = torch.tensor([0.0] + [float("-inf")] * 8)
                total = (scores[:, None] + logits).view(-1)
                scores, at = total.topk(width)
                source, token = at // 9, at % 9
                beams = torch.cat([beams[source], token[:, None]], 1)
                h, done = h[source], done[source] | (token == 0)
                if done.all():
                    break
            return beams.tolist()

    return Case(Decoder().requires_grad_(False), (torch.randn(1, 6), 3, 6))


@pattern
def greedy_with_an_end_token() -> Case:
    """A loop that feeds back its argmax until the end token or a repeated token appears."""

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.net = nn.Embedding(9, 6), mlp(6, 10, 9)

        def forward(self, token: Tensor) -> list[int]:
            out = [int(token)]
            for _ in range(20):
                token = self.net(self.embedding(token) * len(out)).argmax(-1)
                if token.item() in out:
                    break
                out.append(token.item())
            return out

    return Case(Greedy(), (torch.tensor([4]),))


@pattern(needs=("transformers",))
def generate_with_real_weights() -> Case:
    """transformers' generate: greedy, with its own stopping criteria and a cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=13, n_positions=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    model.generation_config.pad_token_id = 0

    def step(model: Any, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False
        )

    return Case(step, (model, torch.tensor([[3, 4, 5, 6]])))


@pattern(needs=("transformers",))
def beams_of_transformers() -> Case:
    """transformers' generate with beams: scores of real weights say when it ends."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=13, n_positions=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()

    def step(model: Any, ids: Tensor) -> Tensor:
        mask = torch.ones_like(ids)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=4, num_beams=3, do_sample=False
        )

    return Case(step, (model, torch.tensor([[3, 4, 5]])))


@pattern
def speculative_decoding() -> Case:
    """A draft proposes, the target checks in one pass, and the first mismatch cuts the rest."""
    target, draft = nn.Embedding(11, 6), nn.Embedding(11, 4)
    models = nn.ModuleDict(
        {"target": nn.Sequential(target, nn.Linear(6, 11)),
         "draft": nn.Sequential(draft, nn.Linear(4, 11))}
    )  # fmt: skip

    def step(models: nn.ModuleDict, prompt: Tensor) -> Tensor:
        tokens = prompt
        while len(tokens) < 9:
            guess = tokens
            for _ in range(3):
                guess = torch.cat([guess, models["draft"](guess[-1:]).argmax(-1)])
            checked = models["target"](guess[len(tokens) - 1 :]).argmax(-1)
            same = (guess[len(tokens) :] == checked[:-1]).long().cumprod(0)
            taken = int(same.sum())
            tokens = torch.cat([guess[: len(tokens) + taken], checked[taken : taken + 1]])
        return tokens

    return Case(step, (models, torch.tensor([3, 7])))


@pattern
def batches_by_length() -> Case:
    """Sequences are sorted by length and packed; lengths come from a mask by `.tolist()`."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 10)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            lengths = mask.sum(1)
            order = lengths.argsort(descending=True)
            outs = []
            for length in sorted(set(lengths.tolist())):
                rows = order[lengths[order] == length]
                outs.append(self.linear(x[rows, :length]).mean((0, 1)))
            return torch.stack(outs)

    mask = torch.zeros(4, 7, dtype=torch.bool)
    for row, n in enumerate((3, 7, 3, 5)):
        mask[row, :n] = True
    return Case(Packed(), (torch.randn(4, 7, 6), mask), expected=2 * 18 * 60)


@pattern
def packed_sequences() -> Case:
    """pack_padded_sequence and an LSTM over it: the batch shrinks with time."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(5, 7, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = self.lstm(packed)
            return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]

    data = torch.randn(3, 6, 5), torch.tensor([2, 6, 3])
    return Case(Packed(), data, expected=2 * 11 * 28 * (5 + 7))


@pattern
def tree_recursion() -> Case:
    """A tree LSTM: recursion over nested Python tuples, leaves are words."""

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 6)
            self.compose = nn.Linear(12, 30)

        def node(self, tree: Any) -> tuple[Tensor, Tensor]:
            if isinstance(tree, int):
                h = self.embedding(torch.tensor([tree]))
                return h, torch.zeros_like(h)
            (hl, cl), (hr, cr) = self.node(tree[0]), self.node(tree[1])
            i, fl, fr, o, u = self.compose(torch.cat([hl, hr], -1)).chunk(5, -1)
            c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
            return o.sigmoid() * c.tanh(), c

        def forward(self, tree: Any) -> Tensor:
            return self.node(tree)[0]

    return trained(Tree(), ((1, (2, 3)), (4, ((5, 6), 7))), expected=6 * 3 * 2 * 360)


@pattern
def size_from_a_value() -> Case:
    """The number of steps and a width come from activations, by int(x.max()) and round."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.widths = nn.Parameter(torch.randn(6, 20))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            width = 2 + int(y.abs().max() * 3)
            for _ in range(round(float(y.std()) * 5) + 1):
                y = torch.tanh(self.a(y))
            return y @ self.widths[:, :width]

    return Case(Sized(), (torch.randn(7, 6),))


@pattern
def adaptive_computation_time() -> Case:
    """Ponder: each row stops by itself; the loop ends when all have, and only the rest is run."""

    class Ponder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.halt = nn.Linear(6, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros(len(x))
            alive = torch.ones(len(x), dtype=torch.bool)
            for _ in range(20):
                if not alive.any():
                    break
                at = alive.nonzero().squeeze(1)
                new = torch.tanh(self.cell(x[at]))
                x = x.index_copy(0, at, new)
                total = total.index_add(0, at, torch.sigmoid(self.halt(new)).squeeze(1))
                alive = total < 0.99
            return x

    return Case(Ponder(), (3 * torch.randn(7, 6),))


@pattern
def exceptions_as_control_flow() -> Case:
    """Cholesky with growing jitter: a failure is caught and tried again."""

    class Jitter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            f = self.linear(x)
            gram = f @ f.T - 0.5 * torch.eye(len(x))
            jitter = 0.01
            while True:
                try:
                    factor = torch.linalg.cholesky(gram + jitter * torch.eye(len(x)))
                    break
                except torch.linalg.LinAlgError:
                    jitter *= 10
            return factor @ f

    return Case(Jitter(), (torch.randn(7, 6),))


@pattern(named=("value", "branch"))
def depth_by_dropping_layers() -> Case:
    """Stochastic depth: a random number of torch, asked by `.item()`, drops whole layers."""

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.training and torch.rand(()).item() < 0.5:
                    continue
                x = x + layer(x)
            return x

    return trained(Drop(), torch.randn(7, 6))
