"""Time, memory, money and energy of a step on some chips: one candidate, or many in arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from rooftrace._plain import Plain
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.errors import RequestError
from rooftrace.graph import replicas_of
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.systems.records import SystemSizeError
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.solving.workloads import Limits, Mix
from rooftrace.studies.sweeps import Form, SweepCase, evaluated

Array = np.ndarray[Any, np.dtype[Any]]
Way = tuple[Conditions, Chip]
"""How a step is priced, and on which chip."""
HOUR = 3600.0
MILLION = 1e6


# -- deployments -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Split:
    """A step as each of several chips runs it, from a trace over a mesh of so many processes.

    prefill: that of one prompt, for requests.
    """

    form: Form
    prefill: Form | None = None

    @cached_property
    def chips(self) -> int:
        """Chips that run the step together."""
        return self.form.example.processes

    @cached_property
    def replicas(self) -> int:
        """How many batches they work on at a time; 1 where the mesh does not say."""
        return replicas_of(self.form.example.mesh) or 1


@dataclass(frozen=True, eq=False, kw_only=True)
class Configuration:
    """A deployment but for its sizes.

    case: the step of one of the chips, and how it is priced.  capacity: bytes of one chip that may
    be used.  prefills: the chip of prefills that run on others; None: the same.
    """

    split: Split
    case: SweepCase
    chip: Chip
    capacity: float
    prefills: Chip | None = None

    @property
    def pools(self) -> tuple[Chip, Chip]:
        """The chip of the step, and that of the prefills."""
        return self.chip, self.prefills or self.chip


Number = TypeVar("Number", float, Array)


@dataclass(frozen=True, eq=False, kw_only=True)
class Speeds(Generic[Number]):
    """Speeds of a step on some chips, at one size or at many.

    Seconds: step, sent (of the step, in which chips send to each other and do nothing else), tpot
    (per output token, with the prefills in between; the step, where no requests are given).  rate:
    tokens or samples per second of all chips.  prefilling: the share of time, or of the chips, that
    prefills take.
    """

    configuration: Configuration
    step: Number
    sent: Number
    tpot: Number
    rate: Number
    prefilling: Number

    def _mean(self, fact: str) -> Number | None:
        """A fact of a chip, as the mean over those of the step and those of the prefills."""
        own, other = (getattr(chip, fact) for chip in self.configuration.pools)
        if own is None or other is None:
            return None
        mean: Number = self.prefilling * other.value + (1 - self.prefilling) * own.value
        return mean

    @property
    def price(self) -> Number | None:
        """Dollars per hour of one chip; None if unknown."""
        return self._mean("price")

    @property
    def power(self) -> Number | None:
        """Watts of one chip, see `Chip.drawn`; None if unknown."""
        return self._mean("drawn")

    @property
    def chip(self) -> str:
        """The name of the chip."""
        return self.configuration.chip.name

    @property
    def chips(self) -> int:
        """Chips that run the step together."""
        return self.configuration.split.chips

    @property
    def labels(self) -> Mapping[str, Any]:
        """The phase, the execution and the precisions."""
        return self.configuration.case.labels

    @property
    def capacity(self) -> float:
        """Bytes of one chip that may be used."""
        return self.configuration.capacity

    @property
    def per_chip(self) -> Number:
        """Tokens or samples per second of one chip."""
        return self.rate / self.chips

    @property
    def per_user(self) -> Number:
        """Tokens per second of one sequence."""
        return 1 / self.tpot


@dataclass(frozen=True, eq=False, kw_only=True)
class Deployment(Plain, Speeds[float]):
    """One way to run a step: on so many chips, at these sizes, in these precisions.

    Seconds: low, high (between which 90 % of such steps are, None without knobs), ttft (to the
    first token of the longest prompt; None where no requests are given).  memory: bytes of one chip
    at the fullest moment.
    """

    sizes: Mapping[str, int]
    low: float | None
    high: float | None
    ttft: float | None
    memory: int
    limiter: str

    KEYS = (
        "chip chips **labels **sizes step step_low=low step_high=high sent tpot ttft memory "
        "capacity rate rate_per_chip=per_chip rate_per_user=per_user dollars_per_million=dollars "
        "joules_each=joules limiter price power prefilling prefill_chip=configuration.pools.1.name"
    )

    @property
    def dollars(self) -> float | None:
        """Dollars per million tokens or samples; None without a price."""
        price = self.price
        return None if price is None else price / HOUR / self.per_chip * MILLION

    @property
    def joules(self) -> float | None:
        """Joules per token or sample at the full power of `Chip.drawn`: at most that many."""
        power = self.power
        return None if power is None else power / self.per_chip

    @cached_property
    def estimate(self) -> Estimate:
        """The step of one of the chips, priced again by itself."""
        case = self.configuration.case
        sizes = {name: size for name, size in self.sizes.items() if name in case.form.names}
        return estimate(case.conditions.plan(case.form.graph(**sizes)), self.configuration.chip)


def closed_loop(
    step: Any, prefill: Any, batch: Any, tokens: Any, *, rounds: int | None = None,
    spread: float = 0.0, together: Any = 1.0, held: Any = 0,
    filled: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Seconds per output token, and seconds that a request waits beside its own prefill.

    So many clients (batch) each send a request once the one before is answered with so many tokens.
    step: seconds of a decode step of the batch.  prefill: of a prompt, by which it delays the step
    that it joins.  rounds: requests that each client sends, the first ones all at once; None: the
    steady state, where prompts come evenly.  spread: standard deviation of lengths of answers over
    their mean.  together: prompts that one step takes.  held: steps for which an engine holds
    prompts back, so that more of them share a step.  filled: gives the seconds by which so many
    prompts delay the step that they join; None: each of them by those of one.

    A prompt joins the step after the next, as engines schedule a step while the one before runs.
    Answers that began together end together: after g of them, two end in the same step with the
    density with which two normal variables of standard deviation spread sqrt(g) coincide.  The last
    round has no next one, whose prompts would delay it.
    """
    even = (batch - 1) / tokens  # prompts of others for each step
    past = range(1, rounds or 1)
    density = sum(1 / (2 * spread * math.sqrt(math.pi * g)) for g in past) / max(len(past), 1)
    share = 1 / rounds if rounds else 0.0  # of the requests of one round
    crowd = even * max(1.0, density)
    others = (1 + held) * crowd  # prompts that join the same step
    seen = even * (1 - share / 2) - np.where(held, others / tokens, 0)
    joined = np.clip(1 + others, 1, together)
    each = filled(joined) / joined if filled else prefill
    tpot = step + seen * each
    kept = held * (1 + crowd * held / 2) / (1 + crowd * held)  # the later wait shorter
    steady = tpot + (1 + kept) * step + others * each + (each - prefill)
    many = np.minimum(batch, together)
    full = filled(many) if filled else many * prefill
    burst = (batch / many + 1) / 2 * (step + full) - prefill
    return tpot, (1 - share) * steady + share * burst


