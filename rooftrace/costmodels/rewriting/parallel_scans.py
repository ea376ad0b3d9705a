"""Recurrences that are computed for all tokens at once, pairs of neighbours combined in place.

Two tensors hold the decays and what enters at each token.  Ops in place combine them until every
token holds the sum over all tokens before it.  Which tokens an element stands for is followed
through these ops: an element that stands for tokens s to t may only be combined with one that ends
at s - 1, and it is a scan if in the end all begin with the first.  The order of the sweeps does not
matter (G. Blelloch, "Prefix sums and their applications", CMU-CS-90-190).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rooftrace.costmodels.rewriting.indexing import (
    Atom,
    Dim,
    Names,
    ReadValue,
    Walker,
    full,
    named,
    plain,
    renamed,
)
from rooftrace.costmodels.rewriting.recurrences import (
    axes_of,
    exponent,
    fuse,
    in_roles,
    operands,
    scans,
    summed,
)
from rooftrace.costmodels.rewriting.scans import Scan, clamped, finished
from rooftrace.tracer.graph import Op, OpGraph


def fuse_selective_scans(graph: OpGraph) -> tuple[OpGraph, int]:
    """Recurrences in which each number of a state decays by itself: `selective_scan` of Mamba."""
    return fuse(graph, _all)


def _all(walker: Walker) -> Iterator[Scan]:
    for finder in (scans, parallel_scans):
        yield from (scan for scan in finder(walker) if not scan.dual)


class _Span(NamedTuple):
    """Tokens that an element stands for: a product of decays from `first` to `last`; what entered
    there ("x"); what entered from `first` to `middle` - 1, times the decays behind ("ax")."""

    kind: str
    first: int
    last: int
    middle: int = -1


def parallel_scans(walker: Walker) -> Iterator[Scan]:
    """Scans by ops in place."""
    values = walker.graph.values
    kept = [
        values[op.outputs[0]].storage
        for op in walker.graph.kernels()
        if op.name == "aten.add_" and plain(op.reads)
    ]
    for entered in dict.fromkeys(kept):
        scan = _scan(walker, entered)
        if scan is not None:
            yield scan


def _scan(walker: Walker, entered: int) -> Scan | None:
    values = walker.graph.values
    added = [walker.places.made_by(op.inputs[-1]) for op in walker.places.writers[entered]]
    read = {values[i].storage for op in added if op is not None for i in op.inputs}
    decays = {d for d in read - {entered} if values[d].shape == values[entered].shape}
    if len(decays) != 1 or len(values[entered].shape) < 2:
        return None
    (decay,) = decays
    for dim, tokens in enumerate(values[entered].shape):
        if tokens > 1 and _adds_up(walker, entered, decay, dim):
            walker.settled({entered, decay})
            scan = _found(walker, entered, decay, dim)
            if scan is None:
                walker.unsettled({entered, decay})
            return scan
    return None


def _adds_up(walker: Walker, entered: int, decay: int, dim: int) -> bool:
    """Whether ops in place make of each token the sum over all tokens before it."""
    graph, values = walker.graph, walker.graph.values
    tokens = values[entered].shape[dim]
    spans = {
        entered: [_Span("x", t, t) for t in range(tokens)],
        decay: [_Span("a", t, t) for t in range(tokens)],
    }
    made: dict[int, list[_Span]] = {}
    writes = [op.id for storage in spans for op in walker.places.writers[storage]]
    begin = max(graph.producers.get(storage, -1) for storage in spans) + 1
    touched = {op.id for storage in spans for op in walker.places.readers[storage]}
    for op in graph.ops[begin : max(writes) + 1]:
        if op.kind != "kernel" or (op.id not in touched and made.keys().isdisjoint(op.inputs)):
            continue
        sides = []
        for value in op.inputs:
            storage = values[value].storage
            if storage in spans:
                times = _times(walker, value, dim)
                sides.append(None if times is None else [spans[storage][t] for t in times])
            else:
                sides.append(made.get(value))
        if len(sides) != 2 or sides[0] is None or sides[1] is None:
            return False
        if not plain(op.reads) or len(sides[0]) != len(sides[1]):
            return False
        joined = [_joined(op.name, a, b) for a, b in zip(*sides, strict=True)]
        if any(span is None for span in joined):
            return False
        results = [span for span in joined if span is not None]
        if op.name.endswith("_"):
            times = _times(walker, op.inputs[0], dim)
            for t, span in zip(times or (), results, strict=True):
                spans[values[op.inputs[0]].storage][t] = span
        else:
            made[op.outputs[0]] = results
    return spans[entered] == [_Span("x", 0, t) for t in range(tokens)]


def _joined(name: str, left: _Span, right: _Span) -> _Span | None:
    """What a product or a sum of two elements stands for; None for what a scan has no use for."""
    pair = {left.kind: left, right.kind: right}
    if name in ("aten.mul", "aten.mul_"):
        late, early = (left, right) if left.first > right.first else (right, left)
        if late.kind != "a" or early.last != late.first - 1 or early.kind == "ax":
            return None
        if early.kind == "a":
            return _Span("a", early.first, late.last)
        return _Span("ax", early.first, late.last, late.first)
    if name in ("aten.add", "aten.add_") and pair.keys() == {"x", "ax"}:
        x, ax = pair["x"], pair["ax"]
        if (x.first, x.last) == (ax.middle, ax.last):
            return _Span("x", ax.first, x.last)
    return None


def _times(walker: Walker, value: int, dim: int) -> list[int] | None:
    """The tokens of a view of a tensor [..., tokens, ...], in order; None where it leaves out
    anything else."""
    place = walker.places.place(value)
    if place is None:
        return None
    base = walker.graph.values[place.storage]
    step, length = base.stride[dim], base.shape[dim]
    others = [
        pair
        for d, pair in enumerate(zip(base.shape, base.stride, strict=True))
        if d != dim and pair[0] > 1
    ]
    along = []
    for pair in zip(place.shape, place.stride, strict=True):
        if pair in others:
            others.remove(pair)
        elif pair[0] != 1:
            along.append(pair)
    if others or place.offset % step or any(stride % step for _, stride in along):
        return None
    ranges = [[i * stride // step for i in range(n)] for n, stride in along]
    times = [place.offset // step + sum(parts) for parts in itertools.product(*ranges)]
    return times if all(0 <= t < length for t in times) else None


def _found(walker: Walker, entered: int, decay: int, dim: int) -> Scan | None:
    """The recurrence whose states all lie in one tensor."""
    values, graph = walker.graph.values, walker.graph
    shape = values[entered].shape
    dims = tuple(full(d, n) for d, n in enumerate(shape))
    last_write = max(op.id for op in walker.places.writers[entered])
    reads = [op for op in _behind(walker, entered) if op.id > last_write]
    sums = [(op, made) for op in reads if (made := summed(walker, entered, op)) is not None]
    if len(sums) != 1:
        return None
    (total, (y, queries, n)) = sums[0]
    last = [_final(walker, entered, op, dims, dim) for op in reads if op is not total]
    last = [value for value in dict.fromkeys(last)]
    exp = exponent(walker, ReadValue(decay, dims))
    if exp is None or None in last or len(last) > 1:
        return None
    factors = operands(walker, exp, ReadValue(entered, dims), queries, n)
    if factors is None:
        return None
    names: Names = {dim: [(Atom(dim, 1, shape[dim]), Atom("t", 1, shape[dim]))]}
    by_token = {name: renamed(f, names) for name, f in factors.items()}
    called_y = renamed(y, names)
    if called_y is None or any(f is None for f in by_token.values()):
        return None
    known = {name: f for name, f in by_token.items() if f is not None}
    tokens = next(
        a.size for d in clamped(walker, known["x"]).dims for a in d.atoms if a.axis == "t"
    )
    after = ReadValue(entered, tuple(d for i, d in enumerate(dims) if i != dim))
    scan = in_roles(walker, known, called_y, after, axes_of(after), n, tokens, graph.ops[total.id])
    if scan is None or any(value is not None and tokens != shape[dim] for value in last):
        return None
    return finished(walker, _with_last(walker, scan, last, after))


def _with_last(walker: Walker, scan: Scan, last: list[ReadValue | None], after: ReadValue) -> Scan:
    if not last or last[0] is None or scan.last is None:
        return replace(scan, last=None)
    names = named(after, scan.last.dims)
    value = None if names is None else renamed(last[0], names)
    gone = frozenset({walker.graph.producers[last[0].value]})
    return replace(scan, last=value, dropped=scan.dropped | gone)


def _behind(walker: Walker, storage: int) -> Iterator[Op]:
    """The ops that read a tensor or a view of it, but for views of all tokens."""
    for op in walker.places.readers[storage]:
        if op.kind == "kernel" or op.name == "aten.select":
            yield op


def _final(
    walker: Walker, entered: int, op: Op, dims: tuple[Dim, ...], dim: int
) -> ReadValue | None:
    """The state behind the last token, where an op takes that of all states."""
    if op.name != "aten.select":
        return None
    fresh = walker.fresh(op.outputs[0])
    pieces = walker.holding(fresh, entered) or []
    if len(pieces) != 1 or pieces[0].dims[dim] != Dim(
        (), walker.graph.values[entered].shape[dim] - 1
    ):
        return None
    whole = (*dims[:dim], pieces[0].dims[dim], *dims[dim + 1 :])
    names = named(pieces[0], whole)
    return None if names is None else renamed(fresh, names)
