"""Events of traces that are almost JSON, as profilers write them.

Kineto writes `inf` and `nan` bare, names without an escape for their quotes, backslashes of paths
and control characters as they are (pytorch/kineto issue 105, pull request 1459).  Each event is
parsed alone, so that one that cannot be read costs nothing but itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, Any, cast

_LIST = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT = re.compile(rb'[\[,]\s*(?=\{\s*"(?:ph|name|cat|ts|pid|tid|id|args|dur|s)"\s*:)')
"""An event begins there: a table in a list, with one of these keys."""
_CATEGORY = re.compile(r'"cat"\s*:\s*"(\w*)"')
_BARE = re.compile(r"-?(?:inf(?:inity)?|nan)(?:\([^()]*\))?(?![\w(])", re.IGNORECASE)
_ENDS_KEY = re.compile(r"\s*:")
_ENDS_ITEM = re.compile(r"\s*[,\]]")
_ENDS_VALUE = re.compile(r'\s*(?:,\s*"[^"]*"\s*:|\}\s*(?:[,}\]]|$))')
"""The text behind the quote that ends a key, an item of a list, and the value of a key."""
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_DECODER = json.JSONDecoder(strict=False)
_BLOCK = 1 << 16


# -- values ----------------------------------------------------------------------------------------

_WHOLES = re.compile(r"\(?[a-z_ ]*[\[(]?\s*(\d+(?:\s*,\s*\d+)*)\s*,?\s*[\])]*")
"""Whole numbers in a text: "[64, 1, 1]", "(64, 1, 1)", Inductor's "grid(100,)"."""
_LARGEST = 1 << 63


def whole(value: Any) -> int | None:
    """A whole number of 64 bits, also in a text, as ROCm writes it: 256 of "256", "0x100", "256.0".

    None for anything else.
    """
    number: Any = value
    if isinstance(value, str):
        text = value.strip().lower().removesuffix("u").removesuffix("l")[:_LONGEST]
        try:
            number = int(text, 16) if text.startswith(("0x", "-0x")) else int(text)
        except ValueError:
            number = decimal(text)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) < _LARGEST:
        return number
    return None


_LONGEST = 64
"""Letters of the longest number: Python refuses to parse texts of very many digits."""


def decimal(value: Any) -> float | None:
    """A finite number, also in a text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value[:_LONGEST] if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def wholes(value: Any) -> tuple[int, ...] | None:
    """Whole numbers of a list, or of a text that lists them; None for anything else."""
    if isinstance(value, str):
        listed = _WHOLES.fullmatch(value.strip().lower())
        value = listed[1].split(",") if listed else None
    elif isinstance(value, int):
        value = [value]
    if not isinstance(value, list):
        return None
    numbers = tuple(map(whole, value))
    return None if None in numbers else cast("tuple[int, ...]", numbers)


def text_of(value: Any) -> str | None:
    """A text that every program can write; None for anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


# -- events ----------------------------------------------------------------------------------------


class LostEventError(ValueError):
    """An event that cannot be read: its category, "" if unknown, and its beginning."""

    def __init__(self, category: str, text: str) -> None:
        super().__init__(f"not JSON: {text[:120]}")
        self.category = category


def mended_events(
    file: IO[bytes], bare_list: bool, most: int
) -> Iterator[dict[str, Any] | LostEventError]:
    """The events of a text that is almost JSON, and an error in place of each lost one.

    most: bytes of the longest event.  Raises ValueError where text stands between events, EOFError
    where the text ends inside of them.
    """
    buffer, begun, chunk = b"", bare_list, 0
    while True:
        block = file.read(_BLOCK)
        buffer += block
        if not begun:
            head = _LIST.search(buffer)
            if head is not None:
                buffer, begun = buffer[head.end() - 1 :], True
            elif block:
                buffer = buffer[-_BLOCK:]
            else:
                return
        if begun:
            starts = [match.end() for match in _EVENT.finditer(buffer)]
            for begin, end in pairwise(starts):
                yield _event(buffer[begin:end], last=False)
            if starts:
                buffer, chunk = buffer[starts[-1] - 1 :], 1
                buffer = b"," + buffer[1:]
        if len(buffer) > most:
            raise ValueError(f"one value has more than {most >> 20} MiB")
        if not block:
            if chunk:
                yield _event(buffer[1:], last=True)
            return


def _event(raw: bytes, last: bool) -> dict[str, Any] | LostEventError:
    """One event, with the text until the next one behind it."""
    text = raw.decode("utf-8", "replace")
    for tried in (text, _mended(text)):
        try:
            event, end = _DECODER.raw_decode(tried)
        except (ValueError, RecursionError):
            continue
        behind = tried[end:].strip()
        if last:
            behind = behind.lstrip(", \t\r\n")  # a comma may follow the last event
        if last and not behind:
            raise EOFError
        if not (behind.startswith("]") if last else behind == ","):
            raise ValueError(behind[:60])
        if isinstance(event, dict):
            return event
    if last and not text.rstrip().endswith(("}", "]")):
        raise EOFError
    category = _CATEGORY.search(text)
    return LostEventError(category[1] if category else "", text)


def _mended(text: str) -> str:
    """The text of an event with its quotes, backslashes and numbers as JSON has them."""
    parts: list[str] = []
    inside: list[str] = []  # the brackets around
    place, after_colon = 0, False
    while place < len(text):
        letter = text[place]
        bare = _BARE.match(text, place)
        if letter == '"':
            is_key = inside[-1:] == ["{"] and not after_colon
            ends = _ENDS_KEY if is_key else _ENDS_VALUE if after_colon else _ENDS_ITEM
            content, place = _quoted(text, place + 1, ends)
            parts.append(f'"{content}"')
            after_colon = False
            continue
        if bare is not None:
            parts.append("null")
            place = bare.end()
            continue
        if letter in "{[":
            inside.append(letter)
        elif letter in "}]":
            del inside[-1:]
            if not inside:
                break
        after_colon = letter == ":" or (after_colon and letter.isspace())
        parts.append(letter)
        place += 1
    return "".join(parts) + text[place:]


def _quoted(text: str, place: int, ends: re.Pattern[str]) -> tuple[str, int]:
    """The text until the quote that ends it, with escapes; and the place behind that quote."""
    parts: list[str] = []
    while place < len(text):
        letter = text[place]
        if letter == '"' and ends.match(text, place + 1):
            return "".join(parts), place + 1
        escape = _ESCAPE.match(text, place)
        if escape is not None and escape[0] == '\\"' and ends.match(text, escape.end()):
            return "".join((*parts, "\\\\")), escape.end()  # a path that ends in a backslash
        plain = {'"': '\\"', "\\": "\\\\"}.get(letter, letter)
        parts.append(plain if escape is None else escape[0])
        place += len(letter if escape is None else escape[0])
    return "".join(parts), place
