"""The command explore: whether any batch makes decode limited by computing, and the least one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.options import TARGET_HELP, Commas, rules_option
from rooftrace.reporting.cli.output import say
from rooftrace.reporting.cli.shared import load_executions, load_rules, progress, write_result

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
@click.option("--chip", default="h200-sxm", show_default=True, help="A chip by name or TOML path.")
@click.option(
    "--execution",
    default="serving",
    show_default=True,
    help="naive, eager, compiled, efficient, serving, seed-naive, seed-efficient.",
)
@click.option("--link", metavar="BANDWIDTH", help="In place of the chip's fastest: '50 GB/s'.")
@click.option(
    "--alpha",
    type=float,
    default=0.9,
    show_default=True,
    help="The share of the slower of HBM and link at which computing counts as the limit.",
)
@click.option("--plot", metavar="FILE.png", help="Draw the least batches.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["terminal", "md", "json", "csv"]),
    help="Default: terminal, or by the ending of --out.",
)
@click.option(
    "-o", "--out", metavar="FILE", help="Write there instead of the terminal; - is stdout."
)
def explore(target: str, form: str | None, out: str | None, **asked: Any) -> None:
    """The least batch at which computing limits decode, over devices and lengths of the cache."""
    load_rules(asked.pop("rules"))
    tf32, rewrites = asked.pop("tf32"), asked.pop("rewrites")
    (execution,) = load_executions([asked.pop("execution")], tf32, rewrites=rewrites)
    over = _over(asked.pop("over"))
    options = {name: value for name, value in asked.items() if value is not None}
    with progress():
        result = rt.explore(target, over=over, execution=execution, **options)
    if write_result(result, form, out) and asked["plot"] is not None:
        say(f"\ndrawn to {asked['plot']}")


def _over(texts: Sequence[str]) -> dict[str, str]:
    over: dict[str, str] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise RequestError(f"--over {text}: expected NAME=VALUES, for example devices=1,8,64")
        over[name.strip()] = values
    return over
