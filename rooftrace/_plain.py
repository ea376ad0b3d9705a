"""Records as plain data: the one way from a result to JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

Positive: TypeAlias = Annotated[int, ("minimum", 1)]
Share: TypeAlias = Annotated[float, ("maximum", 1.0000001)]
"""Numbers with bounds, which a JSON schema says; all others are 0 at least."""


def plain(value: Any) -> Any:
    """A value as JSON holds it.

    Records and mappings become dicts with text as keys, tuples lists, numbers of numpy those of
    Python, and other values (a path, a fraction) text.  Numbers that are not finite are None, which
    is "not known".
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Plain):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "__struct_fields__") or is_dataclass(value):
        return plain_record(value)
    return plain(value.item()) if hasattr(value, "item") else str(value)


def plain_record(record: Any, keys: str = "*") -> dict[str, Any]:
    """A dict of a record's attributes.  keys: as `Plain.KEYS` has them."""
    made: dict[str, Any] = {}
    for key, path, optional in keys_of(keys):
        if path == "*":
            made |= {name: plain(getattr(record, name)) for name in _fields(record)}
            continue
        value = plain(_read(record, path))
        if not key:
            made |= value
        elif value or not optional:
            made[key] = value
    return made


@lru_cache
def keys_of(keys: str) -> tuple[tuple[str, str, bool], ...]:
    """(name, path, optional) of each key of `Plain.KEYS`; the name is "" for items of a mapping."""
    made = []
    for key in keys.split():
        name, _, path = key.lstrip("*").rstrip("?").partition("=")
        made.append(("" if key[0] == "*" else name, path or name or "*", key[-1] == "?"))
    return tuple(made)


class Plain:
    """A record that becomes JSON: by its fields, or by the keys that it names in their order.

    KEYS are separated by spaces: "key" is an attribute of this name, "key=chip.name" one of another
    name or of a part, also of a tuple or a mapping ("names.0"); a method without parameters is
    called.  "key?" is left out where it is empty, "*" stands for all fields, and "**sizes" for the
    items of a mapping.
    """

    __slots__ = ()
    KEYS = "*"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: SI units, and None for numbers that are unknown or not finite."""
        return plain_record(self, self.KEYS)


def _fields(record: Any) -> tuple[str, ...]:
    structured: tuple[str, ...] | None = getattr(record, "__struct_fields__", None)
    return structured or tuple(each.name for each in fields(record))


def _read(record: Any, path: str) -> Any:
    value = record
    for part in path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            value = value[int(part)] if part.isdigit() else getattr(value, part)
    return value() if callable(value) else value
