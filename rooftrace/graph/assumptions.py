"""Assumptions that a user can decide: kinds, values, and the modules or lines that they hold for.

Values of `--assume routing=` are read here, files of counts too; what a policy expects of a choice
is in tracer/values/choices.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rooftrace import _reading
from rooftrace.errors import RequestError, hint
from rooftrace.graph.records import pattern_of

ROUTING = "routing"
FALLBACK = "fallback"
"""Kind of assumptions on code that runs in place of a package's kernel: nobody decides them."""
POLICIES: Mapping[str, str] = {
    "expected": "each class is equally likely; counts are the exact expectation",
    "balanced": "each class equally often",
    "uniform": "one draw by a fixed seed",
    "skewed:EXPONENT": "class i is chosen i ** -EXPONENT as likely as the first",
    "histogram:FILE": "as likely as a JSON or CSV file counts; in Python also a list",
}
"""The policies, and how each chooses."""
ASSUMABLE: Mapping[str, str] = {
    "branch": "True or False, for an unknown condition",
    "density": "a share from 0 to 1, of an unknown mask that is true",
    "value": "a number, for an unknown one",
    ROUTING: f"{', '.join(POLICIES)}, for choices by unknown scores",
}
"""The kinds of assumption that a user can decide, and the values of each."""

_LINE = re.compile(r"@.+:\d+$")
"""The end of a key that is for a line."""
_WORDS = {"true": True, "false": False}


def check_assumption(key: str, value: Any) -> None:
    """Raise RequestError for an unknown kind, or for a value that the kind does not take."""
    kind, at, module = key.partition("@")
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
        if name == kind and pattern and where_meant:
            return value
    return assume.get(kind)


def check_histograms(assume: Mapping[str, Any], facts: Iterable[Mapping[str, Any]]) -> None:
    """Raise RequestError for a histogram that fits none of the choices that a trace made.

    facts: of the assumptions on routing; see `Assumption.facts`.
    """
    made = [fact for fact in facts if "policy" in fact]
    for key, value in assume.items():
        if key.partition("@")[0] != ROUTING or not made:
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
    named = [path for path in paths if path]
    for key in assume:
        pattern = key.partition("@")[2]
        if _LINE.search(key) or not pattern:
            continue
        if not any(_stands_for(pattern, path) for path in named):
            shown = list(dict.fromkeys(pattern_of(path) for path in named))
            raise RequestError(
                f"assumption {key!r}: no module of {name} is called {pattern!r}; "
                f"there are {', '.join(shown[:12]) or 'none'}{', ...' if shown[12:] else ''}"
            )


def _of_line(pattern: str, line: str) -> bool:
    """Whether a pattern "train.py:12" is of this line, whose path may be longer."""
    return bool(line) and fnmatchcase(f"/{line}", f"*/{pattern}")


