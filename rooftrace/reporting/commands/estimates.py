"""Estimates of one step from any source, and of the run of a script."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._progress import telling
from rooftrace.costmodels.estimates import Estimate, estimate as estimate_graph
from rooftrace.costmodels.fusion import Plan
from rooftrace.errors import RequestError, one_of
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.commands.arguments import RunArguments
from rooftrace.reporting.commands.calls import conditions_of, only_prices
from rooftrace.reporting.commands.options import taken
from rooftrace.reporting.commands.pricing import check_groups
from rooftrace.reporting.commands.requests import StepRequest, priced
from rooftrace.tracer import Job, only
from rooftrace.tracer.names import RUN

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
