"""A step for any sizes: tables of its totals and times at many points; files of forms."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rooftrace._reading import FileKind, beginning, json_of, record_of, text_of
from rooftrace._shown import short
from rooftrace._writing import write_packed
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.ops import MATRIX
from rooftrace.costmodels.rewrites import reprice
from rooftrace.costmodels.timing.steps import StepAmounts, time_step
from rooftrace.costmodels.timing.timings import REGIMES, TimesOverPoints
from rooftrace.errors import RequestError, hint
from rooftrace.graph import GraphError, GraphFileError, OpGraph, decoded_graph, graphs_bytes
from rooftrace.graph.formulas import Formula, FormulaError, GraphForm, Regime, leaves
from rooftrace.hardware import Chip
from rooftrace.studies.forms import Conditions, PlanForm, PlanForms, Points

# -- forms -----------------------------------------------------------------------------------------

Numbers = tuple[int, ...]
Trace = Callable[[Numbers], OpGraph]
MOST_TRACED = 256
"""The most sizes outside of proven regimes that one evaluation traces by themselves."""


@dataclass(frozen=True, eq=False)
class Form:
    """A step whose sizes are left open.

    title: of the model.  names: of the sizes.  regimes: where which form of the graph is proven.
    trace: traces the step at sizes outside of these; None where it cannot be traced here, as for a
    form from a file.  Everything is exact: a graph equals its trace, totals are integers.
    """

    title: str
    phase: str
    names: tuple[str, ...]
    regimes: tuple[Regime, ...]
    trace: Trace | None = None
    _plans: dict[Any, Any] = field(default_factory=dict, repr=False)
    _single: dict[Numbers, Regime] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        samples = sum(len(regime.form.samples) for regime in self.regimes)
        held = sum(len(regime.proven) for regime in self.regimes)
        return short(
            self,
            f"{self.title}, {self.phase} over {', '.join(self.names)}: {len(self.regimes)} regimes "
            f"from {samples} traces, proven on {held} others",
        )

    def encoded(self) -> bytes:
        """The bytes of the file of the form."""
        return form_bytes(self.title, self.phase, self.names, self.regimes)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the form (gzip if the name ends in .gz); `Form.load` reads it back."""
        write_packed(Path(path), self.encoded())
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Form:
        """The form in a file, which needs no torch.

        Raises FileNotFoundError, or GraphFileError for a file that is cut off, of another kind, or
        whose formulas do not give its graphs.
        """
        return cls(*read_form(path))

    @property
    def example(self) -> OpGraph:
        """The graph at some sizes.  Raises RequestError of a form that nothing is proven of."""
        if not self.regimes:
            raise RequestError(f"{self.title}: no regime is known; ask for a graph at some sizes")
        graph: OpGraph = self.regimes[0].form.example
        return graph

    # -- one place ---------------------------------------------------------------------------------

    def numbers(self, sizes: Mapping[str, int]) -> Numbers:
        """Sizes by name in the order of `names`.

        Raises RequestError for a name that there is not, and for one that is missing.
        """
        for name in sizes:
            if name not in self.names:
                raise RequestError(
                    f"size {name!r}: this form is over {', '.join(self.names)}"
                    f"{hint(name, self.names)}"
                )
        for name in self.names:
            if name not in sizes:
                raise RequestError(f"size {name!r} is missing: give all of {', '.join(self.names)}")
        return tuple(int(sizes[name]) for name in self.names)

    def graph(self, **sizes: int) -> OpGraph:
        """The graph at these sizes, by formulas where it is proven, else by a trace.

        Raises RequestError where it is not proven and cannot be traced.
        """
        numbers = self.numbers(sizes)
        graph: OpGraph = self.regime(numbers).form.at(numbers)
        return graph

    def estimate(
        self,
        chip: str | Chip | None = None,
        execution: str | ExecutionModel | None = None,
        dtype: str | None = None,
        weights_dtype: str | None = None,
        kv_dtype: str | None = None,
        **sizes: int,
    ) -> Estimate:
        """The full estimate at one place, as `rooftrace.estimate` gives it of a trace there."""
        priced = reprice(self.graph(**sizes), dtype, weights_dtype, kv_dtype)
        return estimate(priced, chip, execution)

    def regime(self, numbers: Numbers) -> Regime:
        """The regime that these sizes are in; outside of all, one of a trace at these sizes.

        Raises RequestError where the step cannot be traced.
        """
        for regime in (*self.regimes, *filter(None, [self._single.get(numbers)])):
            if regime.holds(numbers):
                return regime
        if self.trace is None:
            raise RequestError(self._outside(numbers))
        form = GraphForm.fitted(self.names, {numbers: self.trace(numbers)})
        self._single[numbers] = Regime(form, numbers, numbers)
        return self._single[numbers]

    def _outside(self, numbers: Numbers) -> str:
        sizes = ", ".join(f"{n} {v:,}" for n, v in zip(self.names, numbers, strict=True))
        return (
            f"{sizes}: nothing is proven there; proven are {'; '.join(self.where())}; sweep the "
            "model itself for other sizes"
        )

    def where(self) -> list[str]:
        """The boxes of sizes that are proven, in words."""
        return [
            ", ".join(
                f"{name} {low:,}" + (f" to {high:,}" if high > low else "")
                for name, low, high in zip(self.names, regime.low, regime.high, strict=True)
            )
            for regime in self.regimes
        ]

    def proven(self, points: Points) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """At which points something is proven."""
        held = np.zeros(len(points), dtype=bool)
        for regime in self.regimes:
            held |= regime.inside(points.columns)
        return held

    # -- many points -------------------------------------------------------------------------------

    def plans(
        self, points: Points, conditions: Conditions, once: bool = False
    ) -> Iterator[tuple[PlanForm, np.ndarray[Any, np.dtype[np.int64]]]]:
        """Forms of the plan that hold at points, each with the indices of its points.

        once: see `PlanForms.at`.

        Raises RequestError for unproven points that cannot be traced, or are more than MOST_TRACED.
        """
        left = np.arange(len(points))
        for regime in self.regimes:
            inside = regime.inside([column[left] for column in points.columns])
            if inside.any():
                yield from self._within(regime, conditions, points, left[inside], once)
            left = left[~inside]
        outside = dict.fromkeys(
            zip(*(column[left].tolist() for column in points.columns), strict=True)
        )
        if len(outside) > MOST_TRACED:
            raise RequestError(
                f"{len(outside):,} of {len(points):,} points lie outside of what is proven: "
                f"{'; '.join(self.where()) or 'nothing'}; ask for fewer of them, for others, or "
                "allow more traces (most)"
            )
        for numbers in outside:
            regime = self.regime(numbers)
            here = regime.inside([column[left] for column in points.columns])
            yield from self._within(regime, conditions, points, left[here], once)

    def _within(
        self, regime: Regime, conditions: Conditions, points: Points, at: Any, once: bool
    ) -> Iterator[tuple[PlanForm, Any]]:
        conditions = conditions.on(regime)
        alike = conditions.of_plans
        key = (regime.low, regime.high, alike)
        if key not in self._plans:
            self._plans[key] = PlanForms(regime, alike)
        plans: PlanForms = self._plans[key]
        for form, inside in plans.at(points.where(at), once):
            yield form.under(conditions.execution), at[inside]


