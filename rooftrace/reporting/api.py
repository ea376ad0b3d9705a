"""Calls that end in something to read: report, diff, compare, calibrate, validate, and the habits
summary and profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rooftrace.costmodels.estimating import Estimate, estimate as estimate_graph
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.findings.counters import Comparison, compare as compare_counts
from rooftrace.costmodels.findings.diffs import Diff, compare_sources, diff_estimates
from rooftrace.costmodels.knobs import Knobs, load_knobs
from rooftrace.costmodels.memory import LargestBatch, largest, memory
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.registry import own_rules
from rooftrace.costmodels.rewriting import check_precisions, reprice
from rooftrace.hardware import Chip, load_chip
from rooftrace.measured.fit import Calibration, calibrated
from rooftrace.measured.runs import Run
from rooftrace.measured.sources import KINDS, Kind, kind_of
from rooftrace.measured.traces import Trace
from rooftrace.measured.validate import Validation, validated
from rooftrace.reporting.pages import FORMATS, Report, build_report
from rooftrace.tracer import (
    at_batches,
    graphs_of,
    is_step,
    trace,
    trace_apart_each,
    traced_target,
)
from rooftrace.tracer.asking import (
    PRICES,
    SIZES,
    Asked,
    Options,
    Request,
    RequestError,
    TargetError,
    UnusedError,
    check_phases,
    check_used,
    is_graph,
    is_named,
    names_code,
    refuse_for_graph,
    sorted_arguments,
)
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.targets import Kept, Traced, keeping, naming, own_imports

Module = Any
"""A torch.Module (this package does not import torch)."""

Source = Any
"""A module, an OpGraph, graphs by phase, or a target (a string or path)."""


def estimate(
    source: Source,
    *args: Any,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    phase: str | None = None,
    **kwargs: Any,
) -> Estimate:
    """What one step costs on `chip` (default h200-sxm) when run as `execution` says (efficient).

    source: a graph, or a Plan, which has its execution; else a module with its arguments or
    anything that `trace` takes, at a `phase`.  A graph's chip and execution may also stand second
    and third.  dtype, weights_dtype, kv_dtype: storage precisions to price in.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in; and what `trace` raises.
    """
    if is_graph(source) or isinstance(source, Plan):
        if len(args) > 2 or (args and chip is not None) or (args[1:] and execution is not None):
            raise RequestError("estimate(graph, chip, execution): give each of them once")
        chip = args[0] if args else chip
        execution = args[1] if args[1:] else execution
        args = ()
    elif chip is None and args and _is_chip(args[-1]):
        raise RequestError(
            f"estimate(..., {args[-1]!r:.40}): after a module stand the arguments of its call; say "
            "chip= for the chip"
        )
    chip, execution = chip or "h200-sxm", execution or "efficient"
    if isinstance(source, Plan):
        if kwargs or phase is not None:
            name = next(iter({**kwargs, "phase": phase}))
            raise RequestError(f"{name}=: a Plan is priced already; estimate its graph anew")
        return estimate_graph(source, chip, execution)
    named = {**kwargs, **({} if phase is None else {"phase": phase})}
    wanted, call = sorted_arguments(source, args, named, estimate)
    if wanted.phases is None and not is_graph(source) and not is_step(source, args):
        wanted = replace(wanted, phases=("forward",))
    graphs = _priced(source, args, call, wanted)
    if len(graphs) != 1:
        raise RequestError(f"which phase? say phase=, one of {', '.join(graphs)}")
    return estimate_graph(next(iter(graphs.values())), chip, execution)


def report(
    model: Source,
    *args: Any,
    chip: str | Chip | Sequence[str | Chip] = "h200-sxm",
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] = ("naive", "efficient"),
    phases: Sequence[str] | None = None,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    out: str | os.PathLike[str] | None = None,
    formats: Sequence[str] = FORMATS,
    max_batch: bool = False,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Report:
    """Trace `model` called with these arguments and price it.

    model: a module with its arguments, a graph, graphs by phase, a saved graph or a target; of a
    target batch, seq, kv and inputs are the sizes, and so are they of a Hugging Face model without
    arguments.  loss, optimizer, branches, assume, repeats: as `trace` takes them.  phases: default
    forward and training, of a target those that fit.  chip: one or several names, chips or TOML
    paths.  dtype, weights_dtype, kv_dtype: storage precisions to price in.  out: a folder for
    report.md, report.json, ops.csv and figures.  max_batch: also look for the largest batch that
    fits each chip (`largest_batch`).  progress: is told what is being done.

    Returns the Report; print it for one screen.  Raises RequestError for an argument that neither
    the model nor rooftrace takes.
    """
    chips = _several(chip, (str, Chip, os.PathLike))
    models = _several(execution, (str, ExecutionModel))
    prices = {"dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    wanted, call = sorted_arguments(model, args, {**_named(phases, prices), **kwargs}, report)
    graphs = _priced(model, args, call, wanted, progress)
    result = build_report(graphs, chips, models, progress)
    if max_batch:
        again = replace(wanted.without("batch"), phases=result.phases)
        result = replace(result, largest=_largest(model, args, call, again, chips, progress))
    if out is not None:
        result.write(Path(out), formats)
    return result


def _is_chip(value: Any) -> bool:
    """Whether an argument is a chip, or the name of one that comes with rooftrace."""
    if not isinstance(value, str):
        return isinstance(value, Chip)
    try:
        load_chip(value)
    except (ValueError, LookupError):
        return False
    return True


def _named(phases: Sequence[str] | None, prices: Mapping[str, str | None]) -> dict[str, Any]:
    """Explicit arguments that were given, as `sorted_arguments` takes them."""
    named = {**prices, "phases": phases}
    return {name: value for name, value in named.items() if value is not None}


def _several(value: Any, kinds: tuple[type[Any], ...]) -> list[Any]:
    """One or several values as a list; what is neither is refused where it is read."""
    listed = isinstance(value, Iterable) and not isinstance(value, kinds)
    return list(value) if listed else [value]


def priced_graphs(
    source: Source,
    *args: Any,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> dict[str, OpGraph]:
    """The graphs by phase of a source, which takes what `report` takes, in its precisions."""
    wanted, call = sorted_arguments(source, args, kwargs, priced_graphs)
    return _priced(source, args, call, wanted, progress)


def _priced(
    source: Source,
    args: Sequence[Any],
    call: Mapping[str, Any],
    wanted: Asked,
    progress: Callable[[str], None] | None = None,
) -> dict[str, OpGraph]:
    """Graphs by phase of any source, in the precisions that were asked for."""
    check_precisions(*wanted.prices)
    graphs = graphs_of(source, args, call, wanted, progress)
    return {phase: reprice(graph, *wanted.prices) for phase, graph in graphs.items()}


def largest_batch(
    model: Source,
    *args: Any,
    chip: str | Chip | Sequence[str | Chip] = "h200-sxm",
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> dict[str, dict[str, LargestBatch]]:
    """The largest batch that fits each chip, by phase and name of the chip.

    model: a module with its arguments, or a target (with seq, kv and inputs, or a Request, for its
    other sizes).  The batch is the first dimension of the inputs; every answer is traced, and so is
    the batch after it.  loss, optimizer, assume and the like, or options: as for tracing.  dtype,
    weights_dtype, kv_dtype: storage precisions to price in.  Raises RequestError for a graph, for a
    batch, and for a module that runs at no other batch.
    """
    prices = {"dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    whole = {"request": request, "options": options}
    named = {**_named(phases, prices), **{n: v for n, v in whole.items() if v is not None}}
    wanted, call = sorted_arguments(model, args, {**named, **kwargs}, largest_batch)
    wanted.refuse(("batch",), "the batch is what is looked for; leave it out")
    chips = _several(chip, (str, Chip, os.PathLike))
    return _largest(model, args, call, wanted, chips, progress)


def _largest(
    model: Source,
    args: Sequence[Any],
    call: Mapping[str, Any],
    wanted: Asked,
    chips: Sequence[str | Chip],
    progress: Callable[[str], None] | None,
) -> dict[str, dict[str, LargestBatch]]:
    if not is_graph(model) and not is_named(model):
        wanted.refuse(
            ("seq", "kv", "inputs", "trust_remote_code"),
            "the inputs of the call have their sizes; only their batch is changed",
        )
    names, trace_at = at_batches(
        model,
        *args,
        phases=wanted.phases,
        request=wanted.request,
        options=wanted.options,
        progress=progress,
        **call,
    )
    peaks: dict[tuple[str, int], int] = {}

    def peak_of(phase: str, batch: int) -> int:
        if (phase, batch) not in peaks:
            peaks[phase, batch] = memory(reprice(trace_at(phase, batch), *wanted.prices)).peak
        return peaks[phase, batch]

    found: dict[str, dict[str, LargestBatch]] = {}
    for phase in names:
        weights = memory(reprice(trace_at(phase, 1), *wanted.prices)).weights
        found[phase] = {}
        for one in map(load_chip, chips):
            capacity = one.memory_capacity.value
            batch, open_ended = largest(partial(peak_of, phase), capacity)
            peak = peak_of(phase, max(1, batch))
            found[phase][one.name] = LargestBatch(batch, peak, weights, capacity, open_ended)
    return found


def diff(
    before: Source,
    after: Source,
    *args: Any,
    chip: str | Chip = "h200-sxm",
    execution: str | ExecutionModel = "efficient",
    phases: Sequence[str] | None = None,
    names: tuple[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Diff:
    """What changed in cost from `before` to `after`.

    Each is a module (called with the same arguments), a graph, graphs by phase, a saved graph or a
    target.  Code is run from its own files in a process of its own.  Sizes and precisions, as
    `report` takes them, are those of both sides; beside a graph, which has its sizes, those of the
    other.  names: what to call the two.  Raises RequestError for what neither side takes.
    """
    sides = (before, after)
    if names is not None and (isinstance(names, str) or len(names) != 2):
        raise RequestError(f"names={names!r:.60}: expected two, for example ('main', 'branch')")
    named = {**_named(phases, {}), **kwargs}
    if all(is_named(side) and names_code(os.fspath(side)) for side in sides):
        wanted, _ = sorted_arguments(before, args, named, diff)
        wanted.refuse(("trust_remote_code",), "the code of these targets runs as it is")
    asks = [_of_side(side, sides[1 - i], args, named) for i, side in enumerate(sides)]
    loaded, model = load_chip(chip), execution_model(execution)
    if any(map(is_named, sides)):
        names = names or (_name(before, "before"), _name(after, "after"))
    traced = _sides(sides, asks, progress)
    placed: list[dict[str, Estimate]] = []
    files: list[Mapping[str, str]] = []
    for get, name in zip(traced, map(_name, sides, ("before", "after")), strict=True):
        # Rules that come with the code of one side are not the other's.
        with own_rules(), naming(name):
            found = get()
            placed.append(
                {phase: estimate_graph(g, loaded, model) for phase, g in found.graphs.items()}
            )
        files.append(found.files)
    result = diff_estimates(placed[0], placed[1], names or ("before", "after"))
    return replace(result, sources=compare_sources(files[0], files[1]))


def _name(side: Source, otherwise: str) -> str:
    return os.fspath(side) if is_named(side) else otherwise


@dataclass(frozen=True)
class _Side:
    """What is asked of one side of a diff: the arguments of its call, and the rest."""

    args: Sequence[Any]
    call: Mapping[str, Any]
    wanted: Asked


def _of_side(side: Source, other: Source, args: Sequence[Any], named: Mapping[str, Any]) -> _Side:
    """The arguments of a diff as one side takes them: what a graph has already is the other's."""
    if is_graph(side) and not is_graph(other):
        keep = ("phase", "phases", *PRICES)
        named = {name: value for name, value in named.items() if name in keep}
        args = ()
    elif is_named(side) and not is_named(other) and not is_graph(other):
        args = ()  # the arguments of the module on the other side
    wanted, call = sorted_arguments(side, args, named, diff)
    if is_graph(side):
        refuse_for_graph(wanted, _name(side, "both sides"))
    check_precisions(*wanted.prices)
    return _Side(args, call, wanted)


