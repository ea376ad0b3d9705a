"""Escapes text from outside, so that it is seen and never acts: names, titles, cells.

Names of modules and classes, and the contents of files, may hold any character.  Each printer calls
one of these functions; the makers of texts do not.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Control characters (C0, DEL, C1), invisible ones, marks of the direction of writing, ends of
# lines, lone surrogates, and characters that XML does not allow.
_UNSEEN = (
    r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff\U000e0000-\U000e007f"
)
_ANY = re.compile(f"[{_UNSEEN}]")
_NOT_LINES = re.compile(f"(?!\n)[{_UNSEEN}]")
_FORMULA = re.compile(r"'*[=+\-@\t\r\uff1d\uff0b\uff0d\uff20]")
_QUOTED = re.compile(r"'+[=+\-@\t\r\uff1d\uff0b\uff0d\uff20]")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")


def visible(text: str, *, lines: bool = False) -> str:
    r"""The text with a visible escape for each character that is not seen: ESC as `\x1b`.

    lines: the text has several lines, so that newlines stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return (_NOT_LINES if lines else _ANY).sub(_escape, text)


def to_html(text: str, *, lines: bool = False) -> str:
    """Text as HTML shows it, its markup and unseen characters escaped.  lines: as of `visible`."""
    return html.escape(visible(text, lines=lines), quote=True)


def _escape(character: re.Match[str]) -> str:
    return character[0].encode("unicode_escape").decode("ascii")


def to_cell(value: Any) -> Any:
    """A value as a cell of a CSV file: text that a spreadsheet would run as a formula gets a "'".

    These texts begin with "=", "+", "-", "@", a tab or a carriage return.  Numbers stay numbers.
    `from_cell` takes the quote away again.
    """
    if not isinstance(value, str):
        return value
    text = f"'{value}" if _FORMULA.match(value) else value
    return visible(text)


def from_cell(cell: str) -> str:
    """The text of a cell that `to_cell` wrote, without the quote; other cells stay as they are."""
    return cell[1:] if _QUOTED.match(cell) else cell


def to_csv(records: Iterable[Mapping[str, Any]]) -> str:
    """Records of equal keys as CSV; text that a spreadsheet would run as a formula is quoted."""
    file = io.StringIO()
    writer = None
    for record in records:
        if writer is None:
            writer = csv.DictWriter(file, list(record), lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: to_cell(value) for name, value in record.items()})
    return file.getvalue()


def to_json(document: Any, *, indent: int | None = None, ascii: bool = False) -> bytes:
    """A document as JSON in UTF-8, in which characters that are not seen are escapes of JSON.

    ascii: escape all characters outside of ASCII.
    """
    separators = None if indent is not None else (",", ":")
    text = json.dumps(
        document, indent=indent, separators=separators, ensure_ascii=ascii, allow_nan=False
    )
    return _NOT_LINES.sub(_json_escape, text).encode()


def _json_escape(character: re.Match[str]) -> str:
    return json.dumps(character[0])[1:-1]


def to_toml(value: Any) -> str:
    """A value in TOML's notation; text as a basic string whose unseen characters are its escapes.

    TOML has no lone surrogates: they become visible.
    """
    if isinstance(value, str):
        plain = value.encode("utf-8", "backslashreplace").decode()
        return _ANY.sub(_toml_escape, json.dumps(plain, ensure_ascii=False))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{toml_key(name)} = {to_toml(item)}" for name, item in value.items())
        return f"{{ {inside} }}"
    return str(value)


def toml_key(name: str) -> str:
    """A name as a key of TOML."""
    return name if _BARE.fullmatch(name) else to_toml(name)


def _toml_escape(character: re.Match[str]) -> str:
    number = ord(character[0])
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def file_part(name: str) -> str:
    """A name as a part of the name of a file: letters, digits, ".", "_" and "-"."""
    return _NOT_IN_A_NAME.sub("_", visible(name))[:60]
