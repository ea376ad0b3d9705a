"""The cause of a change in one sentence: the change of the code, and its consequences."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rooftrace.diffs.changes import union
from rooftrace.diffs.costs.changes import exchange_words
from rooftrace.diffs.costs.clusters import (
    OPTIMIZER,
    Cluster,
    Edit,
    differing_reads,
    op_of,
    pairs_of,
    size,
    tensor_of,
)
from rooftrace.diffs.costs.sides import LayerCount, Read, Side, Sides
from rooftrace.graph import PARTS, Op, OpGraph, Tensor, pattern_of
from rooftrace.hardware.units import arrow, few, format_flop_rate, listed, plural

RECOMPUTE = "recompute"
_MOST = 3
"""Things of one kind that a sentence names."""


def cause_of(sides: Sides, cluster: Cluster, code: Sides, edits: Sequence[Edit]) -> str:
    """One sentence on a cluster: changes of the code, then their consequences.

    code, edits: the two steps as the code runs them, and their edits.  `sides` may be of another
    execution model, whose graph has some other kernels.
    """
    if not edits:
        return _regrouped(sides, cluster)
    structure, parts = change_words(code, edits)
    follows = [] if structure else consequences(sides, cluster)
    return "; ".join([*(structure or parts)[:_MOST], *follows])


def change_words(code: Sides, edits: Sequence[Edit]) -> tuple[list[str], list[str]]:
    """Changes of the code: layers and recomputation, else op by op."""
    if all(op_of(code, edit).part == OPTIMIZER for edit in edits) and (words := _updates(code)):
        return [], words
    first = leading(code, edits)
    structure = [*map(_layers_words, layers_of(code, first)), *_recomputed(code, first)]
    sizes = [
        *exchange_words(code, edits),
        *_weights(code, first),
        *dict.fromkeys(_heads(code, edits)),
        *_inputs(code, first),
    ]
    if structure:
        return [*structure, *sizes], []
    parts = [*sizes, *ops_words(code, first), *_parameters(code, first), *_own(code, first)]
    return [], parts or _without_words(code, first)


def _without_words(code: Sides, edits: Sequence[Edit]) -> list[str]:
    """The words where no recorded fact of the kernels differs."""
    calls = dict.fromkeys(call(op_of(code, edit)) for edit in edits)
    return [f"{', '.join(list(calls)[:_MOST])}: another cost at the same sizes"] if calls else []


def leading(sides: Sides, edits: Sequence[Edit]) -> list[Edit]:
    """The edits that others follow from: of the earliest part of the step that has any.

    What runs again in the backward comes first where it takes most of the time.
    """
    roots = [edit for edit in edits if edit.is_root] or list(edits)
    by_part: dict[str, list[Edit]] = {}
    for edit in roots:
        by_part.setdefault(op_of(sides, edit).part, []).append(edit)
    if not by_part:
        return []
    if again := by_part.pop(RECOMPUTE, None):
        seconds = [sum(weight(sides, e) for e in each) for each in (again, *by_part.values())]
        if seconds[0] == max(seconds) or not by_part.get("forward"):
            return again
    return by_part[min(by_part, key=PARTS.index)]


def by_weight(sides: Sides, edits: Sequence[Edit]) -> list[Edit]:
    """Edits, changed kernels first, then new and lost ones of the line that takes most time."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for edit in edits:
        seconds[op_of(sides, edit).source] += weight(sides, edit)
    ranks = {line: -total for line, total in seconds.items()}
    return sorted(
        edits, key=lambda e: (not e.is_pair, 0.0 if e.is_pair else ranks[op_of(sides, e).source])
    )


def weight(sides: Sides, edit: Edit) -> float:
    """Device seconds of the kernels that an edit is in, of both sides."""
    return sum(sides[number].seconds(op) for number, op in edit.ops)


# -- changes of the code ---------------------------------------------------------------------------


def layers_of(sides: Sides, edits: Sequence[Edit]) -> list[LayerCount]:
    """Lists of equal modules that are longer on one side, and whose new members have edits."""
    edited = {pattern_of(op_of(sides, edit).module) for edit in edits if not edit.is_pair}
    return [
        layers
        for layers in sides.layer_counts
        if any(f"{path}.".startswith(f"{layers.pattern}.") for path in edited)
    ]


