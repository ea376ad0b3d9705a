"""Rewrites to the causal-conv1d kernel, to the index-score kernel of sparse attention, and to one
convolution in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as changed

from rooftrace.costmodels.rewrites.dataflow import ValueFlow, dense_like, reads_across
from rooftrace.costmodels.rewrites.editing import (
    Editor,
    edited,
    operand,
    released,
    rewritten,
    with_matches,
)
from rooftrace.costmodels.rewrites.indexing import Atom, Axis, Dim, ReadValue, Walker, full, renamed
from rooftrace.costmodels.rewrites.patterns import (
    Pat,
    can_be_one,
    match,
    ops_between,
    row_product,
    swapped,
)
from rooftrace.costmodels.rewrites.recurrences import ends
from rooftrace.costmodels.rewrites.scans import blank, laid_out, memory_order, onto, replaces
from rooftrace.graph import Argument, Op, OpGraph, Ref

# -- index scores ----------------------------------------------------------------------------------
# Scores by which sparse attention chooses keys, as one kernel.
#
# I[b, s, l] = sum over h of w[b, s, h] relu(scale q[b, s, h] k[b, l]) (DeepSeek-V3.2, section 2.1).
# As written, the scores of every head go through memory in fp32, and keys are copied for each
# query; `fp8_mqa_logits` of DeepGEMM adds the heads up before it writes.

INDEX_SCORES = "rooftrace.index_scores.default"
_KEYS = (swapped("key"), Pat("expand", swapped("key"), bind="wide"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Scores of the keys for each query, added up over heads."""

    total: Op  # adds up over heads
    query: int  # [B, S, H, D]
    key: int  # [B, L, D]
    weights: int  # [B, S, H]
    scale: float
    inside: frozenset[int] = frozenset()


def fuse_index_scores(graph: OpGraph) -> tuple[OpGraph, int]:
    """relu(q k) of several heads with shared keys, weighted and summed over heads, as one op."""
    return rewritten(graph, ("aten.bmm", "aten.sum"), _match, _emit)


def _emit(edit: Editor, scores: _Scores) -> None:
    op, values = scores.total, edit.values
    (out,) = op.outputs
    batch, length, _ = values[scores.key].shape
    old = values[out]
    arguments: dict[str, Argument] = {
        "query": Ref(scores.query), "key": Ref(scores.key), "weights": Ref(scores.weights),
        "scale": scores.scale, "dtype": f"dtype:{old.dtype}",
    }  # fmt: skip
    shape = (batch, values[scores.query].shape[1], length)
    made = edit.made(op, INDEX_SCORES, arguments, shape, old.dtype, old.role)
    edit.becomes(op, out, made)


