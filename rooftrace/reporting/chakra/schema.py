"""Messages of MLCommons Chakra's execution traces (et_def.proto) as bytes of protocol buffers.

A file is one GlobalMetadata and then Nodes, each after its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

VERSION = "1.0.0"
"""Of the schema."""

COMP, SEND, RECV, COLLECTIVE = 4, 5, 6, 7
"""Types of nodes: kernels, and exchanges of two and of more processes."""
_VARINT, _FIXED64, _BYTES = 0, 1, 2
"""Wire types."""
_DOUBLE_VAL, _INT32_VAL, _INT64_VAL, _UINT64_VAL, _BOOL_VAL, _STRING_VAL = 3, 7, 9, 13, 27, 29
_TYPED = {
    "comm_src": _INT32_VAL,
    "comm_dst": _INT32_VAL,
    "comm_tag": _INT32_VAL,
    "tensor_size": _UINT64_VAL,
}
"""Attributes of whole numbers that readers take as something else than int64."""

Attribute = bool | int | float | str


def metadata(attributes: Mapping[str, Attribute]) -> bytes:
    """The first message of a file."""
    return _text(1, VERSION) + b"".join(_nested(2, attribute(*each)) for each in attributes.items())


def node(
    number: int,
    name: str,
    kind: int,
    *,
    data: Iterable[int] = (),
    order: Iterable[int] = (),
    start: int = 0,
    duration: int = 0,
    attributes: Mapping[str, Attribute],
) -> bytes:
    """A node; data and order: the nodes that it waits for.  start, duration: microseconds."""
    parts = [
        _whole(1, number),
        _text(2, name),
        _whole(3, kind),
        _packed(4, order),
        _packed(5, data),
        _whole(6, start),
        _whole(7, duration),
        *(node_attribute(*each) for each in attributes.items()),
    ]
    return b"".join(parts)


def node_attribute(name: str, value: Attribute) -> bytes:
    """An attribute as a part of a node."""
    return _nested(10, attribute(name, value))


def attribute(name: str, value: Attribute) -> bytes:
    """A name with a value of the type that readers expect."""
    if isinstance(value, bool):
        content = _tag(_BOOL_VAL, _VARINT) + _varint(value)
    elif isinstance(value, str):
        content = _nested(_STRING_VAL, _encoded(value))
    elif isinstance(value, float):
        content = _tag(_DOUBLE_VAL, _FIXED64) + struct.pack("<d", value)
    else:
        content = _tag(_TYPED.get(name, _INT64_VAL), _VARINT) + _varint(value)
    return _text(1, name) + content


def delimited(message: bytes) -> bytes:
    """A message after its length."""
    return _varint(len(message)) + message


def _whole(field: int, value: int) -> bytes:
    """A whole number; 0 is left out, as it is what a reader takes."""
    return _tag(field, _VARINT) + _varint(value) if value else b""


def _packed(field: int, values: Iterable[int]) -> bytes:
    content = b"".join(map(_varint, values))
    return _nested(field, content) if content else b""


def _text(field: int, text: str) -> bytes:
    return _nested(field, _encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _nested(field: int, content: bytes) -> bytes:
    return _tag(field, _BYTES) + _varint(len(content)) + content


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(value: int) -> bytes:
    """A whole number in groups of 7 bits, the lowest first."""
    if value < 0:
        raise ValueError(f"{value}: expected no number below 0")
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
