"""Commands on measurements: measure, calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rooftrace.reporting.cli.options import Commas
from rooftrace.reporting.cli.shared import console, load_chips, progress


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
@click.option("--phase", "phases", type=Commas(), help="Of a TARGET; default: all it has.")
@click.option("--batch", type=int, help="Batch size of a TARGET.")
@click.option("--seq", type=int, help="Sequence (prompt) length of a TARGET.")
@click.option(
    "-o",
    "--out",
    metavar="FILE",
    help="The run (default measurements/DEVICE-DATE.json.gz; one that is there is gone on with), "
    "or with --chip-only the TOML of the chip (default: stdout).",
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

    TARGET: only these, models of the suite (wildcards too) or any that the other commands take.
    """
    if chip_only:
        _measure_chip(targets, device, 20.0 if budget is None else budget, out)
        return
    from rooftrace.tracer.measure import default_out, measure_suite
    from rooftrace.tracer.measure import summary as measured
    from rooftrace.tracer.measure_chip import default_device
    from rooftrace.tracer.session import BUDGET_S, QUICK_S, Plan, start_again

    device = device or default_device()
    path = Path(out) if out else default_out(device)
    usual = QUICK_S if quick else BUDGET_S
    seconds = usual if budget is None else budget
    plan = Plan(path, device, seconds, quick, targets, phases, batch, seq)
    with progress() as tell:
        run = measure_suite(plan, tell, start_again)
    click.echo(measured(run, path))


def _measure_chip(
    targets: tuple[str, ...], device: str | None, budget: float, out: str | None
) -> None:
    if targets:
        raise click.UsageError(f"--chip-only measures no model: leave out {' '.join(targets)}")
    from rooftrace.hardware.chipfile import dump_chip, write_chip
    from rooftrace.reporting.chiptext import render_chip
    from rooftrace.tracer.measure_chip import default_device, measure_chip

    with progress() as tell:
        chip = measure_chip(device or default_device(), budget, progress=tell)
    if out in (None, "-"):
        click.echo(dump_chip(chip), nl=False)
        return
    write_chip(chip, str(out))
    console().print(render_chip(chip))
    click.echo(f"\nwritten to {out}; use it as --chip {out}")


@click.command()
@click.argument("steps", metavar="STEPS.csv|RUN.json.gz")
@click.option("--chip", required=True, help="The chip that they were measured on.")
@click.option(
    "--execution",
    default="eager",
    show_default=True,
    help="How the steps were run: eager, compiled, efficient (one CUDA graph).",
)
@click.option(
    "--target",
    default="{target}",
    show_default=True,
    metavar="TEMPLATE",
    help="How a name in the table becomes a target, for example models.py:{target}.",
)
@click.option("--start", metavar="FILE", help="Knobs to begin with; default: typical ones.")
@click.option(
    "--free",
    type=Commas(),
    default="compute,memory",
    show_default=True,
    help="Knobs to fit: compute, memory, overlap, launch, dispatch, layout, or the share of a "
    'class, such as "mm.compute".',
)
@click.option("--title", default="", help="What to call the result.")
@click.option(
    "-o", "--out", required=True, metavar="FILE.toml", help="Where to write the knobs; - is stdout."
)
def calibrate(
    steps: str,
    chip: str,
    execution: str,
    target: str,
    start: str | None,
    free: tuple[str, ...],
    title: str,
    out: str,
) -> None:
    """Fit knobs to measured step times.

    The result is for --knobs of the other commands.  STEPS.csv has a line a step: model,batch,ms,
    and where they matter seq, kv, phase, dtype, image_size.  RUN.json.gz is what `rooftrace
    measure` wrote.
    """
    from rooftrace.costmodels.knobs import dump_knobs
    from rooftrace.costmodels.profiles.steps import read_steps
    from rooftrace.reporting.calibrating import (
        calibrate_run,
        calibrate_steps,
        render_calibration,
    )
    from rooftrace.tracer.graphfile import write_bytes
    from rooftrace.tracer.runfile import load_run

    (loaded,) = load_chips((chip,))
    is_run = steps.endswith((".json", ".json.gz"))
    measured: Any = load_run(steps) if is_run else read_steps(steps)
    with progress() as tell:
        if is_run:
            found = calibrate_run(measured, loaded, execution, start, free, title, tell)
        else:
            found = calibrate_steps(measured, loaded, execution, target, start, free, title, tell)
    text = dump_knobs(found.fit.knobs)
    if out == "-":
        click.echo(text, nl=False)
        return
    write_bytes(Path(out), text.encode())
    console().print(render_calibration(found))
    click.echo(f"\nwritten to {out}; use it as --knobs {out}")
