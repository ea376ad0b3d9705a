"""Linear attention and delta rules as one op each, by the roles of their operands.

A chain of states (`statechains`) gives the streams their roles: the decay scales the state, key and
value are added to it, the query reads it.  Then the ops run on small random numbers, beside the
formula of the new op (`statetrials`): where both agree to nine digits, they are the same function.
So chunks, loops over tokens, solved or inverted triangles, masks and the order of pointwise ops
need no templates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as changed

from msgspec.structs import replace

from rooftrace.costmodels.rewrites.dataflow import COPIES
from rooftrace.costmodels.rewrites.editing import Editor, edited
from rooftrace.costmodels.rewrites.indexing import Dim, ReadValue, full
from rooftrace.costmodels.rewrites.scans import laid_out
from rooftrace.costmodels.rewrites.statechains import (
    CREATED,
    LAYOUT,
    PARTS,
    StateChain,
    StateRegion,
    StateWiring,
    chains,
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
# Streams in the roles of query, key, value, decay and beta, by what depends on what; `statetrials`
# verifies them.

_MOVED = LAYOUT | PARTS | CREATED | {"aten.copy_", "aten.stack", "aten.cat"}
_BRANCHES = frozenset(f"aten.{name}" for name in ("clamp_min", "gt", "ge", "lt", "le", "eq"))
"""Ops that branch by the size of a number: random ones may take one branch only."""
_ORDERS = ("BTHD", "BHTD", "TBHD", "BHDT")
"""The dimension orders of a stream: batch, token, head, channel."""


def rule_of(wiring: StateWiring, chain: StateChain, delta: bool) -> StateRule | None:
    """The rule that the region around a chain computes; None for another function."""
    graph = wiring.graph
    shape = graph.values[chain.last].shape
    if len(shape) != 4:
        return None
    region = StateRegion(wiring, chain)
    for outs in _results(region):
        for out, transposed in itertools.product(reversed(outs), (False, True)):
            for roles in _roles(region, out, transposed):
                if ("beta" in roles) != delta:
                    continue
                rule = _with_roles(region, out, roles, transposed)
                if rule is not None:
                    return rule
    return None


def _results(region: StateRegion) -> Iterator[list[int]]:
    """The candidates for the result, each with its copies in other layouts."""
    outs: list[int] = []
    before = set(region.ops)
    for out in region.grown():
        new = [region.ops[i] for i in region.ops.keys() - before]
        before = set(region.ops)
        if outs and not all(op.name in _MOVED and not _widens(region.graph, op) for op in new):
            yield outs
            outs = []
        outs.append(out)
    if outs:
        yield outs


def _widens(graph: OpGraph, op: Op) -> bool:
    """Whether an op copies a tensor into a wider precision, as a reader of the result may do."""
    if op.name != "aten._to_copy":
        return False
    before, after = (graph.values[i].dtype for i in (op.inputs[0], op.outputs[0]))
    return precision(after).width > precision(before).width


def _roles(region: StateRegion, out: int, transposed: bool) -> Iterator[dict[str, int]]:
    """The leaf of each role, by what depends on it."""
    streams, chain = region.streams, region.chain
    fixed = region.fixed | {chain.first}

    def behind_all(values: frozenset[int]) -> frozenset[int]:
        return frozenset().union(*(streams.get(v, frozenset()) for v in values)) - {chain.first}

    decay = behind_all(chain.decays)
    decay = decay - fixed or decay or (chain.decays if len(chain.decays) == 1 else decay)
    sides = [behind_all(side) - decay - fixed for side in (chain.columns, chain.rows)]
    keys, others = sides[::-1] if transposed else sides
    query = streams.get(out, frozenset()) - streams.get(chain.last, frozenset()) - fixed
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
    """Tables of decays by position in a block, of keys, queries and pairs; or the bonus of a token
    in its own result."""
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
    """The orders of these dimensions that fit a shape; those of length 1 may be missing."""
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
    """The values of a stream for a kernel: from its leaf to where it meets another one."""
    if role in TABLES:
        long = [n for n in region.graph.values[leaf].shape if n != 1]
        return [StateStream(leaf, "HIJ"[: len(long)], sizes[2])]
    batch, tokens, heads, width, columns = sizes
    graph = region.graph
    counts = [h for h in range(heads, 0, -1) if heads % h == 0]
    if role not in ("query", "key"):
        counts = counts[:1]
    moving = leaf not in region.fixed and leaf in region.leaves
    widths = {"query": width, "key": width, "value": columns, "beta": None, "bonus": width}
    last = (widths[role],) if role in widths else (None, width)
    result = []
    for value in _line(region, leaf):
        for channels, count in itertools.product(last, counts):
            named = {"B": batch, "T": tokens, "H": count} if moving else {"H": count}
            named |= {} if channels is None else {"D": channels}
            orders = _orders(graph.values[value].shape, named)
            result += [StateStream(value, order, count) for order in orders]
    return result


def _nearest(items: Sequence[StateStream], order: str) -> StateStream:
    """The last candidate, with its dimensions in this order if they can have it."""
    last = [item for item in items if item.value == items[-1].value]
    alike = [item for item in last if [d for d in order if d in item.order] == list(item.order)]
    return (alike or last)[0]


def _line(region: StateRegion, leaf: int) -> list[int]:
    """The values that dominate all uses of a leaf, before it meets another stream."""
    readers, only = region.wiring.used_by, frozenset({leaf})
    streams = region.streams if leaf in region.fixed else region.moving
    alone = {leaf}
    for op in sorted(region.ops.values(), key=lambda op: op.id):
        if len(op.outputs) != 1 or streams.get(op.outputs[0]) != only:
            continue
        if any(streams.get(i) == only and i not in alone for i in op.inputs):
            continue
        alone.add(op.outputs[0])

    def passes(start: int, through: int) -> bool:
        """Whether all paths from `start` go through another value."""
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


# -- trials ----------------------------------------------------------------------------------------


def _with_roles(
    region: StateRegion, out: int, roles: Mapping[str, int], transposed: bool
) -> StateRule | None:
    """The rule with these roles, its streams read as early as the op allows."""
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
            return _from_earliest(region, rule, choices)
    return None


def _from_earliest(
    region: StateRegion, rule: StateRule, choices: Mapping[str, Sequence[StateStream]]
) -> StateRule:
    """The rule with each stream read as early as the op allows: all at once, else one by one."""
    earliest = dict(rule.streams)
    for role, items in choices.items():
        fit = (s for s in items if _ops_of(region, changed(rule, streams={**earliest, role: s})))
        earliest[role] = next(fit, earliest[role])
    checked = _checked(region, changed(rule, streams=earliest), tuple(choices))
    if checked is not None:
        return checked
    for role, items in choices.items():
        for stream in items[:-1]:
            further = changed(rule, streams={**rule.streams, role: stream})
            checked = _checked(region, further, (role,))
            if checked is not None:
                rule = checked
                break
    return rule


def _ops_of(region: StateRegion, rule: StateRule) -> list[Op] | None:
    """The ops between the streams and the results; None where other ops read values inside."""
    ends = (rule.out.value, rule.chain.last)
    ops = region.ops_between(rule.starts, ends)
    return ops if ops and region.is_closed(ops, ends) else None


def _checked(region: StateRegion, rule: StateRule, roles: Sequence[str] = ()) -> StateRule | None:
    """The rule with its ops and settings, if they compute it and nothing else reads inside.

    roles: of the new streams; the settings of the others are decided.
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
        (*_norm_epsilons(region, rule, role), None) if role in roles else (norm,)
        for role, norm in zip(("query", "key"), rule.norms, strict=True)
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
    """Whether an op branches on a number of a stream other than the length of a row."""
    if op.name not in _BRANCHES or not region.streams[op.outputs[0]]:
        return False
    source = region.wiring.producer(op.inputs[0])
    return source is None or source.name != "aten.linalg_vector_norm"


