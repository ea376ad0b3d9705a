"""Measurements that a chip cannot have made, and those that would tell most about it next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.numbers import MOST
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time, listed
from rooftrace.measured.alignment import MeasuredStep
from rooftrace.measured.fit.cases import Case, Stack, predict, step_case
from rooftrace.measured.fit.fitting import FEW, NOISE, Space, most_of

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
