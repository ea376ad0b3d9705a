"""The command breaks: where torch.compile breaks the graph, and what that costs."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    chip_option,
    execution_option,
    pricing_options,
    table_options,
    workload_options,
)
from rooftrace.reporting.cli.shared import (
    load_executions,
    load_rules,
    one_phase,
    progress,
    workload,
    write_result,
)

_HELP = f"""{TARGET_HELP}

Dynamo, the front end of torch.compile, runs on the module without a compiler and without its
weights; the result says what each line costs at which it ends a graph."""


@click.command(epilog=_HELP)
@click.argument("target")
@workload_options
@pricing_options
@chip_option()
@execution_option("compiled")
@table_options
def breaks(
    target: str,
    chip: str,
    execution: str,
    tf32: bool,
    rules: tuple[str, ...],
    knobs: str | None,
    rewrites: tuple[str, ...],
    phases: tuple[str, ...] | None,
    form: str | None,
    out: str | None,
    **request: Any,
) -> None:
    """Graph breaks of torch.compile on TARGET: line, reason, how often, and what each costs."""
    phase = one_phase(phases)
    (model,) = load_executions([execution], tf32, knobs, rewrites)
    load_rules(rules)
    with progress():
        result = rt.graph_breaks(
            target, phase=phase, chip=chip, execution=model, **workload(**request)
        )
    write_result(result, form, out)
