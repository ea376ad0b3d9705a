"""Options of commands: made of the arguments of our functions, or shared by several commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import click
from click.core import ParameterSource

from rooftrace._formats import FIGURES
from rooftrace.errors import RequestError
from rooftrace.reporting.cli.output import Output
from rooftrace.reporting.requests.calls import CALLS, USUAL, TakenArguments
from rooftrace.reporting.requests.options import Option
from rooftrace.tracer.requests import names

RULES = Option(
    name="rules",
    help="Python file that adds rules, joins, sections, sources or phases.  Repeatable.",
    metavar="FILE.py",
    repeats=True,
)


def asks(
    function: str, *, run_rules: bool = True, **helps: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command with the options of a function of ours, and --rules where these may matter.

    The command is called with `asked`: the arguments that were typed, by name, as the function
    takes them.  Files of --rules have run then, unless it runs them itself.  helps: what an option
    means here, by its name.
    """
    call = CALLS[function]
    told = {each.name: each for each in _worded(call, helps)}
    if call.has_rules:
        told["rules"] = RULES

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            asked = typed(click.get_current_context(), told)
            if run_rules:
                load_rules(asked.pop("rules", ()))
            others = {name: value for name, value in values.items() if name not in told}
            return command(*args, asked=asked, **others)

        # As click.option does: options of a function are noted from the last to the first.
        noted = vars(called).setdefault("__click_params__", [])
        noted += [made(each) for each in reversed(told.values())]
        return called

    return decorated


def typed(context: click.Context, options: Mapping[str, Option]) -> dict[str, Any]:
    """The arguments that a user typed, by name."""
    return {
        name: each.value(context.params[name])
        for name, each in options.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def made(option: Option) -> click.Option:
    """The option of click."""
    how: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.required:
        how["required"] = True
    if option.kind is bool:
        how |= {"is_flag": True, "default": "/" in option.flag}
    elif option.words:
        how["type"] = click.Choice(option.words)
    elif option.least is not None:
        how["type"] = click.IntRange(option.least, option.most)
    elif option.kind is not str:
        how["type"] = option.kind
    if option.repeats:
        how["multiple"] = True
    if option.shown.startswith("("):
        how["show_default"] = option.shown[1:-1]
    elif option.shown:
        how |= {"default": how.get("default", option.shown), "show_default": True}
    return click.Option([*option.spelled.split(" "), option.name], **how)


def _worded(call: TakenArguments, helps: Mapping[str, str]) -> list[Option]:
    """The options of a call, with its usual execution and the help that it has for some."""
    usual = ",".join("efficient" if name == USUAL else name for name in call.usual)
    options = []
    for each in call.options():
        if each.name == "execution":
            each = replace(each, shown=usual)
        if each.name in helps:
            told = "default" in helps[each.name].lower()
            each = replace(each, help=helps[each.name], shown="" if told else each.shown)
        options.append(each)
    return options


class RulesFileError(ValueError):
    """A file of --rules that fails: names it, the line, and the error."""


def load_rules(paths: Iterable[str]) -> None:
    """Run the files of --rules: their functions register themselves.

    Raises RulesFileError for a file that fails.
    """
    import runpy

    for path in paths:
        if not Path(path).is_file():
            raise click.UsageError(f"--rules {path!r}: there is no such file")
        try:
            runpy.run_path(path)
        except (Exception, SystemExit) as error:
            lines = [frame for frame in extract_tb(error.__traceback__) if frame.filename == path]
            line = getattr(error, "lineno", None) or (lines[-1].lineno if lines else None)
            where = path if line is None else f"{path}:{line}"
            raise RulesFileError(f"--rules {where}: {type(error).__name__}: {error}") from error


# -- options ---------------------------------------------------------------------------------------
# Options that several commands have: what is run, how it is priced, where the result goes.

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
