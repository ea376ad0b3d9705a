"""The JSON schema of a record: of its keys, by what they read.

The type of a key is that of its field or property, and its description what stands beside the field
in a comment, or the first sentence of the property's docstring.  Numbers are 0 at least, unless
they are `Annotated` with something else.

    schema_of(Saving, {})   # {"type": "object", "properties": {"kind": {"type": "string"}, ...
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import NoneType, UnionType
from typing import Any

from rooftrace._plain import Plain, keys_of

Schema = dict[str, Any]
_SIMPLE: Mapping[Any, Schema] = {
    Any: {},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
}


def schema_of(record: type[Plain], about: Mapping[str, str]) -> Schema:
    """The JSON schema of a document; about: its $id, title and description."""
    definitions: Schema = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **about,
        **_object(_properties(record, record.KEYS, definitions)),
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(kind: Any, definitions: Schema) -> Schema:
    """The schema of a value of a type; `definitions` gets the records that it refers to."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return {**_schema(inside[0], definitions), **dict(inside[1:])}
    if origin is None and kind in _SIMPLE:
        return dict(_SIMPLE[kind])
    if origin is typing.Literal:
        return {"enum": list(inside)} if len(inside) > 1 else {"const": inside[0]}
    if origin in (typing.Union, UnionType):
        (made,) = (_schema(each, definitions) for each in inside if each is not NoneType)
        if "type" in made:
            return {**made, "type": [made["type"], "null"]}
        return {"anyOf": [made, {"type": "null"}]}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        items = _schema(inside[1], definitions)
        return {"type": "object", **({"additionalProperties": items} if items else {})}
    if isinstance(origin, type):  # a list or a tuple
        items = {"type": "array", "items": _schema(inside[0], definitions)}
        pair = origin is tuple and inside[-1] is not Ellipsis
        return {**items, "minItems": len(inside), "maxItems": len(inside)} if pair else items
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}
        keys = getattr(kind, "KEYS", "*")
        definitions[kind.__name__] = _object(_properties(kind, keys, definitions))
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _object(keys: Mapping[str, tuple[Schema, bool]]) -> Schema:
    return {
        "type": "object",
        "properties": {key: made for key, (made, _) in keys.items()},
        "required": [key for key, (_, optional) in keys.items() if not optional],
        "additionalProperties": False,
    }


def _properties(record: Any, keys: str, definitions: Schema) -> dict[str, tuple[Schema, bool]]:
    """The schema of each key, and whether it may be left out."""
    made: dict[str, tuple[Schema, bool]] = {}
    for key, path, optional in keys_of(keys):
        if path == "*":
            names = " ".join(_hints(record))
            made |= _properties(record, names, definitions)
        elif not key:
            kind, _ = _member(record, path)
            made |= _properties(kind, getattr(kind, "KEYS", "*"), definitions)
        else:
            kind, about = _member(record, path)
            described = {"description": about} if about else {}
            made[key] = {**described, **_schema(kind, definitions)}, optional
    return made


def _member(record: Any, path: str) -> tuple[Any, str]:
    """The type of an attribute, or of one of a part, and what is said of it."""
    kind, about = record, ""
    for name in path.split("."):
        inside = typing.get_args(kind)
        if inside:  # an item of a mapping or a tuple
            kind = inside[1] if len(inside) > 1 else inside[0]
        else:
            kind, about = _attribute(kind, name)
    return kind, about


def _attribute(record: Any, name: str) -> tuple[Any, str]:
    member = inspect.getattr_static(record, name, None)
    function = getattr(member, "fget", None) or getattr(member, "func", None)
    if isinstance(member, cached_property) or inspect.isfunction(function or member):
        function = function or member
        about = (inspect.getdoc(function) or "").partition(".")[0].replace("\n", " ")
        return _resolved(function)["return"], about
    hints = _hints(record)
    if name not in hints:
        return typing.Literal[member], ""
    return hints[name], next(_comments(record, name), "")


def _hints(record: Any) -> dict[str, Any]:
    """The types of the fields of a record."""
    return _resolved(record)


def _resolved(thing: Any) -> dict[str, Any]:
    """The annotations of a class or a function; names that only a checker imports are Any."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(thing, localns=unknown, include_extras=True)
        except NameError as error:
            unknown[str(error.name)] = Any


def _comments(record: Any, name: str) -> Iterator[str]:
    """What stands beside a field in the source of its class."""
    for each in inspect.getmro(record) if inspect.isclass(record) else ():
        if name in inspect.get_annotations(each):
            yield from re.findall(rf"^    {name}: .*?  # (.+)$", inspect.getsource(each), re.M)
