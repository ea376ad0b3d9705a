"""Rewrites of recurrences to Mamba kernels: parallel scans and state-space duality."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from rooftrace._amounts import np
from rooftrace.costmodels.rewrites.dataflow import reads_across
from rooftrace.costmodels.rewrites.indexing import (
    Atom,
    Axis,
    Dim,
    Names,
    ReadValue,
    SumAxis,
    Walker,
    all_renamed,
    full,
    named,
    renamed,
)
from rooftrace.costmodels.rewrites.patterns import Pat, match
from rooftrace.costmodels.rewrites.recurrences import (
    axes_of,
    decay_of,
    fuse,
    in_roles,
    operands,
    scans,
    summed,
    sums_behind,
)
from rooftrace.costmodels.rewrites.scans import Scan, blank, clamped, finished, onto
from rooftrace.costmodels.rewrites.smallruns import NotRun, SmallRun, SmallTensor, short
from rooftrace.graph import Op, OpGraph, Tensor

# -- parallel scans --------------------------------------------------------------------------------
# Recurrences over all tokens at once, by ops in place that combine pairs of neighbours.
#
# Two tensors hold the decays and the inputs of all tokens.  Ops in place combine them until every
# token holds the sum over all tokens before it: they run on small random numbers (`smallruns`) and
# are compared with a loop over the tokens.  The order of the sweeps does not matter (G. Blelloch,
# "Prefix sums and their applications", CMU-CS-90-190).


def fuse_selective_scans(graph: OpGraph) -> tuple[OpGraph, int]:
    """Recurrences in which each number of a state decays by itself: `selective_scan` of Mamba."""
    return fuse(
        graph,
        lambda walker: (
            scan for find in (scans, parallel_scans) for scan in find(walker) if not scan.dual
        ),
    )


def parallel_scans(walker: Walker) -> Iterator[Scan]:
    """Scans by ops in place."""
    values = walker.values
    kept = [
        values[op.outputs[0]].storage
        for op in walker.graph.kernels()
        if op.name == "aten.add_" and not reads_across(op)
    ]
    for entered in dict.fromkeys(kept):
        scan = _parallel_scan(walker, entered)
        if scan is not None:
            yield scan


def _parallel_scan(walker: Walker, entered: int) -> Scan | None:
    values = walker.values
    added = [walker.producer(op.inputs[-1]) for op in walker.writers[entered]]
    read = {values[i].storage for op in added if op is not None for i in op.inputs}
    decays = {d for d in read - {entered} if values[d].shape == values[entered].shape}
    if len(decays) != 1 or len(values[entered].shape) < 2:
        return None
    (decay,) = decays
    for dim, tokens in enumerate(values[entered].shape):
        if tokens > 1 and _adds_up(walker, entered, decay, dim):
            walker.settled({entered, decay})
            scan = _in_one_tensor(walker, entered, decay, dim)
            if scan is None:
                walker.unsettled({entered, decay})
            return scan
    return None


def _adds_up(walker: Walker, entered: int, decay: int, dim: int) -> bool:
    """Whether ops in place add the decayed sum over all earlier tokens to each token."""
    graph = walker.graph
    made = [graph.producers.get(storage, -1) for storage in (entered, decay)]
    last = max(op.id for s in (entered, decay) for op in walker.writers[s])
    ops, reached = list[Op](), {entered, decay}
    for op in graph.ops[min(made) + 1 : last + 1]:
        if not reached.isdisjoint(op.inputs) and (op.kind == "view" or op.id > max(made)):
            if op.kind == "kernel" and op.name.removesuffix("_") not in ("aten.mul", "aten.add"):
                return False
            ops.append(op)
            reached |= set(op.outputs)
    if any(reads_across(op) for op in ops):
        return False
    tokens = graph.values[entered].shape[dim]
    inputs = {value: _numbers(graph.values[value], dim, value) for value in (decay, entered)}
    inputs[decay].array = np.exp(inputs[decay].array / tokens**0.5)  # far tokens count, too
    decays, states = (np.moveaxis(piece.array.copy(), dim, 0) for piece in inputs.values())
    try:
        run = SmallRun(graph, inputs, len(ops[0].repeats), {}).run(ops)
    except NotRun:
        return False
    for before, token in itertools.pairwise(range(tokens)):
        states[token] += decays[token] * states[before]
    combined = np.moveaxis(run[entered].array, dim, 0)
    return np.allclose(combined, states, rtol=0, atol=1e-9 * abs(states).max())


def _numbers(tensor: Tensor, dim: int, seed: int) -> SmallTensor:
    """Random numbers in the layout of a tensor, of its length along one dimension only."""
    dims = [((n, n if d == dim else min(n, 2)),) if n != 1 else () for d, n in
            enumerate(tensor.shape)]  # fmt: skip
    order = sorted(range(len(dims)), key=lambda d: -tensor.stride[d])
    numbers = np.random.default_rng(seed).uniform(-1, 1, short(dims[d] for d in order))
    return SmallTensor(numbers.transpose(np.argsort(order)), dims)


def _in_one_tensor(walker: Walker, entered: int, decay: int, dim: int) -> Scan | None:
    """The recurrence whose states are all in one tensor."""
    values, graph = walker.values, walker.graph
    shape = values[entered].shape
    dims = walker.direct(entered).dims
    last_write = max(op.id for op in walker.writers[entered])
    reads = [op for op in _readers(walker, entered) if op.id > last_write]
    sums = [(op, made) for op in reads if (made := summed(walker, entered, op)) is not None]
    if len(sums) != 1:
        return None
    (total, (y, queries, n)) = sums[0]
    states = ReadValue(entered, dims)
    views = [op.outputs[0] for op in reads if op is not total]
    last = list(dict.fromkeys(walker.at_index(i, states, dim, shape[dim] - 1) for i in views))
    exponent = walker.under(ReadValue(decay, dims), "exp")
    if not exponent or None in last or len(last) > 1:
        return None
    factors = operands(walker, exponent[0], states, queries, n)
    if factors is None:
        return None
    names: Names = {dim: [(Atom(dim, 1, shape[dim]), Atom("t", 1, shape[dim]))]}
    by_token = all_renamed({**factors, "y": y}, names)
    if by_token is None:
        return None
    y = by_token.pop("y")
    tokens = next(
        a.size for d in clamped(walker, by_token["x"]).dims for a in d.atoms if a.axis == "t"
    )
    after = ReadValue(entered, tuple(d for i, d in enumerate(dims) if i != dim))
    scan = in_roles(walker, by_token, y, after, axes_of(after), n, tokens, graph.ops[total.id])
    if scan is None or any(value is not None and tokens != shape[dim] for value in last):
        return None
    return finished(walker, _with_last(walker, scan, last, after))


def _with_last(walker: Walker, scan: Scan, last: list[ReadValue | None], after: ReadValue) -> Scan:
    if not last or last[0] is None or scan.last is None:
        return replace(scan, last=None)
    value = renamed(last[0], named(after, scan.last.dims))
    return replace(scan, last=value, dropped=scan.dropped | {walker.graph.producers[last[0].value]})


def _readers(walker: Walker, storage: int) -> Iterator[Op]:
    """The ops that read a tensor or a view of it, but for views of all tokens."""
    for op in walker.storage_users[storage]:
        if op.kind == "kernel" or op.name == "aten.select":
            yield op


# -- state-space duality ---------------------------------------------------------------------------
# A recurrence with one decay for each head, written over chunks of tokens.
#
# Within a chunk the decays from token s to token l are `L = exp(sum of a over s < k <= l)`, an
# exponential of masked sums.  Then `y = (C B^T * L) x` within the chunk, and the states that chunks
# leave behind are carried over the chunks and added to y.  All products are expanded into factors
# (see `indexing`), so their order does not matter (T. Dao and A. Gu, "Transformers are SSMs", arXiv
# 2405.21060, section 6).

_ALL = Pat("ones ones_like new_ones")
_NOT = "bitwise_not logical_not"
_ABOVE = (
    Pat("triu", _ALL, diagonal=1),
    Pat(_NOT, Pat("tril", _ALL, diagonal=(None, 0))),
)
_ON_AND_ABOVE = (
    Pat("triu", _ALL, diagonal=(None, 0)),
    Pat(_NOT, Pat("tril", _ALL, diagonal=-1)),
)


def fuse_dual_scans(graph: OpGraph) -> tuple[OpGraph, int]:
    """Recurrences with one decay for each head, over chunks or token by token, as one kernel."""
    return fuse(graph, _all_of)


def _all_of(walker: Walker) -> Iterator[Scan]:
    yield from (scan for scan in scans(walker) if scan.dual)
    for op in walker.graph.ops:
        if op.name == "aten.exp" and op.part == "forward":
            scan = _chunked(walker, op)
            if scan is not None:
                yield scan


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The product within a chunk.  row, column: the axes l and s; over: that of the state.

    logarithm: a, read at l.  queries: C at l.  keys, x: B and x at s.  y: the result.
    """

    row: Axis
    column: Axis
    over: Axis
    length: int
    logarithm: ReadValue
    queries: ReadValue
    keys: ReadValue
    x: ReadValue
    y: ReadValue

    def sums_to(self, walker: Walker, factor: ReadValue, end: Dim) -> bool:
        """Whether a factor is the sum of a from the start of a chunk to `end`."""
        return _sum(walker, factor, full(self.row, self.length)) == (end, self.logarithm)


