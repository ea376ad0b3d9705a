"""Commands on steps of a target: kernels, limits, sensitivities and answers, and size sweeps."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace._formats import TEXTS
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    OutputPath,
    complain,
    form_option,
    names_option,
    plot_option,
    say,
    timeline_option,
)
from rooftrace.reporting.cli.shared import CommandOutput, command, progress, results

_BREAKS = f"""{TARGET_HELP}

Dynamo, the front end of torch.compile, runs on the module without a compiler and without its
weights; the result has the cost of each line that ends a graph."""


@command("graph_breaks", epilog=_BREAKS, results=results("data", "rows"))
@click.argument("target")
def breaks(target: str, output: CommandOutput, arguments: dict[str, Any]) -> None:
    """List the graph breaks of torch.compile, and price each."""
    with progress():
        result = rt.graph_breaks(target, **arguments)
    output.write(result)


@command(
    "explain",
    helps={"chip": "Chips by name or TOML path; the first is explained, the sweep has all."},
    results=results("data", plot="Draw the sweep along the roofline of each chip.", timeline=True),
)
@click.argument("target")
def explain(target: str, output: CommandOutput, arguments: dict[str, Any]) -> None:
    """Give FLOPs and bytes of TARGET as formulas, and its limits.

    Formulas are in the sizes of the step: batch, and seq or kv.  Without --op the whole step is a
    worked example, with the least batch that computing limits and a sweep.
    """
    with progress():
        result = rt.explain(target, plot=output.plot, **arguments)
    output.write(result, drawn="sweep drawn")


_ROOFLINE = f"""{TARGET_HELP}

--batch, --seq and --kv take several values of one of them (1,2,4,8); a line joins their points."""


@command(
    "roofline",
    epilog=_ROOFLINE,
    results=results(
        "data", "rows", plot="Draw all of it on one roofline.", style=True, timeline=True
    ),
)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@names_option()
def roofline(
    targets: tuple[str, ...],
    names: tuple[str, ...] | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Place steps of several TARGETs under the roofs of chips."""
    if output.style != "screen" and output.plot is None and output.format != "tex":
        raise RequestError(
            f"--style {output.style}: it is of figures and LaTeX: add --plot FILE.pdf or "
            "--format tex"
        )
    with progress():
        result = rt.roofline(list(targets), names=names, **arguments)
        if output.plot is not None:
            result.plot(output.plot, style=output.style)
    output.write(result)


_SENSITIVITY = f"""{TARGET_HELP}  Or a form that `rooftrace sweep --save-form` wrote.

--grid NAME=V1,V2: batch, seq, kv; config.FIELD, or a keyword of the function that TARGET names;
chip, execution, dtype, weights_dtype, kv_dtype; a number of the chip (chip.memory_bandwidth,
chip.matrix.bf16, chip.link.intra.bandwidth; chip.matrix is all of them) or a knob
(knobs.share.mm.memory, execution.weight_residency).  Values are numbers, quantities ("4.8 TB/s") or
factors (x0.5).  NAME+NAME=x0.5,x1 changes both together."""


@command(
    "sensitivity",
    epilog=_SENSITIVITY,
    results=results("data", "rows", plot="Draw a tornado.", timeline=True),
)
@click.argument("target")
@click.option(
    "--points",
    type=OutputPath(table=True),
    metavar="FILE.csv",
    help="With --grid: write every point there.",
)
def sensitivity(
    target: str, points: str | None, output: CommandOutput, arguments: dict[str, Any]
) -> None:
    """Rank the sizes, chip facts and knobs that move a step most.

    Without --grid: elasticities of FLOPs, bytes, memory and time, ranked, and finite steps that
    show cliffs.  With it: main effects and interactions of pairs, as shares of the variance.
    """
    from rooftrace._writing import write_bytes

    if points is not None and "grid" not in arguments:
        raise RequestError(f"--points {points}: it is of a grid; name some factors with --grid")
    if output.timeline is not None and "grid" in arguments:
        raise RequestError(
            f"--timeline {output.timeline}: a grid is many steps; leave --grid out for the "
            "timeline of one"
        )
    with progress():
        result: Any = rt.sensitivity(target, plot=output.plot, **arguments)
    if points is not None:
        write_bytes(Path(points), result.frame().to_csv(index=False).encode())
    step = {name: value for name, value in arguments.items() if name not in _OF_NUMBERS}
    if output.write(result, source=target, **step) and points is not None:
        say(f"\npoints written to {points}")


