"""The best deployment of a step within limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.studies.solving.candidates import Array, Candidates, Deployment, Line, Service, Way
from rooftrace.studies.solving.workloads import Limits

MOST_CHIPS = 64
_DOUBLINGS = 4
"""Numbers of chips that are tried for each chip by default, from the least."""
_WORTH = 0.9
"""Twice as many chips are tried where they would cost at most this share, if they sent nothing."""
_FRONT = 64
"""Points of the front that are kept."""


@dataclass(frozen=True)
class Objective:
    """An objective: its words, and a cost of each candidate of a line, least is best."""

    words: str
    cost: Callable[[Line], Array]


OBJECTIVES: Mapping[str, Objective] = {
    "largest": Objective("the largest", lambda line: -line.sizes.astype(float)),
    "cheapest": Objective("the fewest dollars per million {item}s",
                          lambda line: _number_or_nan(line.price) / line.per_chip),
    "energy": Objective("the fewest joules per {item}",
                        lambda line: _number_or_nan(line.power) / line.per_chip),
    "throughput": Objective("the most {item}s per second of a chip",
                            lambda line: 1 / line.per_chip),
    "latency": Objective("the least time of a step", lambda line: line.tpot),
}  # fmt: skip


def _number_or_nan(number: Any) -> Any:
    return np.nan if number is None else number


@dataclass(frozen=True, eq=False, kw_only=True)
class ServingAnswer(Plain, Shown):
    """The best candidate within limits, the best of each other configuration, and how near.

    rows: the best of each configuration that holds the limits, best first; none where nothing
    does, and then `nearest` is the candidate that misses them by least.  breaks: the limits that
    the next larger size misses.  span: the best size if steps take as long as 90 % of them do at
    most and at least; None without knobs.  front: candidates that fit and that no other beats in
    both tokens per second of a user and of a chip, limits aside; of batches of decode steps only.
    curves: the lines of which some size fits, of the same.  item: a token or a sample.  rests: the
    assumptions of the answer.
    """

    title: str
    item: str
    question: str
    objective: str
    name: str  # of the size that was left open
    limits: Limits
    service: Service
    rows: tuple[Deployment, ...]
    nearest: Deployment | None
    breaks: tuple[str, ...]
    span: tuple[Deployment | None, Deployment | None] | None
    front: tuple[Deployment, ...]
    curves: tuple[Line, ...]
    rests: tuple[str, ...]
    evaluated: int  # candidates
    sizes: tuple[int, int]  # the least and the largest that were looked at
    left_out: tuple[str, ...]

    KEYS = (
        "question limits best margins=_margins chance chances? breaks span rows nearest front "
        "rests_on=rests left_out evaluated"
    )

    def __repr__(self) -> str:
        return short(self, f"{self.question}: {self.best or self.nearest}")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw tokens per second of a chip over those of a user: each configuration, and the front.

        path: of a PNG, SVG or PDF.  Raises RequestError for an answer that compares no deployments.
        """
        from rooftrace.reporting.figures import draw_answer

        draw_answer(self, Path(path))

    @property
    def best(self) -> Deployment | None:
        """The answer; None where nothing holds the limits."""
        return self.rows[0] if self.rows else None

    @property
    def second(self) -> Deployment | None:
        """The best of the other configurations; None where there is no other that holds."""
        return self.rows[1] if len(self.rows) > 1 else None

    @property
    def _margins(self) -> dict[str, float] | None:
        return None if self.best is None else self.margins(self.best)

    @cached_property
    def chances(self) -> dict[str, float]:
        """The chance of the best that it holds each limit of time; empty without knobs.

        All that a limit counts, prefills too, is taken to be off like the step is.
        """
        if self.best is None or self.best.high is None:
            return {}
        step, times = self.best.estimate, dict(self.limits)
        ratios = {name: value / getattr(self.best, name) for name, value in times.items()}
        chances = {name: step.chance(ratio * step.t_est) for name, ratio in ratios.items()}
        return {name: chance for name, chance in chances.items() if chance is not None}

    @property
    def chance(self) -> float | None:
        """The chance that the best holds all limits of time: that of the least certain one, as
        errors are common to all.  None where none is known."""
        return min(self.chances.values(), default=None)

    def margins(self, of: Deployment) -> dict[str, float]:
        """The share of each limit that a deployment leaves free; below 0 where it misses it."""
        free = {name: 1 - getattr(of, name) / value for name, value in self.limits}
        return {**free, "memory": 1 - of.memory / of.capacity}