def points_of(names: Sequence[str], levels: Mapping[str, Sequence[int]]) -> Points:
    """The points of a grid: every combination of these values, the last name changing fastest."""
    grids = np.meshgrid(*(np.asarray(levels[n], dtype=np.int64) for n in names), indexing="ij")
    return Points({name: grid.ravel() for name, grid in zip(names, grids, strict=True)})


# -- evaluating ------------------------------------------------------------------------------------

Array = np.ndarray[Any, np.dtype[Any]]
Columns = dict[str, Array]

TOTALS = ("flops", "flops_causal", "flops_matrix", "bytes_hbm", "bytes_net", "peak_memory",
          "weights_memory", "kv_memory", "items")  # fmt: skip
"""Whole numbers that no chip changes: FLOP, byte, tokens or samples."""
SECONDS = ("t_est", "t_low", "t_high", "t_bound", "t_serial", "t_comp", "t_hbm", "t_net")
"""Seconds on a chip; t_low and t_high: between which 90 % of such steps are, nan without knobs."""
_AT_ONCE = 1 << 16
_CACHED = 1 << 12
"""Points that are timed at once, and with a cache, where no two kernels are equal."""


def evaluated(
    form: Form,
    points: Points,
    chips: Sequence[Chip],
    conditions: Conditions,
    once: bool = False,
) -> Columns:
    """The table: sizes, chip (place among `chips`), TOTALS, SECONDS, regime (place in REGIMES).

    One line for each point on each chip; all points on the first chip stand first.  t_exposed:
    seconds that wait for other chips.  regime_share: of t_est, of the largest regime.  peak:
    FLOP/s of the engine with most matrix FLOPs.  once: see
    `PlanForms.at`.  Raises as `Form.plans` and `time_step` do.
    """
    count, lines = len(points), len(chips)
    totals: Columns = {name: np.zeros(count, dtype=np.int64) for name in TOTALS}
    names = (*SECONDS, "t_exposed", "regime_share", "peak") if chips else ()
    timed: Columns = {name: np.full((lines, count), np.nan) for name in names}
    timed |= {"regime": np.zeros((lines, count), dtype=np.int8)} if chips else {}
    times = [{name: column[line] for name, column in timed.items()} for line in range(lines)]
    for plan, at in form.plans(points, conditions, once):
        for start in range(0, len(at), _AT_ONCE):
            part = at[start : start + _AT_ONCE]
            _fill(plan, points.where(part), part, chips, totals, times)
    table: Columns = {
        name: np.tile(column, lines)
        for name, column in zip(points.names, points.columns, strict=True)
    }
    table["chip"] = np.repeat(np.arange(lines, dtype=np.int16), count)
    table |= {name: np.tile(totals.pop(name), lines) for name in TOTALS}
    return table | {name: column.ravel() for name, column in timed.items()}