_OF_NUMBERS = ("over", "grid", "log", "response")


_SOLVE = f"""{TARGET_HELP}  Or a form that `rooftrace sweep --save-form` wrote.

--find SIZE: the largest batch, kv, seq (or another size, with its values in --over) within the
limits.  cheapest, energy, throughput, latency: the best deployment within them.  rates: the HBM
bandwidth, FLOP rate and link at which computing would limit.  passing: the length at which
attention takes longer than the MLP.  chips: how many by capacity.  mesh: which mesh of --chips
chips of a --system has most items per chip of those that fit (sizes of the axes that --mesh names).
scaling: the step on 1 to 1,024 chips, with the batch of a chip kept and with that of all.
run: days, dollars and energy of a training on --tokens, with interruptions, on --mesh dp=64,tp=8 of
a --system, or on the best mesh of --chips.
critical-batch: the least batch of a device at which computing limits decode, for devices=1,2,64
(default: 1..64:x2), kv=2048..16384:x2 and batch=... of --over.  Each device brings its own batch
and holds a share of the routed experts; everything else is on all of them.  Computing, HBM and
link overlap perfectly at the rates of the datasheet: a lower bound."""


@command(
    "solve",
    "explore",
    "best_mesh",
    "training_run",
    epilog=_SOLVE,
    defaults={
        "chip": "h200-sxm; for cheapest all with a price",
        "execution": "serving for prefill and decode, else efficient",
    },
    results=results(
        "data",
        "rows",
        plot="Draw speed of a user against speed of a chip; of critical-batch the least batches.",
        timeline=True,
    ),
)
@click.argument("target")
def solve(target: str, output: CommandOutput, arguments: dict[str, Any]) -> None:
    """Find the batch, length, chips or mesh that meets limits."""
    find = arguments.get("find", "batch")
    if output.timeline is not None and find in _WITHOUT_STEP:
        raise RequestError(
            f"--timeline {output.timeline} with --find {find}: its answer is no step that a "
            "timeline could show; leave it out"
        )
    if output.format == "csv" and find != "critical-batch":
        raise RequestError(f"csv with --find {find}: only critical-batch has rows; name json")
    for name in _UNUSED.get(find, ("link", "alpha", "global_batch", *_TRAINED)):
        if name in arguments:
            option = "--phase" if name == "phases" else f"--{name.replace('_', '-')}"
            raise RequestError(f"{option} with --find {find}: it has no use for it; leave it out")
    if find == "mesh" and "chips" not in arguments:
        raise RequestError("--find mesh: say how many chips, as --chips 64")
    with progress():
        if find == "critical-batch":
            result: Any = rt.tools.explore(target, plot=output.plot, **_without_find(arguments))
        elif find in _MESHES:
            result = getattr(rt.tools, _MESHES[find])(target, **_without_find(arguments))
        else:
            result = rt.solve(target, **arguments)
        if output.plot is not None and find != "critical-batch":
            from rooftrace.reporting.figures import draw_answer

            draw_answer(result, Path(output.plot))
    output.write(result)
    if getattr(result, "rows", True) == ():
        raise click.exceptions.Exit(1)


_WITHOUT_STEP = ("rates", "passing", "chips", "mesh", "scaling", "run", "critical-batch")
_MESHES = {"mesh": "best_mesh", "scaling": "scaling", "run": "training_run"}
_SERVICE = ("ttft", "mix", "apart", "prefill_chip", "power", "pue")
_TRAINED = ("tokens", "mtbf", "restart", "storage", "save_time", "interval")
_UNUSED: Mapping[str, Sequence[str]] = {
    "mesh": (*_SERVICE, "link", "alpha", *_TRAINED),
    "scaling": (*_SERVICE, "over", "step", "tpot", "link", "alpha", "global_batch", *_TRAINED),
    "run": ("ttft", "mix", "apart", "prefill_chip", "over", "step", "tpot", "link", "alpha"),
    "critical-batch": (
        *_SERVICE, *_TRAINED, "step", "tpot", "chips", "price", "kept_free", "phases", "batch",
        "kv", "global_batch",
    ),
}  # fmt: skip
"""Options that a question has no use for; of every other one --link, --alpha, --global-batch and
those of trainings."""


