"""Options of commands, made of the arguments that our functions take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import click
from click.core import ParameterSource

from rooftrace.reporting.requests.calls import CALLS, USUAL, TakenArguments
from rooftrace.reporting.requests.options import Option

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
