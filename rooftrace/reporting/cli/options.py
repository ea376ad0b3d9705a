"""Options of commands: made of the arguments of our functions, or shared by several commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb, format_exception
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource

from rooftrace._formats import FIGURES
from rooftrace.reporting.cli.output import Output, checked_outputs, complain
from rooftrace.reporting.commands.calls import CALLS, USUAL
from rooftrace.reporting.commands.options import Option, options_of
from rooftrace.reporting.commands.pricing import (
    ExecutionOptions,
    LengthOptions,
    PrecisionOptions,
    Workload,
)
from rooftrace.tracer import names


class Command(click.Command):
    """A command with --traceback; if it writes files, --force, and a check of them at its start."""

    def __init__(self, *arguments: Any, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.outputs = {p.name or "": p.type for p in self.params if isinstance(p.type, Output)}
        self.params.append(_TRACEBACK)
        if self.outputs:
            self.params.append(_FORCE)

    def invoke(self, ctx: click.Context) -> Any:
        options = ctx.params
        traceback, force = options.pop("traceback"), options.pop("force", False)
        with checked_outputs(self.outputs, options, force) if self.outputs else nullcontext():
            try:
                return super().invoke(ctx)
            except (ValueError, LookupError, RuntimeError, OSError) as error:
                for line in format_exception(error.__cause__ or error) if traceback else ():
                    complain(line.removesuffix("\n"), who="")
                raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *SECTIONS)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, click.Option):
                sections[_section(option)].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_TRACEBACK = click.Option(
    ["--traceback"],
    is_flag=True,
    help="If the command fails, print the calls that led to the error, in all processes.",
)
_FORCE = click.Option(
    ["--force"], is_flag=True, help="Replace a file that rooftrace did not write."
)
SECTIONS: Mapping[str, Collection[str]] = {
    "Workload": {each.name for record in (Workload, LengthOptions) for each in options_of(record)},
    "Pricing": {
        "rules",
        *(o.name for record in (PrecisionOptions, ExecutionOptions) for o in options_of(record)),
    },
    "Output": ("force", "form", "formats", "style", "table", "align", "figures"),
    "Help": ("traceback",),
}
"""Sections of a command's help after its own options: the names of the options in each."""


def _section(option: click.Parameter) -> str:
    if isinstance(option.type, Output):
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
    *functions: str,
    run_rules: bool = True,
    defaults: Mapping[str, str] = MappingProxyType({}),
    **helps: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of public functions, and --rules where rules may matter.

    The command is called with `arguments`: those that the user typed, by name, as the functions
    take them.  run_rules: run the files of --rules first.  defaults, helps: the default and the
    help of an option that this command says otherwise, by name.
    """
    options: dict[str, Option] = {}
    for function in functions:
        for option in _options(function, defaults, helps):
            options.setdefault(option.name, option)

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            arguments = typed(click.get_current_context(), options)
            if run_rules:
                load_rules(arguments.pop("rules", ()))
            others = {name: value for name, value in values.items() if name not in options}
            return command(*args, arguments=arguments, **others)

        # click lists the options of a function from the last to the first.
        listed = vars(called).setdefault("__click_params__", [])
        listed += [made(each) for each in reversed(options.values())]
        return called

    return decorated


def _options(
    function: str, defaults: Mapping[str, str], helps: Mapping[str, str]
) -> Iterator[Option]:
    call = CALLS[function]
    usual = ",".join("efficient" if name == USUAL else name for name in call.usual)
    shown = {"execution": usual, **{name: f"({text})" for name, text in defaults.items()}}
    for each in call.options():
        help, default = helps.get(each.name, each.help), shown.get(each.name, each.shown)
        yield replace(each, help=help, shown=default)
    if call.has_rules:
        yield RULES


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


def timeline_option(help: str | bool = True) -> Callable[..., Any]:
    """--timeline: the steps of the result."""
    usual = "Write the predicted timeline of the steps there; it opens in ui.perfetto.dev."
    return click.option(
        "--timeline",
        type=Output(endings=(".json", ".json.gz")),
        metavar="FILE.json.gz",
        help=help if isinstance(help, str) else usual,
    )


def plot_option(help: str) -> Callable[..., Any]:
    """--plot: a figure of the result."""
    kind = Output(endings=[f".{form}" for form in FIGURES])
    return click.option("--plot", type=kind, metavar="FILE.png|svg|pdf", help=help)


style_option = click.option(
    "--style",
    type=click.Choice(["screen", "paper", "paper-column"]),
    default="screen",
    show_default=True,
    help="What figures are made for: paper is 7.2 in wide, paper-column 3.5 in, with type of 7 to "
    "9 points.",
)
