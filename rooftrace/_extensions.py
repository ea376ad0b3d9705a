"""What users and third-party packages add: who defined a function, and what entry points name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def owner(function: Callable[..., Any]) -> str:
    """Where a function is defined: "mylib.rules.rope:12"."""
    code = getattr(function, "__code__", None)
    where = f":{code.co_firstlineno}" if code else ""
    return f"{function.__module__}.{function.__qualname__}{where}"


def same_definition(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """Whether two functions are one, defined twice (a file or a notebook cell that ran again)."""
    names = [(f.__module__, getattr(f, "__qualname__", "")) for f in (old, new)]
    return names[0] == names[1] and "<lambda>" not in names[0][1]
