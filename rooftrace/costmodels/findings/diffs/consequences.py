"""What follows from a change: engines and rates, precisions of other kernels, fusions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from rooftrace.costmodels.findings.diffs.clusters import Cluster
from rooftrace.costmodels.findings.diffs.edits import Edit, pairs_of
from rooftrace.costmodels.findings.diffs.sides import Sides
from rooftrace.costmodels.findings.diffs.wording import call
from rooftrace.hardware.units import format_flop_rate, plural

_FASTER = 0.1
"""The least relative change of a rate that a sentence mentions."""


def consequences(sides: Sides, cluster: Cluster) -> Iterator[str]:
    """What follows from the edits of a cluster: rates, precisions, fusions."""
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
    """How many kernels work in another precision because of what they read."""
    changes: Counter[tuple[str, str]] = Counter()
    for edit, op, partner in pairs_of(edits):
        for a, b in zip(
            (sides[0].graph.values[i] for i in sides[0].graph.ops[op].outputs),
            (sides[1].graph.values[i] for i in sides[1].graph.ops[partner].outputs),
            strict=False,
        ):
            if a.dtype != b.dtype:
                changes[a.dtype, b.dtype] += edit.times
                break
    if not changes:
        return ""
    ((old, new), count), *_ = changes.most_common(1)
    return f"{plural(count, 'kernel')} on {new} instead of {old}"


def _fusions(sides: Sides, cluster: Cluster) -> Iterator[str]:
    """Which neighbours in the dataflow no longer share a kernel, or share one now."""
    lost, won = (_broken(sides, cluster, number) for number in range(2))
    if lost:
        yield f"breaks the fusion of {lost}"
    if won:
        yield f"fuses {won}"


def _broken(sides: Sides, cluster: Cluster, number: int) -> str:
    """Two kernels that are one on a side and, matched, apart on the other: "mul with cat"."""
    side, other, partners = sides[number], sides[1 - number], sides.partners[number]
    texts: Counter[str] = Counter()
    between = _beside_edits(sides, number, cluster.edits)
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


def _beside_edits(sides: Sides, number: int, edits: Iterable[Edit]) -> set[int]:
    """Kernels of a side that an edit is, reads from, or is read by, on either side."""
    beside: set[int] = set()
    for edit in edits:
        for each, op in edit.ops:
            flow = sides[each].flow
            origins = (read.origin for read in flow.reads[op])
            near = {op, *origins, *flow.readers.get(op, ())}
            partners = sides.partners[each]
            beside |= near if each == number else {partners.get(other, -1) for other in near}
    return beside