def _chunked(walker: Walker, op: Op) -> Scan | None:
    walker.passed = {op.id}
    within = _within(walker, op)
    total = None if within is None else _total(walker, within)
    if within is None or total is None:
        return None
    add, across = total
    chunks, state, last = _states(walker, within, across) or (None, None, None)
    if chunks is None:
        return None
    return _dual_scan(walker, within, add, chunks, state, last)


# -- decays ----------------------------------------------------------------------------------------


def _segments(walker: Walker, read: ReadValue) -> tuple[ReadValue, Dim, Dim] | None:
    """a, row and column of exp(sum of a over column < k <= row); a is read at the row."""
    masked = walker.under(read, "exp", "masked_fill", value=-math.inf)
    if not masked or not _is(walker, masked[1], _ABOVE):
        return None
    row, column = masked[1].dims
    sums = [_sum(walker, side, row) for side in walker.under(masked[0], "sub") or masked[:1]]
    end, a = sums[0] or (None, None)
    if a is None or end != row:
        return None
    if len(sums) == 2:
        return (a, row, column) if sums[1] == (column, a) else None
    terms = walker.under(a, "masked_fill", value=0)
    if not terms or not _is(walker, terms[1], _ON_AND_ABOVE) or terms[1].dims[1] != column:
        return None
    return None if column in terms[0].dims and column.atoms else (terms[0], row, column)