@dataclass(frozen=True, eq=False)
class Search:
    """All lines of a question, and the best candidate of each.

    every: the requested sizes.  sizes: those of them that are tried first.
    """

    candidates: Candidates
    every: Sequence[int]
    sizes: Sequence[int]
    lines: tuple[Line, ...]
    limits: Limits
    objective: str

    @classmethod
    def over(
        cls,
        candidates: Candidates,
        every: Sequence[int],
        sizes: Sequence[int],
        counts: Sequence[int] | None,
        limits: Limits,
        objective: str,
    ) -> Search:
        """Evaluate all.  counts: numbers of chips; None: those of `_from_few_chips`."""
        if counts is None:
            lines = tuple(_from_few_chips(candidates, sizes, limits, objective))
        else:
            splits = filter(None, map(candidates.split, counts))
            lines = tuple(
                line for split in splits for line in candidates.lines(split, candidates.ways, sizes)
            )
        return cls(candidates, every, sizes, lines, limits, objective)

    # -- the best ----------------------------------------------------------------------------------

    def best(self) -> list[tuple[Line, int, float]]:
        """The best of each configuration: its line, place and cost; best first."""
        chosen = []
        for line in self.lines:
            place = self._best_of(line, line.holds(self.limits))
            if place is None:
                continue
            finer = self.candidates.again(line, self._around(int(line.sizes[place])))
            fine = self._best_of(finer, finer.holds(self.limits))
            if fine is not None:
                line, place = finer, fine
            chosen.append((line, place, float(self._cost(line)[place])))
        dollars = OBJECTIVES["cheapest"].cost
        chosen.sort(key=lambda entry: (entry[2], dollars(entry[0])[entry[1]]))
        return chosen

    def _cost(self, line: Line) -> Array:
        return OBJECTIVES[self.objective].cost(line)

    def _best_of(self, line: Line, holds: Array) -> int | None:
        cost = np.where(holds, self._cost(line), np.nan)
        if np.isnan(cost).all():
            return None
        return int(np.nanargmin(cost))

    def _around(self, size: int) -> Sequence[int]:
        """The requested sizes between the tried neighbours of a tried size."""
        sizes = np.asarray(self.sizes)
        place = int(np.searchsorted(sizes, size))
        low = int(sizes[max(place - 1, 0)])
        high = int(sizes[min(place + 1, len(sizes) - 1)])
        return [number for number in range(low, high + 1) if number in self.every]

    # -- near the best -----------------------------------------------------------------------------

    def nearest(self) -> Deployment | None:
        """The candidate that misses its limits by least."""
        worst = [(float(line.worst(self.limits).min()), line) for line in self.lines]
        if not worst:
            return None
        _, line = min(worst, key=lambda pair: pair[0])
        return line.deployment(int(line.worst(self.limits).argmin()))

    def breaks(self, line: Line, place: int) -> tuple[str, ...]:
        """The limits that the next larger size misses."""
        next_by = self.every.step if isinstance(self.every, range) else 1
        after = self.candidates.again(line, [int(line.sizes[place]) + next_by])
        taken = after.over(self.limits)
        return tuple(name for name, column in taken.items() if float(column[0]) > 1)

    def span(self, line: Line) -> tuple[Deployment | None, Deployment | None] | None:
        """The best with steps as slow, and as fast, as the ends of their interval."""
        if np.isnan(line.high).all():
            return None
        coarse = self.candidates.again(line, self.sizes)
        ends: list[Deployment | None] = []
        for name in ("high", "low"):
            place = self._best_of(coarse, coarse.holds(self.limits, getattr(coarse, name)))
            if place is None:
                ends.append(None)
                continue
            fine = self.candidates.again(line, self._around(int(coarse.sizes[place])))
            best = self._best_of(fine, fine.holds(self.limits, getattr(fine, name)))
            ends.append(fine.deployment(best) if best is not None else coarse.deployment(place))
        return ends[0], ends[1]

    def front(self) -> tuple[Deployment, ...]:
        """Candidates that fit and that no other beats in both speeds, fastest for a user first."""
        points = []
        for number, line in enumerate(self.lines):
            for place in line.fits:
                points.append((line.per_user[place], line.per_chip[place], number, place))
        front = list(undominated(points))
        step = max(1, -(-len(front) // _FRONT))
        kept = front[::step] + (front[-1:] if (len(front) - 1) % step else [])
        return tuple(self.lines[number].deployment(int(place)) for _, _, number, place in kept)


def _from_few_chips(
    candidates: Candidates, sizes: Sequence[int], limits: Limits, objective: str
) -> Iterator[Line]:
    """Lines on 1, 2, 4, ... chips, of each way until limits hold and more chips are not worth it.

    The first number is the least by memory: that of one chip at the smallest size, split evenly.
    Where that is more than one chip, the line of one has this size alone.
    """
    first, needed = candidates.first, dict[Way, int]()
    for line in candidates.lines(first, candidates.ways, sizes[:1]):
        memory, chip = float(line.memory[0]) * first.chips, line.configuration.chip
        needed[line.way] = chip.count_holding(memory, candidates.service.kept_free)
        if needed[line.way] > first.chips:
            yield line
        if needed[line.way] > MOST_CHIPS:
            candidates.left_out[f"{chip.name}: up to {MOST_CHIPS} chips hold too little"] = None

    def least(line: Line) -> float:
        cost = np.where(line.holds(limits), OBJECTIVES[objective].cost(line), np.inf)
        return float(np.where(np.isnan(cost), np.inf, cost).min())

    tried: dict[Way, list[float]] = {way: [] for way in needed}
    count = first.chips
    while tried and count <= MOST_CHIPS:
        ways = [way for way in tried if needed[way] <= count]
        split = candidates.split(count) if ways else first
        if split is None:
            return
        for line in candidates.lines(split, ways, sizes):
            yield line
            costs = tried[line.way]
            costs.append(least(line))
            worth = objective != "largest" and least(line.halved) < _WORTH * min(costs)
            if len(costs) == _DOUBLINGS or (line.holds(limits).any() and not worth):
                del tried[line.way]
        count *= 2


def undominated(points: Iterable[tuple[float, float, Any, Any]]) -> Iterator[Any]:
    """The points that no other is at least equal to in both numbers; by falling first number."""
    most = -np.inf
    for point in sorted(points, key=lambda p: (-p[0], -p[1])):
        if point[1] > most:
            most = point[1]
            yield point
