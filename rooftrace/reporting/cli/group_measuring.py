"""What `measure --collectives` and `calibrate --collectives` do."""

from __future__ import annotations

import click
from click.core import ParameterSource

from rooftrace._progress import tell
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import progress


def measure_groups(
    targets: tuple[str, ...], asked: bool, ranks: int | None, out: str | None
) -> None:
    """Time collectives of gloo between processes of this machine, into a CSV."""
    from rooftrace.measured.groups import measure_collectives

    if not asked:
        raise click.UsageError("--ranks: say --collectives, too")
    if targets:
        raise click.UsageError(f"--collectives measures no model: leave out {' '.join(targets)}")
    _refuse_others(
        {"collectives", "ranks", "out", "force"}, "--collectives measures no model and no chip"
    )
    path = out or "collectives.csv"
    with progress():
        rows = measure_collectives(2 if ranks is None else ranks, path, tell=tell)
    say(f"{rows} rows written to {path}; use it as rooftrace calibrate --collectives {path}")


def calibrate_groups(path: str | None, name: str | None, out: str) -> None:
    """Fit constants of collectives, and write the system that has them."""
    from rooftrace.hardware.systems import dump_system, load_system
    from rooftrace.measured.collectives import calibrate_collectives

    if path is None:
        raise click.UsageError(f"--system {name}: say --collectives FILE, too")
    if name is None:
        raise click.UsageError("--collectives: say with --system NAME where they were measured")
    _refuse_others({"collectives", "system", "out", "force"}, "--collectives fits no knobs")
    result = calibrate_collectives(path, load_system(name))
    text = dump_system(result.system, None if out == "-" else out)
    if out == "-":
        click.echo(text, nl=False)
        return
    for line in (*result.fitted, *result.notes):
        say(str(line))
    say(f"\nwritten to {out}; use it as --system {out}")


def _refuse_others(wanted: set[str], why: str) -> None:
    """Refuse what stands on the command line beside these options."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in {*wanted, "traceback"} and source is ParameterSource.COMMANDLINE:
            if isinstance(parameter, click.Argument) and not context.params.get(name):
                continue
            shown = "MEASURED" if isinstance(parameter, click.Argument) else parameter.opts[-1]
            raise click.UsageError(f"{why}: leave out {shown}")