def _match(flow: ValueFlow, total: Op) -> _Scores | None:
    values = flow.values
    added = _summands(flow, total)
    by_head = None if added is None else _product_of_heads(flow, added[0])
    key = None if by_head is None else _key(flow, operand(by_head[0], "mat2").id)
    if added is None or by_head is None or key is None:
        return None
    product, scale = by_head
    batch, length, width = values[key].shape
    rows, heads, _ = values[operand(product, "self").id].shape
    sizes = (batch, rows // batch, heads)
    query = flow.root_of_shape(operand(product, "self").id, (*sizes, width))
    weights = flow.root_of_shape(added[1], sizes)
    if query is None or weights is None or values[total.outputs[0]].elements != rows * length:
        return None
    start = {query, key, weights}
    inside = ops_between(flow, start, total.outputs)
    if not can_be_one(flow, inside, total.outputs, start):
        return None
    return _Scores(
        total=total, query=query, key=key, weights=weights, scale=scale, inside=inside
    )  # fmt: skip


def _summands(flow: ValueFlow, total: Op) -> tuple[int, int] | None:
    """The scores of every head and the weights of the heads, of which an op is the sum."""
    values, source = flow.values, operand(total, "self").id
    shape = values[source].shape
    if total.name == "aten.bmm":
        weighted = shape[1] == 1 and shape[2] > 1
        return (operand(total, "mat2").id, source) if weighted else None
    heads = total.arguments.get("dim") in ((2,), (-2,), 2, -2) and len(shape) == 4
    split = row_product(flow, flow.root(source)) if heads else None
    return None if split is None or total.arguments.get("keepdim", False) else split


def _product_of_heads(flow: ValueFlow, value: int) -> tuple[Op, float] | None:
    """The product behind the relu of the scores of every head, and the factor on its result."""
    scale, cut = 1.0, False
    while True:
        op = flow.producer(flow.root(value))
        if op is None:
            return None
        number = op.arguments.get("other")
        if op.name == "aten.bmm":
            return (op, scale) if cut and scale > 0 else None
        if op.name == "aten.relu":
            cut = True
        elif op.name in ("aten.mul", "aten.div") and isinstance(number, (int, float)) and number:
            scale = scale * number if op.name == "aten.mul" else scale / number
        else:
            return None
        value = op.inputs[0]


def _key(flow: ValueFlow, value: int) -> int | None:
    """The keys [B, L, D] that a value is the transpose of, the same ones for every query."""
    values, bound = flow.values, match(flow, value, _KEYS)
    if bound is None:
        return None
    wide, shape = bound.get("wide"), values[bound["key"]].shape
    copied = wide is not None and (
        len(values[wide.outputs[0]].shape) != 4 or values[wide.outputs[0]].stride[1]
    )
    return None if copied or len(shape) != 3 else flow.root(bound["key"], shape)


# -- causal convolutions ---------------------------------------------------------------------------
# Convolutions over time that see no later token, as the kernel of causal-conv1d.
#
# A module pads a depthwise convolution on both sides and slices its result, or puts zeros or the
# last columns in front; a step of one token keeps these columns in a state.  The kernel reads x
# once, adds the bias, applies SiLU, and updates the state.

CAUSAL_CONV = "rooftrace.causal_conv1d.default"
CONV_UPDATE = "rooftrace.causal_conv1d_update.default"


@dataclass(frozen=True, slots=True)
class _Conv:
    """x, y and state are read at axes b, c and t; the filters [C, K] at c and k.

    anchor: the op that it replaces.  moved: the values of the state after the op.  dropped: ids of
    the ops that made them.
    """

    x: ReadValue
    y: ReadValue
    weight: ReadValue
    bias: ReadValue | None
    anchor: Op
    activation: str = ""
    state: ReadValue | None = None
    moved: tuple[int, ...] = ()
    dropped: frozenset[int] = frozenset()


def fuse_causal_convs(graph: OpGraph) -> tuple[OpGraph, int]:
    """Causal depthwise convolutions, with bias, SiLU and state, as one kernel each."""
    if not any(op.name in ("aten.convolution", "aten.sum") for op in graph.ops):
        return graph, 0
    convs = {conv.anchor.id: conv for conv in _convs(Walker(graph))}
    dropped = {number for conv in convs.values() for number in conv.dropped}
    return with_matches(graph, convs, _emit_conv, dropped)


def _convs(walker: Walker) -> Iterator[_Conv]:
    read = {"aten.convolution": _conv, "aten.sum": _conv_of_one_token}
    for op in walker.graph.ops:
        if op.name in read and op.part == "forward" and not reads_across(op):
            conv = read[op.name](walker, op)
            if conv is not None:
                yield _with_ending(walker, conv)


def _conv(walker: Walker, op: Op) -> _Conv | None:
    values, arguments = walker.values, op.arguments
    source, weight, *bias = op.inputs
    channels, each, length = (*values[weight].shape, 0, 0, 0)[:3]
    usual = {"stride": (1,), "dilation": (1,), "transposed": False, "groups": channels}
    if len(values[weight].shape) != 3 or each != 1 or channels < 2:
        return None
    if any(arguments.get(name, value) != value for name, value in usual.items()):
        return None
    if "groups" not in arguments or values[source].shape[1] != channels:
        return None
    entered = _input(walker, op, source, length - 1, int(arguments["padding"][0]))
    if entered is None:
        return None
    x, state, first, written = entered
    tokens = values[x].shape[2]
    made = _of_tokens(walker, op.outputs[0], first, tokens)
    if made is None:
        return None
    shape = values[x].shape
    dims = tuple(full(axis, n) for axis, n in zip("bct", shape, strict=True))
    before = None
    if state is not None:
        before = ReadValue(state, (*dims[:2], full("l", values[state].shape[2])))
    filters = ReadValue(weight, (full("c", channels), Dim(()), full("k", length)))
    return _Conv(
        x=walker.source(ReadValue(x, dims)),
        y=ReadValue(made, dims),
        weight=walker.source(filters),
        bias=walker.source(ReadValue(bias[0], (full("c", channels),))) if bias else None,
        anchor=walker.graph.ops[walker.graph.producers[made]],
        state=before,
        moved=() if written is None else written.outputs,
        dropped=frozenset() if written is None else frozenset({written.id}),
    )


def _input(
    walker: Walker, op: Op, source: int, before: int, padding: int
) -> tuple[int, int | None, int, Op | None] | None:
    """x, the state before it, the index of the first token in the results, and the op that writes
    the state.  before: columns that a filter sees before a token."""
    values = walker.values
    if padding == before:
        return source, None, 0, None
    made = walker.maker(source)
    if padding or made is None:
        return None
    if made.name == "aten.constant_pad_nd" and not made.arguments.get("value", 0):
        pad = tuple(made.arguments["pad"])
        front = pad[0] - before
        return (made.inputs[0], None, front, None) if front >= 0 and not any(pad[1:]) else None
    if (
        made.name != "aten.cat"
        or int(made.arguments.get("dim", 0)) % 3 != 2
        or len(made.inputs) != 2
    ):
        return None
    state, x = made.inputs
    front = values[state].shape[2] - before
    if front < 0:
        return None
    others = [reader for reader in ends(walker, source) if reader.id != op.id]
    if blank(walker, state):
        return (x, None, front, None) if not others else None
    written = others[0] if len(others) == 1 else None
    return (
        (x, state, front, written) if written and _moves(walker, written, source, state) else None
    )


def _moves(walker: Walker, written: Op, source: int, state: int) -> bool:
    """Whether an op writes the last columns of state and x into the state."""
    values = walker.values
    if written.name != "aten.copy_" or written.inputs[0] != state:
        return False
    shape = values[state].shape
    read = ReadValue(written.inputs[1], walker.direct(state).dims)
    pieces = walker.holding(read, source) or []
    start = values[source].shape[2] - shape[2]
    last = Dim(full(2, shape[2]).atoms, start)
    return len(pieces) == 1 and pieces[0].dims == (*read.dims[:2], last)


def _of_tokens(walker: Walker, made: int, first: int, tokens: int) -> int | None:
    """The results of the tokens alone: the result itself, or its only slice."""
    graph = walker.graph
    length = graph.values[made].shape[2]
    if length == tokens and first == 0:
        return made
    op = walker.only_reader(made)
    if op is None or op.name != "aten.slice" or op.arguments.get("step", 1) != 1:
        return None
    start = op.arguments.get("start") or 0
    start = start + length if start < 0 else start
    shape = graph.values[op.outputs[0]].shape
    fits = int(op.arguments.get("dim", 0)) % 3 == 2 and (start, shape[2]) == (first, tokens)
    return op.outputs[0] if fits else None


# -- a step of one token ---------------------------------------------------------------------------


def _conv_of_one_token(walker: Walker, op: Op) -> _Conv | None:
    """A sum of products of the last columns with the filters, the newest of which is x."""
    y, values = walker.fresh(op.outputs[0]), walker.values
    parts = walker.expanded(y, lambda f: False)
    if len(parts) != 2 or len(y.axes) > 2:
        return None
    for columns, filters in (parts, parts[::-1]):
        if len(columns.dims) != 3 or filters.axes == columns.axes:
            continue
        batch, channel, column = columns.dims
        if y.axes & axes_of_dims(column) or not filters.axes <= axes_of_dims(channel, column):
            continue
        moved = _moved_on(walker, columns.value, op)
        if moved is None or values[values[filters.value].storage].role != "weights":
            continue
        x, state, dropped, others = moved
        shape = values[state].shape
        if values[x].shape[:2] != shape[:2]:
            return None
        if columns.dims != tuple(_in_full(d, n) for d, n in zip(columns.dims, shape, strict=True)):
            return None
        names = {a.axis: [(a, Atom(to, 1, a.size))] for dim, to in
                 zip((batch, channel, column), "bck", strict=True) for a in dim.atoms}  # fmt: skip
        made, weight = renamed(y, names), renamed(filters, names)
        dims = tuple(full(axis, n) for axis, n in zip("bcl", shape, strict=True))
        if made is None or weight is None or shape[2] < 2:
            return None
        return _Conv(
            x=walker.source(ReadValue(x, (*dims[:2], Dim(()))[: len(values[x].shape)])),
            y=made, weight=weight, bias=None, anchor=op, state=ReadValue(state, dims),
            moved=(columns.value, *others), dropped=dropped,
        )  # fmt: skip
    return None


def _in_full(dim: Dim, size: int) -> Dim:
    """A dim that reads all of a dimension, if it is one."""
    return dim if dim.start == 0 and [a.size for a in dim.atoms] == [size] * (size > 1) else Dim(())


def axes_of_dims(*dims: Dim) -> frozenset[Axis]:
    """The axes of some dims."""
    return frozenset(atom.axis for dim in dims for atom in dim.atoms)


def _moved_on(
    walker: Walker, value: int, reader: Op
) -> tuple[int, int, frozenset[int], tuple[int, ...]] | None:
    """x, the state before, ids of the ops that made the new one, and further values of it."""
    values = walker.values
    op = walker.producer(value)
    if op is None or len(op.inputs) != 2 or reads_across(op) or op.repeats != reader.repeats:
        return None
    products = {r.id for r in walker.users[value] if r.name == "aten.mul"}
    others = [r for r in walker.users[value] if r.id not in products]
    if len(products) != 1:
        return None
    if op.name == "aten.cat":
        old, x = op.inputs
        before = walker.source(walker.fresh(old))
        rest = values[before.value].shape[-1:]
        last = before.dims[-1] if before.dims else Dim(())
        dim = int(op.arguments.get("dim", 0)) % len(values[value].shape)
        if dim != 2 or last.start != 1 or rest != values[value].shape[-1:]:
            return None
        copies = [r for r in others if r.name == "aten.copy_" and r.inputs[0] == before.value]
        if others != copies or values[values[before.value].storage].role != "kv":
            return None
        gone = frozenset({op.id, *(r.id for r in copies)})
        return x, before.value, gone, tuple(i for r in copies for i in r.outputs)
    if op.name != "aten.copy_":
        return None
    state, source = op.inputs
    rolled = walker.maker(source)
    if rolled is None or rolled.name != "aten.roll" or rolled.inputs != (state,):
        return None
    back, along = rolled.arguments.get("shifts"), rolled.arguments.get("dims")
    if back != (-1,) or along not in ((-1,), (2,)) or len(others) != 1:
        return None
    (newest,) = others
    index = newest.arguments.get("index")
    length = values[state].shape[-1]
    if newest.name != "aten.select" or index not in (-1, length - 1):
        return None
    writes = walker.users[newest.outputs[0]]
    if len(writes) != 1 or writes[0].name != "aten.copy_" or writes[0].id > min(products):
        return None
    if writes[0].inputs[0] != newest.outputs[0]:
        return None
    return writes[0].inputs[1], state, frozenset({op.id, writes[0].id, newest.id}), ()


# -- bias and SiLU ---------------------------------------------------------------------------------


def _with_ending(walker: Walker, conv: _Conv) -> _Conv:
    """The convolution with bias and SiLU after it, as long as nothing else reads it."""
    now = conv.y
    while True:
        op = walker.only_reader(now.value)
        if op is None:
            return conv
        if op.name == "aten.silu":
            after = ReadValue(op.outputs[0], now.dims)
            return replace(conv, y=after, anchor=op, activation="silu")
        bias = _bias(walker, op, now) if conv.bias is None else None
        if bias is not None:
            now, by_channel = bias
            conv = replace(conv, y=now, anchor=op, bias=by_channel)
            continue
        if op.kind != "view" or op.repeats != conv.anchor.repeats:
            return conv
        following = onto(walker, op.outputs[0], now)
        if following is None:
            return conv
        now = following


def _bias(walker: Walker, op: Op, now: ReadValue) -> tuple[ReadValue, ReadValue] | None:
    """A sum, and the weight that the op adds to each channel."""
    after = onto(walker, op.outputs[0], now) if op.name == "aten.add" else None
    if after is None:
        return None
    sides = [walker.source(walker.aligned(i, after.dims)) for i in op.inputs if i != now.value]
    values = walker.values
    for side in sides:
        if side.axes == {"c"} and values[values[side.value].storage].role == "weights":
            return after, side
    return None


def _emit_conv(edit: Editor, conv: _Conv) -> None:
    like, values = edit.kernel_for(conv.anchor), edit.values
    x = laid_out(edit, like, conv.x, "bct")
    order, strides = memory_order(conv.y, values[conv.y.value], "bct")
    arguments: dict[str, Argument] = {
        "x": x,
        "weight": laid_out(edit, like, conv.weight, "ck"),
        "bias": None if conv.bias is None else laid_out(edit, like, conv.bias, "c"),
        "activation": conv.activation,
        "order": order,
    }
    old = values[conv.y.value]
    y = edit.value(values[x.id].shape, old.dtype, old.role, like.repeats, stride=strides)
    if conv.state is not None:
        state = laid_out(edit, like, conv.state, "bcl")
        moved = edit.view(state, values[state.id].shape, values[state.id].stride, like.repeats)
        edit.emit(like, CONV_UPDATE, {"state": state, **arguments}, (moved, y))
        for value in conv.moved:
            values[value] = changed(values[value], storage=values[state.id].storage)
            edit.reshape(like, Ref(moved), value)
    else:
        edit.emit(like, CAUSAL_CONV, arguments, (y,))
    replaces(edit, like, y, conv.y, "bct")


# -- convolutions over groups of channels, one after the other -------------------------------------


def with_groups(graph: OpGraph) -> OpGraph:
    """Convolutions of parts of one image's channels, whose results are joined, are one in groups.

    Their weights are stored as one tensor; so are those of their gradients.
    """
    names = {op.name for op in graph.ops if op.part == "forward"}
    if graph.processes > 1 or not {"aten.convolution", "aten.cat"} <= names:
        return graph
    graph = graph.expand()
    flow = ValueFlow(graph)
    places, gone = dict[int, tuple[Sequence[Op], int]](), set[int]()  # lanes and result, by op
    for join in graph.ops:
        lanes = _joined_convolutions(flow, join)
        if lanes is None:
            continue
        back = [op for lane in lanes if (op := _backward_of(flow, lane)) is not None]
        image = bool(back) and _wants_image(back[0])
        sums = _alone([op.outputs[0] for op in back], flow) if image else None
        if back and (len(back) < len(lanes) or (image and sums is None)):
            continue
        if not _in_a_row(flow, [op.inputs[0] for op in back or lanes]):
            continue
        places[join.id] = lanes, join.outputs[0]
        gone |= {op.id for op in (*lanes, join, *back, *([sums] if sums else []))}
        if back:
            places[max(op.id for op in back)] = back, sums.outputs[0] if sums else -1
    joined = edited(graph, places, lambda edit, place: _emit_groups(edit, *place), gone)
    return released(joined, graph).verify() if places else graph


def _alone(values: Sequence[int], flow: ValueFlow) -> Op | None:
    """The `cat` that alone reads values, along their channels; None for other readers."""
    readers = {user.id: user for value in values for user in flow.users[value]}
    (reader,) = readers.values() if len(readers) == 1 else (None,)
    is_join = reader is not None and reader.name == "aten.cat" and list(reader.inputs) == [*values]
    return reader if is_join and reader and reader.arguments.get("dim", 0) in (1, -3) else None


def _in_a_row(flow: ValueFlow, values: Sequence[int]) -> bool:
    """Whether values are the parts, in order, of the channels of one image."""
    first = flow.location(values[0])
    return first is not None and flow.distance(values) == first.shape[1] * first.stride[1]


def _joined_convolutions(flow: ValueFlow, join: Op) -> list[Op] | None:
    """The convolutions whose results a `cat` joins, of parts of one image with own weights."""
    made = [flow.producer(value) for value in join.inputs]
    lanes = [op for op in made if op is not None and op.name == "aten.convolution"]
    if join.part != "forward" or not 1 < len(lanes) == len(made) or reads_across(join):
        return None
    values, alike = flow.values, set()
    for op in lanes:
        rest = {n: None if type(a) is Ref else repr(a) for n, a in op.arguments.items()}
        sizes = [(values[v].shape, values[v].stride, values[v].dtype) for v in op.inputs]
        alike.add((*rest.items(), *sizes))
    weights = [v for op in lanes for v in op.inputs[1:]]
    own = all(values[v].role == "weights" and values[v].storage == v for v in weights)
    parts = [op.inputs[0] for op in lanes]
    whole = _alone([op.outputs[0] for op in lanes], flow) is join and len({*weights}) == len(
        weights
    )
    fits = len(alike) == 1 and own and whole and _in_a_row(flow, parts)
    return lanes if fits and not lanes[0].arguments.get("transposed") else None


def _backward_of(flow: ValueFlow, lane: Op) -> Op | None:
    users = flow.users[lane.inputs[1]]
    return next((op for op in users if op.name == "aten.convolution_backward"), None)


def _wants_image(op: Op) -> bool:
    """Whether a backward makes the gradient of the image."""
    mask = op.arguments.get("output_mask")
    return not isinstance(mask, tuple) or bool(mask[0])


def _emit_groups(edit: Editor, lanes: Sequence[Op], out: int) -> None:
    """One convolution, or its backward, with a group for each lane; out: -1 for no such result."""
    like, count = lanes[0], len(lanes)
    arguments = dict(like.arguments)
    for name, item in like.arguments.items():
        if type(item) is Ref:
            arguments[name] = _together(edit, like, [operand(op, name).id for op in lanes])
    arguments["groups"] = count * int(str(like.arguments["groups"]))
    first = int(out >= 0)  # results after that are of weights
    outputs = [out] * first
    for column in zip(*(op.outputs[first:] for op in lanes), strict=True):
        part = edit.values[column[0]]
        shape = (count * part.shape[0], *part.shape[1:])
        outputs.append(edit.value(shape, part.dtype, part.role, ()))
    edit.emit(like, like.target, arguments, tuple(outputs))
    for place, op in enumerate(lanes):
        for value, whole in zip(op.outputs[first:], outputs[first:], strict=True):
            edit.move(value, whole)
            rows = edit.values[value].shape[0]
            cut = {"dim": 0, "start": place * rows, "end": (place + 1) * rows}
            edit.emit(op, "aten.slice.Tensor", {"self": Ref(whole), **cut}, (value,), kind="view")


def _together(edit: Editor, like: Op, column: Sequence[int]) -> Ref:
    """The image of which values are parts; or the tensor in which weights are stored together."""
    first, count = edit.values[column[0]], len(column)
    if first.role == "weights" and first.storage in (column[0], edit.moved.get(column[0])):
        if column[0] in edit.moved:
            return Ref(edit.moved[column[0]])
        shape = (count * first.shape[0], *first.shape[1:])
        stride = dense_like(shape, first.stride)
        whole = edit.value(shape, first.dtype, first.role, (), stride=stride)
        edit.moved |= dict.fromkeys(column, whole)
        return Ref(whole)
    shape = (first.shape[0], count * first.shape[1], *first.shape[2:])
    how: dict[str, Argument] = {"size": shape, "stride": first.stride}
    return edit.view_op(like, "aten.as_strided.default", Ref(column[0]), how, shape, first.stride)
