"""Knobs that a fit may change, as a vector: the logarithm of each over its start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.kernels import attention_knobs
from rooftrace.costmodels.knobs import Knobs, numbers
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.hardware import Chip
from rooftrace.measured.fit.cases import CalibrationError, Stack

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

LAYOUT, LAYOUT_PRIOR = "layout", 0.5
"""One factor on the layout copies of all classes, and how far it usually is from 1: a guess."""
STEP = (*(item.name for item, facts in numbers.knobs_of(Knobs) if facts.prior), LAYOUT)
"""Knobs of a whole chip that a fit can free (pace is one factor on all of them); beside them
"tiling.prologue" and its like, "attention.start" and its like, and "mm.compute", "layer
norm.memory" ...: the shares of a class.

What a knob's declaration has as `prior` is the standard deviation of its logarithm around its
start, before anything is measured.  Those of pace, compute and memory are how far fitted numbers of
GPUs scatter around the typical ones, as root mean square of the logarithm: pace 0.22, compute 0.20,
memory 0.19, over seven fits to steps of image models (timm; RTX 3090 thrice, RTX 4090 twice, a card
held to 300 W at 0.65 of its rates) and language models on A100.  On CPUs, twelve fits to halves of
this project's own runs are 0.38 around the typical memory, and 0.09 around the typical compute, all
on one machine.  Those of the others are guesses: steps of large batches do not tell them."""
TABLES: Mapping[str, tuple[str, ...]] = {
    name: tuple(item.name for item, facts in numbers.knobs_of(record) if facts.prior)
    for name, record in (("tiling", numbers.Tiling), ("attention", numbers.AttentionKnobs))
}
"""Numbers of tiles and of attention kernels that a fit can free."""
_SHARES = tuple(item.name for item, facts in numbers.knobs_of(numbers.Share) if facts.prior)
_ALONE = 0.8
"""The prior of a share or a number of tiles where single kernels were measured."""
_NOISE = 0.1
"""Standard deviation of the logarithm of a measurement over a good prediction: of steps of image
models that a fit had not seen, on three GPUs, it is 0.08 to 0.12."""
_LEAST_NOISE = 0.02
_NOISE_CASES = 2.0
"""Measurements that this first guess counts for beside those of a fit."""
UNKNOWN = 0.5
"""A knob is not identified where the fit leaves more than this of its prior deviation."""
_CLOSE = 1e-4  # of its own size, a step of the solver is the last


class Space:
    """Free knobs as a vector: the logarithm of each over its start."""

    def __init__(self, start: Knobs, names: Sequence[str], chip: Chip, alone: bool = False) -> None:
        self.start, self.names, self.chip, self.alone = start, list(names), chip, alone
        self._paths = [_path(name) for name in names]
        if any(path.startswith("attention.") for path in self._paths):
            start = replace(start, attention=attention_knobs(start.attention, chip))
        self._begin = start
        self._facts = [_facts(start, path) for path in self._paths]
        self.starts = [
            self._start(path, facts) for path, facts in zip(self._paths, self._facts, strict=True)
        ]
        cpu = chip.kind == "cpu"
        self.priors = [
            _ALONE if alone else float((cpu and facts.on_cpu) or facts.prior or 0.0)
            for facts in self._facts
        ]

    def _start(self, path: str, facts: numbers.KnobFacts) -> float:
        """The number of a knob, or where a fit begins where it is as if it were not there."""
        if path == LAYOUT:
            return 1.0
        value = _number(self._begin, path)
        if not value or value == facts.default:
            of_chip = getattr(self.chip, facts.of_chip).value if facts.of_chip else None
            value = of_chip or facts.start or facts.default
        return min(float(value), facts.fitted)

    def knobs(self, vector: Any) -> Knobs:
        """The knobs at a point."""
        values: dict[str, float] = {}
        for path, facts, start, move in zip(
            self._paths, self._facts, self.starts, vector, strict=True
        ):
            factor = math.exp(min(max(float(move), -6.0), 6.0))
            if path == LAYOUT:
                for kind, share in self.start.shares.items():
                    if share.layout:
                        values[f"shares.{kind}.layout"] = share.layout * factor
            else:
                values[path] = min(max(start * factor, facts.least), facts.fitted)
        knobs: Knobs = numbers.with_numbers(self._begin, values, missing=numbers.PLAIN)
        return knobs

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


def _path(name: str) -> str:
    """The path of a knob in its record.  Raises CalibrationError for a name that is none."""
    kind, dot, number = name.rpartition(".")
    if name in STEP or number in TABLES.get(kind, ()):
        return name
    if dot and kind in CLASSES and number in _SHARES:
        return f"shares.{name}"
    tables = (f"{table}.{number}" for table, names in TABLES.items() for number in names)
    raise CalibrationError(
        f"free knob {name!r}: expected one of {', '.join(STEP)}, {', '.join(tables)}, or a class "
        f"and a number such as 'mm.compute' or 'layer norm.memory' (classes: {'; '.join(CLASSES)})"
    )


def _number(knobs: Knobs, path: str) -> Any:
    """The number at a path; of a class that has no share of its own, that of `Knobs.share`."""
    kind = path.removeprefix("shares.").rpartition(".")[0]
    record, name = numbers.place_of(knobs, path, missing=knobs.share(kind))
    return getattr(record, name)


def _facts(knobs: Knobs, path: str) -> numbers.KnobFacts:
    """What the declaration of a knob says of it."""
    facts = numbers.facts_of(knobs, path, missing=numbers.PLAIN) if path != LAYOUT else None
    return facts or numbers.KnobFacts(prior=LAYOUT_PRIOR)


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
