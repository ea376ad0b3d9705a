"""All candidates of a question in arrays: each size, number of chips and condition."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rooftrace.costmodels.answers.deployments import Deployment, together
from rooftrace.costmodels.answers.workloads import Limits, Mix
from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.planforms import Conditions, Points
from rooftrace.costmodels.pricing import price_ops, with_families
from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.rewriting import reprice
from rooftrace.costmodels.sweeping import Form, SweepCase, evaluated
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.precisions import bytes_per_element
from rooftrace.tracer.graph import Op, OpGraph

# -- splitting -------------------------------------------------------------------------------------
# What several chips send to each other when the products of a step are split over them.


NODE = 8
"""Chips that the link inside a node joins; more of them also use the one between nodes."""
_MIXERS = ("attention",)
_CHANNELS = ("dense", "moe")


@dataclass(frozen=True)
class Exchange:
    """All-reduces of a step: so many, of so many bytes each on every chip."""

    times: int
    size: int

    def seconds(self, chip: Chip, count: int) -> float:
        """Seconds for `count` chips: 2 (n - 1) / n of the bytes and 2 log2(n) messages.

        A ring moves that many bytes over each link, and a tree needs that many messages one after
        the other; collective libraries choose by size, and nothing is faster than both (Thakur,
        Rabenseifner and Gropp, 2005).  inf where the chip has no link.
        """
        if count == 1:
            return 0.0
        link = chip.link("intra" if count <= NODE else "inter")
        if link is None:
            return math.inf
        messages = 2 * math.ceil(math.log2(count))
        latency = link.latency.value if link.latency is not None else 0.0
        moved = 2 * (count - 1) / count * self.size / link.bandwidth.value
        return self.times * (moved + messages * latency)


def exchanges(graph: OpGraph, conditions: Conditions) -> tuple[Exchange, ...]:
    """The all-reduces of a step whose products are split over chips, as in Megatron-LM.

    One after each attention and one after each MLP or mixture of experts, of what its first product
    reads: the residual stream.  Empty for steps without such blocks, and for those with a backward
    pass: how they split is not known here.
    """
    priced = reprice(graph, conditions.dtype, conditions.weights_dtype, conditions.kv_dtype)
    costs, _ = price_ops(priced)
    classified = with_families(priced, costs)
    firsts = list(_firsts(classified, costs))
    if not firsts or any(op.part != "forward" for op in graph.ops):
        return ()
    width = min(bytes_per_element(classified.values[value].dtype) for _, value in firsts)
    sizes: dict[int, int] = {}
    for op, value in firsts:
        size = int(classified.values[value].elements * width)
        sizes[size] = sizes.get(size, 0) + _times(classified, op)
    return tuple(Exchange(times, size) for size, times in sizes.items())


def _firsts(graph: OpGraph, costs: Sequence[Cost]) -> Iterator[tuple[Op, int]]:
    """The first product with weights of each block, and the activation that it reads."""
    before: tuple[str, tuple[int, ...]] | None = None
    for op in graph.ops:
        block = _block(op, costs[op.id])
        if not block:
            continue
        activation = _activation(graph, op)
        if activation is None:
            continue
        if (block, op.repeats) != before:
            yield op, activation
        before = block, op.repeats


def _block(op: Op, cost: Cost) -> str:
    """The kind of block that a product is in; empty for other ops."""
    if op.kind != "kernel":
        return ""
    rule = find_rule(op.target)
    if rule is None or rule.kind_of(cost) != "mm":
        return ""
    if op.family in _MIXERS:
        return "attention"
    return "mlp" if op.family in _CHANNELS else ""


def _activation(graph: OpGraph, op: Op) -> int | None:
    """What a product of an activation and weights reads besides the weights."""
    values = graph.values
    roles = [values[values[value].storage].role for value in op.inputs]
    if "weights" not in roles:
        return None
    others = [v for v, role in zip(op.inputs, roles, strict=True) if role != "weights"]
    return others[0] if others else None


def _times(graph: OpGraph, op: Op) -> int:
    return math.prod(graph.repeats[repeat].count for repeat in op.repeats)


# -- candidates ------------------------------------------------------------------------------------


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Service:
    """How requests are served.

    mix: what comes; None: single steps.  apart: whether prefills run on chips of their own.
    kept_free: share of the memory that must stay free.
    """

    mix: Mix | None = None
    apart: bool = False
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
    sent: Array  # seconds of the step in which the chips send to each other
    tpot: Array
    ttft: Array  # nan without requests
    memory: Array
    rate: Array
    regime: Array
    kept_free: float

    @property
    def capacity(self) -> float:
        """Bytes that the chips may use."""
        return float(self.chip.room(self.kept_free) * self.chips)

    def over(self, limits: Limits, steps: Array | None = None) -> dict[str, Array]:
        """What each candidate takes of each limit: at most 1 where it holds; memory too.

        steps: seconds of a step in place of the expected ones; the rest follows.
        """
        more = 0.0 if steps is None else steps - self.step
        taken = {name: (getattr(self, name) + more) / value for name, value in limits}
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
            sent=float(self.sent[place]),
            tpot=float(self.tpot[place]),
            ttft=known(self.ttft),
            memory=int(self.memory[place]),
            capacity=self.capacity,
            rate=float(self.rate[place]),
            limiter=self._limiter(place),
            price=None if price is None else price.value,
            power=None if power is None else power.value,
        )

    def _limiter(self, place: int) -> str:
        if 2 * self.sent[place] > self.step[place]:
            return "network"
        return REGIMES[int(self.regime[place])]

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
    _missing: dict[tuple[int, str], str] = field(default_factory=dict)
    _sent: dict[tuple[int, ...], tuple[Exchange, ...]] = field(default_factory=dict)

    def lines(self, sizes: Sequence[int], counts: Mapping[str, Sequence[int]]) -> Iterator[Line]:
        """A line for each case, chip and number of it.  counts: of chips, by the chip's name."""
        for place in range(len(self.cases)):
            pairs = [
                (chip, n)
                for chip in self.chips
                for n in counts.get(chip.name, ())
                if not self.missing(place, chip) and (n == 1 or self.splits(place))
            ]
            if pairs:
                yield from self._lines(place, np.asarray(sizes, dtype=np.int64), pairs)

    def again(self, line: Line, sizes: Sequence[int]) -> Line:
        """A line at other sizes, all else equal."""
        place = self.cases.index(line.case)
        pairs = [(line.chip, line.chips)]
        return next(self._lines(place, np.asarray(sizes, dtype=np.int64), pairs))

    def splits(self, place: int) -> bool:
        """Whether it is known how the products of a case are split over several chips."""
        return bool(self._exchanges(self.cases[place], self._lowest(place)))

    def _lowest(self, place: int) -> dict[str, int]:
        form = self.cases[place].form
        lows = [min(regime.low[i] for regime in form.regimes) for i in range(len(form.names))]
        return dict(zip(form.names, lows, strict=True)) | {
            name: size for name, size in self.at.items() if name in form.names
        }

    def _exchanges(self, case: SweepCase, sizes: Mapping[str, int]) -> tuple[Exchange, ...]:
        """The all-reduces of a step at one place, counted once."""
        key = (id(case), *sizes.values())
        if key not in self._sent:
            self._sent[key] = exchanges(case.form.graph(**sizes), case.conditions)
        return self._sent[key]

    def _sending(self, case: SweepCase, own: Mapping[str, Array], chip: Chip, count: int) -> Array:
        """Seconds of the all-reduces at sizes: of the ends, and on the line between them.

        Bytes are proportional to tokens, and tokens to the size that is open.
        """
        length = len(next(iter(own.values())))
        if count == 1:
            return np.zeros(length)
        names = case.form.names
        ends = [{n: int(own[n][place]) for n in names} for place in (0, -1)]
        first, last = (
            sum(e.seconds(chip, count) for e in self._exchanges(case, sizes)) for sizes in ends
        )
        along = next((own[n] for n in names if own[n][0] != own[n][-1]), None)
        if along is None:
            return np.full(length, first)
        share = (along - along[0]) / (along[-1] - along[0])
        seconds: Array = first + share * (last - first)
        return seconds

    def missing(self, place: int, chip: Chip) -> str:
        """Why a case cannot run on a chip; empty where it can."""
        if (place, chip.name) not in self._missing:
            self._missing[place, chip.name] = self._trouble(self.cases[place], chip)
        return self._missing[place, chip.name]

    def _trouble(self, case: SweepCase, chip: Chip) -> str:
        low = self._lowest(self.cases.index(case))
        try:
            evaluated(case.form, _points(case.form, low), [chip], case.conditions)
        except MissingPeakError as error:
            return str(error)
        return ""

    def _lines(self, place: int, sizes: Array, pairs: Sequence[tuple[Chip, int]]) -> Iterator[Line]:
        case = self.cases[place]
        own = {n: np.full(len(sizes), v) for n, v in self.at.items()} | {self.name: sizes}
        points = Points({n: own[n] for n in case.form.names})
        chips = [together(chip, n) for chip, n in pairs]
        table = evaluated(case.form, points, chips, case.conditions)
        mix, count = self.service.mix, len(sizes)
        prefills = self._prefills(place, pairs)
        for number, (chip, n) in enumerate(pairs):
            part = {k: column[number * count : (number + 1) * count] for k, column in table.items()}
            sent = self._sending(case, own, chip, n)
            step = part["t_est"] + sent
            memory = np.asarray(part["peak_memory"], dtype=float)
            if mix is None:
                tpot, rate, ttft = step, part["items"] / step, np.full(count, np.nan)
            else:
                seconds, peaks = (column[number] for column in prefills)
                batch = part["items"].astype(float)
                prefill = mix.mean(seconds) / mix.outputs  # seconds for each output token
                rate = 1 / (step / batch + prefill)
                tpot = step if self.service.apart else batch / rate
                longest = float(np.max(seconds))
                ttft = np.full(count, longest) + (0.0 if self.service.apart else step)
                if not self.service.apart:
                    memory = np.maximum(memory, float(np.max(peaks)) + part["kv_memory"])
            yield Line(
                case=case, chip=chip, chips=n, name=self.name, at=self.at, sizes=sizes,
                step=step, low=part["t_low"] + sent, high=part["t_high"] + sent, sent=sent,
                tpot=tpot, ttft=ttft, memory=memory, rate=rate, regime=part["regime"],
                kept_free=self.service.kept_free,
            )  # fmt: skip

    def _prefills(self, place: int, pairs: Sequence[tuple[Chip, int]]) -> tuple[Array, Array]:
        """Seconds and peaks of memory of the prefill of each kind: arrays [chips, kinds]."""
        mix, prefill = self.service.mix, self.prefills[place]
        if mix is None or prefill is None:
            return np.zeros((len(pairs), 0)), np.zeros((len(pairs), 0))
        prompts = np.array([kind.prompt for kind in mix.kinds], dtype=np.int64)
        points = Points({name: prompts if name == "seq" else np.ones_like(prompts)
                         for name in prefill.form.names})  # fmt: skip
        chips = [together(chip, n) for chip, n in pairs]
        table = evaluated(prefill.form, points, chips, prefill.conditions)
        shape = (len(pairs), len(prompts))
        sent = [
            [float(self._sending(prefill, {"seq": prompts[i : i + 1]}, chip, n)[0])
             for i in range(len(prompts))]
            for chip, n in pairs
        ]  # fmt: skip
        return (
            table["t_est"].reshape(shape) + np.array(sent),
            np.asarray(table["peak_memory"], dtype=float).reshape(shape),
        )


def _points(form: Form, sizes: Mapping[str, int]) -> Points:
    return Points({name: np.array([sizes[name]], dtype=np.int64) for name in form.names})