def _sides(
    sides: Sequence[Source], asks: Sequence[_Side], progress: Callable[[str], None] | None
) -> list[Callable[[], Traced]]:
    """How the graphs of each side are had.  Code runs apart, all of it at once, unless it brings
    rules of its own: those are needed here."""

    def here(side: Source, ask: _Side) -> Traced:
        if is_named(side) and not is_graph(side):
            wanted = ask.wanted
            made = traced_target(side, wanted, progress)
        else:
            made = Traced(graphs_of(side, ask.args, ask.call, ask.wanted, progress))
        return priced(made, ask)

    def priced(made: Traced, ask: _Side) -> Traced:
        check_used(ask.wanted, made.graphs)
        prices = ask.wanted.prices
        graphs = {phase: reprice(graph, *prices) for phase, graph in made.graphs.items()}
        return replace(made, graphs=graphs)

    code = [i for i, side in enumerate(sides) if is_named(side) and names_code(os.fspath(side))]
    apart = dict(
        zip(
            code,
            trace_apart_each([(os.fspath(sides[i]), asks[i].wanted) for i in code], progress),
            strict=True,
        )
    )
    rules = any(made is not None and made.rules for made in apart.values())

    def with_rules(side: Source, ask: _Side) -> Traced:
        try:
            return here(side, ask)
        except TargetError as error:
            raise TargetError(
                f"{error}\nThe code of the two brings cost rules, so both run in this process, and "
                "it cannot be run twice in one: put the rules into a file of their own (--rules)"
            ) from error

    if rules or None in apart.values():
        apart = {}
    return [
        partial(priced, made, ask)
        if (made := apart.get(i)) is not None
        else partial(with_rules if rules and i in code else here, side, ask)
        for i, (side, ask) in enumerate(zip(sides, asks, strict=True))
    ]


