"""Outputs of a command: paths checked before it begins, and a stdout that reports failed writes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rooftrace._escapes import visible
from rooftrace._formats import TEXTS
from rooftrace._outputs import OutputError, check_output, outputs_of_command
from rooftrace.errors import RequestError

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
            raise OutputError(f"{path!r}: two outputs of this command have this name")
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