def _fill(
    plan: PlanForm,
    points: Points,
    at: Array,
    chips: Sequence[Chip],
    totals: Columns,
    times: Sequence[Columns],
) -> None:
    for name, column in _totals(plan, points).items():
        totals[name] = _wide(totals[name], column)
        totals[name][at] = column
    step: StepAmounts | None = None
    for chip, filled in zip(chips, times, strict=True):
        cache = plan.cache_of(chip)
        if cache is not None:
            for start in range(0, len(at), _CACHED):
                here = slice(start, start + _CACHED)
                some = points.where(np.arange(len(at))[here])
                timed = time_step(plan.step(some, cache), chip)
                _fill_times(timed, at[here], filled)
            continue
        step = step or plan.step(points)
        _fill_times(time_step(step, chip), at, filled)


def _fill_times(timed: TimesOverPoints, at: Array, filled: Columns) -> None:
    for name in (*SECONDS, "t_exposed"):
        if not name.endswith(("low", "high")):
            filled[name][at] = getattr(timed, name)
    interval = timed.interval
    if interval is not None:
        filled["t_low"][at], filled["t_high"][at] = interval
    shares = np.stack([timed.regime_seconds[name] for name in REGIMES])
    regime = shares.argmax(axis=0)
    filled["regime"][at] = regime
    with np.errstate(invalid="ignore"):
        filled["regime_share"][at] = shares.max(axis=0) / timed.t_est
    filled["peak"][at] = timed.heads.peak


def _wide(column: Array, numbers: Array) -> Array:
    """The column, with room for numbers beyond 64 bits where there are any."""
    return column.astype(object) if numbers.dtype == object != column.dtype else column


def _totals(plan: PlanForm, points: Points) -> Mapping[str, Array]:
    return {
        "flops": plan.flops(points),
        "flops_causal": plan.flops(points, lambda _, work: work.count == "useful"),
        "flops_matrix": plan.flops(
            points,
            lambda _, work: work.operation in MATRIX and work.count in ("useful",),
        ),
        "bytes_hbm": plan.bytes(points),
        "bytes_net": plan.bytes(points, lambda _, access: access.wire == "link"),
        "peak_memory": plan.peak(points),
        "weights_memory": plan.number("weights", points),
        "kv_memory": plan.number("kv", points),
        "items": plan.number("items", points),
    }


# -- Files of forms: the graph of each regime with the formulas of its numbers; read without torch -

SCHEMA = "rooftrace.form/1"
_KIND = FileKind("form", GraphFileError)
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, GraphError)


