"""All candidates of a question in arrays: each size on each number of chips under each condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rooftrace.costmodels.answers.deployments import Deployment, together
from rooftrace.costmodels.answers.workloads import Limits, Mix
from rooftrace.costmodels.planforms import Points
from rooftrace.costmodels.sweeping import Form, SweepCase, evaluated
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.hardware import Chip

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Service:
    """How requests are served.

    mix: what comes; None: single steps.  apart: whether prefills run on chips of their own.
    scaling: of the rate of several chips in an ideal split, the share that is reached.  kept_free:
    share of the memory that must stay free.
    """

    mix: Mix | None = None
    apart: bool = False
    scaling: float = 1.0
    kept_free: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Line:
    """Candidates that differ in one size only, by rising size: arrays of length P."""

    case: SweepCase
    chip: Chip
    chips: int
    name: str  # of the size
    at: Mapping[str, int]  # the other sizes
    sizes: Array
    step: Array
    low: Array
    high: Array
    tpot: Array
    ttft: Array  # nan without requests
    memory: Array
    rate: Array
    regime: Array
    kept_free: float

    @property
    def capacity(self) -> float:
        """Bytes that the chips may use."""
        return float(self.chip.memory_capacity.value * self.chips * (1 - self.kept_free))

    def over(self, limits: Limits, steps: Array | None = None) -> dict[str, Array]:
        """What each candidate takes of each limit: at most 1 where it holds; memory too.

        steps: seconds of a step in place of the expected ones; the rest follows.
        """
        more = 0.0 if steps is None else steps - self.step
        taken = {
            name: (getattr(self, name) + more) / value
            for name, value in limits
        }
        return {**taken, "memory": self.memory / self.capacity}

    def holds(self, limits: Limits, steps: Array | None = None) -> Array:
        """Which candidates hold all limits and fit."""
        return self.worst(limits, steps) <= 1

    def worst(self, limits: Limits, steps: Array | None = None) -> Array:
        """Of each candidate, what it takes of the limit that it comes closest to."""
        taken = np.stack([np.broadcast_to(t, self.sizes.shape) for t in
                          self.over(limits, steps).values()])  # fmt: skip
        worst: Array = np.where(np.isnan(taken), np.inf, taken).max(axis=0)
        return worst

    def deployment(self, place: int) -> Deployment:
        """One candidate."""

        def known(column: Array) -> float | None:
            value = float(column[place])
            return None if np.isnan(value) else value

        price, power = self.chip.price, self.chip.power
        return Deployment(
            chip=self.chip.name,
            chips=self.chips,
            labels=self.case.labels,
            sizes={**self.at, self.name: int(self.sizes[place])},
            step=float(self.step[place]),
            low=known(self.low),
            high=known(self.high),
            tpot=float(self.tpot[place]),
            ttft=known(self.ttft),
            memory=int(self.memory[place]),
            capacity=self.capacity,
            rate=float(self.rate[place]),
            limiter=REGIMES[int(self.regime[place])],
            price=None if price is None else price.value,
            power=None if power is None else power.value,
        )

    @cached_property
    def dollars(self) -> Array:
        """Dollars per million, nan without a price."""
        price = self.chip.price
        per_hour = np.nan if price is None else price.value
        return per_hour / 3600 * self.chips / self.rate * 1e6

    @cached_property
    def joules(self) -> Array:
        """Joules each, nan without a power."""
        power = self.chip.power
        return (np.nan if power is None else power.value) * self.chips / self.rate


@dataclass(frozen=True, eq=False)
class Candidates:
    """The lines of a question, and from where they can be evaluated anew at other sizes."""

    cases: tuple[SweepCase, ...]
    prefills: tuple[SweepCase | None, ...]  # of each case, where requests are given
    chips: tuple[Chip, ...]
    service: Service
    name: str
    at: Mapping[str, int]

    def lines(self, sizes: Sequence[int], counts: Mapping[str, Sequence[int]]) -> Iterator[Line]:
        """A line for each case, chip and number of it.  counts: of chips, by the chip's name."""
        for place in range(len(self.cases)):
            pairs = [(chip, n) for chip in self.chips for n in counts.get(chip.name, ())
                     if self._runs(place, chip)]  # fmt: skip
            if pairs:
                yield from self._lines(place, np.asarray(sizes, dtype=np.int64), pairs)

    def again(self, line: Line, sizes: Sequence[int]) -> Line:
        """The same line at other sizes."""
        place = self.cases.index(line.case)
        pairs = [(line.chip, line.chips)]
        return next(self._lines(place, np.asarray(sizes, dtype=np.int64), pairs))

    def _runs(self, place: int, chip: Chip) -> bool:
        """Whether a chip has the rates that a case computes with."""
        return not self.missing(place, chip)

    def missing(self, place: int, chip: Chip) -> str:
        """Why a case cannot run on a chip; empty where it can."""
        from rooftrace.hardware.chip import MissingPeakError

        case = self.cases[place]
        low = {n: min(r.low[i] for r in case.form.regimes) for i, n in enumerate(case.form.names)}
        try:
            evaluated(case.form, _points(case.form, low), [chip], case.conditions)
        except MissingPeakError as error:
            return str(error)
        return ""

    def _lines(
        self, place: int, sizes: Array, pairs: Sequence[tuple[Chip, int]]
    ) -> Iterator[Line]:
        case = self.cases[place]
        own = {n: np.full(len(sizes), v) for n, v in self.at.items()} | {self.name: sizes}
        points = Points({n: own[n] for n in case.form.names})
        chips = [together(chip, n) for chip, n in pairs]
        table = evaluated(case.form, points, chips, case.conditions)
        mix, count = self.service.mix, len(sizes)
        prefills = self._prefills(place, chips)
        for number, (chip, n) in enumerate(pairs):
            part = {k: column[number * count : (number + 1) * count] for k, column in table.items()}
            slower = 1.0 if n == 1 else 1 / self.service.scaling
            step = part["t_est"] * slower
            memory = np.asarray(part["peak_memory"], dtype=float)
            if mix is None:
                tpot, rate, ttft = step, part["items"] / step, np.full(count, np.nan)
            else:
                seconds, peaks = (column[number] for column in prefills)
                batch = part["items"].astype(float)
                prefill = mix.mean(seconds * slower) / mix.outputs  # seconds for each output token
                rate = 1 / (step / batch + prefill)
                tpot = step if self.service.apart else batch / rate
                longest = float(np.max(seconds)) * slower
                ttft = longest + (0.0 if self.service.apart else step)
                ttft = np.broadcast_to(ttft, step.shape)
                if not self.service.apart:
                    memory = np.maximum(memory, float(np.max(peaks)) + part["kv_memory"])
            yield Line(
                case=case, chip=chip, chips=n, name=self.name, at=self.at, sizes=sizes,
                step=step, low=part["t_low"] * slower, high=part["t_high"] * slower, tpot=tpot,
                ttft=ttft, memory=memory, rate=rate, regime=part["regime"],
                kept_free=self.service.kept_free,
            )  # fmt: skip

    def _prefills(self, place: int, chips: Sequence[Chip]) -> tuple[Array, Array]:
        """Seconds and peaks of memory of the prefill of each kind: arrays [chips, kinds]."""
        mix, prefill = self.service.mix, self.prefills[place]
        if mix is None or prefill is None:
            return np.zeros((len(chips), 0)), np.zeros((len(chips), 0))
        prompts = np.array([kind.prompt for kind in mix.kinds], dtype=np.int64)
        points = Points({name: prompts if name == "seq" else np.ones_like(prompts)
                         for name in prefill.form.names})  # fmt: skip
        table = evaluated(prefill.form, points, chips, prefill.conditions)
        shape = (len(chips), len(prompts))
        return (
            table["t_est"].reshape(shape),
            np.asarray(table["peak_memory"], dtype=float).reshape(shape),
        )


def _points(form: Form, sizes: Mapping[str, int]) -> Points:
    return Points({name: np.array([sizes[name]], dtype=np.int64) for name in form.names})
