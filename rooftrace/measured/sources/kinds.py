"""The kinds of files with measurements, told apart by their contents; names say nothing."""

from __future__ import annotations

import codecs
import os
import re
import zlib
from pathlib import Path
from typing import Literal


class ProfileError(ValueError):
    """A file of measurements cannot be read, or does not fit the request.

    The message names the file, what is wrong, and what to do.
    """


Kind = Literal["trace", "run", "steps", "counters"]

KINDS: dict[Kind, str] = {
    "run": "a run file of `rooftrace measure`",
    "trace": "a trace of torch.profiler",
    "steps": "a CSV of step times (model,batch,ms)",
    "counters": "a CSV of Nsight Compute",
}
"""Each kind in words."""

_HEAD = 1 << 16
"""The number of bytes of a file that are examined."""
_GZIP = b"\x1f\x8b"
_SCHEMA = re.compile(r'"schema"\s*:\s*"(rooftrace\.[\w.]+/[^"]*)"')
_TRACE = re.compile(r'"(traceEvents|schemaVersion|deviceProperties|displayTimeUnit|ph)"\s*:')


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """The kind of measurements in a file, plain or gzip, from how it begins.

    The reader of that kind checks the rest.  Raises OSError, or ProfileError for a file that begins
    like no kind.
    """
    path = Path(path)
    with path.open("rb") as file:
        raw = file.read(_HEAD)
    if not raw:
        raise ProfileError(f"{path}: the file is empty; expected {_expected()}")
    text = _text(path, raw)
    begin = text.lstrip("\ufeff \t\r\n")
    if begin[:1] in ("{", "["):
        return _kind_of_json(path, begin)
    if begin.startswith("==PROF==") or "Kernel Name" in begin:
        return "counters"  # ncu tells what it does before the table
    first = begin.partition("\n")[0].strip()
    if "," not in first:
        raise ProfileError(f"{path}: begins with {first[:60]!r}; expected {_expected()}")
    return "steps"


def _kind_of_json(path: Path, begin: str) -> Kind:
    schema = _SCHEMA.search(begin)
    if schema and schema[1].startswith("rooftrace.run/"):
        return "run"
    if schema:
        raise ProfileError(f"{path}: a file of schema {schema[1]!r}; expected {_expected()}")
    if _TRACE.search(begin):
        return "trace"
    raise ProfileError(
        f"{path}: JSON that begins with {begin[:60]!r}, without a schema and without events; "
        f"expected {_expected()}"
    )


def _text(path: Path, raw: bytes) -> str:
    """The beginning as text, decompressed where it is gzip, and cut where the bytes were cut."""
    if raw.startswith(_GZIP):
        try:
            raw = zlib.decompressobj(wbits=31).decompress(raw, _HEAD)
        except zlib.error as error:
            raise ProfileError(f"{path}: a damaged gzip file ({error}); copy it again") from None
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{path}: not text in UTF-8 ({error.reason}); expected {_expected()}"
        ) from None
    return text


def _expected() -> str:
    *first, last = KINDS.values()
    return f"{', '.join(first)} or {last}"
