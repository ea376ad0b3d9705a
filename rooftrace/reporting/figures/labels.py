"""Places labels so that none covers another, a point or a line.  Pixels in, pixels out.

Deterministic: each label takes the cheapest of a fixed set of places around its anchor, with the
others where they are, until nothing moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

REACHES = (7, 14, 24, 38, 56, 80, 110, 150, 200, 260, 330)  # pixels between anchor and label
DIRECTIONS = 16
PASSES = 4
# The cost of faults of a place, in pixels of distance.
OVER_LABEL, OUTSIDE, OVER_POINT, CROSSING, OVER_LINE = 1e7, 1e7, 1e6, 2000.0, 250.0


class Box(NamedTuple):
    """A rectangle."""

    x0: float
    y0: float
    x1: float
    y1: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Box:
        """The box with this middle and size."""
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def overlaps(self, other: Box, gap: float = 0.0) -> bool:
        """Whether the two come closer than `gap`."""
        return (
            self.x0 < other.x1 + gap
            and other.x0 < self.x1 + gap
            and self.y0 < other.y1 + gap
            and other.y0 < self.y1 + gap
        )

    def contains(self, x: float, y: float) -> bool:
        """Whether the point lies inside."""
        return self.x0 < x < self.x1 and self.y0 < y < self.y1

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The point of the box that is nearest to (x, y)."""
        return min(max(x, self.x0), self.x1), min(max(y, self.y0), self.y1)


class Label(NamedTuple):
    """A label to place: the point it belongs to, and its size.

    slide: pixels to the left of the point that are as good, for the label of a horizontal line.
    first: placed before the others, and not moved again.
    """

    x: float
    y: float
    width: float
    height: float
    slide: float = 0.0
    first: bool = False


def place(
    labels: Sequence[Label],
    frame: Box,
    *,
    taken: Sequence[Box] = (),
    points: Sequence[Box] = (),
    line: Sequence[tuple[float, float]] = (),
) -> list[Box]:
    """A box inside `frame` for each label.

    No box overlaps another or one that is `taken` as long as any candidate is free; boxes keep off
    `points`, leaders off boxes, and both off the sampled `line` where that is possible.
    """
    order = sorted(range(len(labels)), key=lambda i: (not labels[i].first, not labels[i].slide))
    placed: dict[int, Box] = {}
    for _ in range(PASSES):
        before = dict(placed)
        for i in order:
            if labels[i].first and i in placed:
                continue
            others = [box for j, box in placed.items() if j != i]
            leaders = [list(leader(labels[j], box)) for j, box in placed.items() if j != i]
            best, price = placed.get(i), math.inf
            for reach, box in candidates(labels[i]):
                cost = _cost(
                    labels[i], box, reach, frame, [*taken, *others], points, line, leaders, price
                )
                if cost < price:
                    best, price = box, cost
            if best is not None:
                placed[i] = best
        if placed == before:
            break
    return [placed[i] for i in range(len(labels))]


def candidates(label: Label) -> Iterator[tuple[float, Box]]:
    """(distance, box) around the anchor, nearest first, the right-hand side before the others; for
    a label that may slide, above and below its line."""
    if label.slide:
        for shift in range(0, int(label.slide), 20):
            for gap in (5, 24):
                for y0 in (label.y + gap, label.y - gap - label.height):
                    x0 = label.x - shift - label.width
                    yield gap + shift / 20, Box(x0, y0, x0 + label.width, y0 + label.height)
        return
    for reach in REACHES:
        for step in range(DIRECTIONS):
            # 0, 1, -1, 2, -2 ... sixteenths of a turn, starting up and to the right
            turn = (step + 1) // 2 * (1 if step % 2 else -1)
            angle = math.pi / 8 * (0.5 + turn)
            x = label.x + math.cos(angle) * reach + math.cos(angle) * label.width / 2
            y = label.y + math.sin(angle) * reach + math.sin(angle) * label.height / 2
            yield reach, Box.around(x, y, label.width, label.height)


def leader(label: Label, box: Box) -> Iterator[tuple[float, float]]:
    """Points along the line from the anchor to its box."""
    if label.slide:
        return
    x, y = box.nearest(label.x, label.y)
    steps = max(1, int(math.hypot(x - label.x, y - label.y) / 4))
    for i in range(1, steps):
        yield label.x + (x - label.x) * i / steps, label.y + (y - label.y) * i / steps


def _cost(
    label: Label,
    box: Box,
    reach: float,
    frame: Box,
    boxes: Sequence[Box],
    points: Sequence[Box],
    line: Sequence[tuple[float, float]],
    leaders: Sequence[Sequence[tuple[float, float]]],
    limit: float,
) -> float:
    x, y = box.nearest(label.x, label.y)
    cost = reach if label.slide else math.hypot(x - label.x, y - label.y) + reach * 0.2
    if box.x0 < frame.x0 or box.y0 < frame.y0 or box.x1 > frame.x1 or box.y1 > frame.y1:
        cost += OUTSIDE
    if cost >= limit:
        return cost
    cost += OVER_LABEL * sum(box.overlaps(other, 4) for other in boxes)
    cost += OVER_POINT * sum(box.overlaps(point, 2) for point in points)
    if cost >= limit:
        return cost
    around = Box(box.x0 - 3, box.y0 - 3, box.x1 + 3, box.y1 + 3)
    cost += OVER_LINE * min(10, sum(around.contains(*spot) for spot in line))
    if cost >= limit:
        return cost
    cost += CROSSING * sum(any(box.contains(*spot) for spot in other) for other in leaders)
    if cost >= limit:
        return cost
    spots = list(leader(label, box))
    foreign = [point for point in points if not point.contains(label.x, label.y)]
    cost += CROSSING * sum(
        any(other.contains(*spot) for spot in spots) for other in (*boxes, *foreign)
    )
    return cost
