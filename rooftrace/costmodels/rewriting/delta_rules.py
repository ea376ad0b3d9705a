"""Linear attention and delta rules as one op each, where a graph writes out what they do.

What is written out is found as a chain of states (`statechains`), and its streams get their roles
by what depends on them: the decay by what scales the state, key and value by what is added to it,
the query by what reads it (`staterules`).  Then the ops run on small random numbers beside the
formula of the op that would take their place (`statetrials`): where both agree to nine digits, they
are the same function.  So chunks, loops over tokens, solved or inverted triangles, masks and the
order of elementwise ops need no templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor
from rooftrace.costmodels.rewriting.indexing import Dim, ReadValue, full
from rooftrace.costmodels.rewriting.places import COPIES
from rooftrace.costmodels.rewriting.scans import laid_out
from rooftrace.costmodels.rewriting.statechains import CREATED, StateWiring, chains
from rooftrace.costmodels.rewriting.staterules import rule_of
from rooftrace.costmodels.rewriting.statetrials import TABLES, StateRule, StateStream
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

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
    there = {place.id: (place, rule) for rule in rules for place in [_place(wiring, rule)]}
    gone = {op.id for rule in rules for op in rule.dropped}
    made = {out for op in graph.ops if op.id in gone for out in op.outputs}
    gone |= {i for i in wiring.unused if not made.isdisjoint(graph.ops[i].inputs)}
    edit = Editor(graph)
    edit.rewrite(there, partial(_emit, edit), gone)
    return edit.done(), sum(graph.times(graph.ops[place]) for place in there)


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
            room = wiring.made_by(op.inputs[0])
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
    if rule.turned or rule.in_blocks or not whole or target.shape != last.shape:
        return False
    readers = wiring.used_by[write.inputs[0]]
    return room is None or (
        target.dtype == last.dtype and all(reader.id >= write.id for reader in readers)
    )


def _place(wiring: StateWiring, rule: StateRule) -> Op:
    """The op in whose place the new one stands: the first behind all that it reads."""
    starts = [stream.value for stream in rule.streams.values()]
    starts += [rule.chain.first] if rule.chain.first is not None else []
    starts += [rule.into.inputs[0]] if rule.into is not None and rule.room is None else []
    made = max((op.id for op in map(wiring.made_by, starts) if op is not None), default=-1)
    ops = sorted(rule.dropped, key=lambda op: op.id)
    late = [op for op in ops if op.id > made and op.repeats == _outside(rule)]
    return late[0] if late else ops[-1]


# -- the new op ------------------------------------------------------------------------------------


def _emit(editor: Editor, there: tuple[Op, StateRule]) -> None:
    """The op of a rule, and the views that make of its results what others read."""
    place, rule = there
    like = replace(editor.kernel_for(place), steps={}, holds=())
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
            order = (0, 1, 3, 2) if rule.turned else (0, 1, 2, 3)
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
    if rule.turned and state is not None:
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
            turned: dict[str, Argument] = {"self": item, "dims": order}
            _rehomed(editor, like, value, made, tuple(source.stride[d] for d in order))
            editor.emit(like, "aten.permute.default", turned, (value,), kind="view")
            return
        item = editor.permuted(like, item, order)
    _rehomed(editor, like, value, made, Tensor.contiguous(shape))
    editor.stands_for(like, item, value)


def _rehomed(editor: Editor, like: Op, value: int, made: int, stride: tuple[int, ...]) -> None:
    """Let a value, and what views its storage, lie in another storage."""
    old = editor.values[value].storage
    for index, tensor in enumerate(editor.values):
        if tensor.storage == old and index != made:
            editor.values[index] = replace(tensor, storage=made)
    tensor = editor.values[value]
    editor.values[value] = replace(tensor, stride=stride, repeats=like.repeats, then=None)
