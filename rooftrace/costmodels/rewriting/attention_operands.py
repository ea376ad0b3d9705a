"""What an attention kernel reads: keys and values of shared heads once, and numbers for masks.

A pass takes a verified OpGraph and returns one, with the number of attentions that it changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import ATTENTION, Editor, operand
from rooftrace.costmodels.rewriting.marks import BY_LENGTHS
from rooftrace.costmodels.rewriting.places import Places, beside, merged
from rooftrace.costmodels.rewriting.unused import rewritten, without_left_behind
from rooftrace.tracer.arguments import Argument, Ref, refs
from rooftrace.tracer.graph import Op, OpGraph


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
