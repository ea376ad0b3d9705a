"""State-space recurrences, written token by token, as the kernels of libraries.

The anchor is `h' = exp(a) h + u B`: a state that decays by an exponential and takes an outer
product.  The sum that reads `h'` with C gives y.  dt, A, B, C and x are told apart by the axes that
they depend on; the order of products, casts and views does not matter (see `indexing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rooftrace.costmodels.rewrites.dataflow import COPIES, reads_across
from rooftrace.costmodels.rewrites.editing import with_matches
from rooftrace.costmodels.rewrites.indexing import (
    Atom,
    Axis,
    Dim,
    ReadValue,
    SumAxis,
    TurnAxis,
    Walker,
    called,
    renamed,
)
from rooftrace.costmodels.rewrites.scans import Scan, blank, emit_scan, finished
from rooftrace.graph import Op, OpGraph, Ref

_LONGEST = 24
"""The most ops between a state, or the decays within a chunk, and their sum."""
_SUMS = frozenset({"aten.bmm", "aten.mm", "aten.mv", "aten.sum"})


def fuse(graph: OpGraph, find: Callable[[Walker], Iterable[Scan]]) -> tuple[OpGraph, int]:
    """The graph with one op for each recurrence that `find` yields, and how many these are."""
    if not any(op.name == "aten.exp" for op in graph.ops):
        return graph, 0
    walker = Walker(graph)
    matches = {scan.anchor.id: scan for scan in find(walker)}
    dropped = {number for scan in matches.values() for number in scan.dropped}
    return with_matches(graph, matches, emit_scan, dropped)


@dataclass(frozen=True, slots=True)
class _TokenStep:
    """One token of a recurrence, or equal ones that a repeat stands for.

    state: the state before it.  before: the same value without views and casts.  factors: dt, A, B,
    C, x, state and the result y, by name.  All axes are dimensions of the state, n that of the sum.
    inside: ids of the ops that make h' and y.
    """

    add: Op
    state: Ref
    before: int
    factors: dict[str, ReadValue]
    n: int
    inside: frozenset[int]

    @property
    def h(self) -> int:
        return self.add.outputs[0]


def scans(walker: Walker) -> Iterator[Scan]:
    """Recurrences over all tokens of a sequence, and of one token."""
    steps: dict[int, _TokenStep] = {}
    for op in walker.graph.ops:
        if op.name in ("aten.add", "aten.add_") and len(op.inputs) == 2 and not reads_across(op):
            step = _step(walker, op)
            if step is not None:
                steps[step.h] = step
    followers = {step.before: step for step in steps.values() if step.before != step.h}
    for step in steps.values():
        if step.before in steps:
            continue
        chain = [step]
        while chain[-1].h in followers:
            chain.append(followers[chain[-1].h])
        scan = _scan(walker, chain)
        if scan is not None:
            yield scan


# -- one step --------------------------------------------------------------------------------------


def _step(walker: Walker, add: Op) -> _TokenStep | None:
    dims = walker.direct(add.outputs[0]).dims
    for term, rest in (add.reads, add.reads[::-1]):
        product = walker.producer(term.id)
        if product is None or product.name not in ("aten.mul", "aten.mul_"):
            continue
        if len(product.reads) != 2 or product.repeats != add.repeats:
            continue
        for decay, state in (product.reads, product.reads[::-1]):
            read = walker.aligned(decay.id, dims)
            for exponent in walker.under(read, "exp") if not (decay.then or decay.every) else ():
                entered = walker.aligned(rest.id, dims)
                step = _with_sum(walker, add, product, state, exponent, entered)
                if step is not None:
                    return step
    return None


def _with_sum(
    walker: Walker, add: Op, product: Op, state: Ref, decay: ReadValue, entered: ReadValue
) -> _TokenStep | None:
    h = add.outputs[0]
    result = _sum(walker, h)
    if result is None:
        return None
    y, queries, n, inside = result
    if walker.users[product.outputs[0]] != [add]:
        return None
    factors = operands(walker, decay, entered, queries, n)
    if factors is None:
        return None
    read = walker.aligned(state.id, walker.direct(h).dims)
    start = read if state.then or state.every else walker.source(read)
    factors |= {"y": y, "state": start}
    return _TokenStep(add, state, start.value, factors, n, inside | {product.id})


def _sum(walker: Walker, h: int) -> tuple[ReadValue, ReadValue, int, frozenset[int]] | None:
    """y, the factor of the state in it, the dimension of the sum, and the ops on the way."""
    for op in sums_behind(walker, h):
        walker.passed = set()
        made = summed(walker, h, op)
        if made is not None:
            return (*made, frozenset(walker.passed))
    return None


def sums_behind(walker: Walker, value: int) -> Iterator[Op]:
    """The sums over products of a value, in its iteration; the nearest first."""
    graph = walker.graph
    repeats = graph.ops[graph.producers[value]].repeats
    front, seen = [value], set[int]()
    while front and len(seen) < _LONGEST:
        for op in walker.users[front.pop(0)]:
            if op.id in seen or op.repeats != repeats:
                continue
            seen.add(op.id)
            if op.name in _SUMS:
                yield op
            if op.kind == "view" or op.name in (*COPIES, "aten.mul", *_SUMS):
                front += op.outputs


def summed(walker: Walker, h: int, op: Op) -> tuple[ReadValue, ReadValue, int] | None:
    """y, the factor of the state h in it, and the dimension of the sum; None for another op."""
    y = walker.fresh(op.outputs[0])
    names, others = walker.seen(y, walker.direct(h))
    over = {axis for axis in names or () if isinstance(axis, SumAxis)}
    if names is None or len(others) != 1 or len(over) != 1:
        return None
    by, named_y = renamed(others[0], names), renamed(y, names)
    n = [other.axis for _, other in names[over.pop()]]
    if by is None or named_y is None or len(n) != 1:
        return None
    return named_y, by, int(str(n[0]))


def operands(
    walker: Walker, decay: ReadValue, entered: ReadValue, queries: ReadValue, n: Axis
) -> dict[str, ReadValue] | None:
    """dt, A, B, C and x by name.

    decay: its logarithm.  entered: added to the state.  queries: read the state.
    """
    pieces = walker.expanded(entered, lambda f: n not in f.axes or f.axes <= queries.axes)
    keys = [piece for piece in pieces if n in piece.axes]
    factors = decay_of(walker, decay, [piece for piece in pieces if n not in piece.axes])
    if factors is None or len(keys) != 1:
        return None
    return {**factors, "B": keys[0], "C": queries}


def decay_of(
    walker: Walker, exponent: ReadValue, others: list[ReadValue]
) -> dict[str, ReadValue] | None:
    """dt, A and x: dt is a factor of both the decay and the input.

    Without such a factor, the exponent is the logarithm of the decay, and x the input itself.
    """
    parts = walker.parts(exponent)
    if len(parts) == 2:
        for dt, a in (parts, parts[::-1]):
            for position, other in enumerate(others):
                pieces = walker.holding(other, dt.value) or []
                if dt in pieces:
                    pieces.remove(dt)
                    pieces += others[:position] + others[position + 1 :]
                    return {"dt": dt, "A": a, "x": pieces[0]} if len(pieces) == 1 else None
    if len(others) != 1:
        return None
    return {"dt": walker.source(exponent), "x": others[0]}


# -- all of them -----------------------------------------------------------------------------------


def _scan(walker: Walker, chain: Sequence[_TokenStep]) -> Scan | None:
    """A chain of steps as one recurrence."""
    graph, first, last = walker.graph, chain[0], chain[-1]
    counts = [_tokens(walker, step) for step in chain]
    tokens = sum(counts)
    base = first.add.repeats if counts[0] == 1 else first.add.repeats[:-1]
    if not all(counts) or not all(_kept_inside(walker, *pair) for pair in pairwise(chain)):
        return None
    factors: dict[str, ReadValue] = {}
    for name in ("dt", "A", "B", "C", "x"):
        each = [step.factors.get(name) for step in chain]
        merged_dims = _merged([f for f in each if f is not None], counts, tokens)
        if merged_dims is None and any(each):
            return None
        if merged_dims is not None:
            factors[name] = merged_dims
    y = _gathered(walker, chain, counts) if tokens > 1 else first.factors["y"]
    if y is None:
        return None
    if not blank(walker, first.before):
        factors["state"] = first.factors["state"]
        if tokens == 1 and first.before in walker.graph.producers:
            return None
    anchor = graph.ops[graph.producers[y.value]]
    if anchor.repeats != base:
        return None
    after = walker.direct(last.h)
    scan = in_roles(walker, factors, y, after, axes_of(after), first.n, tokens, anchor)
    if scan is None:
        return None
    inside = frozenset(number for step in chain for number in step.inside)
    scan = replace(scan, first=first.add.id, inside=inside)
    return finished(walker, _ending(walker, scan, last))


def _tokens(walker: Walker, step: _TokenStep) -> int:
    """How many tokens a step stands for; 0 where it reads another state than the last."""
    if step.state.then is None:
        return 0 if step.state.every else 1
    then, repeat = step.state.then, step.add.repeats[-1:]
    if (then.repeat,) != repeat or then.value != step.h or then.shift != -1:
        return 0
    return walker.graph.repeats[then.repeat].count


def _kept_inside(walker: Walker, step: _TokenStep, following: _TokenStep) -> bool:
    """Whether only y and the next step read a state."""
    readers = {op.id for op in ends(walker, step.h, step.inside)}
    return readers <= {following.add.id, *following.inside, *step.inside}


def ends(walker: Walker, value: int, inside: frozenset[int] = frozenset()) -> Iterator[Op]:
    """The ops that read a value, or a view or cast of it, and change it."""
    for op in walker.users[value]:
        if (op.kind == "view" or op.name in COPIES) and op.id not in inside:
            for made in op.outputs:
                yield from ends(walker, made, inside)
        else:
            yield op


def _merged(each: Sequence[ReadValue], counts: Sequence[int], tokens: int) -> ReadValue | None:
    """The reads of one value by all steps, as one factor with an axis of tokens."""
    if len(each) != len(counts) or len({(f.value, len(f.dims)) for f in each}) != 1:
        return None
    dims = []
    for column in zip(*(f.dims for f in each), strict=True):
        start = column[0].start
        turning = any(isinstance(a.axis, TurnAxis) for d in column for a in d.atoms)
        if len(set(column)) == 1 and not turning:
            dims.append(column[0])
            continue
        place = start
        for dim, count in zip(column, counts, strict=True):
            sizes = [a.size for a in dim.atoms if isinstance(a.axis, TurnAxis)]
            if dim.start != place or sizes != ([count] if count > 1 else []) or len(dim.atoms) > 1:
                return None
            place += count
        dims.append(Dim((Atom("t", 1, tokens),), start))
    return ReadValue(each[0].value, tuple(dims))


def _gathered(
    walker: Walker, chain: Sequence[_TokenStep], counts: Sequence[int]
) -> ReadValue | None:
    """The stack or cat of y over all steps, in their order."""
    collector: Op | None = None
    items = []
    for step in chain:
        value = step.factors["y"].value
        while True:
            op = walker.only_reader(value)
            if op is None:
                return None
            if op.name in ("aten.stack", "aten.cat"):
                break
            if op.kind != "view" and op.name not in COPIES:
                return None
            value = op.outputs[0]
        if collector not in (None, op):
            return None
        collector = op
        items.append(Ref(value, every=step.state.then is not None))
    if collector is None or collector.arguments.get("tensors") != tuple(items):
        return None
    made = walker.fresh(collector.outputs[0])
    dim = int(collector.arguments.get("dim", 0)) % len(made.dims)
    inner = [*made.dims]
    token = inner.pop(dim)
    if collector.name == "aten.cat":
        inner.insert(dim, Dim(()))
    stacked = None
    for step, item in zip(chain, items, strict=True):
        y = step.factors["y"]
        names, others = walker.seen(ReadValue(item.id, tuple(inner)), y)
        if names is None or others or sum(counts) != walker.values[made.value].shape[dim]:
            return None
        names |= {a.axis: [(a, Atom("t", 1, a.size))] for a in token.atoms}
        now = renamed(made, names)
        if stacked not in (None, now):
            return None
        stacked = now
    return stacked


def in_roles(
    walker: Walker,
    factors: Mapping[str, ReadValue],
    y: ReadValue,
    after: ReadValue | None,
    axes: Mapping[Axis, int],
    n: Axis,
    tokens: int,
    anchor: Op,
) -> Scan | None:
    """A recurrence with its axes renamed to b, t, h, p and n.

    axes: sizes of the axes of a state.  n: the axis of the sum.  after: the last state.
    """
    decay, x, shared = factors.get("A"), factors["x"], factors["C"].axes | factors["B"].axes
    steps = _unwrapped(walker, factors["dt"]) if decay is None else decay.axes
    dual = n not in steps
    by_head = steps & set(axes) if dual else frozenset()
    of_x = [a for a in axes if a in x.axes - shared - by_head and a != n]
    rest = [a for a in axes if a not in of_x and a != n]
    if decay is None and dual and rest:
        by_head = frozenset(rest[1:])
    heads = [a for a in rest if a in by_head]
    batch = [a for a in rest if a not in by_head]
    if max(len(of_x), len(heads), len(batch)) > 1 or (decay is None and not dual):
        return None
    roles = {n: "n"} | {a: role for group, role in ((of_x, "p"), (heads, "h"), (batch, "b"))
                        for a in group}  # fmt: skip
    names = called({a: (role, axes[a]) for a, role in roles.items()})
    sizes = {"b": 1, "h": 1, "p": 1, "n": 1, "t": tokens}
    sizes |= {role: axes[a] for a, role in roles.items()}
    made = {name: renamed(f, names) for name, f in factors.items()}
    named_y, last = renamed(y, names), None if after is None else renamed(after, names)
    if named_y is None or (after is not None and last is None):
        return None
    fitting = {name: f for name, f in made.items() if f is not None}
    return Scan(dual=dual, sizes=sizes, factors=fitting, y=named_y, last=last, anchor=anchor)


def axes_of(factor: ReadValue) -> dict[Axis, int]:
    """The axes of a factor, and their lengths."""
    return {atom.axis: atom.step * atom.size for dim in factor.dims for atom in dim.atoms}


def _unwrapped(walker: Walker, dt: ReadValue) -> frozenset[object]:
    """The axes that dt depends on, before it is broadcast and a bias is added."""
    op = walker.maker(dt.value)
    if op is None or op.name not in ("aten.clamp", "aten.softplus", "aten.add"):
        return dt.axes
    sides = [walker.source(walker.aligned(i, dt.dims)) for i in op.inputs]
    return frozenset[object]().union(*(_unwrapped(walker, side) for side in sides))


def _ending(walker: Walker, scan: Scan, step: _TokenStep) -> Scan:
    """A recurrence with the op that reads or writes its last state."""
    reading = [op for op in ends(walker, step.h, step.inside) if op.id not in step.inside]
    values = walker.values
    state = values[step.before].storage
    writes = [
        op
        for op in reading
        if op.name == "aten.copy_"
        and "state" in scan.factors
        and values[op.inputs[0]].storage == state
        and values[op.outputs[0]].shape == values[step.before].shape
    ]
    if scan.sizes["t"] == 1 and len(writes) == 1 and reading == writes:
        return replace(scan, last=None, written=writes[0], dropped=frozenset({writes[0].id}))
    if not reading and step.h not in walker.graph.outputs:
        return replace(scan, last=None)
    return replace(scan, dropped=frozenset({step.add.id}))
