"""Attention in its two forms, and the passes between them: one flash kernel, or products in HBM.

Each pass takes a verified OpGraph and returns one, with the number of attentions that it changed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.tracer.graph import (
    Argument,
    Op,
    OpGraph,
    Ref,
    Tensor,
    contiguous,
    references,
    refs,
)

ATTENTION = "rooftrace.attention.default"
ATTENTION_BACKWARD = "rooftrace.attention_backward.default"
WRITTEN_OUT = "written_out"
"""A fact of attention that no library's kernel was called for: how it is cut is not known."""


# -- one kernel to products ------------------------------------------------------------------------


def materialise_attention(graph: OpGraph) -> tuple[OpGraph, int]:
    """Every attention op as q k^T, scale, mask, softmax, dropout, p v, each a kernel of its own.

    Backward uses the probabilities that forward saved.  Reshapes are taken as free, as if batched
    products took any strides; attention over batches that broadcast stays as it is.  What comes out
    runs (`to_fx`) and gives the same numbers; a causal mask is a constant "causal_mask_SxL" of it.
    """
    edit = _Editor(graph)
    saved: dict[int, _Saved] = {}
    count = 0
    for op in graph.ops:
        if op.target not in (ATTENTION, ATTENTION_BACKWARD) or _batches_broadcast(graph, op):
            edit.ops.append(op)
        elif op.target == ATTENTION:
            saved[graph.values[op.outputs[0]].storage] = _Attention(edit, op).forward()
            count += graph.times(op)
        else:
            out = graph.values[_ref(op, "out").id].storage
            _Attention(edit, op).backward(saved.get(out))
    return (edit.done(), count) if len(edit.values) > len(graph.values) else (graph, 0)


def _batches_broadcast(graph: OpGraph, op: Op) -> bool:
    shapes = {graph.values[_ref(op, name).id].shape[:-3] for name in ("query", "key", "value")}
    return len(shapes) > 1


