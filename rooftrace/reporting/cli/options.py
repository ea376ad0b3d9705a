"""Options and outputs of commands: shared declarations, checked paths, a stdout that can fail."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from rooftrace import _extensions
from rooftrace._escapes import visible
from rooftrace._formats import FIGURES, TEXTS
from rooftrace._outputs import check_output, outputs_of_command
from rooftrace.errors import RequestError, hint
from rooftrace.reporting.commands.calls import CALLS, USUAL
from rooftrace.reporting.commands.options import Option, options_of, words
from rooftrace.reporting.commands.pricing import (
    ExecutionOptions,
    LengthOptions,
    PrecisionOptions,
    Workload,
)
from rooftrace.tracer import names

Called = TypeVar("Called", bound=Callable[..., Any])
"""What a decorator gets and returns."""

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


class Choice(click.Choice):  # type: ignore[type-arg]
    """One of some words; the message about another one has the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            close = hint(str(value), tuple(map(str, self.choices))) or "."
            raise click.BadParameter(error.message.rstrip(".") + close, ctx, param) from None


def click_option(option: Option) -> click.Option:
    """The option of click."""
    how: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if option.required:
        how["required"] = True
    if option.kind is bool:
        how |= {"is_flag": True, "default": "/" in option.flag}
    elif option.words:
        how["type"] = Choice(option.words)
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


def load_rules(paths: Iterable[str]) -> None:
    """Run the files of --rules: their functions register themselves.

    Raises RequestError for a file that fails.
    """
    import runpy

    for path in paths:
        if not Path(path).is_file():
            raise click.UsageError(f"--rules {path!r}: there is no such file")
        try:
            _extensions.RUN.append(path)
            runpy.run_path(path)
        except (Exception, SystemExit) as error:
            lines = [frame for frame in extract_tb(error.__traceback__) if frame.filename == path]
            line = getattr(error, "lineno", None) or (lines[-1].lineno if lines else None)
            where = path if line is None else f"{path}:{line}"
            raise RequestError(f"--rules {where}: {type(error).__name__}: {error}") from error


# -- options ---------------------------------------------------------------------------------------
# Options of several commands: the target, and the files of the result.

