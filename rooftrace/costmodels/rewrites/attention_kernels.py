"""Passes that make attention one kernel, share key and value heads, and turn masks into numbers.

A pass takes a verified OpGraph and returns one, with the number of attentions that it changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.fusion import release_of
from rooftrace.costmodels.ops.cost import BY_LENGTHS, EFFICIENT, LIBRARY, MASK_FACTS, WRITTEN_OUT
from rooftrace.costmodels.rewrites.attention_products import (
    WrittenAttention,
    WrittenMask,
    written_attentions,
)
from rooftrace.costmodels.rewrites.dataflow import (
    ValueFlow,
    merged_dims,
    reads_across,
    same_strides,
)
from rooftrace.costmodels.rewrites.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    HALVES,
    Editor,
    ends_in,
    operand,
    reading_others,
    recast,
    taking,
    with_matches,
    without_left_behind,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor, marks
from rooftrace.hardware.precisions import precision
from rooftrace.tracer import RequestLengths


def share_heads(graph: OpGraph) -> tuple[OpGraph, int]:
    """Query heads that share keys and values read them as stored, not a copy for each head.

    The copy is a clone of [.., Hk, G, L, E] that has stride 0 along G; or, of one head for all, of
    [.., H, L, E] or [.., H, E, L] that has stride 0 along H.
    """
    flow = ValueFlow(graph)
    shared: dict[int, tuple[Op, dict[str, _Repeated]]] = {}
    for op in graph.ops:
        if op.target == ATTENTION and op.part == "forward":
            stored = {name: _stored(flow, op, name) for name in ("key", "value")}
            sources = {name: item for name, item in stored.items() if item is not None}
            if len(sources) == 2:
                shared[op.id] = op, sources
    return with_matches(graph, shared, _emit_shared)


@dataclass(frozen=True, slots=True)
class _Repeated:
    """Keys or values of which an attention reads a copy for each head."""

    value: int  # [.., Hk, G, L, E]; or with one head for all, of which attention reads these
    dims: tuple[int, ...] = ()  # dimensions in its order


def _emit_shared(edit: Editor, shared: tuple[Op, Mapping[str, _Repeated]]) -> None:
    op, sources = shared
    heads = {name: _heads_of(edit, op, stored) for name, stored in sources.items()}
    edit.ops.append(taking(op, {**op.arguments, **heads}))


def _stored(flow: ValueFlow, op: Op, name: str) -> _Repeated | None:
    """The heads of which keys or values are a copy for each query head; None for other ones."""
    values, item = flow.values, operand(op, name)
    clone = flow.kernel_of(item.id)
    if clone is None or clone.name != "aten.clone" or clone.repeats != op.repeats:
        return None
    if item.then or item.every or reads_across(clone):
        return None
    (stored,) = clone.inputs
    source, copy, read = (values[i] for i in (stored, clone.outputs[0], item.id))
    if flow.overwritten(stored, clone.id, op.id) or copy.storage != read.storage:
        return None
    if len(source.shape) == len(read.shape) > 2:
        places = dict(zip(zip(copy.shape, copy.stride, strict=True), range(9), strict=False))
        dims = tuple(places.get(d, -1) for d in zip(read.shape, read.stride, strict=True))
        permuted = set(dims) == set(range(len(dims)))
        is_shared = permuted and read.shape[-3] > 1 and source.stride[dims[-3]] == 0
        return _Repeated(stored, dims) if is_shared else None
    if len(source.shape) != len(read.shape) + 1 or len(read.shape) < 3:
        return None
    *lead, shared, group, length, width = source.shape
    repeated = group > 1 and source.stride[-3] == 0
    if not repeated or read.shape != (*lead, shared * group, length, width):
        return None
    return _Repeated(stored) if merged_dims(copy) == merged_dims(read) else None


def _heads_of(edit: Editor, like: Op, stored: _Repeated) -> Ref:
    """[.., Hk, L, E] of the stored heads."""
    item, source = Ref(stored.value), edit.values[stored.value]
    if stored.dims:
        first = edit.sliced(like, item, stored.dims[-3], 0, 1)
        return edit.permuted(like, first, stored.dims)
    at = len(source.shape) - 3
    shape, stride = (t[:at] + t[at + 1 :] for t in (source.shape, source.stride))
    return edit.view_op(like, "aten.select.int", item, {"dim": at, "index": 0}, shape, stride)


# -- masks -----------------------------------------------------------------------------------------


_LENGTH_MASKS = ("padding", "packed", "chunked", "band")
"""Masks by the bounds of sequences, which kernels for sequences of any lengths take, or by the
distance that a query sees on either side."""


def masks_as_numbers(graph: OpGraph) -> tuple[OpGraph, int]:
    """Masks that a kernel takes as numbers (causal, a window, chunks, lengths) are not read.

    A mask of a single number leaves the graph where its facts fit the number: kind, window and
    visible pairs; none of them may be assumed.  Lengths are data, so a mask of lengths stays an
    operand, with the fact that no kernel reads it.
    """
    ops, count = [], 0
    for op in graph.ops:
        guessed = any(graph.assumptions[n].kind == "mask" for n in op.assumptions)
        if op.target == ATTENTION and op.part == "forward" and _is_masked(op) and not guessed:
            numbers = _numbers(graph, op)
            if numbers is not None:
                kept = {name: a for name, a in op.arguments.items() if name != "fill"}
                op = taking(op, {**kept, "mask": None, **numbers})
                count += graph.times(op)
            elif op.facts.get("mask") in _LENGTH_MASKS:
                op = replace(op, facts={**op.facts, BY_LENGTHS: True})
                count += graph.times(op)
        ops.append(op)
    if not count:
        return graph, 0
    return without_left_behind(graph.replace(ops=tuple(ops)), graph), count


def _is_masked(op: Op) -> bool:
    arguments = op.arguments
    return isinstance(arguments.get("mask"), Ref) and not arguments.get("is_causal")


def _numbers(graph: OpGraph, op: Op) -> dict[str, Argument] | None:
    """The options of attention in place of its mask; None where no option has its effect."""
    queries, length = (graph.values[operand(op, n).id].shape[-2] for n in ("query", "key"))
    kind, pairs, window = (op.facts.get(n) for n in ("mask", "visible_pairs", "window"))
    if kind == "none":
        return {} if pairs == queries * length else None
    if queries > length or kind not in ("causal", "sliding-window", "chunked"):
        return None
    if kind == "chunked" and queries < length:  # the start of the first chunk is not known
        return None
    number = length if kind == "causal" else window
    if not isinstance(number, int) or number < 1:
        return None
    if kind == "chunked":
        visible = _in_chunks(length, number) - _in_chunks(length - queries, number)
    else:
        visible = RequestLengths((length - queries,), (queries,)).visible(number)
    if pairs != visible:
        return None
    if kind == "causal" and queries == length:
        return {"is_causal": True}
    return {"chunk" if kind == "chunked" else "window": number}


def _in_chunks(rows: int, chunk: int) -> int:
    """sum_p (p mod c + 1) over the first positions p."""
    full, rest = divmod(rows, chunk)
    return full * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


# -- attention kernels -----------------------------------------------------------------------------


def flash_from_products(graph: OpGraph, mixed: bool = False) -> tuple[OpGraph, int]:
    """Hand-written attention that compilers match, without sinks and soft caps, as one op.

    The conditions are those of `attention_kernels`, and a release that has such a pass.
    mixed: only within compiled graphs.
    """
    release = release_of(graph)
    if release is not None and not release.matches_attention:
        return graph, 0
    return _as_kernels(graph, plain=True, mixed=mixed)


def attention_kernels(graph: OpGraph) -> tuple[OpGraph, int]:
    """Hand-written attention, with sinks and soft caps or without, as one op.

    With them it is the kernel of a library, whose tiles are known; without, that of a compiler.
    Nothing else may read the values in between, so that the score matrix stays on the chip; in
    training backward reads the probabilities.  Results are the same, but for rows of which a mask
    hides all keys by a number that the graph does not know.  Attention that PyTorch itself
    decomposes, since it has no kernel for it, stays so.
    """
    return _as_kernels(graph, plain=False)


def _as_kernels(graph: OpGraph, plain: bool, mixed: bool = False) -> tuple[OpGraph, int]:
    eager = marks.eager_ops(graph.ops) if mixed else ()
    chosen = [w for w in written_attentions(graph) if w.alone and (w.plain or not plain)]
    chosen = [w for w in chosen if w.last.id not in eager]
    flow = ValueFlow(graph)
    matches = {w.last.id: (w, _copy_of_result(flow, w)) for w in chosen}
    inner = {op for written in chosen for op in written.inner}
    inner |= {op for _, copy in matches.values() if copy is not None for op in copy.gone}
    return with_matches(graph, matches, emit_flash, inner)


def with_pairs(graph: OpGraph) -> OpGraph:
    """Products of hand-written attention get facts on the pairs that its mask shows.

    Not in training, whose backward products have no such facts.
    """
    if any(op.part == "backward" for op in graph.ops):
        return graph
    pairs_of: dict[int, dict[str, Any]] = {}
    for written in written_attentions(graph):
        pairs = None if written.mask is None else written.mask.op.facts.get("visible_pairs")
        if pairs is not None:
            _, queries, length = graph.values[written.first.outputs[0]].shape
            facts = {"useful_pairs": pairs, "all_pairs": queries * length}
            pairs_of |= dict.fromkeys((written.first.id, written.last.id), facts)
    ops = list(graph.ops)
    for number, facts in pairs_of.items():
        ops[number] = replace(ops[number], facts={**ops[number].facts, **facts})
    return graph.replace(ops=tuple(ops)) if pairs_of else graph


def with_libraries(graph: OpGraph, compiled: bool) -> tuple[OpGraph, int]:
    """Attention ops get the fact that they run on the memory-efficient kernel.

    Flash attention takes fp16 and bf16 (`check_dtypes_flash_attention` of ATen's sdp_utils.cpp),
    and no mask but by numbers (`check_for_attn_mask`).  Hand-written attention calls no library
    where it is compiled; elsewhere one kernel for it is the library's.
    """
    ops, count = [], 0
    for op in graph.ops:
        if WRITTEN_OUT in op.facts and not compiled:
            facts = {name: fact for name, fact in op.facts.items() if name != WRITTEN_OUT}
            op, count = replace(op, facts=facts), count + graph.times(op)
        if op.target in (ATTENTION, ATTENTION_BACKWARD) and WRITTEN_OUT not in op.facts:
            wide = precision(graph.values[operand(op, "query").id].dtype).bits > _HALF
            masked = isinstance(op.arguments.get("mask"), Ref) and BY_LENGTHS not in op.facts
            if wide or masked:
                op = replace(op, facts={**op.facts, LIBRARY: EFFICIENT})
                count += graph.times(op)
        ops.append(op)
    return (graph.replace(ops=tuple(ops)), count) if count else (graph, 0)


_HALF = 16  # bits


@dataclass(frozen=True, slots=True)
class _ResultCopy:
    """A copy of the result [B, H, S, Ev] to [B, S, H, Ev], the layout in which kernels write it.

    gone: the copy, and the views that lead to it.
    """

    value: int
    gone: frozenset[int]


def _copy_of_result(flow: ValueFlow, written: WrittenAttention) -> _ResultCopy | None:
    """The only kernel that reads the result, if it is such a copy."""
    graph, (out,) = flow.graph, written.last.outputs
    users = [op for op in flow.storage_users[out] if op.id > written.last.id]
    kernels = [op for op in users if op.kind != "view"]
    if len(written.lead) != 2 or out in flow.escaping or len(kernels) != 1:
        return None
    (copy,) = kernels
    if copy.name != "aten.clone" or copy.repeats != written.last.repeats:
        return None
    source, result = graph.values[copy.inputs[0]], graph.values[copy.outputs[0]]
    (batch, heads), (_, queries, width) = written.lead, graph.values[out].shape
    by_head = (heads * queries * width, width, queries * width, 1)
    if source.shape != (batch, queries, heads, width) or copy.outputs[0] in flow.escaping:
        return None
    if not same_strides(source.shape, source.stride, by_head):
        return None
    if not same_strides(result.shape, result.stride, Tensor.contiguous(result.shape)):
        return None
    return _ResultCopy(copy.outputs[0], frozenset(op.id for op in users))


def emit_flash(edit: Editor, match: tuple[WrittenAttention, _ResultCopy | None]) -> None:
    written, copy = match
    first, last, lead = written.first, written.last, written.lead
    query, key, value = (
        _read(edit, written, op, item)
        for op, item in zip((first, first, last), written.operands, strict=True)
    )
    for op, tensor in written.scales:
        like = edit.values[query.id]
        operands: dict[str, Argument] = {"self": query, "other": tensor}
        query = edit.made(first, op.target.replace("_.", "."), operands, like.shape, like.dtype)
    dims = range(len(lead))
    key = edit.permuted(first, key, (*dims, len(lead) + 1, len(lead)))
    arguments: dict[str, Argument] = {
        "query": query,
        "key": key,
        "value": value,
        "mask": None,
        "dropout_p": written.dropout,
        "is_causal": False,
        "scale": written.scale,
    }
    facts: dict[str, Any] = {WRITTEN_OUT: True} if written.plain else {}
    if written.mask is not None:
        arguments |= _mask(edit, written.mask)
        of_mask = written.mask.op.facts
        facts |= {name: of_mask[name] for name in MASK_FACTS if name in of_mask}
    if written.sinks is not None:
        sinks = edit.values[written.sinks.id]
        step = [s for n, s in zip(sinks.shape, sinks.stride, strict=True) if n > 1] or [1]
        arguments["sinks"] = edit.viewed(first, written.sinks, lead[-1:], tuple(step))
    if written.softcap:
        arguments["softcap"] = written.softcap
    (out,) = last.outputs
    made = _result(edit, written, out, copy)
    *_, queries, _ = edit.values[made].shape
    logsumexp = edit.value((*lead, queries), "fp32", "activations", last.repeats)
    edit.emit(last, ATTENTION, arguments, (made, logsumexp), facts=facts)
    if copy is not None:
        edit.transpose(last, Ref(made), copy.value)
    else:
        edit.reshape(last, Ref(made), out)


def _result(edit: Editor, written: WrittenAttention, out: int, copy: _ResultCopy | None) -> int:
    """The result [.., H, S, Ev] ; the old result, or its copy, becomes a view of it."""
    *_, queries, width = edit.values[out].shape
    shape, repeats = (*written.lead, queries, width), written.last.repeats
    stride = Tensor.contiguous(shape)
    if out in edit.flow.escaping:
        return edit.view(Ref(out), shape, stride, repeats)
    if copy is not None:
        outer, row, _, last = Tensor.contiguous((shape[0], queries, shape[1], width))
        stride = (outer, width, row, last)
    old = out if copy is None else copy.value
    role = edit.values[old].role
    made = edit.value(shape, edit.values[out].dtype, role, repeats, stride=stride)
    edit.moved[old] = made
    return made


def _read(edit: Editor, written: WrittenAttention, op: Op, item: Ref) -> Ref:
    """An operand [H, a, b] of a product as [.., a, b], with the dimensions `lead` of the heads."""
    lead = written.lead
    shape = (*lead, *edit.graph.values[item.id].shape[1:])
    if source := before_copy(edit, op, item, shape, written.last.id):
        return _as_stored(edit, op, source)
    item = _as_stored(edit, op, item)
    if len(lead) == 1:
        return item
    (_, *sizes), (step, *stride) = edit.values[item.id].shape, edit.values[item.id].stride
    steps = tuple(step * n for n in Tensor.contiguous(lead))
    return edit.viewed(op, item, (*lead, *sizes), (*steps, *stride))


def before_copy(edit: Editor, like: Op, item: Ref, shape: tuple[int, ...], last: int) -> Ref | None:
    """The operand of a copy that only puts elements in order, in a shape; None for other values.

    A kernel takes any strides.  last: the op up to which nothing may write into it.
    """
    copy, values = edit.flow.kernel_of(item.id), edit.graph.values
    if copy is None or copy.name != "aten.clone" or copy.repeats != like.repeats:
        return None
    source, made, read = (values[i] for i in (copy.inputs[0], copy.outputs[0], item.id))
    same = made.storage == read.storage and merged_dims(made) == merged_dims(read)
    plain = not any(ref.then or ref.every for ref in (item, *copy.reads))
    kept = not edit.flow.overwritten(copy.inputs[0], copy.id, last)
    if not (same and plain and kept) or 0 in source.stride:
        return None
    if source.shape == shape:
        return Ref(copy.inputs[0])
    wide = [(n, step) for n, step in zip(source.shape, source.stride, strict=True) if n > 1]
    if [n for n in shape if n > 1] != [n for n, _ in wide]:
        return None
    steps = iter([step for _, step in wide])
    strides = tuple(1 if n == 1 else next(steps) for n in shape)
    return edit.viewed(like, Ref(copy.inputs[0]), shape, strides)


def _mask(edit: Editor, mask: WrittenMask) -> dict[str, Argument]:
    """The arguments `mask` and `fill` of attention, by which hidden scores stay exactly equal."""
    op, tensor, fill = mask.op, mask.tensor, mask.fill
    shape, dtype = edit.values[tensor.id].shape, edit.values[tensor.id].dtype
    operands: dict[str, Argument]
    if fill is None:
        if mask.factor != 1:
            operands = {"self": tensor, "other": mask.factor}
            tensor = edit.made(op, "aten.mul.Tensor", operands, shape, dtype)
        return {"mask": tensor}
    if isinstance(fill, Ref):  # an unknown number is added
        sides: tuple[Argument, Argument] = (fill, 0.0) if mask.hides else (0.0, fill)
        operands = {"condition": tensor, "self": sides[0], "other": sides[1]}
        overload = "ScalarOther" if mask.hides else "ScalarSelf"
        dtype = edit.values[fill.id].dtype
        return {"mask": edit.made(op, f"aten.where.{overload}", operands, shape, dtype)}
    if mask.hides:
        tensor = edit.made(op, "aten.logical_not.default", {"self": tensor}, shape, "bool")
    hidden = fill * mask.factor
    return {"mask": tensor} if hidden == -inf else {"mask": tensor, "fill": hidden}


def _as_stored(edit: Editor, like: Op, item: Ref) -> Ref:
    """An operand of attention before a cast to a wider float that the model wrote.

    The kernel multiplies narrow floats exactly and adds up in fp32, so a copy of the cache in
    fp32 is never made, nor one that reorders the rows of such a copy.
    """
    source, widened = item, False
    for name in ("aten.clone", "aten._to_copy"):
        maker = edit.graph.producers.get(edit.values[source.id].storage)
        op = None if maker is None else edit.graph.ops[maker]
        if op is None or op.name != name or op.repeats != like.repeats:
            continue
        before = operand(op, "self")
        plain = all((ref.then, ref.every) == (None, False) for ref in (source, before))
        old, new = edit.values[before.id], edit.values[source.id]
        widens = name == "aten._to_copy"
        fits = _is_narrower(old, new) if widens else old.dtype == new.dtype
        if plain and fits and old.elements == new.elements:
            source, widened = before, widens
    if not widened:
        return item
    value = edit.values[item.id]
    return edit.viewed(like, source, value.shape, value.stride)


def _is_narrower(before: Tensor, after: Tensor) -> bool:
    """Whether both are floats, the first of fewer bits."""
    narrow, wide = precision(before.dtype), precision(after.dtype)
    return narrow.kind == wide.kind == "float" and narrow.bits < wide.bits


# -- attention of widened numbers ------------------------------------------------------------------


def with_narrow_attention(graph: OpGraph) -> OpGraph:
    """Attention in fp32, whose results are narrowed, is in the model's half; so is its backward.

    What operands are made of stays in fp32 and is rounded before attention, as are gradients.
    """
    half, flow, edit = str(graph.model.get("dtype")), ValueFlow(graph), Editor(graph)
    outs = {op.outputs[0] for op in graph.ops if op.target == ATTENTION}
    makers = {out: graph.ops[graph.producers[out]] for out in outs}
    narrowed = {
        out
        for out, op in makers.items()
        if half in HALVES and graph.values[out].dtype == "fp32" and ends_in(flow, op, half)
    }
    now, narrow = dict[int, int](), set[int]()  # values in the half, by those in fp32
    for op in graph.ops:
        attends = op.target in (ATTENTION, ATTENTION_BACKWARD)
        out = (
            operand(op, "out").id
            if op.target == ATTENTION_BACKWARD
            else min(op.outputs, default=-1)
        )
        if not attends or out not in narrowed:
            edit.ops.append(op)
            continue
        for name in ("query", "key", "value", "grad_out"):
            if name in op.arguments and (value := operand(op, name).id) not in now:
                now[value] = _rounded(edit, op, value, half)
        op = reading_others(op, now)
        narrow |= {*flow.members[out]}
        made = op.outputs[:3] if op.target == ATTENTION_BACKWARD else ()
        wide = [v for v in made if not ends_in(flow, op, half, v)]
        narrow |= {member for v in {*made} - {*wide} for member in flow.members[v]}
        grads = {v: edit.value(t.shape, half, t.role, op.repeats, stride=t.stride)
                 for v in wide if (t := edit.values[v])}  # fmt: skip
        edit.ops.append(replace(op, outputs=tuple(grads.get(v, v) for v in op.outputs)))
        for v, grad in grads.items():
            edit.emit(op, _CAST, {"self": Ref(grad), "dtype": "dtype:fp32"}, (v,))
    if not narrowed:
        return graph
    rounded = edit.mended()
    return recast(rounded, dict.fromkeys(narrow, half))


_CAST = "aten._to_copy.default"


def _rounded(edit: Editor, like: Op, value: int, dtype: str) -> int:
    """A value in a narrower precision: what it was widened from, or a new one."""
    by, tensor = edit.flow.producer(value), edit.values[value]
    if by is not None and by.target == _CAST and edit.values[by.inputs[0]].dtype == dtype:
        return by.inputs[0]
    how: dict[str, Argument] = {"self": Ref(value), "dtype": f"dtype:{dtype}"}
    role = "gradients" if like.part == "backward" else "activations"
    return edit.made(like, _CAST, how, tensor.shape, dtype, role).id
