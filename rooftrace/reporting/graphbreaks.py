"""Graph breaks of torch.compile for any source that has code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.reporting.alternatives import one_chip
from rooftrace.reporting.estimates import Source, in_precisions
from rooftrace.tracer.asking import Job

if TYPE_CHECKING:
    from rooftrace.costmodels.breaking import GraphBreaks
    from rooftrace.costmodels.execution import ExecutionModel
    from rooftrace.hardware import Chip


def graph_breaks(
    source: Source,
    *args: Any,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel = "compiled",
    phase: str | None = None,
    **kwargs: Any,
) -> GraphBreaks:
    """Where torch.compile breaks the graph of a step, and what that costs on `chip`.

    source: a module with the arguments of its call, or a target.  Dynamo, the front end of
    torch.compile, runs on it without a compiler, on meta tensors; nothing is generated, and what
    the process has compiled stays as it is.  phase: forward (default), training, prefill, decode.
    execution: compiled (default: a launch for each kernel), or efficient: a CUDA graph for each
    compiled graph.

    Raises DynamoError, which names the line, where the run fails; RequestError for a source without
    a module; and what `trace` raises.
    """
    from rooftrace.costmodels.breaking import price_breaks
    from rooftrace.costmodels.rewriting import check_precisions
    from rooftrace.tracer.dynamo import traced_with_dynamo
    from rooftrace.tracer.sources.apart import Traced

    job = Job.of(graph_breaks, source, args, kwargs, phase=phase).of_one_phase()
    check_precisions(*job.precisions)
    graph, run = traced_with_dynamo(job)
    (priced,) = in_precisions(job, Traced({graph.phase: graph})).graphs.values()
    return price_breaks(priced, run, one_chip(chip, execution), execution)
