"""Attention as matrix products: one kernel becomes several, with the scores in HBM between them.

The pass takes a verified OpGraph and returns one, with the number of attentions that it changed.
Its ops have torch's own names, since what it makes runs (`to_fx`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace.costmodels.rewriting.editing import (
    ATTENTION,
    ATTENTION_BACKWARD,
    Editor,
    operand,
)
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor


def materialise_attention(graph: OpGraph) -> tuple[OpGraph, int]:
    """Every attention op as q k^T, scale, mask, softmax, dropout, p v, each a kernel of its own.

    Backward uses the probabilities that forward saved.  Reshapes are taken as free, as if batched
    products took any strides; attention over batches that broadcast stays as it is.  The new graph
    runs (`to_fx`) and gives the same numbers; it holds a causal mask as a constant
    "causal_mask_SxL", one of a window as "window_mask_SxLxW", of chunks as "chunk_mask_SxLxC".
    """
    edit = Editor(graph)
    saved: dict[int, _Saved] = {}
    count = 0
    for op in graph.ops:
        if op.target not in (ATTENTION, ATTENTION_BACKWARD) or _batches_broadcast(graph, op):
            edit.ops.append(op)
        elif op.target == ATTENTION:
            saved[graph.values[op.outputs[0]].storage] = _Attention(edit, op).forward()
            count += graph.times(op)
        else:
            out = graph.values[operand(op, "out").id].storage
            _Attention(edit, op).backward(saved.get(out))
    return (edit.done(), count) if len(edit.values) > len(graph.values) else (graph, 0)


def _batches_broadcast(graph: OpGraph, op: Op) -> bool:
    shapes = {graph.values[operand(op, name).id].shape[:-3] for name in ("query", "key", "value")}
    return len(shapes) > 1


@dataclass(frozen=True, slots=True)
class _Saved:
    """What forward keeps for backward, as value ids: probabilities, dropped ones, dropout mask."""

    probabilities: int
    dropped: int
    mask: int | None


class _Attention:
    """One attention op taken apart.  H: query heads over the batch.  Queries S, keys L."""

    def __init__(self, edit: Editor, op: Op) -> None:
        self.edit, self.op = edit, op
        self.query, self.key, self.value = (operand(op, n) for n in ("query", "key", "value"))
        query, key = edit.values[self.query.id], edit.values[self.key.id]
        self.dtype = query.dtype
        self.lead = query.shape[:-2]
        self.heads, self.key_heads = math.prod(self.lead), math.prod(key.shape[:-2])
        self.queries, self.length = query.shape[-2], key.shape[-2]
        self.scale = op.arguments.get("scale", 1.0)
        self.dropout = float(op.arguments.get("dropout_p", 0.0))

    # -- forward and backward ----------------------------------------------------------------------

    def forward(self) -> _Saved:
        """out = dropout(softmax(scale q k^T + mask)) v."""
        q, k, v = self._rows(self.query), self._shared(self.key), self._shared(self.value)
        scores = self._scores()
        self._product(q, self.edit.turned(self.op, k), scores)
        scaled = self._made("aten.mul.Tensor", {"self": Ref(scores), "other": self.scale})
        probabilities = self._softmax(self._masked(self._capped(scaled)))
        dropped, mask = probabilities, None
        if self.dropout > 0:
            dropped = self._scores()
            mask = self._new((self.heads, self.queries, self.length), "bool", "activations")
            self._kernel(
                "aten.native_dropout.default",
                {"input": Ref(probabilities), "p": self.dropout, "train": True},
                dropped,
                mask,
            )
        self._into(self.op.outputs[0], lambda out: self._product(Ref(dropped), v, out))
        return _Saved(probabilities, dropped, mask)

    def backward(self, saved: _Saved | None) -> None:
        """dV = P^T dO, dP = dO V^T, dS = P (dP - sum dP P), dQ = scale dS K, dK = scale dS^T Q."""
        if saved is None:  # forward ran elsewhere: its probabilities come from outside
            outside = self._scores()
            saved = _Saved(outside, outside, None)
        q, k, v = self._rows(self.query), self._shared(self.key), self._shared(self.value)
        grad = self._rows(operand(self.op, "grad_out"))
        grad_q, grad_k, grad_v, *grad_mask = self.op.outputs
        self._into_shared(grad_v, self.edit.turned(self.op, Ref(saved.dropped)), grad)
        grad_p = self._scores()
        self._product(grad, self.edit.turned(self.op, v), grad_p)
        if saved.mask is not None:
            scale = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
            kept = {"grad_output": Ref(grad_p), "mask": Ref(saved.mask), "scale": scale}
            grad_p = self._made("aten.native_dropout_backward.default", kept)
        softmax = {
            "grad_output": Ref(grad_p), "output": Ref(saved.probabilities), "dim": -1,
            "input_dtype": f"dtype:{self.dtype}",
        }  # fmt: skip
        grad_s = self._made("aten._softmax_backward_data.default", softmax)
        scaled = self._made("aten.mul.Tensor", {"self": Ref(grad_s), "other": self.scale})
        self._into(grad_q, lambda out: self._product(Ref(scaled), k, out))
        self._into_shared(grad_k, self.edit.turned(self.op, Ref(scaled)), q)
        if grad_mask and self.edit.values[grad_mask[0]].elements:
            self._mask_gradient(grad_s, grad_mask[0])

    # -- pieces ------------------------------------------------------------------------------------

    def _kernel(
        self,
        target: str,
        arguments: Mapping[str, Argument],
        *outputs: int,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.edit.emit(self.op, target, arguments, outputs, facts=facts)

    def _new(self, shape: tuple[int, ...], dtype: str, role: str = "temporary") -> int:
        """A new value, in the repeats that the attention is in."""
        return self.edit.value(shape, dtype, role, self.op.repeats)

    def _product(self, a: Ref, b: Ref, out: int) -> None:
        """out[H, .., ..] = a b.  Products compute all pairs; facts say how many the mask shows."""
        visible = self.op.facts.get("visible_pairs")
        if visible is None:
            visible = self.queries * self.length
            if self.op.arguments.get("is_causal", False):
                rows = min(self.queries, self.length)
                visible = rows * (rows + 1) // 2 + (self.queries - rows) * self.length
        facts = {"useful_pairs": int(visible), "all_pairs": self.queries * self.length}
        self._kernel("aten.bmm.default", {"self": a, "mat2": b}, out, facts=facts)

    def _made(self, target: str, arguments: Mapping[str, Argument]) -> int:
        """The new [H, S, L] value that a new kernel makes."""
        out = self._scores()
        self._kernel(target, arguments, out)
        return out

    def _scores(self, more: int = 0) -> int:
        """A new [H, S, L] value; with so many more columns."""
        return self._new((self.heads, self.queries, self.length + more), self.dtype)

    def _capped(self, scores: int) -> int:
        """cap tanh(scores / cap); the scores themselves without a cap."""
        cap = float(self.op.arguments.get("softcap", 0.0))
        steps = (("div.Tensor", cap), ("tanh.default", None), ("mul.Tensor", cap)) if cap else ()
        for name, number in steps:
            other: dict[str, Argument] = {} if number is None else {"other": number}
            scores = self._made(f"aten.{name}", {"self": Ref(scores), **other})
        return scores

    def _softmax(self, scores: int) -> int:
        """The probabilities; sinks are one more column on the way."""
        options: dict[str, Argument] = {"dim": -1, "half_to_float": False}
        sinks = self.op.arguments.get("sinks")
        if not isinstance(sinks, Ref):
            return self._made("aten._softmax.default", {"self": Ref(scores), **options})
        edit, op, rows = self.edit, self.op, (*self.lead, self.queries)
        column = edit.viewed(op, sinks, (self.lead[-1], 1, 1))
        strides = (*(0,) * (len(rows) - 2), edit.values[column.id].stride[0], 0, 1)
        wide = edit.view(column, (*rows, 1), strides, op.repeats)
        spread: dict[str, Argument] = {"self": column, "size": (*rows, 1)}
        edit.emit(op, "aten.expand.default", spread, (wide,), kind="view")
        parts = (self._reshaped(Ref(scores), (*rows, self.length)), Ref(wide))
        both, soft = self._scores(1), self._scores(1)
        shape = (*rows, self.length + 1)
        self._kernel("aten.cat.default", {"tensors": parts, "dim": -1}, self._as(both, shape))
        both = edit.ops[-1].outputs[0]
        out = self._as(soft, shape)
        self._kernel("aten._softmax.default", {"self": Ref(both), **options}, out)
        flat = (self.heads, self.queries, self.length + 1)
        return edit.sliced(op, self._reshaped(Ref(out), flat), 2, 0, self.length).id

    def _masked(self, scores: int) -> int:
        """The scores with the mask on: -inf (or `fill`) where it is False, or added to it."""
        arguments = self.op.arguments
        mask = arguments.get("mask")
        if not isinstance(mask, Ref):
            sizes = self.queries, self.length
            numbers = [(n, int(arguments.get(n, 0))) for n in ("window", "chunk")]
            known = [(n, (*sizes, number)) for n, number in numbers if number]
            if not known and not arguments.get("is_causal", False):
                return scores
            name, of = known[0] if known else ("causal", sizes)
            mask = Ref(self.edit.known_mask(name, *of))
        fill = arguments.get("fill")
        wide = self._reshaped(Ref(scores), (*self.lead, self.queries, self.length))
        masked = self._scores()
        out = self._as(masked, self.edit.values[wide.id].shape)
        if self.edit.values[mask.id].dtype == "bool":
            self._kernel(
                "aten.where.ScalarOther",
                {"condition": mask, "self": wide, "other": -math.inf if fill is None else fill},
                out,
            )
        else:
            self._kernel("aten.add.Tensor", {"self": wide, "other": mask}, out)
        self.edit.stands_for(self.op, Ref(out), masked)
        return masked

    def _as(self, index: int, shape: tuple[int, ...]) -> int:
        """Another view of a value that is made here."""
        return self.edit.view(Ref(index), shape, Tensor.contiguous(shape), self.op.repeats)

    def _reshaped(self, item: Ref, shape: tuple[int, ...]) -> Ref:
        same = self.edit.values[item.id].shape == shape
        return item if same else self.edit.viewed(self.op, item, shape)

    def _rows(self, item: Ref) -> Ref:
        """A value as [heads, rows, width]."""
        shape = self.edit.values[item.id].shape
        return self._reshaped(item, (math.prod(shape[:-2]), *shape[-2:]))

    def _shared(self, item: Ref) -> Ref:
        """Keys or values as [H, L, width]; shared heads are copied, as unfused code does."""
        narrow = self._rows(item)
        if self.heads == self.key_heads:
            return narrow
        source = self.edit.values[narrow.id]
        wide = self._new((self.heads, *source.shape[1:]), source.dtype)
        self._kernel(
            "aten.repeat_interleave.self_int",
            {"self": narrow, "repeats": self.heads // self.key_heads, "dim": 0},
            wide,
        )
        return Ref(wide)

    def _into(self, target: int, make: Callable[[int], None]) -> None:
        """Let `make` write the value `target` of the original graph, as [heads, rows, width]."""
        wanted = self.edit.values[target]
        flat = self._as(target, (math.prod(wanted.shape[:-2]), *wanted.shape[-2:]))
        make(flat)
        self.edit.stands_for(self.op, Ref(flat), target)

    def _into_shared(self, target: int, a: Ref, b: Ref) -> None:
        """The gradient a b of keys or values; what shared heads give is added up."""
        if self.heads == self.key_heads:
            self._into(target, lambda out: self._product(a, b, out))
            return
        width = self.edit.values[b.id].shape[-1]
        wide = self._new((self.heads, self.length, width), self.dtype)
        self._product(a, b, wide)
        grouped = self._reshaped(
            Ref(wide), (self.key_heads, self.heads // self.key_heads, self.length, width)
        )
        self._into(
            target,
            lambda out: self._kernel("aten.sum.dim_IntList", {"self": grouped, "dim": (1,)}, out),
        )

    def _mask_gradient(self, scores: int, target: int) -> None:
        """The gradient of an additive mask: that of the scores, added up where it is shared."""
        wide = self._reshaped(Ref(scores), (*self.lead, self.queries, self.length))
        full, wanted = self.edit.values[wide.id].shape, self.edit.values[target]
        padded = (1,) * (len(full) - len(wanted.shape)) + wanted.shape
        dims = tuple(d for d, (n, m) in enumerate(zip(full, padded, strict=True)) if n != m)
        out = self._as(target, padded)
        if dims:
            self._kernel("aten.sum.dim_IntList", {"self": wide, "dim": dims, "keepdim": True}, out)
        else:
            self._kernel("aten.clone.default", {"self": wide}, out)
        self.edit.stands_for(self.op, Ref(out), target)
