"""What runs because a package is missing, as the library says that falls back.

Libraries that have kernels in packages of their own run a slower form without them, and log a
warning.  Warnings of the traced code that say so are quoted as assumptions, whose value says where
the function stands that runs instead (`lower.with_fallbacks` looks which ops it called).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.source import lines
from rooftrace.tracer.values import Values

_SAYS_SO = re.compile(r"\bfall(s|ing)?[ -]back\b", re.IGNORECASE)
_WARNINGS = ("warning", "warning_once")
"""How libraries warn: the second is added to loggers by transformers, and warns once a process."""


@contextlib.contextmanager
def fallbacks_noted(values: Values) -> Iterator[None]:
    """Inside, a warning by which the code says that it falls back is an assumption, too."""
    there = [name for name in _WARNINGS if hasattr(logging.Logger, name)]
    said: set[str] = set()  # one way to warn calls another
    with replaced(logging.Logger, {name: _noting(values, name, said) for name in there}):
        yield


def _noting(values: Values, name: str, said: set[str]) -> Callable[..., Any]:
    def warn(logger: logging.Logger, message: Any, *args: Any, **kwargs: Any) -> Any:
        text = str(message)
        if _SAYS_SO.search(text) and text not in said:
            said.add(text)
            values.assume(asked.FALLBACK, " ".join(text.split()), _instead(), where="")
        return original_of(logging.Logger, name)(logger, message, *args, **kwargs)

    return warn


def _instead() -> str:
    """ "file.py:12-40" of what runs instead: a function that the warning code holds, or its class.

    "" where neither is there.
    """
    frame: Any = sys._getframe(2)
    while frame is not None and not lines.is_users(frame.f_code):
        frame = frame.f_back
    names = {} if frame is None else frame.f_locals
    held = [inspect.unwrap(value) for value in names.values() if inspect.isfunction(value)]
    owner = names.get("self")
    held += [type(owner)] if isinstance(owner, nn.Module) else []
    for item in held:
        with contextlib.suppress(OSError, TypeError):
            code, first = inspect.getsourcelines(item)
            file = lines.relative(inspect.getsourcefile(item) or "")
            return f"{file}:{first}-{first + len(code) - 1}"
    return ""
