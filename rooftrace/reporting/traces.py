"""The graphs of a job in the precisions of its request."""

from __future__ import annotations

from dataclasses import replace

from rooftrace.costmodels.rewriting import check_precisions, reprice
from rooftrace.tracer.requests import Job
from rooftrace.tracer.sources import traced
from rooftrace.tracer.sources.apart import Traced


def priced(job: Job) -> Traced:
    """The graphs of a job, in the precisions of its request."""
    check_precisions(*job.precisions)
    return in_precisions(job, traced(job))


def in_precisions(job: Job, made: Traced) -> Traced:
    """Graphs that were traced for a job, in the precisions of its request."""
    job.check_used(made.graphs)
    graphs = {phase: reprice(graph, *job.precisions) for phase, graph in made.graphs.items()}
    return replace(made, graphs=graphs)
