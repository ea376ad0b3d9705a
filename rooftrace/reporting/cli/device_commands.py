"""Commands on measurements: measure, calibrate, validate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace._formats import FIGURES, names
from rooftrace._outputs import check_output
from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.group_measuring import calibrate_groups, measure_groups
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    Commas,
    calibration_options,
    measured_options,
    pricing_options,
    rules_option,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import (
    console,
    load_executions,
    load_rules,
    once,
    progress,
    workload,
    write_result,
    write_timeline,
)


@click.command()
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option(
    "--chip-only", is_flag=True, help="Measure this machine's rates and write them as a chip."
)
@click.option("--device", default=None, help="cpu or cuda; default: cuda where there is one.")
@click.option(
    "--budget", type=float, help="Seconds to spend; default 480, --quick 90, --chip-only 20."
)
@click.option("--quick", is_flag=True, help="A trial of the whole suite, in about a minute.")
@click.option(
    "--phase", "phases", type=Commas(), help="Phases of a TARGET; default: all that it has."
)
@click.option("--batch", type=int, help="Batch size of a TARGET.")
@click.option("--seq", type=int, help="Sequence (prompt) length of a TARGET.")
@click.option(
    "--collectives", is_flag=True, help="Time collectives of gloo between processes instead."
)
@click.option("--ranks", type=int, help="How many processes, for --collectives; default 2.")
@click.option(
    "-o",
    "--out",
    type=Output(early=False, usual=True),
    metavar="FILE",
    help="File of the run (default measurements/DEVICE-DATE.json.gz); a run that it already holds "
    "is continued.  With --chip-only the TOML file of the chip (default: stdout).  With "
    "--collectives a CSV (default collectives.csv).",
)
def measure(
    targets: tuple[str, ...],
    chip_only: bool,
    device: str | None,
    budget: float | None,
    quick: bool,
    phases: tuple[str, ...] | None,
    batch: int | None,
    seq: int | None,
    collectives: bool,
    ranks: int | None,
    out: str | None,
) -> None:
    """Measure this device: operations alone, then whole models, into one file.

    TARGET: measure only these: models of the suite (wildcards too), or targets as for the other
    commands.
    """
    if collectives or ranks is not None:
        measure_groups(targets, collectives, ranks, out)
        return
    if out not in (None, "-"):
        check_output(Path(str(out)), table=False)
    if chip_only:
        _measure_chip(targets, device, 20.0 if budget is None else budget, out)
        return
    from rooftrace.measured.suite import SuitePlan, measure_suite, start_again, summary

    plan = SuitePlan.of(
        targets,
        out=out,
        device=device,
        budget_s=budget,
        quick=quick,
        phases=phases,
        batch=batch,
        seq=seq,
    )
    with progress():
        run = measure_suite(plan, tell, start_again)
    say(summary(run, plan.out))


def _measure_chip(
    targets: tuple[str, ...], device: str | None, budget: float, out: str | None
) -> None:
    if targets:
        raise click.UsageError(f"--chip-only measures no model: leave out {' '.join(targets)}")
    from rooftrace._outputs import TOML_MARK
    from rooftrace._writing import write_bytes
    from rooftrace.hardware.chipfile import dump_chip
    from rooftrace.measured.bench import devices, measure_chip
    from rooftrace.reporting.text import shown

    with progress():
        chip = measure_chip(device or devices.default_device(), budget, progress=tell)
    if out in (None, "-"):
        click.echo(dump_chip(chip), nl=False)
        return
    write_bytes(Path(str(out)), f"{TOML_MARK}{dump_chip(chip)}".encode())
    console().print(shown(chip, "rich"))
    say(f"\nwritten to {out}; use it as --chip {out}")


@click.command(epilog=TARGET_HELP)
@click.argument("measured", required=False)
@click.option(
    "--run",
    "running",
    metavar="TARGET",
    help="Measure this target here and now, with random weights, and calibrate by it.",
)
@calibration_options
@click.option(
    "--counters",
    metavar="FILE",
    help="DRAM bytes of the measured step: a CSV of ncu or rocprof, `perf stat -x,`, LIKWID.",
)
@click.option(
    "--counted-steps", type=int, help="How many steps the totals of perf or LIKWID count."
)
@click.option("--by-layer", is_flag=True, help="Also show the weight residency of each layer.")
@workload_options
@rules_option
@click.option("--start", metavar="FILE", help="Knobs to begin with; default: typical ones.")
@click.option(
    "--free",
    type=Commas(),
    help="Knobs to fit: pace (one factor on all), compute, memory, cache, overlap, launch, "
    'dispatch, layout, tiling.split and its like, or the share of a class, such as "mm.compute".  '
    "Default: as many as lower the error on what is left out by more than chance.",
)
@click.option("--title", default="", help="What to call the result.")
@click.option(
    "--collectives",
    metavar="FILE",
    help="Fit constants of collectives instead, for a system: what nccl-tests print, or a CSV.",
)
@click.option(
    "--system", metavar="NAME", help="With --collectives: the system that they were measured on."
)
@click.option(
    "-o",
    "--out",
    type=Output(),
    required=True,
    metavar="FILE.toml",
    help="Where to write the knobs; - is stdout.",
)
def calibrate(
    measured: str | None,
    running: str | None,
    chip: str | None,
    execution: str | None,
    target: str | None,
    counted_steps: int | None,
    free: tuple[str, ...] | None,
    collectives: str | None,
    system: str | None,
    out: str,
    rules: tuple[str, ...],
    **request: Any,
) -> None:
    """Fit knobs to measurements, for --knobs of the other commands.

    MEASURED is a run file of `rooftrace measure`; a CSV of step times, one step per line, with the
    columns model,batch,ms and where they matter seq, kv, phase, dtype, image_size; or a trace of
    torch.profiler, with --target and the sizes that were run.  Its contents tell which.  With --run
    a target is measured instead.

    --collectives FILE --system NAME fits what many chips need: the constants of collectives, and
    writes the system with them.
    """
    from rooftrace.costmodels.knobs import dump_knobs

    if collectives is not None or system is not None:
        calibrate_groups(collectives, system, out)
        return
    load_rules(rules)
    if (measured is None) == (running is None):
        raise click.UsageError("expected either MEASURED, a file of measurements, or --run TARGET")
    if running is None and chip is None:
        raise click.UsageError("--chip: say which chip the steps were measured on")
    model = None if execution is None else load_executions((execution,))[0]
    with progress():
        how: dict[str, Any] = {
            name: request.pop(name)
            for name in ("counters", "by_layer", "start", "title", "trust_targets")
        }
        if running is None:
            how |= workload(**request)
        result = rt.calibrate(
            measured if running is None else _measured_now(running, model, target, request),
            None if chip is None else rt.load_chip(chip),
            model,
            target,
            free=free or None,
            counted_steps=counted_steps,
            **how,
        )
    if out == "-":
        click.echo(dump_knobs(result.knobs), nl=False)
        return
    result.save(out)
    console().print(result)
    say(f"\nwritten to {out}; use it as --knobs {out}")


def _measured_now(
    target: str, model: rt.ExecutionModel | None, other: str | None, request: dict[str, Any]
) -> rt.Run:
    """The run of a target at the sizes of a request."""
    from rooftrace.measured.realsteps import measured_target

    if other is not None:
        raise click.UsageError("--run measures its own target: leave out --target")
    job = workload(**request)
    sizes = rt.Request(job.pop("batch", None), job.pop("seq", None), job.pop("kv", None))
    phases = job.pop("phases", None)
    usual: tuple[Any, ...] = (None, {}, True, False, "adamw")
    left = [name for name, value in job.items() if value not in usual]
    if left:
        raise click.UsageError(
            f"--run measures the target as it is: leave out {', '.join(left)}; it takes --batch, "
            "--seq, --kv and --phase"
        )
    compiled = model is not None and model.dispatch != "eager"
    return measured_target(target, sizes, phases, compiled, progress=tell)


@click.command(epilog=TARGET_HELP)
@click.argument("measured")
@measured_options
@click.option(
    "--counters",
    metavar="FILE",
    help="DRAM bytes of a trace's kernels: a CSV of Nsight Compute (ncu) or of rocprof.",
)
@workload_options
@pricing_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["terminal", *names("page", "data")]),
    default="terminal",
    show_default=True,
)
@click.option(
    "--out",
    type=Output(early=False),
    metavar="DIR",
    help="Folder for validation.html, validation.md, validation.json, parity.png, and where they "
    "apply nodes.csv and timeline.json.gz.",
)
@timeline_option
@click.option(
    "--figures",
    type=Commas(),
    help="Formats of the figure in the folder of --out: png, svg, pdf.  Default: png.",
)
def validate(
    measured: str,
    chip: str,
    execution: str,
    target: str | None,
    trust_targets: bool,
    counters: str | None,
    form: str,
    out: str | None,
    figures: tuple[str, ...] | None,
    timeline: str | None,
    tf32: bool,
    rewrites: tuple[str, ...],
    rules: tuple[str, ...],
    knobs: str | None,
    **request: Any,
) -> None:
    """Predicted against measured: steps, kernels, bytes.

    MEASURED is a run file of `rooftrace measure`; a trace of torch.profiler, with --target and the
    sizes that were run; or a CSV of step times as for `rooftrace calibrate`.  Its contents tell
    which.
    """
    from rooftrace.reporting.pages.files import check_folder, check_formats

    (model,) = load_executions((execution,), tf32, knobs, rewrites)
    load_rules(rules)
    folder = None if out in (None, "-") else Path(str(out))
    if figures is not None and folder is None:
        raise RequestError(f"--figures {','.join(figures)}: say where they land with --out DIR")
    drawn = ("png",) if figures is None else figures
    check_formats(drawn, FIGURES)
    if folder is not None:
        check_folder(folder)
    with once():
        result = rt.validate(
            measured,
            rt.load_chip(chip),
            model,
            target,
            counters=counters,
            trust_targets=trust_targets,
            **workload(**request),
        )
        written = result.write(folder, drawn) if folder is not None else []
    write_result(result, form, None)
    if timeline is not None and result.estimate is None:
        raise RequestError(
            f"--timeline {timeline}: {measured} is no trace of a step, and has several steps; "
            "validate a trace of torch.profiler"
        )
    write_timeline(timeline, result, quiet=form != "terminal")
    if written and form == "terminal":
        names = ", ".join(path.name for path in written)
        say(f"\nwritten to {folder}{os.sep}: {names}")
