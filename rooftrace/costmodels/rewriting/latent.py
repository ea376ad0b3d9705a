"""Attention on a latent cache: the projection of the cache is absorbed into query and output.

Multi-head latent attention keeps one latent c[L, r] and one rotated key [L, d_r] for all heads, and
projects the latents to keys and values of each head: k = c W_UK, v = c W_UV.  Products are
associative, so q (c W_UK)^T = (q W_UK^T) c^T and p (c W_UV) = (p c) W_UV: attention runs on the
latents themselves, with one key of r + d_r and one value of r elements for all heads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rooftrace.costmodels.rewriting.editing import (
    ATTENTION,
    PACKED_ATTENTION,
    operand,
)
from rooftrace.costmodels.rewriting.latent_products import (
    GrownCache,
    LatentAttention,
    Projection,
    emit,
    first_column,
)
from rooftrace.costmodels.rewriting.places import Places, beside, same_steps
from rooftrace.costmodels.rewriting.unused import with_matches
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.asking import RequestLengths
from rooftrace.tracer.graph import Op, OpGraph, Tensor

_EMPTY = frozenset({"aten.new_empty", "aten.empty", "aten.empty_like", "aten.new_zeros"})


def absorb_latent(graph: OpGraph) -> tuple[OpGraph, int]:
    """Attention whose keys and values are projected from cached latents runs on the latents.

    It does so where that takes fewer FLOPs, which prompts do not, and where nothing else reads the
    keys and values.  A cache of latents and rotated keys stays as it is.  Where keys and values of
    each head are cached, a step of one token keeps latents and rotated keys in their place.
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
    places = Places(graph)
    matches = {}
    for op in graph.ops:
        attends = op.target in (ATTENTION, PACKED_ATTENTION) and op.part == "forward"
        if attends and op.id not in refused:
            match = _match(places, op)
            if match is not None and _is_cheaper(graph, match):
                matches[op.id] = match
    return matches


def _match(places: Places, op: Op) -> LatentAttention | None:
    graph = places.graph
    query, key, value = (graph.values[operand(op, n).id] for n in ("query", "key", "value"))
    out = graph.values[op.outputs[0]]
    heads_alike = len(query.shape) == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not heads_alike or not _is_flash_layout(out) or out.storage != op.outputs[0]:
        return None
    if beside(op):
        return None
    cached = [operand(op, name).id for name in ("key", "value")]
    appends = [_append(places, value) for value in cached]
    match = None
    if appends[0] is not None and appends[1] is not None:
        grown = GrownCache(appends[0], appends[1])
        match = _made_of_latents(places, op, grown.keys.inputs[1], grown.values.inputs[1])
        match = None if match is None or query.shape[2] != 1 else replace(match, grown=grown)
    return match or _made_of_latents(places, op, *cached)


def _append(places: Places, value: int) -> Op | None:
    """The op that appends new rows to a cache [B, H, L, d], which nothing else reads."""
    graph, op = places.graph, places.made_by(value)
    if op is None or op.name != "aten.cat" or op.arguments.get("dim", 0) not in (-2, 2):
        return None
    if len(op.inputs) != 2 or beside(op):
        return None
    cache = graph.values[op.inputs[0]]
    plain = cache.storage == op.inputs[0] and cache.storage in places.outside and cache.elements
    alone = places.readers[cache.storage] == [op] and cache.storage not in places.neighbours
    return op if plain and alone and cache.role == "kv" else None


def _made_of_latents(places: Places, op: Op, key: int, value: int) -> LatentAttention | None:
    graph = places.graph
    values, pieces = _projection(places, op, value), _pieces(places, key)
    if values is None or len(pieces) != 2:
        return None
    for (at, piece), (other_at, other) in (pieces, pieces[::-1]):
        keys = _projection(places, op, piece)
        if keys is None or not _is_shared(graph.values[other]):
            continue
        latents = [operand(p.product, "self") for p in (keys, values)]
        place = None if latents[0].then else places.place(latents[0].id)
        if place is None or place != places.place(latents[1].id):
            continue
        first = min(keys.product.id, values.product.id)
        # The latents are read at the attention, the rotated key where it was made or later.
        made = places.graph.producers.get(other, -1)
        if places.overwritten(latents[0].id, first, op.id) or places.overwritten(
            other, made, op.id
        ):
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
    return same_steps(out.shape, out.stride, wanted)


def _is_shared(rope: Tensor) -> bool:
    """Whether all heads have one rotated key: one is there, or one is expanded."""
    return len(rope.shape) == 4 and (rope.shape[1] == 1 or rope.stride[1] == 0)


def _pieces(places: Places, key: int) -> list[tuple[int, int]]:
    """What a key is put together of along its last dimension: where each part begins, and what it
    is.  Nothing where the key is not made of parts."""
    graph = places.graph
    key = places.straight(key, graph.values[key].shape)
    place = places.place(key)
    if place is not None and place == places.place(place.storage):
        key = place.storage  # which others fill
    width = graph.values[key].shape[-1]
    op = places.made_by(key)
    if op is None or beside(op):
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
    return _written(places, key, width)


def _written(places: Places, key: int, width: int) -> list[tuple[int, int]]:
    """What is copied into a new tensor, part by part along its last dimension."""
    graph, whole = places.graph, places.graph.values[key]
    parts = []
    for op in places.readers[key]:
        if not any(graph.values[i].storage == key for i in op.outputs) or op.kind == "view":
            continue
        if op.name != "aten.copy_" or beside(op):
            return []
        place = places.place(operand(op, "self").id)
        if place is None or place.stride != whole.stride or place.shape[:-1] != whole.shape[:-1]:
            return []
        parts.append((place.offset, operand(op, "src").id, place.shape[-1]))
    parts.sort()
    covered = [end for at, _, size in parts for end in (at, at + size)]
    if not covered or covered[0] or covered[-1] != width or covered[1:-1:2] != covered[2:-1:2]:
        return []
    return [(at, source) for at, source, _ in parts]


def _projection(places: Places, attention: Op, value: int) -> Projection | None:
    """The product of all latents with a weight that made a value [B, h, L, d]; None without one."""
    graph = places.graph
    place = places.place(places.straight(value, graph.values[value].shape))
    product = None if place is None else places.made_by(place.storage)
    if place is None or product is None or product.name != "aten.mm":
        return None
    rows, columns = graph.values[product.outputs[0]].shape
    batch, heads, length, width = place.shape
    apart = place.stride[1]
    wanted = (length * columns, apart, columns, 1)
    fits = same_steps(place.shape, place.stride, wanted)
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
    """Whether fewer FLOPs are needed on latents; always so of caches by head, for their bytes."""
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
