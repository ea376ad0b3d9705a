"""Patterns of ops: by which op a value was made, and of what, through views, copies and casts.

`Pat("mul", Pat("silu", "x"), "y")` is a product, in either order, of the SiLU of one value and
of another one; its match binds `x` and `y` to values.  Then regions: ops that one kernel replaces;
and routers, which patterns find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

from rooftrace.costmodels.rewrites.dataflow import ValueFlow, reads_across
from rooftrace.costmodels.rewrites.editing import Editor, operand, rewritten
from rooftrace.graph import Argument, Op, OpGraph, Ref

Pattern = Any
"""A Pat; a name, which binds a value, the same wherever it stands; Number, NonTensor or Along; a
tuple of alternatives; a list of patterns, for a list; or the constant that an argument has to be.
"""
Bindings = Mapping[str, Any]
"""Values by their ids, numbers, and ops, by the names in a pattern."""
_COMMUTE = frozenset({"mul", "add"})
_IGNORED = frozenset({
    "dtype", "layout", "device", "pin_memory", "memory_format", "half_to_float", "non_blocking",
    "size", "sorted", "stable", "implicit",
})  # fmt: skip
"""Arguments that change neither the numbers of a result nor their operands."""
_DEFAULTS = {
    "largest": True, "keepdim": False, "alpha": 1, "accumulate": False, "descending": False,
    "beta": 1, "threshold": 20,
}  # fmt: skip
"""Defaults that callers pass explicitly."""


class Number(NamedTuple):
    """Binds a number, or a tensor of one element that was filled with it."""

    name: str


class NonTensor(NamedTuple):
    """Binds an argument that is no tensor; None where the op has none."""

    name: str


class Along(NamedTuple):
    """The only dimension along which an op works, counted from the last one."""

    dim: int
    default: int | None = None  # where the op does not say


LAST = Along(-1)
LAST_OF_TOPK = Along(-1, default=-1)


class Pat:
    """An op of one of these names, without "aten." and with or without the "_" of ops in place.

    operands: patterns of its first arguments, of products and sums in any order.  arguments: those
    of others by name.  An argument without a pattern has to be left at its default, unless the
    pattern has no operands.  out: which of its results the value is.  bind: a name for the op.
    """

    __slots__ = ("arguments", "bind", "names", "operands", "out")

    def __init__(
        self, names: str, *operands: Pattern, out: int = 0, bind: str = "", **arguments: Pattern
    ) -> None:
        self.names = frozenset(names.split())
        self.operands, self.arguments = operands, arguments
        self.out, self.bind = out, bind


def match(
    flow: ValueFlow,
    value: int,
    pattern: Pattern,
    bound: Bindings | None = None,
    shape: tuple[int, ...] | None = None,
    accept: Callable[[str, int], bool] = lambda name, value: True,
) -> Bindings | None:
    """The bindings of a pattern that made a value; None where something else did.

    bound: bindings that have to hold.  shape: views are passed as far as values have it.  accept:
    whether a name may bind a value.
    """
    return _Matching(flow, shape, accept).value(value, pattern, bound or {})


class _Matching:
    def __init__(
        self, flow: ValueFlow, shape: tuple[int, ...] | None, accept: Callable[[str, int], bool]
    ) -> None:
        self.flow, self.shape, self.accept = flow, shape, accept

    def value(self, value: int, pattern: Pattern, bound: Bindings) -> Bindings | None:
        """Match a value."""
        if type(pattern) is tuple:
            tries = (self.value(value, each, bound) for each in pattern)
            return next((made for made in tries if made is not None), None)
        if isinstance(pattern, str):
            same = self.flow.root(bound.get(pattern, value)) == self.flow.root(value)
            return {pattern: value, **bound} if same and self.accept(pattern, value) else None
        if not isinstance(pattern, Pat):
            return None
        for step in self.flow.chain(value, self.shape):
            op = self.flow.producer(step)
            if op is not None and name_of(op) in pattern.names:
                right = op.outputs[pattern.out : pattern.out + 1] == (step,)
                return self._op(op, pattern, bound) if right and not reads_across(op) else None
        return None

    def _op(self, op: Op, pattern: Pat, bound: Bindings) -> Bindings | None:
        if pattern.bind:
            bound = {**bound, pattern.bind: op}
        rest = dict(op.arguments)
        operands = [rest.pop(name) for name in list(rest)[: len(pattern.operands)]]
        if len(operands) < len(pattern.operands):
            return None
        named = [(rest.pop(name, None), wanted) for name, wanted in pattern.arguments.items()]
        matched = self._all(op, named, bound)
        passed = {n for n, item in rest.items() if item not in (None, _DEFAULTS.get(n))}
        if matched is None or (pattern.operands and passed - _IGNORED):
            return None
        swaps = len(operands) == 2 and name_of(op) in _COMMUTE
        for order in permutations(operands) if swaps else (operands,):
            made = self._all(op, zip(order, pattern.operands, strict=True), matched)
            if made is not None:
                return made
        return None

    def _all(
        self, op: Op, pairs: Iterable[tuple[Argument, Pattern]], bound: Bindings
    ) -> Bindings | None:
        """Match pairs of an argument and its pattern."""
        matched: Bindings | None = bound
        for item, wanted in pairs:
            matched = None if matched is None else self._argument(op, item, wanted, matched)
        return matched

    def _argument(
        self, op: Op, item: Argument, wanted: Pattern, bound: Bindings
    ) -> Bindings | None:
        """Match an argument of an op."""
        if isinstance(wanted, Along):
            item = wanted.default if item is None else item
            return bound if dim_of(self.flow, op, item) == wanted.dim else None
        if isinstance(wanted, Number):
            number = number_of(self.flow, item)
            return None if number is None else {**bound, wanted.name: number}
        if isinstance(wanted, NonTensor):
            return None if isinstance(item, Ref) else {**bound, wanted.name: item}
        if isinstance(wanted, list):
            if not isinstance(item, tuple) or len(item) != len(wanted):
                return None
            return self._all(op, zip(item, wanted, strict=True), bound)
        if type(wanted) is tuple:
            tries = (self._argument(op, item, each, bound) for each in wanted)
            return next((made for made in tries if made is not None), None)
        if isinstance(item, Ref):
            return self.value(item.id, wanted, bound)
        return bound if item == wanted else None


def name_of(op: Op) -> str:
    """The name of an op without "aten.", and without the "_" of one in place."""
    return op.name.removeprefix("aten.").removesuffix("_")


def swapped(pattern: Pattern) -> Pat:
    """A value with its last two dimensions swapped."""
    either = Along(-1), Along(-2)
    return Pat("transpose", pattern, dim0=either, dim1=either, bind="swap")


def dim_of(flow: ValueFlow, op: Op, dims: Argument) -> int | None:
    """The one dimension among `dims` of an op's operand, counted from the last one: -1."""
    dims = dims if isinstance(dims, tuple) else (dims,)
    rank = len(flow.values[op.inputs[0]].shape)
    if len(dims) != 1 or not isinstance(dims[0], int):
        return None
    return dims[0] - rank if dims[0] >= 0 else dims[0]


