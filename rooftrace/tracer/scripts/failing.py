"""The error of a script that failed, and the way to it: through the script, and what it calls."""

from __future__ import annotations

import itertools
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence

from rooftrace.errors import is_ours
from rooftrace.hardware.units import plural
from rooftrace.tracer.launching import Ended
from rooftrace.tracer.scripts.records import OURS, FailedCall, Failure, Script
from rooftrace.tracer.source import TraceError, lines

_INSTALLED = ("site-packages", "dist-packages")
_STDLIB = sysconfig.get_path("stdlib")
_MOST = 8
"""Lines of a way that are shown: the first ones, and the last."""
_WIDEST = 120
"""Letters of a line of code that are shown."""
_FAULT = (
    "It was raised in or below what stands for the device here.  If the script runs on a real one, "
    "this is a fault of rooftrace, or something that it does not do: please report it, with what "
    "--traceback prints."
)


class ScriptError(TraceError):
    """A script raised an error that it did not catch.

    `script` is what was recorded up to then, with the error (`script.failure`); the cause
    (`__cause__`) says its traceback.  The first line of the message says where and what; the next
    ones the way there, and how what was chosen of unknown values is chosen otherwise.
    """

    def __init__(self, script: Script) -> None:
        turns = sum(stretch.turns for stretch in script.stretches)
        after = f"after {plural(turns, 'turn')}" if turns else "before the end of a turn"
        rank = f", in rank {script.rank} of {script.world}" if script.world > 1 else ""
        failure = script.failure or Failure("SystemExit", str(script.code))
        thread = f", in thread {failure.thread}" if failure.thread else ""
        place = f", at {failure.where}" if failure.where else ""
        refused = f"; {script.said['refused']}" if "refused" in script.said else ""
        first = f"{script.name} failed {after}{rank}{thread}{place}: {failure}{refused}"
        fault = [_FAULT] if failure.below_device else []
        super().__init__("\n".join((first, *_way(failure), *failure.choices, *fault)))
        self.script = script
        self.__cause__ = RuntimeError(f"in the process of the script:\n{failure.traceback}")


def failure_of(ended: Ended, choices: Sequence[str] = ()) -> Failure | None:
    """The error that ended a program; None where none did.

    choices: what was chosen of unknown values before it, and how it is chosen otherwise.
    """
    error = ended.exception
    if error is None:
        return None
    frames = _frames(error)
    own = [frame for frame in frames if frame.whose == "script"] or [
        frame for frame in frames if frame.whose == "library"
    ]
    text = str(error)
    if not text and isinstance(error, AssertionError) and frames:
        text = frames[-1].code
    return Failure(
        error=type(error).__name__,
        text=text,
        where=f"{own[-1].file}:{own[-1].line}" if own else "",
        thread=ended.thread,
        traceback="".join(traceback.format_exception(error)),
        frames=frames,
        causes=tuple(map(_cause, itertools.islice(_causes(error), 3))),
        choices=tuple(choices),
        below_device=_is_below_device(error, frames),
    )


def _is_below_device(error: BaseException, frames: Sequence[FailedCall]) -> bool:
    """Whether an error was raised in or below what stands for the device, and seldom is the user's:
    sizes that do not fit, and missing modules, are errors on a real one, too."""
    callees = itertools.takewhile(lambda frame: frame.whose not in _USERS, reversed(frames))
    if is_ours(error) or not any(frame.whose == OURS for frame in callees):
        return False
    usual = isinstance(error, ImportError | IndexError | RuntimeError | ValueError)
    return not usual or isinstance(error, NotImplementedError) or "meta" in str(error).lower()


_USERS = ("script", "library")


def _frames(error: BaseException) -> tuple[FailedCall, ...]:
    """The calls that led to an error, outermost first."""
    calls = list(traceback.extract_tb(error.__traceback__))
    if isinstance(error, SyntaxError) and error.filename:
        calls.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>"))
    frames = (
        FailedCall(
            call.filename, call.lineno or 0, call.name, call.line or "", _whose(call.filename)
        )
        for call in calls
    )
    passes = isinstance(error, ModuleNotFoundError)  # an import leads through code of ours
    return tuple(frame for frame in frames if not passes or frame.whose != OURS)


def _whose(file: str) -> str:
    """Whose code a file is: rooftrace, torch, library (installed), python or script."""
    known = lines.whose(file)
    if known or any(part in file for part in _INSTALLED):
        return known or "library"
    return "python" if file.startswith(("<", _STDLIB)) else "script"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors from which an error came, or while handling which it did."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return
        seen.add(id(before))
        yield before
        error = before


def _cause(error: BaseException) -> str:
    frames = _frames(error)
    text = "".join(traceback.format_exception_only(error)).strip().partition("\n")[0]
    return f"which came from {text}" + (f", at{_line(frames[-1])[1:]}" if frames else "")


def _way(failure: Failure) -> list[str]:
    """Lines for the calls from the script's innermost one on; neighbours that are in torch, Python
    or here are one line, but for the last call."""
    own = [at for at, frame in enumerate(failure.frames) if frame.whose == "script"]
    way: list[str] = []
    calls = failure.frames[own[-1] if own else 0 :]
    for of_users, group in itertools.groupby(calls, lambda frame: frame.whose in _USERS):
        shown = list(group)
        if not of_users:
            last = shown.pop() if shown[-1] is calls[-1] else None
            counts = Counter(frame.whose for frame in shown)
            left_out = ", ".join(f"{plural(n, 'call')} in {whose}" for whose, n in counts.items())
            way += [f"  ... {left_out}"] if left_out else []
            shown = [last] if last else []
        way += map(_line, shown)
    if len(way) > _MOST:
        half = _MOST // 2
        way[half : 1 - half] = [f"  ... {plural(len(way) - 2 * half + 1, 'line')} more"]
    return way + [f"  {cause}" for cause in failure.causes]


def _line(frame: FailedCall) -> str:
    code = f": {frame.code[:_WIDEST]}" if frame.code else ""
    return f"  {lines.relative(frame.file)}:{frame.line} in {frame.function}{code}"
