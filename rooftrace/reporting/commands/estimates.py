"""Estimates of one step, of several on one roofline, and of the run of a script."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.estimates import Estimate, estimate as estimate_graph
from rooftrace.costmodels.fusion import Plan, plan
from rooftrace.errors import RequestError, one_of
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.commands.arguments import RunArguments
from rooftrace.reporting.commands.calls import conditions_of, only_prices
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.pricing import PricingOptions, check_groups
from rooftrace.reporting.commands.requests import StepRequest, priced
from rooftrace.reporting.commands.rooflinesteps import (
    RooflineRow,
    Rooflines,
    check_names,
    sizes_run,
)
from rooftrace.tracer import Job, only
from rooftrace.tracer.names import RUN, check_named

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import ScriptCost
    from rooftrace.costmodels.fusion import ExecutionModel

Module = Any
"""A torch.Module (this package does not import torch)."""

Source = Any
"""A module, an OpGraph, graphs by phase, or a target (a string or path)."""


def priced_graphs(source: Source, *args: Any, **kwargs: Any) -> dict[str, OpGraph]:
    """The graphs by phase of a source, in the precisions of the call; takes what `report` takes."""
    return dict(priced(Job.of(priced_graphs, source, args, kwargs)).graphs)


def estimate(source: Source, *args: Any, phase: str | None = None, **kwargs: Any) -> Estimate:
    """The cost of one step on `chip` (default h200-sxm) under `execution` (default mixed for a
    script, efficient for all others).

    source: a graph, or a Plan, which has its execution; else a module with its arguments or
    anything that `trace` takes, at a `phase`.  A graph's chip and execution may also stand second
    and third.  dtype, weights_dtype, kv_dtype: storage precisions to price in.
    system: how chips are joined, for a step of several processes; its chip is `chip` then.  knobs,
    rewrites, tf32, library, exchange, what_if, settings: changes of the execution.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in; and the errors of `trace`.
    """
    planned = isinstance(source, Plan)
    if planned or Job(source=source).is_graph:
        kwargs, args = _placed(args, kwargs), ()
    elif kwargs.get("chip") is None and args and _is_chip(args[-1]):
        raise RequestError(
            f"estimate(..., {args[-1]!r:.40}): after a module stand the arguments of its call; say "
            "chip= for the chip"
        )
    if planned:
        chip, system, host = (kwargs.pop(name, None) for name in ("chip", "system", "host"))
        if kwargs or phase is not None:
            name = next(iter({**kwargs, "phase": phase}))
            raise RequestError(f"{name}=: a Plan is priced already; estimate its graph anew")
        return estimate_graph(source, chip, system=system, host=host)
    return estimated(StepRequest.of(estimate, source, args, {**kwargs, "phase": phase}))


def _placed(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a graph by name: its chip and its execution may stand second and third."""
    placed = dict(zip(("chip", "execution"), args, strict=False))
    if len(args) > 2 or any(named.get(name) is not None for name in placed):
        raise RequestError("estimate(graph, chip, execution): give each of them once")
    return {**named, **placed}


def estimated(request: StepRequest) -> Estimate:
    """The estimate of the only graph of a request."""
    return estimate_graph(only(request.of_one_phase().graphs()), request.chip, request.model)


def _is_chip(value: Any) -> bool:
    """Whether an argument is a chip, or the name of one that comes with rooftrace."""
    if not isinstance(value, str):
        return isinstance(value, Chip)
    try:
        load_chip(value)
    except (ValueError, LookupError):
        return False
    return True


# -- scripts ---------------------------------------------------------------------------------------
# Unmodified scripts on chips that are not there, as a call.

CLOCKS = ("real", "simulated")
"""The time that a script sees: that of this machine, or that of the chip."""


