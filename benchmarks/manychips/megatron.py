"""Language models as Megatron-LM trains them: one stage of a pipeline, on one process of a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron_ops import (
    Column,
    CrossEntropy,
    Embedding,
    Experts,
    Gated,
    Head,
    Rotary,
    Row,
    Turned,
    Weight,
    added_up,
    exchange,
    gather,
    scatter,
    size_of,
    weight,
)
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The dimensions of a model."""

    width: int
    inside: int  # of an MLP
    heads: int
    kv_heads: int = 8
    head: int = 128  # width of one
    words: int = 128256
    experts: int = 0
    chosen: int = 0
    expert: int = 0  # inside of one expert
    shared: int = 0  # inside of the shared experts
    dense: int = 0  # first layers without experts
    latent_q: int = 0  # MLA: of queries, of keys and values, and the width that is turned
    latent_kv: int = 0
    rope: int = 0


LATENT = {"latent_q": 1536, "latent_kv": 512, "rope": 64, "dense": 1, "heads": 128}
MODELS = {
    "llama3_8b": Sizes(width=4096, inside=14336, heads=32),
    "llama3_70b": Sizes(width=8192, inside=28672, heads=64),
    # 16 heads of keys: `num_query_groups` of SimuMax's scripts/run_pretrain_llama3.sh
    "llama3_405b": Sizes(width=16384, inside=53248, heads=128, kv_heads=16),
    "mixtral_8x7b": Sizes(
        width=4096, inside=0, heads=32, words=32000, experts=8, chosen=2, expert=14336
    ),
    "deepseekv2": Sizes(
        width=5120, inside=12288, words=102400, experts=160, chosen=6, expert=1536,
        shared=2 * 1536, **LATENT,
    ),
    "deepseekv3": Sizes(
        width=7168, inside=18432, words=129280, experts=256, chosen=8, expert=2048,
        shared=2048, **LATENT,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a process; None for a group of one."""

    tp: Any = None
    cp: Any = None
    ep: Any = None


class Attention(nn.Module):
    """Heads of one process, over its part of the sequence and all others of "cp"."""

    def __init__(self, sizes: Sizes, groups: Groups) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, groups
        tp = size_of(groups.tp)
        self.heads, self.kv = sizes.heads // tp, max(sizes.kv_heads // tp, 1)
        self.norm = weight(sizes.width)
        self.qkv = weight((self.heads + 2 * self.kv) * sizes.head, sizes.width)
        self.out = weight(sizes.width, self.heads * sizes.head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = F.rms_norm(x, (self.sizes.width,), self.norm)
        made = Column.apply(normed, self.qkv, self.groups.tp)
        heads = made.unflatten(-1, (-1, self.sizes.head))
        q, k, v = heads.split((self.heads, self.kv, self.kv), 1)
        q, k = Rotary.apply(q, cos, sin), Rotary.apply(k, cos, sin)
        mixed = attended(q, k, v, self.groups.cp)
        return x + Row.apply(mixed, self.out, self.groups.tp)


def attended(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """Causal attention of heads [rows, heads, width], as [rows, heads * width].

    Processes of a group have some of the heads each, and all rows.  Values, a part of a product,
    are copied (`get_qkv_layout` of Transformer Engine; `MLASelfAttention` of Megatron-LM).
    """
    v = v.contiguous()
    if size_of(group) > 1:
        q, k, v = (Turned.apply(t, group, False) for t in (q, k, v))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mixed = out[0].transpose(0, 1)
    return (Turned.apply(mixed, group, True) if size_of(group) > 1 else mixed).flatten(1)


class LatentAttention(nn.Module):
    """MLA as it is trained: keys and values are made of their latents."""

    def __init__(self, sizes: Sizes, groups: Groups) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, groups
        self.heads = sizes.heads // size_of(groups.tp)
        each = sizes.head + sizes.rope
        self.norm, self.norm_q = weight(sizes.width), weight(sizes.latent_q)
        self.norm_kv = weight(sizes.latent_kv)
        self.q_down = weight(sizes.latent_q, sizes.width)
        self.q_up = weight(self.heads * each, sizes.latent_q)
        self.kv_down = weight(sizes.latent_kv + sizes.rope, sizes.width)
        self.kv_up = weight(self.heads * 2 * sizes.head, sizes.latent_kv)
        self.out = weight(sizes.width, self.heads * sizes.head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        sizes, tp = self.sizes, self.groups.tp
        normed = F.rms_norm(x, (sizes.width,), self.norm)
        latent = F.rms_norm(Column.apply(normed, self.q_down, None), (sizes.latent_q,), self.norm_q)
        q = Column.apply(latent, self.q_up, tp).unflatten(-1, (self.heads, -1))
        plain, turned = q.split((sizes.head, sizes.rope), -1)
        q = torch.cat((plain, Rotary.apply(turned, cos, sin)), -1)
        made = Column.apply(normed, self.kv_down, None)
        kept, key = made.split((sizes.latent_kv, sizes.rope), -1)
        kept = F.rms_norm(kept, (sizes.latent_kv,), self.norm_kv)
        kv = Column.apply(kept, self.kv_up, tp).unflatten(-1, (self.heads, -1))
        k, v = kv.chunk(2, -1)
        key = Rotary.apply(gather(key, tp)[:, None], cos, sin).expand(-1, self.heads, -1)
        mixed = attended(q, torch.cat((k, key), -1), v, self.groups.cp)
        return x + Row.apply(mixed, self.out, tp)


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, inside: int, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        tp = size_of(groups.tp)
        self.up, self.down = weight(2 * inside // tp, width), weight(width, inside // tp)

    def forward(self, x: Tensor) -> Tensor:
        made = Gated.apply(Column.apply(x, self.up, self.groups.tp))
        return Row.apply(made, self.down, self.groups.tp)  # type: ignore[no-any-return]


class Moe(nn.Module):
    """Experts over "ep", with room for as many tokens in each; every process has some whole ones.

    As Megatron-LM with `--moe-pad-expert-input-to-capacity`: tokens without room are dropped, room
    without tokens is computed.
    """

    def __init__(self, sizes: Sizes, groups: Groups) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, groups
        count = sizes.experts // size_of(groups.ep)
        self.router = weight(sizes.experts, sizes.width)
        self.up = weight(count, 2 * sizes.expert, sizes.width, expert=True)
        self.down = weight(count, sizes.width, sizes.expert, expert=True)
        self.beside = Mlp(sizes.width, sizes.shared, groups) if sizes.shared else None

    def forward(self, x: Tensor) -> Tensor:
        sizes, group, count = self.sizes, self.groups.ep, len(self.up)
        room = math.ceil(len(x) * sizes.chosen / sizes.experts)
        order = torch.empty(sizes.experts * room, dtype=torch.long, device=x.device)
        shares = self.shares(Column.apply(x, self.router, None), room)
        scale = shares.t().flatten().index_select(0, order)
        got = Exchange.apply(Permute.apply(x, order, sizes.chosen), group)
        scale = Exchange.apply(scale, group).to(x.dtype).view(count, -1, 1)
        sorted_rows = Sorted.apply(got, order).unflatten(0, (count, -1))
        made = Gated.apply(Experts.apply(sorted_rows, self.up), scale)
        made = Experts.apply(made, self.down).flatten(0, 1)
        back = Exchange.apply(Sorted.apply(made, order), group)
        mixed = Combine.apply(back, len(x), sizes.chosen)
        return mixed if self.beside is None else mixed + self.beside(x)

    def shares(self, logits: Tensor, room: int) -> Tensor:
        """The shares [tokens, experts] of experts in what tokens get: 0 of those not chosen.

        `topk_routing_with_score_function`, the loss that balances, `apply_router_token_dropping`
        of megatron/core/transformer/moe/moe_utils.py, op by op.
        """
        chosen = self.sizes.chosen
        scores = torch.softmax(logits, -1, dtype=torch.float32)
        best, places = scores.to(logits.dtype).topk(chosen, -1)
        shares = torch.zeros_like(logits).scatter(1, places, best * 16)
        taken = torch.zeros_like(logits).int().scatter(1, places, 1).bool()
        shares = Balanced.apply(shares, (scores.sum(0) * taken.sum(0)).sum())
        kept = shares.topk(room, 0, sorted=False)[1]
        return shares * torch.zeros_like(shares).scatter(0, kept, 1).bool()


class Balanced(torch.autograd.Function):
    """Shares, to which the gradient of the loss that balances experts is tied."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss
        return shares.view_as(shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.ones_like(ctx.loss)


class Exchange(torch.autograd.Function):
    """Rows to their experts, and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return exchange(grads[0], ctx.group), None


@torch.compile
def added(x: Tensor, tokens: int, chosen: int) -> Tensor:
    """The sum of what so many experts make of each token, in one kernel (`moe_unpermute` of TE)."""
    return x[: tokens * chosen].unflatten(0, (tokens, chosen)).sum(1)


class Permute(torch.autograd.Function):
    """A row for each expert of each token, in the order of the experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, chosen: int) -> Tensor:
        ctx.sizes = len(x), chosen
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return added(grads[0], *ctx.sizes), None, None


class Combine(torch.autograd.Function):
    """The sum of what experts make of each token; rows of experts get its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int, chosen: int) -> Tensor:
        ctx.order = torch.empty(len(x), dtype=torch.long, device=x.device)
        return added(x, tokens, chosen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.order), None, None


class Sorted(torch.autograd.Function):
    """Rows in another order; their gradients come back in the former one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.order = order.new_empty(len(x))
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.order), None


class Layer(nn.Module):
    """Attention and an MLP, or experts."""

    def __init__(self, sizes: Sizes, groups: Groups, number: int) -> None:
        super().__init__()
        kind = LatentAttention if sizes.latent_kv else Attention
        self.attention: Any = kind(sizes, groups)
        self.norm, self.width = weight(sizes.width), sizes.width
        routed = sizes.experts and number >= sizes.dense
        self.mlp: Any = Moe(sizes, groups) if routed else Mlp(sizes.width, sizes.inside, groups)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attention(x, cos, sin)
        return x + self.mlp(F.rms_norm(x, (self.width,), self.norm))


class Stage(nn.Module):
    """Some layers of a model; the first stage has the table of words, the last the head."""

    def __init__(
        self, sizes: Sizes, groups: Groups, layers: range, first: bool, last: bool
    ) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, groups
        local = sizes.words // size_of(groups.tp)
        self.words = weight(local, sizes.width) if first else None
        self.layers = nn.ModuleList(Layer(sizes, groups, number) for number in layers)
        self.norm = weight(sizes.width) if last else None
        self.head = weight(local, sizes.width) if last else None

    def forward(self, x: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.words is not None:
            x = Embedding.apply(x, self.words, self.groups.tp)
        for layer in self.layers:
            x = layer(x, cos, sin)
        if self.head is None or self.norm is None:
            return x
        x = F.rms_norm(x, (self.sizes.width,), self.norm)
        logits = Head.apply(x, self.head, self.groups.tp)
        return CrossEntropy.apply(logits, labels, self.groups.tp)  # type: ignore[no-any-return]

    @property
    def stand_ins(self) -> int:
        """Bytes of bf16 tensors that stand for gradients of weights while these add up in fp32.

        Transformer Engine keeps one of each shape (`get_dummy_wgrad` of its module/base.py).
        """
        named = self.layers.named_parameters()
        shapes = {w.shape[-2:] for name, w in named if w.dim() > 1 and "router" not in name}
        return sum(2 * rows * columns for rows, columns in shapes)


def microbatch(stage: Any, x: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Forward and backward of one microbatch."""
    out = stage(x, labels, cos, sin)
    out.backward(torch.ones_like(out))


class Update(nn.Module):
    """What is done once a step: gradients are shared, clipped and applied, weights gathered.

    States are spread over the processes that have the same weights: `replicas` for experts and for
    all others.
    """

    def __init__(self, stage: Stage, dense: Any, experts: Any, everybody: Any) -> None:
        super().__init__()
        self.everybody, self.replicas = everybody, size_of(dense)
        self.parts: list[tuple[Any, Tensor, Tensor]] = []
        weights = [w for w in stage.parameters() if isinstance(w, Weight)]
        for group, some in (
            (dense, [w for w in weights if not w.expert]),
            (experts, [w for w in weights if w.expert]),
        ):
            count = sum(w.numel() for w in some)
            if count:
                count += -count % size_of(group)
                flat = nn.Parameter(torch.empty(count, dtype=torch.bfloat16, device="meta"))
                main = torch.empty(count, dtype=torch.float32, device="meta")
                self.register_parameter(f"flat_{len(self.parts)}", flat)
                self.register_buffer(f"main_{len(self.parts)}", main)
                self.parts.append((group, flat, main))
        self.masters = nn.ParameterList(
            torch.empty(len(main) // size_of(group), dtype=torch.float32, device="meta")
            for group, _, main in self.parts
        )

    @property
    def states(self) -> int:
        """Bytes of the fp32 weights and of Adam's two moments."""
        return sum(12 * master.numel() for master in self.masters)


def update(parts: Update, optimizer: torch.optim.Optimizer) -> None:
    """One update, a pass over memory for each of its kernels, as Megatron-LM hands them over.

    All gradients are looked through for NaN and, of more than one replica, scaled, before they are
    shared (`start_grad_sync` of distributed/param_and_grad_buffer.py); a process takes the norm of
    its part and scales that (optimizer/clip_grads.py), updates fp32 weights in one kernel and
    copies these into its part of the bf16 ones, which are gathered where they lie.
    """
    for _, _, main in parts.parts:
        torch.linalg.vector_norm(main)
        if parts.replicas > 1:
            main.mul_(1 / parts.replicas)
    shards = [scatter(main, group) for group, _, main in parts.parts]
    norms = torch.stack(torch._foreach_norm(shards))
    total = added_up(norms.square().sum(), parts.everybody).sqrt()
    torch._foreach_mul_(shards, (1 / (total + 1e-6)).clamp(max=1.0))
    for master, shard in zip(parts.masters, shards, strict=True):
        master.grad = shard
    optimizer.step()
    for (group, flat, main), master in zip(parts.parts, parts.masters, strict=True):
        own = flat.data[: len(master)]
        own.copy_(master)
        if size_of(group) > 1:
            torch.distributed.all_gather_into_tensor(flat.data, own, group=group)
        main.zero_()
        master.grad = None
