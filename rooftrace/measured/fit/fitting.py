"""Fits knobs to measured times robustly, and tells from left-out cases how far to trust the fit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.kernels import Knobs, attention_knobs, numbers
from rooftrace.costmodels.kernels.intervals import FITTED, NO_FIT, ONE_FACTOR, Residuals
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.measured.fit.cases import Case, Errors, Stack, errors, predict, weights_of

if TYPE_CHECKING:
    from rooftrace._amounts import Array

# -- free knobs ------------------------------------------------------------------------------------

LAYOUT, LAYOUT_PRIOR = "layout", 0.5
"""One factor on the layout copies of all classes, and its prior deviation: a guess."""
STEP = (*(item.name for item, facts in numbers.knobs_of(Knobs) if facts.prior), LAYOUT)
"""Knobs of a chip that a fit can free (pace is one factor on all of them).  Others are
"tiling.prologue" and its like, "attention.start" and its like, and the shares of a class:
"mm.compute", "layer norm.memory".

The `prior` in a knob's declaration is the standard deviation of its logarithm around its start,
before anything is measured.  For pace, compute and memory it is the scatter of fitted numbers of
GPUs around the typical ones, as root mean square of the logarithm: pace 0.22, compute 0.20, memory
0.19, over seven fits to steps of image models (timm; RTX 3090 thrice, RTX 4090 twice, a card held
to 300 W at 0.65 of its rates) and language models on A100.  On CPUs, twelve fits to halves of this
project's runs are 0.38 around the typical memory, and 0.09 around the typical compute, all on one
machine.  Other priors are guesses: steps of large batches do not tell them."""
TABLES: Mapping[str, tuple[str, ...]] = {
    name: tuple(item.name for item, facts in numbers.knobs_of(record) if facts.prior)
    for name, record in (("tiling", numbers.Tiling), ("attention", numbers.AttentionKnobs))
}
"""Numbers of tiles and of attention kernels that a fit can free."""
_SHARES = tuple(item.name for item, facts in numbers.knobs_of(numbers.Share) if facts.prior)
_ALONE = 0.8
"""The prior of a share or a number of tiles where single kernels were measured."""
NOISE = 0.1
"""Standard deviation of the logarithm of a measurement over a good prediction: 0.08 to 0.12 for
unseen steps of image models on three GPUs."""
_LEAST_NOISE = 0.02
_NOISE_CASES = 2.0
"""Weight of this first guess, in measurements."""
UNKNOWN = 0.5
"""A knob is not identified where the fit leaves more than this of its prior deviation."""
_CLOSE = 1e-4  # relative: a smaller step of the solver is the last


COMPUTE_MOST, BOOST_MOST, MEMORY_MOST = 1.1, 1.25, 1.15
"""Shares of datasheet rates that no kernel exceeds.

