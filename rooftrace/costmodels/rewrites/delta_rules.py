"""Rewrites of linear attention and delta rules to one op each, by the roles of their operands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as changed

from msgspec.structs import replace

from rooftrace.costmodels.rewrites.editing import Editor, edited
from rooftrace.costmodels.rewrites.indexing import Dim, ReadValue, full
from rooftrace.costmodels.rewrites.places import COPIES
from rooftrace.costmodels.rewrites.scans import laid_out
from rooftrace.costmodels.rewrites.statechains import (
    CREATED,
    LAYOUT,
    PARTS,
    StateChain,
    StateRegion,
    StateWiring,
    behind,
    chains,
    is_closed,
    shared,
)
from rooftrace.costmodels.rewrites.statetrials import (
    TABLES,
    Sizes,
    StateRule,
    StateStream,
    StateTrial,
    scale_of,
    wired_as,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import precision

# -- operand roles ---------------------------------------------------------------------------------
# Which operands a chain of states has: streams in the roles of query, key, value, decay and beta.
#
# Roles follow from what depends on what; that they are right is for `statetrials` to say.

_MOVED = LAYOUT | PARTS | CREATED | {"aten.copy_", "aten.stack", "aten.cat"}
_BRANCHES = frozenset(f"aten.{name}" for name in ("clamp_min", "gt", "ge", "lt", "le", "eq"))
"""Ops that do one thing or another by the size of a number: random ones may take one way only."""
_ORDERS = ("BTHD", "BHTD", "TBHD", "BHDT")
"""The dimensions of a stream as they may lie: batch, token, head, channel."""


def rule_of(wiring: StateWiring, chain: StateChain, delta: bool) -> StateRule | None:
    """The rule that the region around a chain computes; None where it is no such rule."""
    graph = wiring.graph
    shape = graph.values[chain.last].shape
    if len(shape) != 4:
        return None
    region = StateRegion(wiring, chain)
    for outs in _results(region):
        for out in reversed(outs):
            for transposed in (False, True):
                for roles in _roles(region, out, transposed):
                    if ("beta" in roles) == delta:
                        rule = _judged(region, out, roles, transposed)
                        if rule is not None:
                            return rule
    return None


def _results(region: StateRegion) -> Iterator[list[int]]:
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


def _roles(region: StateRegion, out: int, transposed: bool) -> Iterator[dict[str, int]]:
    """The leaf of each role, by what depends on it."""
    streams, chain = region.streams, region.chain
    aside = region.fixed | {chain.first}

    def behind_all(values: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(streams.get(v, frozenset()) for v in values)) - {chain.first}

    decay = behind_all(chain.decays)
    decay = decay - aside or decay or (chain.decays if len(chain.decays) == 1 else decay)
    sides = [behind_all(side) - decay - aside for side in (chain.columns, chain.rows)]
    keys, others = sides[::-1] if transposed else sides
    query = streams.get(out, frozenset()) - streams.get(chain.last, frozenset()) - aside
    if len(query) != 1 or len(decay) > 1:
        return
    rest = keys | others
    if not 2 <= len(rest) <= 3:
        return
    by_size = sorted(rest, key=region.wiring.size)
    small = by_size[: len(rest) - 2]
    tables = _tables(region, out, decay)
    for key, value in itertools.permutations(by_size[len(small) :]):
        if key in keys:
            roles = {"query": min(query), "key": key, "value": value} | tables
            roles |= {"decay": min(decay)} if decay else {}
            yield roles | ({"beta": small[0]} if small else {})


def _tables(region: StateRegion, out: int, decay: frozenset[int]) -> dict[str, int]:
    """Tables of decays by place in a block: of what is kept of keys, of queries, and of pairs; or
    the bonus of a token in its own result."""
    streams, chain = region.streams, region.chain
    keys = frozenset().union(*(streams[value] for value in chain.columns)) & region.fixed
    others = (streams[out] - streams[chain.last]) & region.fixed
    if not keys and len(others) == 1:
        return {"bonus": min(others)}
    if not decay <= region.fixed or len(keys) != 1 or len(others) != 2:
        return {}
    query, pairs = sorted(others, key=region.wiring.size)
    return {"query_decay": query, "key_decay": min(keys), "pair_decay": pairs}


def _sizes(region: StateRegion, roles: Mapping[str, int], transposed: bool) -> Sizes | None:
    batch, heads, width, columns = region.graph.values[region.chain.last].shape
    if transposed:
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


def _candidates(
    region: StateRegion, role: str, leaf: int, sizes: Sequence[int]
) -> list[StateStream]:
    """Where a kernel may take a stream from: from its leaf on, to where it meets another one."""
    if role in TABLES:
        long = [n for n in region.graph.values[leaf].shape if n != 1]
        return [StateStream(leaf, "HIJ"[: len(long)], sizes[2])]
    batch, tokens, heads, width, columns = sizes
    graph = region.graph
    counts = [h for h in range(heads, 0, -1) if heads % h == 0]
    if role not in ("query", "key"):
        counts = counts[:1]
    moving = leaf not in region.fixed and leaf in region.leaves
    last = {
        "query": (width,),
        "key": (width,),
        "value": (columns,),
        "beta": (None,),
        "bonus": (width,),
    }
    result = []
    for value in _line(region, leaf):
        for channels, count in itertools.product(last.get(role, (None, width)), counts):
            named = {"B": batch, "T": tokens, "H": count} if moving else {"H": count}
            named |= {} if channels is None else {"D": channels}
            orders = _orders(graph.values[value].shape, named)
            result += [StateStream(value, order, count) for order in orders]
    return result


def _nearest(items: Sequence[StateStream], order: str) -> StateStream:
    """The last candidate, its dimensions in this order if they may lie so."""
    last = [item for item in items if item.value == items[-1].value]
    alike = [item for item in last if [d for d in order if d in item.order] == list(item.order)]
    return (alike or last)[0]


def _line(region: StateRegion, leaf: int) -> list[int]:
    """The values through which all goes that comes from a leaf, before it meets another stream."""
    readers, own = region.wiring.used_by, frozenset({leaf})
    streams = region.streams if leaf in region.fixed else region.moving
    alone = {leaf}
    for op in sorted(region.ops.values(), key=lambda op: op.id):
        if len(op.outputs) != 1 or streams.get(op.outputs[0]) != own:
            continue
        if any(streams.get(i) == own and i not in alone for i in op.inputs):
            continue
        alone.add(op.outputs[0])

    def passes(start: int, through: int) -> bool:
        """Whether all that comes from `start` goes through another value."""
        stack, seen = [start], {through}
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            made = [r.outputs[0] for r in readers[value] if r.id in region.ops]
            if not made or not alone.issuperset(made):
                return False
            stack += made
        return True

    outside = shared(op.repeats for op in region.ops.values())
    line = [leaf]
    for value in sorted(alone - {leaf}):
        if passes(line[-1], value):
            line.append(value)
    return [v for v in line if v in region.fixed or region.graph.values[v].repeats == outside]


# -- what a region computes ------------------------------------------------------------------------


def _judged(
    region: StateRegion, out: int, roles: Mapping[str, int], transposed: bool
) -> StateRule | None:
    """The rule with these roles, its streams taken from as far up as the op allows."""
    sizes = _sizes(region, roles, transposed)
    if sizes is None:
        return None
    batch, tokens, heads, _, columns = sizes
    named = {"B": batch, "T": tokens, "H": heads, "D": columns}
    ends = [
        StateStream(out, order, heads) for order in _orders(region.graph.values[out].shape, named)
    ]
    if not ends:
        return None
    choices = {role: _candidates(region, role, leaf, sizes) for role, leaf in roles.items()}
    if not all(choices.values()):
        return None
    for end, order in itertools.product(ends, _ORDERS):
        streams = {role: _nearest(items, order) for role, items in choices.items()}
        rule = _checked(
            region,
            StateRule(
                chain=region.chain,
                ops=(),
                streams=streams,
                out=end,
                sizes=sizes,
                transposed=transposed,
            ),
        )
        if rule is not None:
            return _from_the_top(region, rule, choices)
    return None


def _from_the_top(
    region: StateRegion, rule: StateRule, choices: Mapping[str, Sequence[StateStream]]
) -> StateRule:
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


def _ops_of(region: StateRegion, rule: StateRule) -> list[Op] | None:
    """The ops between the streams and the results; None where others read inside."""
    ends = (rule.out.value, rule.chain.last)
    starts = {stream.value for stream in rule.streams.values()}
    if rule.chain.first is not None:
        starts.add(rule.chain.first)
    ops = behind(region, ends, starts)
    return ops if ops and is_closed(region, ops, ends) else None


def _checked(region: StateRegion, rule: StateRule, roles: Sequence[str] = ()) -> StateRule | None:
    """The rule with its ops and settings, if they compute it and nothing else reads inside.

    roles: of the streams that are new; the settings of the others are known.
    """
    ops = _ops_of(region, rule)
    if ops is None:
        return None
    outside = shared(op.repeats for op in ops)
    rule = changed(rule, ops=tuple(ops), outer=len(outside))
    if not _stands_alone(region, rule, outside) or any(_branches(region, op) for op in ops):
        return None
    wired = wired_as(region.graph, rule)
    query, key = (
        (*_least_lengths(region, rule, role), None) if role in roles else (known,)
        for role, known in zip(("query", "key"), rule.norms, strict=True)
    )
    new_decay = "decay" in rule.streams and (not roles or "decay" in roles)
    logs = (True, False) if new_decay and not rule.in_blocks else (rule.is_log,)
    for norms, is_log in itertools.product(itertools.product(query, key), logs):
        rule = changed(rule, norms=norms, is_log=is_log)
        scale = scale_of(StateTrial(region.graph, rule, wired, norms, is_log))
        if scale is not None:
            return changed(rule, scale=scale)
    return None


def _branches(region: StateRegion, op: Op) -> bool:
    """Whether an op asks how large a number of a stream is, besides the length of a row."""
    if op.name not in _BRANCHES or not region.streams[op.outputs[0]]:
        return False
    below = region.wiring.producer(op.inputs[0])
    return below is None or below.name != "aten.linalg_vector_norm"


def _stands_alone(region: StateRegion, rule: StateRule, outside: tuple[int, ...]) -> bool:
    """Whether one op in the same iteration can read all operands as they are before the others."""
    graph, ops = region.graph, rule.ops
    if any(ref.then and ref.then.repeat in outside for op in ops for ref in op.reads):
        return False
    starts = [stream.value for stream in rule.streams.values()]
    starts += [rule.chain.first] if rule.chain.first is not None else []
    tensors = [graph.values[value] for value in starts]
    if any(tensor.repeats != outside[: len(tensor.repeats)] for tensor in tensors):
        return False
    made = max((op.id for op in map(region.wiring.producer, starts) if op is not None), default=-1)
    writers = (w for t in tensors for w in region.wiring.writers.get(t.storage, ()))
    return not any(made < writer.id < ops[-1].id for writer in writers)


def _least_lengths(region: StateRegion, rule: StateRule, role: str) -> Iterator[float]:
    """What is added to the sum of squares of a stream, or the square of its least length, so that
    nothing is divided by zero."""
    own = region.moving.get(rule.streams[role].value)
    numbers = dict[float, None]()
    for op in rule.ops:
        if op.name in ("aten.add", "aten.clamp_min") and region.moving[op.outputs[0]] == own:
            number = op.arguments.get("other", op.arguments.get("min"))
            if isinstance(number, float):
                numbers[number if op.name == "aten.add" else number * number] = None
    return iter(numbers)


# -- delta rules -----------------------------------------------------------------------------------
# Linear attention and delta rules as one op each, where a graph writes out what they do.
#
# What is written out is found as a chain of states (`statechains`), and its streams get their
# roles by what depends on them: the decay by what scales the state, key and value by what is
# added to it, the query by what reads it (`staterules`).  Then the ops run on small random
# numbers beside the formula of the op that would take their place (`statetrials`): where both
# agree to nine digits, they are the same function.  So chunks, loops over tokens, solved or
# inverted triangles, masks and the order of elementwise ops need no templates.

BLOCK_ATTENTION = "rooftrace.block_attention.default"


def gated_delta_rule(graph: OpGraph) -> tuple[OpGraph, int]:
    """Delta rules, with a decay or without, become one op each."""
    return _replaced(graph, delta=True)


def linear_attention(graph: OpGraph) -> tuple[OpGraph, int]:
    """Linear attention without a delta rule, its state decaying, becomes one op each."""
    return _replaced(graph, delta=False)


def _replaced(graph: OpGraph, delta: bool) -> tuple[OpGraph, int]:
    if not any(op.name in ("aten.bmm", "aten.mul") for op in graph.ops):
        return graph, 0
    wiring = StateWiring(graph)
    rules = []
    taken: set[int] = set()
    for chain in chains(wiring):
        rule = rule_of(wiring, chain, delta)
        if rule is not None and taken.isdisjoint(op.id for op in rule.ops):
            taken |= {op.id for op in rule.ops}
            rules.append(_with_cache(wiring, rule))
    if not rules:
        return graph, 0
    matches = {anchor.id: (anchor, rule) for rule in rules for anchor in [_anchor(wiring, rule)]}
    gone = {op.id for rule in rules for op in rule.dropped}
    made = {out for op in graph.ops if op.id in gone for out in op.outputs}
    gone |= {i for i in wiring.unused if not made.isdisjoint(graph.ops[i].inputs)}
    count = sum(graph.times(graph.ops[number]) for number in matches)
    return edited(graph, matches, _emit, gone), count


# -- the ends --------------------------------------------------------------------------------------


def _outside(rule: StateRule) -> tuple[int, ...]:
    return rule.ops[0].repeats[: rule.outer]


def _with_cache(wiring: StateWiring, rule: StateRule) -> StateRule:
    """The rule with the write of its last state into a cache, if nothing else reads the state."""
    value, between = rule.chain.last, list[Op]()
    inside = {op.id for op in rule.ops}
    while value not in wiring.graph.outputs:
        outside = [op for op in wiring.used_by[value] if op.id not in inside]
        if len(outside) != 1 or outside[0].repeats != _outside(rule):
            break
        op = outside[0]
        if op.name == "aten.copy_" and op.inputs[-1] == value:
            room = wiring.producer(op.inputs[0])
            room = room if room is not None and room.name in CREATED else None
            if not _fits_into(wiring, rule, op, room):
                break
            return changed(rule, into=op, between=tuple(between), room=room)
        if op.name not in COPIES:
            break
        between.append(op)
        value = op.outputs[0]
    return rule


def _fits_into(wiring: StateWiring, rule: StateRule, write: Op, room: Op | None) -> bool:
    """Whether the kernel can write the last state to where it is copied; room: what makes that."""
    graph = wiring.graph
    target, last = graph.values[write.inputs[0]], graph.values[rule.chain.last]
    whole = graph.owner(write.inputs[0]).elements == last.elements
    if rule.transposed or rule.in_blocks or not whole or target.shape != last.shape:
        return False
    readers = wiring.used_by[write.inputs[0]]
    return room is None or (
        target.dtype == last.dtype and all(reader.id >= write.id for reader in readers)
    )


def _anchor(wiring: StateWiring, rule: StateRule) -> Op:
    """The op in whose place the new one stands: the first behind all that it reads."""
    starts = [stream.value for stream in rule.streams.values()]
    starts += [rule.chain.first] if rule.chain.first is not None else []
    starts += [rule.into.inputs[0]] if rule.into is not None and rule.room is None else []
    made = max((op.id for op in map(wiring.producer, starts) if op is not None), default=-1)
    ops = sorted(rule.dropped, key=lambda op: op.id)
    late = [op for op in ops if op.id > made and op.repeats == _outside(rule)]
    return late[0] if late else ops[-1]


# -- the new op ------------------------------------------------------------------------------------


def _emit(editor: Editor, match: tuple[Op, StateRule]) -> None:
    """The op of a rule, and the views that make of its results what others read."""
    anchor, rule = match
    like = replace(editor.kernel_for(anchor), steps={}, holds=())
    batch, tokens, heads, width, columns = rule.sizes
    target, arguments = _called(editor, rule, like)
    out, last, into = rule.out.value, rule.chain.last, rule.into
    dtype = editor.values[out].dtype
    new = editor.value((batch, tokens, heads, columns), dtype, "activations", like.repeats)
    if into is not None:
        written, made = into.outputs[0], into.outputs[0] if rule.room is None else into.inputs[0]
        editor.emit(like, target, arguments, (new, made))
        if made != written and _is_used(editor.graph, written):
            editor.emit(like, "aten.alias.default", {"self": Ref(made)}, (written,), kind="view")
    else:
        kept = (batch, heads, width, columns) if arguments["keep"] else (0,)
        made = editor.value(kept, editor.values[last].dtype, "activations", like.repeats)
        editor.emit(like, target, arguments, (new, made))
        if arguments["keep"]:
            order = (0, 1, 3, 2) if rule.transposed else (0, 1, 2, 3)
            _stands_for(editor, like, last, made, order)
    _stands_for(editor, like, out, new, tuple("BTHD".index(d) for d in rule.out.order))


def _called(editor: Editor, rule: StateRule, like: Op) -> tuple[str, dict[str, Argument]]:
    """The target of the new op, and its arguments."""
    batch, tokens, _, width, columns = rule.sizes
    operands: dict[str, Argument] = {}
    for role, stream in rule.streams.items():
        sizes = {"B": batch, "T": tokens, "H": stream.heads}
        sizes["D"] = columns if role == "value" else width
        tensor, axes = editor.values[stream.value], [d for d in "BTHD" if d in stream.order]
        lies = list(stream.order) == axes and tensor.shape == tuple(sizes[d] for d in axes)
        if role in TABLES or lies:
            operands[role] = Ref(stream.value)
        else:
            operands[role] = laid_out(editor, like, _read(tensor, stream, sizes), axes)
    state = None if rule.chain.first is None else Ref(rule.chain.first)
    if rule.transposed and state is not None:
        state = editor.permuted(like, state, (0, 1, 3, 2))
    keep = rule.into is not None or _is_used(editor.graph, rule.chain.last, rule.ops)
    rest: dict[str, Argument] = {"state": state}
    if rule.in_blocks:
        rest |= {"rate": operands.pop("decay"), "scale": rule.scale, "keep": keep}
        return BLOCK_ATTENTION, operands | rest
    if rule.into is not None and rule.room is None:
        rest["into"] = Ref(rule.into.inputs[0])
    query, key = rule.norms
    rest |= {"scale": rule.scale, "query_norm": query, "key_norm": key}
    rest |= {"is_log": rule.is_log, "keep": keep}
    names = ("query", "key", "value", "decay", "beta", "bonus")
    target = "delta_rule" if "beta" in operands else "linear_attention"
    target = f"rooftrace.{target}{'_' if 'into' in rest else ''}.default"
    return target, {name: operands.get(name) for name in names} | rest


def _is_used(graph: OpGraph, value: int, but: Sequence[Op] = ()) -> bool:
    """Whether a value leaves the step, or another op reads it."""
    inside = {op.id for op in but}
    return value in graph.outputs or any(
        value in op.inputs and op.id not in inside for op in graph.ops
    )


def _read(tensor: Tensor, stream: StateStream, sizes: Mapping[str, int]) -> ReadValue:
    """A stream with its dimensions called by their letters; those of length 1 may be missing."""
    letters = iter([d for d in stream.order if sizes[d] != 1])
    dims = (full(next(letters), n) if n != 1 else Dim(()) for n in tensor.shape)
    return ReadValue(stream.value, tuple(dims))


def _stands_for(editor: Editor, like: Op, value: int, made: int, order: tuple[int, ...]) -> None:
    """A value of the graph becomes a view of what the new op made, and its views with it."""
    source, shape, item = editor.values[made], editor.values[value].shape, Ref(made)
    if order != tuple(range(len(order))):
        if tuple(source.shape[d] for d in order) == shape:
            transposed: dict[str, Argument] = {"self": item, "dims": order}
            _rehomed(editor, like, value, made, tuple(source.stride[d] for d in order))
            editor.emit(like, "aten.permute.default", transposed, (value,), kind="view")
            return
        item = editor.permuted(like, item, order)
    _rehomed(editor, like, value, made, Tensor.contiguous(shape))
    editor.reshape(like, item, value)


def _rehomed(editor: Editor, like: Op, value: int, made: int, stride: tuple[int, ...]) -> None:
    """Let a value, and what views its storage, lie in another storage."""
    old = editor.values[value].storage
    for index, tensor in enumerate(editor.values):
        if tensor.storage == old and index != made:
            editor.values[index] = replace(tensor, storage=made)
    tensor = editor.values[value]
    editor.values[value] = replace(tensor, stride=stride, repeats=like.repeats, then=None)