def number_of(flow: ValueFlow, item: Argument) -> float | None:
    """The number of an argument, also of a tensor of one element that was filled with it."""
    if isinstance(item, Ref):
        made = None if item.then or item.every else flow.kernel_of(item.id)
        filled = {"aten.scalar_tensor": "s", "aten.full": "fill_value"}
        single = flow.values[item.id].elements == 1
        item = made.arguments.get(filled.get(made.name, "")) if made and single else None
    return float(item) if isinstance(item, (int, float)) else None


def row_product(flow: ValueFlow, value: int) -> tuple[int, int] | None:
    """Rows, and the factor of each row, where a value is their product."""
    values, op = flow.values, flow.producer(value)
    if op is None or op.name not in ("aten.mul", "aten.mul_") or len(op.inputs) != 2:
        return None
    for row, score in (op.inputs, op.inputs[::-1]):
        shape = values[row].shape
        if values[score].shape == (*shape[:-1], 1) and values[value].shape == shape:
            return row, score
    return None


# -- regions ---------------------------------------------------------------------------------------


def ops_between(flow: ValueFlow, start: Collection[int], ends: Iterable[int]) -> frozenset[int]:
    """The ops that make the values `ends` of the values `start` and of external ones.

    Ops that read their results count too, where nothing reads what these make.  Views of values
    from before do not count.
    """
    graph, inside = flow.graph, set[int]()
    front = [value for value in ends if value not in start]
    while front:
        op = flow.producer(front.pop())
        if op is not None and op.id not in inside:
            inside.add(op.id)
            front += [value for value in op.inputs if value not in start]
    made = {value for number in inside for value in graph.ops[number].outputs}
    inside = {
        number
        for number in inside
        if any(flow.values[value].storage in made for value in graph.ops[number].outputs)
    }
    return frozenset(inside | _unread(flow, inside, ends))


