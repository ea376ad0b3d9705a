"""Linear attention and delta rules as one op each, where a graph writes out what they do.

What is written out is found as a chain of states (`statechains`), and its streams get their roles
by what depends on them: the decay by what scales the state, key and value by what is added to it,
the query by what reads it.  Then the ops run on small random numbers beside the formula of the op
that would take their place (`tracer.whole.delta_rules`): where both agree to nine digits, they are
the same function.  So chunks, loops over tokens, solved or inverted triangles, masks and the order
of elementwise ops need no templates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace as changed
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor
from rooftrace.costmodels.rewriting.smallruns import Dim, NotRun, Piece, SmallRun, short
from rooftrace.costmodels.rewriting.statechains import (
    COPIES,
    CREATED,
    LAYOUT,
    PARTS,
    Chain,
    Region,
    Wiring,
    behind,
    chains,
    is_closed,
)
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

DELTA_RULE = "rooftrace.delta_rule.default"
DELTA_RULE_INTO = "rooftrace.delta_rule_.default"
_MOVED = LAYOUT | PARTS | CREATED | {"aten.copy_", "aten.stack", "aten.cat"}
_DIGITS = 1e-9
_ORDERS = ("BTHD", "BHTD", "TBHD", "BHDT")
"""The dimensions of a stream as they may lie: batch, token, head, channel."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A value, and which of its dimensions are batch, tokens, heads and channels ("BTHD").

    heads: how many it has.
    """

    value: int
    order: str
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A region that computes a delta rule or linear attention, and its operands.

    streams: by role: query, key, value, decay, beta.  out: with its order.  turned: the state has
    channels of the value first.  outer: how many repeats all ops are in.  into: the write of the
    last state into a cache, if that is all that reads it, behind the casts `between`; room: what
    makes that cache, if the step does.
    """

    chain: Chain
    ops: tuple[Op, ...]
    streams: Mapping[str, Stream]
    out: Stream
    sizes: tuple[int, int, int, int, int]  # B, T, H, K, V
    scale: float = 1.0
    norms: tuple[float | None, float | None] = (None, None)
    is_log: bool = True
    turned: bool = False
    outer: int = 0
    into: Op | None = None
    room: Op | None = None
    between: tuple[Op, ...] = ()

    @property
    def dropped(self) -> list[Op]:
        """The ops that the new one takes the place of."""
        return [*self.ops, *self.between, *(op for op in (self.into, self.room) if op is not None)]


def gated_delta_rule(graph: OpGraph) -> tuple[OpGraph, int]:
    """Delta rules, with a decay or without, become one op each."""
    return _replaced(graph, delta=True)


def linear_attention(graph: OpGraph) -> tuple[OpGraph, int]:
    """Linear attention without a delta rule, its state decaying, becomes one op each."""
    return _replaced(graph, delta=False)


def _replaced(graph: OpGraph, delta: bool) -> tuple[OpGraph, int]:
    if not any(op.name in ("aten.bmm", "aten.mul") for op in graph.ops):
        return graph, 0
    wiring = Wiring(graph)
    rules = []
    taken: set[int] = set()
    for chain in chains(wiring):
        rule = rule_of(wiring, chain, delta)
        if rule is not None and taken.isdisjoint(op.id for op in rule.ops):
            taken |= {op.id for op in rule.ops}
            rules.append(rule)
    if not rules:
        return graph, 0
    editor = Editor(graph)
    places = {_place(wiring, rule).id: rule for rule in rules}
    gone = {op.id for rule in rules for op in rule.dropped}
    made = {out for op in graph.ops if op.id in gone for out in op.outputs}
    gone |= {i for i in wiring.unused if not made.isdisjoint(graph.ops[i].inputs)}
    for op in graph.ops:
        if op.id in places:
            _emit(editor, places[op.id], op)
        if op.id not in gone:
            editor.ops.append(op)
    times = sum(math.prod(graph.repeats[r].count for r in _outside(rule)) for rule in rules)
    return editor.done(), times


# -- roles -----------------------------------------------------------------------------------------