@dataclass(frozen=True, slots=True)
class _RegimeRecord:
    """A regime in a file."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    samples: list[tuple[int, ...]]
    proven: list[tuple[int, ...]]
    formulas: list[Any]
    draws: list[Any]
    slots: list[Any]
    template: dict[str, Any] = field(default_factory=dict)
    series: bool = False  # whether sequences of the graph grow with a size
    levels: list[list[int]] = field(default_factory=list)  # see `Regime`


@dataclass(frozen=True, slots=True)
class _FormRecord:
    """A form in a file."""

    schema: str
    title: str
    phase: str
    names: tuple[str, ...]
    regimes: list[dict[str, Any]]
    digest: str  # of the other fields


def form_bytes(title: str, phase: str, names: Sequence[str], regimes: Sequence[Regime]) -> bytes:
    """The bytes of the file of a form."""
    encoded = [_encoded(regime) for regime in regimes]
    data = {"schema": SCHEMA, "title": title, "phase": phase, "names": names, "regimes": encoded}
    return msgspec.json.encode({**data, "digest": _digest(title, phase, names, encoded)})


def _digest(title: str, phase: str, names: Sequence[str], regimes: Sequence[Any]) -> str:
    return hashlib.sha256(msgspec.json.encode([title, phase, names, regimes])).hexdigest()


def _encoded(regime: Regime) -> dict[str, Any]:
    form = regime.form
    return {
        "low": regime.low,
        "high": regime.high,
        "samples": form.samples,
        "proven": regime.proven,
        "levels": [list(values) for values in regime.levels],
        "formulas": form.formulas,
        "draws": form.draws,
        "slots": form.slots,
        "series": form.grows,
        "template": _plain(form.example),
    }


def _plain(graph: OpGraph) -> dict[str, Any]:
    """A graph as the plain data of a file of graphs."""
    data: dict[str, Any] = msgspec.json.decode(graphs_bytes({"form": graph}))["graphs"]["form"]
    return data


def read_form(path: str | os.PathLike[str]) -> tuple[str, str, tuple[str, ...], tuple[Regime, ...]]:
    """Title, phase, names and regimes of the form in a file.

    Raises FileNotFoundError, or GraphFileError for a file that is cut off, of another kind, or
    whose formulas do not give its graphs.
    """
    where = str(path)
    data = json_of(text_of(Path(path), _KIND), where, _KIND)
    file = record_of(_FormRecord, data if isinstance(data, dict) else {}, where, _KIND)
    if file.schema != SCHEMA:
        raise GraphFileError(f"{where}: schema is {file.schema!r:.60}, expected {SCHEMA!r}")
    try:
        digest = _digest(file.title, file.phase, file.names, file.regimes)
    except UnicodeEncodeError as problem:  # half of a surrogate pair
        raise _KIND.unreadable(where, problem) from None
    if file.digest != digest:
        raise GraphFileError(f"{where}: its digest is not that of its numbers; make the form again")
    regimes = tuple(
        _decoded(entry, file.names, f"regimes.{number}", where)
        for number, entry in enumerate(file.regimes)
    )
    return file.title, file.phase, file.names, regimes


def _decoded(entry: Mapping[str, Any], names: Sequence[str], place: str, where: str) -> Regime:
    record = record_of(_RegimeRecord, dict(entry), where, _KIND, place)
    template = decoded_graph(record.template, where, f"{place}.template")
    try:
        form = GraphForm(
            tuple(names),
            GraphForm.plain(template, record.series),
            tuple(msgspec.convert(record.formulas, list[Formula])),
            tuple(msgspec.convert(record.draws, list[leaves.Draw])),
            tuple(msgspec.convert(record.slots, list[leaves.Varying])),
            tuple(record.samples),
        )
        for numbers in (record.low, record.high, *record.samples, *record.proven):
            if len(numbers) != len(names) or min(numbers, default=1) < 1:
                raise FormulaError(f"{numbers}: expected a number for each of {', '.join(names)}")
        if not record.samples or form.at(record.samples[0]) != template:
            raise FormulaError("the formulas do not give the first graph")
        for numbers in (record.low, record.high):
            form.at(numbers).verify()
    except _DAMAGED as error:
        raise GraphFileError(f"{where}: {place}: a damaged form: {error}") from None
    levels = tuple(tuple(values) for values in record.levels)
    return Regime(form, record.low, record.high, tuple(record.proven), levels)


def looks_like_form(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is an existing file that claims to hold a form (by its first bytes)."""
    try:
        return Path(path).is_file() and SCHEMA.encode() in beginning(path, 200)
    except (OSError, ValueError, RequestError):
        return False
