"""From measured times to knobs: a robust fit that reports what it cannot identify.

Every number is fitted as a factor (its logarithm is free), around a prior that says how far such a
factor usually is from where the fit starts.  A number that the measurements tell little about stays
near its start; it is reported as not identified and put back to its start.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.measured.fit.cases import CalibrationError, Case, Errors, Stack, errors, predict
from rooftrace.measured.fit.freeknobs import ATTENTION, TILING, UNKNOWN, Space

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

FOLDS = 5
_FEWEST_GROUPS = 3
_FEWEST_KERNELS = 5
FEW = ("compute", "memory")
"""The knobs that times of whole steps usually identify."""
_GAIN = 0.1
"""The least gain that counts: the left-out groups are few, so a smaller gain may be chance."""


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
    if len(cases) < max(2, len(names)):
        raise CalibrationError(
            f"{len(cases)} measurements for {len(names)} knobs ({', '.join(names)}): expected at "
            "least as many measurements as knobs; measure more, or free fewer"
        )
    _check_one_chip((*cases, *kernels))
    return _fitted(cases, _Shares(kernels, start), names, title, check)


def _check_one_chip(cases: Sequence[Case]) -> None:
    chips = sorted({case.table.chip.name for case in cases})
    if len(chips) > 1:
        raise CalibrationError(
            f"measurements of several chips ({', '.join(chips)}): fit one at a time"
        )


def _fitted(
    cases: Sequence[Case], shares: _Shares, names: Sequence[str], title: str, check: bool = True
) -> Fit:
    """The fit of `cases`, begun at the shares that single kernels have."""
    start, of_kernels = shares.without(())
    stack = Stack(cases, start)
    knobs, parameters, covariance = _solved(Space(start, names, cases[0].table.chip), stack)
    kept = [parameter.name for parameter in parameters if parameter.identified]
    predicted = stack.predict(knobs)
    labels, measured = [case.name for case in cases], [case.seconds for case in cases]
    fitted = errors(labels, predicted.tolist(), measured)
    outside = _left_out(cases, shares, kept) if check else None
    shown = outside if outside is not None else predicted.tolist()
    spread = _spread(shown, measured)
    by_class, spreads = _by_class(cases, knobs, shown)
    knobs = replace(knobs.with_shares(spread=spreads), spread=spread, title=title or start.title)
    return Fit(
        knobs=knobs,
        parameters=(*parameters, *of_kernels),
        errors=fitted,
        left_out=errors(labels, outside, measured) if outside is not None else None,
        correlations=_correlations(kept, covariance),
        by_class=by_class,
    )


def choose(
    cases: Sequence[Case], start: Knobs, kernels: Sequence[Case] = (), title: str = ""
) -> tuple[Fit, dict[str, Errors]]:
    """The fit with as many free numbers as the measurements support, and the errors of all tries.

    First two numbers are free, then the overheads too; then both again after the shares of classes
    were fitted to single kernels.  A try with more free numbers is kept if it lowers the mean error
    on left-out groups by the share `_GAIN`.  The errors are by the names of the free numbers.  With
    too few groups to leave some out, two numbers are free and the errors are empty.  Raises
    CalibrationError as `fit` does.
    """
    _check_one_chip((*cases, *kernels))
    best = fit(cases, start, FEW, title)
    if best.left_out is None:
        return best, {}
    tried, mean = {", ".join(FEW): best.left_out}, best.left_out.mean
    # Where the host waits, a launch is a part of the call.
    overheads = ("dispatch",) if cases[0].table.chip.host_waits else ("launch", "dispatch")
    many = (*FEW, *overheads)
    sets = [(many, _Shares((), start))]
    if kernels:
        shares = _Shares(kernels, start)
        sets += [(FEW, shares), (many, shares)]
    for free, shares in sets:
        if len(cases) < len(free) + _FEWEST_GROUPS:
            continue
        attempt = _fitted(cases, shares, free, title)
        if attempt.left_out is None:
            continue
        label, alone = ", ".join(free), len(shares.kernels)
        tried[f"{label}, and shares by {alone} kernels" if alone else label] = attempt.left_out
        if attempt.left_out.mean < (1 - _GAIN) * mean:
            best, mean = attempt, attempt.left_out.mean
    return best, tried


class _Shares:
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


def _kernels_first(kernels: Sequence[Case], start: Knobs) -> tuple[Knobs, tuple[FittedNumber, ...]]:
    """Shares of the classes of which enough single kernels were measured, and what tiles take."""
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
        names += [f"tiling.{number}" for number in TILING]
    if table.has_attention_blocks and "attention" in counts:
        names += [f"attention.{number}" for number in ATTENTION]
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


# -- how far to trust it ---------------------------------------------------------------------------


def _left_out(cases: Sequence[Case], shares: _Shares, free: Sequence[str]) -> list[float] | None:
    """The prediction of each case by a fit without its group; None with too few groups."""
    groups = sorted({case.group or case.name for case in cases})
    if len(groups) < _FEWEST_GROUPS or len(cases) < len(free) + _FEWEST_GROUPS:
        return None
    folds = min(FOLDS, len(groups))
    fold = {group: i % folds for i, group in enumerate(groups)}
    predicted = [0.0] * len(cases)
    for part in range(folds):
        inside = [c for c in cases if fold[c.group or c.name] != part]
        outside = [i for i, c in enumerate(cases) if fold[c.group or c.name] == part]
        begun, _ = shares.without(group for group in groups if fold[group] == part)
        space = Space(begun, free, cases[0].table.chip)
        knobs = space.knobs(space.solve(Stack(inside, begun))[0])
        for i, seconds in zip(outside, predict([cases[i] for i in outside], knobs), strict=True):
            predicted[i] = seconds
    return predicted


def _spread(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Robust standard deviation of the logarithm of predicted over measured, bias included."""
    import numpy as np

    off = np.log(np.array(predicted) / np.array(measured))
    return float(1.4826 * np.median(np.abs(off)))


def _by_class(
    cases: Sequence[Case], knobs: Knobs, predicted: Sequence[float]
) -> tuple[dict[str, Errors], dict[str, float]]:
    """Errors, and spreads, of cases in which one class of kernels takes most of the time."""
    import numpy as np

    members: dict[str, list[int]] = defaultdict(list)
    for i, case in enumerate(cases):
        device = case.table.seconds(knobs, case.layouts).device * case.table.data["count"]
        by_kind = np.bincount(case.table.kind, device, len(CLASSES))
        if by_kind.max() > 0.5 * by_kind.sum():
            members[CLASSES[int(by_kind.argmax())]].append(i)
    by_class, spreads = {}, {}
    for kind, indices in sorted(members.items()):
        names = [cases[i].name for i in indices]
        pair = [predicted[i] for i in indices], [cases[i].seconds for i in indices]
        by_class[kind] = errors(names, *pair)
        if len(indices) >= FOLDS:
            spreads[kind] = _spread(*pair)
    return by_class, spreads


def _correlations(names: Sequence[str], covariance: Array) -> dict[tuple[str, str], float]:
    correlations = {}
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            size = math.sqrt(covariance[i, i] * covariance[j, j])
            value = float(covariance[i, j] / size) if size else 0.0
            if abs(value) > 0.8:
                correlations[first, names[j]] = value
    return correlations
