"""How many numbers a fit frees, measurements that no chip can have made, and the next to make."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.intervals import student
from rooftrace.costmodels.kernels.numbers import MOST
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time, listed
from rooftrace.measured.alignment import MeasuredStep
from rooftrace.measured.fit.cases import Case, Errors, Stack, predict, step_case
from rooftrace.measured.fit.fitting import (
    FEW,
    FEWEST_GROUPS,
    NOISE,
    Fit,
    Space,
    Starts,
    check_one_chip,
    fitted,
    group_of,
    most_of,
)

if TYPE_CHECKING:
    from rooftrace._amounts import Array
    from rooftrace.costmodels.estimates import Estimate
    from rooftrace.measured.fit.validation import StepCheck

# -- bounds ----------------------------------------------------------------------------------------

_BEATEN = 0.98
"""Share of a bound below which a time beats it, beyond the clock's error."""
_SHOWN = 3


def bounds_of(cases: Sequence[Case]) -> list[float]:
    """Seconds [cases] that the chip needs at least for the kernels of each case.

    FLOP or bytes of each kernel at the most that any kernel reaches of the chip's rates (`most_of`)
    without launches; bytes that a cache of the chip may hold take no time.
    """
    compute, memory = most_of(cases[0].table.chip)
    free = Knobs("bound", compute=compute, memory=memory, launch=0.0, cache=MOST)
    return predict([replace(case, dispatches=0, host=0.0, layouts=False) for case in cases], free)


def beaten(cases: Sequence[Case]) -> dict[int, str]:
    """By the index of a case: a sentence that it took less than the chip's bound."""
    if not cases:
        return {}
    chip = cases[0].table.chip
    return {
        index: _words(case.seconds, bound, chip)
        for index, (case, bound) in enumerate(zip(cases, bounds_of(cases), strict=True))
        if case.seconds < _BEATEN * bound
    }


def _words(seconds: float, bound: float, chip: Chip) -> str:
    return (
        f"{format_time(seconds)}, and {chip.title} takes {format_time(bound)} at least "
        f"({bound / seconds:.2f} times that)"
    )


def beaten_by(check: StepCheck, priced: Estimate) -> dict[str, str]:
    """A sentence on a measured step below the bound of its estimate, by its label."""
    bound = priced.t_bound / max(most_of(priced.chip))
    return (
        {check.label: _words(check.measured, bound, priced.chip)}
        if check.measured < _BEATEN * bound
        else {}
    )


def check_bound(cases: Sequence[Case]) -> tuple[list[Case], dict[str, str]]:
    """The cases that a chip can have made, and a sentence on each other, by name.

    Raises RequestError where no case is left.
    """
    below = beaten(cases)
    told = {cases[index].name: text for index, text in below.items()}
    kept = [case for index, case in enumerate(cases) if index not in below]
    if cases and not kept:
        raise RequestError(beaten_words(told, cases[0].table.chip))
    return kept, told


def beaten_words(told: Mapping[str, str], chip: Chip) -> str:
    """The sentence on measured steps below a bound; told: what each took, by name."""
    shown = [f"{name}: {text}" for name, text in list(told.items())[:_SHOWN]]
    more = [f"{len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return (
        f"measured steps beat this chip's bound: measure it again, or name the chip and the "
        f"execution that ran, if that was not {chip.name}; {listed([*shown, *more])}"
    )


# -- the next measurement --------------------------------------------------------------------------
# A fit is linear close to its end: log(seconds) of a step is g . x, with x the logarithms of the
# free numbers.  With prior deviations s and cases of noise n, x has the covariance
#   C = (sum of g g' / n^2 + diag(1 / s^2))^-1,
# and the prediction of a step the variance g' C g.  One more case c lowers that of step j by
# (g_j' C g_c)^2 / (n^2 + g_c' C g_c)  (Chaloner and Verdinelli, "Bayesian experimental design: a
# review", 1995).


@dataclass(frozen=True)
class NextStep:
    """The step whose time would narrow the predictions most."""

    name: str
    before: float  # root mean variance of log(seconds) of the steps, by the numbers of a fit
    after: float  # that with one more measurement

    def __str__(self) -> str:
        return (
            f"measure next: {self.name}; it lowers the standard error of predictions from "
            f"{self.before:.1%} to {self.after:.1%}"
        )


def next_step(
    cases: Sequence[Case], others: Sequence[Case], knobs: Knobs, noise: float = NOISE
) -> NextStep | None:
    """The case of `others` that lowers the mean variance of all predictions most.

    Numbers that could be free: what a chip sustains, and overheads.  knobs: where a fit ended.
    noise: standard deviation of log(measured / predicted).  None without `others`.
    """
    if not others:
        return None
    space = Space(knobs, (*FEW, "launch", "dispatch"), cases[0].table.chip)
    every = [*cases, *others]
    slopes = slopes_of(space, Stack(every, knobs))
    weights = np.sqrt([1.0 if case.weight is None else case.weight for case in cases])
    seen = slopes[: len(cases)] * weights[:, None] / noise
    covariance = np.linalg.inv(seen.T @ seen + np.diag(1 / np.square(space.priors)))
    shared = slopes @ covariance @ slopes.T  # [steps, steps]
    variances = np.diag(shared)
    gains = np.square(shared[:, len(cases) :]) / (noise**2 + variances[len(cases) :])
    best = int(gains.mean(axis=0).argmax())
    before = float(variances.mean())
    after = before - float(gains[:, best].mean())
    return NextStep(others[best].name, math.sqrt(before), math.sqrt(max(after, 0.0)))


_MODELS = 3
_LARGER = 8
_OTHER = {"forward": "training", "training": "forward", "prefill": "decode", "decode": "prefill"}


def other_steps(steps: Sequence[MeasuredStep], chip: Chip, model: ExecutionModel) -> list[Case]:
    """Cases of steps that could be measured too: of the first models, once each.

    They run eager and compiled, at a batch of 1 and one 8 times as large, and in the phase that
    goes with theirs.  Those that do not trace are left out.
    """
    ran = "eager" if model.dispatch == "eager" else "compiled"
    cases = []
    for step in list({step.group: step for step in steps}.values())[:_MODELS]:
        sizes: list[tuple[int | None, str | None]] = [(step.batch, step.phase)]
        if step.at is not None:
            batches = (1, step.batch * _LARGER) if step.batch else ()
            sizes += [(batch, step.phase) for batch in batches if batch != step.batch]
            sizes += [(step.batch, _OTHER[step.phase])] if step.phase in _OTHER else []
        for batch, phase in sizes:
            here = (batch, phase) == (step.batch, step.phase)
            try:
                graph = step.graph() if here or step.at is None else step.at(batch, phase)
                for how in ("eager", "compiled"):
                    words = (step.group, phase, f"batch {batch}" if batch else "", how)
                    if not here or how != ran:
                        name = ", ".join(filter(None, words))
                        cases.append(step_case(name, graph, chip, how, 1.0))
            except (ValueError, LookupError, RuntimeError, OSError):
                continue
    return cases


_MOVE = 0.02


def slopes_of(space: Space, stack: Stack) -> Array:
    """The derivative of log(seconds) by the logarithm of each number [steps, numbers]."""
    columns = []
    for index in range(len(space.names)):
        move = np.zeros(len(space.names))
        move[index] = -_MOVE  # downward, as a number may be at its upper bound
        columns.append(
            np.log(
                stack.predict(space.knobs(np.zeros_like(move))) / stack.predict(space.knobs(move))
            )
            / _MOVE
        )
    return np.stack(columns, axis=1)


# -- how many numbers a fit frees ------------------------------------------------------------------

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