def _stands_alone(region: StateRegion, rule: StateRule, outside: tuple[int, ...]) -> bool:
    """Whether one op in the same iteration can read all operands before the others run."""
    graph, ops = region.graph, rule.ops
    if any(ref.then and ref.then.repeat in outside for op in ops for ref in op.reads):
        return False
    tensors = [graph.values[value] for value in rule.starts]
    if any(tensor.repeats != outside[: len(tensor.repeats)] for tensor in tensors):
        return False
    made = _last_producer(region.wiring, rule.starts)
    writers = (w for t in tensors for w in region.wiring.writers.get(t.storage, ()))
    return not any(made < writer.id < ops[-1].id for writer in writers)


def _last_producer(wiring: StateWiring, values: Iterable[int]) -> int:
    """The id of the last op that makes one of these values; -1 where all are external."""
    return max((op.id for op in map(wiring.producer, values) if op is not None), default=-1)


def _norm_epsilons(region: StateRegion, rule: StateRule, role: str) -> Iterator[float]:
    """Numbers that are added to the sum of squares of a stream, or squares of its least length."""
    leaves = region.moving.get(rule.streams[role].value)
    numbers = dict[float, None]()
    for op in rule.ops:
        if op.name in ("aten.add", "aten.clamp_min") and region.moving[op.outputs[0]] == leaves:
            number = op.arguments.get("other", op.arguments.get("min"))
            if isinstance(number, float):
                numbers[number if op.name == "aten.add" else number * number] = None
    return iter(numbers)


