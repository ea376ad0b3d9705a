"""Costs of graph breaks on a chip: a record of each break, and pricing from a run under Dynamo.

In: a graph, a Dynamo run of the same call, a chip.  Out: the step eager, compiled as it breaks,
compiled without breaks, and compiled without the breaks of each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain, plain_record
from rooftrace._progress import tell
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel, Plan, execution_model, waits_at
from rooftrace.errors import RequestError
from rooftrace.graph import PARTS, OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time, plural
from rooftrace.studies.advice.variants import Compared, Study, Variant
from rooftrace.studies.breaks import DynamoRun, PlacedStep, placed
from rooftrace.studies.breaks.placing import Cause, Recompiled, without

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class BreakCost(Plain, Compared):
    """One line at which compiled code ends: the step as it breaks, and without this line's breaks.

    All other breaks stay; both steps are estimates.
    """

    cause: Cause
    cuts: int  # how many stretches of the module's call begin for it
    singles: int  # kernels of the module's call that Python runs one by one for it

    KEYS = (
        "kind=cause.kind reason=cause.reason source=cause.source module=cause.module "
        "times=cause.times cuts singles gain share kernels bytes launch"
    )

    @property
    def launch(self) -> float:
        """Seconds of launching that it exposes."""
        return self.regime_seconds["launch"]


@dataclass(frozen=True, kw_only=True)
class GraphBreaks(Plain, Shown):
    """The graph breaks of a step, most seconds first, and the step in three ways.

    Gains of rows are each of one line alone; they do not add up to `together`, all lines at once.
    """

    rows: tuple[BreakCost, ...]
    eager: Estimate  # op by op
    broken: Estimate  # compiled, as it breaks
    whole: Estimate  # compiled, without any break
    graphs: int  # different compiled graphs
    calls: int  # calls of them in the forward of a step
    graph_breaks: int  # as torch counts them while it compiles
    recompiled: tuple[Recompiled, ...]
    placement: PlacedStep
    notes: tuple[str, ...] = ()

    KEYS = (
        "title steps=_steps graphs calls graph_breaks together sum=total breaks=_breaks recompiled "
        "unplaced=placement.unplaced shared=placement.shared notes"
    )

    @property
    def together(self) -> float:
        """Seconds that all breaks cost together."""
        return self.broken.t_est - self.whole.t_est

    @property
    def total(self) -> float:
        """The sum of the costs of each line alone."""
        return sum(row.gain for row in self.rows)

    @property
    def title(self) -> str:
        """The step, the chip and the execution."""
        step = self.whole
        return f"{step.graph.title} on {step.chip.name}, {step.execution.name}"

    def to_rows(self) -> list[dict[str, Any]]:
        """One mapping a line, in order."""
        return [row.to_dict() for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row a line, in order; seconds and bytes."""
        import pandas

        return pandas.DataFrame.from_records(self.to_rows(), columns=COLUMNS)

    @property
    def _steps(self) -> dict[str, Any]:
        ways = {"eager": self.eager, "as it breaks": self.broken, "without breaks": self.whole}
        keys = "t_est kernels bytes_hbm launch=times.regime_seconds.launch"
        return {name: plain_record(way, keys) for name, way in ways.items()}

    @property
    def _breaks(self) -> list[dict[str, Any]]:
        keys = f"{BreakCost.KEYS} hints=cause.hints detail=cause.detail"
        return [plain_record(row, keys) for row in self.rows]

    def __repr__(self) -> str:
        lines = plural(len(self.rows), "line") if self.rows else "no line"
        return short(
            self,
            f"{self.title}: {lines} with graph breaks, which cost {format_time(self.together)} of "
            f"{format_time(self.broken.t_est)}",
        )


COLUMNS = [key.partition("=")[0] for key in BreakCost.KEYS.split()]
"""The columns of `GraphBreaks.to_frame`."""


# -- pricing ---------------------------------------------------------------------------------------


def price_breaks(graph: OpGraph, run: DynamoRun, chip: Chip, model: ExecutionModel) -> GraphBreaks:
    """Price the graph breaks of `run` on `graph`, a trace of the same call.

    model: how a compiler runs it; one without fusion has no graphs to break, and raises
    RequestError.
    """
    if model.fusion != "detected" or model.dispatch == "eager":
        raise RequestError(
            f"graph breaks with execution {model.name!r}: nothing is compiled in it; take "
            "compiled, or efficient for CUDA graphs"
        )
    placement = placed(graph, run)
    cuts = Counter(stretch.cause for stretch in run.stretches)
    causes = [place for place in range(len(run.causes)) if cuts[place]]
    stretches = run.stretches
    ways = [without(stretches), *(without(stretches, [cause]) for cause in causes)]
    tell("pricing each break")
    graphs = placement.marked(*ways)
    unbroken = estimate(Plan.each(graph, [model], savings=False)[0], chip)
    study = Study(unbroken)
    broken, *rest = (study.estimate(Variant(graph=marked)) for marked in graphs)
    singles = _singles(placement)
    rows = [
        BreakCost(
            cause=run.causes[place],
            cuts=cuts[place],
            singles=singles[place],
            before=broken,
            after=after,
        )
        for place, after in zip(causes, rest, strict=True)
    ]
    rows.sort(key=lambda row: -row.gain)
    eager = execution_model("eager", tf32=model.tf32)
    return GraphBreaks(
        rows=tuple(rows),
        eager=study.estimate(Variant(execution=eager)),
        broken=broken,
        whole=unbroken,
        graphs=run.graphs,
        calls=run.calls,
        graph_breaks=run.graph_breaks,
        recompiled=run.recompiled,
        placement=placement,
        notes=tuple(_notes(graph, run, placement, broken)),
    )


def _singles(placement: PlacedStep) -> Counter[int]:
    """Kernels of the forward that Python runs one by one, by cause."""
    counts: Counter[int] = Counter()
    for op, place in zip(placement.flat.ops, placement.stretch_of, strict=True):
        if place is not None and op.kind == "kernel" and op.part == PARTS[0]:
            stretch = placement.stretches[place]
            counts[stretch.cause] += stretch.eager
    return counts


def _notes(
    graph: OpGraph, run: DynamoRun, placement: PlacedStep, broken: Estimate
) -> Iterator[str]:
    """The assumptions of the prices."""
    yield from run.notes
    if not any(stretch.cause >= 0 for stretch in run.stretches):
        return
    entry = broken.chip.graph_entry
    yield (
        f"entering a compiled graph behind another one takes the host {format_time(entry.value)} "
        f"({entry.kind}: {entry.source})"
    )
    if any(stretch.eager for stretch in run.stretches):
        yield (
            "code that Python runs op by op may hold more breaks, which Dynamo has not seen: run "
            "again when a line is changed"
        )
    if graph.phase == "training":
        yield (
            "backward is cut where forward is cut: autograd compiles the backward of each graph "
            "on its own; loss and optimizer are compiled with the rest"
        )
    waits = waits_at(graph).total()
    if waits:
        yield (
            f"the host waits for the device {plural(waits, 'time')} in every column: a break goes, "
            "and the wait that caused it stays"
        )
    if run.real:
        yield (
            "Dynamo ran on random numbers, because code asked for values that meta tensors do not "
            "have: it may take other branches than the trace"
        )
    if placement.unplaced:
        yield (
            f"{plural(placement.unplaced, 'op')} beside a break could not be placed by line and "
            "order, and are taken to stand in front of it"
        )
    if placement.shared:
        yield (
            f"{plural(placement.shared, 'backward op')} of lines on both sides of a break are "
            "taken to be on one side"
        )
