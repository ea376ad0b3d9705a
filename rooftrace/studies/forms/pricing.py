"""From a form of a graph to forms of its plan under an execution; no trace, and no torch.

Which kernels a plan has depends on sizes: a small tensor is computed again, equal numbers of
elements share a kernel.  A plan made with tracked numbers says which comparisons led to its
kernels; where all of them come out the same, the same kernels come out, and their numbers are
fitted there.
"""

from __future__ import annotations

import gzip
import hashlib
import random
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

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
from rooftrace.studies.forms.kernelforms import Array, Places, PlanNumbers, Points, numbers_of
from rooftrace.studies.forms.planform import PlanForm
from rooftrace.tracer.phases import TraceCache

Fitted = TypeVar("Fitted")
_SAMPLES = (2, 2)
"""Plans that a form is fitted to, and further ones for each open size; more where a number is left
unfit."""
_MORE = 4
_CHECKS = 3
"""Further plans that it has to equal."""
_TRIED = 4000
"""Sizes that are drawn to find samples."""
_REWRITTEN = 3
"""Graphs that are rewritten one by one before the form of the rewritten graph is looked for."""


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
        return Plan.each(self._repriced(graph), [self.execution], savings=savings)[0]

    def rewritten(self, graph: OpGraph) -> OpGraph:
        """The graph that a plan of `graph` prices and groups."""
        return Plan.rewritten(self._repriced(graph), self.execution)

    def on(self, regime: Regime) -> Conditions:
        """These conditions; in place of a mixed execution that which graphs of a regime have."""
        if self.execution.dispatch != "mixed":
            return self
        return replace(self, execution=self.plan(regime.form.at(regime.low)).execution)

    def numbers(self, graph: OpGraph, with_memory: bool = True) -> PlanNumbers:
        """The numbers of the plan of a graph."""
        with collector_off.used():  # a plan is many objects, of which none is garbage meanwhile
            return numbers_of(self.plan(graph, savings=False), with_memory)

    def _repriced(self, graph: OpGraph) -> OpGraph:
        return reprice(graph, self.dtype, self.weights_dtype, self.kv_dtype)


@dataclass(frozen=True)
class _Cell:
    """Regions in each of which comparisons come out the same, and the form of the plan in all."""

    regions: tuple[tuple[Guard, ...], ...]
    form: PlanForm
    wide: bool = True  # whether the form may hold elsewhere, too


@dataclass(frozen=True)
class _Rewritten:
    """Where comparisons of rewrites come out the same, and the form of the rewritten graph there.

    form: None where none is proven.
    """

    guards: tuple[Guard, ...]
    form: GraphForm | None