def _sum(walker: Walker, factor: ReadValue, row: Dim) -> tuple[Dim, ReadValue] | None:
    """The end of a running sum, and its summand, read at `row`."""
    op = walker.maker(factor.value)
    if op is None or not walker.under(factor, "cumsum"):
        return None
    dim = int(op.arguments["dim"]) % len(factor.dims)
    read = _with_dim(factor.dims, dim, row)
    return factor.dims[dim], walker.source(ReadValue(op.inputs[0], read))


def _with_dim(dims: tuple[Dim, ...], place: int, dim: Dim) -> tuple[Dim, ...]:
    return (*dims[:place], dim, *dims[place + 1 :])


def _is(walker: Walker, mask: ReadValue, triangle: tuple[Pat, Pat]) -> bool:
    """Whether a mask is this triangle [rows, columns]."""
    return len(mask.dims) == 2 and match(walker, mask.value, triangle) is not None


# -- within a chunk --------------------------------------------------------------------------------


def _within(walker: Walker, exp: Op) -> _Chunk | None:
    decays = walker.fresh(exp.outputs[0])
    sums = _segments(walker, decays)
    if sums is None or any(len(dim.atoms) != 1 for dim in sums[1:]):
        return None
    a, row, column = sums
    later, earlier = row.atoms[0].axis, column.atoms[0].axis
    for op in sums_behind(walker, decays.value):
        chunk = _products(walker, op, decays, (a, later, earlier, row.atoms[0].size))
        if chunk is not None:
            return chunk
    return None


