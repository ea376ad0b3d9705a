"""Attention on a latent cache: the projection of the cache is absorbed into query and output.

Multi-head latent attention keeps one latent c[L, r] and one rotated key [L, d_r] for all heads, and
projects the latents to keys and values of each head: k = c W_UK, v = c W_UV.  Products are
associative, so q (c W_UK)^T = (q W_UK^T) c^T and p (c W_UV) = (p c) W_UV: attention runs on the
latents, with one key of r + d_r and one value of r elements for all heads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from rooftrace.costmodels.rewrites.dataflow import ValueFlow, reads_across, same_strides
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    LATENT_ATTENTION,
    PACKED_ATTENTION,
    PACKED_LATENT_ATTENTION,
    Editor,
    operand,
    with_matches,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.tracer import RequestLengths

_EMPTY = frozenset({"aten.new_empty", "aten.empty", "aten.empty_like", "aten.new_zeros"})


def absorb_latent(graph: OpGraph) -> tuple[OpGraph, int]:
    """Attention whose keys and values are projected from cached latents runs on the latents.

    It does so where that takes fewer FLOPs (not in prompts), and where nothing else reads the keys
    and values.  A cache of latents and rotated keys stays as it is; one of keys and values of each
    head becomes one of latents and rotated keys, in a step of one token.
    """
    refused: set[int] = set()
    while True:
        matches = _matches(graph, refused)
        if not matches:
            return graph, 0
        result, count = with_matches(graph, matches, emit)
        still = {value for op in result.ops for value in op.outputs}
        kept = {index for index, match in matches.items() if match.products & still}
        if not kept:
            return result, count
        refused |= kept


def _matches(graph: OpGraph, refused: Collection[int]) -> dict[int, LatentAttention]:
    flow = ValueFlow(graph)
    matches = {}
    for op in graph.ops:
        attends = op.target in (ATTENTION, PACKED_ATTENTION) and op.part == "forward"
        if attends and op.id not in refused:
            match = _match(flow, op)
            if match is not None and _is_cheaper(graph, match):
                matches[op.id] = match
    return matches


def _match(flow: ValueFlow, op: Op) -> LatentAttention | None:
    graph = flow.graph
    query, key, value = (graph.values[operand(op, n).id] for n in ("query", "key", "value"))
    out = graph.values[op.outputs[0]]
    heads_alike = len(query.shape) == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not heads_alike or not _is_flash_layout(out) or out.storage != op.outputs[0]:
        return None
    if reads_across(op):
        return None
    cached = [operand(op, name).id for name in ("key", "value")]
    appends = [_append(flow, value) for value in cached]
    match = None
    if appends[0] is not None and appends[1] is not None:
        grown = GrownCache(appends[0], appends[1])
        match = _made_of_latents(flow, op, grown.keys.inputs[1], grown.values.inputs[1])
        match = None if match is None or query.shape[2] != 1 else replace(match, grown=grown)
    return match or _made_of_latents(flow, op, *cached)


def _append(flow: ValueFlow, value: int) -> Op | None:
    """The op that appends new rows to a cache [B, H, L, d] and is its only reader."""
    graph, op = flow.graph, flow.producer(value)
    if op is None or op.name != "aten.cat" or op.arguments.get("dim", 0) not in (-2, 2):
        return None
    if len(op.inputs) != 2 or reads_across(op):
        return None
    cache = graph.values[op.inputs[0]]
    plain = (
        cache.storage == op.inputs[0] and cache.storage in flow.graph.external and cache.elements
    )
    alone = flow.storage_users[cache.storage] == [op] and cache.storage not in flow.crossing
    return op if plain and alone and cache.role == "kv" else None


def _made_of_latents(flow: ValueFlow, op: Op, key: int, value: int) -> LatentAttention | None:
    graph = flow.graph
    values, pieces = _projection(flow, op, value), _pieces(flow, key)
    if values is None or len(pieces) != 2:
        return None
    for (at, piece), (other_at, other) in (pieces, pieces[::-1]):
        keys = _projection(flow, op, piece)
        if keys is None or not _is_shared(graph.values[other]):
            continue
        latents = [operand(p.product, "self") for p in (keys, values)]
        place = None if latents[0].then else flow.location(latents[0].id)
        if place is None or place != flow.location(latents[1].id):
            continue
        first = min(keys.product.id, values.product.id)
        # The latents are read at the attention, the rotated key where it was made or later.
        made = flow.graph.producers.get(other, -1)
        if flow.overwritten(latents[0].id, first, op.id) or flow.overwritten(other, made, op.id):
            continue
        return LatentAttention(
            attention=op, keys=keys, values=values, latents=latents[0], rope=Ref(other),
            key_at=at, rope_at=other_at,
        )  # fmt: skip
    return None


def _is_flash_layout(out: Tensor) -> bool:
    if len(out.shape) != 4:
        return False
    _, heads, queries, width = out.shape
    wanted = (queries * heads * width, width, heads * width, 1)
    return same_strides(out.shape, out.stride, wanted)


def _is_shared(rope: Tensor) -> bool:
    """Whether all heads have one rotated key: one is there, or one is expanded."""
    return len(rope.shape) == 4 and (rope.shape[1] == 1 or rope.stride[1] == 0)


def _pieces(flow: ValueFlow, key: int) -> list[tuple[int, int]]:
    """(first column, value) of the parts of a key along its last dimension; empty without parts."""
    graph = flow.graph
    key = flow.root(key, graph.values[key].shape)
    place = flow.location(key)
    if place is not None and place == flow.location(place.storage):
        key = place.storage
    width = graph.values[key].shape[-1]
    op = flow.producer(key)
    if op is None or reads_across(op):
        return []
    if op.name == "aten.cat":
        if op.arguments.get("dim", 0) not in (-1, len(graph.values[key].shape) - 1):
            return []
        parts, at = [], 0
        for index in op.inputs:
            parts.append((at, index))
            at += graph.values[index].shape[-1]
        return parts
    if op.name not in _EMPTY or graph.values[key].storage != key:
        return []
    return _written(flow, key, width)


def _written(flow: ValueFlow, key: int, width: int) -> list[tuple[int, int]]:
    """(first column, value) of the copies that fill a new tensor along its last dimension."""
    graph, target = flow.graph, flow.values[key]
    parts = []
    for op in flow.storage_users[key]:
        if not any(graph.values[i].storage == key for i in op.outputs) or op.kind == "view":
            continue
        if op.name != "aten.copy_" or reads_across(op):
            return []
        place = flow.location(operand(op, "self").id)
        if place is None or place.stride != target.stride or place.shape[:-1] != target.shape[:-1]:
            return []
        parts.append((place.offset, operand(op, "src").id, place.shape[-1]))
    parts.sort()
    covered = [end for at, _, size in parts for end in (at, at + size)]
    if not covered or covered[0] or covered[-1] != width or covered[1:-1:2] != covered[2:-1:2]:
        return []
    return [(at, source) for at, source, _ in parts]


def _projection(flow: ValueFlow, attention: Op, value: int) -> Projection | None:
    """The product of all latents with a weight that made a value [B, h, L, d]."""
    graph = flow.graph
    place = flow.location(flow.root(value, graph.values[value].shape))
    product = None if place is None else flow.producer(place.storage)
    if place is None or product is None or product.name != "aten.mm":
        return None
    rows, columns = graph.values[product.outputs[0]].shape
    batch, heads, length, width = place.shape
    apart = place.stride[1]
    wanted = (length * columns, apart, columns, 1)
    fits = same_strides(place.shape, place.stride, wanted)
    weight = operand(product, "mat2")
    last = place.offset + (heads - 1) * apart + width
    if (
        not fits
        or rows != batch * length
        or not width <= apart
        or last > columns
        or first_column(place.offset, apart, heads, columns) is None
        or product.repeats != attention.repeats
        or weight.then
    ):
        return None
    return Projection(product, place.offset, apart, width)


def _is_cheaper(graph: OpGraph, match: LatentAttention) -> bool:
    """Whether attention on latents takes fewer FLOPs; true for caches by head, for their bytes."""
    op = match.attention
    if match.grown is not None:
        return True
    batch, heads, queries, e = graph.values[operand(op, "query").id].shape
    length, ev = graph.values[operand(op, "value").id].shape[-2:]
    rank = graph.values[match.latents.id].shape[1]
    products = {p.product.outputs[0]: p.product for p in (match.keys, match.values)}
    projected = sum(graph.values[out].elements * rank for out in products)
    pairs = batch * _pairs(op, queries, length)
    before = projected + heads * pairs * (e + ev)
    rope = e - match.keys.width
    around = batch * heads * queries * rank * (match.keys.width + match.values.width)
    after = around + heads * pairs * (2 * rank + rope)
    return after < before


def _pairs(attention: Op, queries: int, length: int) -> int:
    """(query, key) pairs of one head; of packed requests those of each alone."""
    if attention.target != PACKED_ATTENTION:
        return queries * length
    cached, new, window = (attention.arguments[name] for name in ("cached", "new", "window"))
    return RequestLengths(tuple(cached), tuple(new)).pairs(window)


# -- new ops ---------------------------------------------------------------------------------------


_OPERANDS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Projection:
    """A product of the latents for every head: columns offset + head * apart + j."""

    product: Op
    offset: int  # the first column of the first head
    apart: int  # columns between two heads
    width: int  # columns of one head


@dataclass(frozen=True, slots=True)
class GrownCache:
    """The ops that append to caches of keys [B, H, L, d] and values of each head.

    Every row is the projection of a latent, so the latents can be cached in their place.
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
        """Values that become dead: the results of the projections, and caches by head."""
        grown = self.grown
        caches = () if grown is None else (grown.keys.outputs[0], grown.values.outputs[0])
        return frozenset({*(p.product.outputs[0] for p in (self.keys, self.values)), *caches})


