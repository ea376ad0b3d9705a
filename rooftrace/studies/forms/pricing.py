"""From a form of a graph to forms of its plan under an execution; no trace, and no torch.

Which kernels a plan has depends on sizes: a small tensor is computed again, equal numbers of
elements share a kernel.  A plan made with tracked numbers says which comparisons led to its
kernels, and how each of its numbers follows from the sizes; where all comparisons come out the
same, the same kernels come out, with these numbers.
"""

from __future__ import annotations

import gzip
import hashlib
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rooftrace._processes import collector_off
from rooftrace._progress import tell
from rooftrace._writing import put_bytes
from rooftrace.costmodels.fusion import ExecutionModel, Plan, execution_model, own_joins
from rooftrace.costmodels.ops import all_rules
from rooftrace.costmodels.rewrites import reprice
from rooftrace.graph import OpGraph, graphs_bytes
from rooftrace.graph.formulas import (
    Formula,
    FormulaError,
    GraphForm,
    Guard,
    RecordForm,
    Regime,
    StructureError,
    Track,
    leaves,
)
from rooftrace.studies.forms.kernelforms import (
    Array,
    Places,
    PlanNumbers,
    Points,
    numbers_of,
    remembering,
)
from rooftrace.studies.forms.planform import PlanForm
from rooftrace.tracer.phases import TraceCache

_CHECKS = 2
"""Plans at other sizes that a form has to equal."""
_SAMPLES = (2, 2)
"""Plans that a form is fitted to where not all is tracked, and further ones for each open size."""
_FEWEST = 4
"""Points that are priced one by one, if no others follow: a form takes as many plans."""
_TRIED = 4000
"""Sizes that are drawn to find those of checks."""


@dataclass(frozen=True)
class Conditions:
    """Execution and precisions of a price, without the chip."""

    execution: ExecutionModel
    dtype: str | None = None
    weights_dtype: str | None = None
    kv_dtype: str | None = None

    @staticmethod
    def of(execution: str | ExecutionModel, *precisions: str | None) -> Conditions:
        """The conditions of an execution by name, and precisions."""
        return Conditions(execution_model(execution), *precisions)

    @property
    def of_plans(self) -> Conditions:
        """These conditions without constants that only times depend on: plans are the same."""
        return replace(self, execution=self.execution.untimed)

    def plan(self, graph: OpGraph, savings: bool = True) -> Plan:
        """The plan of a graph.  savings: see `Plan.each`."""
        return Plan.each(self.repriced(graph), [self.execution], savings=savings)[0]

    def rewritten(self, graph: OpGraph) -> OpGraph:
        """The graph that a plan of `graph` prices and groups."""
        return Plan.rewritten(self.repriced(graph), self.execution)

    def on(self, regime: Regime) -> Conditions:
        """These conditions; in place of a mixed execution that which graphs of a regime have."""
        if self.execution.dispatch != "mixed":
            return self
        return replace(self, execution=self.plan(regime.form.at(regime.low)).execution)

    def numbers(self, graph: OpGraph, with_memory: bool = True) -> PlanNumbers:
        """The numbers of the plan of a graph."""
        with collector_off.used():  # a plan is many objects, of which none is garbage meanwhile
            return numbers_of(self.plan(graph, savings=False), with_memory)

    def repriced(self, graph: OpGraph) -> OpGraph:
        """The graph in these precisions."""
        return reprice(graph, self.dtype, self.weights_dtype, self.kv_dtype)


@dataclass(frozen=True)
class _Cell:
    """Regions in each of which comparisons come out the same, and the form of the plan in all."""

    regions: tuple[tuple[Guard, ...], ...]
    form: PlanForm
    wide: bool = True  # whether the form may hold elsewhere, too