Peaks are those of a boost clock.  A GPU of a data center may run up to its highest clock (1.98 GHz
where H100's peak is of 1.83); GeForce cards sustained 1.17 to 1.21 of theirs, and 1.0 to 1.08 of
their bandwidth (image models, timm), to which caches add.  Peaks of a CPU are measured ones.
"""


def most_of(chip: Chip) -> tuple[float, float]:
    """The shares of a chip's FLOP rates and of its bandwidth that no kernel exceeds."""
    of_center = chip.kind == "gpu" and Knobs.generation(chip) is not None
    return (COMPUTE_MOST if of_center else BOOST_MOST), MEMORY_MOST


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
        self.most = [
            self._most(path, at) for path, at in zip(self._paths, self.starts, strict=True)
        ]
        cpu = chip.kind == "cpu"
        self.priors = [
            _ALONE if alone else float((cpu and facts.on_cpu) or facts.prior or 0.0)
            for facts in self._facts
        ]

    def _start(self, path: str, facts: numbers.KnobFacts) -> float:
        """The start of a knob in a fit: its number, unless that is neutral."""
        if path == LAYOUT:
            return 1.0
        value = _number(self._begin, path)
        if not value or value == facts.default:
            of_chip = getattr(self.chip, facts.of_chip).value if facts.of_chip else None
            value = of_chip or facts.start or facts.default
        return min(float(value), facts.fitted)

    def _most(self, path: str, start: float) -> float:
        """The largest number of a knob by which no kernel is above the chip's rates."""
        kind, _, number = path.rpartition(".")
        if path != "pace" and number not in _SHARES:
            return math.inf
        if kind and not kind.startswith("shares."):
            return math.inf
        begin = self._begin
        rooms = dict(zip(_SHARES, most_of(self.chip), strict=True))
        room = {name: most / (begin.pace * getattr(begin, name)) for name, most in rooms.items()}
        if path == "pace":
            return float(max(start, begin.pace * min(room.values())))
        return float(max(start, room[number] * (1.0 if kind else getattr(begin, number))))

    def knobs(self, vector: Any) -> Knobs:
        """The knobs at a point."""
        values: dict[str, float] = {}
        for path, facts, start, most, move in zip(
            self._paths, self._facts, self.starts, self.most, vector, strict=True
        ):
            factor = math.exp(min(max(float(move), -6.0), 6.0))
            if path == LAYOUT:
                for kind, share in self.start.shares.items():
                    if share.layout:
                        values[f"shares.{kind}.layout"] = share.layout * factor
            else:
                values[path] = min(max(start * factor, facts.least), facts.fitted, most)
        knobs: Knobs = numbers.with_numbers(self._begin, values, missing=numbers.PLAIN)
        return knobs

    def solve(self, stack: Stack) -> tuple[Array, Array, Array]:
        """The fitted vector, standard errors of the logarithms, and their covariance."""
        from scipy.optimize import least_squares

        if not self.names:
            return np.zeros(0), np.zeros(0), np.zeros((0, 0))
        priors = np.array(self.priors)

        def residuals(vector: Array, noise: float) -> Array:
            off = np.log(stack.predict(self.knobs(vector)) / stack.measured) / noise
            # Cases count by a robust loss, priors in full; of two neither is an outlier.
            robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)) if len(off) > 2 else off
            return np.concatenate([np.sqrt(stack.weights) * robust, vector / priors])

        vector, noise = np.zeros(len(self.names)), NOISE
        above = np.maximum(np.log(np.array(self.most) / np.array(self.starts)), _CLOSE)
        for _ in range(3):  # the noise is known better each time
            solution = least_squares(
                residuals, vector, bounds=(-np.inf, above), args=(noise,), xtol=_CLOSE, ftol=_CLOSE
            )
            vector = solution.x
            off = np.log(stack.predict(self.knobs(vector)) / stack.measured)
            noise = _noise(off, stack.weights, len(self.names))
        covariance = np.linalg.pinv(solution.jac.T @ solution.jac)
        return vector, np.sqrt(np.diag(covariance)), covariance


def _path(name: str) -> str:
    """The path of a knob in its record.  Raises RequestError for a name that is none."""
    kind, dot, number = name.rpartition(".")
    if name in STEP or number in TABLES.get(kind, ()):
        return name
    if dot and kind in CLASSES and number in _SHARES:
        return f"shares.{name}"
    tables = (f"{table}.{number}" for table, names in TABLES.items() for number in names)
    raise RequestError(
        f"free knob {name!r}: expected one of {', '.join(STEP)}, {', '.join(tables)}, or a class "
        f"and a number such as 'mm.compute' or 'layer norm.memory' (classes: {'; '.join(CLASSES)})"
    )


def _number(knobs: Knobs, path: str) -> Any:
    """The number at a path; of a class without a share, that of `Knobs.share`."""
    kind = path.removeprefix("shares.").rpartition(".")[0]
    record, name = numbers.place_of(knobs, path, missing=knobs.share(kind))
    return getattr(record, name)


def _facts(knobs: Knobs, path: str) -> numbers.KnobFacts:
    """The declaration of a knob."""
    facts = numbers.facts_of(knobs, path, missing=numbers.PLAIN) if path != LAYOUT else None
    return facts or numbers.KnobFacts(prior=LAYOUT_PRIOR)


def _noise(off: Array, weights: Array, free: int) -> float:
    """The geometric mean of the standard deviation of residuals and of the first guess.

    Residuals weigh by their degrees of freedom: a fit of as many numbers as measurements has none.
    """
    freedom = max(0.0, float(weights.sum()) - free)
    order = np.argsort(np.abs(off))
    middle = order[np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)]
    scatter = max(_LEAST_NOISE, 1.4826 * float(np.abs(off[middle])))
    weight = freedom / (_NOISE_CASES + freedom)
    return math.exp(weight * math.log(scatter) + (1 - weight) * math.log(NOISE))


