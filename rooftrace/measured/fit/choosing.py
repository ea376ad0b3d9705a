"""Which numbers a fit frees: those that lower the error on what was left out beyond chance."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from rooftrace.costmodels.intervals.residuals import student
from rooftrace.costmodels.knobs import Knobs
from rooftrace.measured.fit.cases import Case, Errors
from rooftrace.measured.fit.fitting import FEW, Fit, Starts, check_one_chip, fitted
from rooftrace.measured.fit.leftout import FEWEST_GROUPS, group_of

ONE = ("pace",)
"""One factor on the whole step."""
_GAIN = 0.05
"""The least gain that counts, as a share of the error."""
NOTHING = "nothing"
"""How the start itself is named among what was tried."""


def choose(
    cases: Sequence[Case], start: Knobs, kernels: Sequence[Case] = (), title: str = ""
) -> tuple[Fit, dict[str, Errors]]:
    """The fit with as many free numbers as the measurements support, and the errors of all tries.

    Tried are, in this order: the start as it is, one factor on all of it, compute and memory, the
    overheads beside these; then both again after the shares of classes were fitted to single
    kernels.  A later one is kept if it `is_better` on left-out groups than the one kept so far.
    The errors are by the names of the free numbers.

    With too few groups to leave some out, one factor is fitted, and the errors are empty; the
    measurements move it as far as they can tell.  Raises CalibrationError for several chips.
    """
    check_one_chip((*cases, *kernels))
    plain = Starts((), start)
    best, tried = fitted(cases, plain, (), title), {}
    if best.left_out is None:
        return fitted(cases, plain, ONE, title), {}
    tried[NOTHING] = best.left_out
    # Where the host waits, a launch is a part of the call.
    overheads = ("dispatch",) if cases[0].table.chip.host_waits else ("launch", "dispatch")
    many = (*FEW, *overheads)
    sets = [(ONE, plain), (FEW, plain), (many, plain)]
    if kernels:
        shares = Starts(kernels, start)
        sets += [(FEW, shares), (many, shares)]
    for free, shares in sets:
        if len(cases) < len(free) + FEWEST_GROUPS:
            continue
        attempt = fitted(cases, shares, free, title)
        if attempt.left_out is None:
            continue
        label, alone = ", ".join(free), len(shares.kernels)
        tried[f"{label}, and shares by {alone} kernels" if alone else label] = attempt.left_out
        if is_better(cases, attempt.outside, best.outside):
            best = attempt
    return best, tried


def is_better(cases: Sequence[Case], new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether predictions are nearer to the measurements than others by more than chance.

    The gain is the mean over groups of how much smaller their mean error is.  It has to be larger
    against its standard error than one gain in ten by chance, and than `_GAIN` of the error.
    """
    gains: dict[str, list[float]] = defaultdict(list)
    for case, near, far in zip(cases, new, old, strict=True):
        gain = abs(far / case.seconds - 1) - abs(near / case.seconds - 1)
        gains[group_of(case)].append(gain)
    means = [statistics.fmean(of_group) for of_group in gains.values()]
    if len(means) < 2:
        return False
    gain, error = statistics.fmean(means), statistics.stdev(means) / math.sqrt(len(means))
    before = statistics.fmean(abs(far / c.seconds - 1) for c, far in zip(cases, old, strict=True))
    return gain > max(student(0.9, len(means) - 1) * error, _GAIN * before)
