"""A unit of work of a fleet: a function, its arguments, and a key that is equal for equal work."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from rooftrace.errors import RequestError

Rows = Any
"""What the function of a task returns: a list of plain dicts, or a frame of pandas."""


class FleetError(RuntimeError):
    """A fleet that could not go on: says what went away, what is kept, and what to do."""


@dataclass(frozen=True)
class Task:
    """A unit of work: `function(**arguments)` returns rows, as a list of dicts or a pandas frame.

    title: a few words for people.  key: names the file of its rows; made of the function's name and
    the arguments, so equal work has an equal key in every process.  It knows no code: where that
    changes, a revision among the arguments, or another folder, makes the work a new one.  Arguments
    are plain values, paths, enums, dataclasses, functions by their name, and what holds these; for
    others, and for a lambda or a function inside a function, name a key.

    Raises RequestError for a key that cannot name a file, or where none can be made.
    """

    title: str
    function: Callable[..., Rows]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError(
                f"task {self.title!r}: function={self.function!r:.60}: expected a function"
            )
        if not self.key:
            object.__setattr__(self, "key", _key(self))
        elif not names_a_file(self.key):
            raise RequestError(
                f"task {self.title!r}: key={self.key!r:.120}: expected 1 to 100 letters, digits, "
                '"-", "_" or ".", the first of them a letter or a digit'
            )


_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def names_a_file(key: Any) -> bool:
    """Whether a key can be the name of a file in a folder, on every system."""
    return isinstance(key, str) and _KEY.fullmatch(key) is not None


def _key(task: Task) -> str:
    """20 hexadecimal digits of the SHA-256 of what a task does."""
    try:
        contents = [_written(task.function), _written(dict(task.arguments))]
    except _NoText as problem:
        raise RequestError(
            f"task {task.title!r}: {problem}, so there is no key: name one with key="
        ) from None
    text = json.dumps(contents, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


class _NoText(Exception):
    """A value that has no text which is the same in every process."""


def _written(value: Any) -> Any:
    """A value as lists and texts: two values that differ give two that differ."""
    if isinstance(value, Enum):
        return ["enum", _name(type(value)), value.name]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return ["int", str(int(value))]
    if isinstance(value, float):
        return ["float", repr(float(value))]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, PurePath):
        return ["path", value.as_posix()]
    if is_dataclass(value) and not isinstance(value, type):
        inside = {each.name: getattr(value, each.name) for each in fields(value)}
        return ["record", _name(type(value)), _written(inside)]
    if isinstance(value, Mapping):
        return ["dict", _sorted([[_written(key), _written(item)] for key, item in value.items()])]
    if isinstance(value, set | frozenset):
        return ["set", _sorted([_written(item) for item in value])]
    if isinstance(value, Sequence):
        return ["list", [_written(item) for item in value]]
    if isinstance(value, functools.partial):
        return ["partial", *map(_written, (value.func, value.args, value.keywords))]
    if callable(value):
        return ["function", _name(value)]
    raise _NoText(f"{value!r:.60} ({type(value).__name__}) is no plain value")


def _sorted(items: list[Any]) -> list[Any]:
    return sorted(items, key=json.dumps)


def _name(named: Any) -> str:
    """Where a function or class is defined.  Raises _NoText where others may have that name."""
    name = getattr(named, "__qualname__", "<")
    of_object = inspect.ismethod(named) and not isinstance(named.__self__, type)
    if "<" in name or of_object:
        raise _NoText(f"{named!r:.60} is no function or class at the top of a module")
    return f"{named.__module__}.{name}"