def out_of_node(chip: Chip) -> float | None:
    """byte/s from a chip into another node, by the datasheet; None: unknown."""
    if chip.system is not None and chip.system.levels:
        inside = chip.system.size_of(len(chip.system.levels) - 2)
        return float(chip.system.levels[-1].rate_of(1, inside))
    link = chip.link("inter")
    return None if link is None else link.bandwidth.value


def sending(pools: Sequence[Chip], nbytes: Any) -> Any:
    """Seconds in which the chip of a prefill sends the cache of a request to that of the decode
    steps: at the slower of their networks, without latency; 0 where one is unknown."""
    rates = [rate for rate in map(out_of_node, pools) if rate is not None]
    return nbytes / min(rates) if len(rates) == len(pools) else nbytes * 0.0


# -- candidates ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Service:
    """How requests are served.

    mix: the requests; None: single steps.  apart: whether prefills run on separate chips.
    prefills: these chips; None: alike.  kept_free: share of the memory that must stay free.
    """

    mix: Mix | None = None
    apart: bool = False
    prefills: Chip | None = None
    kept_free: float = 0.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Line(Speeds[Array]):
    """Candidates that differ in one size only, by rising size: arrays of length P."""

    name: str  # of the size
    at: Mapping[str, int]  # the other sizes
    sizes: Array
    low: Array
    high: Array
    ttft: Array  # nan without requests
    waits: int  # steps in the time to the first token
    memory: Array  # of one chip
    regime: Array

    @property
    def way(self) -> Way:
        """How its steps are priced, and on which chip."""
        return self.configuration.case.conditions, self.configuration.chip

    @property
    def fits(self) -> Array:
        """Indices of the candidates that fit the memory of each chip."""
        return np.flatnonzero(self.memory <= self.capacity)

    @property
    def halved(self) -> Line:
        """The line if twice as many chips did it in half of the time: nothing splits better."""
        halves = {n: getattr(self, n) / 2 for n in ("step", "tpot", "ttft", "memory")}
        return replace(self, **halves)

    def over(self, limits: Limits, steps: Array | None = None) -> dict[str, Array]:
        """Each candidate's use of each limit and of memory: at most 1 where it holds.

        steps: seconds of a step in place of the expected ones; the rest follows.
        """
        more = 0.0 if steps is None else steps - self.step
        counts = {"ttft": self.waits}
        taken = {name: (getattr(self, name) + counts.get(name, 1) * more) / value
                 for name, value in limits}  # fmt: skip
        return {**taken, "memory": self.memory / self.capacity}

    def holds(self, limits: Limits, steps: Array | None = None) -> Array:
        """Whether each candidate holds all limits and fits."""
        return self.worst(limits, steps) <= 1

    def worst(self, limits: Limits, steps: Array | None = None) -> Array:
        """Each candidate's use of the limit that it comes closest to."""
        taken = np.stack([np.broadcast_to(t, self.sizes.shape) for t in
                          self.over(limits, steps).values()])  # fmt: skip
        worst: Array = np.where(np.isnan(taken), np.inf, taken).max(axis=0)
        return worst

    def deployment(self, place: int) -> Deployment:
        """One candidate."""

        def value(column: Array) -> float | None:
            number = float(column[place])
            return None if np.isnan(number) else number

        return Deployment(
            configuration=self.configuration,
            sizes={**self.at, self.name: int(self.sizes[place])},
            step=float(self.step[place]),
            low=value(self.low),
            high=value(self.high),
            sent=float(self.sent[place]),
            tpot=float(self.tpot[place]),
            ttft=value(self.ttft),
            memory=int(self.memory[place]),
            rate=float(self.rate[place]),
            prefilling=float(self.prefilling[place]),
            limiter=REGIMES[int(self.regime[place])],
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidates:
    """The steps of a question on any number of chips.

    first: the requested step, or that at its smallest size.  split_over: the step over so many
    chips; it raises RequestError where it cannot be traced.  left_out: chips without candidates,
    with the reason.
    """

    first: Split
    split_over: Callable[[int], Split]
    conditions: tuple[Conditions, ...]
    chips: tuple[Chip, ...]
    service: Service
    name: str
    at: Mapping[str, int]
    left_out: dict[str, None] = field(default_factory=dict)

    @property
    def ways(self) -> list[Way]:
        """All conditions on all chips."""
        return [(conditions, chip) for conditions in self.conditions for chip in self.chips]

    def split(self, count: int) -> Split | None:
        """The step over so many chips; None where it cannot be traced."""
        try:
            return self.split_over(count)
        except RequestError as error:
            self.left_out[f"{count} chips: {str(error).splitlines()[0]}"] = None
            return None

    def lines(self, split: Split, ways: Sequence[Way], sizes: Sequence[int]) -> Iterator[Line]:
        """A line for each of the ways that can run the step."""
        for conditions in dict.fromkeys(conditions for conditions, _ in ways):
            case = SweepCase(split.form, conditions, {})
            tried = [chip for of, chip in ways if of is conditions]
            able = [chip for chip in tried if self._is_able(case, chip, sizes)]
            if able:
                yield from self._lines(split, case, able, np.asarray(sizes, dtype=np.int64))

    def again(self, line: Line, sizes: Sequence[int]) -> Line:
        """A line at other sizes, all else equal."""
        made, case = line.configuration, line.configuration.case
        return next(self._lines(made.split, case, [made.chip], np.asarray(sizes, dtype=np.int64)))

    def _points(self, case: SweepCase, sizes: Array) -> Points:
        columns = {n: np.full(len(sizes), v) for n, v in self.at.items()} | {self.name: sizes}
        return Points({n: columns[n] for n in case.form.names})

    def _is_able(self, case: SweepCase, chip: Chip, sizes: Sequence[int]) -> bool:
        """Whether a chip, and the system that it is joined by, can run a case."""
        try:
            evaluated(case.form, self._points(case, np.array(sizes[:1])), [chip], case.conditions)
        except (MissingPeakError, SystemSizeError) as error:
            reason = str(error).split(";")[0]
            self.left_out[f"{chip.name}, {case.labels['dtype']}: {reason}"] = None
            return False
        return True

    def _lines(
        self, split: Split, case: SweepCase, chips: Sequence[Chip], sizes: Array
    ) -> Iterator[Line]:
        table = evaluated(case.form, self._points(case, sizes), chips, case.conditions)
        service, count = self.service, len(sizes)
        mix, other = service.mix, service.prefills
        try:
            prefills = self._prefills(split, case.conditions, [other] if other else chips)
        except (MissingPeakError, SystemSizeError) as error:
            assert other is not None  # the others can run the step
            self.left_out[f"prefills on {other.name}: {str(error).split(';')[0]}"] = None
            return
        for number, chip in enumerate(chips):
            part = {k: column[number * count : (number + 1) * count] for k, column in table.items()}
            step, memory = part["t_est"], np.asarray(part["peak_memory"], dtype=float)
            made = Configuration(
                split=split, case=case, chip=chip, capacity=chip.room(service.kept_free),
                prefills=other,
            )  # fmt: skip
            if mix is None:
                tpot, rate, ttft = step, part["items"] / step, np.full(count, np.nan)
                share = np.zeros(count)
            else:
                seconds, peaks = (column[0 if other else number] for column in prefills)
                batch = part["items"].astype(float)
                prefill = mix.mean(seconds) / mix.outputs  # seconds for each output token
                rate = 1 / (step / batch + prefill)
                share = prefill * rate
                tpot, wait = closed_loop(step, mix.mean(seconds), batch, mix.outputs)
                peak = float(np.max(peaks))
                if service.apart:
                    cache = part["kv_memory"] / batch * mix.longest / (mix.kv + 1)
                    tpot, wait = step, sending(made.pools, cache)
                    memory = np.maximum(memory, self._too_much(made, peak))
                else:
                    memory = np.maximum(memory, peak + part["kv_memory"])
                ttft = wait + float(np.max(seconds))
            yield Line(
                configuration=made, name=self.name, at=self.at, sizes=sizes,
                step=step, low=part["t_low"], high=part["t_high"], sent=part["t_exposed"],
                tpot=tpot, ttft=ttft, waits=0 if service.apart else 2, memory=memory,
                rate=rate * split.replicas, prefilling=share, regime=part["regime"],
            )  # fmt: skip

    def _too_much(self, made: Configuration, peak: float) -> float:
        """Bytes of a chip of the step that stand for a prefill that a chip of its own cannot hold;
        0 where it can."""
        room = made.pools[1].room(self.service.kept_free)
        return peak / room * made.capacity if peak > room else 0.0

    def _prefills(
        self, split: Split, conditions: Conditions, chips: Sequence[Chip]
    ) -> tuple[Array, Array]:
        """Seconds and peaks of memory of the prefill of each kind: arrays [chips, kinds]."""
        mix, prefill = self.service.mix, split.prefill
        if mix is None or prefill is None:
            return np.zeros((len(chips), 0)), np.zeros((len(chips), 0))
        prompts = np.array([kind.prompt for kind in mix.kinds], dtype=np.int64)
        points = Points({name: prompts if name == "seq" else np.ones_like(prompts)
                         for name in prefill.names})  # fmt: skip
        table = evaluated(prefill, points, chips, conditions)
        seconds, peaks = (
            np.asarray(table[name], dtype=float).reshape(len(chips), len(prompts))
            for name in ("t_est", "peak_memory")
        )
        return seconds, peaks
