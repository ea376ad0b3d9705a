"""Requests and limits of a service, the fewest chips by memory, rates that bound a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.costmodels.timing.timings import StepTimes
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time
from rooftrace.studies.advice import Study, Variant
from rooftrace.studies.sweeps import SweepCase


@dataclass(frozen=True)
class RequestKind:
    """Requests of one kind: tokens of the prompt, tokens of the output, and how many come."""

    prompt: int
    output: int
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise RequestError(
                f"{self.prompt}:{self.output}: expected at least one token of prompt and of output"
            )
        if not 0 < self.share < math.inf:
            raise RequestError(f"{self.prompt}:{self.output}@{self.share:g}: a share is above 0")

    def __str__(self) -> str:
        return f"{self.prompt:,} in, {self.output:,} out"


@dataclass(frozen=True)
class Mix:
    """Requests of several kinds, by their shares (which need not add up to 1)."""

    kinds: tuple[RequestKind, ...]

    @classmethod
    def of(cls, mix: str | Iterable[str]) -> Mix:
        """A mix as "2048:256" or "2048:256@3,8192:1024@1": prompt, output, share.

        Raises RequestError for another form.
        """
        texts = mix.split(",") if isinstance(mix, str) else list(mix)
        kinds = tuple(_kind(text.strip(), str(mix)) for text in texts if text.strip())
        if not kinds:
            raise RequestError(f"mix {mix!r}: it is empty; for example 2048:256@3,8192:1024")
        return cls(kinds)

    def __str__(self) -> str:
        total = sum(kind.share for kind in self.kinds)
        return "; ".join(
            f"{kind.share / total:.0%} {kind}" if len(self.kinds) > 1 else str(kind)
            for kind in self.kinds
        )

    @property
    def outputs(self) -> float:
        """Tokens of output per request."""
        return self.mean(kind.output for kind in self.kinds)

    @property
    def prompts(self) -> float:
        """Tokens of prompt per request."""
        return self.mean(kind.prompt for kind in self.kinds)

    @property
    def kv(self) -> int:
        """The mean length of the cache over all decode steps, rounded up.

        A request of P and O tokens has P + 1 to P + O entries over its O steps, so that it counts
        O times with P + (O + 1) / 2.
        """
        steps = [(Fraction(k.share) * k.output, k.prompt + Fraction(k.output + 1, 2))
                 for k in self.kinds]  # fmt: skip
        return math.ceil(sum(n * length for n, length in steps) / sum(n for n, _ in steps))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(kind.prompt for kind in self.kinds)

    def mean(self, values: Iterable[float]) -> float:
        """The mean over requests of a number that each kind has."""
        shares = [kind.share for kind in self.kinds]
        pairs = zip(values, shares, strict=True)
        return sum(value * share for value, share in pairs) / sum(shares)


def _kind(text: str, mix: str) -> RequestKind:
    sizes, _, share = text.partition("@")
    prompt, colon, output = sizes.partition(":")
    try:
        if not colon:
            raise ValueError(text)
        numbers = int(prompt), int(output), float(share) if share else 1.0
    except ValueError:
        raise RequestError(
            f"mix {mix!r}: {text!r}: expected PROMPT:OUTPUT in tokens with a share if there are "
            "several, for example 2048:256@3,8192:1024@1"
        ) from None
    return RequestKind(*numbers)


@dataclass(frozen=True, kw_only=True)
class Limits(Plain):
    """Limits of a deployment in seconds; None: no limit.

    step: of one step.  tpot: time per output token, with the prefills in between.  ttft: time to
    the first token of the longest prompt.
    """

    step: float | None = None
    tpot: float | None = None
    ttft: float | None = None

    KEYS = "step? tpot? ttft?"

    def __post_init__(self) -> None:
        for name, value in self:
            if not 0 < value < math.inf:
                raise RequestError(f"{name} {value!r}: expected seconds above 0")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                yield each.name, value

    def __str__(self) -> str:
        parts = [f"{WORDS[name]} of at most {format_time(value)}" for name, value in self]
        return " and ".join(parts)


WORDS = {"step": "a step", "tpot": "a time per token", "ttft": "a time to the first token"}


# -- capacity --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Needed(Plain):
    """Chips of one kind for a step under one condition.  used: the share of their memory."""

    chip: str
    labels: Mapping[str, Any]
    chips: int
    memory: int
    weights: int
    kv: int
    capacity: float  # byte of one chip, that may be used
    price: float | None  # dollar/hour of one

    KEYS = "chip **labels chips memory weights kv capacity used dollars_per_hour=dollars"

    @property
    def used(self) -> float:
        """The share of the memory of all that the step takes."""
        return self.memory / (self.chips * self.capacity)

    @property
    def dollars(self) -> float | None:
        """Dollars per hour of all."""
        return None if self.price is None else self.chips * self.price


@dataclass(frozen=True, eq=False, kw_only=True)
class CapacityAnswer(Plain, Shown):
    """The least number of each chip by capacity; fewest first."""

    title: str
    sizes: Mapping[str, int]
    rows: tuple[Needed, ...]
    rests: tuple[str, ...]

    KEYS = "title **sizes rows rests_on=rests"

    def __repr__(self) -> str:
        return short(self, f"{self.title}: {self.rows[0].chips} x {self.rows[0].chip}")


def needed_chips(
    case: SweepCase, sizes: Mapping[str, int], chips: Sequence[Chip], kept_free: float
) -> list[Needed]:
    """The least number of each chip for one case."""
    graph = case.form.graph(**sizes)
    numbers = case.conditions.numbers(graph)
    peak = max(numbers.alive, default=0)
    return [
        Needed(
            chip=chip.name, labels=case.labels, chips=chip.count_holding(peak, kept_free),
            memory=peak, weights=numbers.weights, kv=numbers.kv,
            capacity=chip.room(kept_free),
            price=None if chip.price is None else chip.price.value,
        )
        for chip in chips
    ]  # fmt: skip


# -- passing ---------------------------------------------------------------------------------------
# The length at which attention takes longer than the MLP: an exact search over integers.

ATTENTION = ("attention",)
MLP = ("dense", "moe")
"""Families of products outside of attention: dense layers and experts; the head is neither."""


@dataclass(frozen=True)
class FamilyTimes:
    """Seconds of a step at one size: of attention, of the MLP, of all."""

    size: int
    attention: float
    mlp: float
    step: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PassingAnswer(Plain, Shown):
    """Where attention passes the MLP as a size grows.

    before, after: the last size at which the MLP takes at least as long, and the first at which
    attention takes longer; None where there is no such size within `looked`.
    """

    title: str
    chip: str
    name: str  # of the size
    at: dict[str, int]  # the other sizes
    looked: tuple[int, int]
    before: FamilyTimes | None
    after: FamilyTimes | None
    rests: tuple[str, ...]

    KEYS = "title chip name **at looked before after rests_on=rests"

    def __repr__(self) -> str:
        where = f"{self.name} {self.after.size:,}" if self.after else "nowhere"
        return short(self, f"{self.title} on {self.chip}: {where}")


def times_of(result: Estimate, size: int) -> FamilyTimes:
    """Seconds on the device by family."""
    seconds = {family: part.t_device for family, part in result.by_family().items()}
    return FamilyTimes(
        size,
        sum(seconds.get(family, 0.0) for family in ATTENTION),
        sum(seconds.get(family, 0.0) for family in MLP),
        result.t_est,
    )


def passing(
    shares: Callable[[int], FamilyTimes], low: int, high: int
) -> tuple[FamilyTimes | None, FamilyTimes | None]:
    """The sizes around which attention passes the MLP, by bisection between low and high."""
    first, last = shares(low), shares(high)
    if first.attention > first.mlp:
        return None, first
    if last.attention <= last.mlp:
        return last, None
    while last.size - first.size > 1:
        middle = shares((first.size + last.size) // 2)
        if middle.attention > middle.mlp:
            last = middle
        else:
            first = middle
    return first, last


# -- rates -----------------------------------------------------------------------------------------

_FARTHEST = 2.0**40
"""By how much a rate is changed at most."""
_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class NeededRate(Plain):
    """One rate of a chip, and the value at which computing becomes the limiter of a step.

    fact: "memory_bandwidth", "flops" (all peaks together) or "link".  now, needed: byte/s, for
    flops FLOP/s of `engine`; needed is None where no value of it alone does, and `why` says so.
    step: seconds there.  by_totals: the value at which the totals of the step take equally long, as
    on a roofline of the step.
    """

    fact: str
    engine: str  # of the peak that is shown: "bf16 matrix"; "" of others
    now: float
    needed: float | None
    step: float | None
    by_totals: float | None
    why: str = ""

    KEYS = "fact engine now needed factor step by_totals why"

    @property
    def factor(self) -> float | None:
        """The needed value over today's."""
        return None if self.needed is None else self.needed / self.now


