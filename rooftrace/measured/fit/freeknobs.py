"""Knobs that a fit may change, as a vector: the logarithm of each over its start."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.kernels import attention_knobs
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.hardware import Chip
from rooftrace.measured.fit.cases import CalibrationError, Stack

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

STEP = ("pace", "compute", "memory", "cache", "overlap", "launch", "dispatch", "layout")
"""Knobs of a whole chip that a fit can free (pace is one factor on all of them); beside them
"tiling.prologue" and its like, "attention.start" and its like, and "mm.compute", "layer
norm.memory" ...: the shares of a class."""
TILING = ("prologue", "split", "feed", "busy")
ATTENTION = {
    "products": 1.0, "convert": 0.5, "stream": 1.0,
    "start": 1e-6, "combine": 3e-6, "prepare": 3e-6, "request": 1e-8,
}  # fmt: skip
"""Numbers of attention kernels, and where a fit begins that is given none."""
_PRIORS = {
    "pace": 0.2, "compute": 0.2, "memory": 0.2, "cache": 0.7, "overlap": 0.4, "launch": 0.7,
    "dispatch": 0.7, "layout": 0.5, "tiling": 1.0, "attention": 1.0, "share": 0.15, "alone": 0.8,
}  # fmt: skip
"""Standard deviation of the logarithm of a knob around its start, before anything is measured;
"alone": of a share or a number of tiles where single kernels were.

Those of pace, compute and memory are how far fitted numbers of GPUs scatter around the typical
ones, as root mean square of the logarithm: pace 0.22, compute 0.20, memory 0.19, over seven fits to
steps of image models (timm; RTX 3090 thrice, RTX 4090 twice, a card held to 300 W at 0.65 of its
rates) and language models on A100.  Those of the others are guesses: steps of large batches do not
tell them."""
_ON_CPU = {"pace": 0.4, "memory": 0.4}
"""Those that differ on CPUs: twelve fits to halves of this project's own runs are 0.38 around the
typical memory, and 0.09 around the typical compute, all on one machine."""
_NOISE = 0.1
"""Standard deviation of the logarithm of a measurement over a good prediction: of steps of image
models that a fit had not seen, on three GPUs, it is 0.08 to 0.12."""
_LEAST_NOISE = 0.02
_NOISE_CASES = 2.0
"""Measurements that this first guess counts for beside those of a fit."""
UNKNOWN = 0.5
"""A knob is not identified where the fit leaves more than this of its prior deviation."""
_START = {"launch": 3e-6, "dispatch": 8e-6, "cache": 3.0}
_CLOSE = 1e-4  # of its own size, a step of the solver is the last
_MOST_OVERLAP = 20.0


