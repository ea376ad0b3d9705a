"""The command breaks: where torch.compile breaks the graph, and what that costs."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import progress
from rooftrace.reporting.cli.written import Written, results

_HELP = f"""{TARGET_HELP}

Dynamo, the front end of torch.compile, runs on the module without a compiler and without its
weights; the result says what each line costs at which it ends a graph."""


@click.command(epilog=_HELP)
@click.argument("target")
@asks("graph_breaks")
@results("data", "rows")
def breaks(target: str, written: Written, asked: dict[str, Any]) -> None:
    """Graph breaks of torch.compile on TARGET: line, reason, how often, and what each costs."""
    with progress():
        result = rt.graph_breaks(target, **asked)
    written.write(result)
