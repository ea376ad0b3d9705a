"""From a traced step and a run under Dynamo to what each graph break costs on a chip.

In: a graph, what Dynamo showed of the same call, a chip.  Out: the step eager, compiled as it
breaks, compiled without breaks, and compiled without the breaks of each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rooftrace._progress import tell
from rooftrace.costmodels.breaking.records import BreakCost, GraphBreaks
from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.studies import Study, Variant
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time, plural
from rooftrace.tracer.dynamo import DynamoRun, PlacedStep, placed
from rooftrace.tracer.dynamo.records import without
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.vocabulary import PARTS


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
    whole = estimate(Plan.each(graph, [model], savings=False)[0], chip)
    study = Study(whole)
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
        whole=whole,
        graphs=run.graphs,
        calls=run.calls,
        graph_breaks=run.graph_breaks,
        recompiled=run.recompiled,
        placement=placement,
        notes=tuple(_notes(graph, run, placement, broken)),
    )


def _singles(placement: PlacedStep) -> Counter[int]:
    """By cause: the forward's kernels that Python runs one by one."""
    counts: Counter[int] = Counter()
    for op, place in zip(placement.flat.ops, placement.stretch_of, strict=True):
        if place is not None and op.kind == "kernel" and op.part == PARTS[0]:
            stretch = placement.stretches[place]
            counts[stretch.cause] += stretch.eager
    return counts


def _notes(
    graph: OpGraph, run: DynamoRun, placement: PlacedStep, broken: Estimate
) -> Iterator[str]:
    """What the prices take for granted."""
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
    waits = sum(graph.times(op) for op in graph.ops if op.kind == "sync")
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