def compare(
    model: Source,
    *args: Any,
    peers: Sequence[str] = ("flopcounter", "fvcore"),
    phases: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> list[Comparison]:
    """Our matrix FLOPs beside those of other counters, with every difference by module and op.

    model: a module, called with these arguments, or a target (a string or path) at batch, seq, kv
    and inputs.  peers: flopcounter (torch.utils.flop_counter) and fvcore.  phases: default forward
    and training; of a target those that fit the model.  Raises RequestError for an unknown peer,
    for a graph, which no counter can run, and for an argument that nothing takes; TargetError,
    TraceError.
    """
    from rooftrace.tracer.phases import check_peers, count_phases
    from rooftrace.tracer.targets import call_inputs, load_target, module_inputs

    if is_graph(model) or is_step(model, args):
        raise RequestError(
            "other counters have to run the module itself: give the module or the target that it "
            "was traced from"
        )
    check_peers(peers)
    wanted, call = sorted_arguments(model, args, {**_named(phases, {}), **kwargs}, compare)
    wanted.refuse(PRICES, "FLOPs do not depend on it; leave it out")
    if wanted.phases is not None:
        check_phases(wanted, wanted.phases)
    if is_named(model) and names_code(os.fspath(model)):
        wanted.refuse(("trust_remote_code",), "the code of this target runs as it is")
    with own_imports():
        if is_named(model):
            if progress:
                progress("building the model")
            loaded = load_target(os.fspath(model), wanted.request)
            module, inputs, name = loaded.module, loaded.inputs, loaded.name
            usual = wanted.phases
        else:
            module, name, usual = model, "", wanted.phases or ("forward", "training")
            wanted.refuse(("trust_remote_code",), "the module is built already")
            if args or call:
                wanted.refuse(SIZES, "the arguments of the call have their sizes")
                inputs = call_inputs(module, args, call)
            elif wanted.sized():
                inputs = module_inputs(module, wanted.request)
            else:
                inputs = call_inputs(module, args, call)
        counted = count_phases(module, inputs, peers, usual, wanted.options, progress, name)
    return [compare_counts(graph, peer) for graph, peer in counted]


def validate(
    measured: Any,
    chip: str | Chip,
    execution: str | ExecutionModel = "eager",
    target: Source | None = None,
    knobs: str | os.PathLike[str] | Knobs | None = None,
    *,
    phases: Sequence[str] | None = None,
    counters: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Validation:
    """What was measured beside what is predicted for it; print it for one screen.

    measured: a path (told by its contents: a run of `rooftrace measure`, a trace of torch.profiler,
    a table of step times), or a Run, a Trace, steps.  execution: how it was run.  target: what
    ran: a graph (`trace(model, x)`), graphs by phase, or a target; of a trace at the batch, seq,
    kv, dtype ... that `report` takes; for a table a template such as "models.py:{target}"; rows of
    a run name it themselves.  knobs: what a calibration found, by name or path.  phases: only
    these.  counters: a CSV of Nsight Compute of the same step as a trace.

    Raises MeasuredRequestError where these do not go together, ProfileError and RunFileError for a
    file that cannot be read or a trace of something else.
    """
    knobs = load_knobs(knobs) if isinstance(knobs, (str, os.PathLike)) else knobs
    model = execution_model(execution, **({} if knobs is None else {"knobs": knobs}))
    wanted = _wanted(target, {**_named(phases, {}), **kwargs}, validate)
    given, template = _what_ran(measured, target, wanted, progress)
    with keeping(Kept()):  # rows of one target share what it imported
        return validated(
            measured, load_chip(chip), model, given, template, wanted.phases, counters, progress
        )


def calibrate(
    measured: Any,
    chip: str | Chip,
    execution: str | ExecutionModel = "eager",
    target: Source | None = None,
    *,
    start: str | Knobs | None = None,
    free: Sequence[str] | None = None,
    title: str = "",
    phases: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Calibration:
    """Knobs that make predictions for `chip` right, and how sure they are; print it to see both.

    measured, execution, target, phases, sizes: as `validate` takes them.  start: knobs to begin
    with, by name or path; default: typical ones of GPUs, the datasheet of others.  free: names of
    the knobs to fit; default: compute and memory, and of a run or a trace as many as it supports.
    `.knobs` is for `execution_model(name, knobs=...)`, `.save(path)` writes them for --knobs.

    Raises what `validate` does, and CalibrationError for less than there are knobs to fit.
    """
    wanted = _wanted(target, {**_named(phases, {}), **kwargs}, calibrate)
    given, template = _what_ran(measured, target, wanted, progress, all_phases=True)
    begin = os.fspath(start) if isinstance(start, os.PathLike) else start
    model = execution_model(execution)
    with keeping(Kept()):
        return calibrated(
            measured, load_chip(chip), model, given, template, begin, free, title, progress
        )


def _wanted(target: Source | None, named: Mapping[str, Any], own: Callable[..., Any]) -> Asked:
    """What is asked of the target of measurements."""
    return sorted_arguments("" if target is None else target, (), named, own)[0]


def _what_ran(
    measured: Any,
    target: Source | None,
    wanted: Asked,
    progress: Callable[[str], None] | None,
    all_phases: bool = False,
) -> tuple[Callable[[], Mapping[str, OpGraph]] | None, str | None]:
    """How the graphs of what was measured are made, or a template for the names in it.

    all_phases: whether rows of all phases are taken, whatever is asked.
    Raises MeasuredRequestError for sizes of what says itself what ran, or without a target.
    """
    if isinstance(measured, Trace):
        kind: Kind = "trace"
    elif isinstance(measured, (str, os.PathLike)):
        kind = kind_of(measured)
    else:
        kind = "run" if isinstance(measured, Run) else "steps"
    asks = [name for name in wanted.given if name != "phases" or all_phases]
    if asks and kind != "trace" and (target is None or is_named(target)):
        shown = measured if isinstance(measured, (str, os.PathLike)) else "this"
        raise UnusedError(
            asks[0],
            repr(wanted.value(asks[0])),
            f"this is for a trace; {shown} is {KINDS[kind]}, and says itself what ran",
        )
    if target is None:
        wanted.refuse(wanted.given if kind == "trace" else (), "there is no target to run so")
        return None, None
    check_precisions(*wanted.prices)
    if not is_named(target):
        return partial(_priced, target, (), {}, wanted, progress), None
    if kind == "trace":
        return partial(_priced, target, (), {}, wanted, progress), os.fspath(target)
    return None, os.fspath(target)


@dataclass(frozen=True)
class Profile:
    """Counts of one forward pass.  Unpacks as `macs, params`, which is thop's order.

    flops counts a multiply-add as 2 and includes vector work; macs are those of matrix products and
    convolutions.  unsupported: names of ops without a rule.
    """

    macs: int
    params: int
    flops: int
    unsupported: tuple[str, ...]
    estimate: Estimate

    def __iter__(self) -> Any:
        return iter((self.macs, self.params))


def profile(model: Module, inputs: Sequence[Any] = (), **kwargs: Any) -> Profile:
    """FLOPs, MACs and parameters of one forward pass of `model(*inputs, **kwargs)`."""
    sorted_arguments(model, inputs, kwargs, profile)
    result = estimate_graph(trace(model, *inputs, **kwargs), execution="eager")
    return Profile(
        result.macs,
        int(result.graph.model["params"]),
        result.flops,
        tuple(u.target for u in result.unsupported_ops()),
        result,
    )


def summary(
    model: Module,
    input_size: Sequence[int] | None = None,
    *,
    input_data: Any = None,
    chip: str | Chip = "h200-sxm",
    execution: str | ExecutionModel = "eager",
    **kwargs: Any,
) -> Estimate:
    """An estimate of one forward pass, for the habit: print it for the table.

    Give `input_size` (one float tensor in the model's precision) or `input_data` (a tensor, a
    tuple, or a dict of keyword arguments); for a target, a graph or a Hugging Face model sizes may
    stand in their place (batch=8), as for `estimate`.
    """
    wanted, _ = sorted_arguments(model, (), kwargs, summary)
    if (input_size, input_data) == (None, None) and (
        is_named(model) or is_graph(model) or wanted.sized()
    ):
        return estimate(model, chip=chip, execution=execution, **kwargs)
    if (input_size is None) == (input_data is None):
        raise ValueError("summary: give either input_size=(8, 3, 224, 224) or input_data=")
    if input_size is not None:
        from rooftrace.tracer import floating_input

        return estimate_graph(
            trace(model, floating_input(model, tuple(input_size)), **kwargs), chip, execution
        )
    if isinstance(input_data, Mapping):
        return estimate_graph(trace(model, **input_data, **kwargs), chip, execution)
    args = tuple(input_data) if isinstance(input_data, (tuple, list)) else (input_data,)
    return estimate_graph(trace(model, *args, **kwargs), chip, execution)
