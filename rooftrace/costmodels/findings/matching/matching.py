"""Kernels of two graphs matched by what they do and by the dataflow around them.

Each kernel gets a label for every radius: radius 0 is what it does, radius k + 1 is its label of
radius k with those of its neighbours (the refinement of Weisfeiler and Leman).  Kernels are matched
from the largest radius to the smallest, so the order in which independent kernels run, the names of
modules and the lines of the code do not matter.  First come kernels that do the same to tensors of
the same sizes: in the same module, then in modules that are alike, then anywhere.  Those that do
the same to other sizes follow.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.findings.matching.anchors import Anchor, Anchors
from rooftrace.costmodels.findings.matching.flow import Flow, in_any_order
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
class Pair:
    """A kernel of either graph that are the same; `times` of the runs of each."""

    before: int
    after: int
    times: int


@dataclass(frozen=True, slots=True)
class Matching:
    """The kernels of two graphs that are the same, and how many runs of others are left over."""

    pairs: tuple[Pair, ...]
    removed: Mapping[int, int]
    added: Mapping[int, int]


def match(before: Flow, after: Flow) -> Matching:
    """Match the kernels of two graphs; every run of a kernel is in one pair or left over."""
    rounds = _Rounds(before, after)
    for exact, elsewhere in ((True, _ELSEWHERE), (False, _RESIZED_ELSEWHERE)):
        if not rounds.is_left:
            break
        labels = _labels(before, after, exact)
        rounds.run(labels, 0, lambda path: path)
        rounds.run(labels, 0, pattern_of)
        rounds.run(labels, elsewhere, lambda _: "")
    rounds.by_anchors()
    left = [{op: times for op, times in side.items() if times} for side in rounds.left]
    return Matching(tuple(rounds.pairs), left[0], left[1])


class _Rounds:
    """Runs of kernels that are not matched yet, and the pairs so far."""

    def __init__(self, before: Flow, after: Flow) -> None:
        self.flows = before, after
        self.left = [
            {number: flow.graph.times(flow.graph.ops[number]) for number in flow.kernels}
            for flow in self.flows
        ]
        self.pairs: list[Pair] = []

    @property
    def is_left(self) -> bool:
        """Whether both sides have runs that are not matched."""
        return all(any(side.values()) for side in self.left)

    def run(self, labels: Sequence[Labels], least: int, place: Callable[[str], str]) -> None:
        """Match what has one label, from the largest radius down to `least`.

        place: what the paths of two modules have in common whose kernels may be matched.
        """
        for radius in range(RADIUS, least - 1, -1):
            if not self.is_left:
                return
            first, second = (self._classes(side, labels[side][radius], place) for side in range(2))
            for key, members in first.items():
                if key in second:
                    self._pair(members, second[key])

    def _classes(
        self, side: int, labels: Mapping[int, int], place: Callable[[str], str]
    ) -> dict[Hashable, list[int]]:
        ops = self.flows[side].graph.ops
        classes: dict[Hashable, list[int]] = defaultdict(list)
        for number, times in self.left[side].items():
            if times:
                classes[labels[number], place(ops[number].module)].append(number)
        return classes

    def _pair(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Pair kernels in order, as many runs of each as are left."""
        first, second = deque(before), deque(after)
        while first and second:
            a, b = first[0], second[0]
            times = min(self.left[0][a], self.left[1][b])
            self.pairs.append(Pair(a, b, times))
            for side, number, queue in ((0, a, first), (1, b, second)):
                self.left[side][number] -= times
                if not self.left[side][number]:
                    queue.popleft()

    def by_anchors(self) -> None:
        """Match what is left by the matched kernels around it: most of these in common first."""
        anchors = [
            {op: Anchors(self.flows[side], left).around(op) for op, times in left.items() if times}
            for side, left in enumerate(self.left)
        ]
        partners = {pair.before: pair.after for pair in self.pairs}
        scores = []
        for a, around in anchors[0].items():
            there = {_translated(anchor, partners) for anchor in around}
            for b, others in anchors[1].items():
                same = self.flows[0].loose(a) == self.flows[1].loose(b)
                if same and (score := len(there & others)) >= _ANCHORS:
                    scores.append((-score, a + b, a, b))
        for _, _, a, b in sorted(scores):
            if self.left[0][a] and self.left[1][b]:
                self._pair([a], [b])


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
