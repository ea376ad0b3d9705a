"""A graph whose numbers are formulas of sizes, fitted to traces at a few of them.

Graphs of one structure differ in some numbers only.  Each such number is a polynomial of the sizes
with rational coefficients, or what a named function expects of a draw.  What no formula gives
exactly at all traces is an error: a form never stands for a graph that it does not equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rooftrace.tracer.asking import assumptions
from rooftrace.tracer.formulas import FUNCTIONS, Fitter, Formula
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphforms.leaves import (
    Difference,
    Path,
    StructureError,
    changed,
    differences,
    has_commas,
    tree_of,
    words_and_numbers,
)

Numbers = tuple[int, ...]
"""A value for each size of a form."""


class Draw(Struct, frozen=True):
    """What a number of rows reach on average, each choosing some of many classes."""

    function: str  # a name in FUNCTIONS
    rows: Formula
    chosen: Formula
    classes: Formula

    def at(self, numbers: Numbers) -> float:
        """The number that is reached."""
        arguments = (self.rows.at(numbers), self.chosen.at(numbers), self.classes.at(numbers))
        return FUNCTIONS[self.function](*arguments)


class Slot(Struct, frozen=True):
    """A number of a graph that sizes change; for a text, all its numbers.

    formulas: places among the formulas of the form, one for a plain number.  words: those around
    the numbers of a text.  draw: the place among the draws of the form, in place of formulas.
    whole: an expected number that is whole stands as an int.
    """

    path: Path
    formulas: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    commas: bool = False
    draw: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class GraphForm:
    """A graph for any sizes within one regime.

    sizes: their names.  template: the graph of the first sample.  samples: the sizes whose traces
    the form was fitted to, all of which it gives exactly.
    """

    sizes: tuple[str, ...]
    template: OpGraph
    formulas: tuple[Formula, ...]
    draws: tuple[Draw, ...]
    slots: tuple[Slot, ...]
    samples: tuple[Numbers, ...]

    @staticmethod
    def fitted(sizes: Sequence[str], traces: Mapping[Numbers, OpGraph]) -> GraphForm:
        """The form that gives these graphs.

        Raises StructureError where they are not of one structure, or no formula gives a number:
        another sample may help (`UnfitError`).
        """
        return _Fit(tuple(sizes), traces).form()

    def at(self, numbers: Sequence[int]) -> OpGraph:
        """The graph at these sizes.  Raises FormulaError where a number is no whole one."""
        where = tuple(numbers)
        values = [formula.at(where) for formula in self.formulas]
        expected = [draw.at(where) for draw in self.draws]
        changes = {slot.path: _value(slot, values, expected) for slot in self.slots}
        graph: OpGraph = changed(self.template, tree_of(changes)) if changes else self.template
        return _with_routing(graph, assumptions.said_of_routing)


class UnfitError(StructureError):
    """A number that no formula gives at all samples."""


def _value(slot: Slot, values: Sequence[int], expected: Sequence[float]) -> Any:
    if slot.words:
        numbers = [f"{values[i]:,}" if slot.commas else str(values[i]) for i in slot.formulas]
        return slot.words[0] + "".join(
            number + word for number, word in zip(numbers, slot.words[1:], strict=True)
        )
    if slot.draw is None:
        return values[slot.formulas[0]]
    number = expected[slot.draw]
    return int(number) if slot.whole and float(number).is_integer() else number


class _Fit:
    """Finds the formulas of one form."""

    def __init__(self, sizes: tuple[str, ...], traces: Mapping[Numbers, OpGraph]) -> None:
        self.sizes, self.samples = sizes, tuple(traces)
        self.traced = tuple(traces.values())
        self.graphs = [_with_routing(graph, lambda facts: "") for graph in self.traced]
        self.fitter = Fitter(self.samples)
        self.formulas: dict[Formula, int] = {}
        self.draws: dict[Draw, int] = {}
        self.reached: dict[tuple[float, ...], int] = {}

    def form(self) -> GraphForm:
        found = list(differences(self.graphs))
        self._learn_draws(found)
        slots = tuple(self._slots(found))
        form = GraphForm(
            self.sizes,
            self.graphs[0],
            tuple(self.formulas),
            tuple(self.draws),
            slots,
            self.samples,
        )
        for sample, graph in zip(self.samples, self.traced, strict=True):
            if form.at(sample) != graph:
                raise StructureError(f"the form is not the graph that was traced at {sample}")
        return form

    def _learn_draws(self, found: Sequence[Difference]) -> None:
        """The values of the named functions on the choices that assumptions describe."""
        varying = {difference.path: difference.values for difference in found}
        for number, assumption in enumerate(self.graphs[0].assumptions):
            if "policy" not in assumption.facts:
                continue
            path = ("assumptions", number, "facts")
            arguments = []
            for name in ("rows", "chosen", "classes"):
                constant = (assumption.facts.get(name),) * len(self.samples)
                formula = self.fitter.fit(varying.get((*path, name), constant))
                if formula is not None:
                    arguments.append(formula)
            if len(arguments) < 3:
                continue
            for function in FUNCTIONS:
                draw = Draw(function, *arguments)
                values = tuple(float(draw.at(sample)) for sample in self.samples)
                self.reached.setdefault(values, self.draws.setdefault(draw, len(self.draws)))

    def _slots(self, found: Sequence[Difference]) -> Iterator[Slot]:
        for path, values in found:
            if all(type(value) is int for value in values):
                formula = self.fitter.fit(values)
                if formula is not None:
                    yield Slot(path, (self._place(formula),))
                    continue
            if isinstance(values[0], str):
                words, columns = words_and_numbers(values, path)
                places = tuple(self._place(self._needed(path, c)) for c in columns)
                yield Slot(path, places, tuple(words), has_commas(values))
                continue
            number = self.reached.get(tuple(map(float, values)))
            if number is None:
                raise UnfitError(f"{'.'.join(map(str, path))}: no formula gives {values}")
            whole = path[0] != "assumptions" or all(type(value) is int for value in values)
            yield Slot(path, draw=number, whole=whole)

    def _needed(self, path: Path, values: tuple[int, ...]) -> Formula:
        formula = self.fitter.fit(values)
        if formula is None:
            raise UnfitError(f"{'.'.join(map(str, path))}: no formula gives {values}")
        return formula

    def _place(self, formula: Formula) -> int:
        return self.formulas.setdefault(formula, len(self.formulas))


def _with_routing(graph: OpGraph, said: Callable[[Mapping[str, Any]], str]) -> OpGraph:
    """The graph with other words on the numbers of a choice in its assumptions on routing."""
    if not any("policy" in assumption.facts for assumption in graph.assumptions):
        return graph
    return graph.replace(
        assumptions=tuple(
            replace(item, text=item.text.partition(assumptions.SAID)[0] + said(item.facts))
            if "policy" in item.facts
            else item
            for item in graph.assumptions
        )
    )