def _unread(flow: ValueFlow, inside: Collection[int], ends: Iterable[int]) -> set[int]:
    """Further ops that read what these make, and whose results nothing reads."""
    graph, values, more = flow.graph, flow.values, set[int]()
    kept = {*graph.outputs, *ends}
    front = {i for number in inside for i in graph.ops[number].outputs} - kept
    for storage in front & {values[i].storage for i in front}:
        for op in flow.storage_users[storage]:
            if op.id in inside or op.kind == "sync" or "writes" in op.facts or not op.outputs:
                continue
            owners = {values[i].storage for i in op.outputs}
            read = {
                i for owner in owners for user in flow.storage_users[owner] for i in user.inputs
            }
            local = owners <= {*op.outputs, *front}
            if local and not kept & set(op.outputs) and read.isdisjoint(op.outputs):
                more.add(op.id)
    return more


def can_be_one(
    flow: ValueFlow,
    inside: Collection[int],
    ends: Collection[int],
    start: Collection[int],
    across: Collection[Ref] = (),
) -> bool:
    """Whether one kernel can replace these ops.

    Of their results only `ends` are read elsewhere, they run in the same iterations, and nothing
    overwrites the values `start` while they run.  across: reads of other iterations that it keeps.
    """
    graph = flow.graph
    ops = [graph.ops[number] for number in inside]
    if (
        not ops
        or len({op.repeats for op in ops}) > 1
        or any(reads_across(op, across) for op in ops)
    ):
        return False
    if any(op.kind == "sync" or op.collective is not None for op in ops):
        return False
    made = {value for op in ops for value in op.outputs}
    if made & set(graph.outputs) - set(ends):
        return False
    storages = {flow.values[value].storage for value in made}
    if storages & flow.crossing:
        return False
    last = max(inside)
    if any(flow.overwritten(v, graph.producers.get(v, -1), last) for v in start):
        return False
    return all(
        op.id in inside or made.intersection(op.inputs) <= set(ends)
        for storage in storages
        for op in flow.storage_users[storage]
    )


# -- routers ---------------------------------------------------------------------------------------
# The choice of experts as one kernel, from the logits of a router to the experts and weights.
#
# A server's kernel reads the logits once, and writes k indices and k weights for each token: vLLM's
# `fused_topk` and `grouped_topk`, SGLang's `moe_fused_gate`.

ROUTE = "rooftrace.route_experts.default"
_PRODUCTS = {"aten.mm": "mat2", "aten.addmm": "mat2", "aten.bmm": "mat2", "aten._scaled_mm": "mat2"}
"""Products that make logits -> the argument name of their weight."""
_GROUPED = frozenset({"aten._grouped_mm", "rooftrace.expert_mm"})
_INDEXED = frozenset({"aten.index", "aten.index_select", "aten.index_put"})
_WALK = 32
"""The most ops from the choice to the experts, or from the product to the logits."""

