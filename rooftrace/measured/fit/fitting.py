"""From measured times to knobs: a robust fit that reports what it cannot identify.

Every number is fitted as a factor (its logarithm is free), around a prior that says how far such a
factor usually is from where the fit starts: few measurements move it little, many as far as they
say.  A number that they tell little about is reported as not identified, and keeps its start, which
is what is typical of such chips.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.intervals.residuals import FITTED
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.measured.fit.cases import CalibrationError, Case, Errors, Stack, errors
from rooftrace.measured.fit.freeknobs import TABLES, UNKNOWN, Space
from rooftrace.measured.fit.leftout import (
    by_class,
    left_out,
    use_of,
    with_interval,
    with_usual_interval,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

_FEWEST_KERNELS = 5
FEW = ("compute", "memory")
"""The knobs that times of whole steps usually identify."""


@dataclass(frozen=True)
class FittedNumber:
    """A number that a fit may change."""

    name: str  # of the knob, as `free` takes it
    start: float  # where the fit began
    value: float  # where it ended; the start, where not identified
    error: float  # relative standard error
    identified: bool  # whether the measurements tell it


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted knobs and how far to trust them."""

    knobs: Knobs
    parameters: tuple[FittedNumber, ...]
    errors: Errors  # on the cases that were fitted
    left_out: Errors | None  # on groups that a fit had not seen; None with too few groups
    # Of pairs of kept numbers, beyond 0.8.
    correlations: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # Left-out errors of the cases in which a class of kernels takes most of the time.
    by_class: Mapping[str, Errors] = field(default_factory=dict)
    outside: tuple[float, ...] = ()  # s: each case as a fit without its group predicts it

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Knobs that these measurements cannot identify; they keep their starting values."""
        return tuple(p.name for p in self.parameters if not p.identified)


def fit(
    cases: Sequence[Case],
    start: Knobs,
    free: Sequence[str] = FEW,
    title: str = "",
    check: bool = True,
    kernels: Sequence[Case] = (),
) -> Fit:
    """Knobs that make predictions of `cases` right, beginning at `start`.

    free: names of what may change (see `STEP`).  check: also fit without each fifth of the groups,
    and report the errors there.  kernels: cases of single kernels; the shares of their classes, and
    the numbers of tiles, are fitted to them first (without those of the groups that are left out).
    Raises CalibrationError for fewer cases than free knobs, for several chips, and for a name that
    is no knob.
    """
    names = list(dict.fromkeys(free))
    if len(cases) < max(1, len(names)):
        raise CalibrationError(
            f"{len(cases)} measurements for {len(names)} knobs ({', '.join(names)}): expected at "
            "least as many measurements as knobs; measure more, or free fewer"
        )
    check_one_chip((*cases, *kernels))
    return fitted(cases, Starts(kernels, start), names, title, check)


def check_one_chip(cases: Sequence[Case]) -> None:
    chips = sorted({case.table.chip.name for case in cases})
    if len(chips) > 1:
        raise CalibrationError(
            f"measurements of several chips ({', '.join(chips)}): fit one at a time"
        )


def fitted(
    cases: Sequence[Case], shares: Starts, names: Sequence[str], title: str, check: bool = True
) -> Fit:
    """The fit of `cases`, begun at the shares that single kernels have; `names` may be none."""
    start, of_kernels = shares.without(())
    stack = Stack(cases, start)
    knobs, parameters, covariance = _solved(Space(start, names, cases[0].table.chip), stack)
    kept = [parameter.name for parameter in parameters if parameter.identified]
    predicted = stack.predict(knobs).tolist()
    labels, measured = [case.name for case in cases], [case.seconds for case in cases]
    outside = left_out(cases, shares.begin, kept) if check else None
    use = FITTED if of_kernels else use_of(kept)
    if outside is None:
        knobs = with_usual_interval(knobs, use, cases, len(kept))
    else:
        knobs = with_interval(knobs, use, cases, outside, start)
    return Fit(
        knobs=replace(knobs, title=title or start.title),
        parameters=(*parameters, *of_kernels),
        errors=errors(labels, predicted, measured),
        left_out=errors(labels, outside, measured) if outside is not None else None,
        correlations=_correlations(kept, covariance),
        by_class=by_class(cases, knobs, predicted if outside is None else outside),
        outside=tuple(outside or ()),
    )


class Starts:
    """Starts fitted to single kernels: to all, or without some groups; each is fitted once."""

    def __init__(self, kernels: Sequence[Case], start: Knobs) -> None:
        self.kernels, self.start = kernels, start
        self._known: dict[frozenset[str], tuple[Knobs, tuple[FittedNumber, ...]]] = {}

    def without(self, groups: Iterable[str]) -> tuple[Knobs, tuple[FittedNumber, ...]]:
        """Knobs, and which of their numbers were fitted."""
        key = frozenset(groups)
        if key not in self._known:
            seen = [case for case in self.kernels if case.group not in key]
            self._known[key] = _kernels_first(seen, self.start)
        return self._known[key]

    def begin(self, groups: Iterable[str]) -> Knobs:
        """Where a fit without these groups begins."""
        return self.without(groups)[0]


def _kernels_first(kernels: Sequence[Case], start: Knobs) -> tuple[Knobs, tuple[FittedNumber, ...]]:
    """Starts of the classes of which enough single kernels were measured, and what tiles take."""
    if not kernels:
        return start, ()
    counts = Counter(CLASSES[kind] for case in kernels for kind in set(case.table.kind.tolist()))
    names = [
        f"{kind}.{number}"
        for kind, count in sorted(counts.items())
        if count >= _FEWEST_KERNELS
        for number in ("compute", "memory")
    ]
    table = kernels[0].table
    if table.has_tiles and {"mm", "bmm"} & counts.keys():
        names += [f"tiling.{number}" for number in TABLES["tiling"]]
    if table.has_attention_blocks and "attention" in counts:
        names += [f"attention.{number}" for number in TABLES["attention"]]
    space = Space(start, names, table.chip, alone=True)
    knobs, parameters, _ = _solved(space, Stack(kernels, start))
    return knobs, tuple(parameter for parameter in parameters if parameter.identified)


def _solved(space: Space, stack: Stack) -> tuple[Knobs, tuple[FittedNumber, ...], Array]:
    """Fit, put numbers that were not identified back to their starts, and fit the others again.

    The covariance is that of the identified numbers.
    """
    _, deviations, _ = space.solve(stack)
    known = [d <= UNKNOWN * p for d, p in zip(deviations, space.priors, strict=True)]
    kept = [name for name, ok in zip(space.names, known, strict=True) if ok]
    final = Space(space.start, kept, space.chip, space.alone)
    vector, errors_kept, covariance = final.solve(stack)
    at = dict(zip(kept, zip(vector, errors_kept, strict=True), strict=True))
    parameters = tuple(
        FittedNumber(name, start, start * math.exp(at[name][0]), float(at[name][1]), True)
        if name in at
        else FittedNumber(name, start, start, float(deviation), False)
        for name, start, deviation in zip(space.names, space.starts, deviations, strict=True)
    )
    return final.knobs(vector), parameters, covariance


def _correlations(names: Sequence[str], covariance: Array) -> dict[tuple[str, str], float]:
    correlations = {}
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            size = math.sqrt(covariance[i, i] * covariance[j, j])
            value = float(covariance[i, j] / size) if size else 0.0
            if abs(value) > 0.8:
                correlations[first, names[j]] = value
    return correlations
