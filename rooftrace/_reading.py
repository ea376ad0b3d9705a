"""Reads files into plain values and records, within bounds; no layer is below this.

A file comes from anywhere.  Its size, its size after unpacking, its depth and its number of values
are bounded.  A value beyond a bound, or of another type than the record has, raises the error of
the reader, which names the file, the place, and the expected type.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from rooftrace._escapes import visible
from rooftrace.errors import one_of

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MOST_BYTES = 1 << 28
"""Bytes of a file that is read as a whole, also after unpacking: 256 MiB."""
MOST_VALUES = 1 << 25
"""Commas and brackets in a file that is read as a whole, some 40 for an op of a graph."""
DEEPEST = 64
"""Lists and tables inside of each other."""
WHOLE = range(-(1 << 63), 1 << 64)
"""The whole numbers that a file may hold: what 64 bits hold, with a sign or without."""

GZIP = b"\x1f\x8b"
_DAMAGED = (OSError, EOFError, zlib.error)

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file, for errors."""

    noun: str  # "saved graph"
    error: type[ValueError]
    advice: str = ""  # for a file that is refused

    def refused(self, where: str, reason: str) -> ValueError:
        """The error for a file with wrong contents."""
        return self.error(f"{where}: {reason}{self.advice and f'; {self.advice}'}")

    def unreadable(self, where: str, reason: object) -> ValueError:
        """The error for a file that cannot be parsed."""
        text = " ".join(str(reason).split("; use sys.")[0].split())
        return self.refused(where, f"not a readable {self.noun} ({text:.300})")


