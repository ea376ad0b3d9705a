"""Recurrences that are computed for all tokens at once, pairs of neighbours combined in place.

Two tensors hold the decays and what enters at each token.  Ops in place combine them until every
token holds the sum over all tokens before it: these ops are run on small random numbers (see
`smallruns`), beside a loop over the tokens.  The order of the sweeps does not matter (G. Blelloch,
"Prefix sums and their applications", CMU-CS-90-190).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from rooftrace.costmodels.rewriting.indexing import (
    Atom,
    Names,
    ReadValue,
    Walker,
    full,
    named,
    renamed,
)
from rooftrace.costmodels.rewriting.places import beside
from rooftrace.costmodels.rewriting.recurrences import (
    axes_of,
    fuse,
    in_roles,
    operands,
    scans,
    summed,
)
from rooftrace.costmodels.rewriting.scans import Scan, clamped, finished
from rooftrace.costmodels.rewriting.smallruns import NotRun, SmallRun, SmallTensor, short
from rooftrace.tracer.graph import Op, OpGraph, Tensor


def fuse_selective_scans(graph: OpGraph) -> tuple[OpGraph, int]:
    """Recurrences in which each number of a state decays by itself: `selective_scan` of Mamba."""
    return fuse(graph, _all)


def _all(walker: Walker) -> Iterator[Scan]:
    for finder in (scans, parallel_scans):
        yield from (scan for scan in finder(walker) if not scan.dual)


def parallel_scans(walker: Walker) -> Iterator[Scan]:
    """Scans by ops in place."""
    values = walker.graph.values
    kept = [
        values[op.outputs[0]].storage
        for op in walker.graph.kernels()
        if op.name == "aten.add_" and not beside(op)
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
    import numpy as np

    graph = walker.graph
    made = [graph.producers.get(storage, -1) for storage in (entered, decay)]
    last = max(op.id for s in (entered, decay) for op in walker.places.writers[s])
    ops, reached = list[Op](), {entered, decay}
    for op in graph.ops[min(made) + 1 : last + 1]:
        if not reached.isdisjoint(op.inputs) and (op.kind == "view" or op.id > max(made)):
            if op.kind == "kernel" and op.name.removesuffix("_") not in ("aten.mul", "aten.add"):
                return False
            ops.append(op)
            reached |= set(op.outputs)
    if any(beside(op) for op in ops):
        return False
    tokens = graph.values[entered].shape[dim]
    known = {value: _numbers(graph.values[value], dim, value) for value in (decay, entered)}
    known[decay].array = np.exp(known[decay].array / tokens**0.5)  # far tokens count like near ones
    decays, states = (np.moveaxis(piece.array.copy(), dim, 0) for piece in known.values())
    try:
        run = SmallRun(graph, known, len(ops[0].repeats), {}).run(ops)
    except NotRun:
        return False
    for before, token in itertools.pairwise(range(tokens)):
        states[token] += decays[token] * states[before]
    combined = np.moveaxis(run[entered].array, dim, 0)
    return np.allclose(combined, states, rtol=0, atol=1e-9 * abs(states).max())


def _numbers(tensor: Tensor, dim: int, seed: int) -> SmallTensor:
    """Random numbers that lie as a tensor does, as long along one dimension only."""
    import numpy as np

    dims = [((n, n if d == dim else min(n, 2)),) if n != 1 else () for d, n in
            enumerate(tensor.shape)]  # fmt: skip
    order = sorted(range(len(dims)), key=lambda d: -tensor.stride[d])
    numbers = np.random.default_rng(seed).uniform(-1, 1, short(dims[d] for d in order))
    return SmallTensor(numbers.transpose(np.argsort(order)), dims)


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
