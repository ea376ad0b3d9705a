"""Records of locked costs: totals and modules of each target, phase, chip and execution.

Their fields are the keys of the file.  Counts are whole numbers; seconds are decimal text with a
unit ("738.1235 us"), as many digits as every machine agrees on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from decimal import ROUND_HALF_EVEN, Decimal
from typing import NamedTuple

from rooftrace.hardware import units
from rooftrace.reporting.requests.kept import Kept

FORMAT = "rooftrace.lock/1"
DEPTH = 3
"""Names of modules down to which costs are locked, numbers of layers not counted."""
ROOT = "(root)"
"""The module itself, among its modules."""
WAITING = "(waiting for the host)"
"""Seconds of the step that are no kernel's."""
BY_MODULE = ("time", "flops", "bytes", "kernels")
"""Metrics that are also known by module; their sums over modules are the totals."""
DIGITS = 7
"""Digits of a time.  Sums of floats differ in the 16th digit between processors and releases of
numpy, so that one time in a hundred million may be rounded the other way; a change of the model
that is smaller moves no budget."""

_SCALES = (("s", 0), ("ms", -3), ("us", -6), ("ns", -9))


class LockError(ValueError):
    """A lock that cannot be read, or does not fit what is asked of it."""


@dataclass(frozen=True, slots=True)
class _Locked:
    """Costs that are locked: a time as text, and whole numbers."""

    time: str

    def __post_init__(self) -> None:
        """Raise LockError for a number that no cost can have."""
        units.parse(self.time, "second")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and value < 0:
                raise LockError(f"{item.name}={value}: expected a whole number of at least 0")

    def value(self, metric: str) -> float:
        """A metric, in SI units."""
        value: float = getattr(self, metric)
        return units.parse(self.time, "second") if metric == "time" else value


@dataclass(frozen=True, slots=True)
class LockedModule(_Locked):
    """The costs of a module, or of all modules whose paths differ only in numbers: BY_MODULE."""

    flops: int = 0
    bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedCosts(_Locked):
    """The totals of a step on a chip under an execution model, and its modules."""

    flops: int
    bytes: int  # through HBM
    memory: int  # at the peak
    params: int
    kernels: int
    modules: Mapping[str, LockedModule] = field(default_factory=dict)  # by starred path


Ops = dict[str, dict[str, int]]
"""How many of which ops run in each module, by starred path: {"h.*.mlp": {"mm bf16": 24}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPhase:
    """A phase of a target: its ops, and its costs by chip and execution model."""

    ops: Ops = field(default_factory=dict)
    costs: dict[str, dict[str, LockedCosts]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTarget:
    """What a target was asked at, the digests of its source files, and its phases."""

    asked: dict[str, Kept]  # `target`, and values of ASKED
    sources: dict[str, str] = field(default_factory=dict)  # by path, relative to the lock
    phases: dict[str, LockedPhase] = field(default_factory=dict)

    @property
    def executions(self) -> tuple[str, ...]:
        """The executions that it is priced as."""
        by_chip = (costs for step in self.phases.values() for costs in step.costs.values())
        return tuple(dict.fromkeys(name for costs in by_chip for name in costs))


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFrom:
    """What a lock was made from: versions, and digests of facts."""

    rooftrace: str
    torch: str
    libraries: dict[str, str] = field(default_factory=dict)  # versions of those with models
    depth: int = DEPTH
    chips: dict[str, str] = field(default_factory=dict)  # digests of their numbers
    constants: dict[str, str] = field(default_factory=dict)  # digests of knobs, by their title
    rules: dict[str, str] = field(default_factory=dict)  # digests of the files of `pricing`
    pricing: dict[str, Kept] = field(default_factory=dict)  # how every target is priced


class StepKey(NamedTuple):
    """Where costs belong."""

    target: str
    phase: str
    chip: str
    execution: str

    def __str__(self) -> str:
        return f"{self.target}, {self.phase} on {self.chip}, {self.execution}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The costs of targets, and what they were made from."""

    made_from: MadeFrom
    targets: dict[str, LockedTarget] = field(default_factory=dict)
    format: str = FORMAT

    def places(self) -> dict[StepKey, LockedCosts]:
        """All costs, by where they belong."""
        return {
            StepKey(target, phase, chip, execution): costs
            for target, locked in self.targets.items()
            for phase, step in locked.phases.items()
            for chip, by_execution in step.costs.items()
            for execution, costs in by_execution.items()
        }


# -- seconds as decimals ---------------------------------------------------------------------------


class TimeScale:
    """Writes the times of one step in one unit, to the same decimal."""

    def __init__(self, total: float) -> None:
        exact = Decimal(total)
        self.unit, self.power = next(
            (scale for scale in _SCALES if exact >= Decimal(10) ** scale[1]), _SCALES[-1]
        )
        first = exact.adjusted() if exact else -9
        self.step = Decimal(10) ** (first - DIGITS + 1)

    def rounded(self, seconds: float) -> Decimal:
        """Seconds, rounded to DIGITS digits of the total."""
        return Decimal(seconds).quantize(self.step, ROUND_HALF_EVEN)

    def written(self, seconds: Decimal) -> str:
        """Rounded seconds as text: "738.1235 us"."""
        number = seconds.scaleb(-self.power)
        return f"{number:f} {self.unit}"