def run(
    command: str | Sequence[str],
    *,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> ScriptCost:
    """Run a script, unmodified, on a GPU that is not there, and price its steps.

    The script runs in a separate process.  It sees a CUDA device with the name and memory of
    `chip` (default h200-sxm); its tensors there have shapes, no values.

    command: "train.py --batch_size=12", "torchrun --nproc_per_node=8 train.py", or its words.
    system: how chips are joined, for a script of several processes; its chip is `chip` then.
    steps: after so many training steps, or calls of a script that trains nothing, it is ended; None
    for its own end.  Steps equal to the two before are counted and not run again.  ranks: of how
    many processes this is the one numbered `rank`, where the launcher does not say.  boundary:
    what begins a turn: "auto" finds training steps and calls, "batch" begins one with each batch of
    a data loader, "call" with each call of a module, "optimizer" after each step of the optimizers,
    "mark=NAME" where the script says NAME to torch.profiler or NVTX ("step": a profiler's
    `step()`).  execution: by default what the script compiles is compiled, and the rest eager.
    clock: "simulated" lets the script read the time that its steps would take on the chip.
    scratch: a folder that gets the files that the script writes.  assume: as in `trace`.

    Raises RequestError for a command line that is none, and ScriptError where the script fails.
    """
    from rooftrace.tracer.phases import ownprocess

    arguments, kwargs = taken(RunArguments, kwargs)
    _check(arguments.clock, arguments.steps)
    ownprocess.get_ready()
    from rooftrace.costmodels.estimates import price_script
    from rooftrace.scripts.steps import ScriptError, ScriptRequest

    words = shlex.split(command) if isinstance(command, str) else [*command]
    pricing = only_prices(run, kwargs)
    (model,), (device,) = conditions_of(run, pricing, f"{RUN}{shlex.join(words)}")
    request = ScriptRequest(
        command=words,
        chip=device,
        steps=arguments.steps,
        ranks=arguments.ranks,
        rank=arguments.rank,
        per_node=None if device.system is None else device.system.levels[0].size,
        scratch=arguments.scratch,
        assume=arguments.assume,
        boundary=arguments.boundary,
    )
    with telling(progress):
        script = request.run(_seconds(device, model) if arguments.clock == "simulated" else None)
        if script.failure is not None:
            raise ScriptError(script)
        check_groups(script.by_phase().values, [model])
        return price_script(script, device, model)


def _seconds(chip: Chip, execution: ExecutionModel) -> Callable[[OpGraph], float]:
    """Tells the expected seconds of a graph."""
    from rooftrace.costmodels.estimates import estimate

    return lambda graph: estimate(graph, chip, execution).t_est


def _check(clock: str, steps: Any) -> None:
    if clock not in CLOCKS:
        raise RequestError(f"clock={clock!r}: {one_of(clock, CLOCKS)}")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise RequestError(f"steps={steps!r}: expected a whole number of at least 1, or None")


# -- several steps ---------------------------------------------------------------------------------

MOST = 200
"""Steps of one figure at most."""


def roofline(
    sources: Source | Sequence[Source],
    *,
    batch: int | Sequence[int] | None = None,
    seq: int | Sequence[int] | None = None,
    kv: int | Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Rooflines:
    """Steps of several models under the roofs of several chips.

    sources: targets, graphs, or graphs by phase.  batch, seq, kv: a size, or several values of one
    of them; each value is traced, and `plot` joins its points.  phases: by default those
    that fit each source.  names: one for each source, in tables and figures; default: those of
    the models.  dtype, weights_dtype, kv_dtype and other arguments of `report` hold for all.

    Returns the Rooflines: print it, `.to_frame()`, `.plot(path)`.  Raises RequestError for no
    source, names that are not one for each, several values of two sizes, and the errors of
    `report`.
    """
    several = [sources] if _is_one(sources) else list(sources)
    if not several:
        raise RequestError("roofline(sources=...): expected at least one target, got none")
    check_names(names, several)
    steps, over = _steps({"batch": batch, "seq": seq, "kv": kv})
    pricing, others = PricingOptions.parted(kwargs)
    (model,), chips = conditions_of(roofline, pricing, *several)
    jobs = [
        (source, sizes, Job.of(roofline, source, (), {**others, **sizes}))
        for source in several
        for sizes in steps
    ]
    for _, _, job in jobs:
        if job.is_named:
            check_named(job.name)
    if len(jobs) * len(chips) > MOST:
        raise RequestError(
            f"{len(jobs) * len(chips):,} steps: expected {MOST} at most on one roofline; "
            "`rooftrace sweep` has tables of millions"
        )
    traced: list[tuple[Source, Mapping[str, int], dict[str, OpGraph]]] = []
    with telling(progress):
        for number, (source, sizes, job) in enumerate(jobs, 1):
            tell(f"step {number} of {len(jobs)}")
            graphs = dict(priced(job).graphs)
            check_groups(graphs.values, [model])
            traced.append((source, sizes, graphs))
        own = [name for name in names or () for _ in steps]
        rows = list(_rows(traced, own or _names(several, traced), chips, model))
    return Rooflines(tuple(rows), over)


def _is_one(sources: Any) -> bool:
    return isinstance(sources, (str, os.PathLike, OpGraph, Mapping)) or not isinstance(
        sources, Sequence
    )


def _rows(
    traced: Sequence[tuple[Source, Mapping[str, int], Mapping[str, OpGraph]]],
    names: Sequence[str],
    chips: Sequence[Chip],
    model: ExecutionModel,
) -> Iterator[RooflineRow]:
    for name, (_, sizes, graphs) in zip(names, traced, strict=True):
        for graph in graphs.values():
            planned = plan(graph, model)
            for step in (estimate_graph(planned, chip) for chip in chips):
                yield RooflineRow(name, {**sizes_run(step), **sizes}, step)


def _names(
    sources: Sequence[Source], traced: Sequence[tuple[Source, Any, Mapping[str, OpGraph]]]
) -> list[str]:
    """A name for each trace: that of the model, with a number where several sources share it."""
    by_source: dict[int, str] = {}
    for source, _, graphs in traced:
        first = next(iter(graphs.values()))
        by_source.setdefault(id(source), str(first.model.get("name") or "model"))
    used: dict[str, list[int]] = {}
    for source in sources:
        used.setdefault(by_source[id(source)], []).append(id(source))
    for name, owners in used.items():
        for number, owner in enumerate(dict.fromkeys(owners), 1):
            if len(set(owners)) > 1:
                by_source[owner] = f"{name} {number}"
    return [by_source[id(source)] for source, _, _ in traced]


def _steps(sizes: Mapping[str, Any]) -> tuple[list[dict[str, int]], str]:
    """The sizes of each step, and the size that has several values."""
    values = {name: _values(name, value) for name, value in sizes.items() if value is not None}
    several = [name for name, numbers in values.items() if len(numbers) > 1]
    if len(several) > 1:
        raise RequestError(
            f"{' and '.join(several)} have several values each: a line is drawn over one size"
        )
    fixed = {name: numbers[0] for name, numbers in values.items() if name not in several}
    if not several:
        return [fixed], ""
    (over,) = several
    return [{**fixed, over: number} for number in values[over]], over


def _values(name: str, value: Any) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    wrong = [n for n in numbers if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if not numbers or wrong:
        shown = repr(wrong[0]) if wrong else "none"
        raise RequestError(f"{name}={shown}: expected whole numbers above 0, for example 1, 8, 64")
    return sorted(set(numbers))
