"""MPT, a decoder of llm-foundry, and a microbatch of its training, by its dimensions on meta."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rooftrace as rt

SIZES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Width, heads, layers."""
VOCABULARY = 50368


_library = torch.library.Library("mpt", "DEF")
_library.define("cross_entropy(Tensor logits, Tensor target) -> (Tensor, Tensor)")
_library.define("cross_entropy_backward(Tensor g, Tensor logits, Tensor sums) -> Tensor")
_library.impl(
    "cross_entropy",
    lambda logits, target: tuple(logits.new_empty(len(target), dtype=torch.float32) for _ in "ab"),
    "Meta",
)
_library.define("cast_transpose(Tensor x) -> (Tensor, Tensor)")
_library.impl(
    "cast_transpose",
    lambda x: (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(x.shape[::-1], dtype=torch.float8_e4m3fn),
    ),
    "Meta",
)
_library.impl("cross_entropy_backward", lambda g, logits, sums: torch.empty_like(logits), "Meta")


class CrossEntropy(torch.autograd.Function):
    """FlashAttention's cross entropy: logits are read once, and once more in backward."""

    @staticmethod
    def forward(ctx, logits, target):
        loss, sums = torch.ops.mpt.cross_entropy(logits, target)
        ctx.save_for_backward(logits, sums)
        return loss

    @staticmethod
    def backward(ctx, g):
        logits, sums = ctx.saved_tensors
        return torch.ops.mpt.cross_entropy_backward(g, logits, sums), None


@rt.extend.rule("mpt::cross_entropy", kind="softmax", family="loss")
def _cross_entropy(op: rt.extend.OpView) -> rt.extend.Cost:
    """An element is compared, taken off, exponentiated and added: 4 FLOP."""
    return rt.extend.Cost.of(vector=4 * op.needed("logits").elements) + op.streamed()


@rt.extend.rule("mpt::cross_entropy_backward", kind="softmax", family="loss")
def _cross_entropy_backward(op: rt.extend.OpView) -> rt.extend.Cost:
    """An element is taken off, exponentiated and multiplied: 3 FLOP."""
    return rt.extend.Cost.of(vector=3 * op.needed("logits").elements) + op.streamed()


@rt.extend.rule("mpt::cast_transpose", kind="elementwise", family="elementwise")
def _cast_transpose(op: rt.extend.OpView) -> rt.extend.Cost:
    """An element is scaled and compared with the largest so far: 2 FLOP."""
    return rt.extend.Cost.of(vector=2 * op.needed("x").elements) + op.streamed()


class Fp8Product(torch.autograd.Function):
    """A linear layer of TransformerEngine in fp8: one kernel casts an operand to both of its
    orders, with a scale of earlier steps; products are summed to bf16."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        flat = x.reshape(-1, x.shape[-1])
        (x8, x8_turned), (w8, w8_turned) = map(torch.ops.mpt.cast_transpose, (flat, weight))
        ctx.save_for_backward(x8_turned, w8_turned)
        return _multiplied(x8, w8).add_(bias).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, g):
        x8_turned, w8_turned = ctx.saved_tensors
        flat = g.reshape(-1, g.shape[-1])
        g8, g8_turned = torch.ops.mpt.cast_transpose(flat)
        to_input = _multiplied(g8, w8_turned).reshape(*g.shape[:-1], -1)
        return to_input, _multiplied(g8_turned, x8_turned), flat.sum(0)


def _multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a[M, K] times the transpose of b[N, K], both in fp8."""
    scale = torch.empty((), device=a.device)
    return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8Product.apply(x, self.weight, self.bias)


class Unpadded(torch.autograd.Function):
    """Rows [B, S, C] that a mask shows, as one [T, C]; here it shows all, and T is B S.

    flash_attn.bert_padding.index_first_axis: a gather, and in backward zeros and a scatter.
    """

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return torch.gather(x.flatten(0, 1), 0, rows[:, None].expand(-1, x.shape[-1]))

    @staticmethod
    def backward(ctx, g):
        (rows,) = ctx.saved_tensors
        whole = g.new_zeros(ctx.shape).flatten(0, 1)
        return whole.scatter_(0, rows[:, None].expand(-1, g.shape[-1]), g).view(ctx.shape), None


class Padded(torch.autograd.Function):
    """The inverse (index_put_first_axis): zeros and an index_put, and in backward rows of it."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        whole = x.new_zeros(x.shape)
        whole[rows] = x
        return whole

    @staticmethod
    def backward(ctx, g):
        (rows,) = ctx.saved_tensors
        return g[rows], None


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fp8: bool, unpads: bool) -> None:
        super().__init__()
        linear = Fp8Linear if fp8 else nn.Linear
        self.heads, self.unpads = heads, unpads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width)
        self.out = linear(width, width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        rows = torch.arange(x.shape[0] * x.shape[1], device=x.device) if self.unpads else None
        if rows is not None:  # every layer, of q, k and v
            parts = tuple(Unpadded.apply(part, rows) for part in parts)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if rows is not None:
            mixed = Padded.apply(mixed.reshape(-1, x.shape[-1]), rows)
        x = x + self.out(mixed.reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """Logits of ids [batch, sequence]; the output layer is the embedding.

    unpads: attention by flash_attn, around which llm-foundry of that year takes rows of padding
    out and puts them back, though there are none (llmfoundry/models/layers/attention.py).
    """

    def __init__(
        self,
        size: str,
        places: int,
        checkpoint: bool = False,
        fp8: bool = False,
        unpads: bool = False,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        width, heads, layers = SIZES[size]
        self.tokens = nn.Parameter(torch.empty(VOCABULARY, width))
        self.places = nn.Parameter(torch.empty(places, width))
        self.blocks = nn.ModuleList(Block(width, heads, fp8, unpads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(ids, self.tokens)
        x = x + F.embedding(torch.arange(ids.shape[1], device=ids.device)[None], self.places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return F.linear(self.norm(x), self.tokens)


def microbatch(model: Mpt, ids: torch.Tensor) -> None:
    """Forward, loss, backward, and the metrics of Composer.

    llm-foundry takes LanguageCrossEntropy and LanguagePerplexity of every microbatch in training
    (`use_train_metrics`), each by a cross entropy of the logits, which autocast makes fp32.
    """
    logits = model(ids).flatten(0, 1)
    CrossEntropy.apply(logits, ids.flatten()).mean().backward()
    with torch.no_grad():
        for _ in ("cross entropy", "perplexity"):
            F.cross_entropy(logits.float(), ids.flatten(), reduction="sum")
