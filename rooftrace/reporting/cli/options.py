"""Options that several commands have: what is run, how it is priced, where the result goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rooftrace._formats import FIGURES
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.outputs import Output
from rooftrace.tracer.asking import names

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


def timeline_option(help: str | bool = True) -> Callable[..., Any]:
    """--timeline: the steps of the result."""
    usual = "Write the predicted timeline of the steps there; it opens in ui.perfetto.dev."
    told = help if isinstance(help, str) else usual
    return click.option("--timeline", type=TimelineFile(), metavar="FILE.json.gz", help=told)


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