@dataclass(frozen=True, eq=False, kw_only=True)
class RatesAnswer(Plain, Shown):
    """The limiter of a step on a chip, and the rates at which computing would be."""

    title: str
    chip: str
    sizes: dict[str, int]
    limiter: str
    share: float  # of the time of the step
    seconds: dict[str, float]  # by regime; they add up to the step
    step: float
    intensity: float | None  # FLOP per byte through HBM, of the step; None without bytes
    ridge: float
    rates: tuple[NeededRate, ...]
    rests: tuple[str, ...]

    KEYS = "title chip **sizes limiter share seconds step intensity ridge rates rests_on=rests"

    def __repr__(self) -> str:
        return short(self, f"{self.title} on {self.chip}: limited by {self.limiter}")


def needed_rates(
    case: SweepCase, sizes: dict[str, int], chip: Chip, title: str, rests: tuple[str, ...]
) -> RatesAnswer:
    """The answer at one place.  Raises MissingPeakError where the chip cannot run it."""
    for size in sizes.values():
        if size < 1:
            raise RequestError(f"size {size}: expected at least 1")
    here = {name: sizes[name] for name in case.form.names}
    study = Study.of_form(case.form, here, chip, case.conditions)
    step = study.step
    limiter = step.times.regime
    return RatesAnswer(
        title=title, chip=chip.name, sizes=dict(sizes), limiter=limiter,
        share=step.times.regime_seconds[limiter] / step.t_est if step.t_est else 0.0,
        seconds=dict(step.times.regime_seconds), step=step.t_est,
        intensity=step.flops / step.bytes_hbm if step.bytes_hbm else None,
        ridge=step.peak / chip.memory_bandwidth.value,
        rates=tuple(_rates(study)), rests=rests,
    )  # fmt: skip


