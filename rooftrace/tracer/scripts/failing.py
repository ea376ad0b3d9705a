"""The error of a script that failed."""

from __future__ import annotations

from traceback import extract_tb

from rooftrace.tracer.scripts.records import Script
from rooftrace.tracer.source import TraceError

_INSTALLED = ("site-packages", "dist-packages")


class ScriptError(TraceError):
    """A script raised an error that it did not catch.

    `script` is what was recorded up to then; the error itself is the cause (`__cause__`).
    """

    def __init__(self, script: Script, error: BaseException) -> None:
        turns = sum(stretch.turns for stretch in script.stretches)
        after = f"after {turns} recorded turns" if turns else "before anything ran on the device"
        super().__init__(
            f"{script.name} failed {after}{_place(error)}: {type(error).__name__}: {error}"
            + (f"; {script.said['refused']}" if "refused" in script.said else "")
        )
        self.script = script


def _place(error: BaseException) -> str:
    """The innermost line of a file that is no installed library's."""
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _INSTALLED)
        and not frame.filename.startswith("<")
        and "rooftrace/" not in frame.filename.replace("\\", "/")
    ]
    return f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