_SCORES = {
    "softmax": Pat("softmax _softmax", "logits", dim=LAST),
    "sigmoid": Pat("sigmoid", "logits"),
    "root of softplus": Pat("sqrt", Pat("softplus", "logits")),
}
"""Functions of all logits of a token."""
_BEST = (
    Pat("sum", Pat("topk", "parts", k=NonTensor("best"), dim=LAST_OF_TOPK), dim=LAST),
    Pat("max amax", "parts", dim=LAST),
)
"""The criterion of groups of experts: a sum of their best scores, or the best one."""
_KEPT = Pat(
    "expand",
    Pat(
        "scatter",
        Pat("zeros zeros_like new_zeros"),
        dim=LAST,
        index=Pat("topk", _BEST, k=NonTensor("kept"), dim=LAST_OF_TOPK, out=1),
        value=1,
    ),
    bind="mask",
)
_GROUPED_SCORES = (
    Pat("where", _KEPT, "scores", Number("fill")),
    Pat("masked_fill", "scores", Pat("bitwise_not logical_not", _KEPT), Number("fill")),
)
"""Scores with a number for all groups but the best."""
_SPREAD = Pat(
    "scatter", Pat("full full_like new_full", fill_value=-math.inf), dim=LAST, index="chosen",
    src="top",
)  # fmt: skip
"""The chosen scores, scattered back into minus infinity."""
_GATHER = Pat("gather", "source", dim=LAST, index="index")
_TOTAL = Pat("sum", "now", dim=LAST, keepdim=True)
_STEPS: tuple[tuple[int, Pat, Mapping[str, Any]], ...] = (
    (1, Pat("_to_copy clone", "now", bind="last"), {}),
    (1, Pat("mul", "now", Number("scale"), bind="last"), {}),
    (2, Pat("div", "now", _TOTAL, bind="last"), {"after": "sum"}),
    (2, Pat("div", "now", Pat("add", _TOTAL, Number("least")), bind="last"), {"after": "sum"}),
    (2, Pat("div", "now", Pat("clamp clamp_min", _TOTAL, min=Number("least")), bind="last"),
     {"after": "clamped sum"}),
    (1, Pat("_softmax", "now", dim=LAST, bind="last"), {"after": "softmax"}),
    (1, Pat("sigmoid", "now", bind="last"), {"after": "sigmoid"}),
)  # fmt: skip
"""The functions of a kernel on the weights: how many ops read them, the pattern, its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RouterKernel:
    """The arguments of one `route_experts` kernel."""

    choice: Op  # the top k over the experts
    logits: int
    weights: int
    bias: int | None  # added for the choice alone
    score: str  # the function of all logits
    groups: tuple[int, int, int, float]  # how many, how many kept, by how many best, the fill
    after: str = "none"  # the function of the chosen scores
    least: float = 0.0  # added to their sum, or its lower bound
    scale: float = 1.0
    inside: frozenset[int] = frozenset()  # the ops that it replaces


def fuse_routing(graph: OpGraph) -> tuple[OpGraph, int]:
    """The ops between a router's logits, and the experts of a token and their weights, become one.

    The top k must run over the columns of a product with weights, and its indices must select rows;
    no other op may read a score in between.
    """
    return rewritten(graph, ("aten.topk",), _match, _emit)


def _emit(edit: Editor, router: _RouterKernel) -> None:
    values, weights = edit.values, router.weights
    edit.move(weights, weights)
    groups, kept, best, fill = router.groups
    arguments: dict[str, Argument] = {
        "logits": Ref(router.logits),
        "bias": None if router.bias is None else Ref(router.bias),
        "k": int(router.choice.arguments["k"]),
        "score": router.score, "groups": groups, "kept": kept, "best": best, "fill": fill,
        "after": router.after, "least": router.least, "scale": router.scale,
        "dtype": f"dtype:{values[weights].dtype}",
    }  # fmt: skip
    edit.emit(router.choice, ROUTE, arguments, (weights, router.choice.outputs[1]))


# -- matches ---------------------------------------------------------------------------------------


def _match(flow: ValueFlow, choice: Op) -> _RouterKernel | None:
    source = operand(choice, "self").id
    shape = flow.values[source].shape
    along = choice.arguments.get("dim", -1) in (-1, len(shape) - 1)
    if not along or choice.arguments.get("largest", True) is not True or len(shape) < 2:
        return None
    value, groups = _groups(flow, flow.root(source, shape))
    scores, bias = _bias(flow, flow.root(value, shape))
    score, logits = _function(flow, scores)
    if not _is_router(flow, logits) or not _reaches_experts(flow, choice.outputs[1]):
        return None
    if bias is not None and flow.root(bias) not in flow.graph.external:
        return None
    routing = _RouterKernel(
        choice=choice, logits=logits, weights=-1, bias=bias, score=score, groups=groups
    )
    start = {logits} if bias is None else {logits, bias}
    for weights, after in _first_weights(flow, choice, scores, routing):
        finished = _finished(flow, replace(routing, weights=weights, after=after))
        ends = {finished.weights, choice.outputs[1]}
        inside = ops_between(flow, start, ends)
        if can_be_one(flow, inside, ends, start):
            return replace(finished, inside=inside)
    return None


def _function(flow: ValueFlow, scores: int) -> tuple[str, int]:
    """The function of the logits of a token, and the logits."""
    shape = flow.values[scores].shape
    for name, pattern in _SCORES.items():
        bound = match(flow, scores, pattern, shape=shape)
        if bound is not None:
            return name, flow.root(bound["logits"], shape)
    return "none", flow.root(scores, shape)


def _bias(flow: ValueFlow, value: int) -> tuple[int, int | None]:
    """The scores, and the bias that is added to them for the choice alone.

    A bias of the logits themselves is a part of these.
    """
    values, op = flow.values, flow.producer(value)
    bound = match(flow, value, Pat("add", "scores", "bias"), shape=values[value].shape)
    for scores, bias in (op.inputs, op.inputs[::-1]) if op is not None and bound else ():
        experts = values[value].shape[-1]
        narrow = values[bias].elements == experts == values[bias].shape[-1]
        wide = values[scores].shape == values[value].shape
        if narrow and wide and _function(flow, scores)[0] != "none":
            return scores, bias
    return value, None


def _groups(flow: ValueFlow, value: int) -> tuple[int, tuple[int, int, int, float]]:
    """The scores before all groups but the best were masked, and `_RouterKernel.groups`."""
    values, ungrouped = flow.values, (value, (1, 1, 1, 0.0))
    bound = match(flow, value, _GROUPED_SCORES)
    if bound is None:
        return ungrouped
    scores, parts = bound["scores"], values[bound["parts"]].shape
    same = flow.root(bound["parts"]) == flow.root(scores)
    groups = parts[1] if len(parts) == 3 else 0
    width = values[bound["mask"].outputs[0]].shape[-1]
    if not same or groups * width != values[scores].shape[-1]:
        return ungrouped
    return scores, (groups, int(bound["kept"]), int(bound.get("best", 1)), bound["fill"])


# -- weights of the chosen experts -----------------------------------------------------------------


def _first_weights(
    flow: ValueFlow, choice: Op, scores: int, routing: _RouterKernel
) -> list[tuple[int, str]]:
    """Values with the chosen scores, and the function that was applied to them."""
    top, chosen = choice.outputs
    shape = flow.values[scores].shape
    starts = [] if routing.bias is not None else [(top, "none")]
    for reader in flow.storage_users[flow.values[chosen].storage]:
        if reader.name != "aten.gather":
            continue
        bound = match(flow, reader.outputs[0], _GATHER, {"index": chosen})
        if bound is None:
            continue
        source = flow.root(bound["source"], shape)
        name, inner = _function(flow, source)
        spread = match(flow, inner, _SPREAD, {"chosen": chosen, "top": top}, shape)
        if (name, inner) == (routing.score, routing.logits):
            starts.insert(0, (reader.outputs[0], "none"))
        elif name != "none" and spread is not None:
            starts.insert(0, (reader.outputs[0], name))
    return starts


def _finished(flow: ValueFlow, routing: _RouterKernel) -> _RouterKernel:
    """The routing with all ops on the weights [T, k] alone, up to the first other reader."""
    for _ in range(_WALK):
        value = routing.weights
        storage = flow.values[value].storage
        readers = [op for op in flow.storage_users[storage] if value in op.inputs]
        fields = _step(flow, routing, readers[-1], len(readers)) if readers else None
        if fields is None:
            return routing
        routing = replace(routing, weights=readers[-1].outputs[0], **fields)
    return routing


def _step(
    flow: ValueFlow, routing: _RouterKernel, reader: Op, readers: int
) -> dict[str, Any] | None:
    """The fields that the last op that reads the weights changes."""
    plain = routing.after == "none" and routing.scale == 1
    for count, pattern, fields in _STEPS:
        if count != readers or (fields and not plain):
            continue
        bound = match(flow, reader.outputs[0], pattern, {"now": routing.weights})
        if bound is not None and bound["last"] is reader:
            scale = {"scale": routing.scale * bound["scale"]} if "scale" in bound else {}
            least = {"least": bound["least"]} if "least" in bound else {}
            return {**fields, **scale, **least}
    return None


# -- routers ---------------------------------------------------------------------------------------


def _is_router(flow: ValueFlow, logits: int) -> bool:
    """Whether the columns of logits are those of a product with weights."""
    values, value = flow.values, logits
    experts = values[logits].shape[-1]
    for _ in range(_WALK):
        op = flow.producer(value)
        if op is None or values[value].shape[-1] != experts:
            return False
        if op.name in _PRODUCTS:
            weight = flow.location(operand(op, _PRODUCTS[op.name]).id)
            stored = None if weight is None else flow.location(flow.root(weight.storage))
            return stored is not None and values[stored.storage].role == "weights"
        others = [i for i in op.inputs if values[i].elements == values[value].elements]
        if len(others) != 1 or values[others[0]].shape[-1] != experts:
            return False
        if op.name in ("aten.transpose", "aten.t", "aten.permute", "aten._softmax"):
            return False
        value = others[0]
    return False


def _reaches_experts(flow: ValueFlow, chosen: int) -> bool:
    """Whether the chosen experts select rows, or count the rows of each expert."""
    graph, front, seen = flow.graph, [chosen], set[int]()
    for _ in range(_WALK):
        following = []
        for value in front:
            for op in flow.storage_users[graph.values[value].storage]:
                if value not in op.inputs or op.id in seen:
                    continue
                seen.add(op.id)
                floats = any(graph.values[i].dtype.startswith(("bf", "fp")) for i in op.inputs)
                wide = any(len(graph.values[i].shape) > 1 for i in op.outputs)
                if op.name in _GROUPED or (op.name in _INDEXED and floats and wide):
                    return True
                following += [
                    i for i in op.outputs if graph.values[i].dtype in ("int64", "int32", "bool")
                ]
        front = following
    return False
