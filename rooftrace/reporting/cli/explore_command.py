"""The command explore: whether any batch makes decode limited by computing, and the least one."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results

_HELP = f"""{TARGET_HELP}  Or a form over batch and kv that `rooftrace sweep --save-form` wrote.

Each device brings its own batch and holds a share of the routed experts; everything else is on all
of them.  Computing, HBM and link overlap perfectly at the rates of the datasheet: a lower bound."""


@click.command(epilog=_HELP)
@click.argument("target")
@asks("explore")
@results("data", "rows", plot="Draw the least batches.")
def explore(target: str, written: Written, asked: dict[str, Any]) -> None:
    """The least batch at which computing limits decode, over devices and lengths of the cache."""
    with progress():
        result = rt.explore(target, plot=written.plot, **asked)
    written.write(result)