class _KeptCell(msgspec.Struct, frozen=True):
    """A cell in a file; see `RecordForm` and `Regime`."""

    regions: tuple[tuple[Guard, ...], ...]
    wide: bool
    template: PlanNumbers
    formulas: tuple[Formula, ...]
    draws: tuple[leaves.Draw, ...]
    slots: tuple[leaves.Varying, ...]
    samples: tuple[leaves.Numbers, ...]

    @staticmethod
    def of(cell: _Cell) -> _KeptCell:
        """The record of a cell."""
        form = cell.form.form
        names = ("template", "formulas", "draws", "slots", "samples")
        return _KeptCell(cell.regions, cell.wide, *(getattr(form, name) for name in names))

    def form(self, sizes: tuple[str, ...]) -> RecordForm:
        """The form of its plan.  Raises ValueError where it does not give the first sample."""
        form = RecordForm(sizes, self.template, self.formulas, self.draws, self.slots, self.samples)
        if form.at(self.samples[0]) != self.template:
            raise ValueError(self.samples[0])
        return form


def _file_of(regime: Regime, conditions: Conditions) -> Path | None:
    """The file beside the traces that keeps the cells of a form, after the digest of the rest.

    None where nothing is kept, as where rules or joins of others may change a plan.
    """
    if own_joins() or any(rule.is_own for rule in all_rules()):
        return None
    form = regime.form
    numbers = form.samples, form.formulas, form.draws, form.slots, form.grows, conditions
    graph = graphs_bytes({"form": form.example})
    return TraceCache.usual().derived(
        graph, msgspec.json.encode((numbers, regime.low, regime.high))
    )


def _read(file: Path) -> list[_KeptCell]:
    """The cells in a file; none where it is damaged, which then goes."""
    try:
        digest, _, packed = file.read_bytes().partition(b"\n")
        if digest != _digest(packed):
            raise ValueError(file)
        return msgspec.json.decode(gzip.decompress(packed), type=list[_KeptCell])
    except (OSError, EOFError, zlib.error, ValueError):
        with suppress(OSError):
            file.unlink()
        return []


def _write(file: Path, cells: Sequence[_KeptCell]) -> None:
    packed = gzip.compress(msgspec.json.encode(cells), 1, mtime=0)
    with suppress(OSError):  # a full disk keeps nothing
        put_bytes(file, _digest(packed) + b"\n" + packed)


def _digest(packed: bytes) -> bytes:
    return hashlib.sha256(packed).hexdigest().encode()


