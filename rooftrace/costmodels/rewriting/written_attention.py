"""Finds attention that a model wrote by hand: two products, and all that lies between them.

    probabilities = softmax(mask(softcap tanh(scale q k^T / softcap)), and a sink as one more column)

It follows the values from the second product back to the first.  It names ops of torch: several
elementary ones make an attention together, and no rule of a single op can say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.marks import UNFUSED
from rooftrace.costmodels.rewriting.places import Places, StoragePlace, merged
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

PRODUCT = "aten.bmm"
_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_COPIES = ("aten._to_copy", "aten.clone")
_DROPOUT = "aten.native_dropout"
_LONGEST_CHAIN = 24


class _Differs(Exception):  # noqa: N818 - no error: the structure is another one
    """What is read is not the structure that is looked for."""


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """What hides scores.  op: puts the mask on, and has what is known of it as facts.

    tensor: added to the scores, or true where they are hidden or shown.  fill: what hidden scores
    are replaced by, None where the mask is added.  factor: on the masked scores.
    """

    op: Op
    tensor: Ref
    hides: bool = False
    fill: float | Ref | None = None
    factor: float = 1.0


@dataclass(slots=True)
class WrittenAttention:
    """first: the product of queries and keys.  last: that of probabilities and values.

    inner: all ops before the last, views included.  alone: whether nothing else reads what they
    make.  lead: the dimensions before queries and keys.  scales: tensors on the scores, with their
    op.  sinks: a value with one number for each head, which is one more column of the scores.
    plain: written as compilers know it: with a softmax op, without sinks and soft caps.
    """

    last: Op
    first: Op
    lead: tuple[int, ...]
    inner: set[int] = field(default_factory=set)
    scale: float = 1.0
    scales: list[tuple[Op, Ref]] = field(default_factory=list)
    softcap: float = 0.0
    mask: WrittenMask | None = None
    sinks: Ref | None = None
    dropout: float = 0.0
    plain: bool = True
    alone: bool = False


def written_attentions(graph: OpGraph) -> Iterator[WrittenAttention]:
    """Every attention of a forward pass that is written out, in order of its last product."""
    places = Places(graph)
    ends: set[int] = set()
    for op in graph.ops:
        if op.name != PRODUCT or op.part != "forward":
            continue
        try:
            attention = _Reader(places, op).read()
        except _Differs:
            continue
        # The last product of an attention cannot be the first of another.
        if attention.first.id not in ends:
            ends.add(op.id)
            yield attention


class _Reader:
    """Reads one attention from its last product back to its first."""

    def __init__(self, places: Places, last: Op) -> None:
        self.places, self.values = places, places.graph.values
        self.last = last
        self.queries, self.length = self.values[operand(last, "self").id].shape[-2:]
        self.read_ = WrittenAttention(last, last, ())
        self.factor = 1.0
        self.cut: int | None = None  # the column of probabilities that is dropped: 0 or L

    def read(self) -> WrittenAttention:
        """The attention.  Raises _Differs where there is none."""
        written = self.read_
        logits = self._softmax(operand(self.last, "self").id)
        apart: tuple[int, ...] = ()
        for _ in range(_LONGEST_CHAIN):
            lead = self.values[logits].shape[:-2]
            apart = lead if len(lead) > len(apart) else apart
            op = self._maker(logits)
            if op.name == PRODUCT:
                break
            logits = self._step(op)
        else:
            raise _Differs
        written.first = op
        heads = self.values[op.outputs[0]].shape[0]
        written.lead = written.lead or apart
        whole = self.values[op.outputs[0]].shape == (heads, self.queries, self.length)
        if not whole or math.prod(written.lead) != heads or (self.cut is None) != (
            written.sinks is None
        ):  # fmt: skip
            raise _Differs
        written.scale = self.factor * (written.softcap or 1.0)
        written.alone = self._alone() and not self._overwritten()
        return written

    def _overwritten(self) -> bool:
        """Whether an operand of the first product is another one when the last begins."""
        first = self.read_.first
        return any(
            self.places.overwritten(operand(first, name).id, first.id, self.last.id)
            for name in ("self", "mat2")
        )

    # -- one op back ---------------------------------------------------------------------------

    def _maker(self, value: int) -> Op:
        """The kernel that made a value; between them are views that keep all, in its order.

        One of them may drop the first or the last column.
        """
        seen = value
        while True:
            op = self.places.made_by(value)
            if op is None or op.repeats != self.last.repeats or op.part != "forward":
                raise _Differs
            if any(ref.then or ref.every for ref in op.reads):
                raise _Differs
            self.read_.inner.add(op.id)
            if op.kind != "view":
                break
            before, after = self.values[op.inputs[0]].shape, self.values[value].shape
            column = self.length + 1
            if op.name == "aten.slice" and before[-1:] == (column,) and after[-1:] == (
                self.length,
            ):  # fmt: skip
                self._same_order(seen, value)
                start = int(op.arguments.get("start") or 0)
                self.cut = self.length if start in (0, -column) else 0
                seen = op.inputs[0]
            value = op.inputs[0]
        self._same_order(seen, value)
        return op

    def _same_order(self, one: int, other: int) -> None:
        a, b = self.values[one], self.values[other]
        if a.storage != b.storage or merged(a) != merged(b):
            raise _Differs

    def _is_scores(self, item: Argument, columns: int) -> bool:
        """Whether an argument has a number for each pair of all heads."""
        if not isinstance(item, Ref):
            return False
        tensor = self.values[item.id]
        heads = self.values[operand(self.last, "mat2").id].shape[0]
        rows = tensor.shape[-2:] == (self.queries, columns)
        return rows and tensor.elements == heads * self.queries * columns

    def _is_rows(self, value: int) -> bool:
        """Whether a value has one number for each row of the scores."""
        tensor = self.values[value]
        heads = self.values[operand(self.last, "mat2").id].shape[0]
        return tensor.shape[-2:] == (self.queries, 1) and tensor.elements == heads * self.queries

    # -- the softmax ---------------------------------------------------------------------------

    def _softmax(self, value: int) -> int:
        """The value whose softmax `value` is, sinks not counted."""
        for _ in range(_LONGEST_CHAIN):
            op = self._maker(value)
            columns = self.length + (self.cut is not None)
            if op.name == _DROPOUT:
                self.read_.dropout = float(op.arguments.get("p", 0.0))
                value = operand(op, "input").id
            elif op.name in _COPIES:
                value = operand(op, "self").id
            elif op.name in _SOFTMAX:
                if UNFUSED in op.facts:
                    raise _Differs
                value = operand(op, "self").id
                last = len(self.values[value].shape) - 1
                if op.arguments.get("dim", -1) not in (-1, last):
                    raise _Differs
                return self._without_sinks(self._shifted(value, columns)[0], columns)
            elif op.name in ("aten.div", "aten.div_"):
                return self._exponentials(op)
            else:
                raise _Differs
        raise _Differs

    def _shifted(self, value: int, columns: int) -> tuple[int, Ref | None]:
        """A softmax does not change when one number for each row is taken off: without it."""
        op = self.places.kernel_of(value)
        while op is not None and op.name in _COPIES:
            self._maker(value)
            value = operand(op, "self").id
            op = self.places.kernel_of(value)
        if not self._is_scores(Ref(value), columns):
            raise _Differs
        other = None if op is None else op.arguments.get("other")
        if op is None or op.name not in ("aten.sub", "aten.sub_") or not isinstance(other, Ref):
            return value, None
        if not self._is_rows(other.id) or op.arguments.get("alpha", 1) != 1:
            raise _Differs
        self._maker(value)
        self.read_.plain = False
        return operand(op, "self").id, other

    def _without_sinks(self, value: int, columns: int) -> int:
        """The scores to which one column of sinks was added."""
        if columns == self.length:
            return value
        for _ in range(_LONGEST_CHAIN):
            op = self._maker(value)
            if op.name not in _COPIES:
                break
            value = operand(op, "self").id
        parts = op.arguments.get("tensors", ())
        tensor = self.values[op.outputs[0]]
        if op.name != "aten.cat" or len(parts) != 2 or op.arguments.get("dim", 0) not in (
            -1, len(tensor.shape) - 1
        ):  # fmt: skip
            raise _Differs
        sinks, scores = (parts[1], parts[0]) if self.cut else parts
        if not self._is_scores(scores, self.length):
            raise _Differs
        self._take_sinks(sinks, tensor.shape[:-2])
        return int(scores.id)

    def _take_sinks(self, sinks: Ref, lead: tuple[int, ...]) -> None:
        self.read_.lead = lead
        self.read_.sinks = self._by_head(sinks, lead[-1])
        self.read_.plain = False

    def _by_head(self, sinks: Ref, heads: int) -> Ref:
        """The vector of one number for each head that lies under a broadcast [.., H, S, 1]."""
        value = sinks.id
        place = self.places.place(value)
        if place is None or sinks.then or sinks.every or not _only(place, -3, heads):
            raise _Differs
        while True:
            here = self.places.place(value)
            if here is None or here.offset != place.offset:
                raise _Differs
            if math.prod(here.shape) == heads and sum(n > 1 for n in here.shape) == (heads > 1):
                return Ref(value)
            op = self.places.made_by(value)
            if op is None or op.kind != "view" or any(r.then or r.every for r in op.reads):
                raise _Differs
            value = op.inputs[0]

    def _exponentials(self, op: Op) -> int:
        """e / sum(e), or e / (sum(e) + exp(sink)), of e = exp(scores), each less the same rows."""
        part, total = op.arguments["self"], op.arguments["other"]
        if not self._is_scores(part, self.length) or not isinstance(total, Ref):
            raise _Differs
        self.read_.plain = False
        raised = self._maker(part.id)
        if raised.name not in ("aten.exp", "aten.exp_"):
            raise _Differs
        value, shift = self._shifted(operand(raised, "self").id, self.length)
        self._add_up(total.id, raised, shift)
        return value

    def _add_up(self, total: int, raised: Op, shift: Ref | None) -> None:
        """Reads the sum of exponentials, with one for the sinks."""
        op = self._maker(total)
        terms = [total]
        if op.name in ("aten.add", "aten.add_"):
            if op.arguments.get("alpha", 1) != 1:
                raise _Differs
            terms = [operand(op, "self").id, operand(op, "other").id]
        sums = [term for term in terms if self._sums(term, raised)]
        if len(sums) != 1:
            raise _Differs
        for term in terms:
            if term in sums:
                continue
            sink = self._row_maker(term)
            if sink.name != "aten.exp":
                raise _Differs
            taken = self._row_maker(operand(sink, "self").id) if shift is not None else sink
            if shift is not None and (
                taken.name != "aten.sub" or operand(taken, "other").id != shift.id
            ):
                raise _Differs
            lead = self.values[raised.outputs[0]].shape[:-2]
            self._take_sinks(operand(taken, "self"), lead)
            self.cut = self.length  # as if a column had been there

    def _row_maker(self, value: int) -> Op:
        op = self.places.made_by(value)
        if op is None or op.repeats != self.last.repeats or op.kind == "view":
            raise _Differs
        self.read_.inner.add(op.id)
        return op

    def _sums(self, value: int, raised: Op) -> bool:
        """Whether a value is the sum of exponentials over the keys."""
        op = self.places.kernel_of(value)
        if op is None or op.name != "aten.sum" or not self._is_rows(value):
            return False
        source = operand(op, "self").id
        last = len(self.values[source].shape) - 1
        if op.arguments.get("dim") not in ((-1,), (last,)):
            return False
        self._maker(value)
        return self._is_scores(Ref(source), self.length) and self._maker(source).id == raised.id

    # -- between the first product and the softmax ---------------------------------------------

    def _step(self, op: Op) -> int:
        """What an op makes the scores of."""
        name = op.name.removesuffix("_")
        if name in _COPIES:
            return operand(op, "self").id
        if name in ("aten.mul", "aten.div"):
            return self._scaled(op, name)
        if name == "aten.tanh":
            if self.read_.softcap or self.read_.scales or self.factor <= 0:
                raise _Differs
            self.read_.softcap, self.factor, self.read_.plain = self.factor, 1.0, False
            return operand(op, "self").id
        if name in ("aten.add", "aten.masked_fill", "aten.where"):
            return self._masked(op, name)
        raise _Differs

    def _scores_of(self, op: Op, names: tuple[str, ...]) -> tuple[int, Argument]:
        """Of two operands the scores, and the other one."""
        one, other = (op.arguments.get(name) for name in names)
        both = self._is_scores(one, self.length) and self._is_scores(other, self.length)
        if both and op.name not in ("aten.add", "aten.add_"):
            raise _Differs
        if isinstance(one, Ref) and self._is_scores(one, self.length):
            return one.id, other
        if isinstance(other, Ref) and self._is_scores(other, self.length):
            return other.id, one
        raise _Differs

    def _scaled(self, op: Op, name: str) -> int:
        scores, other = self._scores_of(op, ("self", "other"))
        if name == "aten.div" and operand(op, "self").id != scores:
            raise _Differs
        if isinstance(other, (int, float)) and other and not op.arguments.get("rounding_mode"):
            self.factor *= 1 / other if name == "aten.div" else float(other)
            return scores
        if not isinstance(other, Ref) or other.then or other.every or name != op.name:
            raise _Differs
        tensor = self.values[other.id]
        alike = self.values[op.outputs[0]].dtype == self.values[scores].dtype
        if math.prod(tensor.shape[-2:]) != 1 or not alike:
            raise _Differs
        if len(tensor.shape) > 2:
            self._lead(self.values[scores].shape[:-2])
        self.read_.scales.append((op, other))
        return scores

    def _lead(self, lead: tuple[int, ...]) -> None:
        if self.read_.lead not in ((), lead):
            raise _Differs
        self.read_.lead = lead

    def _masked(self, op: Op, name: str) -> int:
        written = self.read_
        if written.mask is not None or written.softcap or written.scales:
            raise _Differs
        if any(ref.then or ref.every for ref in op.reads):
            raise _Differs
        hides, fill = False, None
        if name == "aten.add":
            scores, mask = self._scores_of(op, ("self", "other"))
            if op.arguments.get("alpha", 1) != 1:
                raise _Differs
        elif name == "aten.masked_fill":
            scores, fill = operand(op, "self").id, op.arguments.get("value")
            mask, hides = op.arguments.get("mask"), True
        else:
            scores, fill = self._scores_of(op, ("self", "other"))
            mask = op.arguments.get("condition")
            hides = op.arguments.get("other") == Ref(scores)
        if not isinstance(mask, Ref) or not self._is_scores(Ref(scores), self.length):
            raise _Differs
        if isinstance(fill, Ref):
            fill = self._number(fill)
        if name != "aten.add" and not isinstance(fill, (int, float, Ref)):
            raise _Differs
        if len(self.values[mask.id].shape) > 2:
            self._lead(self.values[scores].shape[:-2])
        written.mask = WrittenMask(op, mask, hides, fill, self.factor)
        if isinstance(fill, Ref) and self.factor != 1:
            raise _Differs
        self.factor = 1.0
        return scores

    def _number(self, item: Ref) -> float | Ref:
        """What a tensor of one element holds, where an op says so; else the tensor."""
        if self.values[item.id].elements != 1 or item.then or item.every:
            raise _Differs
        op = self.places.kernel_of(item.id)
        says = {"aten.scalar_tensor": "s", "aten.full": "fill_value"}
        number = None if op is None else op.arguments.get(says.get(op.name, ""))
        return float(number) if isinstance(number, (int, float)) else item

    # -- readers -------------------------------------------------------------------------------

    def _alone(self) -> bool:
        """Whether nothing else reads what is made inside; what only they read joins them."""
        graph, inner = self.places.graph, self.read_.inner
        made = {self.values[v].storage for i in inner for v in graph.ops[i].outputs}
        rows = self._rows_between(made)
        inner |= rows
        made |= {self.values[v].storage for i in rows for v in graph.ops[i].outputs}
        for storage in made:
            owner = self.places.made_by(storage)
            if owner is None or owner.id not in inner or storage in self.places.shared:
                return False
            for reader in self.places.readers[storage]:
                if reader.kind == "view":
                    inner.add(reader.id)
                elif reader.id not in inner and reader.id != self.last.id:
                    return False
        return True

    def _rows_between(self, made: set[int]) -> set[int]:
        """Ops that lie between values made inside: those that make what is taken off each row."""
        graph, inner = self.places.graph, self.read_.inner
        between: set[int] = set()
        following = [
            reader
            for storage in made
            for reader in self.places.readers[storage]
            if reader.id not in inner and reader.id < self.last.id
        ]
        while following:
            op = following.pop()
            if op.id in between or op.id in inner or op.id >= self.last.id:
                continue
            rows = self.values[operand(self.last, "mat2").id].shape[0] * self.queries
            if any(self.values[v].elements != rows for v in op.outputs):
                continue
            between.add(op.id)
            for storage in {self.values[v].storage for v in op.outputs}:
                following += self.places.readers[storage]
        return between


def _only(place: StoragePlace, dim: int, size: int) -> bool:
    """Whether a value differs along one dimension only, which has this size."""
    if len(place.shape) < -dim or place.shape[dim] != size:
        return False
    at = len(place.shape) + dim
    steps = place.steps
    return all(step == 0 for d, step in enumerate(steps) if d != at) and (
        size == 1 or steps[at] > 0
    )
