"""The graphs of what steps did, each traced when its price is first asked for, and their prices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.errors import worded
from rooftrace.hardware import Chip
from rooftrace.measured.live import tracing
from rooftrace.measured.live.notes import CallNote, Notebook, StepNote, StepPattern
from rooftrace.measured.live.pricing import Price, price_of, total
from rooftrace.measured.live.sizefits import fitted
from rooftrace.tracer.graph import OpGraph

Part = CallNote | int
"""A kind of call, or the number of an optimizer."""


class GraphBook:
    """Graphs and prices by the parts of steps.

    graph: of a whole step, where the caller has it: then nothing is traced, and steps that do
    something else than the first are not priced.  kinds: of so many kinds of calls each is traced;
    of others those that no fit to these tells (`fitted`), up to twice as many.
    """

    def __init__(
        self,
        notebook: Notebook,
        chip: Chip,
        execution: ExecutionModel,
        kinds: int,
        graph: OpGraph | None = None,
        forward: tracing.Forward = tracing.called,
    ) -> None:
        self.chip, self.execution, self.forward = chip, execution, forward
        self.graph = graph
        self._notebook, self._kinds = notebook, kinds
        self._graphs: dict[Part, OpGraph] = {}
        self._prices: dict[Part, Price | None] = {}
        self._first: StepPattern | None = None
        self._tried = 0  # kinds of calls that were traced, or failed
        self.fitted = 0  # kinds of calls whose price is a fit to those of others
        self.assumed: dict[str, None] = {}  # sentences on what the traces took for granted
        self.unknown: dict[str, None] = {}  # ops without a rule
        self.refused: dict[str, int] = {}  # how many kinds were not traced, by the reason

    def price(self, pattern: StepPattern) -> Price | None:
        """The price of a step; None where part of it cannot be priced."""
        if self.graph is not None:
            if self._first is None:
                self._first = pattern
            return self._of_graph(-1, lambda: self.graph) if pattern == self._first else None
        if not pattern.calls:
            self._refuse(_NO_CALL)
            return None
        prices = [(self._of_call(note), count) for note, count in pattern.calls]
        prices += [(self._of_optimizer(number), 1) for number in pattern.optimizers]
        if any(price is None for price, _ in prices):
            return None
        return total(price.times(count) for price, count in prices if price is not None)

    def graphs(self, pattern: StepPattern) -> tuple[tuple[OpGraph, int], ...]:
        """The graphs of a step that was priced, and how often each ran."""
        if self.graph is not None:
            return ((self.graph, 1),)
        parts: list[tuple[Part, int]] = [*pattern.calls, *((n, 1) for n in pattern.optimizers)]
        known = [(self._graphs[part], count) for part, count in parts if part in self._graphs]
        return tuple(sorted(known, key=lambda entry: entry[0].phase != "training"))

    def whole(self, step: StepNote) -> OpGraph:
        """The graph of one whole step, in order.  Raises what `rooftrace.trace` raises."""
        return self.graph or tracing.graph_of_step(self._notebook, step, self.forward)

    def estimated(self, graph: OpGraph) -> Estimate:
        """The estimate of a graph."""
        return estimate(graph, self.chip, self.execution)

    def _of_call(self, note: CallNote) -> Price | None:
        if note not in self._prices and self._tried >= self._kinds:
            price = self._prices[note] = fitted(note, self._traced)
            if price is not None:
                self.fitted += 1
            elif self._tried < 2 * self._kinds and self._notebook.arguments_of(note):
                del self._prices[note]  # a few more, so that others lie between those traced
            else:
                self._refuse(_TOO_MANY.format(kinds=2 * self._kinds))
        self._tried += note not in self._prices
        make = tracing.graph_of_call
        return self._of_graph(note, lambda: make(self._notebook, note, self.forward))

    def _of_optimizer(self, number: int) -> Price | None:
        return self._of_graph(number, lambda: tracing.graph_of_optimizer(self._notebook, number))

    def _of_graph(self, part: Part, make: Callable[[], Any]) -> Price | None:
        if part not in self._prices:
            self._prices[part] = None
            try:
                graph = self._graphs[part] = make()
                priced = self.estimated(graph)
                self._prices[part] = price_of(priced)
                self.assumed |= dict.fromkeys(a.text for a in graph.assumptions)
                self.unknown |= dict.fromkeys(op.target for op in priced.unsupported_ops())
            except Exception as error:  # the loop goes on, whatever a user's code raises on meta
                self._refuse(f"not counted: {worded(error).splitlines()[0]}")
        return self._prices[part]

    @property
    def _traced(self) -> dict[CallNote, Price]:
        prices = ((part, self._prices[part]) for part in self._graphs)
        return {p: price for p, price in prices if isinstance(p, CallNote) and price is not None}

    def _refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


_NO_CALL = (
    "not counted: no call of the module was seen in a step: pass the module that the step calls, "
    "for a compiled one what torch.compile(...) returned"
)
_TOO_MANY = (
    "not counted: calls of more than {kinds} sizes ran, the first {kinds} are traced, and no fit "
    "to them tells the others; say kinds= for more"
)
