"""Seconds of kernels and of steps, at one point or at many, with the limiter of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from rooftrace._amounts import larger, np
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.intervals import LEVEL, WORKS, Behind, StepCell, StepErrors

if TYPE_CHECKING:
    from typing import Any

    from rooftrace._amounts import Amount, Array, Places

    Flags = np.ndarray[Any, np.dtype[np.bool_]]

REGIMES = ("compute", "hbm", "network", "launch")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a kernel group, over all kernels that it stands for."""

    t_comp: float
    t_hbm: float
    t_net: float
    gap: float  # between kernels, see `Chip.kernel_gap`
    start: float = 0.0  # when the first of the kernels starts
    more: float = 0.0  # added to the largest term by imperfect overlap and the limit on power

    @property
    def t_device(self) -> float:
        """Seconds for which the group keeps the device busy, gaps included."""
        return max(self.t_comp, self.t_hbm, self.t_net) + self.more + self.gap

    @property
    def regime(self) -> str:
        """The largest term (the first of equal ones); launch where that is the gap."""
        terms = self.terms
        return max(terms, key=terms.__getitem__)

    @property
    def margin(self) -> float:
        """The largest term over the next one (infinite when nothing else takes time)."""
        return margin(self.terms)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by regime."""
        return {
            "compute": self.t_comp,
            "hbm": self.t_hbm,
            "network": self.t_net,
            "launch": self.gap,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step on one chip, and which regime they belong to."""

    t_comp: float  # of all kernels, by the rates of their engines
    t_hbm: float
    t_net: float
    t_bound: float  # at the datasheet's rates, if engines overlap perfectly: no step is faster
    t_serial: float  # of all kernels one after the other, gaps included
    t_est: float  # until the queue ends
    t_exposed: float = 0.0  # for which computing waits for collectives
    regime_seconds: Mapping[str, float]  # by name in REGIMES; they add up to t_est
    variance: float | None = None  # of log(measured / predicted); None without knobs
    cell: StepCell = field(default_factory=StepCell)  # where it is among measured steps
    # How much it is one kernel: the root of the sum of squares of the seconds of its kernels over
    # t_est.  Equal kernels share an error, so n of them count as about the root of n different ones
    alone: float = 1.0
    t_host: float = 0.0  # of the host to enqueue all of it
    clock: float = 1.0  # share of it that the chip holds by its limit on power
    host_spread: float = 0.0  # between such hosts, relative; 0: it was measured

    @property
    def t_launch(self) -> float:
        """Time in which the device waits for the host."""
        return self.t_est - self.t_serial

    @property
    def regime_shares(self) -> dict[str, float]:
        """Share of t_est by regime; launch holds kernel gaps and waiting."""
        total = sum(self.regime_seconds.values())
        return {
            name: (seconds / total if total else 0.0)
            for name, seconds in self.regime_seconds.items()
        }

    def within(self, knobs: Knobs | None, level: float = LEVEL) -> tuple[float, float] | None:
        """Seconds between which this share of such steps are; None without knobs, or any spread.

        No step is faster than the bound, and the estimate is inside.  Raises ResidualsError for a
        share that the knobs have no ends for.
        """
        errors = self.errors(knobs)
        if errors is None:
            return None
        low, high = (self.t_est * math.exp(end) for end in errors.within(level))
        return max(self.t_bound, low), high

    def errors(self, knobs: Knobs | None) -> StepErrors | None:
        """Where log(measured / predicted) of the step lies; None without knobs, or any spread."""
        if knobs is None or not (self.variance or 0.0) > 0:
            return None
        return knobs.errors_of(self.cell, self.alone, self.variance, self.behind)

    @property
    def behind(self) -> Behind:
        """How far the end of the host is behind that of the device."""
        return Behind.of(self.t_host, self.t_serial, self.t_est or 1.0, self.host_spread)

    def chance(self, knobs: Knobs | None, seconds: float) -> float | None:
        """The chance that a measured step takes at most this; None without knobs, or any spread."""
        errors = self.errors(knobs)
        if errors is None or not seconds > 0:
            return None
        return 0.0 if seconds < self.t_bound else errors.chance(math.log(seconds / self.t_est))

    def grounds(self, knobs: Knobs | None) -> str:
        """A sentence on the measured steps that the interval rests on; "" where there are none."""
        return "" if knobs is None else knobs.grounds_of(self.cell, self.alone, self.behind)

    @property
    def regime(self) -> str:
        """The regime with the largest share."""
        return ranked(self.regime_seconds)[0]

    @property
    def next_regime(self) -> str:
        """The regime with the second largest share."""
        return ranked(self.regime_seconds)[1]

    @property
    def margin(self) -> float:
        """The largest regime's seconds over the next one's."""
        return margin(self.regime_seconds)


