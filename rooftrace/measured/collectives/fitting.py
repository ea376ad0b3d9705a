"""Fits the constants of a collective to measured times: the form that systems hold.

In: points, each with the fixed steps and the wire seconds that the datasheet gives.  Out: constants
with the least mean error of the logarithm, which a few slow outliers hardly move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftrace.hardware.systems.records import CollectiveFit


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """One measured collective."""

    op: str
    ranks: int
    nbytes: float  # the whole buffer, counted like nccl-tests do
    seconds: float
    dtype: str = ""
    library: str = "nccl"


@dataclass(frozen=True, slots=True)
class FitScore:
    """How far predictions are from measurements: |predicted / measured - 1|."""

    mean: float
    p90: float
    count: int

    def __str__(self) -> str:
        return f"mean {self.mean:.1%}, p90 {self.p90:.1%} of {self.count}"


def score_of(predicted: Any, measured: Any) -> FitScore:
    """The score of predicted seconds beside measured ones."""
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    if not len(errors):
        return FitScore(float("nan"), float("nan"), 0)
    return FitScore(float(errors.mean()), float(np.quantile(errors, 0.9)), len(errors))


LOW = (-17.0, -19.0, -7.0, -1.0, -0.3, -5.0, -16.0)
HIGH = (-5.0, -7.0, 0.0, 2.0, 3.0, 0.0, -7.0)
"""Bounds of the logarithms of alpha, step, efficiency and p; of fall; of log direct and turn."""
STARTS = (
    (-12.0, -14.0, -0.4, 0.5, 0.0, -0.5, -10.5),
    (-11.0, -13.0, -1.0, 0.0, 0.5, -1.2, -10.0),
    (-11.5, -15.0, -0.7, 0.2, 1.5, -1.2, -11.5),
    (-10.0, -12.0, -0.2, 0.8, -0.2, -0.7, -11.0),
)


def seconds_of(constants: Sequence[float] | Any, steps: Any, wire: Any, ranks: Any) -> Any:
    """Seconds by (alpha, step, efficiency, p, fall[, direct, turn]), for arrays.

    steps: of the ring.  wire: seconds of its bytes by the datasheet.
    """
    alpha, step, efficiency, p, fall, *second_way = constants
    fixed = alpha + step * steps
    sent = wire / np.minimum(1.0, efficiency * (2 / ranks) ** fall)
    if second_way:
        direct, turn = second_way
        sent = np.minimum(wire * ranks / 2 / direct, turn + sent)
    high, low = np.maximum(fixed, sent), np.minimum(fixed, sent)
    return high * (1 + (low / high) ** p) ** (1 / p)


def fit_constants(
    steps: Any, wire: Any, ranks: Any, seconds: Any, *, direct: bool = False, weights: Any = None
) -> tuple[float, ...]:
    """The constants that fit measured seconds best; see `seconds_of`.

    direct: whether the op has a second way for small buffers.  weights: how much each point counts.
    """
    weights = np.ones(len(seconds)) if weights is None else weights
    weights = weights / weights.sum()
    spread = len(np.unique(ranks)) > 1
    size = 7 if direct else 5

    def read(q: Any) -> tuple[float, ...]:
        return (*np.exp(q[:4]), q[4] if spread else 0.0, *np.exp(q[5:size]))

    def loss(q: Any) -> float:
        predicted = seconds_of(read(q), steps, wire, ranks)
        unlikely = 0.002 * ((q[3] - 0.4) ** 2 + q[4] ** 2)
        return float((weights * np.abs(np.log(predicted / seconds))).sum() + unlikely)

    best = least(loss, [start[:size] for start in STARTS], LOW[:size], HIGH[:size])
    alpha, step, *others = (float(x) for x in read(best))
    if len(np.unique(steps)) == 1:  # nothing tells both apart
        alpha, step = alpha + step * float(np.ravel(steps)[0]), 0.0
    return (alpha, step, *others)


def least(
    loss: Callable[[Any], float],
    starts: Sequence[Sequence[float]],
    low: Sequence[float],
    high: Sequence[float],
) -> Any:
    """The argument of the least loss within bounds, by Nelder and Mead from several starts."""
    from scipy.optimize import minimize

    options = {"maxiter": 4000, "maxfev": 4000, "xatol": 1e-4, "fatol": 1e-7}
    bounds = list(zip(low, high, strict=True))
    ends = [
        minimize(loss, np.array(start), method="Nelder-Mead", bounds=bounds, options=options)
        for start in starts
    ]
    again = min(ends, key=lambda end: float(end.fun))
    final = minimize(loss, again.x, method="Nelder-Mead", bounds=bounds, options=options)
    return min((again, final), key=lambda end: float(end.fun)).x


def as_fit(constants: Sequence[float], **facts: Any) -> CollectiveFit:
    """The record of constants, rounded to what a file holds."""
    alpha, step, efficiency, p, fall, *second_way = constants
    direct, turn = second_way or (0.0, 0.0)
    return CollectiveFit(
        alpha=rounded(alpha) if alpha > 1e-7 else 0.0,
        step=rounded(step) if step > 1e-8 else 0.0,
        efficiency=rounded(efficiency),
        p=round(p, 3),
        fall=round(fall, 3),
        direct=rounded(direct),
        turn=rounded(turn),
        **facts,
    )


def rounded(value: float) -> float:
    """A number with the four digits of a file."""
    return float(f"{value:.4g}")