# -- fitting ---------------------------------------------------------------------------------------
# Every number is fitted as a factor (its logarithm is free), around a prior for its distance from
# the start: few measurements move it little.  A number that they tell little about is reported as
# not identified, and keeps its start, which is typical of such chips.

_FEWEST_KERNELS = 5
FEW = ("compute", "memory")
"""The knobs that times of whole steps usually identify."""


@dataclass(frozen=True)
class FittedNumber:
    """A number that a fit may change."""

    name: str  # of the knob, for `free`
    start: float  # where the fit began
    value: float  # where it ended; the start, where not identified
    error: float  # relative standard error
    identified: bool  # whether the measurements tell it
    limited: bool = False  # whether it is the most that kernels of the chip reach


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted knobs, with their errors."""

    knobs: Knobs
    parameters: tuple[FittedNumber, ...]
    errors: Errors  # on the cases that were fitted
    left_out: Errors | None  # on groups that a fit had not seen; None with too few groups
    # Of pairs of kept numbers, beyond 0.8.
    correlations: Mapping[tuple[str, str], float] = field(default_factory=dict)
    # Left-out errors of the cases in which a class of kernels takes most of the time.
    by_class: Mapping[str, Errors] = field(default_factory=dict)
    outside: tuple[float, ...] = ()  # s of each case, predicted by a fit without its group

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
    """Knobs fitted to `cases`, beginning at `start`.

    free: names of knobs that may change (see `STEP`).  check: also fit without each fifth of the
    groups, and report the errors there.  kernels: cases of single kernels; the shares of their
    classes, and the numbers of tiles, are fitted to them first (without left-out groups).  Raises
    RequestError for fewer cases than free knobs, for several chips, and for a name that is no
    knob.
    """
    names = list(dict.fromkeys(free))
    if len(cases) < max(1, len(names)):
        raise RequestError(
            f"{len(cases)} measurements for {len(names)} knobs ({', '.join(names)}): expected at "
            "least as many measurements as knobs; measure more, or free fewer"
        )
    check_one_chip((*cases, *kernels))
    return fitted(cases, Starts(kernels, start), names, title, check)


def check_one_chip(cases: Sequence[Case]) -> None:
    chips = sorted({case.table.chip.name for case in cases})
    if len(chips) > 1:
        raise RequestError(f"measurements of several chips ({', '.join(chips)}): fit one at a time")


def fitted(
    cases: Sequence[Case], shares: Starts, names: Sequence[str], title: str, check: bool = True
) -> Fit:
    """The fit of `cases`, beginning at the shares of single kernels; `names` may be empty."""
    start, of_kernels = shares.without(())
    stack = Stack(cases, start)
    knobs, parameters, covariance = _solved(Space(start, names, cases[0].table.chip), stack)
    kept = [parameter.name for parameter in parameters if parameter.identified]
    predicted = stack.predict(knobs).tolist()
    labels, measured = [case.name for case in cases], [case.seconds for case in cases]
    weights = weights_of(cases)
    outside = left_out(cases, shares.begin, kept) if check else None
    use = FITTED if of_kernels else use_of(kept)
    if outside is None:
        knobs = with_usual_interval(knobs, use, cases, len(kept))
    else:
        knobs = with_interval(knobs, use, cases, outside, start)
    return Fit(
        knobs=replace(knobs, title=title or start.title),
        parameters=(*parameters, *of_kernels),
        errors=errors(labels, predicted, measured, weights),
        left_out=errors(labels, outside, measured, weights) if outside is not None else None,
        correlations=_correlations(kept, covariance),
        by_class=by_class(cases, knobs, predicted if outside is None else outside),
        outside=tuple(outside or ()),
    )


class Starts:
    """Starts fitted to single kernels: to all, or without some groups; each is fitted once."""

    def __init__(self, kernels: Sequence[Case], start: Knobs) -> None:
        self.kernels, self.start = kernels, start
        self._fits: dict[frozenset[str], tuple[Knobs, tuple[FittedNumber, ...]]] = {}

    def without(self, groups: Iterable[str]) -> tuple[Knobs, tuple[FittedNumber, ...]]:
        """Knobs, and their fitted numbers."""
        key = frozenset(groups)
        if key not in self._fits:
            seen = [case for case in self.kernels if case.group not in key]
            self._fits[key] = _kernels_first(seen, self.start)
        return self._fits[key]

    def begin(self, groups: Iterable[str]) -> Knobs:
        """The start of a fit without these groups."""
        return self.without(groups)[0]


def _kernels_first(kernels: Sequence[Case], start: Knobs) -> tuple[Knobs, tuple[FittedNumber, ...]]:
    """Shares of the classes with enough measured kernels, and numbers of tiles, fitted to them."""
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
    kept = [
        name
        for name, deviation, prior in zip(space.names, deviations, space.priors, strict=True)
        if deviation <= UNKNOWN * prior
    ]
    final = Space(space.start, kept, space.chip, space.alone)
    vector, errors_kept, covariance = final.solve(stack)
    at = dict(zip(kept, zip(vector, errors_kept, strict=True), strict=True))
    parameters = tuple(
        FittedNumber(
            name,
            start,
            start * math.exp(at[name][0]),
            float(at[name][1]),
            True,
            start * math.exp(at[name][0]) >= most * (1 - _CLOSE),
        )
        if name in at
        else FittedNumber(name, start, start, float(deviation), False)
        for name, start, most, deviation in zip(
            space.names, space.starts, space.most, deviations, strict=True
        )
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


# -- left-out cases --------------------------------------------------------------------------------

FOLDS = 5
FEWEST_GROUPS = 3
_FEWEST_OF_CLASS = 5
_LEAST_SPREAD = 1e-4


def use_of(free: Sequence[str]) -> str:
    """The value of `Knobs.use` after a fit of these numbers."""
    if not free:
        return NO_FIT
    return ONE_FACTOR if list(free) == ["pace"] else FITTED


def left_out(
    cases: Sequence[Case], begin: Callable[[Sequence[str]], Knobs], free: Sequence[str]
) -> list[float] | None:
    """The prediction of each case by a fit without its group; None with too few groups.

    begin: the start of a fit without some groups.
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
    """The name of the cases that are left out together with a case."""
    return case.group or case.name


