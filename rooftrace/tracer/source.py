"""Where in the user's code something happened: source lines of ops and shortened tracebacks."""

from __future__ import annotations

import dis
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from rooftrace.tracer.conditions import answer_that_goes_on, comes_back, number_that_goes_on

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = str(Path(__file__).resolve().parents[1]) + os.sep
_HAND_ON = tuple(
    _TORCH + os.path.join(*place)
    for place in (
        ("utils", "_device.py"),
        ("utils", "_python_dispatch.py"),
        ("utils", "_stats.py"),
        ("_dynamo", ""),
        ("_compile.py",),
        ("_ops.py",),
        ("_tensor.py",),
        ("overrides.py",),
    )
)
_BOUNDARIES = frozenset({"_call", "run_backward"})
"""Our functions that call the user's code: the frames that called them are no origin of an op."""

_PLUMBING = tuple(
    os.sep + os.path.join(*place)
    for place in (
        ("contextlib.py",),
        ("threading.py",),
        ("concurrent", "futures", "thread.py"),
        ("concurrent", "futures", "_base.py"),
        ("asyncio", "threads.py"),
        ("asyncio", "base_events.py"),
        ("asyncio", "events.py"),
        ("asyncio", "runners.py"),
    )
)
"""Files of the standard library that call functions passed to them."""

_NOT = dis.opmap["UNARY_NOT"]
_WITHOUT_LINES = frozenset(dis.opmap[name] for name in ("TO_BOOL", "CACHE") if name in dis.opmap)
"""Instructions that newer versions of Python put before `not`: a conversion to bool, caches."""

_INNER, _OURS, _USERS = range(3)
_KINDS: dict[CodeType, int] = {}
_LINES: dict[tuple[CodeType, int], str] = {}


def source_line(depth: int) -> str:
    """ "file.py:12" of the innermost frame, `depth` up or more, that is neither torch's nor ours.

    "" where there is none.  The path is relative to the root that `shown_below` was told, or to the
    import path that holds the file.
    """
    frame: Any = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        kind = _KINDS.get(code)
        if kind is None:
            kind = _KINDS[code] = _kind(code.co_filename)
        if kind == _USERS:
            key = (code, frame.f_lasti)
            line = _LINES.get(key)
            if line is None:
                line = _LINES[key] = f"{relative(code.co_filename)}:{frame.f_lineno}"
            return line
        if kind == _OURS and code.co_name in _BOUNDARIES:
            return ""
        frame = frame.f_back
    return ""


def is_users(code: CodeType) -> bool:
    """Whether a code object is neither torch's nor ours, nor Python's logging."""
    return _kind(code.co_filename) == _USERS and f"{os.sep}logging{os.sep}" not in code.co_filename


def users_line(places: Sequence[tuple[str, int]]) -> str:
    """ "file.py:12" of the innermost of these files and lines that is neither torch's nor ours.

    places: outermost first.  "" where there is none; paths are shown as `source_line` shows them.
    """
    for filename, line in reversed(places):
        if _kind(filename) == _USERS:
            return f"{relative(filename)}:{line}"
    return ""


def deciding_line(depth: int) -> str:
    """ "file.py:12" of the innermost frame that asks for a value: a user's, or a check of torch's.

    Frames `depth` up or more; ours and those that only hand a call on are left out.
    """
    return _line_of(_deciding_frame(depth + 1))


def needed_answer(depth: int) -> bool | None:
    """The answer to a condition with which the frame of `deciding_line` goes on, where the other
    one leads straight to an error or an exit; None where it does not, or where both do."""
    return answer_that_goes_on(_deciding_frame(depth + 1))


def needed_number(depth: int, usual: float, whole: bool) -> float | None:
    """The number with which the frame of `deciding_line` goes on, where it fails with the usual
    one; None where it does not."""
    return number_that_goes_on(_deciding_frame(depth + 1), usual, whole)


def goes_on_either_way(depth: int) -> bool:
    """Whether the loop in which the frame of `deciding_line` asks goes on with either answer."""
    return comes_back(_deciding_frame(depth + 1))


def _deciding_frame(depth: int) -> FrameType | None:
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((_HERE, "<", *_HAND_ON)):
            break
        frame = frame.f_back
    return frame


def _users_frame(depth: int) -> FrameType | None:
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and _kind(frame.f_code.co_filename) != _USERS:
        frame = frame.f_back
    return frame


def asking_line(depth: int) -> str:
    """ "/path/to/file.py:12" of the innermost frame, `depth` up or more, that is the user's."""
    return _line_of(_users_frame(depth + 1))


def _line_of(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def asked_under_not(depth: int) -> bool:
    """Whether the user's innermost frame, `depth` up or more, applies `not` to the answer."""
    frame = _users_frame(depth + 1)
    if frame is None:
        return False
    code, place = frame.f_code.co_code, frame.f_lasti
    steps = (i for i in range(place, len(code), 2) if code[i] not in _WITHOUT_LINES)
    return bool(code[next(steps, place)] == _NOT)


def whose(filename: str) -> str:
    """ "rooftrace" or "torch", for a file of theirs; else ""."""
    if filename.startswith(_HERE):
        return "rooftrace"
    return "torch" if filename.startswith(_TORCH) else ""


def _kind(filename: str) -> int:
    if filename.startswith(_HERE):
        return _OURS
    inner = filename.startswith((_TORCH, "<")) or filename.endswith(_PLUMBING)
    return _INNER if inner else _USERS


_ROOT = [""]


def shown_below(root: str) -> None:
    """Show source paths of this process relative to a root, where it holds them; "" for none."""
    _ROOT[0] = os.path.join(root, "") if root else ""
    _LINES.clear()


def relative(path: str) -> str:
    """A source path relative to the root, or the longest import path (or folder) that holds it."""
    if _ROOT[0] and os.path.realpath(path).startswith(_ROOT[0]):
        return os.path.realpath(path)[len(_ROOT[0]) :]
    best = ""
    for root in (*sys.path, os.getcwd()):
        if not root:
            continue
        prefix = os.path.abspath(root) + os.sep
        if path.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return path[len(best) :] if best else os.path.basename(path)


def relative_line(line: str) -> str:
    """A line "/path/to/file.py:12" with its path as `relative` shows it."""
    path, colon, number = line.rpartition(":")
    return f"{relative(path)}{colon}{number}" if path else line


def users_traceback(error: BaseException, frames: int = 4) -> str:
    """The last `frames` lines of a traceback that are neither torch's nor ours, with their code.

    "" where the error was raised without passing through anybody else's code.
    """
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _kind(frame.filename) == _USERS and "importlib" not in frame.filename
    ]
    if isinstance(error, SyntaxError) and error.filename:
        users.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>"))
    return "\n".join(
        f"  {relative(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in users[-frames:]
    )
