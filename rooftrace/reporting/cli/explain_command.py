"""The command explain: where the numbers of a step come from, and what would confirm its limit."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    Commas,
    output_options,
    pricing_options,
    workload_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    load_chips,
    load_executions,
    load_rules,
    progress,
    workload,
    write_text,
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
@click.option(
    "--chip",
    "chips",
    type=Commas(),
    default="h200-sxm",
    show_default=True,
    help="Chips by name or TOML path; the first is explained, the sweep has all.",
)
@click.option(
    "--execution",
    default="efficient",
    show_default=True,
    help="naive, eager, compiled, efficient, serving, seed-naive, seed-efficient.",
)
@click.option("--plot", metavar="FILE.png", help="Draw the sweep along the roofline of each chip.")
@output_options
def explain(
    target: str,
    op: str | None,
    chips: tuple[str, ...],
    execution: str,
    plot: str | None,
    tf32: bool,
    rules: tuple[str, ...],
    knobs: str | None,
    rewrites: tuple[str, ...],
    form: str,
    out: str | None,
    phases: tuple[str, ...] | None,
    **request: Any,
) -> None:
    """FLOPs and bytes of TARGET as formulas, what limits it, and tests that would confirm that.

    Formulas are in the sizes of the step: batch, and seq or kv.  Without --op the whole step is a
    worked example, with the least batch that computing limits and a sweep.
    """
    from rooftrace.reporting.text import as_markdown, renderable

    if phases is not None and len(phases) != 1:
        raise click.UsageError(f"--phase {','.join(phases)}: expected one phase to explain")
    loaded = load_chips(chips)
    (model,) = load_executions([execution], tf32, knobs, rewrites)
    load_rules(rules)
    with progress():
        result = rt.explain(
            target,
            op=op,
            phase=None if phases is None else phases[0],
            chip=loaded,
            execution=model,
            plot=plot,
            **workload(**request),
        )
    write_text(form, out, lambda: renderable(result), lambda: as_markdown(result), result.to_dict)
    if plot is not None and form == "terminal":
        say(f"\nsweep drawn to {plot}")
