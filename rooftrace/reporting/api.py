"""Calls that end in something to read: report, diff, compare, calibrate, validate, and the habits
summary and profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rooftrace.costmodels.compare import Comparison
from rooftrace.costmodels.compare import compare as compare_counts
from rooftrace.costmodels.diff import Diff, diff_estimates
from rooftrace.costmodels.estimate import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.knobs import Knobs, load_knobs
from rooftrace.costmodels.largest import LargestBatch, largest
from rooftrace.costmodels.memory import memory
from rooftrace.costmodels.profiles.records import Profile as Trace
from rooftrace.costmodels.profiles.source import kind_of
from rooftrace.costmodels.rewrite import reprice
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile import load_chip
from rooftrace.reporting.calibrating import Calibration, calibrated
from rooftrace.reporting.report import FORMATS, Report, build_report
from rooftrace.reporting.validating import Validation, validated
from rooftrace.tracer.api import at_batches, trace, trace_target
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.request import Options, Request

Module = Any
"""A torch.Module (this package does not import torch)."""

_OPTIONS = ("loss", "optimizer", "branches", "assume", "repeats")
"""Arguments of `trace` that say how, which are not the model's."""

Source = Any
"""A module, an OpGraph, graphs by phase, or a target (a string or path)."""


def report(
    model: Source,
    *args: Any,
    chip: str | Chip | Sequence[str | Chip] = "h200-sxm",
    execution: Sequence[str | ExecutionModel] = ("naive", "efficient"),
    phases: Sequence[str] | None = None,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    out: str | os.PathLike[str] | None = None,
    formats: Sequence[str] = FORMATS,
    max_batch: bool = False,
    **kwargs: Any,
) -> Report:
    """Trace `model` called with these arguments and price it.

    model: a module with its arguments, or anything that `graphs_of` takes.  phases: default forward
    and training.  chip: one or several names, chips or TOML paths.  dtype, weights_dtype, kv_dtype:
    storage precisions to price in.  out: a folder for report.md, report.json, ops.csv and figures.
    max_batch: also look for the largest batch that fits each chip (`largest_batch`).
    Returns the Report; print it for one screen.
    """
    chips = [chip] if isinstance(chip, (str, Chip, os.PathLike)) else list(chip)
    graphs = graphs_of(model, *args, phases=phases, dtype=dtype, **kwargs)
    priced = {
        name: reprice(graph, dtype, weights_dtype, kv_dtype) for name, graph in graphs.items()
    }
    result = build_report(priced, chips, execution)
    if max_batch:
        own = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        largest_found = largest_batch(
            model,
            *args,
            chip=chips,
            phases=result.phases,
            options=Options(dtype=dtype or weights_dtype, **own),
            dtype=dtype,
            weights_dtype=weights_dtype,
            kv_dtype=kv_dtype,
            **kwargs,
        )
        result = replace(result, largest=largest_found)
    if out is not None:
        result.write(Path(out), formats)
    return result


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

    model: a module with its arguments, or a target (with a Request for its other sizes).  The batch
    is the first dimension of the inputs; every answer is traced, and so is the batch after it.
    options: loss, optimizer and the like, as for tracing.  dtype, weights_dtype, kv_dtype: storage
    precisions to price in.  Raises RequestError for a graph,
    and for a module that runs at no other batch.
    """
    chips = [chip] if isinstance(chip, (str, Chip, os.PathLike)) else list(chip)
    if options is None:
        options = Options(dtype=dtype or weights_dtype)
    names, trace_at = at_batches(
        model, *args, phases=phases, request=request, options=options, progress=progress, **kwargs
    )
    peaks: dict[tuple[str, int], int] = {}

    def peak_of(phase: str, batch: int) -> int:
        if (phase, batch) not in peaks:
            graph = reprice(trace_at(phase, batch), dtype, weights_dtype, kv_dtype)
            peaks[phase, batch] = memory(graph).peak
        return peaks[phase, batch]

    found: dict[str, dict[str, LargestBatch]] = {}
    for phase in names:
        weights = memory(reprice(trace_at(phase, 1), dtype, weights_dtype, kv_dtype)).weights
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
    names: tuple[str, str] = ("before", "after"),
    **kwargs: Any,
) -> Diff:
    """What changed in cost from `before` to `after`.

    Each is a module (called with the same arguments), a graph, graphs by phase, or a target.
    """
    sides = [
        {
            phase: estimate(graph, chip, execution)
            for phase, graph in graphs_of(side, *args, phases=phases, **kwargs).items()
        }
        for side in (before, after)
    ]
    return diff_estimates(sides[0], sides[1], names)


def compare(
    model: Source,
    *args: Any,
    peers: Sequence[str] = ("flopcounter", "fvcore"),
    phases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[Comparison]:
    """Our matrix FLOPs beside those of other counters, with every difference by module and op.

    model: a module, called with these arguments, or a target (a string or path).  peers:
    flopcounter (torch.utils.flop_counter) and fvcore.  phases: default forward and training; of a
    target those that fit the model.  Raises RequestError for an unknown peer, TargetError,
    TraceError.
    """
    from rooftrace.tracer.inputs import call_inputs
    from rooftrace.tracer.peers import count_phases

    if isinstance(model, (str, os.PathLike)):
        return compare_target(model, peers, phases)
    phases = phases or ("forward", "training")
    counted = count_phases(model, call_inputs(model, args, kwargs), peers, phases)
    return [compare_counts(graph, peer) for graph, peer in counted]


def compare_target(
    target: str | os.PathLike[str],
    peers: Sequence[str],
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Comparison]:
    """`compare` for a target, at the sizes of `request` and traced as `options` say."""
    from rooftrace.tracer.peers import check_peers, count_phases
    from rooftrace.tracer.target import load_target

    check_peers(peers)
    if progress:
        progress("building the model")
    loaded = load_target(os.fspath(target), request)
    counted = count_phases(
        loaded.module, loaded.inputs, peers, phases, options, progress, loaded.name
    )
    return [compare_counts(graph, peer) for graph, peer in counted]


def validate(
    measured: Any,
    chip: str | Chip,
    execution: str | ExecutionModel = "eager",
    target: Source | None = None,
    knobs: str | Knobs | None = None,
    *,
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    counters: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Validation:
    """What was measured beside what is predicted for it; print it for one screen.

    measured: a path (told by its contents: a run of `rooftrace measure`, a trace of torch.profiler,
    a table of step times), or a Run, a Profile, steps.  execution: how it was run.  target: what
    ran: a graph (`trace(model, x)`), graphs by phase, or a target, at the sizes of `request`; for a
    table a template such as "models.py:{target}"; rows of a run name it themselves.  knobs: what a
    calibration found, by name or path.  phases: only these.  counters: a CSV of Nsight Compute of
    the same step as a trace.

    Raises MeasuredRequestError where these do not go together, ProfileError and RunFileError for a
    file that cannot be read or a trace of something else.
    """
    found = load_knobs(knobs) if isinstance(knobs, (str, os.PathLike)) else knobs
    changes: dict[str, Any] = {} if found is None else {"knobs": found}
    model = execution_model(execution, **changes)
    given, template = _what_ran(measured, target, phases, request, options, progress)
    return validated(measured, load_chip(chip), model, given, template, phases, counters, progress)


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
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Knobs that make predictions for `chip` right, and how sure they are; print it to see both.

    measured, execution, target, phases, request: as `validate` takes them.  start: knobs to begin
    with, by name or path; default: typical ones of GPUs, the datasheet of others.  free: names of
    the knobs to fit; default: compute and memory, and of a run or a trace as many as it supports.
    `.knobs` is for `execution_model(name, knobs=...)`, `.save(path)` writes them for --knobs.

    Raises what `validate` does, and CalibrationError for less than there are knobs to fit.
    """
    given, template = _what_ran(measured, target, phases, request, options, progress)
    begin = os.fspath(start) if isinstance(start, os.PathLike) else start
    model = execution_model(execution)
    return calibrated(
        measured, load_chip(chip), model, given, template, begin, free, title, progress
    )


