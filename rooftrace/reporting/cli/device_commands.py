"""Commands that measure, calibrate and validate, and that list, show and lint chips and systems."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import click

import rooftrace as rt
from rooftrace._formats import FIGURES, names
from rooftrace._outputs import check_output
from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    OutputPath,
    form_option,
    other_options,
    say,
    timeline_option,
)
from rooftrace.reporting.cli.shared import (
    Command,
    CommandOutput,
    command,
    console,
    once,
    progress,
    results,
)
from rooftrace.reporting.commands.calls import ASKED
from rooftrace.reporting.commands.options import words

_MEASURED = {
    "chip": "The chip that the steps were measured on.",
    "execution": "How the steps were run: eager, compiled, efficient (one CUDA graph), serving.",
}


@command(
    "measure_suite", epilog=None, helps={"phases": "Phases of a TARGET; default: all that it has."}
)
@click.argument("targets", nargs=-1, metavar="[TARGET]...")
@click.option(
    "-o",
    "--out",
    type=OutputPath(early=False, usual=True),
    metavar="FILE",
    help="File of the run (default measurements/DEVICE-DATE.json.gz); a run that it already holds "
    "is continued.  With --chip-only the TOML file of the chip (default: stdout).  With "
    "--collectives a CSV (default collectives.csv).",
)
def measure(targets: tuple[str, ...], out: str | None, arguments: dict[str, Any]) -> None:
    """Measure this device: single operations, then whole models.

    TARGET: measure only these: models of the suite (wildcards too), or targets as for the other
    commands.
    """
    if arguments.keys() & {"collectives", "ranks"}:
        _measure_collectives(targets, arguments, out)
        return
    if out not in (None, "-"):
        check_output(Path(str(out)), table=False)
    if arguments.pop("chip_only", False):
        _measure_chip(targets, arguments.get("device"), arguments.get("budget_s", 20.0), out)
        return
    from rooftrace.measured.bench import SuitePlan, measure_suite, start_again, summary

    plan = SuitePlan.of(targets, out=out, **arguments)
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
    from rooftrace.measured.bench import machine, measure_chip
    from rooftrace.reporting.views import shown

    with progress():
        chip = measure_chip(device or machine.default_device(), budget, progress=tell)
    if out in (None, "-"):
        click.echo(dump_chip(chip), nl=False)
        return
    write_bytes(Path(str(out)), f"{TOML_MARK}{dump_chip(chip)}".encode())
    console().print(shown(chip, "rich"))
    say(f"\nwritten to {out}; use it as --chip {out}")


@command(
    "calibrate",
    defaults={"chip": "with --run: this device, measured now"},
    helps={
        **_MEASURED,
        "counters": "DRAM bytes of the measured step: a CSV of ncu or rocprof, `perf stat -x,`, "
        "LIKWID.",
        "system": "With --collectives: the system that they were measured on.",
    },
)
@click.argument("measured", required=False)
@click.option(
    "--run",
    "running",
    metavar="TARGET",
    help="Measure this target here and now, with random weights, and calibrate by it.",
)
@click.option(
    "--collectives",
    metavar="FILE",
    help="Fit constants of collectives instead, for a system: the output of nccl-tests, or a CSV.",
)
@click.option(
    "-o",
    "--out",
    type=OutputPath(),
    required=True,
    metavar="FILE.toml",
    help="Write the knobs there; - is stdout.",
)
def calibrate(
    measured: str | None,
    running: str | None,
    collectives: str | None,
    out: str,
    arguments: dict[str, Any],
) -> None:
    """Fit knobs to measurements, for --knobs of other commands.

    MEASURED is a run file of `rooftrace measure`; a CSV of step times, one step per line, with the
    columns model,batch,ms and where they matter seq, kv, phase, dtype, image_size; or a trace of
    torch.profiler, with --target and the sizes that were run.  Its contents tell which.  With --run
    a target is measured instead.

    With --collectives FILE and --system NAME it fits the constants of collectives and writes the
    system with them.
    """
    from rooftrace.costmodels.kernels import dump_knobs

    if collectives is not None or "system" in arguments:
        _calibrate_collectives(collectives, arguments.get("system"), out)
        return
    if (measured is None) == (running is None):
        raise click.UsageError("expected either MEASURED, a file of measurements, or --run TARGET")
    if running is None and "chip" not in arguments:
        raise click.UsageError("--chip: say which chip the steps were measured on")
    if measured is not None and not os.path.exists(measured):
        raise RequestError(
            f"{measured}: no such file; `rooftrace measure` writes one, and --run TARGET measures "
            "a target here"
        )
    with progress():
        made: Any = measured
        if running is not None:
            made, arguments = _measured_now(running, arguments)
        result = rt.calibrate(made, **arguments)
    if out == "-":
        click.echo(dump_knobs(result.knobs), nl=False)
        return
    result.save(out)
    console().print(result)
    say(f"\nwritten to {out}; use it as --knobs {out}")


def _measured_now(target: str, arguments: dict[str, Any]) -> tuple[rt.types.Run, dict[str, Any]]:
    """Measure a target at its sizes: the run, and the arguments that remain for the fit."""
    from rooftrace.measured.bench import measured_target

    if "target" in arguments:
        raise click.UsageError("--run names the target: leave out --target")
    job = {name: value for name, value in arguments.items() if name in ASKED}
    left = [name for name in job if name not in ("batch", "seq", "kv", "phases")]
    if left:
        raise click.UsageError(
            f"--run measures the target as it is: leave out {', '.join(left)}; it takes --batch, "
            "--seq, --kv and --phase"
        )
    sizes = rt.types.Request(job.get("batch"), job.get("seq"), job.get("kv"))
    model = rt.tools.execution_model(*arguments.get("execution", ("eager",)))
    run = measured_target(
        target, sizes, job.get("phases"), model.dispatch != "eager", progress=tell
    )
    return run, {name: value for name, value in arguments.items() if name not in job}


@command(
    "validate",
    helps=_MEASURED,
    results=[
        form_option(names("page", "data"), "Default: terminal.", default="terminal"),
        click.Option(
            ["--out"],
            type=OutputPath(early=False),
            metavar="DIR",
            help="Folder for validation.html, validation.md, validation.json, parity.png, and "
            "where they apply nodes.csv and timeline.json.gz.",
        ),
        timeline_option(),
    ],
)
@click.argument("measured")
@click.option(
    "--figures",
    type=words,
    metavar="LIST",
    help="Formats of the figure in the folder of --out: png, svg, pdf.  Default: png.",
)
def validate(
    measured: str,
    figures: tuple[str, ...] | None,
    output: CommandOutput,
    arguments: dict[str, Any],
) -> None:
    """Set predicted steps, kernels and bytes beside measured ones.

    MEASURED is a run file of `rooftrace measure`; a trace of torch.profiler, with --target and the
    sizes that were run; or a CSV of step times as for `rooftrace calibrate`.  Its contents tell
    which.
    """
    from rooftrace.reporting.commands.reportfolder import check_folder, check_formats

    folder = None if output.out in (None, "-") else Path(str(output.out))
    if figures is not None and folder is None:
        raise RequestError(f"--figures {','.join(figures)}: say where they land with --out DIR")
    drawn = ("png",) if figures is None else figures
    check_formats(drawn, FIGURES)
    if folder is not None:
        check_folder(folder)
    with once():
        result = rt.validate(measured, **arguments)
        paths = result.write(folder, drawn) if folder is not None else []
    if output.timeline is not None and result.estimate is None:
        raise RequestError(
            f"--timeline {output.timeline}: {measured} is no trace of a step, and has several "
            "steps; validate a trace of torch.profiler"
        )
    shown = replace(output, out=None).write(result)
    if paths and shown:
        say(f"\nwritten to {folder}{os.sep}: {', '.join(path.name for path in paths)}")


# -- collectives -----------------------------------------------------------------------------------
# `measure --collectives` and `calibrate --collectives`.


def _measure_collectives(
    targets: tuple[str, ...], arguments: dict[str, Any], out: str | None
) -> None:
    """Time collectives of gloo between processes of this machine, into a CSV."""
    from rooftrace.measured.bench import measure_collectives

    if "collectives" not in arguments:
        raise click.UsageError("--ranks: say --collectives, too")
    if targets:
        raise click.UsageError(f"--collectives measures no model: leave out {' '.join(targets)}")
    for option in other_options("collectives", "ranks", "out"):
        raise click.UsageError(f"--collectives measures no model and no chip: leave out {option}")
    path = out or "collectives.csv"
    with progress():
        rows = measure_collectives(arguments.get("ranks", 2), path, tell=tell)
    say(f"{rows} rows written to {path}; use it as rooftrace calibrate --collectives {path}")


def _calibrate_collectives(path: str | None, name: str | None, out: str) -> None:
    """Fit constants of collectives, and write the system with them."""
    from rooftrace.hardware.systems import dump_system, load_system
    from rooftrace.measured.fit import calibrate_collectives

    if path is None:
        raise click.UsageError(f"--system {name}: say --collectives FILE, too")
    if name is None:
        raise click.UsageError("--collectives: say with --system NAME where they were measured")
    for option in other_options("collectives", "system", "out"):
        raise click.UsageError(f"--collectives fits no knobs: leave out {option}")
    result = calibrate_collectives(path, load_system(name))
    text = dump_system(result.system, None if out == "-" else out)
    if out == "-":
        click.echo(text, nl=False)
        return
    for line in (*result.fitted, *result.notes):
        say(str(line))
    say(f"\nwritten to {out}; use it as --system {out}")


# -- hardware commands -----------------------------------------------------------------------------
# Commands on chips, and on systems of many chips: list, show, lint.

Kind = Literal["chips", "systems"]


def _functions(kind: Kind) -> tuple[Callable[..., Any], Callable[[], Any], Callable[..., Any]]:
    """The functions of a kind: load one, name all that come with rooftrace, check a file."""
    from rooftrace.hardware import available_chips, load_chip
    from rooftrace.hardware.chipfile import lint_chip
    from rooftrace.hardware.systems import available_systems, lint_system, load_system

    if kind == "chips":
        return load_chip, available_chips, lint_chip
    return load_system, available_systems, lint_system


def _group(kind: Kind, helps: tuple[str, str, str, str]) -> click.Group:
    """The commands of a kind.  helps: of the group, and of list, show and lint."""
    about, listing, showing, linting = helps
    group = click.Group(kind, help=about)
    group.command_class = Command

    @group.command("list", help=listing, results=results())
    def list_all(output: CommandOutput) -> None:
        from rooftrace.reporting.views import list_of

        output.write(list_of(kind))

    @group.command("show", help=showing, results=results())
    @click.argument("name")
    def show(name: str, output: CommandOutput) -> None:
        load, _, _ = _functions(kind)
        output.write(load(name))

    @group.command("lint", help=linting)
    @click.argument("paths", nargs=-1)
    def lint(paths: tuple[str, ...]) -> None:
        from rooftrace.hardware.units import plural

        _, available, check = _functions(kind)
        bad = 0
        for path in paths or available():
            findings = check(path)
            serious = [f for f in findings if f.severity != "note"]
            bad += len(serious)
            say(f"{path}: {plural(len(serious), 'problem') if serious else 'ok'}")
            for finding in findings if paths else serious:
                say(f"  {finding.severity}: {finding.field}: {finding.message}")
        if bad:
            sys.exit(1)

    return group


chips = _group("chips", (
    "List, show and lint chips.",
    "List every chip with its dense peaks, memory and ridge point.",
    "Show every fact of a chip (a name or a TOML path) with its source and kind.",
    "Check chip files (default: those that come with rooftrace); exit 1 on errors or warnings.",
))  # fmt: skip
systems = _group("systems", (
    "List, show and lint systems of many chips.",
    "List every system with its chip and its links.",
    "Show every fact and fitted constant of a system (a name or a TOML path) with its source.",
    "Check system files (default: those of rooftrace); exit 1 on errors or warnings.",
))  # fmt: skip