def first_column(offset: int, apart: int, heads: int, columns: int) -> int | None:
    """The start of `heads` spans of columns, each of which has the columns of a head."""
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
    rows_first = edit.viewed(op, flat, (batch, queries, heads, ev))
    edit.transpose(op, rows_first, out)


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
    """A cache for all heads in place of one by head, with the new rows appended."""
    tensor = edit.values[new.id]
    batch, _, rows, width = tensor.shape
    before, old = like.inputs[0], edit.values[like.inputs[0]]
    shape = (batch, 1, length - rows, width)
    cache = edit.value(shape, old.dtype, "kv", like.repeats, f"{old.name}.{name}")
    edit.named_like(cache, [before], lambda names: f"{names[0]}.{name}")
    arguments: dict[str, Argument] = {"tensors": (Ref(cache), new), "dim": 2}
    grown = edit.made(
        like, "aten.cat.default", arguments, (batch, 1, length, width), old.dtype, "kv"
    )
    edit.replaced |= {before: cache, like.outputs[0]: grown.id}
    return grown


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
    assert start is not None  # checked by `_projection`
    used = edit.sliced(op, weight, 1, start, start + heads * apart)
    by_head = edit.viewed(op, used, (rank, heads, apart), (down, apart * across, across))
    first = offset - start
    return edit.sliced(op, by_head, 2, first, first + projection.width)
