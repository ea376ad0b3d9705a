"""Kernels of two graphs matched by what they do and by the dataflow around them.

Each kernel gets a label for every radius: radius 0 is what it does, radius k + 1 is its label of
radius k with those of its neighbours (the refinement of Weisfeiler and Leman).  Kernels are matched
from the largest radius to the smallest, so the order in which independent kernels run, the names of
modules and the lines of the code do not matter.  First come kernels that do the same to tensors of
the same sizes: in the same module, then in modules that are alike, then anywhere.  Those that do
the same to other sizes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rooftrace.costmodels.findings.diffs.anchors import Anchor, Anchors
from rooftrace.costmodels.findings.diffs.flow import Flow, in_any_order
from rooftrace.tracer.changes.aligning import Pair, Pairing
from rooftrace.tracer.paths import pattern_of

RADIUS = 6
"""Kernels around a kernel that tell it from others that do the same."""
_ANCHORS = 2
"""The fewest matched neighbours that two kernels of different sizes in different modules share."""
_ELSEWHERE = 1
_RESIZED_ELSEWHERE = 2
"""The least radius at which kernels of different modules are the same, and are so resized."""

Labels = list[Mapping[int, int]]
"""By radius, the label of each kernel."""


@dataclass(frozen=True, slots=True)
class Matching:
    """The kernels of two graphs that are the same, and how many runs of others are left over."""

    pairs: Sequence[Pair[int]]
    removed: Mapping[int, int]
    added: Mapping[int, int]


def match(before: Flow, after: Flow) -> Matching:
    """Match the kernels of two graphs; every run of a kernel is in one pair or left over."""
    flows = before, after
    pairing = Pairing(*(_runs(flow) for flow in flows))
    for exact, elsewhere in ((True, _ELSEWHERE), (False, _RESIZED_ELSEWHERE)):
        if not pairing.is_left:
            break
        labels = _labels(before, after, exact)
        for place, least in (((lambda path: path), 0), (pattern_of, 0), (_anywhere, elsewhere)):
            for radius in range(RADIUS, least - 1, -1):
                if pairing.is_left:
                    first, second = (
                        partial(_key, flow, side[radius], place)
                        for flow, side in zip(flows, labels, strict=True)
                    )
                    pairing.by(first, second)
    _by_anchors(pairing, flows)
    return Matching(pairing.pairs, *pairing.left)


def _runs(flow: Flow) -> dict[int, int]:
    return {number: flow.graph.times(flow.graph.ops[number]) for number in flow.kernels}


def _anywhere(_: str) -> str:
    return ""


def _key(
    flow: Flow, labels: Mapping[int, int], place: Callable[[str], str], number: int
) -> Hashable:
    """What kernels share that are matched: a label, and `place` of the paths of their modules."""
    return labels[number], place(flow.graph.ops[number].module)


def _by_anchors(pairing: Pairing[int], flows: tuple[Flow, Flow]) -> None:
    """Match what is left by the matched kernels around it: most of these in common first."""
    anchors = [
        {op: Anchors(flow, left).around(op) for op in left}
        for flow, left in zip(flows, pairing.left, strict=True)
    ]
    partners = {pair.before: pair.after for pair in pairing.pairs}
    scores = []
    for a, around in anchors[0].items():
        there = {_translated(anchor, partners) for anchor in around}
        for b, others in anchors[1].items():
            same = flows[0].loose(a) == flows[1].loose(b)
            if same and (score := len(there & others)) >= _ANCHORS:
                scores.append((-score, a + b, a, b))
    for _, _, a, b in sorted(scores):
        if a in pairing.left[0] and b in pairing.left[1]:
            pairing.pair(a, b)


def _translated(anchor: Anchor, partners: Mapping[int, int]) -> Anchor:
    """An anchor of the first graph as one of the second."""
    kind, where = anchor
    return (kind, partners.get(where, -1)) if isinstance(where, int) else anchor


def _labels(before: Flow, after: Flow, exact: bool) -> list[Labels]:
    """Labels of the kernels of both graphs; equal ones in the two are equal numbers."""
    numbers: dict[Hashable, int] = {}
    labels: list[Labels] = [[], []]
    for side, flow in enumerate((before, after)):
        key = flow.exact if exact else flow.loose
        labels[side].append({n: numbers.setdefault(key(n), len(numbers)) for n in flow.kernels})
    for _ in range(RADIUS):
        for side, flow in enumerate((before, after)):
            labels[side].append(_wider(flow, labels[side][-1], numbers, exact))
    return labels


def _wider(
    flow: Flow, labels: Mapping[int, int], numbers: dict[Hashable, int], exact: bool
) -> dict[int, int]:
    """Labels of the next radius."""
    wider: dict[int, int] = {}
    for number in flow.kernels:
        inputs: Sequence[Hashable] = [
            labels[read.origin] if read.origin >= 0 else flow.outside(read.origin, exact)
            for read in flow.reads[number]
        ]
        if in_any_order(flow.graph.ops[number]):
            inputs = sorted(inputs, key=repr)
        readers = tuple(sorted(labels[reader] for reader in flow.readers.get(number, ())))
        key = (labels[number], tuple(inputs), readers)
        wider[number] = numbers.setdefault(key, len(numbers))
    return wider