class Space:
    """Free knobs as a vector: the logarithm of each over its start."""

    def __init__(self, start: Knobs, names: Sequence[str], chip: Chip, alone: bool = False) -> None:
        self.start, self.names, self.chip, self.alone = start, list(names), chip, alone
        self.starts = [self._start(name) for name in names]
        cpu = _ON_CPU if chip.kind == "cpu" else {}
        self.priors = [
            _PRIORS["alone"] if alone else cpu.get(name, self._prior(name)) for name in names
        ]

    def _start(self, name: str) -> float:
        kind, dot, number = name.rpartition(".")
        if name == "layout":
            return 1.0
        if name == "overlap":
            return min(self.start.overlap, _MOST_OVERLAP)
        if name == "launch":
            return self.start.launch or self.chip.kernel_gap.value or _START[name]
        if name == "dispatch":
            return self.start.dispatch or self.chip.dispatch_eager.value or _START[name]
        if name == "cache":
            return self.start.cache if self.start.cache > 1 else _START[name]
        if name in STEP:
            return float(getattr(self.start, name))
        if kind == "tiling" and number in TILING:
            value = float(getattr(self.start.tiling, number))
            usual = {"prologue": 200.0, "split": 2e-6, "feed": 1.0, "busy": 1.3}[number]
            return value if 0 < value < math.inf else usual
        if kind == "attention" and number in ATTENTION:
            numbers = attention_knobs(self.start.attention, self.chip)
            return float(getattr(numbers, number)) or ATTENTION[number]
        if dot and kind in CLASSES and number in ("compute", "memory"):
            return float(getattr(self.start.share(kind), number))
        raise CalibrationError(
            f"free knob {name!r}: expected one of {', '.join(STEP)}, "
            f"{', '.join(f'tiling.{t}' for t in TILING)}, "
            f"{', '.join(f'attention.{a}' for a in ATTENTION)}, or a class and a number such as "
            f"'mm.compute' or 'layer norm.memory' (classes: {'; '.join(CLASSES)})"
        )

    @staticmethod
    def _prior(name: str) -> float:
        if name in _PRIORS:
            return _PRIORS[name]
        kind, _, number = name.rpartition(".")
        table = kind == "tiling" or (kind == "attention" and number in ATTENTION)
        return _PRIORS[kind if table else "share"]

    def knobs(self, vector: Any) -> Knobs:
        """The knobs at a point."""
        knobs = self.start
        tiling, attention = knobs.tiling, knobs.attention
        shares: dict[str, dict[str, float]] = defaultdict(dict)
        for name, start, move in zip(self.names, self.starts, vector, strict=True):
            value = start * math.exp(min(max(float(move), -6.0), 6.0))
            kind, _, number = name.rpartition(".")
            if name == "layout":
                shares["layout"] |= {
                    k: s.layout * value for k, s in self.start.shares.items() if s.layout
                }
            elif name == "overlap":
                knobs = replace(knobs, overlap=min(max(value, 1.0), _MOST_OVERLAP))
            elif name == "cache":
                knobs = replace(knobs, cache=max(value, 1.0))
            elif name in STEP:
                change: dict[str, Any] = {name: value}
                knobs = replace(knobs, **change)
            elif kind == "tiling":
                tiling = replace(tiling, **{number: value})
            elif kind == "attention" and number in ATTENTION:
                attention = replace(attention_knobs(attention, self.chip), **{number: value})
            else:
                shares[number][kind] = value
        return replace(knobs.with_shares(**shares), tiling=tiling, attention=attention)

    def solve(self, stack: Stack) -> tuple[Array, Array, Array]:
        """The fitted vector, standard errors of the logarithms, and their covariance."""
        import numpy as np
        from scipy.optimize import least_squares

        if not self.names:
            return np.zeros(0), np.zeros(0), np.zeros((0, 0))
        priors = np.array(self.priors)

        def residuals(vector: Array, noise: float) -> Array:
            off = np.log(stack.predict(self.knobs(vector)) / stack.measured) / noise
            # Cases count by a robust loss, priors in full; of two none can be told to be far off.
            robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)) if len(off) > 2 else off
            return np.concatenate([robust, vector / priors])

        vector, noise = np.zeros(len(self.names)), _NOISE
        for _ in range(3):  # how far off cases are is known better each time
            solution = least_squares(
                residuals, vector, method="lm", args=(noise,), xtol=_CLOSE, ftol=_CLOSE
            )
            vector = solution.x
            off = np.log(stack.predict(self.knobs(vector)) / stack.measured)
            noise = _noise(off, len(self.names))
        covariance = np.linalg.pinv(solution.jac.T @ solution.jac)
        return vector, np.sqrt(np.diag(covariance)), covariance


def _noise(off: Array, free: int) -> float:
    """The standard deviation of residuals: of those that a fit left, and of the first guess.

    Their mean is of logarithms, as a scale is as likely to be half as twice what is thought.  A fit
    of as many numbers as measurements leaves no residuals, which says nothing of how good it is.
    """
    import numpy as np

    told = max(0, len(off) - free)
    scatter = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(off))))
    weight = told / (_NOISE_CASES + told)
    return math.exp(weight * math.log(scatter) + (1 - weight) * math.log(_NOISE))