def _what_ran(
    measured: Any,
    target: Source | None,
    phases: Sequence[str] | None,
    request: Request | None,
    options: Options | None,
    progress: Callable[[str], None] | None,
) -> tuple[Callable[[], Mapping[str, OpGraph]] | None, str | None]:
    """How the graphs of what was measured are made, or a template for the names in it."""
    if target is None:
        return None, None
    if not isinstance(target, (str, os.PathLike)):
        return partial(graphs_of, target), None
    name = os.fspath(target)
    if isinstance(measured, Trace) or (
        isinstance(measured, (str, os.PathLike)) and kind_of(measured) == "trace"
    ):
        return partial(trace_target, name, phases, request, options, progress), name
    return None, name


def graphs_of(
    source: Source,
    *args: Any,
    phases: Sequence[str] | None = None,
    dtype: str | None = None,
    **kwargs: Any,
) -> dict[str, OpGraph]:
    """Graphs by phase of a module (forward and training), a graph, a mapping or a target."""
    if isinstance(source, OpGraph):
        return {source.phase: source}
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, (str, os.PathLike)):
        return trace_target(source, phases)
    wanted = phases or ("forward", "training")
    return {phase: trace(source, *args, phase=phase, dtype=dtype, **kwargs) for phase in wanted}


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
    result = estimate(trace(model, *inputs, **kwargs), execution="eager")
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
    tuple, or a dict of keyword arguments).
    """
    if (input_size is None) == (input_data is None):
        raise ValueError("summary: give either input_size=(8, 3, 224, 224) or input_data=")
    if input_size is not None:
        from rooftrace.tracer.api import floating_input

        return estimate(
            trace(model, floating_input(model, tuple(input_size)), **kwargs), chip, execution
        )
    if isinstance(input_data, Mapping):
        return estimate(trace(model, **input_data, **kwargs), chip, execution)
    args = tuple(input_data) if isinstance(input_data, (tuple, list)) else (input_data,)
    return estimate(trace(model, *args, **kwargs), chip, execution)