def _layers_words(layers: LayerCount) -> str:
    alone, (before, after) = layers.alone, layers.counts
    which = alone[0] if len(alone) == 1 else f"{alone[0]} to {alone[-1]}"
    verb = "is" if len(alone) == 1 else "are"
    word = "new" if after > before else "gone"
    return f"{layers.pattern} {before} -> {after}: {which} {verb} {word}"


def _recomputed(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Sentences on forwards that the backward runs again, or no longer does."""
    for number, words in ((1, "runs again in the backward"), (0, "no longer runs again")):
        ops = [
            op_of(sides, edit) for edit in edits if (edit.before, edit.after)[1 - number] is None
        ]
        ops = [op for op in ops if op.part == RECOMPUTE]
        if ops:
            tops = Counter(layer_of(op.module) for op in ops)
            where = listed([name or "the model" for name, _ in tops.most_common(_MOST)])
            yield f"the forward of {where} {words} (activation checkpointing)"


def layer_of(path: str) -> str:
    """The layer that a module is in: "model.layers.*" for "model.layers.3.mlp"."""
    pattern = pattern_of(path)
    return pattern[: pattern.index("*") + 1] if "*" in pattern else pattern


def _weights(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Parameters, inputs and caches of other sizes or another precision."""
    changes: dict[tuple[str, str], dict[str, None]] = {}
    for edit in edits:
        for first, second in _outside(sides, edit):
            if size(first) != size(second):
                old, name = (pattern_of(tensor.name) or tensor.role for tensor in (first, second))
                changes.setdefault(difference(first, second), {})[arrow(old, name)] = None
    for (text, note), names in changes.items():
        yield f"{few(list(names), _MOST)} {text}{note}"


def _updates(sides: Sides) -> list[str]:
    """The parameters of which the optimizer has more, fewer or others to update.

    Its kernels take many at once, so that those of two sides face each other at random.
    """
    sizes = [
        {pattern_of(t.name): t for t in values if t.role == "weights" and t.name}
        for values in (side.graph.values for side in (sides.before, sides.after))
    ]
    texts: dict[str, dict[str, None]] = {}
    for name, old, new in union(sizes[0], sizes[1], None):
        if old is None or new is None:
            texts.setdefault("", {})[f"{'+' if old is None else '-'}{name}"] = None
        elif size(old) != size(new):
            texts.setdefault(f" {''.join(difference(old, new))}", {})[name] = None
    words = [few(list(names), _MOST) + text for text, names in texts.items()]
    return [f"the update of {few(words, _MOST)}"] if words else []


def _parameters(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Parameters that only one side has, among those that new or lost kernels read."""
    for number, sign in ((1, "+"), (0, "-")):
        there = parameters(sides[1 - number].graph)
        names: dict[str, None] = {}
        for edit in edits:
            op = (edit.before, edit.after)[number]
            if op is None or edit.is_pair:
                continue
            values = sides[number].graph.values
            for read in sides[number].flow.reads[op]:
                tensor = values[-1 - read.origin] if read.origin < 0 else None
                if tensor and tensor.role == "weights" and tensor.name not in there:
                    names[pattern_of(tensor.name)] = None
        if names:
            yield f"{sign}parameter {few(list(names), _MOST)}"


def parameters(graph: OpGraph) -> frozenset[str]:
    """Names of the weights of a graph."""
    tensors = (graph.values[value] for value in graph.external)
    return frozenset(tensor.name for tensor in tensors if tensor.role == "weights")


def tied(sides: Sides) -> list[str]:
    """Parameters that became one, or are no longer one: "head.weight is embed.weight now".

    The parameter that is shared has at least as many readers more as kernels moved to it: else
    two kernels were matched that read other parameters of one size.
    """
    first, second = (_readers(side) for side in (sides.before, sides.after))
    moved: Counter[tuple[str, str]] = Counter()
    for pair in sides.matching.pairs:
        for a, b in sides.reads(pair.before, pair.after):
            old, new = _parameter(sides.before, a), _parameter(sides.after, b)
            moved[old, new] += bool(old and new and old != new)
    texts: dict[str, None] = {}
    for (old, new), kernels in moved.items():
        if not second[old] and second[new] >= first[new] + kernels > kernels > 0:
            texts[f"{old} is {new} now, one parameter"] = None
        if not first[new] and first[old] >= second[old] + kernels > kernels > 0:
            texts[f"{new} is a parameter of its own, no longer {old}"] = None
    return list(texts)[:1]


def _readers(side: Side) -> Counter[str]:
    """By parameter, the reads of kernels."""
    return Counter(_parameter(side, read) for each in side.flow.reads.values() for read in each)


def _parameter(side: Side, read: Read) -> str:
    """The parameter that is read; a layer that stands for many has the name of one of them."""
    tensor = side.graph.values[-1 - read.origin] if read.origin < 0 else None
    return pattern_of(tensor.name) if tensor and tensor.role == "weights" else ""


def _outside(sides: Sides, edit: Edit) -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors from outside of the step that an edit reads, before any views."""
    for _, op, partner in pairs_of([edit]):
        for position, a, b in differing_reads(sides, op, partner):
            if position in edit.reads and a.origin < 0 and b.origin < 0:
                yield sides[0].graph.values[-1 - a.origin], sides[1].graph.values[-1 - b.origin]


def _heads(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Differing sizes of an attention kernel."""
    for _, op, partner in pairs_of(edits):
        first, second = sides[0].attention(op), sides[1].attention(partner)
        if first and second:
            for name, a, b in (
                ("heads of queries", first.heads, second.heads),
                ("heads of keys and values", first.kv_heads, second.kv_heads),
                ("head width", first.width, second.width),
                ("keys", first.keys, second.keys),
                ("queries", first.queries, second.queries),
            ):
                if a != b:
                    yield f"{name} {a} -> {b}"


def _inputs(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Kernels that read an unchanged tensor as another shape."""
    texts: Counter[str] = Counter()
    for edit, op, partner in pairs_of(edits):
        for position, a, b in differing_reads(sides, op, partner):
            if position in edit.reads and a.origin >= 0 and b.origin >= 0:
                first, second = tensor_of(sides[0], a), tensor_of(sides[1], b)
                text, note = difference(first, second)
                texts[f"{call(op_of(sides, edit))} reads {text}{note}"] += edit.times
    for text, _ in texts.most_common(1):
        yield text


def ops_words(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Kernels that are new, gone, or replace others."""
    new = [edit for edit in edits if edit.before is None]
    gone = [edit for edit in edits if edit.after is None]
    if new and gone:
        yield f"{_named(sides, gone)} -> {_named(sides, new)}"
    elif new:
        yield _named(sides, new, sign="+")
    elif gone:
        yield _named(sides, gone, sign="-")


def _named(sides: Sides, edits: Sequence[Edit], sign: str = "") -> str:
    """Kernels by the calls that the code makes: "+ cast bf16 -> fp32 by .float() x32"."""
    calls: Counter[str] = Counter()
    for edit in edits:
        side, number = (sides[0], edit.before) if edit.after is None else (sides[1], edit.after)
        assert number is not None
        calls[kind_of_call(side, side.graph.ops[number])] += edit.times
    shown = [f"{text} x{n}" if n > 1 else text for text, n in calls.items()]
    return f"{sign}{few(shown, 2 * _MOST)}"


def _own(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Changed arguments of a kernel: its precision, its mask, the rows it touches."""
    texts: dict[str, None] = {}
    for edit, op, partner in pairs_of(edits):
        if edit.reads:
            continue
        first, second = sides[0].graph.ops[op], sides[1].graph.ops[partner]
        made = next(
            (pair for pair in sides.made(op, partner) if size(pair[0]) != size(pair[1])), None
        )
        if made:
            texts[f"{call(second)} makes {''.join(difference(*made))}"] = None
        elif first.collective is None:  # else the words are those of its group
            for name in _arguments(first, second):
                texts[f"{call(second)}: {name}"] = None
    yield from list(texts)[:_MOST]


def _arguments(first: Op, second: Op) -> Iterator[str]:
    """Arguments (not tensors) and facts of an op that differ."""
    for old, new in ((first.arguments, second.arguments), (first.facts, second.facts)):
        for name in dict.fromkeys([*old, *new]):
            a, b = old.get(name), new.get(name)
            if a != b and all(
                item is None or isinstance(item, (int, float, str, bool)) for item in (a, b)
            ):
                yield f"{name} {_value(a)} -> {_value(b)}"


def _value(value: object) -> str:
    return "none" if value is None else str(value).removeprefix("dtype:")


def _regrouped(sides: Sides, cluster: Cluster) -> str:
    """The sentence where no op changed: it runs elsewhere, or is grouped or placed otherwise."""
    first, second = sides.before.estimate, sides.after.estimate
    if first.chip.name != second.chip.name:
        return f"the same work on {second.chip.name} instead of {first.chip.name}"
    if first.execution.name != second.execution.name:
        names = second.execution.name, first.execution.name
        return f"the same ops under execution {names[0]} instead of {names[1]}"
    if first.execution != second.execution:
        return f"the same ops under execution {first.execution.name} with other settings"
    counts = [
        sum(side.estimate.rows[row].count for row in rows)
        for side, rows in ((sides.before, cluster.before), (sides.after, cluster.after))
    ]
    if counts[0] != counts[1]:
        return f"the same ops are grouped into {counts[1]:,} kernels instead of {counts[0]:,}"
    return "the same kernels, placed otherwise: another part of what they read is still in a cache"


# -- consequences ----------------------------------------------------------------------------------


_FASTER = 0.1
"""The least relative change of a rate that a sentence mentions."""


def consequences(sides: Sides, cluster: Cluster) -> Iterator[str]:
    """Consequences of the edits of a cluster: rates, precisions, fusions."""
    rate = _rates(sides, cluster.edits)
    if rate:
        yield rate
    elif precision := _precisions(sides, cluster.edits):
        yield precision
    yield from _fusions(sides, cluster)


def _rates(sides: Sides, edits: Iterable[Edit]) -> str:
    """The product that changed most: its precision and engine, or the rate that it reaches."""
    best, text = 0.0, ""
    for _, op, partner in pairs_of(edits):
        first, second = sides[0].product(op), sides[1].product(partner)
        if first is None or second is None:
            continue
        delta = abs(sides[1].seconds(partner) - sides[0].seconds(op))
        name = call(sides[1].graph.ops[partner])
        if delta <= best:
            continue
        if first.precision != second.precision:
            (old, slow), (new, fast) = sides[0].engine(first), sides[1].engine(second)
            same = ", same sizes" if first.shape == second.shape else ""
            engine = f"{new} engine" if old == new else f"{new} engine instead of {old}"
            rates = f"{format_flop_rate(fast)} instead of {format_flop_rate(slow)}"
            best, text = (
                delta,
                f"{name} {first.precision} -> {second.precision}{same}: {engine}, {rates}",
            )
        else:
            a, b = sides[0].rate(op), sides[1].rate(partner)
            if a and b and abs(math.log(b / a)) > _FASTER:
                best, text = (
                    delta,
                    f"{name} reaches {format_flop_rate(b)} instead of {format_flop_rate(a)}",
                )
    return text


def _precisions(sides: Sides, edits: Iterable[Edit]) -> str:
    """A phrase on kernels that work in another precision because of their inputs."""
    changes: Counter[tuple[str, str]] = Counter()
    for edit, op, partner in pairs_of(edits):
        dtypes = ((a.dtype, b.dtype) for a, b in sides.made(op, partner))
        if changed := next((pair for pair in dtypes if pair[0] != pair[1]), None):
            changes[changed] += edit.times
    if not changes:
        return ""
    ((old, new), count), *_ = changes.most_common(1)
    return f"{plural(count, 'kernel')} on {new} instead of {old}"


def _fusions(sides: Sides, cluster: Cluster) -> Iterator[str]:
    """Neighbours in the dataflow that no longer share a kernel, or share one now."""
    lost, won = (_broken(sides, cluster, number) for number in range(2))
    if lost:
        yield f"breaks the fusion of {lost}"
    if won:
        yield f"fuses {won}"


def _broken(sides: Sides, cluster: Cluster, number: int) -> str:
    """Two kernels that are one on a side and, matched, apart on the other: "mul with cat"."""
    side, other, partners = sides[number], sides[1 - number], sides.partners[number]
    texts: Counter[str] = Counter()
    between = _around_edits(sides, number, cluster.edits)
    for row in (cluster.before, cluster.after)[number]:
        members = side.estimate.rows[row].ops
        inside = set(members)
        for op in members:
            for read in side.flow.reads.get(op, ()):
                pair = partners.get(read.origin), partners.get(op)
                if read.origin in inside and None not in pair:
                    first, second = (set(other.rows_of.get(p or 0, ())) for p in pair)
                    if not first & second and between & {read.origin, op}:
                        names = (call(side.graph.ops[n]) for n in (read.origin, op))
                        texts[" with ".join(names)] += side.estimate.rows[row].count
    more = f" and {plural(len(texts) - 1, 'more pair')}" if len(texts) > 1 else ""
    return f"{texts.most_common(1)[0][0]}{more}" if texts else ""


def _around_edits(sides: Sides, number: int, edits: Iterable[Edit]) -> set[int]:
    """Kernels of a side that an edit is, reads from, or is read by, on either side."""
    neighbours: set[int] = set()
    for edit in edits:
        for each, op in edit.ops:
            flow = sides[each].flow
            origins = (read.origin for read in flow.reads[op])
            near = {op, *origins, *flow.readers.get(op, ())}
            partners = sides.partners[each]
            neighbours |= near if each == number else {partners.get(n, -1) for n in near}
    return neighbours


# -- wording ---------------------------------------------------------------------------------------


_PADDED = 0.1
"""The most by which padding lets a dimension grow."""
_ALIGNED = 64
"""The least multiple that makes a dimension one of full tiles."""
_TILES = (512, 256, 128, 64, 32, 16, 8)


def kind_of_call(side: Side, op: Op) -> str:
    """A call in the code by its effect: a cast, a copy, or the name of the call."""
    values = side.graph.values
    tensors = [values[i] for i in op.inputs], [values[i] for i in op.outputs]
    if len(tensors[0]) == len(tensors[1]) == 1 and not side.cost(op.id).flops():
        (read,), (made,) = tensors
        if read.elements == made.elements and read.dtype != made.dtype:
            return f"cast {read.dtype} -> {made.dtype} by {_by(op)}"
        if read.shape == made.shape and read.dtype == made.dtype and read.stride != made.stride:
            return f"copy by {_by(op)}"
    return call(op)


def call(op: Op) -> str:
    """The call in the code that an op is of: ".contiguous()", or its name in backward."""
    if op.kind == "sync":
        return f"synchronisation by {op.function or op.name}()"
    name = op.name.rpartition(".")[2]
    if op.part != "forward" or not op.function.isidentifier() or op.function.startswith("__"):
        return name
    return op.function if op.function == name else f"{op.function} ({name})"


def _by(op: Op) -> str:
    """A call that casts or copies: "contiguous()", or the name of the op in backward."""
    is_call = op.part == "forward" and op.function.isidentifier()
    return f"{op.function}()" if is_call else call(op)


def difference(first: Tensor, second: Tensor) -> tuple[str, str]:
    """The difference of two tensors in words, and a note on a dimension that was padded."""
    if first.shape == second.shape:
        return f"{first.dtype} -> {second.dtype}", ""
    dtype = first.dtype if first.dtype == second.dtype else f"{first.dtype} -> {second.dtype} "
    text = f"{dtype}{list(first.shape)} -> {list(second.shape)}"
    if len(first.shape) != len(second.shape):
        return text, ""
    for a, b in zip(first.shape, second.shape, strict=True):
        if a != b and a and abs(b - a) <= _PADDED * a:
            old, new = _multiple(a), _multiple(b)
            if old < _ALIGNED <= new:
                return text, f" ({a} is padded to {b}, a multiple of {new})"
            if new < _ALIGNED <= old:
                return text, f" ({b} is no multiple of {old}, as {a} is)"
    return text, ""


def _multiple(size: int) -> int:
    """The largest tile size that divides a dimension, 1 for none."""
    return next((tile for tile in _TILES if size % tile == 0), 1)