def rule_of(wiring: Wiring, chain: Chain, delta: bool) -> Rule | None:
    """The rule that the region around a chain computes; None where it is no such rule."""
    graph = wiring.graph
    shape = graph.values[chain.last].shape
    if len(shape) != 4:
        return None
    region = Region(wiring, chain)
    for outs in _results(region):
        for out in reversed(outs):
            for turned in (False, True):
                for roles in _roles(region, out, turned):
                    if ("beta" in roles) == delta:
                        rule = _judged(region, out, roles, turned)
                        if rule is not None:
                            return _with_cache(wiring, rule)
    return None


def _results(region: Region) -> Iterator[list[int]]:
    """The values that may be the result: each with those that are copies of it in another form."""
    outs: list[int] = []
    known = set(region.ops)
    for out in region.grown():
        new = [region.ops[i] for i in region.ops.keys() - known]
        known = set(region.ops)
        if outs and not all(op.name in _MOVED and not _widens(region.graph, op) for op in new):
            yield outs
            outs = []
        outs.append(out)
    if outs:
        yield outs


def _widens(graph: OpGraph, op: Op) -> bool:
    """Whether an op copies a tensor into a wider precision, as who reads a result may do."""
    if op.name != "aten._to_copy":
        return False
    before, after = (graph.values[i].dtype for i in (op.inputs[0], op.outputs[0]))
    return precision(after).width > precision(before).width


def _roles(region: Region, out: int, turned: bool) -> Iterator[dict[str, int]]:
    """The leaf of each role, by what depends on it."""
    streams, chain = region.streams, region.chain
    aside = region.fixed | {chain.first}

    def behind_all(values: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(streams.get(v, frozenset()) for v in values)) - {chain.first}

    decay = behind_all(chain.decays)
    decay = decay - aside or decay or (chain.decays if len(chain.decays) == 1 else decay)
    sides = [behind_all(side) - decay - aside for side in (chain.columns, chain.rows)]
    keys, others = sides[::-1] if turned else sides
    query = streams.get(out, frozenset()) - streams.get(chain.last, frozenset()) - aside
    if len(query) != 1 or len(decay) > 1:
        return
    rest = keys | others
    if not 2 <= len(rest) <= 3:
        return
    by_size = sorted(rest, key=region.wiring.size)
    small = by_size[: len(rest) - 2]
    for key, value in itertools.permutations(by_size[len(small) :]):
        if key in keys:
            roles = {"query": min(query), "key": key, "value": value}
            roles |= {"decay": min(decay)} if decay else {}
            yield roles | ({"beta": small[0]} if small else {})


def _sizes(region: Region, roles: Mapping[str, int], turned: bool) -> tuple[int, ...] | None:
    batch, heads, width, columns = region.graph.values[region.chain.last].shape
    if turned:
        width, columns = columns, width
    elements = region.graph.values[roles["value"]].elements
    tokens, rest = divmod(elements, batch * heads * columns)
    return None if rest or not tokens else (batch, tokens, heads, width, columns)


def _orders(shape: tuple[int, ...], sizes: Mapping[str, int]) -> list[str]:
    """How a tensor of this shape may have these dimensions; those of length 1 may be missing."""
    orders: dict[str, None] = {}
    bare = [n for n in shape if n != 1]
    for order in _ORDERS:
        names = [d for d in order if d in sizes]
        if [sizes[d] for d in names if sizes[d] != 1] == bare:
            orders["".join(names)] = None
    return list(orders)


def _candidates(region: Region, role: str, leaf: int, sizes: Sequence[int]) -> list[Stream]:
    """Where a kernel may take a stream from: from its leaf on, to where it meets another one."""
    batch, tokens, heads, width, columns = sizes
    graph = region.graph
    counts = [h for h in range(heads, 0, -1) if heads % h == 0]
    if role not in ("query", "key"):
        counts = counts[:1]
    moving = leaf not in region.fixed and leaf in region.leaves
    last = {"query": (width,), "key": (width,), "value": (columns,), "beta": (None,)}
    result = []
    for value in _line(region, leaf):
        for channels, count in itertools.product(last.get(role, (None, width)), counts):
            named = {"B": batch, "T": tokens, "H": count} if moving else {"H": count}
            named |= {} if channels is None else {"D": channels}
            orders = _orders(graph.values[value].shape, named)
            result += [Stream(value, order, count) for order in orders]
    return result


def _nearest(items: Sequence[Stream], order: str) -> Stream:
    """The last candidate, its dimensions in this order if they may lie so."""
    last = [item for item in items if item.value == items[-1].value]
    alike = [item for item in last if [d for d in order if d in item.order] == list(item.order)]
    return (alike or last)[0]


