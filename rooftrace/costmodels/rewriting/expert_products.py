"""The ops of routed experts: sort the chosen rows by expert, multiply them, put them back.

`experts` finds the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One layer of E experts that compute all of T tokens."""

    total: Op  # adds up what the experts make of a token
    first: Op  # the products with the weights of all experts
    second: Op
    between: tuple[Op, ...]  # what is done between them, in order
    tokens: Ref  # [T, K]
    chosen: Ref  # [T, k], the experts of each token
    scores: Ref  # [T, E], zero but for those
    scored_first: bool  # whether the tokens are weighed, and not what is made of them
    count: int  # E
    choice: Op  # the top k
    inside: frozenset[int] = frozenset()  # nothing goes with it that something else may read


def emit(places: Places, edit: Editor, match: ExpertLayer) -> None:
    """Sort the chosen rows by expert, multiply, put them back in order and add them up."""
    op, values = match.total, edit.values
    tokens, width = values[match.tokens.id].shape
    k = values[match.chosen.id].shape[1]
    rows = tokens * k
    out = op.outputs[0]

    flat = edit.viewed(match.choice, match.chosen, (rows,))
    order = _Order(edit, match, flat, rows, k)
    gathered: dict[str, Argument] = {"self": match.scores, "dim": 1, "index": match.chosen}
    weights = values[match.scores.id].dtype
    score = edit.made(op, "aten.gather.default", gathered, (tokens, k), weights)
    score = order.taken(edit.viewed(op, score, (rows,)), order.permutation, (rows,), rows)
    score = edit.viewed(op, score, (rows, 1))
    made = order.taken(match.tokens, order.token, (rows, width), tokens)
    if match.scored_first:
        made = _times(edit, op, made, score)
    made = order.product(match.first, made)
    made = order.repeated(match, made)
    made = order.product(match.second, made)
    if not match.scored_first:
        made = _times(edit, op, made, score)
    width = values[made.id].shape[1]
    made = order.taken(made, order.back, (rows, width), rows)
    wide = edit.viewed(op, made, (tokens, k, width))
    edit.emit(op, "aten.sum.dim_IntList", {"self": wide, "dim": (1,)}, (out,))


def _times(edit: Editor, op: Op, rows: Ref, score: Ref) -> Ref:
    tensor = edit.values[rows.id]
    product: dict[str, Argument] = {"self": rows, "other": score}
    return edit.made(op, "aten.mul.Tensor", product, tensor.shape, tensor.dtype)


class _Order:
    """The chosen rows, sorted by expert."""

    def __init__(self, edit: Editor, match: ExpertLayer, flat: Ref, rows: int, k: int) -> None:
        self.edit, self.op, self.rows = edit, match.total, rows
        self.facts, self.rests_on = _facts(edit, match)
        sorted_ids = edit.value((rows,), "int64", "activations", self.op.repeats)
        permutation = edit.value((rows,), "int64", "activations", self.op.repeats)
        edit.emit(self.op, "aten.sort.default", {"self": flat}, (sorted_ids, permutation))
        self.permutation = Ref(permutation)
        back = edit.value((rows,), "int64", "activations", self.op.repeats)
        unused = edit.value((rows,), "int64", "activations", self.op.repeats)
        edit.emit(self.op, "aten.sort.default", {"self": self.permutation}, (unused, back))
        self.back = Ref(back)
        self.token = self._made(
            "aten.floor_divide.default", {"self": self.permutation, "other": k}, rows, "int64"
        )
        ids = self._made(
            "aten._to_copy.default", {"self": Ref(sorted_ids), "dtype": "dtype:int32"}, rows
        )
        counted = {"self": ids, "bins": match.count, "min": 0, "max": match.count - 1}
        sizes = self._made("aten.histc.default", counted, match.count)
        summed = {"self": sizes, "dim": 0, "dtype": "dtype:int32"}
        self.offsets = self._made("aten.cumsum.default", summed, match.count)

    def _made(
        self, target: str, arguments: dict[str, Argument], size: int, dtype: str = "int32"
    ) -> Ref:
        return self.edit.made(self.op, target, arguments, (size,), dtype)

    def taken(self, of: Ref, index: Ref, shape: tuple[int, ...], touched: int) -> Ref:
        """Rows of a value by their numbers."""
        arguments: dict[str, Argument] = {"self": of, "indices": (index,)}
        dtype = self.edit.values[of.id].dtype
        facts = {"rows_touched": touched}
        return self.edit.made(self.op, "aten.index.Tensor", arguments, shape, dtype, facts=facts)

    def product(self, like: Op, rows: Ref) -> Ref:
        """The rows of each expert times its weights."""
        weight = operand(like, "mat2")
        columns = self.edit.values[weight.id].shape[2]
        arguments: dict[str, Argument] = {"self": rows, "mat2": weight, "offs": self.offsets}
        dtype = self.edit.values[like.outputs[0]].dtype
        out = self.edit.value((self.rows, columns), dtype, "activations", like.repeats)
        rests_on = tuple(dict.fromkeys((*like.assumptions, *self.rests_on)))
        like = replace(like, assumptions=rests_on)
        self.edit.emit(like, "aten._grouped_mm.default", arguments, (out,), facts=self.facts)
        return Ref(out)

    def repeated(self, match: ExpertLayer, first: Ref) -> Ref:
        """What lies between the products, on the chosen rows."""
        edit, now = self.edit, {match.first.outputs[0]: first.id}
        for op in match.between:
            arguments = dict(op.arguments)
            for name, item in arguments.items():
                if isinstance(item, Ref):
                    arguments[name] = Ref(now[item.id])
            if "dim" in arguments:
                arguments["dim"] = -1
            for value in op.outputs:
                old = edit.values[value]
                shape = (self.rows, old.shape[2])
                if op.kind == "view":
                    source = edit.values[now[op.inputs[0]]]
                    stride = (source.stride[0], old.stride[2])
                    now[value] = edit.view(Ref(now[op.inputs[0]]), shape, stride, op.repeats)
                else:
                    now[value] = edit.value(shape, old.dtype, old.role, op.repeats)
            outputs = tuple(now[value] for value in op.outputs)
            edit.emit(op, op.target, arguments, outputs, kind=op.kind)
        return Ref(now[operand(match.second, "self").id])


def _facts(edit: Editor, match: ExpertLayer) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Facts of the grouped products, and the assumption that they rest on: rows, and the experts
    that get some of them.

    What the trace assumed of the choice says how many; else each expert is as likely as any other,
    and E (1 - (1 - k / E)^T) are expected.
    """
    tokens, k = edit.values[match.chosen.id].shape
    experts = match.count
    touched = experts * (1 - (1 - k / experts) ** tokens)
    rests_on: tuple[int, ...] = ()
    for assumption in edit.graph.assumptions:
        said = getattr(assumption, "facts", {})
        sizes = tuple(said.get(name) for name in ("rows", "chosen", "classes"))
        if assumption.where == match.choice.module and sizes == (tokens, k, experts):
            touched, rests_on = said["distinct"], (assumption.id,)
    return {"groups_touched": touched, "rows_routed": tokens * k}, rests_on
