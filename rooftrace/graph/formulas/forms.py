"""A record whose numbers are formulas of sizes, fitted to records at a few sizes.

Records of one structure differ in some numbers only.  Each such number is a polynomial of the sizes
with rational coefficients, or the expectation of a draw by a named function.  What no formula gives
exactly at all samples is an error: a form never stands for a record that it does not equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from msgspec.structs import replace

from rooftrace.graph import Assumption, OpGraph, assumptions
from rooftrace.graph.formulas import polynomials
from rooftrace.graph.formulas.leaves import (
    EACH,
    PLAIN,
    REACHED,
    TEXT,
    TOUCHED,
    Differing,
    Draw,
    Numbers,
    Path,
    SeriesGraph,
    StructureError,
    Tree,
    Varying,
    changed,
    differences,
    each,
    has_commas,
    touched,
    tree_of,
    words_and_numbers,
)
from rooftrace.graph.formulas.polynomials import SKEWED, Fitter, Formula
from rooftrace.graph.formulas.tracked import Operation, Track, plain, slot_of, tracked_in

AForm = TypeVar("AForm", bound="RecordForm")
_FACTS: Mapping[Any, tuple[str, ...]] = {
    "distinct": ("distinct", "balanced"),
    "groups_touched": ("distinct", "balanced"),
    "drawn": ("drawn", "balanced"),
    "rows_largest": ("largest", "balanced largest"),
}
"""The functions that a fact of this name may be: few sizes could make it look like a polynomial."""


class UnfitError(StructureError):
    """A number that no formula gives at all samples."""


@dataclass(frozen=True)
class RecordForm:
    """A record (or nest of records) for any sizes within one regime.

    sizes: their names.  template: the record of the first sample.  samples: the sizes at which the
    record was given, and which the form gives exactly.
    """

    sizes: tuple[str, ...]
    template: Any
    formulas: tuple[Formula, ...]
    draws: tuple[Draw, ...]
    slots: tuple[Varying, ...]
    samples: tuple[Numbers, ...]

    @classmethod
    def fitted(
        cls, sizes: Sequence[str], records: Mapping[Numbers, Any], draws: Sequence[Draw] = ()
    ) -> RecordForm:
        """The form that gives these records; draws: numbers may depend on these.

        Raises StructureError for records that differ in more than numbers, and UnfitError where no
        formula gives a number: there another sample may help.
        """
        form: RecordForm = _Fit(tuple(sizes), records, draws).form(cls)
        for sample, record in records.items():
            if form.at(sample) != record:
                raise StructureError(f"the form is not the record at {sample}")
        return form

    @classmethod
    def of_tracked(cls: type[AForm], sizes: Sequence[str], record: Any, numbers: Numbers) -> AForm:
        """The form of a record of tracked numbers, made at these sizes: their expressions.

        Raises StructureError for an expression that is none of the kinds of `Varying`.
        """
        formulas: dict[Formula, int] = {}
        draws: dict[Draw, int] = {}
        slots, values = [], []
        for path, number in tracked_in(record):
            kind, formula, draw = slot_of(number.expression) or _refuse(path, number.expression)
            place = () if formula is None else (formulas.setdefault(formula, len(formulas)),)
            which = -1 if draw is None else draws.setdefault(draw, len(draws))
            slots.append(Varying(path, kind, place, which))
            values.append(plain(number))
        places = tree_of(slot.path for slot in slots)
        template = changed(record, places, values) if slots else record
        return cls(tuple(sizes), template, tuple(formulas), tuple(draws), tuple(slots), (numbers,))

    def at(self, numbers: Sequence[int], track: Track | None = None) -> Any:
        """The record at these sizes.  Raises FormulaError where a number is no integer.

        track: gives the numbers that sizes change, which remember how.
        """
        where = tuple(numbers)
        values = [formula.at(where) for formula in self.formulas]
        reached = [draw.at(where) for draw in self.draws]
        if track is not None:
            values = list(map(track.number, values, self.formulas))
            reached = list(map(track.number, reached, map(Operation.of_draw, self.draws)))
        changes = [slot.value(values, reached) for slot in self.slots]
        return changed(self.template, self._tree, changes) if changes else self.template

    @cached_property
    def _tree(self) -> Tree:
        """The places of the slots."""
        return tree_of(slot.path for slot in self.slots)


class GraphForm(RecordForm):
    """A graph for any sizes within one regime; the template may be a `SeriesGraph`."""

    @classmethod
    def fitted(
        cls, sizes: Sequence[str], records: Mapping[Numbers, Any], draws: Sequence[Draw] = ()
    ) -> GraphForm:
        """The form that gives these graphs; see `RecordForm.fitted`."""
        first = next(iter(records.values()))
        grows = any(_lengths(graph) != _lengths(first) for graph in records.values())
        plain = {sample: cls.plain(graph, grows) for sample, graph in records.items()}
        fit = _Fit(tuple(sizes), plain, draws)
        template = next(iter(plain.values()))
        fit.learn_routing(
            template.placed() if isinstance(template, SeriesGraph) else _placed(first)
        )
        form: GraphForm = fit.form(cls)
        for sample, graph in records.items():
            if form.at(sample) != graph:
                raise StructureError(f"the form is not the graph that was traced at {sample}")
        return form

    @staticmethod
    def plain(graph: OpGraph, series: bool) -> OpGraph | SeriesGraph:
        """A graph as it is fitted: without words on routing; series: its sequences as series."""
        quiet = _saying(graph, lambda facts: "")
        return SeriesGraph.of(quiet) if series else quiet

    @property
    def grows(self) -> bool:
        """Whether sequences of the graph grow with a size, as with the number of layers."""
        return isinstance(self.template, SeriesGraph)

    @property
    def example(self) -> OpGraph:
        """The graph of the first sample."""
        return self.at(self.samples[0])

    def at(self, numbers: Sequence[int], track: Track | None = None) -> OpGraph:
        """The graph at these sizes; see `RecordForm.at`."""
        made = super().at(numbers, track)
        graph = made.written_out() if isinstance(made, SeriesGraph) else made
        return _saying(graph, assumptions.said_of_routing)


def _refuse(path: Path, expression: Any) -> NoReturn:
    raise StructureError(f"{'.'.join(map(str, path))}: no formula is {expression}")


def _placed(graph: OpGraph) -> Iterator[tuple[Path, Assumption]]:
    for number, assumption in enumerate(graph.assumptions):
        yield ("assumptions", number), assumption


def _lengths(graph: OpGraph) -> tuple[Any, ...]:
    """The sequences that grow with the number of layers."""
    repeats = ((*map(len, r.names.values()), len(r.assumptions)) for r in graph.repeats)
    return (len(graph.modules), len(graph.assumptions), *repeats)


def _saying(graph: OpGraph, said: Callable[[Mapping[str, Any]], str]) -> OpGraph:
    """The graph with other words on the numbers of a choice in its assumptions on routing."""
    if not any("policy" in assumption.facts for assumption in graph.assumptions):
        return graph

    def resaid(item: Assumption) -> Assumption:
        if "policy" not in item.facts:
            return item
        plain = item.text.removesuffix(assumptions.GIVEN)
        end = assumptions.GIVEN if plain != item.text else ""
        return replace(item, text=plain.partition(assumptions.SAID)[0] + said(item.facts) + end)

    return graph.replace(assumptions=tuple(map(resaid, graph.assumptions)))


class _Fit:
    """Finds the formulas of one form."""

    def __init__(
        self, sizes: tuple[str, ...], records: Mapping[Numbers, Any], draws: Sequence[Draw]
    ) -> None:
        self.sizes, self.samples = sizes, tuple(records)
        self.records = list(records.values())
        self.fitter = Fitter(self.samples)
        self.formulas: dict[Formula, int] = {}
        self.candidates: dict[tuple[float, ...], Draw] = {}
        self.every_draw: dict[Draw, None] = {}
        self.quiet: list[Varying] = []  # numbers that are equal at all samples, and not elsewhere
        self.draws: dict[Draw, int] = {}
        self.differences = list(differences(self.records))
        self._kinds: dict[tuple[Any, ...], tuple[str, Formula | None, Draw | None]] = {}
        for draw in draws:
            self._learn(draw)

    def form(self, kind: type[Any]) -> Any:
        slots = (*map(self._slot, self.differences), *self.quiet)
        return kind(
            self.sizes,
            self.records[0],
            tuple(self.formulas),
            tuple(self.draws),
            slots,
            self.samples,
        )

    def learn_routing(self, placed: Iterable[tuple[Path, Assumption]]) -> None:
        """Learn the draws of the choices that assumptions describe, each with its path."""
        varying = {difference.path: difference.values for difference in self.differences}
        for place, assumption in placed:
            if "policy" not in assumption.facts:
                continue
            path = (*place, "facts")
            arguments = []
            for name in ("rows", "chosen", "classes"):
                constant = (assumption.facts[name],) * len(self.samples)
                numbers = varying.get((*path, name), constant)
                # A process of several may choose a part of an expert on average: no integer.
                integers = all(float(number).is_integer() for number in numbers)
                formula = self.fitter.fit(numbers) if integers else None
                if formula is not None:
                    arguments.append(formula)
            if len(arguments) == 3:
                policy = assumption.facts["policy"]
                skewed = [f"{name} {policy}" for name in SKEWED if policy.startswith("skewed:")]
                for function in skewed or polynomials.FUNCTIONS:
                    self._learn(Draw(function, *arguments))
                for parts in () if skewed else _parts(assumption.facts):
                    for function in ("distinct", "balanced"):
                        self._learn(Draw(function, arguments[0], *parts))
                for name in SKEWED:
                    if (*path, name) not in varying:
                        functions = [f"{name} {policy}"] if skewed else _FACTS[name]
                        self._learn_quiet(
                            (*path, name), assumption.facts[name], arguments, functions
                        )

    def _learn_quiet(
        self, path: Path, value: float, arguments: Sequence[Formula], functions: Sequence[str]
    ) -> None:
        """A count that all samples reach, as all classes of many rows, and fewer rows may not."""
        for function in functions:
            draw = Draw(function, *arguments)
            if not draw.is_constant and all(draw.at(sample) == value for sample in self.samples):
                place = self.draws.setdefault(draw, len(self.draws))
                self.quiet.append(Varying(path, REACHED, draw=place, whole=type(value) is int))
                return

    def _learn(self, draw: Draw) -> None:
        self.every_draw[draw] = None
        values = tuple(float(draw.at(sample)) for sample in self.samples)
        self.candidates.setdefault(values, draw)

    def _slot(self, difference: Differing) -> Varying:
        path, values = difference
        if isinstance(values[0], str):
            words, columns = words_and_numbers(values, path)
            formulas = []
            for column in columns:
                formula = self.fitter.fit(column)
                if formula is None:
                    raise _unfit(path, column)
                formulas.append(self._place(formula))
            return Varying(path, TEXT, tuple(formulas), -1, tuple(words), has_commas(values))
        key = (all(type(value) is int for value in values), values, path[-1] in _FACTS and path[-1])
        if key not in self._kinds:
            self._kinds[key] = self._kind(path, values)
        kind, formula, draw = self._kinds[key]
        return Varying(
            path,
            kind,
            () if formula is None else (self._place(formula),),
            -1 if draw is None else self.draws.setdefault(draw, len(self.draws)),
            whole=path[0] != "assumptions" or key[0],
        )

    def _kind(self, path: Path, values: Sequence[float]) -> tuple[str, Formula | None, Draw | None]:
        """The slot of a number: the first of the kinds that gives all its values."""
        named = self._named_draw(path, values)
        if named is not None:
            return REACHED, None, named
        if all(type(value) is int for value in values):
            formula = self.fitter.fit([int(value) for value in values])
            if formula is not None:
                return PLAIN, formula, None
        draw = self.candidates.get(tuple(map(float, values)))
        if draw is not None:
            return REACHED, None, draw
        for reached, draw in self.candidates.items():
            for kind, rule, guess in ((TOUCHED, touched, _over), (EACH, each, _times)):
                formula = self.fitter.fit(list(map(guess, values, reached)))
                if formula is not None and all(
                    rule(formula.at(sample), number) == value
                    for sample, number, value in zip(self.samples, reached, values, strict=True)
                ):
                    return kind, formula, draw
        raise _unfit(path, values)

    def _named_draw(self, path: Path, values: Sequence[float]) -> Draw | None:
        """The draw that gives these values, among the candidates for a fact of this name."""
        wanted = _FACTS.get(path[-1], ())
        for draw in self.every_draw:
            if draw.function.partition(" skewed:")[0] in wanted and all(
                draw.at(sample) == value for sample, value in zip(self.samples, values, strict=True)
            ):
                return draw
        return None

    def _place(self, formula: Formula) -> int:
        return self.formulas.setdefault(formula, len(self.formulas))


def _parts(facts: Mapping[str, Any]) -> Iterator[tuple[Formula, Formula]]:
    """Choices and classes of one process, where several have an equal part of the classes each, and
    rows choose whole classes of each on average: it reaches an equal part of what all reach."""
    chosen, classes = int(facts["chosen"]), int(facts["classes"])
    for parts in range(2, chosen + 1):
        if not (chosen % parts or classes % parts):
            yield Formula.constant(chosen // parts), Formula.constant(classes // parts)


def _over(value: float, reached: float) -> int:
    return round(value / reached) if reached else 0


def _times(value: float, reached: float) -> int:
    return round(value * max(reached, 1))


def _unfit(path: Path, values: Sequence[Any]) -> UnfitError:
    shown = ", ".join(map(str, values[:6]))
    return UnfitError(f"{'.'.join(map(str, path))}: no formula gives {shown}")
