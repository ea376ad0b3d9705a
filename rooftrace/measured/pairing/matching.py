"""The graph of which a trace is a run: of several graphs the best match."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.errors import ProfileError
from rooftrace.hardware import Chip, units
from rooftrace.measured.alignment import Alignment, align
from rooftrace.measured.fused import FusedStep, fused
from rooftrace.measured.pairing.reading import Graphs, MeasuredRequestError
from rooftrace.measured.traces import Trace


@dataclass(frozen=True, slots=True)
class Match:
    """A trace beside the graph that it matches best."""

    estimate: Estimate  # of that graph
    alignment: Alignment
    phases: tuple[str, ...]  # of all graphs that were tried


def best_match(
    trace: Trace,
    graphs_of: Callable[[], Graphs] | None,
    chip: Chip,
    model: ExecutionModel,
    tell: Callable[[str], None],
) -> Match:
    """The graph that a trace matches best, priced, and how it matches.

    graphs_of: makes the graphs by phase of the code that ran.  Raises MeasuredRequestError without
    it, and ProfileError where the trace matches no graph.
    """
    graphs = graphs_of_trace(trace, graphs_of)
    best: Match | None = None
    errors: list[ProfileError] = []
    for phase, graph in graphs.items():
        tell(f"aligning with {phase}")
        priced = estimate(graph, chip, model.as_called)
        try:
            alignment = align(trace, priced.graph)
        except ProfileError as error:
            errors.append(error)
            continue
        if best is None or alignment.score > best.alignment.score:
            best = Match(priced, alignment, tuple(graphs))
    if best is not None:
        return best
    if len(errors) == 1:
        raise errors[0]
    raise ProfileError(f"{errors[0]} (tried {units.listed(list(graphs))}; this is of the first)")


def best_fused(
    trace: Trace, graphs_of: Callable[[], Graphs] | None, tell: Callable[[str], None]
) -> tuple[FusedStep, tuple[str, ...]]:
    """The compiled step of the graph that a trace matches best, and the phases that were tried.

    Raises MeasuredRequestError without graphs, and ProfileError where no kernel has an op of one.
    """
    graphs = graphs_of_trace(trace, graphs_of)
    steps: list[FusedStep] = []
    refused: list[ProfileError] = []
    for phase, graph in graphs.items():
        tell(f"aligning with {phase}")
        try:
            steps.append(fused(trace, graph))
        except ProfileError as error:
            refused.append(error)
    if not steps:
        raise refused[0]
    return max(steps, key=lambda step: step.coverage), tuple(graphs)


def graphs_of_trace(trace: Trace, graphs_of: Callable[[], Graphs] | None) -> Graphs:
    """The graphs by phase of the code that ran; MeasuredRequestError without any."""
    if graphs_of is None:
        raise MeasuredRequestError(
            f"{trace.source or 'the trace'}: a trace does not say what ran: name it with "
            "--target, and its sizes with --batch, --seq, --phase (in Python: "
            "target=rooftrace.trace(model, x))"
        )
    graphs = graphs_of()
    if not graphs:
        raise MeasuredRequestError(f"{trace.source}: the target has no graph to set it beside")
    return graphs