def check_name(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError for a name with a NUL, or one that the file system has no bytes for.

    Python itself raises a bare ValueError for these.
    """
    name = os.fspath(path)
    if "\0" in name or any("\ud800" <= letter < "\udc80" for letter in name):
        raise FileNotFoundError(errno.ENOENT, "no file can have this name", visible(name))


def opened(path: Path | Traversable) -> IO[bytes]:
    """A file for reading its bytes.  Raises OSError, also for a name that no file can have."""
    if isinstance(path, Path):
        check_name(path)
    return path.open("rb")


def text_of(path: Path | Traversable, kind: FileKind, where: str = "") -> bytes:
    """The bytes of a file, unpacked where it is gzip.

    where: the file's name in errors; its path, if left out.  Raises OSError, or the error of `kind`
    for a damaged gzip, or for more than MOST_BYTES.
    """
    with opened(path) as file:
        raw = file.read(MOST_BYTES + 1)
    if raw[:2] == GZIP and len(raw) <= MOST_BYTES:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(raw)) as unpacked:
                raw = unpacked.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as problem:
            raise kind.unreadable(where or str(path), problem) from None
    if len(raw) > MOST_BYTES:
        size = f"more than {MOST_BYTES >> 20} MiB, unpacked"
        raise kind.unreadable(where or str(path), size)
    return raw


def beginning(path: str | os.PathLike[str], size: int) -> bytes:
    """The first `size` bytes of a file at most, unpacked where it is gzip.

    Raises OSError, and zlib.error for a damaged gzip.
    """
    with opened(Path(path)) as file:
        head = file.read(size)
    return zlib.decompressobj(wbits=31).decompress(head, size) if head[:2] == GZIP else head


def json_of(raw: bytes, where: str, kind: FileKind, *, unique: bool = False) -> Any:
    """The values of a JSON text, within the bounds.  Raises the error of `kind`.

    unique: a key that stands twice in a table is an error too; else the last one counts.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MOST_VALUES:
        raise kind.unreadable(where, f"it has more than {MOST_VALUES:,} values")
    parse = partial(json.loads, object_pairs_hook=_once) if unique else json.loads
    return _parsed(parse, raw, where, kind)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        raise ValueError(f"the key {twice!r:.200} stands twice")
    return table


_MOST_TOML = 1 << 20
"""Bytes of a TOML text, which a person writes and whose parser is slow."""
_MOST_DOTS = 256
"""Parts of a key with dots, and full stops in a line: the parser's memory grows with the square."""
_PARTS = re.compile(rb"[=,{}\[\]\n]")


def toml_of(raw: bytes, where: str, kind: FileKind) -> dict[str, Any]:
    """The tables of a TOML text, within the bounds.  Raises the error of `kind`."""
    # Imported here, so that importing the package stays cheap.
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    if len(raw) > _MOST_TOML or any(p.count(b".") > _MOST_DOTS for p in _PARTS.split(raw)):
        reason = (
            f"it has more than {_MOST_TOML >> 20} MiB, or a key of more than {_MOST_DOTS} parts"
        )
        raise kind.unreadable(where, reason)
    tables: dict[str, Any] = _parsed(lambda text: toml.loads(text.decode()), raw, where, kind)
    return tables


def _parsed(parse: Callable[[bytes], Any], raw: bytes, where: str, kind: FileKind) -> Any:
    """The parsed text, unless it nests too deep or has too large a number."""
    try:
        data = parse(raw)
    except RecursionError:
        raise kind.unreadable(where, _TOO_DEEP) from None
    except ValueError as problem:  # of JSON, TOML, UTF-8, and numbers of very many digits
        raise kind.unreadable(where, problem) from None
    level = [data] if type(data) in (list, dict) else []
    for _ in range(DEEPEST):
        if not level:
            return data
        inside = [x for outer in level for x in (outer.values() if type(outer) is dict else outer)]
        numbers = [x for x in inside if type(x) is int]
        if numbers and not (min(numbers) in WHOLE and max(numbers) in WHOLE):
            raise kind.unreadable(where, "it has a whole number of more than 64 bits")
        level = [x for x in inside if type(x) is list or type(x) is dict]
    raise kind.unreadable(where, _TOO_DEEP)


_TOO_DEEP = f"its lists and tables are more than {DEEPEST} deep"


# -- streams ---------------------------------------------------------------------------------------

MOST_AT_ONCE = 1 << 25
"""Bytes of one value of a stream: 32 MiB."""
MOST_UNPACKED = 100
"""How many times its size a gzip may unpack to, beyond MOST_AT_ONCE; traces take 10 to 30 times."""
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


class JsonStream:
    """A JSON text of any size that is read block by block: its depth and its values are bounded.

    A value is an item of a list at the top, or of a list of a table at the top.  The blocks are as
    they are in the file; `read` raises the error of `kind` where a bound is exceeded.
    """

    def __init__(self, file: IO[bytes], path: Path, kind: FileKind) -> None:
        self.file, self.where, self.kind = file, str(path), kind
        self.most = max(MOST_AT_ONCE, MOST_UNPACKED * path.stat().st_size)
        self.size = self.value = self.depth = 0
        self.quoted = self.escaped = False

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        block = self.file.read(size)
        self.size += len(block)
        self.value += len(block)
        steps = memoryview(self._brackets(block).translate(_STEPS)).cast("b")
        depths = list(accumulate(steps, initial=self.depth))
        self.depth = depths[-1]
        if len(depths) > 1 and min(depths) <= 2:
            self.value = 0
        for passed, reason in (
            (max(depths) > DEEPEST, _TOO_DEEP),
            (self.value > MOST_AT_ONCE, f"one value has more than {MOST_AT_ONCE >> 20} MiB"),
            (self.size > self.most, f"it unpacks to more than {MOST_UNPACKED} times its size"),
        ):
            if passed:
                raise self.kind.unreadable(self.where, reason)
        return block

    def _brackets(self, block: bytes) -> bytes:
        """The brackets of the block outside of texts, which may begin before it or end after it."""
        block = block[1:] if self.escaped else block
        if b"\\" in block:
            block = _ESCAPE.sub(b"", block)
        self.escaped = block.endswith(b"\\")
        parts = block.translate(None, _OTHERS).replace(b'""', b"").split(b'"')
        outside = b"".join(parts[int(self.quoted) :: 2])
        self.quoted ^= len(parts) % 2 == 0
        return outside


# -- records ---------------------------------------------------------------------------------------

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "array": list, "object": dict}
_TYPES["null"] = type(None)
_WRONG = re.compile(r"Expected `(?P<kinds>[^`]*)`(?P<rest>.*?)(?:, got `?(?P<got>\w+)`?)?")
_OF_MSGSPEC = ("Object ", "Number ", "Integer ", "Invalid ")
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


