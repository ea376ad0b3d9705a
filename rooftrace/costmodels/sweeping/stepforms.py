"""A step for any sizes: its graph where it is proven, and its plans under any conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rooftrace._shown import short
from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.planforms import Conditions, PlanForm, PlanForms, Points
from rooftrace.costmodels.rewriting import reprice
from rooftrace.errors import RequestError, hint
from rooftrace.hardware import Chip
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphforms import GraphForm, Regime

Numbers = tuple[int, ...]
Trace = Callable[[Numbers], OpGraph]
MOST_TRACED = 256
"""The most sizes outside of proven regimes that one evaluation traces by themselves."""


@dataclass(frozen=True, eq=False)
class Form:
    """A step whose sizes are left open.

    title: of the model.  names: of the sizes.  regimes: where which form of the graph is proven.
    trace: traces the step at sizes outside of these; None where it cannot be traced here, as for a
    form from a file.  Everything is exact: a graph equals its trace, totals are whole numbers.
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
        asked = ", ".join(f"{n} {v:,}" for n, v in zip(self.names, numbers, strict=True))
        return (
            f"{asked}: nothing is proven there; proven are {'; '.join(self.where())}; sweep the "
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

    # -- many places -------------------------------------------------------------------------------

    def plans(
        self, points: Points, conditions: Conditions
    ) -> Iterator[tuple[PlanForm, np.ndarray[Any, np.dtype[np.int64]]]]:
        """Forms of the plan that hold at points, each with the places of its points.

        Raises RequestError for points outside of what is proven that cannot be traced, or are more
        than MOST_TRACED.
        """
        left = np.arange(len(points))
        for regime in self.regimes:
            inside = regime.inside([column[left] for column in points.columns])
            if inside.any():
                yield from self._within(regime, conditions, points, left[inside])
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
            yield from self._within(regime, conditions, points, left[here])

    def _within(
        self, regime: Regime, conditions: Conditions, points: Points, places: Any
    ) -> Iterator[tuple[PlanForm, Any]]:
        conditions = conditions.on(regime)
        alike = conditions.of_plans
        key = (regime.low, regime.high, alike)
        if key not in self._plans:
            self._plans[key] = PlanForms(regime, alike)
        plans: PlanForms = self._plans[key]
        for form, own in plans.at(points.where(places)):
            yield form.under(conditions.execution), places[own]


def points_of(names: Sequence[str], levels: Mapping[str, Sequence[int]]) -> Points:
    """The points of a grid: every combination of these values, the last name changing fastest."""
    grids = np.meshgrid(*(np.asarray(levels[n], dtype=np.int64) for n in names), indexing="ij")
    return Points({name: grid.ravel() for name, grid in zip(names, grids, strict=True)})
