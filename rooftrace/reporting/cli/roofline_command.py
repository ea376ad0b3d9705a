"""The command roofline: several models, chips and sizes in one figure."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    FigureFile,
    SizeList,
    chips_option,
    execution_option,
    pricing_options,
    style_option,
    system_option,
    table_options,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    form_of,
    load_executions,
    load_joined,
    load_rules,
    progress,
    workload,
    write_result,
    write_timeline,
)

_HELP = f"""{TARGET_HELP}

--batch, --seq and --kv take several values of one of them (1,2,4,8); a line joins their points."""


@click.command(epilog=_HELP)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@workload_options(sizes=SizeList())
@pricing_options
@chips_option("Chips by name or TOML path; each has its roof, and a point for each step.")
@system_option
@execution_option()
@click.option(
    "--plot", type=FigureFile(), metavar="FILE.png|svg|pdf", help="Draw all of it on one roofline."
)
@style_option
@timeline_option
@table_options
def roofline(
    targets: tuple[str, ...], form: str | None, out: str | None, plot: str | None, style: str,
    timeline: str | None,
    **asked: Any,
) -> None:  # fmt: skip
    """Steps of several TARGETs under the roofs of several chips: a table, and one figure."""
    if style != "screen" and plot is None and form_of(form, out) != "tex":
        raise RequestError(
            f"--style {style}: it is of figures and LaTeX: add --plot FILE.pdf or --format tex"
        )
    load_rules(asked.pop("rules"))
    (execution,) = load_executions(
        [asked.pop("execution")], asked.pop("tf32"), asked.pop("knobs"), asked.pop("rewrites")
    )
    chips = load_joined(asked.pop("chips"), asked.pop("systems"))
    with progress():
        result = rt.roofline(list(targets), chip=chips, execution=execution, **workload(**asked))
        if plot is not None:
            rt.plot_roofline(result, plot, style=style)
    shown = write_result(result, form, out, style=style)
    if shown and plot is not None:
        say(f"\ndrawn to {plot}")
    write_timeline(timeline, result, quiet=not shown)