def _line(region: Region, leaf: int) -> list[int]:
    """The values through which all goes that comes from a leaf, before it meets another stream."""
    readers, own = region.wiring.readers, frozenset({leaf})
    others = region.fixed - own
    streams = {value: leaves - others for value, leaves in region.streams.items()}
    alone = {leaf}
    paths: dict[int, list[int]] = {}
    for op in sorted(region.ops.values(), key=lambda op: op.id):
        if len(op.outputs) != 1 or streams.get(op.outputs[0]) != own:
            continue
        if any(streams.get(i) == own and i not in alone for i in op.inputs):
            continue
        alone.add(op.outputs[0])

    def next_of(value: int) -> list[int] | None:
        """What is made of a value alone; None where it meets another stream."""
        if value in paths:
            return paths[value]
        made = []
        for reader in readers[value]:
            if reader.id in region.ops:
                if reader.outputs[0] not in alone:
                    return None
                made.append(reader.outputs[0])
        paths[value] = made
        return made

    def passes(start: int, through: int) -> bool:
        """Whether all that comes from `start` goes through another value."""
        stack, seen = [start], set()
        while stack:
            value = stack.pop()
            if value == through or value in seen:
                continue
            seen.add(value)
            following = next_of(value)
            if not following:
                return False
            stack += following
        return True

    outside = _common(list(region.ops.values()))
    line = [leaf]
    for value in sorted(alone - {leaf}):
        if passes(line[-1], value):
            line.append(value)
    return [v for v in line if v in region.fixed or region.graph.values[v].repeats == outside]


# -- what a region computes ------------------------------------------------------------------------


def _judged(region: Region, out: int, roles: Mapping[str, int], turned: bool) -> Rule | None:
    """The rule with these roles, its streams taken from as far up as the op allows."""
    sizes = _sizes(region, roles, turned)
    if sizes is None:
        return None
    batch, tokens, heads, _, columns = sizes
    named = {"B": batch, "T": tokens, "H": heads, "D": columns}
    ends = [Stream(out, order, heads) for order in _orders(region.graph.values[out].shape, named)]
    choices = {role: _candidates(region, role, leaf, sizes) for role, leaf in roles.items()}
    if not ends or not all(choices.values()):
        return None
    for end, order in itertools.product(ends, _ORDERS):
        streams = {role: _nearest(items, order) for role, items in choices.items()}
        rule = Rule(chain=region.chain, ops=(), streams=streams, out=end, sizes=sizes, turned=turned)  # type: ignore[arg-type]
        rule = _checked(region, rule)
        if rule is not None:
            break
    else:
        return None
    return _from_the_top(region, rule, choices)


def _from_the_top(region: Region, rule: Rule, choices: Mapping[str, Sequence[Stream]]) -> Rule:
    """The rule with each stream from as far up as the op allows: all at once, else one by one."""
    highest = dict(rule.streams)
    for role, items in choices.items():
        fit = (s for s in items if _ops_of(region, changed(rule, streams={**highest, role: s})))
        highest[role] = next(fit, highest[role])
    top = _checked(region, changed(rule, streams=highest), tuple(choices))
    if top is not None:
        return top
    for role, items in choices.items():
        for stream in items[:-1]:
            further = changed(rule, streams={**rule.streams, role: stream})
            checked = _checked(region, further, (role,))
            if checked is not None:
                rule = checked
                break
    return rule


def _ops_of(region: Region, rule: Rule) -> list[Op] | None:
    """The ops between the streams and the results; None where others read inside."""
    ends = (rule.out.value, rule.chain.last)
    starts = {stream.value for stream in rule.streams.values()}
    if rule.chain.first is not None:
        starts.add(rule.chain.first)
    ops = behind(region, ends, starts)
    return ops if ops and is_closed(region, ops, ends) else None


