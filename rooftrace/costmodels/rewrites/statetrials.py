"""Trials of regions that may be delta rules, linear attention, norms or activations: run small,
against a formula.

The formula is that of the tracer's composite op or of torch's function, on numpy's arrays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace.costmodels.rewrites.dataflow import BothWays, ValueFlow, place_of, with_backward
from rooftrace.costmodels.rewrites.editing import Editor
from rooftrace.costmodels.rewrites.patterns import can_be_one, ops_between
from rooftrace.costmodels.rewrites.smallruns import (
    KNOWN,
    Dim,
    NotRun,
    SmallRun,
    SmallTensor,
    short,
)
from rooftrace.costmodels.rewrites.statechains import StateChain
from rooftrace.graph import Argument, Op, OpGraph, Ref

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

_DIGITS = 1e-9
TABLES = ("query_decay", "key_decay", "pair_decay")


Sizes = tuple[int, int, int, int, int]
"""B requests of T tokens, H heads, states [K, V]."""


@dataclass(frozen=True, slots=True)
class StateStream:
    """A value, and its dimensions in order: batch, token, head, channel ("BTHD"), or of a table
    head and positions in a block ("HI", "HIJ").

    heads: how many it has.
    """

    value: int
    order: str
    heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """A region that computes a delta rule or linear attention, and its operands.

    streams: by role: query, key, value, decay, beta, bonus, tables.  out: the result.  transposed:
    the state has channels of the value first.  outer: how many repeats all ops are in.  write: the
    op that copies the last state into a cache, if only that reads it, after the casts `between`;
    cache: the op that makes the cache, if the step does.
    """

    chain: StateChain
    ops: tuple[Op, ...]
    streams: Mapping[str, StateStream]
    out: StateStream
    sizes: Sizes
    scale: float = 1.0
    norms: tuple[float | None, float | None] = (None, None)
    is_log: bool = True
    transposed: bool = False
    outer: int = 0
    write: Op | None = None
    cache: Op | None = None
    between: tuple[Op, ...] = ()

    @property
    def in_blocks(self) -> bool:
        """Whether its decays are tables."""
        return TABLES[0] in self.streams

    @property
    def starts(self) -> set[int]:
        """The values that it reads."""
        first = set[int]() if self.chain.first is None else {self.chain.first}
        return first.union(stream.value for stream in self.streams.values())

    @property
    def outside(self) -> tuple[int, ...]:
        """The repeats that all ops are in."""
        return self.ops[0].repeats[: self.outer]

    @property
    def dropped(self) -> list[Op]:
        """The ops that the new one replaces."""
        return [*self.ops, *self.between, *filter(None, (self.write, self.cache))]


@dataclass(frozen=True, slots=True)
class StateTrial:
    """A region and a formula; equal to trials of the same structure."""

    graph: OpGraph = field(compare=False)
    rule: StateRule = field(compare=False)
    wired: tuple[Any, ...]
    norms: tuple[float | None, float | None]
    is_log: bool


def wired_as(graph: OpGraph, rule: StateRule) -> tuple[Any, ...]:
    """The ops of a rule with values and repeats renumbered: equal for equal functions."""
    values, numbers = graph.values, dict[int, int]()

    def number(value: int | None) -> int:
        return -1 if value is None else numbers.setdefault(value, len(numbers))

    def argument(item: Argument) -> Any:
        if isinstance(item, tuple):
            return tuple(map(argument, item))
        if not isinstance(item, Ref):
            return item
        then = item.then
        neighbour = then and (number(-2 - then.repeat), number(then.value), then.shift)
        return Ref, number(item.id), item.every, neighbour

    def made(op: Op) -> tuple[Any, ...]:
        results = tuple((number(i), values[i].shape, values[i].dtype) for i in op.outputs)
        repeats = ((number(-2 - r), graph.repeats[r].count) for r in op.repeats[rule.outer :])
        items = tuple((name, argument(item)) for name, item in op.arguments.items())
        return op.target, items, results, tuple(repeats), tuple(op.steps.items())

    streams = tuple(
        (role, s.order, s.heads, values[s.value].shape, number(s.value))
        for role, s in sorted(rule.streams.items())
    )
    ends = number(rule.chain.first), number(rule.out.value), number(rule.chain.last)
    return streams, rule.sizes, rule.transposed, rule.out.order, ends, tuple(map(made, rule.ops))


@lru_cache(1024)
def scale_of(trial: StateTrial) -> float | None:
    """The factor of the ops' result over the formula's; None where they compute something else."""
    graph, rule = trial.graph, trial.rule
    # Two requests, two heads (or all that share a key), and few channels
    batch, tokens, heads, width, columns = rule.sizes
    fewest = min(s.heads for s in rule.streams.values())
    shared = heads // fewest
    few = min(columns, 3 if columns == width else 4)
    sizes = min(batch, 2), tokens, min(fewest, 2) * shared, min(width, 3), few
    names = tuple(
        (role, s.heads, _table(graph, s) if role in TABLES else "".join(sorted(s.order)))
        for role, s in sorted(rule.streams.items())
    )
    held = rule.chain.first is not None
    arrays = _numbers(sizes, names, held, rule.is_log)
    wanted_out, wanted_state = _formula(sizes, names, held, rule.norms, rule.is_log)
    for lengths in ({}, _by_length(rule, sizes)):
        try:
            made = _run(graph, rule, arrays, sizes, lengths)
        except NotRun:
            continue
        out, state = made
        if out.shape != wanted_out.shape or state.shape != wanted_state.shape:
            continue
        if not np.allclose(
            state, wanted_state, rtol=_DIGITS, atol=_DIGITS * abs(wanted_state).max()
        ):
            return None
        scale = float((out * wanted_out).sum() / (wanted_out**2).sum())
        close = np.allclose(out, scale * wanted_out, rtol=0, atol=_DIGITS * abs(out).max())
        return scale if close and scale else None
    return None


def _table(graph: OpGraph, stream: StateStream) -> tuple[int, ...]:
    """The lengths of a table after that of heads."""
    return tuple(n for n in graph.values[stream.value].shape if n != 1)[1:]


def _by_length(rule: StateRule, sizes: Sequence[int]) -> dict[int, int]:
    """Lengths of one dimension only -> their small sizes."""
    pairs: dict[int, int] = {}
    for position, (long, small) in enumerate(zip(rule.sizes, sizes, strict=True)):
        if position != 1 and long != rule.sizes[1]:
            pairs[long] = small if pairs.get(long, small) == small else long
    return pairs


def _run(
    graph: OpGraph, rule: StateRule, arrays: Mapping[str, Array], sizes: Sequence[int],
    lengths: Mapping[int, int],
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
        factors |= zip("IJ", ((n, n) for n in _table(graph, stream)), strict=False)
        pieces[stream.value] = _laid(graph, stream, arrays[role], factors)
    state = [(long[d], small[d]) for d in ("BHVK" if rule.transposed else "BHKV")]
    dims = tuple((f,) if f[0] != 1 else () for f in state)
    if rule.chain.first is not None:
        array = arrays["state"].transpose(0, 1, 3, 2) if rule.transposed else arrays["state"]
        pieces[rule.chain.first] = SmallTensor(array.copy(), dims)
        if graph.values[rule.chain.first].shape != tuple(f[0] for f in state):
            raise NotRun("a state in another shape")
    run = SmallRun(graph, pieces, rule.outer, lengths)
    run.like[tuple(f[0] for f in state)] = dims
    values = run.run(rule.ops)
    last = values[rule.chain.last].array
    out = values[rule.out.value]
    names = rule.out.order
    shape = [small["V" if d == "D" else d] for d in names]
    array = out.array.reshape(shape).transpose([names.index(d) for d in "BTHD" if d in names])
    return array, last.transpose(0, 1, 3, 2) if rule.transposed else last


def _laid(
    graph: OpGraph, stream: StateStream, array: Array, factors: Mapping[str, tuple[int, int]]
) -> SmallTensor:
    """Numbers [B, T, H, D], or a table [H, I] or [H, I, J], in the order of a stream."""
    usual = [d for d in "BTHDIJ" if d in stream.order]
    transposed = array.transpose([usual.index(d) for d in stream.order])
    shape = graph.values[stream.value].shape
    left = [factors[d] for d in stream.order if factors[d][0] != 1]
    if [long for long, _ in left] != [n for n in shape if n != 1]:
        raise NotRun("a stream in another order")
    dims: list[Dim] = [(left.pop(0),) if n != 1 else () for n in shape]
    return SmallTensor(transposed.reshape(short(dims)).copy(), dims)


@lru_cache(16)
def _numbers(sizes: Sizes, names: tuple[Any, ...], held: bool, is_log: bool) -> dict[str, Array]:
    """Random operands: short keys, so that nothing grows; decays below one.

    The longer the sequence, the slower they decay: the last token sees the first one.
    """
    random = np.random.default_rng(20)
    batch, tokens, heads, width, columns = sizes
    most = max(count for _, count, _ in names)
    span = min(0.03, 2 / tokens)
    result: dict[str, Array] = {}
    for role, count, dims in names:
        if isinstance(dims, tuple):
            result[role] = random.uniform(0.2, 1, (heads * count // most, *dims))
            continue
        long = {"B": batch, "T": tokens, "H": heads * count // most}
        long["D"] = columns if role == "value" else width
        shape = tuple(long[d] for d in "BTHD" if d in dims)
        if role == "beta":
            result[role] = random.uniform(0.1, 0.9, shape)
        elif role == "decay":
            result[role] = (
                random.uniform(-span, 0, shape) if is_log else random.uniform(1 - span, 1, shape)
            )
        else:
            result[role] = random.standard_normal(shape) / (1 if role == "value" else width) ** 0.5
    if held:
        result["state"] = random.standard_normal((batch, heads, width, columns))
    return result


@lru_cache(16)
def _formula(
    sizes: Sizes, names: tuple[Any, ...], held: bool,
    norms: tuple[float | None, float | None], is_log: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """The result and last state of the op, token by token."""
    arrays = _numbers(sizes, names, held, is_log)
    batch, tokens, heads, width, columns = sizes

    def rows(array: Array, added: float | None) -> Array:
        if added is not None:
            array = array / np.sqrt((array * array).sum(-1, keepdims=True) + added)
        return np.repeat(array, heads // array.shape[2], 2)

    q, k, v = rows(arrays["query"], norms[0]), rows(arrays["key"], norms[1]), arrays["value"]
    if TABLES[0] in arrays:
        return _block_formula(arrays, sizes)
    beta, decay = arrays.get("beta"), arrays.get("decay")
    if decay is not None:
        decay = np.exp(decay) if is_log else decay
        decay = decay[..., None] if decay.ndim in (2, 4) else decay[..., None, None]
        decay = np.broadcast_to(decay, (batch, tokens, *decay.shape[-3:]))
    last = arrays.get("state", np.zeros((batch, heads, width, columns)))
    out = np.empty((batch, tokens, heads, columns))
    for t in range(tokens):
        before, last = last, last if decay is None else last * decay[:, t]
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - (last * k[:, t, :, :, None]).sum(-2))
        added = k[:, t, :, :, None] * new[:, :, None]
        last = last + added
        seen = before + arrays["bonus"][..., None] * added if "bonus" in arrays else last
        out[:, t] = (seen * q[:, t, :, :, None]).sum(-2)
    return out, last


def _block_formula(arrays: Mapping[str, Array], sizes: Sizes) -> tuple[Array, Array]:
    """The result and last state with tables of the decay of a block of tokens."""
    batch, tokens, heads, width, columns = sizes
    q, k, v = (arrays[name].transpose(0, 2, 1, 3) for name in ("query", "key", "value"))
    length = arrays["query_decay"].shape[1]
    last = arrays.get("state", np.zeros((batch, heads, width, columns)))
    out = np.empty((batch, tokens, heads, columns))
    for start in range(0, tokens, length):
        block = slice(start, min(start + length, tokens))
        rows = block.stop - start
        pairs = arrays["pair_decay"][:, :rows, :rows]
        scores = q[:, :, block] @ k[:, :, block].swapaxes(-1, -2) * pairs
        read = q[:, :, block] * arrays["query_decay"][:, :rows, None] @ last
        out[:, block] = (read + scores @ v[:, :, block]).swapaxes(1, 2)
        kept = k[:, :, block] * arrays["key_decay"][:, length - rows :, None]
        gone = np.exp(-rows * arrays["decay"])[:, None, None]
        last = last * gone + kept.swapaxes(-1, -2) @ v[:, :, block]
    return out, last


# -- functions that are written out, and have a name -----------------------------------------------
# RMS norm and activations, spelled as ops, as a call of the function that torch has for them.  The
# ops are run small against the formula, so that it does not matter how they are spelled.

_ANCHORS = frozenset({"aten.rsqrt", "aten.sqrt", "aten.tanh", "aten.erf", "aten.sigmoid"})
"""Ops that are in every spelling."""
_STEPS = 8
"""The most ops from such an op to either end of a spelling."""


def _gelu(x: Any) -> Any:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


_NAMED: Mapping[str, tuple[str, Callable[..., Any], Mapping[str, Argument]]] = {
    "F.rms_norm": (
        "rooftrace.rms_norm",
        lambda x, w=1.0: x / np.sqrt((x * x).mean(-1, keepdims=True)) * w,
        {},
    ),
    "F.gelu": ("aten.gelu", _gelu, {}),
    "F.gelu(approximate='tanh')": (
        "aten.gelu",
        lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        {"approximate": "tanh"},
    ),
    "F.silu": ("aten.silu", lambda x: x / (1 + np.exp(-x)), {}),
}
"""By name, the op, its formula, and its arguments beside tensors.  0.044715: Hendrycks and Gimpel,
"Gaussian Error Linear Units", as in torch.nn.GELU."""


def written_forms(graph: OpGraph) -> Mapping[str, list[BothWays]]:
    """Functions with a name that are spelled as ops, with their backward, by this name."""
    flow, forms, taken = ValueFlow(graph), defaultdict[str, list[BothWays]](list), set[int]()
    for op in graph.ops:
        if op.name in _ANCHORS and op.part == "forward" and op.id not in taken:
            for out, start in _ends_around(flow, op):
                named = _named_form(flow, start, out)
                if named:
                    forms[named[0]].append(named[1])
                    taken |= {inner.id for inner in named[1].forward}
                    break
    return forms


def _ends_around(flow: ValueFlow, anchor: Op) -> Iterator[tuple[int, int]]:
    """Pairs of a later value and an earlier one of its shape; the largest regions first."""
    near: list[list[int]] = []
    for reads in (True, False):
        front, seen = [anchor], list[int]()
        for _ in range(_STEPS):
            values = [v for op in front for v in (op.inputs if reads else op.outputs)]
            seen += [v for v in values if v not in seen]
            steps = [[flow.producer(v)] if reads else flow.users[v] for v in values]
            front = [op for row in steps for op in row if op and op.part == "forward"]
            front = [op for op in {op.id: op for op in front}.values() if op.name in KNOWN]
        near.append(seen)
    for out in reversed(near[1]):
        for start in reversed(near[0]):
            tensors = flow.values[out], flow.values[start]
            if tensors[0].shape == tensors[1].shape and tensors[0].dtype == tensors[1].dtype:
                yield out, start


def _is_near(flow: ValueFlow, start: int, out: int) -> bool:
    """Whether a few ops that can be run small make one value of another one, and of weights."""
    front, seen = [out], set[int]()
    while front:
        value = front.pop()
        op = flow.producer(value)
        if value == start or (op is None and len(flow.values[value].shape) < 2):
            continue
        if op is None or op.name not in KNOWN or len(seen) > 2 * _STEPS:
            return False
        if op.id not in seen:
            seen.add(op.id)
            front += op.inputs
    return len(seen) > 1


def _named_form(flow: ValueFlow, start: int, out: int) -> tuple[str, BothWays] | None:
    """The function of one value, and of weights of its rows, by which another one is made."""
    values, ops = flow.values, flow.graph.ops
    shape = values[start].shape
    if not shape or 0 in shape or not _is_near(flow, start, out):
        return None
    inside = ops_between(flow, {start}, [out])
    inner = [ops[number] for number in sorted(inside)]
    made = {value for op in inner for value in op.outputs}
    others = {v for op in inner for v in op.inputs} - made - {start}
    weights = [v for v in others if values[v].shape == shape[-1:]]
    if len(weights) != len(others) or len(weights) > 1 or any(op.part != "forward" for op in inner):
        return None
    if any(op.name not in KNOWN for op in inner):
        return None
    name = _function_of(flow.graph, inner, (start, *weights), out)
    if name is None:
        return None
    first = next(ref for op in inner for ref in op.reads if ref.id == start)
    read = made | {start, *weights}
    both = BothWays(tuple(inner), (first, *map(Ref, weights)), out)
    known = with_backward(flow, both, {place_of(op) for op in inner}, read)
    if known is None:
        return None
    gone = {op.id for op in (*known.backward, *inner)}
    same = {ref for n in gone for ref in ops[n].reads if ref.id == start} == {first}
    alone = same and can_be_one(flow, gone, [out, *known.grads], [start], [first])
    return (name, known) if alone else None


def _function_of(graph: OpGraph, ops: Sequence[Op], starts: Sequence[int], out: int) -> str | None:
    """The name of the function that ops compute; None for another one."""
    draw, pieces = np.random.default_rng(0), dict[int, SmallTensor]()
    for value in starts:
        rows = tuple(((n, min(n, 3 + k)),) for k, n in enumerate(graph.values[value].shape))
        rows = (*rows[:-1], ((n := graph.values[value].shape[-1], min(n, 4)),))
        pieces[value] = SmallTensor(draw.normal(1.0, 1.0, short(rows)), rows)
    try:
        made = SmallRun(graph, pieces, len(ops[0].repeats), {}).run(ops)[out].array
    except NotRun:
        return None
    for name, (_, formula, _) in _NAMED.items():
        if len(starts) == 1 or name == "F.rms_norm":
            wanted = formula(*(pieces[value].array for value in starts))
            if made.shape == wanted.shape and np.allclose(made, wanted, 1e-4, 1e-4):
                return name
    return None


def with_named_forms(graph: OpGraph, forms: Mapping[str, list[BothWays]] | None = None) -> OpGraph:
    """Functions with a name that are spelled as ops are calls of it; so is their backward."""
    forms = written_forms(graph) if forms is None else forms
    rows = [(name, match) for name, each in forms.items() for match in each]
    if not rows:
        return graph
    ends = {match.forward[-1].id: row for row in rows if (match := row[1])}
    lasts = {match.backward[-1].id: row for row in rows if (match := row[1]).backward}
    gone = {op.id for _, match in rows for op in (*match.forward, *match.backward)}
    edit, more = Editor(graph), dict[int, dict[str, Argument]]()
    for op in graph.ops:
        if row := ends.get(op.id):
            more[row[1].out] = _emit_named(edit, *row)
        elif row := lasts.get(op.id):
            _emit_named_backward(edit, *row, more[row[1].out])
        elif op.id not in gone:
            edit.ops.append(op)
    return edit.mended()


def _emit_named(edit: Editor, name: str, match: BothWays) -> dict[str, Argument]:
    """The call; returns the arguments of its backward."""
    like, (op, _, how) = match.forward[-1], _NAMED[name]
    out, outputs = edit.values[match.out], [match.out]
    edit.move(match.out, match.out)
    arguments: dict[str, Argument] = {"self": match.operands[0], **how}
    if name == "F.rms_norm":
        weight = match.operands[1] if match.operands[1:] else None
        arguments = {"input": match.operands[0], "normalized_shape": out.shape[-1:]}
        arguments["weight"] = weight
        outputs.append(edit.value((*out.shape[:-1], 1), "fp32", "activations", like.repeats))
    edit.emit(like, f"{op}.default", arguments, tuple(outputs))
    return {**arguments, "rstd": Ref(outputs[1])} if outputs[1:] else arguments


def _emit_named_backward(
    edit: Editor, name: str, match: BothWays, arguments: Mapping[str, Argument]
) -> None:
    """The backward of the call, and the sum with gradients that came from elsewhere."""
    like, grad = match.backward[-1], match.grad_out
    assert grad is not None
    first = "grad_out" if name == "F.rms_norm" else "grad_output"
    out = edit.values[match.out]
    if edit.values[grad.id].shape != out.shape:
        grad = edit.viewed(like, grad, out.shape)
    pairs = zip(match.operands, match.grads, strict=True)
    grads = {value: edit.values[ref.id] for ref, value in pairs if value >= 0}
    new = {
        v: Ref(edit.value(t.shape, t.dtype, "gradients", like.repeats)) for v, t in grads.items()
    }
    told: dict[str, Argument] = {first: grad, **arguments}
    if len(match.operands) > 1:
        told["output_mask"] = tuple(value >= 0 for value in match.grads)
    made = tuple(ref.id for ref in new.values())
    edit.emit(like, f"{_NAMED[name][0]}_backward.default", told, made)
    for other in match.added:
        value = match.grads[0]
        both: dict[str, Argument] = {"self": Ref(other), "other": new[value]}
        t = grads[value]
        new[value] = edit.made(like, "aten.add.Tensor", both, t.shape, t.dtype, "gradients")
    for value, ref in new.items():
        edit.becomes(like, value, ref)
