"""Chooses how many numbers a fit frees: by the errors of steps that were left out."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from statistics import NormalDist

from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.intervals import student
from rooftrace.measured.fit.cases import Case, Errors, predict
from rooftrace.measured.fit.fitting import (
    FEW,
    FEWEST_GROUPS,
    NOISE,
    Fit,
    Starts,
    check_one_chip,
    fitted,
    group_of,
)

ONE = ("pace",)
"""One factor on the whole step."""
_GAIN = 0.05
"""The least gain that counts, as a share of the error."""
NOTHING = "nothing"
"""The name of the start among the tries."""


def choose(
    cases: Sequence[Case],
    start: Knobs,
    kernels: Sequence[Case] = (),
    title: str = "",
    usual: Knobs | None = None,
) -> tuple[Fit, dict[str, Errors]]:
    """The fit with as many free numbers as the measurements support, and the errors of all tries.

    Tries, in order: nothing fitted, one factor on all of the start, compute and memory, these with
    overheads; then the last two again after the shares of classes were fitted to single kernels.  A
    later one is kept if it `is_better` on left-out groups than the best so far, and its mean error
    there is not above that of nothing fitted.  Kernels of one step are of one model, whatever is
    left out of them, and on other models more than one factor does worse: only that is tried, and
    kept if it lowers the error of the sum by `_GAIN`, and the sum `is_off`.  The errors are by the
    names of the free numbers.  usual: the knobs of estimates without a fit; default: the start.

    With too few groups to leave some out, one factor is fitted where the steps are `is_off`, and
    the errors are empty.  Raises RequestError for several chips.
    """
    check_one_chip((*cases, *kernels))
    plain = Starts((), start)
    best, tried = fitted(cases, Starts((), usual or start), (), title), {}
    if best.left_out is None:
        return (fitted(cases, plain, ONE, title) if is_off(cases, best.knobs) else best), {}
    tried[NOTHING] = best.left_out
    # Where the host waits, a launch is a part of the call.
    overheads = ("dispatch",) if cases[0].table.chip.host_waits else ("launch", "dispatch")
    many = (*FEW, *overheads)
    sets = [(ONE, plain), (FEW, plain), (many, plain)]
    if is_one_step(cases):
        sets = sets[:1]
    elif kernels:
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
        none, new = (judged(errors, cases) for errors in (tried[NOTHING], attempt.left_out))
        if new < none * (1 - _GAIN) and (
            is_off(cases, best.knobs)
            if is_one_step(cases)
            else is_better(cases, attempt.outside, best.outside)
        ):
            best = attempt
    return best, tried


def is_one_step(cases: Sequence[Case]) -> bool:
    """Whether cases are kernels of one step."""
    return all(case.weight is not None for case in cases)


def is_off(cases: Sequence[Case], knobs: Knobs) -> bool:
    """Whether predictions are off by more than models differ on one chip, beyond 90 % chance.

    Models of one chip scatter by `NOISE` around what its factor says, so that one or two of them
    tell a factor only where it is farther from 1.
    """
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case, seconds in zip(cases, predict(cases, knobs), strict=True):
        ratios["" if is_one_step(cases) else group_of(case)].append((case.seconds, seconds))
    logs = [
        math.log(sum(m for m, _ in group) / sum(p for _, p in group)) for group in ratios.values()
    ]
    return abs(statistics.fmean(logs)) > NormalDist().inv_cdf(0.9) * NOISE / math.sqrt(len(logs))


def judged(of: Errors, cases: Sequence[Case]) -> float:
    """The error that a fit is judged by: the mean one, or that of the sum of kernels of a step."""
    return abs(of.bias) if is_one_step(cases) else of.mean


def is_better(cases: Sequence[Case], new: Sequence[float], old: Sequence[float]) -> bool:
    """Whether new predictions are nearer to the measurements than old ones by more than chance.

    The gain is the mean over groups of the decrease of their mean error.  It must exceed the 90 %
    quantile of chance by its standard error, and `_GAIN` of the error.
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
