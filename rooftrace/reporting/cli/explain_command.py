"""The command explain: where the numbers of a step come from, and what would confirm its limit."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@asks(
    "explain",
    chip="Chips by name or TOML path; the first is explained, the sweep has all.",
)
@results("data", plot="Draw the sweep along the roofline of each chip.", timeline=True)
def explain(target: str, written: Written, asked: dict[str, Any]) -> None:
    """FLOPs and bytes of TARGET as formulas, what limits it, and tests that would confirm that.

    Formulas are in the sizes of the step: batch, and seq or kv.  Without --op the whole step is a
    worked example, with the least batch that computing limits and a sweep.
    """
    with progress():
        result = rt.explain(target, plot=written.plot, **asked)
    written.write(result, drawn="sweep drawn")
