"""From measured times to knobs: a robust fit that says what it does not know.

Every number is fitted as a factor (its logarithm is free), around a prior that says how far such a
factor usually is from where the fit starts.  A number that the measurements tell little about stays
near its start; such are reported as not identified, and put back to where they started.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimate import dispatch_seconds
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels import (
    KernelTable,
    copies_layouts,
    kernel_seconds,
    kernel_table,
    launch_seconds,
    products_of,
)
from rooftrace.costmodels.knobs import Knobs, with_shares
from rooftrace.costmodels.opclass import CLASSES
from rooftrace.costmodels.plan import Plan, plan
from rooftrace.costmodels.timing import host_waits
from rooftrace.costmodels.utilization import matrix_engine
from rooftrace.hardware.chip import Chip
from rooftrace.tracer.graph import OpGraph

if TYPE_CHECKING:
    import numpy as np

    from rooftrace.costmodels.utilization import TileTerms

    Array = np.ndarray[Any, np.dtype[np.float64]]

STEP = ("compute", "memory", "cache", "overlap", "launch", "dispatch", "layout")
"""Knobs of a whole chip that a fit can free; beside them "tiling.prologue" and its like, and
"mm.compute", "layer norm.memory" ...: the shares of a class."""
_TILING = ("prologue", "split", "feed", "busy")
_PRIORS = {
    "compute": 0.5, "memory": 0.4, "cache": 0.7, "overlap": 0.4, "launch": 0.7, "dispatch": 0.7,
    "layout": 0.5, "tiling": 1.0, "share": 0.15, "alone": 0.8,
}  # fmt: skip
"""Standard deviation of the logarithm of a knob around its start, before anything is measured;
"alone": of a share or a number of tiles where single kernels were."""
_NOISE = 0.08
"""The same of a measurement around a good prediction, as a first guess."""
_LEAST_NOISE = 0.02
_UNKNOWN = 0.5
"""A knob is not identified where the fit leaves more than this of its prior deviation."""
_START = {"launch": 3e-6, "dispatch": 8e-6, "cache": 3.0}
_MOST_OVERLAP = 20.0
FOLDS = 5
_FEWEST_GROUPS = 3
_FEWEST_KERNELS = 5
FEW = ("compute", "memory")
"""What whole steps usually tell."""
_GAIN = 0.1
"""Those that are left out are few: a smaller gain on them may be chance."""


class CalibrationError(ValueError):
    """Measurements that nothing can be fitted to: says what there is and what is needed."""


@dataclass(frozen=True)
class Case:
    """One measured time, and the kernels that took it.

    seconds: of a whole step, or of `table`'s kernels alone.  dispatches: what the host enqueued for
    it, 0 where the host does not matter; dispatch: seconds each, None where that is the knob of the
    same name.  layouts: see `kernel_seconds`.  group: cases of one group
    are left out together when the fit is checked (a family of models, a shape).
    """

    name: str
    table: KernelTable
    seconds: float
    dispatches: int = 0
    layouts: bool = False
    group: str = ""
    dispatch: float | None = None


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions: (predicted - measured) / measured."""

    count: int
    bias: float
    mean: float
    median: float
    p90: float
    worst: float
    worst_case: str

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for files."""
        return dict(vars(self))


@dataclass(frozen=True)
class Parameter:
    """A fitted number.  error: relative standard error; identified: whether it was kept."""

    name: str
    start: float
    value: float
    error: float
    identified: bool


@dataclass(frozen=True)
class Fit:
    """Knobs and how far to trust them.

    errors: on the cases that were fitted.  left_out: on groups that the fit had not seen, of up to
    `FOLDS` fits (None with too few groups).  correlations: of pairs of kept numbers, beyond 0.8.
    by_class: left-out errors of the cases in which a class takes most of the time.
    """

    knobs: Knobs
    parameters: tuple[Parameter, ...]
    errors: Errors
    left_out: Errors | None
    correlations: Mapping[tuple[str, str], float] = field(default_factory=dict)
    by_class: Mapping[str, Errors] = field(default_factory=dict)

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Knobs that these measurements cannot tell; they stay where they started."""
        return tuple(p.name for p in self.parameters if not p.identified)