def ranked(terms: Mapping[str, float]) -> list[str]:
    """Names by falling value; ties keep the order compute, hbm, network, launch."""
    return sorted(terms, key=lambda name: (-terms[name], REGIMES.index(name)))


def margin(terms: Mapping[str, float]) -> float:
    """Largest value over the second largest."""
    first, second = sorted(terms.values(), reverse=True)[:2]
    return first / second if second > 0 else float("inf")


# -- over entries and points -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Clocked:
    """Seconds of entries at the clock of each point: entries + slower * paced.

    entries, paced: arrays over the N entries of a step.  slower: [P], what the clock adds to paced.
    """

    entries: Array
    paced: Array
    slower: Array

    def of(self, shares: Array) -> Clocked:
        """These shares [N] of the seconds."""
        return replace(self, entries=self.entries * shares, paced=self.paced * shares)


@dataclass(frozen=True, slots=True, eq=False)
class EntrySeconds:
    """Seconds of kernels: arrays over the N entries of a step."""

    compute: Array
    hbm: Array
    network: Array
    gap: Array
    more: Array  # added to the largest term by imperfect overlap and the limit on power
    busy: Array | float = 0.0  # that matrix engines would be busy at their full rate
    paced: Array | float = 0.0  # of the device, that grow as its clock falls

    @property
    def work(self) -> Array:
        """The largest term."""
        seconds: Array = larger(larger(self.compute, self.hbm), self.network)
        return seconds

    @property
    def device(self) -> Array:
        """Seconds for which the kernels keep the device busy, gaps included."""
        return self.work + self.more + self.gap

    def times(self, count: Array) -> EntrySeconds:
        """The seconds of `count` times as many kernels."""
        return replace(self.slowed(count), gap=count * self.gap)

    def slowed(self, factor: Array) -> EntrySeconds:
        """The seconds of so much more work in as many kernels."""
        names = ("compute", "hbm", "network", "more", "busy", "paced")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def held(self, slower: float) -> EntrySeconds:
        """The seconds with what the clock adds to those that follow it."""
        return replace(self, more=self.more + self.paced * slower, busy=0.0, paced=0.0)

    def at(self, slower: Array) -> Clocked:
        """Seconds of the device; slower: [P], what the clock adds to those that follow it."""
        return Clocked(self.device, self.paced + np.zeros(len(self.gap)), slower)

    def by_regime(self, device: Clocked) -> Mapping[str, Clocked]:
        """Seconds by regime: those of the largest term, the first of equal ones; gaps: launch."""
        work, busy = self.work, replace(device, entries=device.entries - self.gap)
        compute = work == self.compute
        hbm = ~compute & (work == self.hbm)
        gaps = Clocked(self.gap, np.zeros(len(work)), device.slower)
        terms = (busy.of(compute), busy.of(hbm), busy.of(~(compute | hbm)), gaps)
        return dict(zip(REGIMES, terms, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Headline:
    """The engines that run most of the matrix FLOPs at some point."""

    rates: tuple[float, ...]
    precisions: tuple[str, ...]
    place: Places  # which of them at each point

    @property
    def peak(self) -> Array:
        """FLOP/s, dense, at each point."""
        return np.array(self.rates)[self.place]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells that points are in."""

    cells: tuple[StepCell, ...]
    place: Places  # which of them at each point

    @staticmethod
    def of(
        step: StepCell,
        works: Sequence[Array],
        narrow: Flags,
        seconds: Sequence[Array],
        heads: Headline,
    ) -> Cells:
        """The cell of each point: the work, precision and regime that have most there.

        step: the cell, as far as all points share it.  works: seconds [P] of each of WORKS; narrow:
        whether most products have narrow weights alone; seconds: of each of REGIMES.
        """
        precision = np.where(narrow, len(heads.precisions), heads.place)
        names = [*map(StepCell.precision_of, heads.precisions), "int4"]
        shape = (len(WORKS), len(names), len(REGIMES))
        keys = (np.argmax(works, axis=0), precision, np.argmax(seconds, axis=0))
        flat = np.ravel_multi_index(keys, shape)
        present = np.flatnonzero(np.bincount(flat))
        place = np.searchsorted(present, flat)
        cells = [
            replace(
                step, work=WORKS[work], precision=names[name],
                limit=StepCell.limit_of(REGIMES[regime]),
            )
            for work, name, regime in zip(*np.unravel_index(present, shape), strict=True)
        ]  # fmt: skip
        return Cells(tuple(cells), place)

    @staticmethod
    def joined(parts: Sequence[tuple[Places, Cells]], points: int) -> Cells:
        """The cells of all points from those of some and of others."""
        cells: dict[StepCell, int] = {}
        place = np.zeros(points, dtype=np.int64)
        for at, part in parts:
            number = [cells.setdefault(cell, len(cells)) for cell in part.cells]
            place[at] = np.array(number)[part.place]
        return Cells(tuple(cells), place)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TimesOverPoints:
    """Seconds of a step on a chip at P points: arrays of length P, as in `StepTimes`."""

    knobs: Knobs | None  # None: the datasheet's peaks
    t_comp: Array
    t_hbm: Array
    t_net: Array
    t_bound: Array
    t_serial: Array
    t_est: Array
    t_exposed: Array
    regime_seconds: Mapping[str, Array]  # by name in REGIMES; they add up to t_est
    variance: Array | None  # relative, of steps; None without knobs, nan where nothing takes time
    heads: Headline
    cells: Cells  # where each point is among measured steps
    alone: Array
    t_host: Array
    clock: Array
    host_spread: float = 0.0

    def at(self, point: int) -> StepTimes:
        """The times at one point."""
        names = ("t_comp", "t_hbm", "t_net", "t_bound", "t_serial", "t_est", "t_exposed")
        return StepTimes(
            **{name: float(getattr(self, name)[point]) for name in (*names, "t_host", "clock")},
            regime_seconds={n: float(s[point]) for n, s in self.regime_seconds.items()},
            variance=None if self.variance is None else float(self.variance[point]),
            cell=self.cells.cells[self.cells.place[point]],
            alone=float(self.alone[point]),
            host_spread=self.host_spread,
        )

    @staticmethod
    def joined(heads: Headline, parts: Sequence[tuple[Places, TimesOverPoints]]) -> TimesOverPoints:
        """The times of all points from those of some and of others."""
        first = parts[0][1]

        def over(arrays: Sequence[Array]) -> Array:
            result = np.zeros(len(heads.place))
            for (at, _), array in zip(parts, arrays, strict=True):
                result[at] = array
            return result

        changes: dict[str, Any] = {
            item.name: over([getattr(times, item.name) for _, times in parts])
            for item in fields(TimesOverPoints)
            if isinstance(getattr(first, item.name), np.ndarray)
        }
        changes["regime_seconds"] = {
            name: over([times.regime_seconds[name] for _, times in parts]) for name in REGIMES
        }
        changes["cells"] = Cells.joined(
            [(at, times.cells) for at, times in parts], len(heads.place)
        )
        return replace(first, heads=heads, **changes)

    @property
    def interval(self) -> tuple[Array, Array] | None:
        """Seconds between which 90 % of such steps are, as `StepTimes.within` says it.

        None without knobs; nan at points where they have no spread.
        """
        if self.variance is None or self.knobs is None:
            return None
        ends = np.full((2, len(self.t_est)), np.nan)
        for number, cell in enumerate(self.cells.cells):
            at = (self.cells.place == number) & (self.variance > 0)
            seconds = (self.t_host[at], self.t_serial[at], self.t_est[at])
            behind = Behind.of(*seconds, self.host_spread)
            errors = self.knobs.errors_of(cell, self.alone[at], self.variance[at], behind)
            ends[:, at] = errors.within()
        low, high = self.t_est * np.exp(ends)
        return np.maximum(self.t_bound, low), high


def at_points(amount: Amount, at: Places | None, points: slice = slice(None)) -> Any:
    """An amount over sizes at points, all or some of them; one number for all of them stays one."""
    if np.size(amount) == 1:
        return amount
    amounts = np.asarray(amount)
    return amounts[points] if at is None else amounts[at[points]]