def _checked(region: Region, rule: Rule, roles: Sequence[str] = ()) -> Rule | None:
    """The rule with its ops and settings, if they compute it and nothing else reads inside.

    roles: of the streams that are new; the settings of the others are known.
    """
    ops = _ops_of(region, rule)
    if ops is None:
        return None
    rule = changed(rule, ops=tuple(ops), outer=len(_common(ops)))
    query, key = rule.norms
    added = (*dict.fromkeys(_small_numbers(ops)), None)
    norms = itertools.product(
        added if "query" in roles else (query,), added if "key" in roles else (key,)
    )
    logs = (rule.is_log, not rule.is_log)
    logs = logs if "decay" in rule.streams and (not roles or "decay" in roles) else logs[:1]
    for one, is_log in itertools.product(norms, logs):
        tried = changed(rule, norms=one, is_log=is_log)
        scale = _scale(_Trial(region.graph, tried))
        if scale is not None:
            return changed(tried, scale=scale)
    return None


def _common(ops: Sequence[Op]) -> tuple[int, ...]:
    first = ops[0].repeats
    for op in ops:
        while first != op.repeats[: len(first)]:
            first = first[:-1]
    return first


def _small_numbers(ops: Sequence[Op]) -> Iterator[float]:
    """What is added to a sum of squares, or to it by a least length, so that nothing divides by 0."""
    for op in ops:
        if op.name == "aten.add" and isinstance(number := op.arguments.get("other"), float):
            yield number
        elif op.name == "aten.clamp_min" and isinstance(number := op.arguments.get("min"), float):
            yield number * number


