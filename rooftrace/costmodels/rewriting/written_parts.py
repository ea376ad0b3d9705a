"""What attention that is written out consists of, and the way back through its values."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.places import Places, beside, merged
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op

COPIES = ("aten._to_copy", "aten.clone")
LONGEST_CHAIN = 24


class Differs(Exception):
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


class ScorePath:
    """The way from the last product of an attention back to its first, through its scores.

    H: heads over the batch.  S: queries.  L: keys.
    """

    def __init__(self, places: Places, last: Op) -> None:
        self.places, self.values, self.last = places, places.graph.values, last
        self.heads, self.queries, self.length = self.values[operand(last, "self").id].shape
        self.written = WrittenAttention(last, last, ())
        self.cut: int | None = None  # the column of probabilities that is dropped: 0 or L

    def maker(self, value: int) -> Op:
        """The kernel that made a value; between them are views that keep all, in its order.

        One of them may drop the first or the last column.
        """
        seen = value
        while True:
            op = self.places.made_by(value)
            if op is None or op.repeats != self.last.repeats or op.part != "forward":
                raise Differs
            if beside(op):
                raise Differs
            self.written.inner.add(op.id)
            if op.kind != "view":
                break
            before, after = self.values[op.inputs[0]].shape, self.values[value].shape
            columns = before[-1:], after[-1:]
            if op.name == "aten.slice" and columns == ((self.length + 1,), (self.length,)):
                self._same_order(seen, value)
                first = int(op.arguments.get("start") or 0) in (0, -self.length - 1)
                self.cut = self.length if first else 0
                seen = op.inputs[0]
            value = op.inputs[0]
        self._same_order(seen, value)
        return op

    def _same_order(self, view: int, made: int) -> None:
        a, b = self.values[view], self.values[made]
        if a.storage != b.storage or merged(a) != merged(b):
            raise Differs

    def is_scores(self, item: Argument, columns: int) -> bool:
        """Whether an argument has a number for each pair of all heads."""
        if not isinstance(item, Ref):
            return False
        tensor = self.values[item.id]
        rows = tensor.shape[-2:] == (self.queries, columns)
        return rows and tensor.elements == self.heads * self.queries * columns

    def is_rows(self, value: int) -> bool:
        """Whether a value has one number for each row of the scores."""
        tensor = self.values[value]
        return (
            tensor.shape[-2:] == (self.queries, 1) and tensor.elements == self.heads * self.queries
        )
