"""One side of a comparison: a measured step as its calls and kernels, whatever measured it.

Every number is kept for each step that was measured, so that its spread is known.  Sums over the
calls are the totals of the side, exactly.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernel:
    """One kernel, copy or fill of a call; on a host the call itself."""

    name: str
    kind: str  # kernel, memcpy, memset; op: a call on the host
    count: float  # launches in a step
    seconds: tuple[float, ...]  # s of all of them, in each measured step


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCall:
    """One call of an op in a step, as the code of the model makes it, and its kernels."""

    name: str  # "aten::linear"; "" for kernels that no op launched
    sizes: str = ""  # of its tensors, with their types; "" where they were not recorded
    module: str = ""  # path of the module; "" where it is not known
    pattern: str = ""  # that path with the numbers of repeated blocks starred
    part: str = ""  # "backward", or "" for all others
    family: str = "other"
    kernels: tuple[MeasuredKernel, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its kernels."""
        return tuple(kernel.name for kernel in self.kernels)


@dataclass(frozen=True, kw_only=True)
class MeasuredSide:
    """One measured step of one run."""

    device: str  # its name; "" where it is not known
    on_device: bool  # whether seconds are those of kernels; else of calls on the host
    figures: Mapping[str, tuple[float, ...]]  # by name in METRICS, for each measured step
    middle: str  # how a figure stands for all steps: mean or median
    calls: tuple[MeasuredCall, ...]  # in order
    in_order: bool = True  # whether the order of `calls` is that of the step
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many steps were measured."""
        return len(self.figures["time"])

    @property
    def timed(self) -> int:
        """In how many steps its kernels were timed; a run times them once, apart from its steps."""
        return self.steps if self.middle == "mean" else 1


def equal_as_one(side: MeasuredSide) -> MeasuredSide:
    """A side in which equal calls of several layers are one, as a run has them.

    Then a layer that stands once for all of its kind, on one side only, has its counterpart.
    """
    alike: dict[object, list[MeasuredCall]] = {}
    for call in side.calls:
        names = tuple((kernel.name, kernel.kind) for kernel in call.kernels)
        alike.setdefault((call.name, call.sizes, call.pattern, call.part, names), []).append(call)
    return replace(side, calls=tuple(map(_together, alike.values())))


def _together(calls: Sequence[MeasuredCall]) -> MeasuredCall:
    kernels = tuple(
        replace(
            equal[0],
            count=sum(kernel.count for kernel in equal),
            seconds=tuple(map(sum, zip(*(kernel.seconds for kernel in equal), strict=True))),
        )
        for equal in zip(*(call.kernels for call in calls), strict=True)
    )
    return replace(calls[0], module=calls[0].pattern, kernels=kernels)


def middle_of(values: Sequence[float], how: str) -> float:
    """The mean or the median of a figure over the measured steps."""
    return statistics.median(values) if how == "median" else statistics.fmean(values)
