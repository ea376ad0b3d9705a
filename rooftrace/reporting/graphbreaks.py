"""Graph breaks of torch.compile for any source that has code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.reporting.estimates import Source
from rooftrace.reporting.requests import StepRequest
from rooftrace.reporting.requests.pricing import check_groups
from rooftrace.reporting.traces import in_precisions

if TYPE_CHECKING:
    from rooftrace.costmodels.breaking import GraphBreaks


def graph_breaks(source: Source, *args: Any, **kwargs: Any) -> GraphBreaks:
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
    from rooftrace.tracer.dynamo import traced_with_dynamo
    from rooftrace.tracer.sources.apart import Traced

    asked = StepRequest.of(graph_breaks, source, args, kwargs)
    job = asked.job.of_one_phase()
    graph, run = traced_with_dynamo(job)
    check_groups(lambda: [graph], asked.models)
    (priced,) = in_precisions(job, Traced({graph.phase: graph})).graphs.values()
    return price_breaks(priced, run, asked.chip, asked.model)
