"""The commands census and nodes: what a step consists of, item by item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    chip_option,
    execution_option,
    pricing_options,
    requests_options,
    table_options,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.shared import (
    load_executions,
    load_rules,
    once,
    one_phase,
    workload,
    write_result,
    write_timeline,
)

_asked = (
    workload_options,
    requests_options,
    pricing_options,
    chip_option(),
    execution_option(),
    timeline_option,
    table_options,
)


def _itemised(command: Callable[..., None]) -> Callable[..., None]:
    """The target and the options of one step."""
    for option in reversed(_asked):
        command = option(command)
    return click.argument("target")(command)


@click.command(epilog=TARGET_HELP)
@click.option(
    "--align",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    metavar="BYTES",
    help="Sizes are odd whose rows in memory are no multiple of so many bytes.",
)
@_itemised
def census(
    align: int, form: str | None, out: str | None, timeline: str | None, **request: Any
) -> None:
    """Matrix products of TARGET by M, N, K: FLOPs, time, how they fill tiles, odd sizes.

    The products and the attention kernels add up to the matrix FLOPs of the step.
    """
    estimate = _estimate(**request)
    shown = write_result(estimate.census(align), form, out)
    write_timeline(timeline, estimate, quiet=not shown)


@click.command(epilog=TARGET_HELP)
@_itemised
def nodes(form: str | None, out: str | None, timeline: str | None, **request: Any) -> None:
    """Kernels of TARGET with the weights, inputs and outputs that each moves.

    They add up to the HBM bytes and the FLOPs of the step.
    """
    estimate = _estimate(**request)
    shown = write_result(estimate.by_node(), form, out)
    write_timeline(timeline, estimate, quiet=not shown)


def _estimate(
    target: str,
    chip: str,
    execution: str,
    tf32: bool,
    rules: tuple[str, ...],
    knobs: str | None,
    rewrites: tuple[str, ...],
    phases: tuple[str, ...] | None,
    **request: Any,
) -> rt.Estimate:
    phase = one_phase(phases)
    (model,) = load_executions([execution], tf32, knobs, rewrites)
    load_rules(rules)
    with once():
        return rt.estimate(target, phase=phase, chip=chip, execution=model, **workload(**request))