class _Editor:
    """A graph being rebuilt: new values at the end, ops in a new list, renumbered at the end."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.values = list(graph.values)
        self.ops: list[Op] = []
        self._causal: dict[tuple[int, int], int] = {}

    def value(
        self,
        shape: tuple[int, ...],
        dtype: str,
        role: str,
        repeats: tuple[int, ...],
        name: str = "",
    ) -> int:
        """A new contiguous value."""
        index = len(self.values)
        stride = contiguous(shape)
        self.values.append(Tensor(shape, dtype, stride, role, index, name, repeats))
        return index

    def view(
        self, of: Ref, shape: tuple[int, ...], stride: tuple[int, ...], repeats: tuple[int, ...]
    ) -> int:
        """A value that has the bytes of another, contiguous or with these strides."""
        index, source = len(self.values), self.values[of.id]
        then = source.then if source.then and source.then.repeat in repeats else None
        if of.then is not None:
            then = replace(of.then, value=self.values[of.then.value].storage)
        self.values.append(
            replace(source, shape=shape, stride=stride, name="", repeats=repeats, then=then)
        )
        return index

    def emit(
        self,
        like: Op,
        target: str,
        arguments: Mapping[str, Argument],
        outputs: tuple[int, ...],
        kind: str = "kernel",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """An op in the place of `like`: same module, part and family."""
        self.ops.append(
            replace(
                like,
                target=target,
                arguments=dict(arguments),
                inputs=tuple(refs(arguments)),
                outputs=outputs,
                kind=kind,
                facts=dict(facts or {}),
                flops_torch=None,
            )
        )

    def causal_mask(self, queries: int, length: int) -> int:
        """A constant bool[S, L], the same one for every attention of this size."""
        found = self._causal.get((queries, length))
        if found is None:
            found = self._causal[queries, length] = self.value(
                (queries, length), "bool", "constants", (), f"causal_mask_{queries}x{length}"
            )
        return found

    def done(self) -> OpGraph:
        """The new graph, verified."""
        ops = tuple(
            op if op.id == index else replace(op, id=index) for index, op in enumerate(self.ops)
        )
        return self.graph.replace(values=tuple(self.values), ops=ops).verify()


@dataclass(frozen=True, slots=True)
class _Saved:
    """What forward keeps for backward, as value ids: probabilities, dropped ones, dropout mask."""

    probabilities: int
    dropped: int
    mask: int | None


class _Attention:
    """One attention op taken apart.  H: query heads over the batch.  Queries S, keys L."""

    def __init__(self, edit: _Editor, op: Op) -> None:
        self.edit, self.op = edit, op
        self.query, self.key, self.value = (_ref(op, n) for n in ("query", "key", "value"))
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
        self._product(q, self._transposed(k), scores)
        scaled = self._scores()
        self._kernel("aten.mul.Tensor", {"self": Ref(scores), "other": self.scale}, scaled)
        probabilities = self._scores()
        self._kernel(
            "aten._softmax.default",
            {"self": Ref(self._masked(scaled)), "dim": -1, "half_to_float": False},
            probabilities,
        )
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
        grad = self._rows(_ref(self.op, "grad_out"))
        grad_q, grad_k, grad_v, *grad_mask = self.op.outputs
        self._into_shared(grad_v, self._transposed(Ref(saved.dropped)), grad)
        grad_p = self._scores()
        self._product(grad, self._transposed(v), grad_p)
        if saved.mask is not None:
            dropped, grad_p = grad_p, self._scores()
            self._kernel(
                "aten.native_dropout_backward.default",
                {
                    "grad_output": Ref(dropped),
                    "mask": Ref(saved.mask),
                    "scale": 1 / (1 - self.dropout) if self.dropout < 1 else 0.0,
                },
                grad_p,
            )
        grad_s = self._scores()
        self._kernel(
            "aten._softmax_backward_data.default",
            {
                "grad_output": Ref(grad_p),
                "output": Ref(saved.probabilities),
                "dim": -1,
                "input_dtype": f"dtype:{self.dtype}",
            },
            grad_s,
        )
        scaled = self._scores()
        self._kernel("aten.mul.Tensor", {"self": Ref(grad_s), "other": self.scale}, scaled)
        self._into(grad_q, lambda out: self._product(Ref(scaled), k, out))
        self._into_shared(grad_k, self._transposed(Ref(scaled)), q)
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

    def _scores(self) -> int:
        """A new [H, S, L] value."""
        return self._new((self.heads, self.queries, self.length), self.dtype)

    def _masked(self, scores: int) -> int:
        """The scores with the mask on: -inf where it is False, or added to it."""
        mask = self.op.arguments.get("mask")
        if not isinstance(mask, Ref):
            if not self.op.arguments.get("is_causal", False):
                return scores
            mask = Ref(self.edit.causal_mask(self.queries, self.length))
        wide = self._reshaped(Ref(scores), (*self.lead, self.queries, self.length))
        masked = self._scores()
        out = self._as(masked, self.edit.values[wide.id].shape)
        if self.edit.values[mask.id].dtype == "bool":
            self._kernel(
                "aten.where.ScalarOther",
                {"condition": mask, "self": wide, "other": float("-inf")},
                out,
            )
        else:
            self._kernel("aten.add.Tensor", {"self": wide, "other": mask}, out)
        self._view(
            "aten.reshape.default",
            {"self": Ref(out), "shape": self.edit.values[masked].shape},
            masked,
        )
        return masked

    def _view(self, target: str, arguments: Mapping[str, Argument], out: int) -> None:
        self.edit.emit(self.op, target, arguments, (out,), kind="view")

    def _as(self, index: int, shape: tuple[int, ...]) -> int:
        """Another view of a value that is made here."""
        return self.edit.view(Ref(index), shape, contiguous(shape), self.op.repeats)

    def _reshaped(self, item: Ref, shape: tuple[int, ...]) -> Ref:
        if self.edit.values[item.id].shape == shape:
            return item
        out = self.edit.view(item, shape, contiguous(shape), self.op.repeats)
        self._view("aten.reshape.default", {"self": item, "shape": shape}, out)
        return Ref(out)

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

    def _transposed(self, item: Ref) -> Ref:
        """The [H, b, a] view of an [H, a, b] value."""
        return _turned(self.edit, self.op, item)

    def _into(self, target: int, make: Callable[[int], None]) -> None:
        """Let `make` write the value `target` of the original graph, as [heads, rows, width]."""
        wanted = self.edit.values[target]
        flat = self._as(target, (math.prod(wanted.shape[:-2]), *wanted.shape[-2:]))
        make(flat)
        self._view("aten.reshape.default", {"self": Ref(flat), "shape": wanted.shape}, target)

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
        self._view("aten.reshape.default", {"self": Ref(out), "shape": wanted.shape}, target)


# -- products to one kernel ------------------------------------------------------------------------

_SOFTMAX = frozenset({"aten._softmax", "aten._safe_softmax"})
_SCALES = frozenset({"aten.mul", "aten.div", "aten.mul_", "aten.div_"})
_MASKS = frozenset({"aten.add", "aten.add_", "aten.masked_fill", "aten.masked_fill_", "aten.where"})
_COPIES = frozenset({"aten._to_copy", "aten.clone"})
_DROPOUT = "aten.native_dropout"
_LONGEST_CHAIN = 12


def flash_from_products(graph: OpGraph) -> tuple[OpGraph, int]:
    """Hand-written attention as one op: bmm, scale / mask / cast, softmax, cast / dropout, bmm.

    Only where nothing else reads what lies between, so that the score matrix can stay on the chip;
    in training backward reads the probabilities, and the attention stays as it was written.  What
    comes out is for pricing: a scale that is a tensor, and what a mask fills in, are not kept.
    """
    finder = _Finder(graph)
    inner: set[int] = set()
    last: dict[int, _Chain] = {}
    for op in graph.ops:
        # What ends one attention does not begin another.
        if op.name == "aten.bmm" and op.part == "forward" and op.id not in last:
            chain = finder.chain(op)
            if chain is not None:
                inner |= chain.inner
                last[chain.last.id] = chain
    if not last:
        return graph, 0
    edit = _Editor(graph)
    for op in graph.ops:
        if op.id in last:
            _emit_flash(edit, last[op.id])
        elif op.id not in inner:
            edit.ops.append(op)
    return edit.done(), sum(graph.times(chain.last) for chain in last.values())


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


def _emit_flash(edit: _Editor, chain: _Chain) -> None:
    first = chain.first
    query, key = _ref(first, "self"), _turned(edit, first, _ref(first, "mat2"))
    heads, queries, _ = edit.values[query.id].shape
    logsumexp = edit.value((heads, queries), "fp32", "activations", chain.last.repeats)
    arguments: dict[str, Argument] = {
        "query": query,
        "key": key,
        "value": _ref(chain.last, "mat2"),
        "mask": chain.mask,
        "dropout_p": chain.dropout,
        "is_causal": False,
        "scale": chain.scale,
    }
    outputs = (chain.last.outputs[0], logsumexp)
    edit.emit(chain.last, ATTENTION, arguments, outputs, facts={WRITTEN_OUT: True})


def _turned(edit: _Editor, like: Op, item: Ref) -> Ref:
    """The [H, b, a] view of an [H, a, b] value."""
    source = edit.values[item.id]
    (heads, a, b), (outer, rows, columns) = source.shape, source.stride
    out = edit.view(item, (heads, b, a), (outer, columns, rows), like.repeats)
    turn = {"self": item, "dim0": 1, "dim1": 2}
    edit.emit(like, "aten.transpose.int", turn, (out,), kind="view")
    return Ref(out)


class _Finder:
    """Finds hand-written attention by following a product to the next one."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.users: dict[int, list[int]] = defaultdict(list)
        for op in graph.ops:
            for storage in {graph.values[i].storage for i in op.inputs}:
                self.users[storage].append(op.id)
        # What iterations hand on, or all of them leave for an op outside, is no inner value.
        handed = [r for op in graph.ops for r in references(op.arguments)] if graph.repeats else []
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
                ends = softmax and self._is_scores(_ref(op, "self").id, storage, scores)
                return _Chain(first, op, frozenset(inner), mask, scale, dropout) if ends else None
            others = [i for i in op.inputs if values[i].storage != storage]
            alone = all(values[i].elements == 1 for i in others)
            if op.name in _SOFTMAX and not softmax and self._along_keys(op, scores):
                softmax = True
            elif op.name in _SCALES and not softmax and alone:
                scale *= _factor(op)
            elif op.name in _MASKS and not softmax and self._masks(op, storage, others):
                wide = [
                    r
                    for r in references(op.arguments)
                    if r.id in others and values[r.id].elements > 1
                ]
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
        return name is None or _ref(op, name).id in others


def _factor(op: Op) -> float:
    other = op.arguments.get("other")
    if not isinstance(other, (int, float)) or not other:
        return 1.0
    return 1 / other if op.name.startswith("aten.div") else float(other)


def _ref(op: Op, name: str) -> Ref:
    item = op.arguments[name]
    if not isinstance(item, Ref):
        raise ValueError(f"op {op.id} ({op.target}): expected a tensor as {name!r}, got {item!r}")
    return item