# -- delta rules -----------------------------------------------------------------------------------

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


def _with_cache(wiring: StateWiring, rule: StateRule) -> StateRule:
    """The rule with the write of its last state into a cache, if only that reads the state."""
    value, between = rule.chain.last, list[Op]()
    inside = {op.id for op in rule.ops}
    while value not in wiring.graph.outputs:
        outside = [op for op in wiring.used_by[value] if op.id not in inside]
        if len(outside) != 1 or outside[0].repeats != rule.outside:
            break
        op = outside[0]
        if op.name == "aten.copy_" and op.inputs[-1] == value:
            cache = wiring.producer(op.inputs[0])
            cache = cache if cache is not None and cache.name in CREATED else None
            if not _fits_into(wiring, rule, op, cache):
                break
            return changed(rule, write=op, between=tuple(between), cache=cache)
        if op.name not in COPIES:
            break
        between.append(op)
        value = op.outputs[0]
    return rule


def _fits_into(wiring: StateWiring, rule: StateRule, write: Op, cache: Op | None) -> bool:
    """Whether the kernel can write the last state into its copy; cache: the op that makes that."""
    graph = wiring.graph
    target, last = graph.values[write.inputs[0]], graph.values[rule.chain.last]
    fills = graph.owner(write.inputs[0]).elements == last.elements
    if rule.transposed or rule.in_blocks or not fills or target.shape != last.shape:
        return False
    readers = wiring.used_by[write.inputs[0]]
    return cache is None or (
        target.dtype == last.dtype and all(reader.id >= write.id for reader in readers)
    )


def _anchor(wiring: StateWiring, rule: StateRule) -> Op:
    """The op that the new one replaces: the first after all operands are made."""
    into = [rule.write.inputs[0]] if rule.write is not None and rule.cache is None else []
    made = _last_producer(wiring, [*rule.starts, *into])
    ops = sorted(rule.dropped, key=lambda op: op.id)
    late = [op for op in ops if op.id > made and op.repeats == rule.outside]
    return late[0] if late else ops[-1]


# -- the new op ------------------------------------------------------------------------------------


