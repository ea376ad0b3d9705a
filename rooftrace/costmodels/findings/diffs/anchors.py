"""What is fixed around a kernel without a partner: matched kernels, named tensors, results."""

from __future__ import annotations

from collections.abc import Mapping

from rooftrace.costmodels.findings.diffs.flow import Flow

Anchor = tuple[str, int | str]
"""How a kernel is tied to something, and to what: the number of a kernel, or a name."""
_DEPTH = 3
"""Kernels without a partner that may stand between a kernel and its anchor."""


class Anchors:
    """The anchors of the kernels of a graph; left: runs without a partner, by kernel."""

    def __init__(self, flow: Flow, left: Mapping[int, int]) -> None:
        self.flow, self.left = flow, left

    def around(self, op: int) -> set[Anchor]:
        """Matched kernels (or named tensors) that it reads from, and that read from it."""
        values = self.flow.graph.values
        anchors: set[Anchor] = set()
        for origin in self._reached(op, back=True):
            if origin >= 0:
                anchors.add(("reads", origin))
            elif name := values[-1 - origin].name:
                anchors.add(("named", name))
        anchors |= {("read by", reader) for reader in self._reached(op, back=False)}
        made = set(self.flow.graph.ops[op].outputs)
        for position, value in enumerate(self.flow.graph.outputs):
            if value in made or self.flow.origins[value] == op:
                anchors.add(("result", str(position)))
        return anchors

    def _reached(self, op: int, back: bool) -> set[int]:
        """The nearest kernels with a partner, or tensors from outside, in one direction."""
        reached: set[int] = set()
        front = [op]
        for _ in range(_DEPTH + 1):
            after: list[int] = []
            for number in front:
                near = (
                    [read.origin for read in self.flow.reads[number]]
                    if back
                    else self.flow.readers.get(number, ())
                )
                after += [other for other in near if self.left.get(other)]
                reached |= {other for other in near if not self.left.get(other)}
            front = after
        return reached
