"""How much a quantity may grow: "time>5%", "memory>1 GiB"; a limit is read here alone."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rooftrace.errors import RequestError, hint
from rooftrace.hardware.units import UnitError, parse
from rooftrace.tracer.changes.change import Change
from rooftrace.tracer.changes.metrics import Metric, Metrics

_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*(.+?)\s*")
_AMOUNT = re.compile(r"([0-9.,_eE+-]+)\s*(.*)")
_SCALES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "B": 1e9,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
}


class FailOnError(RequestError):
    """A --fail-on condition that cannot be read, or whose metric is not there."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a metric may grow, or the most that it may be."""

    text: str  # as the user wrote it
    most: float  # SI units, or a fraction
    relative: bool = False  # of what was before
    ceiling: bool = False  # the most that it may be, whatever it was before
    metric: str = ""

    @classmethod
    def parse(cls, text: str, metrics: Metrics, of: str = "", example: str = "") -> Limit:
        """The limit of "time>5%"; an absolute one takes a unit ("memory>1 GiB").

        metrics: those that may be named.  of, example: what is compared and another limit, for the
        message of the FailOnError that is raised for a text that cannot be read.
        """
        match = _CONDITION.fullmatch(text)
        if match is None or match[1] not in metrics:
            name = text.partition(">")[0].strip()
            close = hint(name, tuple(metrics)) if name not in metrics else ""
            also = f' or "{example}"' if example else ""
            raise FailOnError(
                f"--fail-on {text!r}: {f'of {of} ' if of else ''}expected METRIC>LIMIT with METRIC "
                f'one of {", ".join(metrics)}, for example "{next(iter(metrics))}>5%"{also}'
                f"{close}"
            )
        try:
            most, relative = amount_of(match[2], metrics[match[1]])
        except ValueError as error:
            raise FailOnError(f"--fail-on {text!r}: {error}") from None
        return cls(text, most, relative, metric=match[1])

    def growth(self, change: Change) -> float:
        """What is held to the limit: a difference, or a share of what was before."""
        if self.ceiling:
            return change.after
        if self.relative:
            return math.inf if change.relative is None else change.relative
        return change.delta

    def passed(self, change: Change) -> bool:
        """Whether a change is over the limit."""
        return self.growth(change) > self.most

    def sentence(self, change: Change, metrics: Metrics, where: str = "") -> str:
        """ "decode: time grew by +6.10%, more than 'time>5%' allows"."""
        growth, noise = self.growth(change), " (within the noise of its steps)"
        written = metrics[self.metric].write
        sign = "+" if growth > 0 else ""
        amount = f"{growth:+.2%}" if self.relative else f"{sign}{written(growth)}"
        return (
            f"{where}{self.metric} grew by {amount}, more than {self.text!r} allows"
            f"{noise if change.within_noise else ''}"
        )


def amount_of(text: str, metric: Metric) -> tuple[float, bool]:
    """A quantity in SI units, or a share of what was before, and which of the two it is.

    Raises ValueError for another text.
    """
    if text == "0":  # of any unit
        return 0.0, False
    match = _AMOUNT.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if unit == "%" and (metric.relative or metric.unit == "share"):
        return float(number) / 100, metric.relative
    if metric.unit not in ("count", "share"):
        return parse(text, metric.unit), False
    scale = unit.removesuffix(metric.symbol).strip()
    if not number or scale not in _SCALES or (scale and metric.unit == "share"):
        raise UnitError(f'"{text:.100}": expected a number without a unit')
    return float(number.replace(",", "")) * _SCALES[scale], False


class Limited:
    """A result of two sides, whose changes may be held to limits.

    METRICS: what a limit may be of.  COMPARED, EXAMPLE: what is compared and another limit, for the
    message of a limit that cannot be read.
    """

    __slots__ = ()
    METRICS: ClassVar[Metrics]
    COMPARED: ClassVar[str] = ""
    EXAMPLE: ClassVar[str] = ""

    def places(self) -> Sequence[tuple[str, Mapping[str, Change]]]:
        """The places that are held to limits: how a sentence on each begins, and what changed there
        by metric."""
        raise NotImplementedError

    @classmethod
    def limits(cls, conditions: Iterable[str]) -> list[Limit]:
        """The limits that conditions say.  Raises FailOnError."""
        return [Limit.parse(text, cls.METRICS, cls.COMPARED, cls.EXAMPLE) for text in conditions]

    def violations(self, conditions: Iterable[str]) -> list[str]:
        """A sentence for each condition ("time>5%", "memory>1 GiB") and each place that breaks it.

        Raises FailOnError for a condition that cannot be read, and for a metric that no place has.
        """
        places, sentences = self.places(), []
        there = {name for _, changes in places for name in changes}
        for limit in self.limits(conditions):
            if limit.metric not in there:
                raise FailOnError(
                    f"--fail-on {limit.text!r}: {limit.metric} was not measured in both; there are "
                    f"{', '.join(name for name in self.METRICS if name in there)}"
                )
            for where, changes in places:
                change = changes.get(limit.metric)
                if change is not None and limit.passed(change):
                    sentences.append(limit.sentence(change, self.METRICS, where))
        return sentences