def _without_find(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "find"}


# -- sweep commands --------------------------------------------------------------------------------
# The command `sweep`: a step over ranges of its sizes, on each chip, from a handful of traces.

_HELP = f"""{TARGET_HELP}  Or a form that `--save-form` wrote, which needs no torch.

--over NAME=VALUES: 1..1024, 1..1024:8 (steps), 2048..131072:x2 (doubling), 1,2,4, or the name
alone for its usual range.  NAME: batch, seq, kv, a number of the config (config.hidden_size), a
keyword of the function that TARGET names, or a name in the shape of an --input."""


@command(
    "sweep",
    epilog=_HELP,
    results=[
        click.Option(
            ["-o", "--out"],
            type=OutputPath(folder=True, table=True),
            metavar="FILE",
            help="Write the table there: .parquet or .csv; for several TARGETs a folder.  A "
            "stopped sweep goes on with the same command.",
        ),
        plot_option("Draw time over the first size."),
        timeline_option(),
        form_option(TEXTS, "Default: terminal.", default="terminal"),
    ],
)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@click.option(
    "--save-form",
    type=OutputPath(),
    metavar="FILE",
    help="Write the form, to sweep it again without torch.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Scheduler of Dask (tcp://...), for many TARGETs; default: processes of this machine.",
)
def sweep(
    targets: tuple[str, ...],
    save_form: str | None,
    scheduler: str | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Price a step of TARGET over ranges of its sizes.

    The result has the best point, the sizes at which a limit or a kernel changes, and a table.
    """
    if len(targets) > 1 or scheduler is not None:
        _fleet(targets, scheduler, save_form, output, arguments)
        return
    if save_form is not None and "vary" in arguments:
        raise RequestError(
            "--save-form with --vary: each value has a form of its own; leave one out"
        )
    out, plot = output.out, output.plot
    with progress(kept=_FIRST):
        try:
            result = rt.sweep(targets[0], out=out, **arguments)
        except KeyboardInterrupt:
            if out is not None:
                complain(f"stopped; what is done is in {out}.parts, the same command goes on")
            sys.exit(130)
        if save_form is not None:
            result.cases[0].form.save(save_form)
        if plot is not None:
            result.plot(plot)
    CommandOutput(form=output.form).write(result)
    if output.form == "terminal":
        for path, word in ((out, "written"), (save_form, "form written"), (plot, "drawn")):
            if path is not None:
                say(f"\n{word} to {path}")
    output.write_timeline(result, quiet=output.form != "terminal")


def _fleet(
    targets: Sequence[str],
    scheduler: str | None,
    save_form: str | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Sweep several targets, or on a scheduler: results land in a folder as they come."""
    several = f"{len(targets)} TARGETs" if len(targets) > 1 else "--scheduler"
    for option, value in (
        ("--plot", output.plot), ("--save-form", save_form), ("--timeline", output.timeline)
    ):  # fmt: skip
        if value is not None:
            raise RequestError(
                f"{option} {value}: it is for one TARGET without --scheduler; here: {several}"
            )
    if output.out is None:
        raise RequestError(f"{several}: say where results land with -o FOLDER")
    rules = click.get_current_context().params["rules"]
    with progress(kept=_ENDED):
        try:
            result = rt.tools.sweep_fleet(
                targets, out=output.out, scheduler=scheduler, rules=rules, **arguments
            )
        except KeyboardInterrupt as stop:
            complain(str(stop) or "stopped")
            sys.exit(130)
    CommandOutput(form=output.form).write(result)
    if output.form == "csv":
        for failure in result.failures:
            complain(f"{failure.title} failed: {failure.error}")
    if result.failures:
        sys.exit(1)


_FIRST = re.compile(r"first step, .*")
"""The early message of a sweep that stays on stderr."""
_ENDED = re.compile(r"\d+ of \d+( are there|: .*)|waiting for workers.*|.*: its workers died.*")
"""Messages of a fleet that stay on stderr."""
