"""The ops of attention on latents: products with the absorbed weights, and one attention.

q (c W_UK)^T = (q W_UK^T) c^T and p (c W_UV) = (p c) W_UV; see `latent`, which finds where.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftrace.costmodels.rewriting.editing import (
    LATENT_ATTENTION,
    PACKED_ATTENTION,
    PACKED_LATENT_ATTENTION,
    Editor,
    operand,
)
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op

_OPERANDS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Projection:
    """What one product makes of the latents for every head: columns offset + head * apart + j."""

    product: Op
    offset: int  # the first column of the first head
    apart: int  # columns between two heads
    width: int  # columns of one head


@dataclass(frozen=True, slots=True)
class GrownCache:
    """Caches of keys [B, H, L, d] and values of each head, and the ops that append to them.

    Every row of them was appended so, and is the projection of a latent: the latents can be cached
    in their place.
    """

    keys: Op
    values: Op


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """One attention whose keys and values are projections of latents."""

    attention: Op
    keys: Projection  # W_UK, for the first d_nope elements of a key (or the last)
    values: Projection  # W_UV
    latents: Ref  # [B L, r]
    rope: Ref  # [B, h or 1, L, d_r], the same for all heads
    key_at: int  # where the projected part of a key begins
    rope_at: int  # where the rotated part begins

    grown: GrownCache | None = None  # where keys and values of each head are cached

    @property
    def products(self) -> frozenset[int]:
        """Values that nobody needs any more: what the projections make, and caches by head."""
        grown = self.grown
        caches = () if grown is None else (grown.keys.outputs[0], grown.values.outputs[0])
        return frozenset({*(p.product.outputs[0] for p in (self.keys, self.values)), *caches})


def first_column(offset: int, apart: int, heads: int, columns: int) -> int | None:
    """Where `heads` whole spans of columns begin, each of which holds the columns of a head."""
    for start in (offset, offset - offset % apart):
        if start + heads * apart <= columns:
            return start
    return None


def emit(edit: Editor, match: LatentAttention) -> None:
    """query W_UK^T, attention on latents, out W_UV; H: heads, rows: B S."""
    op = match.attention
    query, out = operand(op, "query"), op.outputs[0]
    batch, heads, queries, _ = edit.values[query.id].shape
    rows, dtype = batch * queries, edit.values[query.id].dtype
    length, ev = edit.values[operand(op, "value").id].shape[-2:]
    rank, width = edit.values[match.latents.id].shape[1], match.keys.width
    rope = edit.values[match.rope.id].shape[-1]

    nope = edit.sliced(op, query, 3, match.key_at, match.key_at + width)
    turned = edit.sliced(op, query, 3, match.rope_at, match.rope_at + rope)
    first = _by_head(edit, op, nope, (heads, rows, width))
    up_key = edit.permuted(op, _weight(edit, op, match.keys, heads), (1, 2, 0))
    product: dict[str, Argument] = {"self": first, "mat2": up_key}
    latent = edit.made(op, "aten.bmm.default", product, (heads, rows, rank), dtype)
    latent = edit.viewed(op, latent, (heads, batch, queries, rank))
    latent = edit.permuted(op, latent, (1, 0, 2, 3))

    cache, keys = _cached(edit, match, (batch, length, rank))
    mixed = _attend(edit, op, {
        "query": latent, "query_rope": turned, "latent": cache, "rope": keys,
    })  # fmt: skip
    second = _by_head(edit, op, mixed, (heads, rows, rank))
    up_value = edit.permuted(op, _weight(edit, op, match.values, heads), (1, 0, 2))
    # The product writes in the order that the next one reads: bmm with `out` does.
    made = edit.view(Ref(out), (heads, rows, ev), (ev, heads * ev, 1), op.repeats)
    edit.emit(op, "aten.bmm.default", {"self": second, "mat2": up_value}, (made,))
    wide = (ev, queries * heads * ev, heads * ev, 1)
    split = edit.viewed(op, Ref(made), (heads, batch, queries, ev), wide)
    flat = edit.viewed(op, edit.permuted(op, split, (1, 2, 0, 3)), (batch, queries, heads * ev))
    whole = edit.viewed(op, flat, (batch, queries, heads, ev))
    turn: dict[str, Argument] = {"self": whole, "dim0": 1, "dim1": 2}
    edit.emit(op, "aten.transpose.int", turn, (out,), kind="view")


def _cached(edit: Editor, match: LatentAttention, sizes: tuple[int, int, int]) -> tuple[Ref, Ref]:
    """The latents [B, 1, L, r] and rotated keys [B, 1, L, d_r] of all positions."""
    op, (batch, length, rank) = match.attention, sizes
    grown = match.grown
    rows = length if grown is None else edit.values[grown.keys.inputs[1]].shape[2]
    down, across = edit.values[match.latents.id].stride
    strides = (rows * down, rows * down, down, across)
    latents = edit.viewed(op, match.latents, (batch, 1, rows, rank), strides)
    ropes = edit.sliced(op, match.rope, 1, 0, 1)
    if grown is None:
        return latents, ropes
    return (
        _appended(edit, grown.keys, latents, length, "latent"),
        _appended(edit, grown.values, ropes, length, "rope"),
    )


def _appended(edit: Editor, like: Op, new: Ref, length: int, name: str) -> Ref:
    """A cache for all heads in the place of one by head, with the new rows behind the others."""
    tensor = edit.values[new.id]
    batch, _, rows, width = tensor.shape
    before, old = like.inputs[0], edit.values[like.inputs[0]]
    shape = (batch, 1, length - rows, width)
    cache = edit.value(shape, old.dtype, "kv", like.repeats, f"{old.name}.{name}")
    edit.named_like(cache, [before], lambda names: f"{names[0]}.{name}")
    arguments: dict[str, Argument] = {"tensors": (Ref(cache), new), "dim": 2}
    whole = edit.made(
        like, "aten.cat.default", arguments, (batch, 1, length, width), old.dtype, "kv"
    )
    edit.replaced |= {before: cache, like.outputs[0]: whole.id}
    return whole


def _attend(edit: Editor, op: Op, operands: dict[str, Argument]) -> Ref:
    """Attention of the queries [B, H, S, r] and [B, H, S, d_r] on the latents."""
    query = edit.values[operands["query"].id]
    _, heads, queries, rank = query.shape
    transposed = (queries * heads * rank, rank, heads * rank, 1)
    out = edit.value(query.shape, query.dtype, "activations", op.repeats, stride=transposed)
    options = {name: item for name, item in op.arguments.items() if name not in _OPERANDS}
    target = PACKED_LATENT_ATTENTION if op.target == PACKED_ATTENTION else LATENT_ATTENTION
    edit.emit(op, target, {**operands, **options}, (out, *op.outputs[1:]), facts=op.facts)
    return Ref(out)


def _by_head(edit: Editor, op: Op, of: Ref, shape: tuple[int, int, int]) -> Ref:
    """A value [B, H, S, d] as [H, B S, d]."""
    source = edit.values[of.id]
    (batch, _, queries, _), (outer, head, row, last) = source.shape, source.stride
    turned = edit.permuted(op, of, (1, 0, 2, 3))
    merges = batch == 1 or queries == 1 or outer == queries * row
    strides = (head, outer if queries == 1 else row, last) if merges else None
    return edit.viewed(op, turned, shape, strides)


def _weight(edit: Editor, op: Op, projection: Projection, heads: int) -> Ref:
    """The columns of a weight [r, N] that one projection takes, as [r, H, d]."""
    weight = operand(projection.product, "mat2")
    rank, columns = edit.values[weight.id].shape
    down, across = edit.values[weight.id].stride
    apart, offset = projection.apart, projection.offset
    start = first_column(offset, apart, heads, columns)
    assert start is not None  # `_projection` has seen to it
    used = edit.sliced(op, weight, 1, start, start + heads * apart)
    by_head = edit.viewed(op, used, (rank, heads, apart), (down, apart * across, across))
    first = offset - start
    return edit.sliced(op, by_head, 2, first, first + projection.width)