def _products(
    walker: Walker, op: Op, decays: ReadValue, segment: tuple[ReadValue, Axis, Axis, int]
) -> _Chunk | None:
    """y within a chunk as the product of C, B, the decays and x, summed over s and the state."""
    a, later, earlier, length = segment
    y = walker.fresh(op.outputs[0])
    names, others = walker.seen(y, decays)
    if names is None:
        return None
    factors = [
        renamed(part, names)
        for piece in others
        for part in walker.expanded(piece, lambda f: not _both(f, names, {later, earlier}))
    ]
    over = {ax for f in factors if f for ax in f.axes if isinstance(ax, SumAxis)}
    named_y = renamed(y, names)
    if len(factors) != 3 or len(over) != 1 or named_y is None or earlier in named_y.axes:
        return None
    n = over.pop()
    by_axes = {tuple(a in f.axes for a in (later, earlier, n)): f for f in factors if f}
    queries = by_axes.get((True, False, True))
    keys = by_axes.get((False, True, True))
    x = by_axes.get((False, True, False))
    if queries is None or keys is None or x is None:
        return None
    return _Chunk(
        row=later, column=earlier, over=n, length=length, logarithm=a, queries=queries, keys=keys,
        x=x, y=named_y,
    )  # fmt: skip


def _both(factor: ReadValue, names: Names, pair: set[Axis]) -> bool:
    """Whether a factor depends on both tokens of a pair."""
    axes = {other.axis for axis in factor.axes for _, other in names.get(axis, ())}
    return pair <= axes


# -- across chunks ---------------------------------------------------------------------------------


def _total(walker: Walker, within: _Chunk) -> tuple[ReadValue, ReadValue] | None:
    """y of a chunk and the chunks before it, and the states that begin the chunks."""
    now = within.y
    while True:
        op = walker.only_reader(now.value)
        if op is None:
            return None
        after = onto(walker, op.outputs[0], now)
        if after is None:
            return None
        if op.name in ("aten.add", "aten.add_"):
            break
        now = after
    rest = next((i for i in op.inputs if i != now.value), None)
    if rest is None:
        return None
    walker.passed.add(op.id)
    other = walker.aligned(rest, after.dims)
    same = within.queries.value
    pieces = walker.expanded(other, lambda f: f.value == same or within.row not in f.axes)
    row = full(within.row, within.length)
    decays = [
        p for p in pieces if any(within.sums_to(walker, s, row) for s in walker.under(p, "exp"))
    ]
    queries = [p for p in pieces if p.value == same]
    states = [p for p in pieces if p not in decays and p not in queries]
    if not len(decays) == len(queries) == len(states) == 1:
        return None
    begun = renamed(states[0], named(queries[0], within.queries.dims))
    return None if begun is None else (after, begun)


def _states(
    walker: Walker, within: _Chunk, begun: ReadValue
) -> tuple[Axis | int, ReadValue | None, ReadValue | None] | None:
    """The axis of chunks (1 if there is one), the state before the first, and after the last."""
    parts = walker.parts(begun)
    if len(parts) != 2:
        return None
    for weights, kept in (parts, parts[::-1]):
        over = [
            (d, dim.atoms[0])
            for d, dim in enumerate(kept.dims)
            if len(dim.atoms) == 1 and dim.atoms[0].axis not in begun.axes
        ]
        sums = _segments(walker, weights) if len(over) == 1 else None
        if sums is None:
            continue
        a, row, column = sums
        place, z = over[0]
        if column != Dim((z,)) or row.start or len(row.atoms) > 1:
            return None
        chunks = row.atoms[0] if row.atoms else Atom(1, 1, 1)
        if z.size != chunks.size + 1 or not _ends_of_chunks(walker, within, a, row, chunks):
            return None
        held = _left_behind(walker, within, kept, place, full(chunks.axis, chunks.size))
        if held is None:
            return None
        last = _last(walker, begun, chunks.size, row)
        return None if last is None else (chunks.axis, held[0], last[0])
    return None


def _ends_of_chunks(walker: Walker, within: _Chunk, a: ReadValue, row: Dim, chunks: Atom) -> bool:
    """Whether `a` is 0, and then the sum of a over each chunk."""
    op = walker.maker(a.value)
    if op is None or op.name != "aten.constant_pad_nd" or op.arguments.get("value", 0):
        return False
    pad = op.arguments["pad"]
    place = [
        d for d, dim in enumerate(a.dims) if dim == row and (row.atoms or d == len(a.dims) - 1)
    ]
    if len(place) != 1 or tuple(pad) != (0,) * (2 * (len(a.dims) - 1 - place[0])) + (1, 0):
        return False
    walker.passed.add(op.id)
    dims = _with_dim(a.dims, place[0], full(chunks.axis, chunks.size))
    ends = walker.source(ReadValue(op.inputs[0], dims))
    return within.sums_to(walker, ends, Dim((), within.length - 1))