def _stands_for(pattern: str, path: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(pattern_of(path), pattern)


# -- policies for choices by unknown scores, as a router makes them --------------------------------

MOST_EXPONENT = 8.0
"""The largest exponent of `skewed`: of two classes, the second is then chosen 1 time in 257."""
MOST_CLASSES = 1 << 20
"""The most classes that a histogram may have."""
_FILE = _reading.FileKind("histogram", RequestError, "it holds counts by class, as JSON or CSV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy for choices by unknown scores."""

    name: str = "expected"  # the word before the colon
    exponent: float = 0.0  # of a skewed policy
    counts: tuple[float, ...] = ()  # of a histogram: how often each class was chosen
    named: bool = False  # the histogram names its classes: later ones have no count
    source: str = ""  # of a histogram: its file, "" for a list

    def __str__(self) -> str:
        """The text that `--assume routing=` takes; for a list of counts, its length."""
        if self.name == "skewed":
            return f"skewed:{self.exponent:g}"
        if self.name == "histogram":
            return f"histogram:{self.source or f'{len(self.counts)} counts'}"
        return self.name

    def fits(self, classes: int) -> bool:
        """Whether it can decide a choice among so many classes: False for other histograms."""
        if self.name != "histogram":
            return True
        return len(self.counts) <= classes if self.named else len(self.counts) == classes


SAID = "on unknown scores: "
"""The beginning of a sentence on a choice."""
GIVEN = ", as given"
"""The end of a sentence on what the user decided."""


def said_of_routing(facts: Mapping[str, Any]) -> str:
    """The facts of an assumption on routing in words (see `Assumption.facts`)."""
    rows, k, classes = facts["rows"], facts["chosen"], facts["classes"]
    reached, drawn = facts["distinct"], facts["drawn"]
    each = f"{rows:,} rows choose {k} of {classes:,} each" if rows > 1 else f"{k} of {classes:,}"
    numbers = f"{reached:,.0f} distinct"
    if reached != drawn:
        numbers = f"{reached:,.2f} distinct, {drawn:,} in the draw that the code gets"
    return f"{SAID}{each}; by the policy {facts['policy']} that is {numbers}"


def policy_of(value: Any) -> Policy:
    """The policy of a `routing=` value.

    Reads the file of a histogram.  Raises RequestError, which does not quote the value.
    """
    if isinstance(value, (list, tuple)):
        return Policy(name="histogram", counts=_counts(value, "the list"))
    if not isinstance(value, str):
        raise RequestError(f"expected one of {_listed()}")
    name, colon, rest = value.partition(":")
    if name == "skewed":
        return Policy(name=name, exponent=_exponent(rest) if colon else 1.0)
    if name == "histogram" and rest:
        return _histogram(rest)
    if colon or name not in POLICIES:
        names = [policy.partition(":")[0] for policy in POLICIES]
        raise RequestError(f"expected one of {_listed()}{hint(name, names)}")
    return Policy(name=name)


def _listed() -> str:
    *first, last = (f"{name} ({how})" for name, how in POLICIES.items())
    return f"{', '.join(first)} or {last}"


def _exponent(text: str) -> float:
    try:
        exponent = float(text)
    except ValueError:
        exponent = math.nan
    if not 0 <= exponent <= MOST_EXPONENT:
        raise RequestError(
            f"exponent {text!r}: expected a number from 0 to {MOST_EXPONENT:g}, as in skewed:1.0"
        )
    return exponent


# -- histograms ------------------------------------------------------------------------------------


def _histogram(source: str) -> Policy:
    path = Path(source)
    try:
        raw = _reading.text_of(path, _FILE)
    except OSError as problem:
        raise RequestError(
            f"{source:.200}: cannot be read ({problem.strerror or problem})"
        ) from None
    if raw.lstrip()[:1] in (b"[", b"{"):
        data = _reading.json_of(raw, source, _FILE)
        named = isinstance(data, dict)
        items = list(data.items()) if named else list(enumerate(data))
    else:
        named, items = _table(raw, source)
    counts = _by_class(items, source) if named else [count for _, count in items]
    return Policy(name="histogram", counts=_counts(counts, source), named=named, source=source)


def _table(raw: bytes, source: str) -> tuple[bool, list[tuple[Any, Any]]]:
    """The rows of a CSV file: a count each, or a class and its count; a line of heads may lead."""
    try:
        lines = [row for row in csv.reader(io.StringIO(raw.decode())) if any(map(str.strip, row))]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise _FILE.unreadable(source, problem) from None
    if lines and _number(lines[0][-1]) is None:
        del lines[0]
    widths = {len(row) for row in lines}
    if widths not in ({1}, {2}):
        raise _FILE.refused(source, "expected rows of one count, or of a class and its count")
    named = widths == {2}
    if not named:
        return False, [(number, _number(row[0], row[0])) for number, row in enumerate(lines)]
    return True, [(row[0], _number(row[1], row[1])) for row in lines]


def _by_class(items: Iterable[tuple[Any, Any]], source: str) -> list[Any]:
    counts: dict[int, Any] = {}
    for name, count in items:
        text = str(name).strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 8 else -1
        if not 0 <= number < MOST_CLASSES or number in counts:
            again = " once" if number in counts else ""
            raise _FILE.refused(
                source,
                f"class {name!r:.40}: expected a number from 0 to {MOST_CLASSES - 1:,}{again}",
            )
        counts[number] = count
    return [counts.get(number, 0) for number in range(max(counts, default=-1) + 1)]


def _number(text: str, otherwise: Any = None) -> Any:
    try:
        return float(text)
    except ValueError:
        return otherwise


def _counts(items: Sequence[Any], source: str) -> tuple[float, ...]:
    for number, item in enumerate(items):
        plain = isinstance(item, (int, float)) and not isinstance(item, bool)
        if not plain or not 0 <= item < 1e300:
            raise RequestError(f"{source}: class {number} has {item!r:.40}: expected a count")
    if not 0 < len(items) <= MOST_CLASSES or not any(items):
        raise RequestError(f"{source}: expected counts by class, at least one of them above 0")
    return tuple(float(item) for item in items)