# -- intervals -------------------------------------------------------------------------------------


def with_interval(
    knobs: Knobs, use: str, cases: Sequence[Case], predicted: Sequence[float], start: Knobs
) -> Knobs:
    """Knobs with the spreads and the ends of intervals of left-out cases.

    predicted: seconds of each case by a fit without it.  start: the knobs with the usual residuals
    of this use, which weigh most where cases are few.
    """
    measured = [case.seconds for case in cases]
    spread = max(_LEAST_SPREAD, spread_of(predicted, measured))
    knobs = replace(knobs.with_shares(spread=_spreads(cases, knobs, predicted)), spread=spread)
    off = [math.log(m / p) for m, p in zip(measured, predicted, strict=True)]
    deviations = deviations_of(cases, knobs)
    residuals = start.residuals_of(use)
    usual = residuals.spread if residuals is not None else start.spread
    ends = Residuals.of_steps(
        [each / deviation for each, deviation in zip(off, deviations, strict=True)],
        [group_of(case) for case in cases],
        usual / spread,
        f"steps on {cases[0].table.chip.name} that were left out",
        [case.cell for case in cases],
    )
    return replace(knobs, use=use, residuals={use: replace(ends, spread=spread)})


def with_usual_interval(knobs: Knobs, use: str, cases: Sequence[Case], free: int) -> Knobs:
    """Knobs with the usual interval of steps after a fit of this use, where no case was left out.

    A fit to few cases widens it by the error of the fit.
    """
    groups = len({group_of(case) for case in cases})
    usual = knobs.residuals_of(use)
    spread = (knobs.spread if usual is None else usual.spread) * math.sqrt(1 + free / groups)
    cells = tuple(sorted({str(case.cell) for case in cases if case.cell.phase}))
    residuals = {} if usual is None else {use: replace(usual, spread=spread, cells=cells)}
    return replace(knobs, spread=spread, use=use, residuals=residuals)


def spread_of(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Robust standard deviation of the logarithm of predicted over measured, bias included."""
    off = np.log(np.array(predicted) / np.array(measured))
    return float(1.4826 * np.median(np.abs(off)))


def deviations_of(cases: Sequence[Case], knobs: Knobs) -> list[float]:
    """The standard deviation of the logarithm of each case, by the rule of estimates."""
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
    rows = np.zeros((len(cases), len(CLASSES)))
    for i, case in enumerate(cases):
        device = case.table.seconds(knobs, case.layouts).device * case.table.data["count"]
        times = np.bincount(case.table.kind, device, len(CLASSES))
        rows[i] = times / times.sum()
    return rows