def step_case(
    name: str,
    graph: OpGraph | Plan,
    chip: Chip,
    execution: str | ExecutionModel,
    seconds: float,
    group: str = "",
) -> Case:
    """The case of a whole measured step.  Raises CalibrationError for a time that is none."""
    if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
        raise CalibrationError(f"{name}: {seconds!r} seconds: expected a time above 0")
    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    table, _ = kernel_table(planned, chip)
    model = planned.execution
    dispatches = sum(
        launch.dispatches * math.prod(planned.graph.repeats[r].count for r in launch.repeats)
        for launch in planned.launches
    )
    host = None if model.dispatch == "eager" else dispatch_seconds(model, chip)
    return Case(name, table, seconds, dispatches, copies_layouts(model), group, host)


def predict(cases: Sequence[Case], knobs: Knobs) -> list[float]:
    """Seconds of each case by these knobs."""
    return [float(t) for t in _Stack(cases, knobs).predict(knobs)]


def errors(names: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> Errors:
    """How far predictions are off.  Raises CalibrationError without any."""
    import numpy as np

    if not names:
        raise CalibrationError("no predictions to compare with measurements")
    off = np.array(predicted) / np.array(measured) - 1
    size = np.abs(off)
    worst = int(size.argmax())
    return Errors(
        len(names), float(off.mean()), float(size.mean()), float(np.median(size)),
        float(np.quantile(size, 0.9)), float(off[worst]), names[worst],
    )  # fmt: skip


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
    chips = sorted({case.table.chip.name for case in (*cases, *kernels)})
    if len(chips) > 1:
        raise CalibrationError(
            f"measurements of several chips ({', '.join(chips)}): fit one at a time"
        )
    before = start
    start, shares = _kernels_first(kernels, start)
    stack = _Stack(cases, start)
    knobs, parameters, covariance = _solved(_Space(start, names, cases[0].table.chip), stack)
    kept = [parameter.name for parameter in parameters if parameter.identified]
    predicted = stack.predict(knobs)
    labels, measured = [case.name for case in cases], [case.seconds for case in cases]
    fitted = errors(labels, predicted.tolist(), measured)
    outside = _left_out(cases, before, kept, kernels) if check else None
    shown = outside if outside is not None else predicted.tolist()
    spread = _spread(shown, measured)
    by_class, spreads = _by_class(cases, knobs, shown)
    knobs = replace(with_shares(knobs, spread=spreads), spread=spread, title=title or start.title)
    return Fit(
        knobs,
        (*parameters, *shares),
        fitted,
        errors(labels, outside, measured) if outside is not None else None,
        _correlations(kept, covariance),
        by_class,
    )


def choose(
    cases: Sequence[Case], start: Knobs, kernels: Sequence[Case] = (), title: str = ""
) -> tuple[Fit, dict[str, Errors]]:
    """The fit with as many free numbers as the measurements support, and what else was tried.

    Two numbers are free, then the overheads too; then both again after the shares of classes were
    fitted to single kernels.  More of them are kept where that lowers the mean error on what was
    left out by `_GAIN` of it.  The errors are by what was free; empty where there are too few
    groups to leave some out, and two numbers it is.  Raises CalibrationError as `fit` does.
    """
    best = fit(cases, start, FEW, title)
    if best.left_out is None:
        return best, {}
    tried, mean = {", ".join(FEW): best.left_out}, best.left_out.mean
    # Where the host waits, a launch is a part of the call.
    overheads = ("dispatch",) if host_waits(cases[0].table.chip) else ("launch", "dispatch")
    many = (*FEW, *overheads)
    sets: list[tuple[Sequence[str], Sequence[Case]]] = [(many, ())]
    sets += [(FEW, kernels), (many, kernels)] if kernels else []
    for free, alone in sets:
        if len(cases) < len(free) + _FEWEST_GROUPS:
            continue
        found = fit(cases, start, free, title, kernels=alone)
        if found.left_out is None:
            continue
        label = ", ".join(free)
        tried[f"{label}, and shares by {len(alone)} kernels" if alone else label] = found.left_out
        if found.left_out.mean < (1 - _GAIN) * mean:
            best, mean = found, found.left_out.mean
    return best, tried


def _kernels_first(kernels: Sequence[Case], start: Knobs) -> tuple[Knobs, tuple[Parameter, ...]]:
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
    chip = kernels[0].table.chip
    if matrix_engine(chip, 1.0) is not None and {"mm", "bmm"} & counts.keys():
        names += [f"tiling.{number}" for number in _TILING]
    space = _Space(start, names, chip, alone=True)
    knobs, parameters, _ = _solved(space, _Stack(kernels, start))
    return knobs, tuple(parameter for parameter in parameters if parameter.identified)


def _solved(space: _Space, stack: _Stack) -> tuple[Knobs, tuple[Parameter, ...], Array]:
    """Fit, put what was not identified back to its start, and fit the others again.

    The covariance is of those that were identified.
    """
    _, deviations, _ = space.solve(stack)
    known = [d <= _UNKNOWN * p for d, p in zip(deviations, space.priors, strict=True)]
    kept = [name for name, ok in zip(space.names, known, strict=True) if ok]
    final = _Space(space.start, kept, space.chip, space.alone)
    found, errors_kept, covariance = final.solve(stack)
    at = dict(zip(kept, zip(found, errors_kept, strict=True), strict=True))
    parameters = tuple(
        Parameter(name, start, start * math.exp(at[name][0]), float(at[name][1]), True)
        if name in at
        else Parameter(name, start, start, float(deviation), False)
        for name, start, deviation in zip(space.names, space.starts, deviations, strict=True)
    )
    return final.knobs(found), parameters, covariance


# -- the space of knobs ----------------------------------------------------------------------------


class _Space:
    """Free knobs as a vector: the logarithm of each over its start."""

    def __init__(self, start: Knobs, names: Sequence[str], chip: Chip, alone: bool = False) -> None:
        self.start, self.names, self.chip, self.alone = start, list(names), chip, alone
        self.starts = [self._start(name) for name in names]
        self.priors = [_PRIORS["alone"] if alone else self._prior(name) for name in names]

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
        if kind == "tiling" and number in _TILING:
            value = float(getattr(self.start.tiling, number))
            usual = {"prologue": 200.0, "split": 2e-6, "feed": 1.0, "busy": 1.3}[number]
            return value if 0 < value < math.inf else usual
        if dot and kind in CLASSES and number in ("compute", "memory"):
            return float(getattr(self.start.share(kind), number))
        raise CalibrationError(
            f"free knob {name!r}: expected one of {', '.join(STEP)}, "
            f"{', '.join(f'tiling.{t}' for t in _TILING)}, or a class and a number such as "
            f"'mm.compute' or 'layer norm.memory' (classes: {', '.join(CLASSES)})"
        )

    @staticmethod
    def _prior(name: str) -> float:
        if name in _PRIORS:
            return _PRIORS[name]
        return _PRIORS["tiling" if name.startswith("tiling.") else "share"]

    def knobs(self, vector: Any) -> Knobs:
        """The knobs at a point."""
        knobs = self.start
        tiling = knobs.tiling
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
            else:
                shares[number][kind] = value
        return replace(with_shares(knobs, **shares), tiling=tiling)

    def solve(self, stack: _Stack) -> tuple[Array, Array, Array]:
        """Where the fit ends, standard errors of the logarithms, and their covariance."""
        import numpy as np
        from scipy.optimize import least_squares

        if not self.names:
            return np.zeros(0), np.zeros(0), np.zeros((0, 0))
        priors = np.array(self.priors)

        def residuals(vector: Array, noise: float) -> Array:
            off = np.log(stack.predict(self.knobs(vector)) / stack.measured) / noise
            # Cases count by a robust loss, priors in full.
            robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
            return np.concatenate([robust, vector / priors])

        vector, noise = np.zeros(len(self.names)), _NOISE
        for _ in range(2):  # how far off cases are is known after the first time
            found = least_squares(residuals, vector, method="lm", args=(noise,))
            vector = found.x
            off = np.log(stack.predict(self.knobs(vector)) / stack.measured)
            noise = max(_LEAST_NOISE, 1.4826 * float(np.median(np.abs(off))))
        covariance = np.linalg.pinv(found.jac.T @ found.jac)
        return vector, np.sqrt(np.diag(covariance)), covariance


class _Stack:
    """Many cases as one table, so that a prediction of all is a few operations on arrays."""

    def __init__(self, cases: Sequence[Case], knobs: Knobs) -> None:
        import numpy as np

        self.measured = np.array([case.seconds for case in cases])
        self.dispatches = np.array([case.dispatches for case in cases], dtype=float)
        self.dispatch = np.array([math.nan if c.dispatch is None else c.dispatch for c in cases])
        self.serial = np.array([host_waits(case.table.chip) for case in cases])
        self.parts: list[tuple[bool, KernelTable, Any]] = []
        for layouts in (False, True):
            chosen = [(i, case.table) for i, case in enumerate(cases) if case.layouts is layouts]
            if chosen:
                owner = np.concatenate([np.full(len(t), i) for i, t in chosen])
                self.parts.append((layouts, _joined([t for _, t in chosen]), owner))
        self._tiling = knobs.tiling
        self._terms: list[TileTerms | None] = [products_of(t, knobs) for _, t, _ in self.parts]

    def predict(self, knobs: Knobs) -> Array:
        """Seconds of every case."""
        import numpy as np

        total = np.zeros(len(self.measured))
        for (layouts, table, owner), known in zip(self.parts, self._terms, strict=True):
            terms = known if knobs.tiling == self._tiling else products_of(table, knobs)
            device = kernel_seconds(table, knobs, layouts, terms).device
            device = device + launch_seconds(knobs, table.chip)
            total += np.bincount(owner, table.data["count"] * device, len(total))
        dispatch = knobs.dispatch
        if dispatch is None and self.parts:
            dispatch = self.parts[0][1].chip.dispatch_eager.value
        each = np.where(np.isnan(self.dispatch), dispatch or 0.0, self.dispatch)
        host = self.dispatches * each
        # A CPU runs an op when it is called; a GPU while the host goes on.
        found: Array = np.where(self.serial, total + host, np.maximum(total, host))
        return found


def _joined(tables: Sequence[KernelTable]) -> KernelTable:
    import numpy as np

    data = {name: np.concatenate([t.data[name] for t in tables]) for name in tables[0].data}
    return KernelTable(tables[0].chip, np.concatenate([t.kind for t in tables]), data)


# -- how far to trust it ---------------------------------------------------------------------------


def _left_out(
    cases: Sequence[Case], start: Knobs, free: Sequence[str], kernels: Sequence[Case] = ()
) -> list[float] | None:
    """Each case as predicted by a fit that has not seen its group; None with too few groups."""
    groups = sorted({case.group or case.name for case in cases})
    if len(groups) < _FEWEST_GROUPS or len(cases) < len(free) + _FEWEST_GROUPS:
        return None
    folds = min(FOLDS, len(groups))
    fold = {group: i % folds for i, group in enumerate(groups)}
    predicted = [0.0] * len(cases)
    for part in range(folds):
        inside = [c for c in cases if fold[c.group or c.name] != part]
        outside = [i for i, c in enumerate(cases) if fold[c.group or c.name] == part]
        seen = [c for c in kernels if fold.get(c.group) != part]
        begun, _ = _kernels_first(seen, start)
        space = _Space(begun, free, cases[0].table.chip)
        knobs = space.knobs(space.solve(_Stack(inside, begun))[0])
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
        device = kernel_seconds(case.table, knobs, case.layouts).device * case.table.data["count"]
        by_kind = np.bincount(case.table.kind, device, len(CLASSES))
        if by_kind.max() > 0.5 * by_kind.sum():
            members[CLASSES[int(by_kind.argmax())]].append(i)
    found, spreads = {}, {}
    for kind, indices in sorted(members.items()):
        names = [cases[i].name for i in indices]
        pair = [predicted[i] for i in indices], [cases[i].seconds for i in indices]
        found[kind] = errors(names, *pair)
        if len(indices) >= FOLDS:
            spreads[kind] = _spread(*pair)
    return found, spreads


def _correlations(names: Sequence[str], covariance: Array) -> dict[tuple[str, str], float]:
    found = {}
    for i, first in enumerate(names):
        for j in range(i + 1, len(names)):
            size = math.sqrt(covariance[i, i] * covariance[j, j])
            value = float(covariance[i, j] / size) if size else 0.0
            if abs(value) > 0.8:
                found[first, names[j]] = value
    return found