class _KeptCell(msgspec.Struct, frozen=True):
    """A cell in a file; see `RecordForm` and `Regime`."""

    regions: tuple[tuple[Guard, ...], ...]
    wide: bool
    template: PlanNumbers
    formulas: tuple[Formula, ...]
    draws: tuple[leaves.Draw, ...]
    slots: tuple[leaves.Varying, ...]
    samples: tuple[leaves.Numbers, ...]
    proven: tuple[leaves.Numbers, ...]

    @staticmethod
    def of(cell: _Cell) -> _KeptCell:
        """The record of a cell."""
        form = cell.form.form
        names = ("template", "formulas", "draws", "slots", "samples")
        fields = {name: getattr(form, name) for name in names}
        return _KeptCell(cell.regions, cell.wide, **fields, proven=cell.form.regime.proven)

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
        self._random = random.Random(repr((regime.low, regime.high)))
        self._file = _file_of(regime, conditions)
        if self._file is not None and self._file.is_file():
            with suppress(ValueError, LookupError, TypeError, ArithmeticError):  # damaged
                self._cells = [self._known_cell(kept) for kept in _read(self._file)]
        self._rewritten: list[_Rewritten] = []
        self._rewrites = 0  # of single graphs

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
        fewest = _SAMPLES[0] + _SAMPLES[1] * len(points.names) + _CHECKS if once else 0
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
        form = self._plan_form(kept.form(self.regime.form.sizes), kept.proven)
        return _Cell(kept.regions, form, kept.wide)

    def _plan_form(self, form: RecordForm, proven: Sequence[leaves.Numbers]) -> PlanForm:
        first, alone = form.samples[0], len(form.samples) == 1
        low, high = (first, first) if alone else (self.regime.low, self.regime.high)
        regime = Regime(form, low, high, tuple(proven))
        return PlanForm(regime, self.conditions.execution, partial(self._plan, first))

    def _region(self, numbers: leaves.Numbers, points: Points, left: Places) -> int:
        """Find the region around these sizes; return the place of its cell, whose last one it is.

        A known form holds there, too, if it gives its plans where it is tried.
        """
        tell(f"pricing around {_named(points.names, numbers)}")
        closed = self.regime.low == self.regime.high
        guards = None if closed else self._guards_at(numbers)
        if guards is not None:
            some = left if len(left) <= _TRIED else left[:: len(left) // _TRIED]
            inside = _numbers(points, some[_holding(guards, points, some)])
            tried = self._tried(numbers, [*inside, *self._around(numbers, guards)])
            for place, cell in enumerate(self._cells):
                form = self._fits(cell.form, tried) if cell.wide else None
                region = (*guards, *self._unvaried(form.form)) if form else ()
                if form is not None and _all_hold(region, numbers):
                    self._cells[place] = _Cell((*cell.regions, region), form)
                    return place
            form = self._fitted(numbers, guards, inside, self._form_of, self._is)
            if form is not None:
                self._cells.append(_Cell(((*guards, *self._unvaried(form.form)),), form))
                return len(self._cells) - 1
        self._cells.append(self._single(numbers))
        return len(self._cells) - 1

    def _tried(
        self, numbers: leaves.Numbers, pool: Sequence[leaves.Numbers]
    ) -> list[leaves.Numbers]:
        """Sizes of a region at which a form is tried: one more than the terms of a number that is
        a line over each open size, among them those with most and fewest rows."""
        count = 1 + 2 ** sum(len(set(column)) > 1 for column in zip(*pool, strict=True))
        others = self._random.sample(pool, min(count, len(pool)))
        return list(dict.fromkeys([numbers, *_edges(self._draws, pool), *others]))[:count]

    def _around(self, numbers: leaves.Numbers, guards: Sequence[Guard]) -> list[leaves.Numbers]:
        """Some sizes of the regime where these guards hold, around `numbers` and far from them."""
        near = _near(self.regime, numbers)
        return _numbers(near, np.flatnonzero(_holding(guards, near, np.arange(len(near)))))

    def _unvaried(self, form: RecordForm) -> Iterator[Guard]:
        """Guards on sizes that are open and equal in all samples: how numbers follow from them is
        unknown."""
        spans = zip(self.regime.low, self.regime.high, strict=True)
        samples = zip(*form.samples, strict=True)
        for place, ((low, high), values) in enumerate(zip(spans, samples, strict=True)):
            if low < high and len(set(values)) == 1:
                yield _is_number(place, values[0])

    def _single(self, numbers: leaves.Numbers) -> _Cell:
        """The cell of these sizes alone."""
        alone = {numbers: self._numbers_at(numbers)}
        form = self._plan_form(RecordForm.fitted(self.regime.form.sizes, alone), ())
        return _Cell((tuple(map(_is_number, range(len(numbers)), numbers)),), form, wide=False)

    def _fits(self, form: PlanForm, tried: Collection[leaves.Numbers]) -> PlanForm | None:
        """A form that gives the plan at these sizes, too; None if they have other kernels.

        Where the known one does not, it is fitted anew with them: its samples may reach all
        classes, whose number then looks like a constant.
        """
        known = form
        for where in tried:
            if not self._is(form, where):
                try:
                    form = self._form_of((*form.regime.form.samples, where), form.regime.proven)
                except StructureError:
                    return None
        proven = dict.fromkeys((*form.regime.proven, *tried))
        if form is not known and not all(self._is(form, where) for where in proven):
            return None
        return self._plan_form(form.form, tuple(proven))

    def _form_of(
        self, samples: Sequence[leaves.Numbers], proven: Sequence[leaves.Numbers]
    ) -> PlanForm:
        """The form of the plans at these sizes.  Raises StructureError where there is none."""
        records = {where: self._numbers_at(where) for where in samples}
        form = RecordForm.fitted(self.regime.form.sizes, records, self._draws)
        return self._plan_form(form, proven)

    def _is(self, form: PlanForm, where: leaves.Numbers) -> bool:
        """Whether a form gives the plan at these sizes."""
        try:
            return bool(form.form.at(where) == self._numbers_at(where))
        except FormulaError:
            return False

    def _plan(self, numbers: leaves.Numbers, track: Track | None = None) -> Plan:
        """The plan at these sizes.  track: of its numbers; it has guards of rewrites, too."""
        return Plan.of_rewritten(self._graph(numbers, track), self.conditions.execution)

    def _graph(self, numbers: leaves.Numbers, track: Track | None) -> OpGraph:
        """The graph at these sizes as it is priced and grouped."""
        here = next((r for r in self._rewritten if _all_hold(r.guards, numbers)), None)
        if here is None and self._rewrites >= _REWRITTEN:
            here = self._rewritten_around(numbers)
            self._rewritten.append(here)
        if here is not None and here.form is not None:
            with suppress(FormulaError):
                if track is not None:
                    track.guards.update(dict.fromkeys(here.guards))
                return here.form.at(numbers, track)
        self._rewrites += 1
        return self.conditions.rewritten(self.regime.form.at(numbers, track))

    def _rewritten_around(self, numbers: leaves.Numbers) -> _Rewritten:
        """The form of the rewritten graph around these sizes."""
        track = Track()
        self.conditions.rewritten(self.regime.form.at(numbers, track))
        track.on = False
        guards = tuple(track.guards)
        tried = self._tried(numbers, self._around(numbers, guards))
        forms = (known.form for known in self._rewritten if known.form is not None)
        form = next((form for form in forms if all(self._is_graph(form, n) for n in tried)), None)
        form = form or self._fitted(numbers, guards, (), self._graph_form, self._is_graph)
        return _Rewritten(guards if form is None else (*guards, *self._unvaried(form)), form)

    def _graph_form(
        self, samples: Sequence[leaves.Numbers], _: Sequence[leaves.Numbers]
    ) -> GraphForm:
        """The form of the rewritten graphs at these sizes.  Raises StructureError without one."""
        graphs = {n: self.conditions.rewritten(self.regime.form.at(n)) for n in samples}
        return GraphForm.fitted(self.regime.form.sizes, graphs)

    def _is_graph(self, form: GraphForm, where: leaves.Numbers) -> bool:
        """Whether a form gives the rewritten graph at these sizes."""
        try:
            return form.at(where) == self.conditions.rewritten(self.regime.form.at(where))
        except FormulaError:
            return False

    def _numbers_at(self, numbers: leaves.Numbers) -> PlanNumbers:
        """The numbers of the plan at these sizes; each is priced once."""
        if numbers not in self._known:
            with collector_off.used():  # a plan is many objects, of which none is garbage meanwhile
                self._known[numbers] = numbers_of(self._plan(numbers))
        return self._known[numbers]

    def _guards_at(self, numbers: leaves.Numbers) -> tuple[Guard, ...] | None:
        """The comparisons that lead to the plan at these sizes; None if tracked numbers do not."""
        track = Track()
        with collector_off.used():
            tracked = numbers_of(self._plan(numbers, track), with_memory=False)
        track.on = False
        here = self._numbers_at(numbers)
        alike = tracked.groups == here.groups and tracked.launches == here.launches
        return tuple(track.guards) if alike else None

    def _fitted(
        self,
        numbers: leaves.Numbers,
        guards: Sequence[Guard],
        inside: Sequence[leaves.Numbers],
        form_of: Callable[[Sequence[leaves.Numbers], Sequence[leaves.Numbers]], Fitted],
        holds: Callable[[Fitted, leaves.Numbers], bool],
    ) -> Fitted | None:
        """The form where these guards hold; None where it could not be proven.

        inside: sizes that are asked for, where they hold.  form_of: gives a form of samples, proven
        at others.  holds: whether a form gives the record at some sizes.
        """
        others = self._around(numbers, guards)
        planned = [n for n, held in _held(guards, self._known) if held and n != numbers]
        edges = _edges(self._draws, [*inside, *others, *planned])
        candidates = list(dict.fromkeys([numbers, *edges, *_spread([*planned, *others]), *inside]))
        first, each = _SAMPLES
        least = first + each * sum(len(set(column)) > 1 for column in zip(*candidates, strict=True))
        wanted = min(least, len(candidates))
        if wanted < least:
            return None
        for count in (wanted, wanted + _MORE):
            chosen = candidates[:count]
            rest = [where for where in (*inside, *others) if where not in chosen]
            checks = self._random.sample(rest, min(_CHECKS, len(rest)))
            try:
                made = form_of(chosen, checks)
            except StructureError:
                continue
            if all(holds(made, where) for where in checks):
                return made
        return None


def _edges(
    draws: Sequence[leaves.Draw], candidates: Sequence[leaves.Numbers]
) -> list[leaves.Numbers]:
    """For each draw the candidates with the fewest and with the most rows.

    Many rows reach all classes: a number that only such samples show looks like a constant.
    """
    if not candidates:
        return []
    columns = [np.array(column) for column in zip(*candidates, strict=True)]
    edges: dict[leaves.Numbers, None] = {}
    for rows in dict.fromkeys(draw.rows for draw in draws if not draw.is_constant):
        reached = rows.over(columns, rounded=True)
        for place in (int(reached.argmin()), int(reached.argmax())):
            edges.setdefault(candidates[place])
    return list(edges)


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
            for guard in several:
                here &= guard.holds(columns)
        held &= here if at is None else here[at]
    return held


def _held(
    guards: Sequence[Guard], sizes: Collection[leaves.Numbers]
) -> Iterator[tuple[leaves.Numbers, bool]]:
    """Sizes, each with whether all guards hold there."""
    if sizes:
        columns = zip(*sizes, strict=True)
        points = Points({str(number): column for number, column in enumerate(columns)})
        held = _holding(guards, points, np.arange(len(points)))
        yield from zip(sizes, held.tolist(), strict=True)


def _holding_at(guards: Sequence[Guard], numbers: leaves.Numbers) -> tuple[Guard, ...]:
    """The guards that hold at these sizes."""
    columns = [np.array([number]) for number in numbers]
    return tuple(guard for guard in guards if guard.holds(columns)[0])


def _all_hold(guards: Sequence[Guard], numbers: leaves.Numbers) -> bool:
    """Whether all guards hold at these sizes."""
    return len(_holding_at(guards, numbers)) == len(guards)


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
