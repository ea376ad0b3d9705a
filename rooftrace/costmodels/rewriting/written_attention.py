"""Finds attention that a model wrote by hand: two products, and all that lies between them.

    softmax(mask(softcap tanh(scale q k^T / softcap)), and a sink as one more column)

It follows the values from the second product back to the first.  It names ops of torch: several
elementary ones make an attention together, and no rule of a single op can say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.places import Places, beside
from rooftrace.costmodels.rewriting.written_parts import (
    COPIES,
    LONGEST_CHAIN,
    Differs,
    WrittenAttention,
    WrittenMask,
)
from rooftrace.costmodels.rewriting.written_softmax import SoftmaxReader
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

PRODUCT = "aten.bmm"


def written_attentions(graph: OpGraph) -> Iterator[WrittenAttention]:
    """Every attention of a forward pass that is written out, in order of its last product."""
    places = Places(graph)
    ends: set[int] = set()
    for op in graph.ops:
        if op.name != PRODUCT or op.part != "forward":
            continue
        try:
            attention = _AttentionReader(places, op).read()
        except Differs:
            continue
        # The last product of an attention cannot be the first of another.
        if attention.first.id not in ends:
            ends.add(op.id)
            yield attention


class _AttentionReader(SoftmaxReader):
    """Reads from the softmax back to the first product: scale, soft cap and mask."""

    factor = 1.0
    """On the scores, by ops behind the one that is read."""

    def read(self) -> WrittenAttention:
        """The attention.  Raises Differs where there is none."""
        written = self.written
        logits = self.logits_of(operand(self.last, "self").id)
        apart: tuple[int, ...] = ()
        for _ in range(LONGEST_CHAIN):
            lead = self.values[logits].shape[:-2]
            apart = lead if len(lead) > len(apart) else apart
            op = self.maker(logits)
            if op.name == PRODUCT:
                break
            logits = self._step(op)
        else:
            raise Differs
        written.first = op
        written.lead = written.lead or apart
        whole = self.values[op.outputs[0]].shape == (self.heads, self.queries, self.length)
        sunk = (self.cut is not None) == (written.sinks is not None)
        if not whole or not sunk or math.prod(written.lead) != self.heads:
            raise Differs
        written.scale = self.factor * (written.softcap or 1.0)
        written.alone = self._alone() and not self._overwritten()
        return written

    def _overwritten(self) -> bool:
        """Whether an operand of the first product is another one when the last begins."""
        first = self.written.first
        return any(
            self.places.overwritten(operand(first, name).id, first.id, self.last.id)
            for name in ("self", "mat2")
        )

    # -- between the first product and the softmax ---------------------------------------------

    def _step(self, op: Op) -> int:
        """What an op makes the scores of."""
        name = op.name.removesuffix("_")
        if name in COPIES:
            return operand(op, "self").id
        if name in ("aten.mul", "aten.div"):
            return self._scaled(op, name)
        if name == "aten.tanh":
            if self.written.softcap or self.written.scales or self.factor <= 0:
                raise Differs
            self.written.softcap, self.factor = self.factor, 1.0
            self.written.plain = False
            return operand(op, "self").id
        if name in ("aten.add", "aten.masked_fill", "aten.where"):
            return self._masked(op, name)
        raise Differs

    def _scores_of(self, op: Op, names: tuple[str, ...]) -> tuple[int, Argument]:
        """Of two operands the scores, and the other one."""
        sides = [op.arguments.get(name) for name in names]
        whole = [self.is_scores(side, self.length) for side in sides]
        if all(whole) and op.name not in ("aten.add", "aten.add_"):
            raise Differs
        scores, other = sides if whole[0] else sides[::-1]
        if not any(whole) or not isinstance(scores, Ref):
            raise Differs
        return scores.id, other

    def _scaled(self, op: Op, name: str) -> int:
        scores, other = self._scores_of(op, ("self", "other"))
        if name == "aten.div" and operand(op, "self").id != scores:
            raise Differs
        if isinstance(other, (int, float)) and other and not op.arguments.get("rounding_mode"):
            self.factor *= 1 / other if name == "aten.div" else float(other)
            return scores
        if not isinstance(other, Ref) or other.then or other.every:
            raise Differs
        tensor = self.values[other.id]
        alike = self.values[op.outputs[0]].dtype == self.values[scores].dtype
        if math.prod(tensor.shape[-2:]) != 1 or not alike:
            raise Differs
        if len(tensor.shape) > 2:
            self._lead(self.values[scores].shape[:-2])
        self.written.scales.append((op, other))
        return scores

    def _lead(self, lead: tuple[int, ...]) -> None:
        if self.written.lead not in ((), lead):
            raise Differs
        self.written.lead = lead

    def _masked(self, op: Op, name: str) -> int:
        written = self.written
        if written.mask is not None or written.softcap or written.scales:
            raise Differs
        if beside(op):
            raise Differs
        hides, fill = False, None
        if name == "aten.add":
            scores, mask = self._scores_of(op, ("self", "other"))
            if op.arguments.get("alpha", 1) != 1:
                raise Differs
        elif name == "aten.masked_fill":
            scores, fill = operand(op, "self").id, op.arguments.get("value")
            mask, hides = op.arguments.get("mask"), True
        else:
            scores, fill = self._scores_of(op, ("self", "other"))
            mask = op.arguments.get("condition")
            hides = op.arguments.get("other") == Ref(scores)
        if not isinstance(mask, Ref) or not self.is_scores(Ref(scores), self.length):
            raise Differs
        if isinstance(fill, Ref):
            fill = self._number(fill)
        if name != "aten.add" and not isinstance(fill, (int, float, Ref)):
            raise Differs
        if len(self.values[mask.id].shape) > 2:
            self._lead(self.values[scores].shape[:-2])
        written.mask = WrittenMask(op, mask, hides, fill, self.factor)
        if isinstance(fill, Ref) and self.factor != 1:
            raise Differs
        self.factor = 1.0
        return scores

    def _number(self, item: Ref) -> float | Ref:
        """What a tensor of one element holds, where an op says so; else the tensor."""
        if self.values[item.id].elements != 1 or item.then or item.every:
            raise Differs
        op = self.places.kernel_of(item.id)
        says = {"aten.scalar_tensor": "s", "aten.full": "fill_value"}
        number = None if op is None else op.arguments.get(says.get(op.name, ""))
        return float(number) if isinstance(number, (int, float)) else item

    # -- readers -------------------------------------------------------------------------------

    def _alone(self) -> bool:
        """Whether nothing else reads what is made inside; what only they read joins them."""
        inner = self.written.inner
        inner |= self._rows_between(self._made(inner))
        for storage in self._made(inner):
            owner = self.places.made_by(storage)
            if owner is None or owner.id not in inner or storage in self.places.shared:
                return False
            for reader in self.places.readers[storage]:
                if reader.kind == "view":
                    inner.add(reader.id)
                elif reader.id not in inner and reader.id != self.last.id:
                    return False
        return True

    def _made(self, inner: set[int]) -> set[int]:
        ops = self.places.graph.ops
        return {self.values[value].storage for index in inner for value in ops[index].outputs}

    def _rows_between(self, made: set[int]) -> set[int]:
        """Ops that lie between values made inside: those that make what is taken off each row."""
        inner = self.written.inner
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
            rows = self.heads * self.queries
            if any(self.values[v].elements != rows for v in op.outputs):
                continue
            between.add(op.id)
            for storage in {self.values[v].storage for v in op.outputs}:
                following += self.places.readers[storage]
        return between
