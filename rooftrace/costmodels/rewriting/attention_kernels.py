"""Attention as one kernel: products and a softmax that a model wrote by hand become one flash op.

The pass takes a verified OpGraph and returns one, with the number of attentions that it changed.
It names ops of torch: several elementary ones make an attention together, and no rule of a single
op can say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    operand,
)
from rooftrace.costmodels.rewriting.marks import EFFICIENT, LIBRARY, UNFUSED, WRITTEN_OUT
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

_SOFTMAX = frozenset({"aten._softmax", "aten._safe_softmax"})
_SCALES = frozenset({"aten.mul", "aten.div", "aten.mul_", "aten.div_"})
_MASKS = frozenset({"aten.add", "aten.add_", "aten.masked_fill", "aten.masked_fill_", "aten.where"})
_COPIES = frozenset({"aten._to_copy", "aten.clone"})
_DROPOUT = "aten.native_dropout"
_LONGEST_CHAIN = 12


def flash_from_products(graph: OpGraph) -> tuple[OpGraph, int]:
    """Hand-written attention as one op: bmm, scale / mask / cast, softmax, cast / dropout, bmm.

    It does so only where nothing else reads the values in between, so that the score matrix can
    stay on the chip.  In training backward reads the probabilities, so the attention stays as it
    was written.  The new graph is for pricing only: it drops a scale that is a tensor, and the
    number that a mask fills in.  Attention that PyTorch itself takes apart, since it has no kernel
    for it, stays so: a compiler that meets it has none either.
    """
    finder = _Finder(graph)
    inner: set[int] = set()
    last: dict[int, _Chain] = {}
    for op in graph.ops:
        # The last product of an attention cannot be the first of another.
        if op.name == "aten.bmm" and op.part == "forward" and op.id not in last:
            chain = finder.chain(op)
            if chain is not None:
                inner |= chain.inner
                last[chain.last.id] = chain
    if not last:
        return graph, 0
    edit = Editor(graph)
    edit.rewrite(last, partial(_emit_flash, edit), dropped=inner)
    return edit.done(), sum(graph.times(chain.last) for chain in last.values())


_PATTERNED = ("none", "causal", "sliding-window", "padding")
"""Masks that a flash kernel skips by."""


def with_libraries(graph: OpGraph) -> tuple[OpGraph, int]:
    """Which attentions run on the memory-efficient kernel, as a fact of each op.

    Flash attention takes fp16 and bf16 (`check_dtypes_flash_attention` of ATen's sdp_utils.cpp),
    and no mask of numbers (`check_for_attn_mask`).  Hand-written attention calls no library.
    """
    ops, count = [], 0
    for op in graph.ops:
        if op.target in (ATTENTION, ATTENTION_BACKWARD) and WRITTEN_OUT not in op.facts:
            wide = precision(graph.values[operand(op, "query").id].dtype).bits > _HALF
            masked = isinstance(op.arguments.get("mask"), Ref)
            if wide or (masked and op.facts.get("mask") not in _PATTERNED):
                op = replace(op, facts={**op.facts, LIBRARY: EFFICIENT})
                count += graph.times(op)
        ops.append(op)
    return (graph.replace(ops=tuple(ops)), count) if count else (graph, 0)


_HALF = 16  # bits


@dataclass(frozen=True, slots=True)
class _Chain:
    """first: the product of queries and keys.  last: that of probabilities and values.  inner: all
    ops before the last, views included, none of which anything else reads."""

    first: Op
    last: Op
    inner: frozenset[int]
    mask: Ref | None
    scale: float
    dropout: float


def _emit_flash(edit: Editor, chain: _Chain) -> None:
    first = chain.first
    query = _as_stored(edit, first, operand(first, "self"))
    key = edit.turned(first, _as_stored(edit, first, operand(first, "mat2")))
    heads, queries, _ = edit.values[query.id].shape
    logsumexp = edit.value((heads, queries), "fp32", "activations", chain.last.repeats)
    arguments: dict[str, Argument] = {
        "query": query,
        "key": key,
        "value": _as_stored(edit, chain.last, operand(chain.last, "mat2")),
        "mask": chain.mask,
        "dropout_p": chain.dropout,
        "is_causal": False,
        "scale": chain.scale,
    }
    outputs = (chain.last.outputs[0], logsumexp)
    edit.emit(chain.last, ATTENTION, arguments, outputs, facts={WRITTEN_OUT: True})


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


class _Finder:
    """Finds hand-written attention by following a product to the next one."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.users: dict[int, list[int]] = defaultdict(list)
        for op in graph.ops:
            for storage in {graph.values[i].storage for i in op.inputs}:
                self.users[storage].append(op.id)
        # A value that the next iteration or an op outside of the repeat reads is no inner value.
        handed = [r for op in graph.ops for r in op.reads] if graph.repeats else []
        handed_on = [r.id for r in handed if r.every] + [r.then.value for r in handed if r.then]
        self.results = {graph.values[i].storage for i in (*graph.outputs, *handed_on)}

    def chain(self, first: Op) -> _Chain | None:
        """The attention whose first product this is, if it is one and nothing inside is read."""
        values = self.graph.values
        inner = {first.id}
        current, softmax, scale, dropout = first, False, 1.0, 0.0
        mask: Ref | None = None
        scores = values[first.outputs[0]]
        for _ in range(_LONGEST_CHAIN):
            storage = values[current.outputs[0]].storage
            op = self._only_user(current, inner)
            if op is None or op.repeats != first.repeats:
                return None
            if op.name == "aten.bmm":
                ends = softmax and self._is_scores(operand(op, "self").id, storage, scores)
                return _Chain(first, op, frozenset(inner), mask, scale, dropout) if ends else None
            others = [i for i in op.inputs if values[i].storage != storage]
            alone = all(values[i].elements == 1 for i in others)
            if UNFUSED in op.facts:
                return None
            if op.name in _SOFTMAX and not softmax and self._along_keys(op, scores):
                softmax = True
            elif op.name in _SCALES and not softmax and alone:
                scale *= _factor(op)
            elif op.name in _MASKS and not softmax and self._masks(op, storage, others):
                wide = [r for r in op.reads if r.id in others and values[r.id].elements > 1]
                if wide and mask is not None:
                    return None
                mask = wide[0] if wide else mask
            elif op.name == _DROPOUT and softmax:
                dropout = float(op.arguments.get("p", 0.0))
            elif op.name not in _COPIES:
                return None
            if values[op.outputs[0]].elements != scores.elements:
                return None
            inner.add(op.id)
            current = op
        return None

    def _only_user(self, op: Op, inner: set[int]) -> Op | None:
        """The one kernel that reads what `op` made (views on the way join `inner`)."""
        ops, values = self.graph.ops, self.graph.values
        made = [values[i].storage for i in op.outputs]
        if any(storage in self.results for storage in made) or any(
            self.users.get(storage) for storage in made[1:]
        ):
            return None
        following = [u for u in self.users.get(made[0], ()) if u > op.id]
        kernels = [ops[u] for u in following if ops[u].kind != "view"]
        if not kernels:
            return None
        first = kernels[0]
        overwritten = bool(first.outputs) and values[first.outputs[0]].storage == made[0]
        if len(kernels) > 1 and not overwritten:
            return None
        inner.update(
            u for u in following if ops[u].kind == "view" and (not overwritten or u < first.id)
        )
        return first

    def _is_scores(self, index: int, storage: int, scores: Tensor) -> bool:
        """Whether a value is all of the scores, heads and rows in their order."""
        value = self.graph.values[index]
        return (
            value.storage == storage
            and value.shape == scores.shape
            and value.stride == scores.stride
        )

    def _along_keys(self, op: Op, scores: Tensor) -> bool:
        """Whether a softmax goes over the last dimension, and that is the keys'."""
        value = self.graph.values[op.inputs[0]]
        return op.arguments.get("dim", -1) in (-1, len(value.shape) - 1) and (
            value.shape[-1],
            value.stride[-1],
        ) == (scores.shape[-1], scores.stride[-1])

    def _masks(self, op: Op, storage: int, others: Iterable[int]) -> bool:
        """Whether the scores are what is masked, not the mask."""
        name = {
            "aten.where": "condition",
            "aten.masked_fill": "mask",
            "aten.masked_fill_": "mask",
        }.get(op.name)
        return name is None or operand(op, name).id in others


def _factor(op: Op) -> float:
    other = op.arguments.get("other")
    if not isinstance(other, (int, float)) or not other:
        return 1.0
    return 1 / other if op.name.startswith("aten.div") else float(other)
