"""Reads the softmax of attention that is written out: an op or exponentials, and sinks."""

from __future__ import annotations

import math

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.marks import UNFUSED
from rooftrace.costmodels.rewriting.places import StoragePlace, beside
from rooftrace.costmodels.rewriting.written_parts import (
    COPIES,
    LONGEST_CHAIN,
    Differs,
    ScorePath,
)
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_DROPOUT = "aten.native_dropout"


class SoftmaxReader(ScorePath):
    """Reads from probabilities back to the scores whose softmax they are."""

    def logits_of(self, value: int) -> int:
        """The value whose softmax `value` is, sinks not counted."""
        for _ in range(LONGEST_CHAIN):
            op = self.maker(value)
            columns = self.length + (self.cut is not None)
            if op.name == _DROPOUT:
                self.written.dropout = float(op.arguments.get("p", 0.0))
                value = operand(op, "input").id
            elif op.name in COPIES:
                value = operand(op, "self").id
            elif op.name in _SOFTMAX:
                if UNFUSED in op.facts:
                    raise Differs
                value = operand(op, "self").id
                last = len(self.values[value].shape) - 1
                if op.arguments.get("dim", -1) not in (-1, last):
                    raise Differs
                return self._without_sinks(self._shifted(value, columns)[0], columns)
            elif op.name in ("aten.div", "aten.div_"):
                return self._exponentials(op)
            else:
                raise Differs
        raise Differs

    def _shifted(self, value: int, columns: int) -> tuple[int, Ref | None]:
        """A softmax does not change when one number for each row is taken off: without it."""
        op = self.places.kernel_of(value)
        while op is not None and op.name in COPIES:
            self.maker(value)
            value = operand(op, "self").id
            op = self.places.kernel_of(value)
        if not self.is_scores(Ref(value), columns):
            raise Differs
        other = None if op is None else op.arguments.get("other")
        if op is None or op.name not in ("aten.sub", "aten.sub_") or not isinstance(other, Ref):
            return value, None
        if not self.is_rows(other.id) or op.arguments.get("alpha", 1) != 1:
            raise Differs
        self.maker(value)
        self.written.plain = False
        return operand(op, "self").id, other

    def _without_sinks(self, value: int, columns: int) -> int:
        """The scores to which one column of sinks was added."""
        if columns == self.length:
            return value
        for _ in range(LONGEST_CHAIN):
            op = self.maker(value)
            if op.name not in COPIES:
                break
            value = operand(op, "self").id
        parts = op.arguments.get("tensors", ())
        tensor = self.values[op.outputs[0]]
        if op.name != "aten.cat" or len(parts) != 2 or op.arguments.get("dim", 0) not in (
            -1, len(tensor.shape) - 1
        ):  # fmt: skip
            raise Differs
        sinks, scores = (parts[1], parts[0]) if self.cut else parts
        if not self.is_scores(scores, self.length):
            raise Differs
        self._take_sinks(sinks, tensor.shape[:-2])
        return int(scores.id)

    def _take_sinks(self, sinks: Ref, lead: tuple[int, ...]) -> None:
        self.written.lead = lead
        self.written.sinks = self._by_head(sinks, lead[-1])
        self.written.plain = False

    def _by_head(self, sinks: Ref, heads: int) -> Ref:
        """The vector of one number for each head that lies under a broadcast [.., H, S, 1]."""
        value = sinks.id
        place = self.places.place(value)
        if place is None or sinks.then or sinks.every or not _only(place, -3, heads):
            raise Differs
        while True:
            here = self.places.place(value)
            if here is None or here.offset != place.offset:
                raise Differs
            if math.prod(here.shape) == heads and sum(n > 1 for n in here.shape) == (heads > 1):
                return Ref(value)
            op = self.places.made_by(value)
            if op is None or op.kind != "view" or beside(op):
                raise Differs
            value = op.inputs[0]

    def _exponentials(self, op: Op) -> int:
        """e / sum(e), or e / (sum(e) + exp(sink)), of e = exp(scores), each less the same rows."""
        part, total = op.arguments["self"], op.arguments["other"]
        if not self.is_scores(part, self.length) or not isinstance(total, Ref):
            raise Differs
        self.written.plain = False
        raised = self.maker(part.id)
        if raised.name not in ("aten.exp", "aten.exp_"):
            raise Differs
        value, shift = self._shifted(operand(raised, "self").id, self.length)
        self._add_up(total.id, raised, shift)
        return value

    def _add_up(self, total: int, raised: Op, shift: Ref | None) -> None:
        """Reads the sum of exponentials, with one for the sinks."""
        op = self.maker(total)
        terms = [total]
        if op.name in ("aten.add", "aten.add_"):
            if op.arguments.get("alpha", 1) != 1:
                raise Differs
            terms = [operand(op, "self").id, operand(op, "other").id]
        sums = [term for term in terms if self._sums(term, raised)]
        if len(sums) != 1:
            raise Differs
        for term in terms:
            if term in sums:
                continue
            sink = self._row_maker(term)
            if sink.name != "aten.exp":
                raise Differs
            taken = self._row_maker(operand(sink, "self").id) if shift is not None else sink
            if shift is not None and (
                taken.name != "aten.sub" or operand(taken, "other").id != shift.id
            ):
                raise Differs
            lead = self.values[raised.outputs[0]].shape[:-2]
            self._take_sinks(operand(taken, "self"), lead)
            self.cut = self.length  # as if a column had been there

    def _row_maker(self, value: int) -> Op:
        op = self.places.made_by(value)
        if op is None or op.repeats != self.last.repeats or op.kind == "view":
            raise Differs
        self.written.inner.add(op.id)
        return op

    def _sums(self, value: int, raised: Op) -> bool:
        """Whether a value is the sum of exponentials over the keys."""
        op = self.places.kernel_of(value)
        if op is None or op.name != "aten.sum" or not self.is_rows(value):
            return False
        source = operand(op, "self").id
        last = len(self.values[source].shape) - 1
        if op.arguments.get("dim") not in ((-1,), (last,)):
            return False
        self.maker(value)
        return self.is_scores(Ref(source), self.length) and self.maker(source).id == raised.id


def _only(place: StoragePlace, dim: int, size: int) -> bool:
    """Whether a value differs along one dimension only, which has this size."""
    if len(place.shape) < -dim or place.shape[dim] != size:
        return False
    at = len(place.shape) + dim
    steps = place.steps
    return all(step == 0 for d, step in enumerate(steps) if d != at) and (
        size == 1 or steps[at] > 0
    )
