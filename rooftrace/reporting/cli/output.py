"""stdout of the command line: what cannot be written there ends in an error, not in success."""

from __future__ import annotations

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator
from traceback import format_exception
from typing import Any

import click

from rooftrace._escapes import visible


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