def _left_behind(
    walker: Walker, within: _Chunk, kept: ReadValue, place: int, chunk: Dim
) -> tuple[ReadValue | None] | None:
    """The state before the first chunk, where `kept` is that and the states after all chunks."""
    op = walker.maker(kept.value)
    if (
        op is None
        or op.name != "aten.cat"
        or int(op.arguments.get("dim", 0)) % len(kept.dims) != place
    ):
        return None
    walker.passed.add(op.id)
    if len(op.inputs) != 2 or walker.values[op.inputs[0]].shape[place] != 1:
        return None
    first, states = op.inputs
    dims = _with_dim(kept.dims, place, chunk)
    same = (within.keys.value, within.x.value)
    pieces = walker.expanded(ReadValue(states, dims), lambda f: f.value in same)
    keys = [p for p in pieces if p.value == same[0]]
    x = [p for p in pieces if p.value == same[1]]
    decays = [p for p in pieces if p not in keys and p not in x]
    if not len(keys) == len(x) == len(decays) == 1:
        return None
    names = named(x[0], within.x.dims)
    read, decay = renamed(keys[0], names), renamed(decays[0], names)
    # The decay from a token to the end of its chunk.
    sums = [] if decay is None else walker.under(decay, "exp", "sub")
    spans = Dim((), within.length - 1), full(within.column, within.length)
    if (
        read != within.keys
        or len(sums) != 2
        or not all(map(partial(within.sums_to, walker), sums, spans))
    ):
        return None
    state = walker.source(ReadValue(first, _with_dim(dims, place, Dim(()))))
    return (None if blank(walker, state.value) else state,)


def _last(
    walker: Walker, begun: ReadValue, chunks: int, row: Dim
) -> tuple[ReadValue | None] | None:
    """The state after the last chunk, if only that is read besides those that begin the chunks."""
    states = walker.source(begun)
    place = states.dims.index(row) if row in states.dims else None
    if place is None:
        return None
    result: ReadValue | None = None
    front = [states.value]
    while front:
        for op in walker.users[front.pop()]:
            if op.id in walker.passed:
                front += op.outputs if op.kind == "view" else ()
                continue
            if op.kind != "view" or len(op.outputs) != 1:
                return None
            read = walker.at_index(op.outputs[0], states, place, chunks)
            if read is None or result is not None:
                return None
            result = read
    return (result,)


# -- the recurrence --------------------------------------------------------------------------------


def _dual_scan(
    walker: Walker,
    within: _Chunk,
    total: ReadValue,
    chunk: Axis,
    state: ReadValue | None,
    last: ReadValue | None,
) -> Scan | None:
    """The recurrence with the tokens of all chunks as one axis, and the others in their roles."""
    length, anchor = within.length, walker.graph.ops[walker.graph.producers[total.value]]
    factors = {"B": within.keys, "C": within.queries, "x": within.x, "dt": within.logarithm}
    factors |= {"y": total} | ({"last": last} if last else {}) | ({"state": state} if state else {})
    size: dict[Axis, int] = {}
    for factor in factors.values():
        for axis, n in axes_of(factor).items():
            size[axis] = max(size.get(axis, 1), n)
    digits = (
        (within.row, 1, length),
        (within.column, 1, length),
        (chunk, length, size.get(chunk, 1)),
    )
    names = {axis: [(Atom(axis, 1, n), Atom("t", step, n))] for axis, step, n in digits}
    made = all_renamed(factors, names)
    decay = None if made is None else decay_of(walker, made["dt"], [made["x"]])
    if made is None or decay is None:
        return None
    factors = made | decay
    y, after = factors.pop("y"), factors.pop("last", None)
    axes = {a: size[a] for a in (*axes_of(within.x), within.over) if a not in names}
    tokens = axes_of(clamped(walker, factors["x"])).get("t", 1)
    scan = in_roles(walker, factors, y, after, axes, within.over, tokens, anchor)
    if scan is None:
        return None
    dropped = frozenset() if after is None else frozenset({walker.graph.producers[after.value]})
    passed = frozenset(walker.passed)
    return finished(
        walker, replace(scan, chunk=length, dropped=dropped, first=min(passed), inside=passed)
    )
