"""Options that several commands have: what is run, how it is priced, where the result goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rooftrace.costmodels.execution import REWRITES
from rooftrace.tracer.asking import names

TARGET_HELP = f"""TARGET is package.module:attr or path/file.py:attr (a module, or a function
returning a module or (module, inputs)), the path of a Hugging Face config.json, hf:ORG/NAME, a
saved graph, or the name of a config that comes along: {", ".join(names.configs())}."""


class Commas(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A comma-separated list."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


def workload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--batch, --seq, --phase, --dtype ...: what is run."""
    options = (
        click.option(
            "--phase",
            "phases",
            type=Commas(),
            help="forward, training, prefill, decode; default: those that fit the model.",
        ),
        click.option(
            "--batch", type=int, help="Batch size; default 1, or the batch of the inputs."
        ),
        click.option("--seq", type=int, help="Sequence (prompt) length in tokens."),
        click.option("--kv", type=int, help="Cached length before a decode step; default: --seq."),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="NAME=SHAPE:DTYPE",
            help="An input by name, for example pixels=8,3,224,224:fp32.  Repeatable.",
        ),
        click.option(
            "--dtype", help="Price the model's own floats in this precision (fp8, bf16, int4 ...)."
        ),
        click.option("--weights-dtype", help="Price weights in this precision."),
        click.option("--kv-dtype", help="Price the KV cache in this precision."),
        click.option(
            "--optimizer",
            default="adamw",
            show_default=True,
            help="Optimizer of a training step: none, or any of torch.optim.",
        ),
        click.option(
            "--assume",
            "assumed",
            multiple=True,
            metavar="KIND[@MODULE]=VALUE",
            help="Decide what a trace cannot know, for example branch=true or "
            "routing@*.gate=skewed:1.0.  Repeatable.",
        ),
        click.option(
            "--repeats/--no-repeats",
            default=True,
            show_default=True,
            help="Trace equal layers once, and list them once.",
        ),
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Let a Hugging Face repository run its own code.",
        ),
    )
    return _with(command, *options)


rules_option = click.option(
    "--rules",
    multiple=True,
    metavar="FILE.py",
    help="Python file that adds rules, joins, sections, sources or phases.  Repeatable.",
)


def pricing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--knobs, --rewrite, --tf32, --rules: how it is priced."""
    options = (
        click.option(
            "--knobs",
            metavar="FILE",
            default="typical",
            show_default=True,
            help="Constants of real kernels: typical ones of the chip's kind, a calibrated TOML "
            "file, or none (datasheet peaks, so that times are bounds).",
        ),
        click.option(
            "--rewrite",
            "rewrites",
            type=Commas(),
            default=(),
            help="What a server runs in place of the module, in every execution model: "
            f"{', '.join(REWRITES)}.",
        ),
        click.option("--tf32", is_flag=True, help="Run fp32 matrix products on the matrix engine."),
        rules_option,
    )
    return _with(command, *options)


def measured_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--chip, --execution, --target, --trust-targets: what measurements are of."""
    return _with(
        command,
        click.option("--chip", required=True, help="The chip that the steps were measured on."),
        click.option("--execution", default="eager", show_default=True, help=_HOW),
        *_WHAT,
    )


def calibration_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--chip and --execution, which a run says itself, --target, --trust-targets."""
    return _with(
        command,
        click.option(
            "--chip",
            help="The chip that the steps were measured on; default with --run: this device, "
            "measured now.",
        ),
        click.option("--execution", help=f"{_HOW}  Default: eager."),
        *_WHAT,
    )


_HOW = "How the steps were run: eager, compiled, efficient (one CUDA graph), serving."
_WHAT = (
    click.option(
        "--target",
        metavar="TARGET|TEMPLATE",
        help="What was run.  With a trace: a TARGET.  With a table: a template that makes a "
        "TARGET of each name in it, for example models.py:{target}.  A run of the suite needs "
        "none.",
    ),
    click.option(
        "--trust-targets",
        is_flag=True,
        help="Import and call what the file of measurements names: only for a file that you "
        "trust as you trust code.",
    ),
)


def _with(command: Callable[..., Any], *options: Callable[..., Any]) -> Callable[..., Any]:
    """A command with these options, in this order."""
    for option in reversed(options):
        command = option(command)
    return command


EXECUTIONS = "naive, eager, compiled, efficient, serving, seed-naive, seed-efficient"


def chip_option(help: str = "A chip by name or TOML path.") -> Callable[..., Any]:
    """--chip: one."""
    return click.option("--chip", default="h200-sxm", show_default=True, help=help)


def chips_option(help: str = "Chips by name or TOML path.") -> Callable[..., Any]:
    """--chip: one or several, as `chips`."""
    return click.option(
        "--chip", "chips", type=Commas(), default="h200-sxm", show_default=True, help=help
    )


def execution_option(default: str = "efficient") -> Callable[..., Any]:
    """--execution: one."""
    return click.option("--execution", default=default, show_default=True, help=f"{EXECUTIONS}.")


def executions_option(default: str = "efficient") -> Callable[..., Any]:
    """--execution: one or several, as `executions`."""
    return click.option(
        "--execution",
        "executions",
        type=Commas(),
        default=default,
        show_default=True,
        help=f"{EXECUTIONS}.",
    )


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format with csv, --out: one text or table, to the terminal or a file."""
    return _with(
        command,
        click.option(
            "--format",
            "form",
            type=click.Choice(["terminal", "md", "json", "csv"]),
            help="Default: terminal, or by the ending of --out.",
        ),
        click.option(
            "-o", "--out", metavar="FILE", help="Write there instead of the terminal; - is stdout."
        ),
    )


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format, --out: one text, to the terminal or a file."""
    form = click.option(
        "--format",
        "form",
        type=click.Choice(["terminal", "md", "json"]),
        default="terminal",
        show_default=True,
    )
    out = click.option(
        "-o", "--out", metavar="FILE", help="Write there instead of the terminal; - is stdout."
    )
    return form(out(command))
