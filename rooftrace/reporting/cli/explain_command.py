"""The command explain: where the numbers of a step come from, and what would confirm its limit."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    chips_option,
    execution_option,
    output_options,
    plot_option,
    pricing_options,
    timeline_option,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    load_chips,
    load_executions,
    load_rules,
    one_phase,
    progress,
    workload,
    write_result,
    write_timeline,
)


@click.command(epilog=TARGET_HELP)
@click.argument("target")
@click.option(
    "--op",
    metavar="PATTERN",
    help="Explain the kernels of a module (its path or the end of it, * as in file names), of this "
    "name, or with this number in the plan; default: the whole step.",
)
@workload_options
@pricing_options
@chips_option("Chips by name or TOML path; the first is explained, the sweep has all.")
@execution_option()
@plot_option("Draw the sweep along the roofline of each chip.")
@timeline_option
@output_options
def explain(
    target: str,
    op: str | None,
    chips: tuple[str, ...],
    execution: str,
    plot: str | None,
    timeline: str | None,
    tf32: bool,
    rules: tuple[str, ...],
    knobs: str | None,
    rewrites: tuple[str, ...],
    form: str | None,
    out: str | None,
    phases: tuple[str, ...] | None,
    **request: Any,
) -> None:
    """FLOPs and bytes of TARGET as formulas, what limits it, and tests that would confirm that.

    Formulas are in the sizes of the step: batch, and seq or kv.  Without --op the whole step is a
    worked example, with the least batch that computing limits and a sweep.
    """
    phase = one_phase(phases)
    loaded = load_chips(chips)
    (model,) = load_executions([execution], tf32, knobs, rewrites)
    load_rules(rules)
    with progress():
        result = rt.explain(
            target,
            op=op,
            phase=phase,
            chip=loaded,
            execution=model,
            plot=plot,
            **workload(**request),
        )
    shown = write_result(result, form, out)
    if shown and plot is not None:
        say(f"\nsweep drawn to {plot}")
    write_timeline(timeline, result, quiet=not shown)