def record_of(
    record: type[Record], data: Any, where: str, kind: FileKind, place: str = ""
) -> Record:
    """A record from plain values, where each is of the type that its field has.

    record: a dataclass; a NamedTuple, whose values are in a list; or any type of these.  place: of
    the values in the file.  Raises the error of `kind`, which names the file, the place, the value
    there and the expected type; also for a key that is no field.
    """
    import msgspec  # here, as importing it takes 15 ms

    for spot, key, names in _unknown(record, data):
        spot = f"{place}{spot}".removeprefix(".")
        raise kind.refused(
            where, f"{spot and f'{spot}: '}unknown key {key!r:.60}: {one_of(key, names)}"
        )
    try:
        return msgspec.convert(data, record, strict=True)
    except msgspec.ValidationError as problem:
        raise kind.refused(where, _said(str(problem), data, place)) from None
    except UnicodeEncodeError as problem:  # half of a surrogate pair
        reason = f"{place and f'{place}: '}{problem.object!r:.60}: expected a text in Unicode"
        raise kind.refused(where, reason) from None


def _unknown(kind: Any, data: Any, spot: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """The keys of tables that are no fields of their dataclass: where, the key, and the fields."""
    if not _holds_records(kind):
        return
    inside = get_args(kind)
    if is_dataclass(kind) and isinstance(data, dict):
        hints = _hints(cast(Any, kind))
        for key, item in data.items():
            if key not in hints:
                yield spot, key, list(hints)
            else:
                yield from _unknown(hints[key], item, f"{spot}.{key}")
    elif isinstance(data, dict) and get_origin(kind) in (dict, Mapping):
        for key, item in data.items():
            yield from _unknown(inside[1], item, f"{spot}.{key}")
    elif isinstance(data, list) and inside:
        for number, item in enumerate(data):
            yield from _unknown(inside[0], item, f"{spot}[{number}]")
    elif isinstance(data, dict):  # one of several types
        for choice in inside:
            yield from _unknown(choice, data, spot)


_hints = cache(get_type_hints)


@cache
def _holds_records(kind: Any) -> bool:
    return is_dataclass(kind) or any(map(_holds_records, get_args(kind)))


def _said(problem: str, data: Any, place: str) -> str:
    """The message of msgspec on plain values, with the value that it means."""
    text, _, path = problem.partition(" - at `$")
    steps = [name or number for name, number in _STEP.findall(path)]
    wrong = _WRONG.fullmatch(text)
    got = _TYPES.get(wrong["got"]) if wrong and wrong["got"] else None
    spot, value = next(_spots(data, steps, got), ("", data))
    spot = f"{place}{spot}" if place else spot.removeprefix(".")
    if wrong is None and not text.startswith(_OF_MSGSPEC):  # raised by the record itself
        return f"{spot and f'{spot}: '}{text}"
    missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
    if missing:
        return f"{spot + ': ' if spot else ''}{missing[1]} is missing"
    expected = text[:1].lower() + text[1:]
    if wrong:
        kinds = [_WORDS.get(kind, kind) for kind in wrong["kinds"].split(" | ")]
        expected = f"expected {' or '.join(kinds)}{wrong['rest']}"
        if got is None and wrong["got"]:
            expected += f", there are {wrong['got']}"
    return f"{spot or 'all of it'}={value!r:.60}: {expected}"


def _spots(data: Any, steps: Sequence[str], kind: type | None) -> Iterator[tuple[str, Any]]:
    """(place, value) where these steps may lead: values of this kind.

    The step "..." is any value of a table.  Of the values that it may be, some are shorter lists,
    tables without the next key, or nothing that has values inside.
    """
    if not steps:
        if kind is None or type(data) is kind:
            yield "", data
        return
    step, *rest = steps
    if type(data) not in (list, dict):
        return
    if step == "...":
        inside = [(f".{key}", item) for key, item in data.items()]
    elif type(data) is list:
        inside = [(f"[{step}]", item) for item in data[int(step) : int(step) + 1]]
    else:
        inside = [(f".{step}", data[step])] if step in data else []
    for name, item in inside:
        yield from ((f"{name}{more}", value) for more, value in _spots(item, rest, kind))


# -- is a file as it was? --------------------------------------------------------------------------


def digest_of(path: str | os.PathLike[str], whole: bool = False) -> str:
    """A digest of a file's content; "" where there is none.

    whole: also of a large file, which is otherwise told by its size and time.
    """
    try:
        state = os.stat(path)
        if not stat.S_ISREG(state.st_mode):
            return ""  # a pipe or a device may never end
        if state.st_size > _LARGE and not whole:
            return f"{state.st_size} {state.st_mtime_ns}"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


_LARGE = 1 << 26
"""Bytes of a file of weights, which is told by its size and time."""
