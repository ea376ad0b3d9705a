"""A full factorial grid over a step: every combination of levels once, and effects of factors.

Factors are sizes (through forms), settings of the source (a form for each combination), numbers of
the chip and knobs by name, chips, executions and precisions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.errors import RequestError, one_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import (
    UnitError,
    format_capacity,
    format_count,
    format_flops,
    format_time,
    format_traffic,
    parse,
)
from rooftrace.studies.advice import NamedNumbers, UnknownNumberError
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sensitivity.designs import Factorial, factorial
from rooftrace.studies.sweeps.evaluating import Form, evaluated

if TYPE_CHECKING:
    import pandas

SETTING, EXECUTION, DTYPE, CHIP, NUMBER, SIZE = (
    "setting", "execution", "dtype", "chip", "number", "size"
)  # fmt: skip
PRECISIONS = ("dtype", "weights_dtype", "kv_dtype")
RESPONSES = ("t_est", "t_bound", "t_comp", "t_hbm", "t_net", "flops", "bytes_hbm", "peak_memory",
             "items_per_s")  # fmt: skip
"""Responses of effects: seconds, FLOP, byte, items per second."""
MOST_CELLS = 1_000_000
_WRITTEN: Mapping[str, Callable[[float], str]] = {
    "flops": format_flops, "bytes_hbm": format_traffic, "peak_memory": format_capacity
}  # fmt: skip
_COLUMNS = ("t_est", "t_bound", "t_comp", "t_hbm", "t_net", "flops", "bytes_hbm", "peak_memory",
            "items", "regime")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A level of a number: a value, or a factor on the number."""

    label: str
    value: float
    relative: bool = False

    def of(self, before: float) -> float:
        """The number after the change."""
        return before * self.value if self.relative else self.value

    @staticmethod
    def parsed(name: str, text: str, unit: str = "") -> LevelChange:
        """From "x0.5", "4.8 TB/s" or "0.9".  Raises UnknownNumberError for anything else."""
        plain = text.strip()
        try:
            number = float(plain[1:] if plain[:1] == "x" else plain)
            if math.isfinite(number) and number > 0:
                return LevelChange(plain, number, plain[:1] == "x")
        except ValueError:
            pass
        try:
            if unit:
                return LevelChange(plain, parse(plain, unit))
        except UnitError:
            pass
        example = f", a quantity in {unit}" if unit else ""
        raise UnknownNumberError(
            f"{name}={text}: expected a number above 0{example}, or a factor such as x0.5"
        )


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a grid.

    names: one or several that change together; levels: the values of the names.  labels: the levels
    in words or numbers, for effects and tables.
    """

    name: str
    kind: str
    names: tuple[str, ...]
    levels: tuple[tuple[Any, ...], ...]
    labels: tuple[Any, ...]

    @staticmethod
    def alone(name: str, kind: str, levels: Sequence[Any], labels: Sequence[Any] = ()) -> Factor:
        """A factor of one name."""
        return Factor(name, kind, (name,), tuple((v,) for v in levels), tuple(labels or levels))


@dataclass(frozen=True, kw_only=True, repr=False)
class GridEffects(Plain, Shown):
    """The effects of the factors of a grid on one response, ranked, and the grid itself.

    levels: labels by factor.  columns: arrays of the shape of the levels: RESPONSES and `regime`
    (place in REGIMES).  log: effects are of the logarithm of the response.
    """

    title: str
    phase: str
    chip: str
    execution: str
    response: str
    log: bool
    levels: Mapping[str, tuple[Any, ...]]
    effects: Factorial
    columns: Mapping[str, Any] = field(repr=False)

    def __repr__(self) -> str:
        first = ", ".join(f"{e.factor} {e.share:.0%}" for e in self.effects.main[:3])
        return short(self, f"{self.title}, {self.phase}, {len(self):,} points: {first}")

    def __len__(self) -> int:
        return int(self.columns["t_est"].size)

    def frame(self) -> pandas.DataFrame:
        """A line for each point: its levels, responses in SI units, and its regime."""
        import pandas

        grids = np.meshgrid(*(np.arange(len(v)) for v in self.levels.values()), indexing="ij")
        columns: dict[str, Any] = {}
        for (name, labels), grid in zip(self.levels.items(), grids, strict=True):
            columns[name] = [labels[level] for level in grid.ravel()]
        for name in RESPONSES:
            columns[name] = self.columns[name].ravel()
        columns["regime"] = [REGIMES[int(place)] for place in self.columns["regime"].ravel()]
        return pandas.DataFrame(columns)

    def written(self, number: float) -> str:
        """A number of the response with its unit."""
        if self.response.startswith("t_"):
            return format_time(number)
        return _WRITTEN.get(self.response, format_count)(number)

    def written_mean(self, mean: float) -> str:
        """A mean of effects with its unit; of logarithms, the geometric mean."""
        return self.written(math.exp(mean) if self.log else mean)

    def to_rows(self) -> list[dict[str, Any]]:
        """The effects as rows of a CSV file, ranked."""
        return self.effects.to_rows()

    @property
    def _cells(self) -> Any:
        return self.columns[self.response]

    KEYS = (
        "title phase chip execution response log points=__len__ least=_cells.min "
        "largest=_cells.max levels effects=to_rows share_left=effects.share_left"
    )


def grid_effects(
    factors: Sequence[Factor],
    sizes: Mapping[str, int],
    chip: Chip,
    conditions: Conditions,
    form_of: Callable[[Mapping[str, Any]], Form],
    response: str = "t_est",
    log: bool = False,
) -> GridEffects:
    """Main effects and interactions of pairs over every combination of the factors' levels.

    sizes, chip, conditions: those where no factor says them.  form_of: gives the form under
    settings of the source.  response: one of RESPONSES; log: effects of its logarithm, so that
    factors that multiply have no interactions.
    Raises RequestError for no factor, a response that there is not, and a grid too large.
    """
    _check(factors, response)
    ordered = sorted(factors, key=lambda factor: _ORDER.index(factor.kind))
    shape = tuple(len(factor.levels) for factor in ordered)
    by_kind = {kind: [f for f in ordered if f.kind == kind] for kind in _ORDER}
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    form: Form | None = None
    for settings in _combined(by_kind[SETTING]):
        form = form_of(settings)
        points = _points(form, sizes, by_kind[SIZE])
        for there, used in _cases(conditions, chip, by_kind):
            table = evaluated(form, points, [used], there)
            for name, parts in columns.items():
                parts.append(np.asarray(table[name], dtype=float))
    assert form is not None
    grid = {name: np.concatenate(parts).reshape(shape) for name, parts in columns.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        grid["items_per_s"] = grid["items"] / grid["t_est"]
    axes = [ordered.index(factor) for factor in factors]
    grid = {name: np.transpose(column, axes) for name, column in grid.items()}
    levels = {factor.name: factor.labels for factor in factors}
    cells = grid[response]
    if log and (cells <= 0).any():
        raise RequestError(f"{response} is 0 at some point: it has no logarithm; leave --log out")
    return GridEffects(
        title=form.title,
        phase=form.phase,
        chip=chip.name,
        execution=conditions.execution.name,
        response=response,
        log=log,
        levels=levels,
        effects=factorial(levels, np.log(cells) if log else cells),
        columns=grid,
    )


_ORDER = (SETTING, EXECUTION, DTYPE, CHIP, NUMBER, SIZE)


def _check(factors: Sequence[Factor], response: str) -> None:
    if not factors:
        raise RequestError("the grid is empty: name at least one factor, as batch=1,8,64")
    names = [factor.name for factor in factors]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise RequestError(f"factor {doubled!r} stands twice; give all of its levels at once")
    if response not in RESPONSES:
        raise RequestError(f"response {response!r}: {one_of(response, RESPONSES)}")
    for factor in factors:
        if len(set(factor.labels)) != len(factor.labels):
            raise RequestError(
                f"{factor.name}={','.join(map(str, factor.labels))}: a level stands there twice"
            )
    cells = math.prod(len(factor.levels) for factor in factors)
    if cells > MOST_CELLS:
        raise RequestError(f"{cells:,} points: expected {MOST_CELLS:,} at most; take fewer levels")


def _combined(factors: Sequence[Factor]) -> Iterator[dict[str, Any]]:
    """The values of the names in every combination of levels, the last factor changing fastest."""
    for levels in itertools.product(*(factor.levels for factor in factors)):
        yield {
            name: value
            for factor, values in zip(factors, levels, strict=True)
            for name, value in zip(factor.names, values, strict=True)
        }


def _cases(
    usual: Conditions, chip: Chip, by_kind: Mapping[str, Sequence[Factor]]
) -> Iterator[tuple[Conditions, Chip]]:
    """Every combination of execution, precisions, chip and numbers."""
    kinds = (EXECUTION, DTYPE, CHIP)
    for chosen in _combined([factor for kind in kinds for factor in by_kind[kind]]):
        used = chosen.pop("chip", chip)
        conditions = replace(usual, **chosen)
        for changes in _combined(by_kind[NUMBER]):
            if not changes:
                yield conditions, used
                continue
            numbers = NamedNumbers.of(used, conditions.execution)
            values = {
                name: change.of(numbers.values[name])
                for prefix, change in changes.items()
                for name in numbers.named(prefix)
            }
            other = numbers.changed(values)
            knobs_too = any(not name.startswith("chip.") for name in values)
            there = replace(conditions, execution=other.execution) if knobs_too else conditions
            yield there, other.chip


def _points(form: Form, sizes: Mapping[str, int], factors: Sequence[Factor]) -> Points:
    """The points of a form over the factors of size; other sizes stay as they are."""
    rows = [form.numbers({**sizes, **chosen}) for chosen in _combined(factors)]
    return Points(dict(zip(form.names, (list(c) for c in zip(*rows, strict=True)), strict=True)))
