"""The errors for users of rooftrace, and their wording; no layer is below this.

Each is also the builtin that a caller would catch.  A message quotes the value that was passed, and
has the expected one and the next thing to do.
"""

from __future__ import annotations

import contextlib
import difflib
import linecache
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType


class Worded:
    """An error whose message is for the user: a notebook shows it under the user's own calls.

    The other calls, of rooftrace and below it, are in `__traceback__` all the same.
    """

    __traceback__: TracebackType | None

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows in place of a traceback."""
        calls = list[str]()
        for frame, line in traceback.walk_tb(self.__traceback__):
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package == "rooftrace":
                break
            if package not in ("IPython", "ipykernel"):
                text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
                calls.append(f"line {line} in {frame.f_code.co_name}: {text}")
        return [*calls, f"{type(self).__name__}: {self}"]


class RequestError(ValueError, Worded):
    """A request that makes no sense for this module: quotes it, and says what to do."""


class UnusedError(RequestError):
    """An argument that would change nothing: its name, its value as shown, and the reason."""

    def __init__(self, name: str, shown: str, reason: str) -> None:
        super().__init__(f"{name}={shown}: {reason}")
        self.name, self.shown, self.reason = name, shown, reason


class TargetError(ValueError, Worded):
    """A target that cannot be found or built: quotes it and the expected form."""


class TraceError(RuntimeError, Worded):
    """The module could not be traced: names the module, the user's line and what to try."""


class ProfileError(ValueError, Worded):
    """A file of measurements that cannot be read, or that does not fit the request.

    The message names the file, the error, and what to do.
    """


SLIP = 0.8
"""How similar (0 to 1) a name must be to another one to count as a misspelling of it."""


def near(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The nearest of these names to another one; "" where none is near."""
    others = [other for other in names if other != name]
    return next(iter(difflib.get_close_matches(name, others, n=1, cutoff=cutoff)), "")


def hint(name: str, names: Collection[str] | Mapping[str, str]) -> str:
    """The end of a message about a name that is not among `names`: "; did you mean 'batch'?".

    names: a mapping has other spellings of the names that it shows.
    """
    close = near(name, names)
    shown = names[close] if close and isinstance(names, Mapping) else close
    return f"; did you mean {shown!r}?" if close else ""


def one_of(name: object, names: Iterable[str], count: str = "one") -> str:
    """The end of a message: "expected one of batch, seq; did you mean 'seq'?"."""
    every = tuple(names)
    return f"expected {count} of {', '.join(every)}{hint(str(name), every)}"


def is_ours(error: BaseException) -> bool:
    """Whether the message of an error is meant for the user of rooftrace."""
    return type(error).__module__.startswith("rooftrace.")


def worded(error: BaseException) -> str:
    """The message of an error of any code, with the name of its class unless the error is ours."""
    text = str(error)
    if type(error) is ValueError or is_ours(error):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of the source before errors of rooftrace that are raised inside."""
    try:
        yield
    except (ValueError, LookupError, RuntimeError) as error:
        text = str(error)
        if f"{name}: " not in text and repr(name) not in text and is_ours(error):
            error.args = (f"{name}: {text}",)
        raise
