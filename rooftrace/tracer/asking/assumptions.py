"""Assumptions that a user can decide: their kinds, what each takes, and where it counts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.asking.routings import (
    POLICIES,
    SAID as SAID,
    Policy as Policy,
    policy_of as policy_of,
    said_of_routing as said_of_routing,
)
from rooftrace.tracer.paths import pattern_of

ROUTING = "routing"
FALLBACK = "fallback"
"""Kind of those that say what code runs in place of a package's kernel: nobody decides them."""
ALIASES: Mapping[str, str] = {"balanced-routing": ROUTING}
"""Other names of kinds, as they were called before."""
ASSUMABLE: Mapping[str, str] = {
    "branch": "True or False, for an unknown condition",
    "density": "a share from 0 to 1, of an unknown mask that is true",
    "value": "a number, for an unknown one",
    ROUTING: f"{', '.join(POLICIES)}, for choices by unknown scores",
}
"""The kinds of assumption that a user can decide, and what each takes."""

_LINE = re.compile(r"@.+:\d+$")
"""What ends a key that is for a line."""
_WORDS = {"true": True, "false": False}


def check_assumption(key: str, value: Any) -> None:
    """Raise RequestError for an unknown kind, or for a value that the kind does not take."""
    kind, at, module = key.partition("@")
    kind = ALIASES.get(kind, kind)
    if kind not in ASSUMABLE or (at and not module):
        raise RequestError(
            f"assumption {key!r:.60}: expected KIND, KIND@MODULE or KIND@FILE:LINE, for example "
            f"'branch@model.layers.*.mlp'; kinds are {', '.join(ASSUMABLE)}"
        )
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "branch": isinstance(value, bool),
        "density": number and 0 <= value <= 1,
        "value": number and math.isfinite(value),
        ROUTING: True,
    }
    if kind == ROUTING:
        try:
            policy_of(value)
        except RequestError as problem:
            raise RequestError(f"assumption {key}={value!s:.60}: {problem}") from None
    if not fits[kind]:
        raise RequestError(f"assumption {key}={value!s:.60}: expected {ASSUMABLE[kind]}")


def parse_assumption(text: str) -> tuple[str, Any]:
    """The key and value of "KIND[@MODULE]=VALUE".  Raises RequestError."""
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not equals or not written:
        raise RequestError(
            f"assumption {text!r:.60}: expected KIND[@MODULE]=VALUE, for example density=0.1; "
            f"kinds are {', '.join(ASSUMABLE)}"
        )
    value: Any = _WORDS.get(written.lower(), written)
    for number in (float, int):  # int last: 3 is both
        try:
            value = number(written)
        except ValueError:
            continue
    check_assumption(key, value)
    return key, value


def of_lines(assume: Mapping[str, Any]) -> bool:
    """Whether any of these is for a line, "KIND@FILE:LINE"."""
    return any(_LINE.search(key) for key in assume)


def decided(assume: Mapping[str, Any], kind: str, where: str, line: str = "") -> Any:
    """The user's value for assumptions of `kind` in the module `where`; None without one.

    line: that asks, "/path/to/file.py:12".  A key that names a module or a line wins over a key
    that names none; of several the last one wins.
    """
    for key, value in reversed(tuple(assume.items())):
        name, _, pattern = key.partition("@")
        where_meant = _stands_for(pattern, where) or _of_line(pattern, line)
        if ALIASES.get(name, name) == kind and pattern and where_meant:
            return value
    names = (kind, *(alias for alias, name in ALIASES.items() if name == kind))
    return next((assume[name] for name in names if name in assume), None)


def check_histograms(assume: Mapping[str, Any], facts: Iterable[Mapping[str, Any]]) -> None:
    """Raise RequestError for a histogram that fits none of the choices that a trace made.

    facts: those of the assumptions on routing; see `Assumption.facts`.
    """
    made = [fact for fact in facts if "policy" in fact]
    for key, value in assume.items():
        kind = key.partition("@")[0]
        if ALIASES.get(kind, kind) != ROUTING or not made:
            continue
        policy = policy_of(value)
        if policy.name == "histogram" and str(policy) not in {fact["policy"] for fact in made}:
            among = sorted({fact["classes"] for fact in made})
            raise RequestError(
                f"assumption {key}={policy}: it has {len(policy.counts)} classes, but the choices "
                f"are among {', '.join(map(str, among))}"
            )


def check_modules(assume: Mapping[str, Any], paths: Iterable[str], name: str) -> None:
    """Raise RequestError for an assumption about a module that is not among `paths`."""
    known = [path for path in paths if path]
    for key in assume:
        pattern = key.partition("@")[2]
        if _LINE.search(key) or not pattern:
            continue
        if not any(_stands_for(pattern, path) for path in known):
            shown = list(dict.fromkeys(pattern_of(path) for path in known))
            raise RequestError(
                f"assumption {key!r}: no module of {name} is called {pattern!r}; "
                f"there are {', '.join(shown[:12]) or 'none'}{', ...' if shown[12:] else ''}"
            )


def _of_line(pattern: str, line: str) -> bool:
    """Whether a pattern "train.py:12" is of this line, whose path may be longer."""
    return bool(line) and fnmatchcase(f"/{line}", f"*/{pattern}")


def _stands_for(pattern: str, path: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(pattern_of(path), pattern)
