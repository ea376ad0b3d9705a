"""Explanations of any source: its form around the sizes that were asked for, then its formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.explaining import (
    Explanation,
    critical_of,
    explained,
    sizesweeps,
)
from rooftrace.costmodels.planforms import Conditions
from rooftrace.costmodels.sweeping import Form
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.reporting.estimates import Source
from rooftrace.reporting.requests import StepRequest
from rooftrace.reporting.requests.pricing import check_groups
from rooftrace.reporting.stepforms import decoding_first, form_of
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources import traced

MOST_BATCH = 4096
"""The largest batch that is asked whether computing limits there."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST_SEQ = 64
"""The shortest sequence of a sweep."""


def explain(
    source: Source,
    *args: Any,
    op: str | int | None = None,
    at: Mapping[str, int] | None = None,
    plot: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Where the numbers of a step come from: FLOPs and bytes as formulas, what limits, and tests.

    op: the path of a module, or its end, with * as in file names; the name of an op; or the number
    of a kernel in the plan.  None: the whole step as a worked example, with the least batch that
    computing limits and a sweep.  phase: default decode for a Hugging Face model that has it, else
    forward.  at: the sizes that formulas are in, by the names that `form` has, with their values;
    default batch, and kv (decode) or seq, as they are asked for or as the source has them.
    chip: of several, the first is explained, and all are in the sweep.  plot: a PNG for the sweep.
    Other arguments are those of `trace` and `estimate`.

    Raises RequestError where no kernel answers to `op`, and for sizes that the source does not
    have; and what `form` and `estimate` raise.
    """
    if plot is not None and op is not None:
        raise RequestError(f"--plot {plot}: it draws the sweep of a whole step; leave --op out")
    asked = StepRequest.of(explain, source, args, kwargs)
    job, chips, (conditions,) = asked.job, asked.chips, asked.conditions
    with telling(progress):
        job, graph = first_graph(job)
        check_groups(lambda: [graph], asked.models)
        sizes = dict(at) if at is not None else sizes_of(job, graph)
        formed = _formed(job, sizes, whole=op is None)
        if op is not None:
            return explained(formed, sizes, chips[0], conditions, op)
        tell("evaluating the sweep")
        critical = None
        if "batch" in sizes:
            top = max(MOST_BATCH, sizes["batch"])
            critical = critical_of(formed, "batch", range(1, top + 1), sizes, chips[0], conditions)
        marked = None if critical is None else critical.expected
        sweeps = _sweeps(formed, sizes, chips, conditions, marked)
        result = explained(formed, sizes, chips[0], conditions, None, critical, sweeps)
    if plot is not None:
        from rooftrace.reporting.figures import ofsizes, style

        if not sweeps:
            raise RequestError(f"--plot {plot}: this step has no size to sweep")
        style.save(lambda: ofsizes.sweep_roofline(sweeps[0], chips), Path(plot))
    return result


def first_graph(job: Job) -> tuple[Job, OpGraph]:
    """The job of one phase, and its graph at the sizes that were asked for."""
    return decoding_first(job, lambda tried: (tried, _only(tried)))


def _only(job: Job) -> OpGraph:
    graphs = traced(job).graphs
    job.check_used(graphs)
    if len(graphs) != 1:
        raise RequestError(f"--phase {','.join(graphs)}: expected one phase to explain")
    return next(iter(graphs.values()))


def sizes_of(job: Job, graph: OpGraph) -> dict[str, int]:
    """Batch and length of a step, where it has them."""
    workload, request = graph.workload, job.request
    sizes = {}
    batch = request.batch or workload.get("batch") or _first_dimension(job)
    if batch:
        sizes["batch"] = int(batch)
    if graph.phase == "decode" and workload.get("kv"):
        sizes["kv"] = int(workload["kv"])
    elif workload.get("item") == "token" and workload.get("items") and batch and not job.is_code:
        sizes["seq"] = int(workload["items"]) // int(batch)
    if not sizes:
        raise RequestError(
            "no size to write formulas in: name some with their values, for example at={'batch': 8}"
        )
    return sizes


def _first_dimension(job: Job) -> int | None:
    """That of the first tensor of a call."""
    values = (*job.args, *job.kwargs.values())
    shapes: Iterator[Sequence[int]] = (getattr(value, "shape", ()) for value in values)
    return next((int(shape[0]) for shape in shapes if len(shape)), None)


def _formed(job: Job, sizes: Mapping[str, int], whole: bool) -> Form:
    """The form around these sizes, up to twice each where the model takes that."""

    from rooftrace.tracer.source import TraceError

    def levels(most: int) -> dict[str, range]:
        spans = {n: range(max(1, v // 4), most * v + 1) for n, v in sizes.items()}
        if whole and "batch" in sizes:
            spans["batch"] = range(1, max(MOST_BATCH, sizes["batch"]) + 1)
        elif "batch" in sizes:
            spans["batch"] = range(1, 4 * max(sizes["batch"], 4) + 1)
        if whole and "seq" in sizes:
            low = min(LEAST_SEQ, spans["seq"].start)
            spans["seq"] = range(low, spans["seq"].stop)
        return spans

    try:
        return form_of(job, levels(2))
    except (RequestError, TraceError):
        return form_of(job, levels(1))


def _sweeps(
    form: Form,
    sizes: Mapping[str, int],
    chips: Sequence[Chip],
    conditions: Conditions,
    marked: int | None,
) -> list[sizesweeps.SizeSweep]:
    """Batches of a decode step; lengths of other steps of language models, else batches."""
    if "seq" in sizes:
        most = max(sizes["seq"], *(regime.high[form.names.index("seq")] for regime in form.regimes))
        lengths = [LEAST_SEQ << n for n in range(32) if LEAST_SEQ << n <= most]
        values = sorted({*lengths, sizes["seq"]})
        return [sizesweeps.size_sweep(form, "seq", values, sizes, chips, conditions)]
    if "batch" in sizes:
        batches = sorted({*BATCHES, sizes["batch"]})
        return [sizesweeps.size_sweep(form, "batch", batches, sizes, chips, conditions, marked)]
    return []