def _rates(study: Study) -> Iterator[NeededRate]:
    step, chip = study.step, study.step.chip
    compute, hbm, net = step.times.t_comp, step.times.t_hbm, step.times.t_net
    bandwidth = chip.memory_bandwidth.value
    yield _needed(
        study, "memory_bandwidth", "", bandwidth, rising=True,
        by_totals=bandwidth * hbm / compute if compute else None,
    )  # fmt: skip
    yield _needed(
        study, "flops", step.peak_precision, step.peak, rising=False,
        by_totals=step.peak * compute / max(hbm, net) if max(hbm, net) else None,
    )  # fmt: skip
    links = [link.bandwidth.value for link in chip.links]
    if not links:
        return
    if not net:
        yield NeededRate(
            fact="link", engine="", now=max(links), needed=None, step=None, by_totals=None,
            why="nothing of this step goes over a link: none limits it",
        )  # fmt: skip
        return
    yield _needed(
        study, "link", "", max(links), rising=True,
        by_totals=max(links) * net / compute if compute else None,
    )  # fmt: skip


def _needed(
    study: Study, fact: str, engine: str, now: float, *, rising: bool, by_totals: float | None
) -> NeededRate:
    """The factor on one rate at which computing takes over, by halving the span of its exponent."""
    facts = {n: f.value for n, f in study.numbers.facts.items() if n.startswith(_NAMES[fact])}
    rates = {n: value for n, value in facts.items() if not n.endswith(".latency")}

    def times(factor: float) -> StepTimes:
        changed = {name: value * factor for name, value in rates.items()}
        return time_plan(*study.planned(Variant(numbers=changed))).step

    same: dict[str, Any] = {"fact": fact, "engine": engine, "now": now, "by_totals": by_totals}
    good, bad = (_FARTHEST, 1 / _FARTHEST) if rising else (1 / _FARTHEST, _FARTHEST)
    left = times(good).regime
    if left != "compute":
        why = f"no value of it alone: {left} limits then"
        return NeededRate(**same, needed=None, step=None, why=why)
    if times(bad).regime == "compute":
        return NeededRate(**same, needed=None, step=None, why="any value of it: computing limits")
    for _ in range(_STEPS):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if times(middle).regime == "compute" else (good, middle)
    return NeededRate(**same, needed=now * good, step=times(good).t_est)


_NAMES: Mapping[str, tuple[str, ...]] = {
    "memory_bandwidth": ("chip.memory_bandwidth",),
    "flops": ("chip.matrix.", "chip.vector."),
    "link": ("chip.link.",),
}
"""The beginnings of the numbers of a chip that one rate of an answer stands for."""
