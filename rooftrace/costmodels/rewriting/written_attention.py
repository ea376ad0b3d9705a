"""Finds attention that a model wrote by hand: two products, and all that lies between them.

    softmax(mask(softcap tanh(scale q k^T / softcap)), and a sink as one more column)

It follows the values from the second product back to the first.  It names ops of torch: several
elementary ones make an attention together, and no rule of a single op can say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.marks import UNFUSED
from rooftrace.costmodels.rewriting.matching import LAST, Number, Pat, Pattern, Scalar, Words, match
from rooftrace.costmodels.rewriting.places import Places, StoragePlace, beside
from rooftrace.costmodels.rewriting.regions import can_be_one, ops_between
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op, OpGraph

PRODUCT = "aten.bmm"
LONGEST_CHAIN = 24

_DROPPED = Pat("native_dropout", "kept", Scalar("p"), train=Scalar("train"))
_CUT = Pat("slice", "whole", dim=LAST, start=Scalar("start"), end=Scalar("end"))
_SHIFTED = (Pat("sub", "logits", "shift"), "logits")
"""A softmax does not change when one number for each row is taken off."""
_SOFTMAX = Pat("_softmax _safe_softmax", _SHIFTED, dim=LAST, said="softmax")
_SHARES = Pat("div", "raised", "total")
_RAISED = Pat("exp", _SHIFTED)
_SUM = Pat("sum", "raised", dim=LAST, keepdim=True)
_FILL = (Number("fill"), "filler")
_SCALED = (Pat("mul", "scores", Scalar("by")), Pat("div", "scores", Scalar("over")))
_WEIGHED = (Pat("mul", "scores", "by", said="op"), Pat("div", "scores", "by", said="op"))
_MASKED = (
    Pat("add", "scores", "mask", said="op"),
    Pat("masked_fill", "scores", "hidden", _FILL, said="op"),
    Pat("where", "shown", "scores", _FILL, said="op"),
    Pat("where", "hidden", _FILL, "scores", said="op"),
)


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
    inner: frozenset[int] = frozenset()
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
        attention = _Reader(places, op).read()
        # The last product of an attention cannot be the first of another.
        if attention is not None and attention.first.id not in ends:
            ends.add(op.id)
            yield attention


class _Reader:
    """The way from the last product of an attention back to its first, through its scores.

    H: heads over the batch.  S: queries.  L: keys.
    """

    def __init__(self, places: Places, last: Op) -> None:
        self.places, self.values, self.last = places, places.graph.values, last
        self.heads, self.queries, self.length = self.values[operand(last, "self").id].shape
        self.written = WrittenAttention(last, last, ())
        self.factor = 1.0  # on the scores, by ops behind the one that is read

    def read(self) -> WrittenAttention | None:
        """The attention; None where there is none."""
        written, logits = self.written, self._logits(operand(self.last, "self").id)
        apart: tuple[int, ...] = ()
        for _ in range(LONGEST_CHAIN):
            if logits is None:
                return None
            lead = self.values[logits].shape[:-2]
            apart = lead if len(lead) > len(apart) else apart
            op = self.places.made_by(self.places.straight(logits))
            if op is None or op.repeats != self.last.repeats or op.part != "forward" or beside(op):
                return None
            if op.name == PRODUCT:
                return self._finished(op, written.lead or apart)
            logits = self._step(logits)
        return None

    def _finished(self, first: Op, lead: tuple[int, ...]) -> WrittenAttention | None:
        """The attention once its first product is known."""
        written, graph = self.written, self.places.graph
        whole = self.values[first.outputs[0]].shape == (self.heads, self.queries, self.length)
        if not whole or math.prod(lead) != self.heads:
            return None
        written.first, written.lead = first, lead
        written.scale = self.factor * (written.softcap or 1.0)
        read = [operand(op, name) for op, name in ((first, "self"), (first, "mat2"))]
        read += [operand(self.last, "mat2"), *(tensor for _, tensor in written.scales)]
        read += [written.sinks] if written.sinks is not None else []
        if written.mask is not None:
            read.append(written.mask.tensor)
            read += [written.mask.fill] if isinstance(written.mask.fill, Ref) else []
        start = {ref.id for ref in read}
        inside = ops_between(self.places, start, self.last.outputs) | {self.last.id}
        written.inner = inside - {self.last.id}
        own = all(graph.ops[number].part == "forward" for number in inside)
        written.alone = own and can_be_one(self.places, inside, self.last.outputs, start)
        return written

    def _match(self, value: int, pattern: Pattern, known: Words | None = None) -> Words | None:
        """What the words of a pattern name, of which "scores" are a number for each pair."""
        return match(self.places, value, pattern, known, accept=self._accept)

    def _accept(self, word: str, value: int) -> bool:
        """Whether a word may name a value: of scores there is one for each pair of all heads."""
        if word == "shift":
            return self._has(value, 1)
        return word != "scores" or self._has(value, self.length)

    def _has(self, value: int, columns: int) -> bool:
        """Whether a value has so many numbers for each query of all heads."""
        tensor = self.values[value]
        rows = tensor.shape[-2:] == (self.queries, columns)
        return rows and tensor.elements == self.heads * self.queries * columns

    # -- from probabilities to what they are the softmax of ------------------------------------

    def _logits(self, value: int) -> int | None:
        """The value whose softmax `value` is, sinks not counted."""
        written, columns, cut = self.written, self.length, None
        dropped = self._match(value, _DROPPED)
        if dropped is not None:
            written.dropout, value = float(dropped["p"]), dropped["kept"]
        whole = self._match(value, _CUT)
        if whole is not None and self.values[whole["whole"]].shape[-1] == self.length + 1:
            value, columns = whole["whole"], self.length + 1
            cut = int(whole["start"] or 0) not in (0, -columns)  # whether the first one is
        words = self._match(value, _SOFTMAX)
        if words is None:
            return self._exponentials(value) if cut is None else None
        if UNFUSED in words["softmax"].facts or not self._has(words["logits"], columns):
            return None
        written.plain = "shift" not in words
        if cut is None:
            return int(words["logits"])
        parts = ["sinks", "scores"] if cut else ["scores", "sinks"]
        joined = self._match(words["logits"], Pat("cat", parts, dim=LAST, said="cat"))
        if joined is None:
            return None
        lead = self.values[joined["cat"].outputs[0]].shape[:-2]
        return int(joined["scores"]) if self._take_sinks(joined["sinks"], lead) else None

    def _exponentials(self, value: int) -> int | None:
        """e / sum(e), or e / (sum(e) + exp(sink)), of e = exp(scores), each less the same rows."""
        shares = self._match(value, _SHARES)
        words = None if shares is None else self._match(shares["raised"], _RAISED)
        if shares is None or words is None or not self._has(words["logits"], self.length):
            return None
        self.written.plain = False
        sink = Pat("sub", "sinks", "shift") if "shift" in words else "sinks"
        known = {name: item for name, item in {**shares, **words}.items() if name != "logits"}
        total = self._match(shares["total"], (_SUM, Pat("add", _SUM, Pat("exp", sink))), known)
        if total is None:
            return None
        lead = self.values[shares["raised"]].shape[:-2]
        taken = "sinks" not in total or self._take_sinks(total["sinks"], lead)
        return int(words["logits"]) if taken else None

    def _take_sinks(self, sinks: int, lead: tuple[int, ...]) -> bool:
        """Note the vector of one number for each head that lies under a broadcast [.., H, S, 1],
        where there is one."""
        self.written.lead, self.written.plain = lead, False
        value, heads = sinks, lead[-1]
        place = self.places.place(value)
        if place is None or not _only(place, -3, heads):
            return False
        while True:
            here = self.places.place(value)
            if here is None or here.offset != place.offset:
                return False
            if math.prod(here.shape) == heads and sum(n > 1 for n in here.shape) == (heads > 1):
                self.written.sinks = Ref(value)
                return True
            op = self.places.made_by(value)
            if op is None or op.kind != "view" or beside(op):
                return False
            value = op.inputs[0]

    # -- between the first product and the softmax ---------------------------------------------

    def _step(self, value: int) -> int | None:
        """What an op makes the scores of."""
        written = self.written
        words = self._match(value, _SCALED)
        number = None if words is None else words.get("by", words.get("over"))
        if words is not None and isinstance(number, (int, float)) and number:
            self.factor *= float(number) if "by" in words else 1 / number
            return int(words["scores"])
        words = self._match(value, Pat("tanh", "scores"))
        if words is not None:
            if written.softcap or written.scales or self.factor <= 0:
                return None
            written.softcap, self.factor, written.plain = self.factor, 1.0, False
            return int(words["scores"])
        words = self._match(value, _WEIGHED)
        if words is not None:
            return self._weighed(words["op"], words["scores"], words["by"])
        words = self._match(value, _MASKED)
        return None if words is None else self._masked(words)

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

    def _masked(self, words: Words) -> int | None:
        """The scores before a mask was put on them."""
        written, scores = self.written, int(words["scores"])
        if written.mask is not None or written.softcap or written.scales:
            return None
        tensor = next(words[name] for name in ("mask", "hidden", "shown") if name in words)
        fill = Ref(words["filler"]) if "filler" in words else words.get("fill")
        if isinstance(fill, Ref) and (self.values[fill.id].elements != 1 or self.factor != 1):
            return None
        if len(self.values[tensor].shape) > 2 and not self._lead(self.values[scores].shape[:-2]):
            return None
        hides = "hidden" in words
        written.mask = WrittenMask(words["op"], Ref(tensor), hides, fill, self.factor)
        self.factor = 1.0
        return scores


def _only(place: StoragePlace, dim: int, size: int) -> bool:
    """Whether a value differs along one dimension only, which has this size."""
    if len(place.shape) < -dim or place.shape[dim] != size:
        return False
    at = len(place.shape) + dim
    steps = place.steps
    return all(step == 0 for d, step in enumerate(steps) if d != at) and (
        size == 1 or steps[at] > 0
    )
