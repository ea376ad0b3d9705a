"""Outputs of a command: paths checked before it begins, and a stdout that reports failed writes."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import format_exception
from typing import Any

import click

from rooftrace._escapes import visible
from rooftrace._formats import TEXTS
from rooftrace._outputs import OutputError, check_output, outputs_of_command
from rooftrace.errors import RequestError

# -- outputs ---------------------------------------------------------------------------------------
# Outputs of a command: all are checked here before it begins, and --force lets them replace.


class Output(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """The path of what a command writes; "-" is stdout.

    folder: it may be one; its files are checked where they are known.  early: False for what the
    command checks by itself: a folder, or a file that it reads, too.  table: it may be a CSV.
    usual: the command has a file of its own where none is named.
    forms: formats that the command has, where the ending of the path says which.
    """

    name = "FILE"

    def __init__(
        self,
        folder: bool = False,
        early: bool = True,
        table: bool = False,
        usual: bool = False,
        forms: Sequence[str] = (),
    ) -> None:
        self.folder, self.early, self.forms = folder, early, forms
        self.table, self.usual = table or "csv" in forms, usual

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


def form_by_ending(path: str) -> str:
    """The format of a result in a file of this name."""
    ending = Path(path).suffix[1:]
    return ending if ending in TEXTS else "md"


def check_outputs(command: click.Command) -> None:
    """Give a command that writes, and those of a group, the check of outputs and --force."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            check_outputs(inner)
    outputs = {p.name or "": p.type for p in command.params if isinstance(p.type, Output)}
    work = command.callback
    if work is None or not outputs:
        return

    @functools.wraps(work)
    def checked(*arguments: Any, force: bool, **options: Any) -> Any:
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
            return work(*arguments, **options)

    command.callback = checked
    command.params.append(
        click.Option(["--force"], is_flag=True, help="Replace a file that rooftrace did not write.")
    )


def _check(outputs: Mapping[str, Output], options: Mapping[str, Any]) -> None:
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
            raise OutputError(f"{path!r}: two outputs of this command have this name")
        seen.add(os.path.realpath(path))


def _named(values: Iterable[Any]) -> Iterator[str]:
    """What values of options may name: texts, and their parts, as in models.py:build or x=FILE."""
    for value in values:
        if isinstance(value, str):
            yield from (value, *re.split(r"[=:,\s]+", value))
        elif isinstance(value, (list, tuple, set)):
            yield from _named(value)
        elif isinstance(value, Mapping):
            yield from _named(value.values())


# -- output ----------------------------------------------------------------------------------------
# stdout of the command line: what cannot be written there ends in an error, not in success.


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
    """Print lines of text; what a name in them holds is visible."""
    click.echo(visible(text, lines=True))


def offer_traceback(command: click.Command) -> None:
    """Give a command, if it is no group of others, the option --traceback."""
    work = command.callback
    if work is None or isinstance(command, click.Group):
        return

    @functools.wraps(work)
    def told(*arguments: Any, **options: Any) -> Any:
        try:
            return work(*arguments, **options)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            if click.get_current_context().meta[_TRACEBACK]:
                for line in format_exception(error.__cause__ or error):
                    complain(line.removesuffix("\n"), who="")
            raise

    command.callback = told
    command.params.append(
        click.Option(
            ["--traceback"],
            is_flag=True,
            expose_value=False,
            callback=lambda context, _, asked: context.meta.update({_TRACEBACK: asked}),
            help="Where it fails, print all calls that led to the error, also in its processes.",
        )
    )


_TRACEBACK = f"{__name__}.traceback"
_LONGEST = 4000
"""Letters of a message."""


def complain(text: str, who: str = "rooftrace: ") -> None:
    """Write one message to stderr, if there is a stderr; of a very long one, both ends."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{who}{visible(text, lines=True)}\n")
        sys.stderr.flush()
