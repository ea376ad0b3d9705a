"""The command roofline: several models, chips and sizes in one figure."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results

_HELP = f"""{TARGET_HELP}

--batch, --seq and --kv take several values of one of them (1,2,4,8); a line joins their points."""


@click.command(epilog=_HELP)
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@asks(
    "roofline",
    chip="Chips by name or TOML path; each has its roof, and a point for each step.",
)
@results("data", "rows", plot="Draw all of it on one roofline.", style=True, timeline=True)
def roofline(targets: tuple[str, ...], written: Written, asked: dict[str, Any]) -> None:
    """Steps of several TARGETs under the roofs of several chips: a table, and one figure."""
    if written.style != "screen" and written.plot is None and written.format != "tex":
        raise RequestError(
            f"--style {written.style}: it is of figures and LaTeX: add --plot FILE.pdf or "
            "--format tex"
        )
    with progress():
        result = rt.roofline(list(targets), **asked)
        if written.plot is not None:
            rt.plot_roofline(result, written.plot, style=written.style)
    written.write(result)