class _Trial:
    """A region and the formula that it may compute; equal to those that are wired alike."""

    def __init__(self, graph: OpGraph, rule: Rule) -> None:
        self.graph, self.rule = graph, rule
        self._numbers: dict[int, int] = {}
        streams = sorted(rule.streams.items())
        starts = [self._number(stream.value) for _, stream in streams]
        first = rule.chain.first
        self.key = (
            tuple((role, s.order, s.heads, graph.values[s.value].shape) for role, s in streams),
            starts, None if first is None else self._number(first), rule.sizes, rule.norms,
            rule.is_log, rule.turned, rule.out.order, [self._wired(op) for op in rule.ops],
            self._number(rule.out.value), self._number(rule.chain.last),
        )  # fmt: skip
        self._hash = hash(repr(self.key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Trial) and self.key == other.key

    def _number(self, value: int) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _wired(self, op: Op) -> tuple[Any, ...]:
        inner = op.repeats[self.rule.outer :]
        return (
            op.target, [(name, self._argument(item)) for name, item in op.arguments.items()],
            [(self._number(i), self.graph.values[i].shape, self.graph.values[i].dtype == "bool")
             for i in op.outputs],
            [(self._number(-1 - r), self.graph.repeats[r].count) for r in inner],
            sorted(op.steps.items()),
        )  # fmt: skip

    def _argument(self, item: Argument) -> Any:
        if isinstance(item, Ref):
            then = item.then
            beside = then and (self._number(-1 - then.repeat), self._number(then.value), then.shift)
            return "ref", self._number(item.id), beside, item.every
        return [self._argument(x) for x in item] if isinstance(item, tuple) else item


@lru_cache(1024)
def _scale(trial: _Trial) -> float | None:
    """How many times the formula's result the ops make; None where they compute something else."""
    graph, rule = trial.graph, trial.rule
    import numpy as np

    sizes = _small_sizes(rule)
    names = tuple((role, s.heads, "".join(sorted(s.order))) for role, s in sorted(rule.streams.items()))
    held = rule.chain.first is not None
    arrays = _numbers(sizes, names, held, rule.is_log)
    wanted_out, wanted_state = _formula(sizes, names, held, rule.norms, rule.is_log)
    for known_sizes in ({}, _by_length(rule, sizes)):
        try:
            made = _run(graph, rule, arrays, sizes, known_sizes)
        except NotRun:
            continue
        out, state = made
        if out.shape != wanted_out.shape or state.shape != wanted_state.shape:
            continue
        if not np.allclose(state, wanted_state, rtol=_DIGITS, atol=_DIGITS * abs(wanted_state).max()):
            return None
        scale = float((out * wanted_out).sum() / (wanted_out**2).sum())
        close = np.allclose(out, scale * wanted_out, rtol=0, atol=_DIGITS * abs(out).max())
        return scale if close and scale else None
    return None


def _small_sizes(rule: Rule) -> tuple[int, int, int, int, int]:
    """Two requests and two heads, or as many as heads share a key, and few channels."""
    batch, tokens, heads, width, columns = rule.sizes
    fewest = min(s.heads for s in rule.streams.values())
    shared = heads // fewest
    return min(batch, 2), tokens, min(fewest, 2) * shared, min(width, 3), min(columns, 2 + (columns > 2) * 2)


def _by_length(rule: Rule, sizes: Sequence[int]) -> dict[int, int]:
    """Lengths in the graph that can be told to be those of one dimension, and what they are here."""
    pairs: dict[int, int] = {}
    for place, (long, small) in enumerate(zip(rule.sizes, sizes, strict=True)):
        if place != 1 and long != rule.sizes[1]:
            pairs[long] = small if pairs.get(long, small) == small else long
    return pairs


def _run(
    graph: OpGraph, rule: Rule, arrays: Mapping[str, Array], sizes: Sequence[int],
    known_sizes: Mapping[int, int],
) -> tuple[Array, Array]:  # fmt: skip
    """The result [B, T, H, V] and the last state [B, H, K, V] of the ops."""
    long = dict(zip("BTHKV", rule.sizes, strict=True))
    small = dict(zip("BTHKV", sizes, strict=True))
    pieces = {}
    for role, stream in rule.streams.items():
        letter = "V" if role == "value" else "K"
        heads = (stream.heads, stream.heads * small["H"] // long["H"])
        factors = {"B": (long["B"], small["B"]), "T": (long["T"], small["T"]), "H": heads,
                   "D": (long[letter], small[letter])}  # fmt: skip
        pieces[stream.value] = _laid(graph, stream, arrays[role], factors)
    state = [(long[d], small[d]) for d in ("BHVK" if rule.turned else "BHKV")]
    dims = tuple((f,) if f[0] != 1 else () for f in state)
    if rule.chain.first is not None:
        array = arrays["state"].transpose(0, 1, 3, 2) if rule.turned else arrays["state"]
        pieces[rule.chain.first] = Piece(array.copy(), dims)
        if graph.values[rule.chain.first].shape != tuple(f[0] for f in state):
            raise NotRun("a state in another shape")
    run = SmallRun(graph, pieces, rule.outer, known_sizes)
    run.like[tuple(f[0] for f in state)] = dims
    values = run.run(rule.ops)
    last = values[rule.chain.last].array
    out = values[rule.out.value]
    names = rule.out.order
    shape = [small["V" if d == "D" else d] for d in names]
    array = out.array.reshape(shape).transpose([names.index(d) for d in "BTHD" if d in names])
    return array, last.transpose(0, 1, 3, 2) if rule.turned else last


def _laid(graph: OpGraph, stream: Stream, array: Array, factors: Mapping[str, tuple[int, int]]) -> Piece:
    """Numbers [B, T, H, D] as a stream has them."""
    usual = [d for d in "BTHD" if d in stream.order]
    turned = array.transpose([usual.index(d) for d in stream.order])
    left = [factors[d] for d in stream.order if factors[d][0] != 1]
    dims: list[Dim] = []
    for n in graph.values[stream.value].shape:
        dims.append((left.pop(0),) if n != 1 else ())
    return Piece(turned.reshape(short(dims)).copy(), dims)


@lru_cache(16)
def _numbers(
    sizes: tuple[int, ...], names: tuple[Any, ...], held: bool, is_log: bool
) -> dict[str, Array]:
    """Random operands: keys that are short, so that nothing grows; decays below one."""
    import numpy as np

    random = np.random.default_rng(20)
    batch, tokens, heads, width, columns = sizes
    most = max(count for _, count, _ in names)
    result: dict[str, Array] = {}
    for role, count, dims in names:
        long = {"B": batch, "T": tokens, "H": heads * count // most}
        long["D"] = columns if role == "value" else width
        shape = tuple(long[d] for d in "BTHD" if d in dims)
        if role == "beta":
            result[role] = random.uniform(0.1, 0.9, shape)
        elif role == "decay":
            result[role] = random.uniform(-0.03, 0, shape) if is_log else random.uniform(0.97, 1, shape)
        else:
            result[role] = random.standard_normal(shape) / (1 if role == "value" else width) ** 0.5
    if held:
        result["state"] = random.standard_normal((batch, heads, width, columns))
    return result


@lru_cache(16)
def _formula(
    sizes: tuple[int, ...], names: tuple[Any, ...], held: bool,
    norms: tuple[float | None, float | None], is_log: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """What the op computes of these numbers, token by token."""
    import numpy as np

    arrays = _numbers(sizes, names, held, is_log)
    batch, tokens, heads, width, columns = sizes

    def rows(array: Array, added: float | None) -> Array:
        if added is not None:
            array = array / np.sqrt((array * array).sum(-1, keepdims=True) + added)
        return np.repeat(array, heads // array.shape[2], 2)

    q, k, v = rows(arrays["query"], norms[0]), rows(arrays["key"], norms[1]), arrays["value"]
    beta, decay = arrays.get("beta"), arrays.get("decay")
    if decay is not None:
        decay = np.exp(decay) if is_log else decay
        decay = decay[..., None] if decay.ndim in (2, 4) else decay[..., None, None]
        decay = np.broadcast_to(decay, (batch, tokens, *decay.shape[-3:]))
    last = arrays.get("state", np.zeros((batch, heads, width, columns)))
    out = np.empty((batch, tokens, heads, columns))
    for t in range(tokens):
        last = last if decay is None else last * decay[:, t]
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - (last * k[:, t, :, :, None]).sum(-2))
        last = last + k[:, t, :, :, None] * new[:, :, None]
        out[:, t] = (last * q[:, t, :, :, None]).sum(-2)
    return out, last


# -- the ends --------------------------------------------------------------------------------------


def _outside(rule: Rule) -> tuple[int, ...]:
    return rule.ops[0].repeats[: rule.outer]


def _with_cache(wiring: Wiring, rule: Rule) -> Rule:
    """The rule with the write of its last state into a cache, if nothing else reads the state."""
    graph, value, between = wiring.graph, rule.chain.last, []
    inside = {op.id for op in rule.ops}
    while value not in wiring.outputs:
        outside = [op for op in wiring.readers[value] if op.id not in inside]
        outside = [op for op in outside if not op.name.endswith("_like")]
        if len(outside) != 1 or outside[0].repeats != _outside(rule):
            break
        op = outside[0]
        if op.name == "aten.copy_" and op.inputs[-1] == value:
            return changed(rule, **_kept_by(wiring, rule, op, between))
        if op.name not in COPIES:
            break
        between.append(op)
        value = op.outputs[0]
    return rule


def _kept_by(wiring: Wiring, rule: Rule, op: Op, between: Sequence[Op]) -> dict[str, Any]:
    """The write of the last state into a cache, and what makes room for it in this step."""
    graph, target, last = wiring.graph, op.inputs[0], rule.chain.last
    owner = graph.values[target].storage
    if rule.turned or graph.values[owner].elements != graph.values[last].elements:
        return {}
    if graph.values[target].shape != graph.values[last].shape:
        return {}
    room = wiring.maker(target)
    if room is not None and room.name in CREATED:
        read_first = any(reader.id < op.id for reader in wiring.readers[target])
        if read_first or graph.values[target].dtype != graph.values[last].dtype:
            return {}
        return {"into": op, "between": tuple(between), "room": room}
    if any(last in reader.inputs for reader in wiring.readers[last] if reader.name.endswith("_like")):
        return {}
    return {"into": op, "between": tuple(between)}


def _place(wiring: Wiring, rule: Rule) -> Op:
    """The op in whose place the new one stands: the first behind all that it reads."""
    starts = [stream.value for stream in rule.streams.values()]
    starts += [rule.chain.first] if rule.chain.first is not None else []
    starts += [rule.into.inputs[0]] if rule.into is not None and rule.room is None else []
    made = max((op.id for op in map(wiring.maker, starts) if op is not None), default=-1)
    ops = sorted(rule.dropped, key=lambda op: op.id)
    late = [op for op in ops if op.id > made and op.repeats == _outside(rule)]
    return late[0] if late else ops[-1]


# -- the new op ------------------------------------------------------------------------------------


def _emit(editor: Editor, rule: Rule, like: Op) -> None:
    """The op of a rule, and the views that make of its results what others read."""
    like = replace(like, steps={}, holds=())
    batch, tokens, heads, width, columns = rule.sizes
    operands: dict[str, Argument] = dict.fromkeys(("query", "key", "value", "decay", "beta"))
    lengths = {"B": batch, "T": tokens}
    for role, stream in rule.streams.items():
        channels = columns if role == "value" else width
        sizes = {**lengths, "H": stream.heads, "D": channels}
        operands[role] = _usual(editor, like, stream, sizes)
    first = rule.chain.first
    state: Argument = None if first is None else Ref(first)
    if rule.turned and isinstance(state, Ref):
        state = editor.permuted(like, state, (0, 1, 3, 2))
    kept = rule.into is not None or _is_read(editor.graph, rule)
    settings: dict[str, Argument] = {
        "scale": rule.scale, "query_norm": rule.norms[0], "key_norm": rule.norms[1],
        "is_log": rule.is_log, "keep": kept,
    }  # fmt: skip
    out, last = rule.out.value, rule.chain.last
    tensor = editor.values[out]
    new = editor.value((batch, tokens, heads, columns), tensor.dtype, "activations", like.repeats)
    arguments = {**operands, "state": state}
    if rule.into is not None and rule.room is not None:
        target, written = rule.into.inputs[0], rule.into.outputs[0]
        editor.emit(like, DELTA_RULE, {**arguments, **settings}, (new, target))
        if written in editor.graph.outputs or any(written in o.inputs for o in editor.graph.ops):
            editor.emit(like, "aten.alias.default", {"self": Ref(target)}, (written,), kind="view")
    elif rule.into is not None:
        arguments["into"] = Ref(rule.into.inputs[0])
        editor.emit(like, DELTA_RULE_INTO, {**arguments, **settings}, (new, rule.into.outputs[0]))
    else:
        shape = (batch, heads, width, columns) if kept else (0,)
        made = editor.value(shape, editor.values[last].dtype, "activations", like.repeats)
        editor.emit(like, DELTA_RULE, {**arguments, **settings}, (new, made))
        if kept:
            order = (0, 1, 3, 2) if rule.turned else (0, 1, 2, 3)
            _stands_for(editor, like, last, made, order, editor.values[last].shape)
    order = tuple("BTHD".index(d) for d in rule.out.order)
    _stands_for(editor, like, out, new, order, tensor.shape)


def _is_read(graph: OpGraph, rule: Rule) -> bool:
    inside = {op.id for op in rule.ops}
    last = rule.chain.last
    return last in graph.outputs or any(
        last in op.inputs and op.id not in inside for op in graph.ops
    )


def _usual(editor: Editor, like: Op, stream: Stream, sizes: Mapping[str, int]) -> Ref:
    """A stream as [B, T, H, D], or [B, T, H] where it has no channels."""
    names = [d for d in "BTHD" if d in stream.order]
    tensor = editor.values[stream.value]
    strides = iter([s for n, s in zip(tensor.shape, tensor.stride, strict=True) if n != 1])
    stride = {d: next(strides) if sizes[d] != 1 else 1 for d in stream.order}
    item = Ref(stream.value)
    lying = tuple(sizes[d] for d in stream.order)
    if tensor.shape != lying:
        item = editor.viewed(like, item, lying, tuple(stride[d] for d in stream.order))
    if list(stream.order) != names:
        item = editor.permuted(like, item, tuple(stream.order.index(d) for d in names))
    return item


def _stands_for(
    editor: Editor, like: Op, value: int, made: int, order: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """A value of the graph becomes a view of what the new op made, and its views with it."""
    source = editor.values[made]
    item = Ref(made)
    if order != tuple(range(len(order))):
        last = tuple(source.shape[d] for d in order) == shape
        if last:
            turned: dict[str, Argument] = {"self": item, "dims": order}
            stride = tuple(source.stride[d] for d in order)
            _rehomed(editor, like, value, made, stride)
            editor.emit(like, "aten.permute.default", turned, (value,), kind="view")
            return
        item = editor.permuted(like, item, order)
    _rehomed(editor, like, value, made, Tensor.contiguous(shape))
    view: dict[str, Argument] = {"self": item, "shape": shape}
    editor.emit(like, "aten.reshape.default", view, (value,), kind="view")


def _rehomed(editor: Editor, like: Op, value: int, made: int, stride: tuple[int, ...]) -> None:
    """Let a value, and what views its storage, lie in another storage."""
    old = editor.values[value].storage
    for index, tensor in enumerate(editor.values):
        if tensor.storage == old and index != made:
            editor.values[index] = replace(tensor, storage=made)
    tensor = editor.values[value]
    editor.values[value] = replace(tensor, stride=stride, repeats=like.repeats, then=None)
