"""Commands on measurements: measure, calibrate, validate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

import rooftrace as rt
from rooftrace._progress import tell
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    Commas,
    measured_options,
    pricing_options,
    rules_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    console,
    load_chips,
    load_executions,
    load_rules,
    progress,
    workload,
    write_text,
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
    "-o",
    "--out",
    metavar="FILE",
    help="File of the run (default measurements/DEVICE-DATE.json.gz); a run that it already holds "
    "is continued.  With --chip-only the TOML file of the chip (default: stdout).",
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
    out: str | None,
) -> None:
    """Measure this device: operations alone, then whole models, into one file.

    TARGET: measure only these: models of the suite (wildcards too), or targets as for the other
    commands.
    """
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
    from rooftrace.hardware.chipfile import dump_chip, write_chip
    from rooftrace.measured.bench import devices, measure_chip
    from rooftrace.reporting.text import renderable

    with progress():
        chip = measure_chip(device or devices.default_device(), budget, progress=tell)
    if out in (None, "-"):
        click.echo(dump_chip(chip), nl=False)
        return
    write_chip(chip, str(out))
    console().print(renderable(chip))
    say(f"\nwritten to {out}; use it as --chip {out}")


@click.command(epilog=TARGET_HELP)
@click.argument("measured")
@measured_options
@workload_options
@rules_option
@click.option("--start", metavar="FILE", help="Knobs to begin with; default: typical ones.")
@click.option(
    "--free",
    type=Commas(),
    help="Knobs to fit: compute, memory, cache, overlap, launch, dispatch, layout, tiling.split "
    'and its like, or the share of a class, such as "mm.compute".  Default: compute, memory; with '
    "a run or a trace as many as it supports.",
)
@click.option("--title", default="", help="What to call the result.")
@click.option(
    "-o", "--out", required=True, metavar="FILE.toml", help="Where to write the knobs; - is stdout."
)
def calibrate(
    measured: str,
    chip: str,
    execution: str,
    target: str | None,
    trust_targets: bool,
    start: str | None,
    free: tuple[str, ...] | None,
    title: str,
    out: str,
    rules: tuple[str, ...],
    **request: Any,
) -> None:
    """Fit knobs to measurements, for --knobs of the other commands.

    MEASURED is a run file of `rooftrace measure`; a CSV of step times, one step per line, with the
    columns model,batch,ms and where they matter seq, kv, phase, dtype, image_size; or a trace of
    torch.profiler, with --target and the sizes that were run.  Its contents tell which.
    """
    from rooftrace.costmodels.knobs import dump_knobs

    load_rules(rules)
    (loaded,), (model,) = load_chips((chip,)), load_executions((execution,))
    with progress():
        result = rt.calibrate(
            measured,
            loaded,
            model,
            target,
            start=start,
            free=free or None,
            title=title,
            trust_targets=trust_targets,
            **workload(**request),
        )
    if out == "-":
        click.echo(dump_knobs(result.knobs), nl=False)
        return
    result.save(out)
    console().print(result)
    say(f"\nwritten to {out}; use it as --knobs {out}")


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
    type=click.Choice(["terminal", "md", "json"]),
    default="terminal",
    show_default=True,
)
@click.option(
    "--out",
    metavar="DIR",
    help="Folder for validation.md, validation.json, parity.png, and where they apply nodes.csv "
    "and timeline.json.gz.",
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
    from rooftrace.reporting.pages import check_folder
    from rooftrace.reporting.text import as_markdown, renderable

    (loaded,), (model,) = load_chips((chip,)), load_executions((execution,), tf32, knobs, rewrites)
    load_rules(rules)
    folder = None if out in (None, "-") else Path(str(out))
    if folder is not None:
        check_folder(folder)
    with progress():
        result = rt.validate(
            measured,
            loaded,
            model,
            target,
            counters=counters,
            trust_targets=trust_targets,
            **workload(**request),
        )
        written = result.write(folder) if folder is not None else []
    write_text(
        form,
        None,
        lambda: renderable(result),
        lambda: as_markdown(result),
        result.to_dict,
    )
    if written and form == "terminal":
        names = ", ".join(path.name for path in written)
        say(f"\nwritten to {folder}{os.sep}: {names}")
