"""Attention as matrix products: matches of hand-written attention, and attention ops decomposed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rooftrace.costmodels.ops.cost import UNFUSED
from rooftrace.costmodels.rewrites.dataflow import COPIES, Location, ValueFlow, reads_across
from rooftrace.costmodels.rewrites.editing import ATTENTION, ATTENTION_BACKWARD, Editor, operand
from rooftrace.costmodels.rewrites.patterns import (
    LAST,
    Bindings,
    NonTensor,
    Number,
    Pat,
    Pattern,
    can_be_one,
    match,
    ops_between,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor

# -- hand-written attention ------------------------------------------------------------------------
# Two batched products, and all that lies between them:
#
#     softmax(mask(softcap tanh(scale q k^T / softcap)), and a sink as one more column)
#
# It is read from the second product back to the first.  No rule of a single op can say that several
# elementary ops make an attention together.

PRODUCT, SCALED_PRODUCT = "aten.bmm", "aten.baddbmm"
LONGEST_CHAIN = 24

_DROPPED = Pat("native_dropout", "kept", NonTensor("p"), train=NonTensor("train"))
_CUT = Pat("slice", "all", dim=LAST, start=NonTensor("start"), end=NonTensor("end"))
_SHIFTED = (Pat("sub", "logits", "shift"), "logits")
"""A softmax does not change when one number is subtracted from each row."""
_SOFTMAX = Pat("_softmax _safe_softmax", _SHIFTED, dim=LAST, bind="softmax")
_SHARES = Pat("div", "raised", "total")
_RAISED = Pat("exp", _SHIFTED)
_SUM = Pat("sum", "raised", dim=LAST, keepdim=True)
_FILL = (Number("fill"), "filler")
_SCALED = (Pat("mul", "scores", NonTensor("by")), Pat("div", "scores", NonTensor("over")))
_WEIGHED = (Pat("mul", "scores", "by", bind="op"), Pat("div", "scores", "by", bind="op"))
_MASKED = (
    Pat("add", "scores", "mask", bind="op"),
    Pat("masked_fill", "scores", "hidden", _FILL, bind="op"),
    Pat("where", "shown", "scores", _FILL, bind="op"),
    Pat("where", "hidden", _FILL, "scores", bind="op"),
)


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """A mask on scores.  op: applies the mask, and has its facts.

    tensor: added to the scores, or true where they are hidden or shown.  fill: the value of hidden
    scores, None where the mask is added.  factor: on the masked scores.
    """

    op: Op
    tensor: Ref
    hides: bool = False
    fill: float | Ref | None = None
    factor: float = 1.0


@dataclass(slots=True)
class WrittenAttention:
    """first: the product of queries and keys.  last: that of probabilities and values.

    inner: all ops before the last, views included.  alone: whether nothing else reads their
    results.  lead: the dimensions before queries and keys.  scales: tensors on the scores, with
    their op.  sinks: one number for each head, as one more column of the scores.  plain: as
    compilers match it: with a softmax op, without sinks and soft caps; masks on scores that are
    divided by a number, or never scaled (`_sfdp_pattern_5` and others of Inductor's
    fuse_attention.py; those with products by a number take no mask).
    """

    last: Op
    first: Op
    lead: tuple[int, ...]
    inner: frozenset[int] = frozenset()
    scale: float = 1.0
    scales: list[tuple[Op, Ref]] = field(default_factory=list)
    softcap: float = 0.0
    mask: WrittenMask | None = None
    sinks: Ref | None = None
    dropout: float = 0.0
    plain: bool = True
    alone: bool = False

    @property
    def operands(self) -> tuple[Ref, Ref, Ref]:
        """Queries, keys with their width before their length, and values."""
        scaled = self.first.name == SCALED_PRODUCT  # q k^T alpha, with a beta of 0
        names = ("batch1", "batch2") if scaled else ("self", "mat2")
        query, key = (operand(self.first, name) for name in names)
        return query, key, operand(self.last, "mat2")


def written_attentions(graph: OpGraph) -> Iterator[WrittenAttention]:
    """Every hand-written attention of a forward pass, in order of its last product."""
    flow = ValueFlow(graph)
    ends: set[int] = set()
    for op in graph.ops:
        if op.name != PRODUCT or op.part != "forward":
            continue
        attention = _AttentionReader(flow, op).read()
        # The last product of an attention cannot be the first of another.
        if attention is not None and attention.first.id not in ends:
            ends.add(op.id)
            yield attention


class _AttentionReader:
    """Walks from the last product of an attention back to its first, through its scores.

    H: heads over the batch.  S: queries.  L: keys.
    """

    def __init__(self, flow: ValueFlow, last: Op) -> None:
        self.flow, self.values, self.last = flow, flow.values, last
        self.heads, self.queries, self.length = self.values[operand(last, "self").id].shape
        self.written = WrittenAttention(last, last, ())
        self.factor = 1.0  # on the scores, by later ops
        self.divided = False  # the scores, by a number

    def read(self) -> WrittenAttention | None:
        """The attention; None where there is none."""
        logits = self._logits(operand(self.last, "self").id)
        longest: tuple[int, ...] = ()
        for _ in range(LONGEST_CHAIN):
            if logits is None:
                return None
            lead = self.values[logits].shape[:-2]
            longest = lead if len(lead) > len(longest) else longest
            op = self.flow.producer(self.flow.root(logits))
            if (
                op is None
                or op.repeats != self.last.repeats
                or op.part != "forward"
                or reads_across(op)
            ):
                return None
            adds_nothing = op.name == SCALED_PRODUCT and op.arguments.get("beta", 1) == 0
            if op.name == PRODUCT or adds_nothing:
                return self._finished(op, self.written.lead or longest)
            logits = self._step(logits)
        return None

    def _finished(self, first: Op, lead: tuple[int, ...]) -> WrittenAttention | None:
        """The attention once its first product is known."""
        written, graph = self.written, self.flow.graph
        scores = self.values[first.outputs[0]].shape
        if scores != (self.heads, self.queries, self.length) or math.prod(lead) != self.heads:
            return None
        written.first, written.lead = first, lead
        if first.name == SCALED_PRODUCT:
            self.factor *= first.arguments.get("alpha", 1)
            written.plain = False
        written.scale = self.factor * (written.softcap or 1.0)
        if written.mask is not None and not self.divided:
            query = self.flow.kernel_of(written.operands[0].id)
            while query is not None and query.name in COPIES:
                query = self.flow.kernel_of(query.inputs[0])
            scaled = query is not None and query.name in ("aten.mul", "aten.div")
            written.plain &= written.scale == 1 and not written.scales and not scaled
        read = [*written.operands, *(tensor for _, tensor in written.scales)]
        read += [operand(first, "self")] if first.name == SCALED_PRODUCT else []
        read += [written.sinks] if written.sinks is not None else []
        if written.mask is not None:
            read.append(written.mask.tensor)
            read += [written.mask.fill] if isinstance(written.mask.fill, Ref) else []
        start = {ref.id for ref in read}
        inside = ops_between(self.flow, start, self.last.outputs) | {self.last.id}
        written.inner = inside - {self.last.id}
        forward = all(graph.ops[number].part == "forward" for number in inside)
        written.alone = forward and can_be_one(self.flow, inside, self.last.outputs, start)
        return written

    def _match(
        self, value: int, pattern: Pattern, bound: Bindings | None = None
    ) -> Bindings | None:
        """The bindings of a pattern; "scores" bind values with a number for each pair."""
        return match(self.flow, value, pattern, bound, accept=self._accept)

    def _accept(self, name: str, value: int) -> bool:
        columns = {"shift": 1, "scores": self.length}.get(name)
        return columns is None or self._has(value, columns)

    def _has(self, value: int, columns: int) -> bool:
        """Whether a value has this many columns for each query of all heads."""
        tensor = self.values[value]
        rows = tensor.shape[-2:] == (self.queries, columns)
        return rows and tensor.elements == self.heads * self.queries * columns

    # -- from the probabilities to the scores ------------------------------------

    def _logits(self, value: int) -> int | None:
        """The value whose softmax `value` is, sinks not counted."""
        written, columns, cut = self.written, self.length, None
        dropped = self._match(value, _DROPPED)
        if dropped is not None:
            written.dropout, value = float(dropped["p"]), dropped["kept"]
        part = self._match(value, _CUT)
        if part is not None and self.values[part["all"]].shape[-1] == self.length + 1:
            value, columns = part["all"], self.length + 1
            cut = int(part["start"] or 0) not in (0, -columns)  # whether the first column goes
        bound = self._match(value, _SOFTMAX)
        if bound is None:
            return self._exponentials(value) if cut is None else None
        if UNFUSED in bound["softmax"].facts or not self._has(bound["logits"], columns):
            return None
        written.plain = "shift" not in bound
        if cut is None:
            return int(bound["logits"])
        parts = ["sinks", "scores"] if cut else ["scores", "sinks"]
        joined = self._match(bound["logits"], Pat("cat", parts, dim=LAST, bind="cat"))
        if joined is None:
            return None
        lead = self.values[joined["cat"].outputs[0]].shape[:-2]
        return int(joined["scores"]) if self._take_sinks(joined["sinks"], lead) else None

    def _exponentials(self, value: int) -> int | None:
        """e / sum(e), or e / (sum(e) + exp(sink)), of e = exp(scores), each less the same rows."""
        shares = self._match(value, _SHARES)
        bound = None if shares is None else self._match(shares["raised"], _RAISED)
        if shares is None or bound is None or not self._has(bound["logits"], self.length):
            return None
        self.written.plain = False
        sink = Pat("sub", "sinks", "shift") if "shift" in bound else "sinks"
        fixed = {name: item for name, item in {**shares, **bound}.items() if name != "logits"}
        total = self._match(shares["total"], (_SUM, Pat("add", _SUM, Pat("exp", sink))), fixed)
        if total is None:
            return None
        lead = self.values[shares["raised"]].shape[:-2]
        taken = "sinks" not in total or self._take_sinks(total["sinks"], lead)
        return int(bound["logits"]) if taken else None

    def _take_sinks(self, sinks: int, lead: tuple[int, ...]) -> bool:
        """Set `sinks` to the vector [H] under a broadcast [.., H, S, 1], if there is one."""
        self.written.lead, self.written.plain = lead, False
        value, heads = sinks, lead[-1]
        broadcast = self.flow.location(value)
        if broadcast is None or not _varies_along(broadcast, -3, heads):
            return False
        while True:
            place = self.flow.location(value)
            if place is None or place.offset != broadcast.offset:
                return False
            if math.prod(place.shape) == heads and sum(n > 1 for n in place.shape) == (heads > 1):
                self.written.sinks = Ref(value)
                return True
            op = self.flow.producer(value)
            if op is None or op.kind != "view" or reads_across(op):
                return False
            value = op.inputs[0]

    # -- between the first product and the softmax ---------------------------------------------

    def _step(self, value: int) -> int | None:
        """The scores before one op on them."""
        written = self.written
        bound = self._match(value, _SCALED)
        number = None if bound is None else bound.get("by", bound.get("over"))
        if bound is not None and isinstance(number, (int, float)) and number:
            self.factor *= float(number) if "by" in bound else 1 / number
            self.divided = "over" in bound
            return int(bound["scores"])
        bound = self._match(value, Pat("tanh", "scores"))
        if bound is not None:
            if written.softcap or written.scales or self.factor <= 0:
                return None
            written.softcap, self.factor, written.plain = self.factor, 1.0, False
            return int(bound["scores"])
        bound = self._match(value, _WEIGHED)
        if bound is not None:
            return self._weighed(bound["op"], bound["scores"], bound["by"])
        bound = self._match(value, _MASKED)
        return None if bound is None else self._masked(bound)

    def _weighed(self, op: Op, scores: int, by: int) -> int | None:
        """The scores before an op multiplied them by a tensor of one number for each head."""
        tensor = self.values[by]
        alike = self.values[op.outputs[0]].dtype == self.values[scores].dtype
        if math.prod(tensor.shape[-2:]) != 1 or not alike:
            return None
        if len(tensor.shape) > 2 and not self._lead(self.values[scores].shape[:-2]):
            return None
        self.written.scales.append((op, Ref(by)))
        return scores

    def _lead(self, lead: tuple[int, ...]) -> bool:
        fits = self.written.lead in ((), lead)
        self.written.lead = lead
        return fits

    def _masked(self, bound: Bindings) -> int | None:
        """The scores before a mask was put on them."""
        written, scores = self.written, int(bound["scores"])
        if written.mask is not None or written.softcap or written.scales:
            return None
        tensor = next(bound[name] for name in ("mask", "hidden", "shown") if name in bound)
        fill = Ref(bound["filler"]) if "filler" in bound else bound.get("fill")
        if isinstance(fill, Ref) and (self.values[fill.id].elements != 1 or self.factor != 1):
            return None
        if len(self.values[tensor].shape) > 2 and not self._lead(self.values[scores].shape[:-2]):
            return None
        hides = "hidden" in bound
        written.mask = WrittenMask(bound["op"], Ref(tensor), hides, fill, self.factor)
        self.factor = 1.0
        return scores


def _varies_along(place: Location, dim: int, size: int) -> bool:
    """Whether a value varies along one dimension only, which has this size."""
    if len(place.shape) < -dim or place.shape[dim] != size:
        return False
    sizes = zip(place.shape, place.stride, strict=True)
    varying = [d for d, (n, stride) in enumerate(sizes) if n > 1 and stride]
    return varying == ([len(place.shape) + dim] if size > 1 else [])


# -- attention ops as products ---------------------------------------------------------------------


def materialise_attention(graph: OpGraph) -> tuple[OpGraph, int]:
    """Every attention op as q k^T, scale, mask, softmax, dropout, p v, each a kernel.

    Backward uses the probabilities that forward saved.  Reshapes are free, as if batched products
    took any strides; attention over batches that broadcast stays as it is.  The new graph runs
    (`to_fx`) and gives the same numbers; it holds a causal mask as a constant "causal_mask_SxL",
    one of a window as "window_mask_SxLxW", of chunks as "chunk_mask_SxLxC".  Also returns the
    number of attentions.
    """
    edit, values = Editor(graph), graph.values
    saved: dict[int, _Saved] = {}
    count = 0
    for op in graph.ops:
        if op.target not in (ATTENTION, ATTENTION_BACKWARD):
            edit.ops.append(op)
            continue
        batches = {values[operand(op, name).id].shape[:-3] for name in ("query", "key", "value")}
        if len(batches) > 1:
            edit.ops.append(op)
        elif op.target == ATTENTION:
            saved[values[op.outputs[0]].storage] = _Decomposition(edit, op).forward()
            count += graph.times(op)
        else:
            out = values[operand(op, "out").id].storage
            _Decomposition(edit, op).backward(saved.get(out))
    return (edit.done(), count) if len(edit.values) > len(values) else (graph, 0)


@dataclass(frozen=True, slots=True)
class _Saved:
    """Values that forward keeps for backward: probabilities, dropped ones, dropout mask."""

    probabilities: int
    dropped: int
    mask: int | None


class _Decomposition:
    """The ops of one attention.  H: query heads over the batch.  Queries S, keys L."""

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
        self._product(q, self.edit.transposed(self.op, k), scores)
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
        self._into_shared(grad_v, self.edit.transposed(self.op, Ref(saved.dropped)), grad)
        grad_p = self._scores()
        self._product(grad, self.edit.transposed(self.op, v), grad_p)
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
        self._into_shared(grad_k, self.edit.transposed(self.op, Ref(scaled)), q)
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
        facts = {"useful_pairs": visible, "all_pairs": self.queries * self.length}
        self._kernel("aten.bmm.default", {"self": a, "mat2": b}, out, facts=facts)

    def _made(self, target: str, arguments: Mapping[str, Argument]) -> int:
        """The new [H, S, L] value that a new kernel makes."""
        out = self._scores()
        self._kernel(target, arguments, out)
        return out

    def _scores(self, more: int = 0) -> int:
        """A new [H, S, L + more] value."""
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
        shape = (*rows, 1)
        wide = edit.view_op(op, "aten.expand.default", column, {"size": shape}, shape, strides)
        parts = (self._reshaped(Ref(scores), (*rows, self.length)), wide)
        both, soft = self._scores(1), self._scores(1)
        shape = (*rows, self.length + 1)
        self._kernel("aten.cat.default", {"tensors": parts, "dim": -1}, self._as(both, shape))
        both = edit.ops[-1].outputs[0]
        out = self._as(soft, shape)
        self._kernel("aten._softmax.default", {"self": Ref(both), **options}, out)
        flat = (self.heads, self.queries, self.length + 1)
        return edit.sliced(op, self._reshaped(Ref(out), flat), 2, 0, self.length).id

    def _masked(self, scores: int) -> int:
        """The masked scores: -inf (or `fill`) where the mask is False, or the sum with it."""
        arguments = self.op.arguments
        mask = arguments.get("mask")
        if not isinstance(mask, Ref):
            sizes = self.queries, self.length
            numbers = [(n, int(arguments.get(n, 0))) for n in ("window", "chunk")]
            banded = [(n, (*sizes, number)) for n, number in numbers if number]
            if not banded and not arguments.get("is_causal", False):
                return scores
            name, of = banded[0] if banded else ("causal", sizes)
            mask = Ref(self.edit.constant_mask(name, *of))
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
        self.edit.reshape(self.op, Ref(out), masked)
        return masked

    def _as(self, index: int, shape: tuple[int, ...]) -> int:
        """Another view of a new value."""
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
        self.edit.reshape(self.op, Ref(flat), target)

    def _into_shared(self, target: int, a: Ref, b: Ref) -> None:
        """The gradient a b of keys or values, added up over shared heads."""
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
        """The gradient of an additive mask: that of the scores, summed where it broadcasts."""
        wide = self._reshaped(Ref(scores), (*self.lead, self.queries, self.length))
        full, wanted = self.edit.values[wide.id].shape, self.edit.values[target]
        padded = (1,) * (len(full) - len(wanted.shape)) + wanted.shape
        dims = tuple(d for d, (n, m) in enumerate(zip(full, padded, strict=True)) if n != m)
        out = self._as(target, padded)
        if dims:
            self._kernel("aten.sum.dim_IntList", {"self": wide, "dim": dims, "keepdim": True}, out)
        else:
            self._kernel("aten.clone.default", {"self": wide}, out)
        self.edit.reshape(self.op, Ref(out), target)
