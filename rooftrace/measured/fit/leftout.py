"""How far to trust a fit: predictions of cases by a fit without them, and intervals by these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.intervals.residuals import FITTED, NO_FIT, ONE_FACTOR, Residuals
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.measured.fit.cases import Case, Errors, Stack, errors, predict
from rooftrace.measured.fit.freeknobs import Space

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

FOLDS = 5
FEWEST_GROUPS = 3
_FEWEST_OF_CLASS = 5
_LEAST_SPREAD = 1e-4


def use_of(free: Sequence[str]) -> str:
    """What was fitted, as `Knobs.use` names it, where these numbers were."""
    if not free:
        return NO_FIT
    return ONE_FACTOR if list(free) == ["pace"] else FITTED


def left_out(
    cases: Sequence[Case], begin: Callable[[Sequence[str]], Knobs], free: Sequence[str]
) -> list[float] | None:
    """The prediction of each case by a fit without its group; None with too few groups.

    begin: where a fit begins that has not seen some groups.
    """
    groups = sorted({group_of(case) for case in cases})
    if len(groups) < FEWEST_GROUPS or len(cases) < len(free) + FEWEST_GROUPS:
        return None
    folds = min(FOLDS, len(groups))
    fold = {group: i % folds for i, group in enumerate(groups)}
    predicted = [0.0] * len(cases)
    for part in range(folds):
        inside = [c for c in cases if fold[group_of(c)] != part]
        outside = [i for i, c in enumerate(cases) if fold[group_of(c)] == part]
        begun = begin([group for group in groups if fold[group] == part])
        space = Space(begun, free, cases[0].table.chip)
        knobs = space.knobs(space.solve(Stack(inside, begun))[0])
        for i, seconds in zip(outside, predict([cases[i] for i in outside], knobs), strict=True):
            predicted[i] = seconds
    return predicted


def group_of(case: Case) -> str:
    """What is left out together with a case."""
    return case.group or case.name


# -- intervals -------------------------------------------------------------------------------------


def with_interval(
    knobs: Knobs, use: str, cases: Sequence[Case], predicted: Sequence[float], start: Knobs
) -> Knobs:
    """Knobs with the spreads and the ends of intervals that left-out cases have.

    predicted: seconds of each case by a fit without it.  start: the knobs that know how far steps
    usually are from a fit of this use, for where the cases are few.
    """
    measured = [case.seconds for case in cases]
    spread = max(_LEAST_SPREAD, spread_of(predicted, measured))
    knobs = replace(knobs.with_shares(spread=_spreads(cases, knobs, predicted)), spread=spread)
    off = [math.log(m / p) for m, p in zip(measured, predicted, strict=True)]
    deviations = deviations_of(cases, knobs)
    known = start.residuals.get(use)
    usual = known.spread if known is not None else start.spread
    ends = Residuals.of_steps(
        [each / deviation for each, deviation in zip(off, deviations, strict=True)],
        [group_of(case) for case in cases],
        usual / spread,
        f"steps on {cases[0].table.chip.name} that were left out",
    )
    return replace(knobs, use=use, residuals={use: replace(ends, spread=spread)})


def with_usual_interval(knobs: Knobs, use: str, cases: Sequence[Case], free: int) -> Knobs:
    """Knobs with the interval that steps usually have after a fit of this use.

    None of the cases was left out.  A fit to few of them is off by its own error, too.
    """
    groups = len({group_of(case) for case in cases})
    known = knobs.residuals.get(use)
    usual = known.spread if known is not None else knobs.spread
    spread = usual * math.sqrt(1 + free / groups)
    if known is None:
        return replace(knobs, spread=spread, use=use, residuals={})
    return replace(knobs, spread=spread, use=use, residuals={use: replace(known, spread=spread)})


def spread_of(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Robust standard deviation of the logarithm of predicted over measured, bias included."""
    import numpy as np

    off = np.log(np.array(predicted) / np.array(measured))
    return float(1.4826 * np.median(np.abs(off)))


def deviations_of(cases: Sequence[Case], knobs: Knobs) -> list[float]:
    """The standard deviation of the logarithm of each case, as estimates have it."""
    import numpy as np

    spreads = np.array([knobs.share(name).spread or knobs.spread for name in CLASSES])
    shares = _time_shares(cases, knobs)
    deviations: list[float] = np.sqrt(shares @ spreads**2).tolist()
    return deviations


# -- by class of kernels ---------------------------------------------------------------------------


def by_class(cases: Sequence[Case], knobs: Knobs, predicted: Sequence[float]) -> dict[str, Errors]:
    """Errors of the cases in which one class of kernels takes most of the time."""
    return {
        kind: errors(
            [cases[i].name for i in indices],
            [predicted[i] for i in indices],
            [cases[i].seconds for i in indices],
        )
        for kind, indices in _members(cases, knobs).items()
    }


def _spreads(cases: Sequence[Case], knobs: Knobs, predicted: Sequence[float]) -> dict[str, float]:
    """The spread of classes that take most of the time of enough cases."""
    return {
        kind: max(
            _LEAST_SPREAD,
            spread_of([predicted[i] for i in indices], [cases[i].seconds for i in indices]),
        )
        for kind, indices in _members(cases, knobs).items()
        if len(indices) >= _FEWEST_OF_CLASS
    }


def _members(cases: Sequence[Case], knobs: Knobs) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for i, shares in enumerate(_time_shares(cases, knobs)):
        if shares.max() > 0.5:
            members[CLASSES[int(shares.argmax())]].append(i)
    return dict(sorted(members.items()))


def _time_shares(cases: Sequence[Case], knobs: Knobs) -> Array:
    """The share of device time of each class [cases, classes]."""
    import numpy as np

    rows = np.zeros((len(cases), len(CLASSES)))
    for i, case in enumerate(cases):
        device = case.table.seconds(knobs, case.layouts).device * case.table.data["count"]
        times = np.bincount(case.table.kind, device, len(CLASSES))
        rows[i] = times / times.sum()
    return rows
