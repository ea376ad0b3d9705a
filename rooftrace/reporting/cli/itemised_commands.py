"""The commands census and nodes: what a step consists of, item by item."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.asking import asks
from rooftrace.reporting.cli.options import TARGET_HELP
from rooftrace.reporting.cli.shared import once
from rooftrace.reporting.cli.written import Written, results


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@click.option(
    "--align",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="BYTES",
    help="Sizes are odd whose rows in memory are no multiple of so many bytes.",
)
@asks("estimate")
@results("data", "rows", timeline=True)
def census(target: str, align: int, written: Written, asked: dict[str, Any]) -> None:
    """Matrix products of TARGET by M, N, K: FLOPs, time, how they fill tiles, odd sizes.

    The products and the attention kernels add up to the matrix FLOPs of the step.
    """
    with once():
        estimate = rt.estimate(target, **asked)
    written.write(estimate.census(align), of=estimate)


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@asks("estimate")
@results("data", "rows", timeline=True)
def nodes(target: str, written: Written, asked: dict[str, Any]) -> None:
    """Kernels of TARGET with the weights, inputs and outputs that each moves.

    They add up to the HBM bytes and the FLOPs of the step.
    """
    with once():
        estimate = rt.estimate(target, **asked)
    written.write(estimate.by_node(), of=estimate)
