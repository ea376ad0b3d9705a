"""Options of commands: those of public functions, and those that several commands share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import click
from click.core import ParameterSource

from rooftrace._formats import FIGURES
from rooftrace.reporting.cli.output import OutputPath
from rooftrace.reporting.commands.calls import CALLS, USUAL
from rooftrace.reporting.commands.options import Option, options_of
from rooftrace.reporting.commands.pricing import (
    ExecutionOptions,
    LengthOptions,
    PrecisionOptions,
    Workload,
)
from rooftrace.tracer import names

TRACEBACK = click.Option(
    ["--traceback"],
    is_flag=True,
    help="If the command fails, print the calls that led to the error, in all processes.",
)
FORCE = click.Option(["--force"], is_flag=True, help="Replace a file that rooftrace did not write.")
SECTIONS: Mapping[str, Collection[str]] = {
    "Workload": {each.name for record in (Workload, LengthOptions) for each in options_of(record)},
    "Pricing": {
        "rules",
        *(o.name for record in (PrecisionOptions, ExecutionOptions) for o in options_of(record)),
    },
    "Output": ("force", "form", "formats", "style", "table", "align", "figures"),
    "Help": ("traceback",),
}
"""Sections of help that hold shared options: the names of the options in each."""


def section_of(option: click.Parameter) -> str:
    """The section of an option in the help of its command."""
    if isinstance(option.type, OutputPath):
        return "Output"
    if "--help" in option.opts:
        return "Help"
    return next((title for title, names in SECTIONS.items() if option.name in names), "Options")


RULES = Option(
    name="rules",
    help="Python file that adds rules, joins, sections, sources or phases.  Repeatable.",
    metavar="FILE.py",
    repeats=True,
)


def call_options(
    functions: Sequence[str], defaults: Mapping[str, str], helps: Mapping[str, str]
) -> dict[str, Option]:
    """The options of public functions by name, and --rules where rules may matter.

    defaults, helps: the default and the help of an option that a command says otherwise.
    """
    options: dict[str, Option] = {}
    for call in (CALLS[function] for function in functions):
        usual = ",".join("efficient" if name == USUAL else name for name in call.usual)
        shown = {"execution": usual, **{name: f"({text})" for name, text in defaults.items()}}
        for each in call.options():
            help, default = helps.get(each.name, each.help), shown.get(each.name, each.shown)
            options.setdefault(each.name, replace(each, help=help, shown=default))
        if call.has_rules:
            options["rules"] = RULES
    return options


def typed(context: click.Context, options: Mapping[str, Option]) -> dict[str, Any]:
    """The arguments that a user typed, by name."""
    return {
        name: each.value(context.params[name])
        for name, each in options.items()
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    }


def other_options(*names: str) -> list[str]:
    """Options that the user typed, other than these, --force and --traceback."""
    context = click.get_current_context()
    return [
        each.opts[-1] if isinstance(each, click.Option) else each.human_readable_name
        for each in context.command.params
        if each.name not in (*names, "force", "traceback")
        and context.get_parameter_source(str(each.name)) is ParameterSource.COMMANDLINE
        and (isinstance(each, click.Option) or context.params[str(each.name)])
    ]


def click_option(option: Option) -> click.Option:
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
# Options of several commands: the target, and the files of the result.

TARGET_HELP = f"""TARGET is package.module:attr or path/file.py:attr (a module, or a function
returning a module or (module, inputs)), the path of a Hugging Face config.json, hf:ORG/NAME, a
saved graph, an exported program (.pt2, .onnx), a script with its arguments in one word ("train.py
--batch_size=12", or run:COMMAND), or the name of a config that comes along:
{", ".join(names.configs())}."""


def timeline_option(help: str | bool = True) -> click.Option:
    """--timeline: the steps of the result."""
    usual = "Write the predicted timeline of the steps there; it opens in ui.perfetto.dev."
    return click.Option(
        ["--timeline"],
        type=OutputPath(endings=(".json", ".json.gz")),
        metavar="FILE.json.gz",
        help=help if isinstance(help, str) else usual,
    )


def plot_option(help: str) -> click.Option:
    """--plot: a figure of the result."""
    kind = OutputPath(endings=[f".{form}" for form in FIGURES])
    return click.Option(["--plot"], type=kind, metavar="FILE.png|svg|pdf", help=help)


def style_option() -> click.Option:
    """--style: the medium of figures and tables."""
    return click.Option(
        ["--style"],
        type=click.Choice(["screen", "paper", "paper-column"]),
        default="screen",
        show_default=True,
        help="Size of figures: paper is 7.2 in wide, paper-column 3.5 in, with type of 7 to 9 "
        "points.",
    )


def out_option(kind: OutputPath) -> click.Option:
    """-o, --out: the file of the result."""
    return click.Option(
        ["-o", "--out"],
        type=kind,
        metavar="FILE",
        help="Write there instead of the terminal; - is stdout.",
    )


def form_option(forms: Sequence[str], help: str = "", **how: Any) -> click.Option:
    """--format: the format of the result, the terminal first."""
    usual = "Default: terminal, or by the ending of --out."
    kind = click.Choice(["terminal", *forms])
    return click.Option(["--format", "form"], type=kind, help=help or usual, **how)