TARGET_HELP = f"""TARGET is package.module:attr or path/file.py:attr (a module, or a function
returning a module, (module, inputs) or (module, args, kwargs)), the path of a Hugging Face
config.json, hf:ORG/NAME, a saved graph, an exported program (.pt2, .onnx), a script with its
arguments in one word ("train.py --batch_size=12", or run:COMMAND), or the name of a config that
comes along:
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
        type=Choice(["screen", "paper", "paper-column"]),
        default="screen",
        show_default=True,
        help="Size of figures: paper is 7.2 in wide, paper-column 3.5 in, with type of 7 to 9 "
        "points.",
    )


def names_option() -> Callable[[Called], Called]:
    """--names: what tables and figures call each TARGET."""
    told = "A name for each TARGET, in tables and figures."
    return click.option("--names", type=words, metavar="A,B", help=told)


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
    kind = Choice(["terminal", *forms])
    return click.Option(["--format", "form"], type=kind, help=help or usual, **how)


# -- Outputs of a command: paths checked before it begins, and a stdout that reports failed writes -

# -- outputs ---------------------------------------------------------------------------------------
# Outputs of a command: all are checked here before it begins, and --force lets them replace.


class OutputPath(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """The path of a file that a command writes; "-" is stdout.

    folder: a folder may stand there; its files are checked when their names are known.  early:
    False where the command checks the path itself: a folder, or a file that it also reads.  table:
    the file may be a CSV.  usual: the command has a default file.  forms: formats of the command,
    chosen by the ending of the path.  endings: the only endings that the file may have.
    """

    name = "FILE"

    def __init__(
        self,
        folder: bool = False,
        early: bool = True,
        table: bool = False,
        usual: bool = False,
        forms: Sequence[str] = (),
        endings: Sequence[str] = (),
    ) -> None:
        self.folder, self.early, self.forms, self.endings = folder, early, forms, endings
        self.table, self.usual = table or "csv" in forms, usual

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        if self.endings and not path.lower().endswith(tuple(self.endings)):
            option = param.opts[0] if param is not None else ""
            *others, last = self.endings
            raise RequestError(
                f"{option} {path}: expected a file that ends in {', '.join(others)} or {last}"
            )
        return path


def form_by_ending(path: str) -> str:
    """The format of a result in a file of this name."""
    ending = Path(path).suffix[1:]
    return ending if ending in TEXTS else "md"


@contextlib.contextmanager
def checked_outputs(
    outputs: Mapping[str, OutputPath], options: Mapping[str, Any], force: bool
) -> Iterator[None]:
    """Check the outputs of a command before its work; hold later ones against its other words.

    outputs: the types of options that name outputs.  force: replace any plain file.
    """
    written = [
        name
        for name, kind in outputs.items()
        if options[name] != "-" and (options[name] is not None or kind.usual)
    ]
    if force and not written:
        raise RequestError("--force: nothing is written that it could replace; leave it out")
    others = [value for name, value in options.items() if name not in outputs]
    with outputs_of_command(_named(others), force):
        _check(outputs, options)
        yield


def _check(outputs: Mapping[str, OutputPath], options: Mapping[str, Any]) -> None:
    seen: set[str] = set()
    for name, kind in outputs.items():
        path = options[name]
        if path in (None, "", "-") or not kind.early or (kind.folder and os.path.isdir(path)):
            continue
        form = options.get("form") or form_by_ending(path)
        if kind.forms and form not in kind.forms:
            raise RequestError(f"--out {path}: expected a file of {', '.join(kind.forms[1:])}")
        check_output(Path(path), table=kind.table)
        if os.path.realpath(path) in seen:
            raise RequestError(f"{path!r}: two outputs of this command have this name")
        seen.add(os.path.realpath(path))


def _named(values: Iterable[Any]) -> Iterator[str]:
    """Texts of option values, and their parts that may name files (models.py:build, x=FILE)."""
    for value in values:
        if isinstance(value, str):
            yield from (value, *re.split(r"[=:,\s]+", value))
        elif isinstance(value, (list, tuple, set)):
            yield from _named(value)
        elif isinstance(value, Mapping):
            yield from _named(value.values())


# -- output ----------------------------------------------------------------------------------------
# stdout of the command line: a failed write ends in an error, not in success.


class StdoutError(BaseException):
    """stdout takes no more; not an Exception, so that no code of a target catches it."""

    @property
    def quiet(self) -> bool:
        """Whether its reader has closed it, as `| head` does: then nobody wants a message."""
        cause = self.__cause__
        return isinstance(cause, OSError) and cause.errno == errno.EPIPE


class _Checked:
    """Stands in for a stream: a write that fails raises StdoutError."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> _Checked:
        return _Checked(self._stream.buffer)

    def write(self, content: Any) -> int:
        try:
            with _failing():
                return int(self._stream.write(content))
        except UnicodeEncodeError:  # a lone surrogate, or a letter that the terminal does not have
            coding = self._stream.encoding or "utf-8"
            plain = content.encode(coding, "backslashreplace").decode(coding)
            with _failing():
                return int(self._stream.write(plain))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with _failing():
            self._stream.flush()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
        raise StdoutError(getattr(error, "strerror", None) or str(error)) from error


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """Raises StdoutError where stdout is closed, before any work, or takes no more."""
    if sys.stdout is None:
        raise StdoutError("it is closed")
    stand_in: Any = _Checked(sys.stdout)
    with contextlib.redirect_stdout(stand_in):
        try:
            yield
        finally:
            stand_in.flush()


def say(text: str) -> None:
    """Print lines of text with control characters made visible."""
    click.echo(visible(text, lines=True))


_LONGEST = 4000
"""Letters of a message."""


def complain(text: str, who: str = "rooftrace: ") -> None:
    """Write one message to stderr, if there is a stderr; of a very long one, both ends."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{who}{visible(text, lines=True)}\n")
        sys.stderr.flush()