def _emit(editor: Editor, match: tuple[Op, StateRule]) -> None:
    """Emit the op of a rule, and the views of its results that other ops read."""
    anchor, rule = match
    like = replace(editor.kernel_for(anchor), steps={}, holds=())
    batch, tokens, heads, width, columns = rule.sizes
    target, arguments = _called(editor, rule, like)
    out, last, write = rule.out.value, rule.chain.last, rule.write
    dtype = editor.values[out].dtype
    new = editor.value((batch, tokens, heads, columns), dtype, "activations", like.repeats)
    if write is not None:
        written = write.outputs[0]
        made = written if rule.cache is None else write.inputs[0]
        editor.emit(like, target, arguments, (new, made))
        if made != written and _is_used(editor.graph, written):
            editor.emit(like, "aten.alias.default", {"self": Ref(made)}, (written,), kind="view")
    else:
        kept = (batch, heads, width, columns) if arguments["keep"] else (0,)
        made = editor.value(kept, editor.values[last].dtype, "activations", like.repeats)
        editor.emit(like, target, arguments, (new, made))
        if arguments["keep"]:
            order = (0, 1, 3, 2) if rule.transposed else (0, 1, 2, 3)
            _becomes(editor, like, last, made, order)
    _becomes(editor, like, out, new, tuple("BTHD".index(d) for d in rule.out.order))


def _called(editor: Editor, rule: StateRule, like: Op) -> tuple[str, dict[str, Argument]]:
    """The target of the new op, and its arguments."""
    batch, tokens, _, width, columns = rule.sizes
    operands: dict[str, Argument] = {}
    for role, stream in rule.streams.items():
        sizes = {"B": batch, "T": tokens, "H": stream.heads}
        sizes["D"] = columns if role == "value" else width
        tensor, axes = editor.values[stream.value], [d for d in "BTHD" if d in stream.order]
        in_order = list(stream.order) == axes and tensor.shape == tuple(sizes[d] for d in axes)
        if role in TABLES or in_order:
            operands[role] = Ref(stream.value)
        else:
            operands[role] = laid_out(editor, like, _read(tensor, stream, sizes), axes)
    state = None if rule.chain.first is None else Ref(rule.chain.first)
    if rule.transposed and state is not None:
        state = editor.permuted(like, state, (0, 1, 3, 2))
    keep = rule.write is not None or _is_used(editor.graph, rule.chain.last, rule.ops)
    rest: dict[str, Argument] = {"state": state}
    if rule.in_blocks:
        rest |= {"rate": operands.pop("decay"), "scale": rule.scale, "keep": keep}
        return BLOCK_ATTENTION, operands | rest
    if rule.write is not None and rule.cache is None:
        rest["into"] = Ref(rule.write.inputs[0])
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
    """A stream with its letters as axes; those of length 1 may be missing."""
    letters = iter([d for d in stream.order if sizes[d] != 1])
    dims = (full(next(letters), n) if n != 1 else Dim(()) for n in tensor.shape)
    return ReadValue(stream.value, tuple(dims))


def _becomes(editor: Editor, like: Op, value: int, made: int, order: tuple[int, ...]) -> None:
    """Let a value of the graph, and its views, be views of a result of the new op."""
    source, shape, item = editor.values[made], editor.values[value].shape, Ref(made)
    if order != tuple(range(len(order))):
        if tuple(source.shape[d] for d in order) == shape:
            dims: dict[str, Argument] = {"self": item, "dims": order}
            _move(editor, like, value, made, tuple(source.stride[d] for d in order))
            editor.emit(like, "aten.permute.default", dims, (value,), kind="view")
            return
        item = editor.permuted(like, item, order)
    _move(editor, like, value, made, Tensor.contiguous(shape))
    editor.reshape(like, item, value)


def _move(editor: Editor, like: Op, value: int, made: int, stride: tuple[int, ...]) -> None:
    """Move a value, and all others of its storage, to the storage of a new one."""
    editor.move(value, made)
    tensor = editor.values[value]
    editor.values[value] = replace(tensor, stride=stride, repeats=like.repeats, then=None)
