"""Attention on a latent cache: the projection of the cache is absorbed into query and output.

Multi-head latent attention keeps one latent c[L, r] and one rotated key [L, d_r] for all heads, and
projects the latents to keys and values of each head: k = c W_UK, v = c W_UV.  Products are
associative, so q (c W_UK)^T = (q W_UK^T) c^T and p (c W_UV) = (p c) W_UV: attention runs on the
latents themselves, with one key of r + d_r and one value of r elements for all heads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rooftrace.costmodels.rewriting.editing import (
    ATTENTION,
    LATENT_ATTENTION,
    Editor,
    operand,
)
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.unused import without_left_behind
from rooftrace.tracer.arguments import Argument, Ref, references
from rooftrace.tracer.graph import Op, OpGraph, Tensor

_EMPTY = frozenset({"aten.new_empty", "aten.empty", "aten.empty_like", "aten.new_zeros"})


@dataclass(frozen=True, slots=True)
class _Projection:
    """What one product makes of the latents for every head: columns offset + head * apart + j."""

    product: Op
    offset: int  # the first column of the first head
    apart: int  # columns between two heads
    width: int  # columns of one head


@dataclass(frozen=True, slots=True, kw_only=True)
class _Latent:
    """One attention whose keys and values are projections of latents."""

    attention: Op
    keys: _Projection  # W_UK, for the first d_nope elements of a key (or the last)
    values: _Projection  # W_UV
    latents: Ref  # [B L, r]
    rope: Ref  # [B, h or 1, L, d_r], the same for all heads
    key_at: int  # where the projected part of a key begins
    rope_at: int  # where the rotated part begins

    @property
    def products(self) -> frozenset[int]:
        """The values that the projections make."""
        return frozenset(p.product.outputs[0] for p in (self.keys, self.values))


def absorb_latent(graph: OpGraph) -> tuple[OpGraph, int]:
    """Attention whose keys and values are projected from cached latents runs on the latents.

    It does so where that takes fewer FLOPs, which prompts do not, and where nothing else reads the
    keys and values.  The cache stays as it is: it holds the latents and the rotated keys.
    """
    refused: set[int] = set()
    while True:
        matches = _matches(graph, refused)
        if not matches:
            return graph, 0
        edit = Editor(graph)
        for op in graph.ops:
            if op.id in matches:
                _emit(edit, matches[op.id])
            else:
                edit.ops.append(op)
        result = without_left_behind(edit.done(), graph)
        still = {value for op in result.ops for value in op.outputs}
        kept = {index for index, match in matches.items() if match.products & still}
        if not kept:
            return result, sum(graph.times(match.attention) for match in matches.values())
        refused |= kept


def _matches(graph: OpGraph, refused: Collection[int]) -> dict[int, _Latent]:
    places = Places(graph)
    matches = {}
    for op in graph.ops:
        if op.target == ATTENTION and op.part == "forward" and op.id not in refused:
            match = _match(places, op)
            if match is not None and _is_cheaper(graph, match):
                matches[op.id] = match
    return matches


def _match(places: Places, op: Op) -> _Latent | None:
    graph = places.graph
    query, key, value = (graph.values[operand(op, n).id] for n in ("query", "key", "value"))
    out = graph.values[op.outputs[0]]
    heads_alike = len(query.shape) == 4 and query.shape[:2] == key.shape[:2] == value.shape[:2]
    if not heads_alike or not _is_flash_layout(out) or out.storage != op.outputs[0]:
        return None
    if any(r.then or r.every for r in references(op.arguments)):
        return None
    values = _projection(places, op, operand(op, "value").id)
    pieces = _pieces(places, operand(op, "key").id)
    if values is None or len(pieces) != 2:
        return None
    for (at, piece), (other_at, other) in (pieces, pieces[::-1]):
        keys = _projection(places, op, piece)
        if keys is None or not _is_shared(graph.values[other]):
            continue
        latents = [operand(p.product, "self") for p in (keys, values)]
        if latents[0].then or places.place(latents[0].id) != places.place(latents[1].id):
            continue
        if places.place(latents[0].id) is None:
            continue
        return _Latent(
            attention=op, keys=keys, values=values, latents=latents[0], rope=Ref(other),
            key_at=at, rope_at=other_at,
        )  # fmt: skip
    return None


def _is_flash_layout(out: Tensor) -> bool:
    if len(out.shape) != 4:
        return False
    _, heads, queries, width = out.shape
    wanted = (queries * heads * width, width, heads * width, 1)
    return all(n == 1 or a == b for n, a, b in zip(out.shape, out.stride, wanted, strict=True))


def _is_shared(rope: Tensor) -> bool:
    """Whether all heads have one rotated key: one is there, or one is expanded."""
    return len(rope.shape) == 4 and (rope.shape[1] == 1 or rope.stride[1] == 0)


def _pieces(places: Places, key: int) -> list[tuple[int, int]]:
    """What a key is put together of along its last dimension: where each part begins, and what it
    is.  Nothing where the key is not made of parts."""
    graph = places.graph
    key = places.plain(key)
    width = graph.values[key].shape[-1]
    op = places.made_by(key)
    if op is None or any(r.then or r.every for r in references(op.arguments)):
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
        if op.name != "aten.copy_" or any(r.then or r.every for r in references(op.arguments)):
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


def _projection(places: Places, attention: Op, value: int) -> _Projection | None:
    """The product of all latents with a weight that made a value [B, h, L, d]; None without one."""
    graph = places.graph
    place = places.place(places.plain(value))
    product = None if place is None else places.made_by(place.storage)
    if place is None or product is None or product.name != "aten.mm":
        return None
    rows, columns = graph.values[product.outputs[0]].shape
    batch, heads, length, width = place.shape
    apart = place.stride[1]
    wanted = (length * columns, apart, columns, 1)
    fits = all(n == 1 or a == b for n, a, b in zip(place.shape, place.stride, wanted, strict=True))
    weight = operand(product, "mat2")
    last = place.offset + (heads - 1) * apart + width
    if (
        not fits
        or rows != batch * length
        or not width <= apart
        or last > columns
        or _first_column(place.offset, apart, heads, columns) is None
        or product.repeats != attention.repeats
        or weight.then
        or graph.values[weight.id].dtype != graph.values[value].dtype
    ):
        return None
    return _Projection(product, place.offset, apart, width)


def _first_column(offset: int, apart: int, heads: int, columns: int) -> int | None:
    """Where `heads` whole spans of columns begin, each of which holds the columns of a head."""
    for start in (offset, offset - offset % apart):
        if start + heads * apart <= columns:
            return start
    return None


def _is_cheaper(graph: OpGraph, match: _Latent) -> bool:
    """Whether fewer FLOPs are needed on latents."""
    op = match.attention
    batch, heads, queries, e = graph.values[operand(op, "query").id].shape
    length, ev = graph.values[operand(op, "value").id].shape[-2:]
    rank = graph.values[match.latents.id].shape[1]
    products = {p.product.outputs[0]: p.product for p in (match.keys, match.values)}
    projected = sum(graph.values[out].elements * rank for out in products)
    before = projected + batch * heads * queries * length * (e + ev)
    rope = e - match.keys.width
    around = batch * heads * queries * rank * (match.keys.width + match.values.width)
    after = around + batch * heads * queries * length * (2 * rank + rope)
    return after < before


# -- the new ops -----------------------------------------------------------------------------------


def _emit(edit: Editor, match: _Latent) -> None:
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

    mixed = _attend(edit, match, latent, turned, (batch, length, rank))
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


def _attend(
    edit: Editor, match: _Latent, latent: Ref, turned: Ref, sizes: tuple[int, int, int]
) -> Ref:
    """Attention of the queries [B, H, S, r] and [B, H, S, d_r] on the latents."""
    op = match.attention
    batch, length, rank = sizes
    down, across = edit.values[match.latents.id].stride
    strides = (length * down, length * down, down, across)
    cache = edit.viewed(op, match.latents, (batch, 1, length, rank), strides)
    keys = edit.sliced(op, match.rope, 1, 0, 1)
    _, heads, queries, _ = shape = edit.values[latent.id].shape
    transposed = (queries * heads * rank, rank, heads * rank, 1)
    out = edit.value(
        shape, edit.values[latent.id].dtype, "activations", op.repeats, stride=transposed
    )
    options = {name: op.arguments[name] for name in ("mask", "dropout_p", "is_causal", "scale")
               if name in op.arguments}  # fmt: skip
    arguments = {
        "query": latent, "query_rope": turned, "latent": cache, "rope": keys, **options,
    }  # fmt: skip
    edit.emit(op, LATENT_ATTENTION, arguments, (out, *op.outputs[1:]), facts=op.facts)
    return Ref(out)


def _by_head(edit: Editor, op: Op, of: Ref, shape: tuple[int, int, int]) -> Ref:
    """A value [B, H, S, d] as [H, B S, d]."""
    source = edit.values[of.id]
    (batch, _, queries, _), (outer, head, row, last) = source.shape, source.stride
    turned = edit.permuted(op, of, (1, 0, 2, 3))
    merges = batch == 1 or queries == 1 or outer == queries * row
    strides = (head, outer if queries == 1 else row, last) if merges else None
    return edit.viewed(op, turned, shape, strides)


def _weight(edit: Editor, op: Op, projection: _Projection, heads: int) -> Ref:
    """The columns of a weight [r, N] that one projection takes, as [r, H, d]."""
    weight = operand(projection.product, "mat2")
    rank, columns = edit.values[weight.id].shape
    down, across = edit.values[weight.id].stride
    apart, offset = projection.apart, projection.offset
    start = _first_column(offset, apart, heads, columns)
    assert start is not None  # `_projection` has seen to it
    used = edit.sliced(op, weight, 1, start, start + heads * apart)
    by_head = edit.viewed(op, used, (rank, heads, apart), (down, apart * across, across))
    first = offset - start
    return edit.sliced(op, by_head, 2, first, first + projection.width)
