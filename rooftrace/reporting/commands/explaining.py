"""Explanations of a step: graph breaks, formulas of FLOPs and bytes, and limits of decode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._progress import tell, telling
from rooftrace.errors import RequestError, UnusedError, hint
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.units import UnitError, parse
from rooftrace.reporting.commands.arguments import ExploreArguments
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.pricing import PLAIN, PricingOptions, check_groups
from rooftrace.reporting.commands.requests import StepRequest, in_precisions
from rooftrace.reporting.commands.sweeps import (
    decoding_first,
    form_of,
    known_form,
    lengths_in,
    level_values,
)
from rooftrace.studies.explaining import Explanation, critical_of, decode_forms, explained, steps
from rooftrace.studies.forms import Conditions
from rooftrace.studies.sweeps import Form
from rooftrace.tracer import Job
from rooftrace.tracer.phases import kept_or_traced

if TYPE_CHECKING:
    from rooftrace.studies.advice import GraphBreaks


def graph_breaks(source: Source, *args: Any, **kwargs: Any) -> GraphBreaks:
    """Where torch.compile breaks the graph of a step, and the costs of it on `chip`.

    source: a module with the arguments of its call, or a target.  Dynamo, the front end of
    torch.compile, runs on it without a compiler, on meta tensors; nothing is generated, and what
    the process has compiled stays as it is.  phase: forward (default), training, prefill, decode.
    execution: compiled (default: a launch for each kernel), or efficient: a CUDA graph for each
    compiled graph.

    Raises DynamoError, which names the line, where the run fails; RequestError for a source without
    a module; and the errors of `trace`.
    """
    from rooftrace.studies.advice import price_breaks
    from rooftrace.studies.breaks import traced_with_dynamo
    from rooftrace.tracer.phases.apart import Traced

    request = StepRequest.of(graph_breaks, source, args, kwargs)
    job = request.job.of_one_phase()
    graph, run = traced_with_dynamo(job)
    check_groups(lambda: [graph], request.models)
    (priced,) = in_precisions(job, Traced({graph.phase: graph})).graphs.values()
    return price_breaks(priced, run, request.chip, request.model)


# -- exploring -------------------------------------------------------------------------------------

LENGTHS = (2048, 4096, 8192, 16384)  # of a model with fewer: its usual length, its half ...
_MOST_BATCH = 16_384
NAMES = ("devices", "kv", "batch")


def explore(
    source: Source,
    *args: Any,
    plot: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> decode_forms.Exploration:
    """Whether any batch makes a decode step limited by computing, over devices and cache lengths.

    source: a target, or a `Form` (or the file of one) over batch and kv.  over: values of devices
    that share the routed experts (default 1 to 64; 1 without such), of kv (default 2048 to 16384,
    or up to the length of the model), and of batch, of one device (default: powers of 2, then every
    number).  alpha: the share of the slower of HBM and
    link at which computing counts as the limit.  link: byte/s, or "50 GB/s"; default: the chip's
    fastest.  plot: a PNG.  FLOPs and bytes are those of estimates; other arguments as of `trace`.

    Raises RequestError for a name or values that there are not and for devices without routed
    experts, and the errors of `form`.
    """
    arguments, kwargs = taken(ExploreArguments, kwargs)
    levels = _levels(arguments.over)
    bandwidth = _bandwidth(arguments.link)
    pricing, sizes = PricingOptions.parted(kwargs)
    _check_bounds(pricing)
    saved = known_form(source)
    if saved is not None:
        models, (used,) = conditions_of(explore, pricing, source)
        for name in ("dtype", "weights_dtype", "kv_dtype"):
            sizes.pop(name, None)
        (conditions,) = pricing.conditions(models)
    else:
        request = StepRequest.of(explore, source, args, {**kwargs, "phase": "decode"})
        used, (conditions,), job = request.chip, request.conditions, request.job
        job.refuse(("seq",), "a decode step has the lengths of its cache; say them with over")
        job.refuse(NAMES, "its values are those of `over`; leave it out")
    with telling(progress):
        if saved is not None:
            form, fixed = saved, _fixed(saved, sizes)
        else:
            form, fixed = _formed(job, levels, "kv" in (arguments.over or {})), {}
        tell("exploring")
        result = decode_forms.explore_form(
            form,
            conditions,
            used,
            devices=levels.get("devices"),
            kv=levels["kv"],
            batches=levels.get("batch"),
            alpha=arguments.alpha,
            link=bandwidth,
            fixed=fixed,
        )
    if plot is not None:
        from rooftrace.reporting.figures import exploration_plot, style

        style.save(lambda: exploration_plot(result), Path(plot))
    return result


def _check_bounds(pricing: PricingOptions) -> None:
    """Raise RequestError for options of rates: an exploration is at rates of datasheets."""
    for name in _OF_RATES:
        value = getattr(pricing, name)
        if value != getattr(PLAIN, name):
            raise UnusedError(name, f"{value}", _OF_DATASHEETS)
    for name, value in (pricing.factors or {}).items():
        if name.partition(".")[0] in _RATES:
            raise UnusedError("settings", f"{name}={value}", _OF_DATASHEETS)


_OF_DATASHEETS = "an exploration is of one device at the rates of its datasheet; leave it out"
_OF_RATES = ("knobs", "what_if", "exchange")
_RATES = ("knobs", "utilization", "disturbances", "exchange")
"""Fields of executions that times alone depend on."""


def _levels(over: Mapping[str, Any] | None) -> dict[str, Sequence[int]]:
    levels: dict[str, Sequence[int]] = {"kv": LENGTHS}
    for name, values in (over or {}).items():
        if name not in NAMES:
            raise RequestError(f"over {name!r}: expected {', '.join(NAMES)}{hint(name, NAMES)}")
        levels[name] = tuple(level_values(name, values))
    return levels


def _bandwidth(link: str | float | None) -> float | None:
    if isinstance(link, str):
        try:
            link = parse(link, "byte/s")
        except UnitError as error:
            raise RequestError(f"link={error}") from None
    if link is not None and not 0 < link < float("inf"):
        raise RequestError(f"link={link!r}: expected byte/s above 0, or as '50 GB/s'")
    return link


def _formed(job: Job, levels: dict[str, Sequence[int]], said: bool) -> Form:
    """The form over all batches of a device and one twice as large, and all lengths between.

    said: whether the user named the lengths; else a model that takes none so long gets its own.
    """
    most = max(levels.get("batch", (_MOST_BATCH,)))
    batches = range(1, 2 * most + 1)
    lengths = levels["kv"]
    try:
        over = {"batch": batches, "kv": range(min(lengths), max(lengths) + 1)}
        return form_of(job, over, asked={"kv": lengths})
    except RequestError:
        if said:
            raise
    last = sizes_of(*first_graph(job))["kv"]
    levels["kv"] = tuple(max(1, last // part) for part in (8, 4, 2, 1))
    return _formed(job, levels, True)


def _fixed(form: Form, sizes: Mapping[str, Any]) -> dict[str, int]:
    """The other sizes of a form, by name."""
    for name in ("batch", "kv"):
        if name not in form.names:
            raise RequestError(f"{form.title}: the form is not over {name}: expected batch and kv")
    numbers = form.numbers({**sizes, "batch": 1, "kv": 1})
    named = dict(zip(form.names, numbers, strict=True))
    return {name: size for name, size in named.items() if name not in ("batch", "kv")}


# -- explaining ------------------------------------------------------------------------------------

MOST_BATCH = 4096
"""The largest batch for which the limit of computing is looked for."""
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
    """Where the numbers of a step come from: FLOPs and bytes as formulas, limits, and tests.

    op: the path of a module, or its end, with * as in file names; the name of an op; or the number
    of a kernel in the plan.  None: the whole step as a worked example, with the least batch that
    computing limits and a sweep.  phase: default decode for a Hugging Face model that has it, else
    forward.  at: the sizes that formulas are in, by the names that `form` has, with their values;
    default batch, and kv (decode) or seq, as they are asked for or as the source has them.
    chip: of several, the first is explained, and all are in the sweep.  plot: a PNG for the sweep.
    Other arguments are those of `trace` and `estimate`.

    Raises RequestError where no kernel answers to `op`, and for sizes that the source does not
    have; and the errors of `form` and `estimate`.
    """
    if plot is not None and op is not None:
        raise RequestError(f"--plot {plot}: it draws the sweep of a whole step; leave --op out")
    request = StepRequest.of(explain, source, args, kwargs)
    chips, (conditions,) = request.chips, request.conditions
    with telling(progress):
        job, graph = first_graph(request.job)
        check_groups(lambda: [graph], request.models)
        sizes = dict(at) if at is not None else sizes_of(job, graph)
        formed = _explained_form(job, sizes, with_sweep=op is None)
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
        from rooftrace.reporting.figures import style, sweep_roofline

        if not sweeps:
            raise RequestError(f"--plot {plot}: this step has no size to sweep")
        style.save(lambda: sweep_roofline(sweeps[0], chips), Path(plot))
    return result


def first_graph(job: Job) -> tuple[Job, OpGraph]:
    """The job of one phase, and its graph at the requested sizes."""
    return decoding_first(job, lambda tried: (tried, _only(tried)))


def _only(job: Job) -> OpGraph:
    graphs = kept_or_traced(job).graphs
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


def _explained_form(job: Job, sizes: Mapping[str, int], with_sweep: bool) -> Form:
    """The form around these sizes, up to twice each where the model takes that.

    with_sweep: also over the batches and lengths of the sweep of a step.
    """
    from rooftrace.errors import TraceError

    def levels(most: int) -> dict[str, range]:
        spans = {n: range(max(1, v // 4), most * v + 1) for n, v in sizes.items()}
        if with_sweep and "batch" in sizes:
            spans["batch"] = range(1, max(MOST_BATCH, sizes["batch"]) + 1)
        elif "batch" in sizes:
            spans["batch"] = range(1, 4 * max(sizes["batch"], 4) + 1)
        if with_sweep and "seq" in sizes:
            low = min(LEAST_SEQ, spans["seq"].start)
            spans["seq"] = range(low, spans["seq"].stop)
        return {name: lengths_in(job, name, span) for name, span in spans.items()}

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
) -> list[steps.SizeSweep]:
    """Batches of a decode step; lengths of other steps of language models, else batches."""
    if "seq" in sizes:
        most = max(sizes["seq"], *(regime.high[form.names.index("seq")] for regime in form.regimes))
        lengths = [LEAST_SEQ << n for n in range(32) if LEAST_SEQ << n <= most]
        values = sorted({*lengths, sizes["seq"]})
        return [steps.size_sweep(form, "seq", values, sizes, chips, conditions)]
    if "batch" in sizes:
        batches = sorted({*BATCHES, sizes["batch"]})
        return [steps.size_sweep(form, "batch", batches, sizes, chips, conditions, marked)]
    return []
