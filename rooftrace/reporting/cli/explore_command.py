"""The command explore: whether any batch makes decode limited by computing, and the least one."""

from __future__ import annotations

from typing import Any

import click

import rooftrace as rt
from rooftrace.reporting.cli.options import (
    TARGET_HELP,
    Commas,
    chip_option,
    execution_option,
    plot_option,
    rules_option,
    table_options,
)
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import (
    load_executions,
    load_rules,
    pairs,
    progress,
    write_result,
)

_HELP = f"""{TARGET_HELP}  Or a form over batch and kv that `rooftrace sweep --save-form` wrote.

Each device brings its own batch and holds a share of the routed experts; everything else is on all
of them.  Computing, HBM and link overlap perfectly at the rates of the datasheet: a lower bound."""


@click.command(epilog=_HELP)
@click.argument("target")
@click.option(
    "--over",
    multiple=True,
    metavar="NAME=VALUES",
    help="devices=1,2,64 (default: 1..64:x2), kv=2048..16384:x2, or batch=... (of one device).  "
    "Repeatable.",
)
@click.option("--dtype", help="Price the model's own floats in this precision (fp8, bf16 ...).")
@click.option("--weights-dtype", help="Price weights in this precision.")
@click.option("--kv-dtype", help="Price the KV cache in this precision.")
@click.option(
    "--rewrite",
    "rewrites",
    type=Commas(),
    default=(),
    help="What a server runs in place of the module, besides what --execution has.",
)
@click.option("--tf32", is_flag=True, help="Run fp32 matrix products on the matrix engine.")
@rules_option
@chip_option()
@execution_option("serving")
@click.option("--link", metavar="BANDWIDTH", help="In place of the chip's fastest: '50 GB/s'.")
@click.option(
    "--alpha",
    type=float,
    default=0.9,
    show_default=True,
    help="The share of the slower of HBM and link at which computing counts as the limit.",
)
@plot_option("Draw the least batches.")
@table_options
def explore(target: str, form: str | None, out: str | None, **asked: Any) -> None:
    """The least batch at which computing limits decode, over devices and lengths of the cache."""
    load_rules(asked.pop("rules"))
    tf32, rewrites = asked.pop("tf32"), asked.pop("rewrites")
    (execution,) = load_executions([asked.pop("execution")], tf32, rewrites=rewrites)
    over = dict(pairs("--over", asked.pop("over"), "NAME=VALUES, for example devices=1,8,64"))
    options = {name: value for name, value in asked.items() if value is not None}
    with progress():
        result = rt.explore(target, over=over, execution=execution, **options)
    if write_result(result, form, out) and asked["plot"] is not None:
        say(f"\ndrawn to {asked['plot']}")
