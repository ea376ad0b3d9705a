"""The command `sweep`: a step over ranges of its sizes, on each chip, from a handful of traces."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import click

import rooftrace as rt
from rooftrace._formats import TEXTS
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP, plot_option, timeline_option
from rooftrace.reporting.cli.output import complain, say
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.shared import progress, write_result, write_timeline

_HELP = f"""{TARGET_HELP}  Or a form that `--save-form` wrote, which needs no torch.

--over NAME=VALUES: 1..1024, 1..1024:8 (steps), 2048..131072:x2 (doubling), 1,2,4, or the name
alone for its usual range.  NAME: batch, seq, kv, a number of the config (config.hidden_size), a
keyword of the function that TARGET names, or a name in the shape of an --input."""


@click.command(epilog=_HELP)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@asks("sweep")
@click.option(
    "-o",
    "--out",
    type=Output(folder=True, table=True),
    metavar="FILE",
    help="Write the table there: .parquet or .csv; for several TARGETs a folder.  A stopped sweep "
    "goes on with the same command.",
)
@plot_option("Draw time over the first size.")
@timeline_option()
@click.option(
    "--save-form",
    type=Output(),
    metavar="FILE",
    help="Write the form, to sweep it again without torch.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Of Dask (tcp://...), for many TARGETs; default: processes of this machine.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["terminal", *TEXTS]),
    default="terminal",
    show_default=True,
)
def sweep(
    targets: tuple[str, ...], out: str | None, plot: str | None, timeline: str | None,
    save_form: str | None, scheduler: str | None, form: str, asked: dict[str, Any],
) -> None:  # fmt: skip
    """What a step of TARGET costs over ranges of its sizes: best, limits, cliffs, a table."""
    if len(targets) > 1 or scheduler is not None:
        single = {"--plot": plot, "--save-form": save_form, "--timeline": timeline}
        _fleet(targets, asked, form, out, scheduler, single)
        return
    if save_form is not None and "vary" in asked:
        raise RequestError(
            "--save-form with --vary: each value has a form of its own; leave one out"
        )
    with progress(kept=_FIRST):
        try:
            result = rt.sweep(targets[0], out=out, **asked)
        except KeyboardInterrupt:
            if out is not None:
                complain(f"stopped; what is done is in {out}.parts, the same command goes on")
            sys.exit(130)
        if save_form is not None:
            rt.save_form(result.cases[0].form, save_form)
        if plot is not None:
            rt.plot_sweep(result, plot)
    _say(result, form)
    if form == "terminal":
        for path, word in ((out, "written"), (save_form, "form written"), (plot, "drawn")):
            if path is not None:
                say(f"\n{word} to {path}")
    write_timeline(timeline, result, quiet=form != "terminal")


def _say(result: Any, form: str) -> None:
    write_result(result, form, None, table=lambda: str(result.frame().to_csv(index=False)))


def _fleet(
    targets: Sequence[str],
    asked: dict[str, Any],
    form: str,
    out: str | None,
    scheduler: str | None,
    single: dict[str, str | None],
) -> None:
    """Several targets, or work for a scheduler: results land in a folder as they come."""
    several = f"{len(targets)} TARGETs" if len(targets) > 1 else "--scheduler"
    for option, value in single.items():
        if value is not None:
            raise RequestError(
                f"{option} {value}: it is for one TARGET without --scheduler; here: {several}"
            )
    if out is None:
        raise RequestError(f"{several}: say where results land with -o FOLDER")
    rules = click.get_current_context().params["rules"]
    with progress(kept=_ENDED):
        try:
            result = rt.sweep_fleet(targets, out=out, scheduler=scheduler, rules=rules, **asked)
        except KeyboardInterrupt as stop:
            complain(str(stop) or "stopped")
            sys.exit(130)
    _say(result, form)
    if form == "csv":
        for failure in result.failures:
            complain(f"{failure.title} failed: {failure.error}")
    if result.failures:
        sys.exit(1)


_FIRST = re.compile(r"first step, .*")
"""What a sweep tells early, and that stays on stderr."""
_ENDED = re.compile(r"\d+ of \d+( are there|: .*)|waiting for workers.*|.*: its workers died.*")
"""What a fleet tells that stays on stderr."""