class PlanForms:
    """The plans of a graph's regime under some conditions, fitted on demand."""

    def __init__(self, regime: Regime, conditions: Conditions) -> None:
        self.regime, self.conditions = regime, conditions
        self._draws = tuple(draws_of(regime.form))
        self._cells: list[_Cell] = []
        self._known: dict[leaves.Numbers, PlanNumbers] = {}
        self._rewritten: list[tuple[tuple[Guard, ...], GraphForm]] = []
        self._random = random.Random(repr((regime.low, regime.high)))
        self._file = _file_of(regime, conditions)
        if self._file is not None and self._file.is_file():
            with suppress(ValueError, LookupError, TypeError, ArithmeticError):  # damaged
                self._cells = [self._known_cell(kept) for kept in _read(self._file)]

    def at(self, points: Points, once: bool = False) -> Iterator[tuple[PlanForm, Places]]:
        """The forms that hold at points of the regime, each with the indices of its points.

        once: no others will be asked for; points fewer than the plans that a form takes are priced
        one by one.
        """
        left, parts = np.arange(len(points)), dict[int, list[Places]]()

        def take(place: int, guards: Sequence[Guard]) -> None:
            nonlocal left
            held = _holding(guards, points, left)
            if held.any():
                parts.setdefault(place, []).append(left[held])
            left = left[~held]

        for place, cell in enumerate(self._cells):
            for guards in cell.regions:
                take(place, guards)
        fewest = _FEWEST if once else 0
        is_new = len(left) > fewest
        while len(left) > fewest:
            start = int(left[self._random.randrange(len(left))])
            place = self._region(tuple(int(c[start]) for c in points.columns), points, left)
            take(place, self._cells[place].regions[-1])
        if is_new and self._file is not None:
            _write(self._file, [_KeptCell.of(cell) for cell in self._cells])
        for place, several in parts.items():
            yield self._cells[place].form, np.concatenate(several)
        for numbers, alone in zip(_numbers(points, left), left, strict=True):
            yield self._single(numbers).form, np.array([alone])

    def _known_cell(self, kept: _KeptCell) -> _Cell:
        form = self._plan_form(kept.form(self.regime.form.sizes))
        return _Cell(kept.regions, form, kept.wide)

    def _plan_form(self, form: RecordForm) -> PlanForm:
        return PlanForm(form, self.conditions.execution, partial(self._plan, form.samples[0]))

    def _region(self, numbers: leaves.Numbers, points: Points, left: Places) -> int:
        """Find the region around these sizes; return the place of its cell, whose last one it is.

        A known form with the same expressions holds there, too.
        """
        tell(f"pricing around {_named(points.names, numbers)}")
        guards: tuple[Guard, ...] = ()
        form = None
        if self.regime.low != self.regime.high:
            guards, form = self._tracked(numbers)
            same = self._known_place(lambda known: form is not None and _equal(known, form))
            if same is None:
                others = self._others(numbers, guards, points, left)
                if form is None or not self._is_at(form, others[:_CHECKS] or [numbers]):
                    tried = [numbers, *others]
                    same = self._known_place(partial(self._holds_at, tried[: _samples(tried)]))
                    form = self._fitted(tried) if same is None else self._cells[same].form.form
                    guards = (*guards, *self._unvaried(form)) if form is not None else ()
            if same is not None:
                cell = self._cells[same]
                self._cells[same] = _Cell((*cell.regions, guards), cell.form)
                return same
        cell = self._single(numbers) if form is None else _Cell((guards,), self._plan_form(form))
        self._cells.append(cell)
        return len(self._cells) - 1

    def _known_place(self, holds: Callable[[RecordForm], bool]) -> int | None:
        """The place of the first cell whose form may hold elsewhere, and does by this test."""
        cells = enumerate(self._cells)
        return next((at for at, cell in cells if cell.wide and holds(cell.form.form)), None)

    def _tracked(self, numbers: leaves.Numbers) -> tuple[tuple[Guard, ...], RecordForm | None]:
        """The comparisons that lead to the plan at these sizes, and the form of its numbers.

        None where a number follows in a way that no slot has.
        """
        track = Track()
        with collector_off.used():
            graph = self._graph(numbers, track)
            plan = Plan.of_rewritten(graph, self.conditions.execution)
            told = numbers_of(plan, with_memory=False)
            track.on = False  # which moment has most bytes is checked at other sizes
            told = remembering(told, plan)
            form = None
            with suppress(StructureError):
                form = RecordForm.of_tracked(self.regime.form.sizes, told, numbers)
        return tuple(track.guards), form

    def _fitted(self, several: Sequence[leaves.Numbers]) -> RecordForm | None:
        """The form of plans at these sizes, where not all numbers are tracked: `0.5 * size` of a
        rule is none.  None where it could not be proven."""
        count = _samples(several)
        if len(several) <= count:
            return None
        records = {where: self._numbers_at(where) for where in several[:count]}
        try:
            form = RecordForm.fitted(self.regime.form.sizes, records, self._draws)
        except StructureError:
            return None
        return form if self._is_at(form, several[count : 2 * count]) else None

    def _unvaried(self, form: RecordForm) -> Iterator[Guard]:
        """Guards on sizes that are open and equal in all samples: how numbers follow from them is
        unknown."""
        spans = zip(self.regime.low, self.regime.high, strict=True)
        samples = zip(*form.samples, strict=True)
        for place, ((low, high), values) in enumerate(zip(spans, samples, strict=True)):
            if low < high and len(set(values)) == 1:
                yield _is_number(place, values[0])

    def _others(
        self, numbers: leaves.Numbers, guards: Sequence[Guard], points: Points, left: Places
    ) -> list[leaves.Numbers]:
        """Sizes where these guards hold: the least and the most of each, then others, at first with
        only new numbers."""
        some = left if len(left) <= _TRIED else left[:: len(left) // _TRIED]
        near = _near(self.regime, numbers)
        pool = [
            *_numbers(points, some[_holding(guards, points, some)]),
            *_numbers(near, np.flatnonzero(_holding(guards, near, np.arange(len(near))))),
        ]
        self._random.shuffle(pool)
        wanted = dict.fromkeys([*_ends(pool), *_spread([numbers, *pool])])
        return [where for where in wanted if where != numbers]

    def _single(self, numbers: leaves.Numbers) -> _Cell:
        """The cell of these sizes alone."""
        alone = {numbers: self._numbers_at(numbers)}
        form = self._plan_form(RecordForm.fitted(self.regime.form.sizes, alone))
        return _Cell((tuple(map(_is_number, range(len(numbers)), numbers)),), form, wide=False)

    def _holds_at(self, sizes: Sequence[leaves.Numbers], form: RecordForm) -> bool:
        """Whether a known form may hold at the first of these sizes, and gives the plans there."""
        return _all_hold(tuple(self._unvaried(form)), sizes[0]) and self._is_at(form, sizes)

    def _is_at(self, form: RecordForm, sizes: Sequence[leaves.Numbers]) -> bool:
        """Whether a form gives the plan at all of these sizes."""
        try:
            return all(form.at(where) == self._numbers_at(where) for where in sizes)
        except FormulaError:
            return False

    def _plan(self, numbers: leaves.Numbers) -> Plan:
        """The plan at these sizes."""
        return self.conditions.plan(self.regime.form.at(numbers), savings=False)

    def _graph(self, numbers: leaves.Numbers, track: Track) -> OpGraph:
        """The graph that is priced and grouped, of tracked numbers.

        It is rewritten once for all sizes where the comparisons of rewrites come out the same.
        """
        for guards, form in self._rewritten:
            if _all_hold(guards, numbers):
                track.guards.update(dict.fromkeys(guards))
                return form.at(numbers, track)
        made = self.conditions.rewritten(self.regime.form.at(numbers, track))
        with suppress(StructureError):
            form = GraphForm.of_tracked(self.regime.form.sizes, made, numbers)
            self._rewritten.append((tuple(track.guards), form))
        return made

    def _numbers_at(self, numbers: leaves.Numbers) -> PlanNumbers:
        """The numbers of the plan at these sizes; each is priced once."""
        if numbers not in self._known:
            self._known[numbers] = self.conditions.numbers(self.regime.form.at(numbers))
        return self._known[numbers]


def _ends(pool: Sequence[leaves.Numbers]) -> list[leaves.Numbers]:
    """Of each size those with the least and the most of it: a number that steps with a size, or is
    reached by many rows, looks like a constant elsewhere."""
    places = range(len(pool[0])) if pool else ()
    return [end(pool, key=itemgetter(at)) for at in places for end in (min, max)]


def _samples(several: Sequence[leaves.Numbers]) -> int:
    """Plans that a form of these sizes is fitted to."""
    first, each = _SAMPLES
    return first + each * sum(len(set(column)) > 1 for column in zip(*several, strict=True))


def _near(regime: Regime, numbers: leaves.Numbers) -> Points:
    """Sizes around some: close by, and anywhere in the regime."""
    rng = np.random.default_rng(sum(numbers))
    columns = {}
    for name, at, low, high in zip(
        regime.form.sizes, numbers, regime.low, regime.high, strict=True
    ):
        close = at + rng.integers(-8, 9, _TRIED // 2)
        ends = np.log(max(low, 1)), np.log(max(high, 1) + 1)
        anywhere = np.exp(rng.uniform(*ends, _TRIED // 2)).astype(np.int64)
        both = np.concatenate([close, anywhere])
        columns[name] = np.clip(both, low, high)
    near = Points(columns)
    return near.where(np.flatnonzero(regime.inside(near.columns)))


def _spread(candidates: Sequence[leaves.Numbers]) -> Iterator[leaves.Numbers]:
    """Candidates in turns: each that has only new numbers first, then those with some new ones."""
    seen: list[set[int]] = [set() for _ in (candidates[0] if candidates else ())]
    left = list(candidates)
    for least in range(len(seen), 0, -1):
        rest = []
        for numbers in left:
            new = sum(n not in before for n, before in zip(numbers, seen, strict=True))
            if new >= least:
                for number, before in zip(numbers, seen, strict=True):
                    before.add(number)
                yield numbers
            else:
                rest.append(numbers)
        left = rest
    yield from left


def _numbers(points: Points, at: Places) -> list[leaves.Numbers]:
    """The sizes at some of the points."""
    return list(zip(*(column[at].tolist() for column in points.columns), strict=True))


def _holding(guards: Sequence[Guard], points: Points, chosen: Places) -> Array:
    """At which of these points all guards hold."""
    held = np.ones(len(chosen), dtype=bool)
    by_sizes: dict[frozenset[int], list[Guard]] = {}
    for guard in guards:
        by_sizes.setdefault(guard.number.symbols, []).append(guard)
    part = points if len(chosen) == len(points) else points.where(chosen)
    for sizes, several in by_sizes.items():
        columns, at = part.part(sizes)
        with np.errstate(divide="ignore", invalid="ignore"):
            here = np.ones(max(map(len, columns)), dtype=bool)
            drawn: dict[Any, Array] = {}
            for guard in several:
                here &= guard.holds(columns, drawn)
        held &= here if at is None else here[at]
    return held


def _equal(form: RecordForm, other: RecordForm) -> bool:
    """Whether two forms have the same expressions."""
    try:
        return (
            _expressions(form) == _expressions(other)
            and form.at(other.samples[0]) == other.template
        )
    except FormulaError:
        return False


def _expressions(form: RecordForm) -> dict[leaves.Path, tuple[Any, ...]]:
    """Kind, formula and draw of each number that sizes change, by its path."""
    return {
        slot.path: (
            slot.kind,
            *(form.formulas[place] for place in slot.formulas),
            form.draws[slot.draw] if slot.draw >= 0 else None,
        )
        for slot in form.slots
    }


def _all_hold(guards: Sequence[Guard], numbers: leaves.Numbers) -> bool:
    """Whether all guards hold at these sizes."""
    columns = [np.array([number]) for number in numbers]
    return all(guard.holds(columns)[0] for guard in guards)


def _is_number(place: int, number: int) -> Guard:
    difference = Formula.total([(1, Formula.symbol(place)), (-1, Formula.constant(number))])
    return Guard("==", difference, True)


def _named(names: Sequence[str], numbers: Sequence[int]) -> str:
    return ", ".join(f"{name} {number:,}" for name, number in zip(names, numbers, strict=True))


def draws_of(form: GraphForm) -> Iterator[leaves.Draw]:
    """Draws that the prices of a graph may depend on: the graph's, and those of uniform indices."""
    yield from form.draws
    graph = form.example
    prefix = ("graph",)  # of the paths of a graph with series
    varying = {s.path[1:] if s.path[:1] == prefix else s.path: s for s in form.slots}
    for op in graph.ops:
        classes = op.facts.get("uniform_over")
        if classes is None:
            continue

        def size_of(value: int, place: int) -> Formula:
            slot = varying.get(("values", value, "shape", place))
            size = graph.values[value].shape[place]
            return form.formulas[slot.formulas[0]] if slot else Formula.constant(size)

        for value in op.inputs:
            if graph.values[value].dtype not in ("int64", "int32"):
                continue
            elements = Formula.constant(1)
            for place in range(len(graph.values[value].shape)):
                elements = elements * size_of(value, place)
            alone = op.facts.get("own_rows")
            function, chosen = ("distinct", 1) if alone is None else ("rows", int(alone))
            parts = Formula.constant(chosen), Formula.constant(classes)
            yield leaves.Draw(function, elements, *parts)
            for made in op.outputs:
                if graph.values[made].shape:
                    yield leaves.Draw(function, elements, *parts, size_of(made, 0))
