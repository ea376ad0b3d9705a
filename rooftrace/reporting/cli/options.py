"""Options that several commands have: what is run, how it is priced, where the result goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from rooftrace.costmodels.execution import REWRITES
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.cli.outputs import Output
from rooftrace.reporting.cli.scripted import priced_as_run
from rooftrace.tracer.asking import names
from rooftrace.tracer.pipelines import SCHEDULES

TARGET_HELP = f"""TARGET is package.module:attr or path/file.py:attr (a module, or a function
returning a module or (module, inputs)), the path of a Hugging Face config.json, hf:ORG/NAME, a
saved graph, an exported program (.pt2, .onnx), a script with its arguments in one word ("train.py
--batch_size=12", or run:COMMAND), or the name of a config that comes along:
{", ".join(names.configs())}."""


class Commas(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """A comma-separated list."""

    name = "LIST"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(part.strip() for part in str(value).split(",") if part.strip())


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


FIGURES = ("png", "svg", "pdf")
"""Formats of figures."""


class FigureFile(Output):
    """The path of a figure: PNG, SVG or PDF by its ending, which is checked before any work."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        if not path.lower().endswith(tuple(f".{form}" for form in FIGURES)):
            option = param.opts[0] if param is not None else "--plot"
            raise RequestError(f"{option} {path}: expected a file that ends in .png, .svg or .pdf")
        return path


class TimelineFile(Output):
    """The path of a timeline, which is checked before any work."""

    name = "FILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        if not path.endswith((".json", ".json.gz")):
            raise RequestError(f"--timeline {path}: expected a file that ends in .json or .json.gz")
        return path


timeline_option = click.option(
    "--timeline",
    type=TimelineFile(),
    metavar="FILE.json.gz",
    help="Write the predicted timeline of the steps there; it opens in ui.perfetto.dev.",
)


def plot_option(help: str) -> Callable[..., Any]:
    """--plot: a figure of the result."""
    return click.option("--plot", type=FigureFile(), metavar="FILE.png|svg|pdf", help=help)


style_option = click.option(
    "--style",
    type=click.Choice(["screen", "paper", "paper-column"]),
    default="screen",
    show_default=True,
    help="What figures are made for: paper is 7.2 in wide, paper-column 3.5 in, with type of 7 to "
    "9 points.",
)


def results(
    *more: str, plot: str = "", style: bool = False, timeline: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command that writes a result: it gets `written`, what --format, --out and the rest say.

    more: formats beside those of a text; plot: help of --plot, where there is a figure.
    """

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            taken = {name: values.pop(name) for name in _OF_RESULTS if name in values}
            return command(*args, written=Written(**taken), **values)

        options = [
            *([plot_option(plot)] if plot else []),
            *([style_option] if style else []),
            *([timeline_option] if timeline else []),
            *_output("terminal", "md", "html", "tex", *more),
        ]
        return _with(called, *options)

    return decorated


_OF_RESULTS = ("form", "out", "plot", "style", "timeline")


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format with csv, --out: one text or table, to the terminal or a file."""
    return _with(command, *_output("terminal", "md", "html", "tex", "json", "csv"))


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format, --out: one text, to the terminal or a file."""
    return _with(command, *_output("terminal", "md", "html", "tex", "json"))


def page_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--format without data, --out: a table of what comes along."""
    return _with(command, *_output("terminal", "md", "html", "tex"))


def _output(*forms: str) -> tuple[Callable[..., Any], ...]:
    return (
        click.option(
            "--format",
            "form",
            type=click.Choice(forms),
            help="Default: terminal, or by the ending of --out.",
        ),
        click.option(
            "-o",
            "--out",
            type=Output(forms=forms),
            metavar="FILE",
            help="Write there instead of the terminal; - is stdout.",
        ),
    )
