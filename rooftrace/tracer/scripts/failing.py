"""The error of a script that failed."""

from __future__ import annotations

import traceback

from rooftrace.tracer.launching import Ended
from rooftrace.tracer.scripts.records import Failure, Script
from rooftrace.tracer.source import TraceError

_INSTALLED = ("site-packages", "dist-packages")


class ScriptError(TraceError):
    """A script raised an error that it did not catch.

    `script` is what was recorded up to then, with the error (`script.failure`); the cause
    (`__cause__`) says its traceback.
    """

    def __init__(self, script: Script) -> None:
        turns = sum(stretch.turns for stretch in script.stretches)
        after = f"after {turns} recorded turns" if turns else "before anything ran on the device"
        failure = script.failure or Failure("SystemExit", str(script.code))
        thread = f", in thread {failure.thread}" if failure.thread else ""
        place = f", at {failure.where}" if failure.where else ""
        refused = f"; {script.said['refused']}" if "refused" in script.said else ""
        super().__init__(f"{script.name} failed {after}{thread}{place}: {failure}{refused}")
        self.script = script
        self.__cause__ = RuntimeError(f"in the process of the script:\n{failure.traceback}")


def failure_of(ended: Ended) -> Failure | None:
    """The error that ended a program; None where none did."""
    error = ended.exception
    if error is None:
        return None
    return Failure(
        error=type(error).__name__,
        text=str(error),
        where=_place(error),
        thread=ended.thread,
        traceback="".join(traceback.format_exception(error)),
    )


def _place(error: BaseException) -> str:
    """The innermost line of a file that is no installed library's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _INSTALLED)
        and not frame.filename.startswith("<")
        and "rooftrace/" not in frame.filename.replace("\\", "/")
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
