"""Passes that make attention one kernel, share key and value heads, and tell masks by numbers.

A pass takes a verified OpGraph and returns one, with the number of attentions that it changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.ops.cost import BY_LENGTHS, EFFICIENT, LIBRARY, MASK_FACTS, WRITTEN_OUT
from rooftrace.costmodels.rewriting.attention_products import (
    WrittenAttention,
    WrittenMask,
    written_attentions,
)
from rooftrace.costmodels.rewriting.eager_kernels import (
    rewritten,
    with_matches,
    without_left_behind,
)
from rooftrace.costmodels.rewriting.editing import ATTENTION, ATTENTION_BACKWARD, Editor, operand
from rooftrace.costmodels.rewriting.places import Places, beside, merged, same_steps
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.graph import Argument, Op, OpGraph, Ref, Tensor, refs


def share_heads(graph: OpGraph) -> tuple[OpGraph, int]:
    """Query heads that share keys and values read them as stored, not a copy for each head.

    The copy is a clone of [.., Hk, G, L, E] in which all G are the same.
    """
    return rewritten(graph, ("rooftrace.attention",), _shared, _emit)


@dataclass(frozen=True, slots=True)
class _Shared:
    """An attention, and the keys and values [.., Hk, G, L, E] that it reads copies of."""

    op: Op
    key: Ref
    value: Ref
    inside: frozenset[int] = frozenset()


def _shared(places: Places, op: Op) -> _Shared | None:
    key, value = (_stored(places, op, name) for name in ("key", "value"))
    forward = op.target == ATTENTION and op.part == "forward"
    return _Shared(op, key, value) if forward and key is not None and value is not None else None


def _emit(places: Places, edit: Editor, shared: _Shared) -> None:
    op = shared.op
    arguments: dict[str, Argument] = {
        **op.arguments,
        "key": _first_of_group(edit, op, shared.key),
        "value": _first_of_group(edit, op, shared.value),
    }
    edit.ops.append(replace(op, arguments=arguments, inputs=tuple(refs(arguments))))


def _stored(places: Places, op: Op, name: str) -> Ref | None:
    """What keys or values are a copy of that repeats them for each head; None for other ones."""
    values, item = places.graph.values, operand(op, name)
    maker = places.kernel_of(item.id)
    if maker is None or maker.name != "aten.clone" or maker.repeats != op.repeats:
        return None
    source, whole, copy = (values[i] for i in (maker.inputs[0], item.id, maker.outputs[0]))
    plain = not (item.then or item.every or beside(maker))
    if not plain or len(source.shape) != len(whole.shape) + 1 or len(whole.shape) < 3:
        return None
    *lead, shared, group, length, width = source.shape
    repeated = group > 1 and source.stride[-3] == 0
    if not repeated or whole.shape != (*lead, shared * group, length, width):
        return None
    if copy.storage != whole.storage or merged(copy) != merged(whole):
        return None
    if places.overwritten(maker.inputs[0], maker.id, op.id):
        return None
    return Ref(maker.inputs[0])


def _first_of_group(edit: Editor, like: Op, item: Ref) -> Ref:
    source = edit.values[item.id]
    at = len(source.shape) - 3
    shape, stride = (t[:at] + t[at + 1 :] for t in (source.shape, source.stride))
    out = edit.view(item, shape, stride, like.repeats)
    first: dict[str, Argument] = {"self": item, "dim": at, "index": 0}
    edit.emit(like, "aten.select.int", first, (out,), kind="view")
    return Ref(out)


# -- masks -----------------------------------------------------------------------------------------


_TOLD = ("padding", "packed", "chunked", "band")
"""Masks that say where sequences begin and end, which kernels for sequences of any lengths take, or
how far a query sees on either side."""


def masks_as_numbers(graph: OpGraph) -> tuple[OpGraph, int]:
    """Masks that a kernel knows by numbers (causal, a window, chunks, lengths) are not read.

    One of a single number leaves the graph where all that is known of it fits the number: its kind,
    the most keys that a query sees, and the pairs that it shows; none of that may be assumed.
    Lengths are data, so a mask that stands for them stays an operand, with the fact that no kernel
    reads it.
    """
    ops, count = [], 0
    for op in graph.ops:
        guessed = any(graph.assumptions[n].kind == "mask" for n in op.assumptions)
        if op.target == ATTENTION and op.part == "forward" and _is_masked(op) and not guessed:
            numbers = _numbers(graph, op)
            if numbers is not None:
                kept = {name: a for name, a in op.arguments.items() if name != "fill"}
                arguments: dict[str, Argument] = {**kept, "mask": None, **numbers}
                op = replace(op, arguments=arguments, inputs=tuple(refs(arguments)))
                count += graph.times(op)
            elif op.facts.get("mask") in _TOLD:
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
    """The options of attention that say what its mask does; None where no option does."""
    queries, length = (graph.values[operand(op, n).id].shape[-2] for n in ("query", "key"))
    kind, pairs, window = (op.facts.get(n) for n in ("mask", "visible_pairs", "window"))
    if kind == "none":
        return {} if pairs == queries * length else None
    if queries > length or kind not in ("causal", "sliding-window", "chunked"):
        return None
    if kind == "chunked" and queries < length:  # nothing says where the first chunk begins
        return None
    number = length if kind == "causal" else window
    if not isinstance(number, int) or number < 1:
        return None
    shown = _in_chunks if kind == "chunked" else _in_window
    if pairs != shown(length, number) - shown(length - queries, number):
        return None
    if kind == "causal" and queries == length:
        return {"is_causal": True}
    return {"chunk" if kind == "chunked" else "window": number}


def _in_window(rows: int, window: int) -> int:
    """sum_p min(p + 1, w) over the first positions p."""
    grown = min(rows, window)
    return grown * (grown + 1) // 2 + (rows - grown) * window


def _in_chunks(rows: int, chunk: int) -> int:
    """sum_p (p mod c + 1) over the first positions p."""
    whole, rest = divmod(rows, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


# -- attention kernels -----------------------------------------------------------------------------
# Attention as one kernel: products and a softmax that a model wrote by hand become one flash op.
#
# A pass takes a verified OpGraph and returns one, with the number of attentions that it changed.


def flash_from_products(graph: OpGraph) -> tuple[OpGraph, int]:
    """Hand-written attention as compilers know it as one op, without sinks and soft caps.

    What holds of it is said at `attention_kernels`.
    """
    return _as_kernels(graph, plain=True)


def attention_kernels(graph: OpGraph) -> tuple[OpGraph, int]:
    """Attention that is written out, with sinks and soft caps or without, as one op.

    With them it is the kernel of a library, whose tiles are known; without, that of a compiler.
    It does so only where nothing else reads the values in between, so that the score matrix can
    stay on the chip.  In training backward reads the probabilities, so the attention stays as it
    was written.  Results are the same, but for rows of which a mask hides all keys by a number that
    the graph does not know.  Attention that PyTorch itself takes apart, since it has no kernel for
    it, stays so.
    """
    return _as_kernels(graph, plain=False)


def _as_kernels(graph: OpGraph, plain: bool) -> tuple[OpGraph, int]:
    chosen = [w for w in written_attentions(graph) if w.alone and (w.plain or not plain)]
    places = Places(graph)
    last = {written.last.id: written for written in chosen}
    copies = {id_: _copy_of_result(places, written) for id_, written in last.items()}
    inner = {op for written in chosen for op in written.inner}
    inner |= {op for copy in copies.values() if copy is not None for op in copy.gone}
    return with_matches(graph, last, partial(_emit_flash, places, copies), inner)


def with_pairs(graph: OpGraph) -> OpGraph:
    """The products of attention that stays written out say how many of their pairs a mask shows.

    Not in training, whose backward products would not.
    """
    if any(op.part == "backward" for op in graph.ops):
        return graph
    told: dict[int, dict[str, Any]] = {}
    for written in written_attentions(graph):
        pairs = None if written.mask is None else written.mask.op.facts.get("visible_pairs")
        if pairs is not None:
            _, queries, length = graph.values[written.first.outputs[0]].shape
            facts = {"useful_pairs": int(pairs), "all_pairs": queries * length}
            told |= dict.fromkeys((written.first.id, written.last.id), facts)
    if not told:
        return graph
    return graph.replace(
        ops=tuple(
            replace(op, facts={**op.facts, **told[op.id]}) if op.id in told else op
            for op in graph.ops
        )
    )


def with_libraries(graph: OpGraph) -> tuple[OpGraph, int]:
    """Which attentions run on the memory-efficient kernel, as a fact of each op.

    Flash attention takes fp16 and bf16 (`check_dtypes_flash_attention` of ATen's sdp_utils.cpp),
    and no mask but by numbers (`check_for_attn_mask`).  Hand-written attention calls no library.
    """
    ops, count = [], 0
    for op in graph.ops:
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
    """The rows of all heads side by side, as kernels write them: [B, S, H, Ev], copied from
    [B, H, S, Ev].  gone: the copy, and the views that lead to it."""

    value: int
    gone: frozenset[int]


def _copy_of_result(places: Places, written: WrittenAttention) -> _ResultCopy | None:
    """The copy that puts the result in the order in which kernels write it; None without one."""
    graph, (out,) = places.graph, written.last.outputs
    readers = [op for op in places.readers[out] if op.id > written.last.id]
    kernels = [op for op in readers if op.kind != "view"]
    if len(written.lead) != 2 or out in places.shared or len(kernels) != 1:
        return None
    (copy,) = kernels
    if copy.name != "aten.clone" or copy.repeats != written.last.repeats:
        return None
    source, result = graph.values[copy.inputs[0]], graph.values[copy.outputs[0]]
    (batch, heads), (_, queries, width) = written.lead, graph.values[out].shape
    turned = (heads * queries * width, width, queries * width, 1)
    alike = source.shape == (batch, queries, heads, width) == result.shape
    if not alike or copy.outputs[0] in places.shared or not all(
        same_steps(tensor.shape, tensor.stride, stride)
        for tensor, stride in ((source, turned), (result, Tensor.contiguous(result.shape)))
    ):  # fmt: skip
        return None
    return _ResultCopy(copy.outputs[0], frozenset(op.id for op in readers))


def _emit_flash(
    places: Places,
    copies: Mapping[int, _ResultCopy | None],
    edit: Editor,
    written: WrittenAttention,
) -> None:
    first, last, lead = written.first, written.last, written.lead
    query = _read(edit, places, written, first, "self")
    key = _read(edit, places, written, first, "mat2")
    value = _read(edit, places, written, last, "mat2")
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
        known = written.mask.op.facts
        facts |= {name: known[name] for name in MASK_FACTS if name in known}
    if written.sinks is not None:
        step = [s for n, s in zip(*_layout(edit, written.sinks), strict=True) if n > 1] or [1]
        arguments["sinks"] = edit.viewed(first, written.sinks, lead[-1:], tuple(step))
    if written.softcap:
        arguments["softcap"] = written.softcap
    made = _result(edit, places, written, copies[last.id])
    *_, queries, _ = edit.values[made].shape
    logsumexp = edit.value((*lead, queries), "fp32", "activations", last.repeats)
    edit.emit(last, ATTENTION, arguments, (made, logsumexp), facts=facts)
    _hand_on(edit, last, made, copies[last.id])


def _result(
    edit: Editor, places: Places, written: WrittenAttention, copy: _ResultCopy | None
) -> int:
    """The value that attention makes, as [.., H, S, Ev]; what was made lies in it."""
    (out,) = written.last.outputs
    *_, queries, width = edit.values[out].shape
    shape, repeats = (*written.lead, queries, width), written.last.repeats
    if out in places.shared:
        return edit.view(Ref(out), shape, Tensor.contiguous(shape), repeats)
    stride = Tensor.contiguous(shape)
    if copy is not None:
        outer, row, _, last = Tensor.contiguous((shape[0], queries, shape[1], width))
        stride = (outer, width, row, last)
    old = out if copy is None else copy.value
    role = edit.values[old].role
    made = edit.value(shape, edit.values[out].dtype, role, repeats, stride=stride)
    edit.moved[old] = made
    return made


def _hand_on(edit: Editor, like: Op, made: int, copy: _ResultCopy | None) -> None:
    """What comes after reads the result as it did."""
    (out,) = like.outputs
    if copy is not None:
        edit.turns_into(like, Ref(made), copy.value)
    else:
        edit.stands_for(like, Ref(made), out)


def _layout(edit: Editor, item: Ref) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return edit.values[item.id].shape, edit.values[item.id].stride


def _read(edit: Editor, places: Places, written: WrittenAttention, op: Op, name: str) -> Ref:
    """An operand [H, a, b] of a product with the dimensions that the heads stand for.

    A kernel takes any strides: a copy that only puts the elements in order is not read.
    """
    item, lead, values = operand(op, name), written.lead, edit.graph.values
    copy = places.kernel_of(item.id)
    if copy is not None and copy.name == "aten.clone" and copy.repeats == op.repeats:
        source, whole = values[copy.inputs[0]], values[copy.outputs[0]]
        same = whole.storage == values[item.id].storage and merged(whole) == merged(values[item.id])
        plain = not any(ref.then or ref.every for ref in (item, *copy.reads))
        shape = (*lead, *values[item.id].shape[1:])
        kept = not places.overwritten(copy.inputs[0], copy.id, written.last.id)
        if same and plain and kept and source.shape == shape and 0 not in source.stride:
            return _as_stored(edit, op, Ref(copy.inputs[0]))
    item = _as_stored(edit, op, item)
    (_, *sizes), (step, *stride) = _layout(edit, item)
    if len(lead) == 1:
        return item
    steps = tuple(step * n for n in Tensor.contiguous(lead))
    return edit.viewed(op, item, (*lead, *sizes), (*steps, *stride))


def _mask(edit: Editor, mask: WrittenMask) -> dict[str, Argument]:
    """The arguments `mask` and `fill` of attention: hidden scores are exactly what they were."""
    op, tensor, fill = mask.op, mask.tensor, mask.fill
    shape, dtype = edit.values[tensor.id].shape, edit.values[tensor.id].dtype
    operands: dict[str, Argument]
    if fill is None:
        if mask.factor != 1:
            operands = {"self": tensor, "other": mask.factor}
            tensor = edit.made(op, "aten.mul.Tensor", operands, shape, dtype)
        return {"mask": tensor}
    if isinstance(fill, Ref):  # a number that nobody knows here is added
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

    The kernel multiplies narrow floats exactly and adds up in fp32, so a copy of the whole cache in
    fp32 is never made, nor one that puts the rows of such a copy in order.
    """
    source, widened = item, False
    for name, changes in (("aten.clone", _reorders), ("aten._to_copy", _widens)):
        maker = edit.graph.producers.get(edit.values[source.id].storage)
        op = None if maker is None else edit.graph.ops[maker]
        if op is None or op.name != name or op.repeats != like.repeats:
            continue
        before = operand(op, "self")
        plain = all((ref.then, ref.every) == (None, False) for ref in (source, before))
        if plain and changes(edit.values[before.id], edit.values[source.id]):
            source, widened = before, changes is _widens
    if not widened:
        return item
    value = edit.values[item.id]
    return edit.viewed(like, source, value.shape, value.stride)


def _reorders(before: Tensor, after: Tensor) -> bool:
    """Whether a copy holds the same numbers, in another order at most."""
    return before.dtype == after.dtype and before.elements == after.elements


def _widens(before: Tensor, after: Tensor) -> bool:
    """Whether a cast turns floats into wider ones, one by one."""
    narrow, wide = precision(before.dtype), precision(after.dtype)
    floats = narrow.kind == wide.kind == "float"
    return floats and narrow.bits < wide.bits and before.elements == after.elements
