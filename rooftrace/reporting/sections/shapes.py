"""The shape of a document: what its keys mean, how they are read from a result, and its schema.

A shape is declared once and used twice, so a key that is written is a key that the schema knows:

    TIMES = Object("times", (Key("t_est", SECOND), ...))
    TIMES.plain(estimate)           # {"t_est": 0.045, ...}
    schema_of(TIMES)                # {"type": "object", "properties": {"t_est": ...}, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

from rooftrace.reporting.view import units

Schema = dict[str, Any]


class Shape(Protocol):
    """The shape of one place in a document.  A `Unit` is a shape too: that of a single value."""

    def schema(self, definitions: Schema) -> Schema:
        """Its JSON schema; `definitions` gets what it refers to."""
        ...

    def plain(self, value: Any) -> Any:
        """`value` as JSON holds it."""
        ...


@dataclass(frozen=True, slots=True)
class Key:
    """One key of an object."""

    key: str
    shape: Shape
    about: str = ""  # the description in the schema
    _: KW_ONLY
    of: Callable[[Any], Any] | None = None  # reads the value; None: the attribute or item `key`
    null: bool = False  # whether null may stand there: not modelled, or not known
    optional: bool = False  # whether it is left out where the value is None

    def read(self, thing: Any) -> Any:
        """Its value in a result."""
        if self.of is not None:
            return self.of(thing)
        return thing.get(self.key) if isinstance(thing, Mapping) else getattr(thing, self.key)

    def within(self, part: Callable[[Any], Any]) -> Key:
        """This key, read from a part of a larger thing."""
        return replace(self, of=lambda thing: self.read(part(thing)))

    def schema(self, definitions: Schema) -> Schema:
        """The schema of its value, with what it is about."""
        made = self.shape.schema(definitions)
        if self.null and "type" in made:
            made = {**made, "type": [made["type"], "null"]}
        return {**({"description": self.about} if self.about else {}), **made}


@dataclass(frozen=True, slots=True)
class Object:
    """Keys that are known.  An open object keeps what else a mapping has."""

    name: str  # under $defs; "" stands where it is used
    keys: tuple[Key, ...]
    open: bool = field(default=False, kw_only=True)

    def schema(self, definitions: Schema) -> Schema:
        """An object that requires every key that is not optional."""
        made: Schema = {
            "type": "object",
            "properties": {key.key: key.schema(definitions) for key in self.keys},
            "required": [key.key for key in self.keys if not key.optional],
            "additionalProperties": self.open,
        }
        if not self.name:
            return made
        definitions[self.name] = made
        return {"$ref": f"#/$defs/{self.name}"}

    def plain(self, value: Any) -> Schema:
        """A dict of its keys, in their order; of an open object in the order of the mapping."""
        read = {key.key: (key, key.read(value)) for key in self.keys}
        made = {
            name: None if item is None else key.shape.plain(item)
            for name, (key, item) in read.items()
            if not (key.optional and item is None)
        }
        if not (self.open and isinstance(value, Mapping)):
            return made
        return {**{name: units.plain(item) for name, item in value.items()}, **made}


@dataclass(frozen=True, slots=True)
class Many:
    """A list whose members all have one shape."""

    item: Shape
    count: int | None = None

    def schema(self, definitions: Schema) -> Schema:
        """An array."""
        bounds = {} if self.count is None else {"minItems": self.count, "maxItems": self.count}
        return {"type": "array", "items": self.item.schema(definitions), **bounds}

    def plain(self, value: Sequence[Any]) -> list[Any]:
        """A list."""
        return [self.item.plain(item) for item in value]


@dataclass(frozen=True, slots=True)
class Named:
    """An object with free names (phases, chips, families), whose values all have one shape."""

    item: Shape
    least: int = 0

    def schema(self, definitions: Schema) -> Schema:
        """An object whose keys are any."""
        least = {"minProperties": self.least} if self.least else {}
        return {"type": "object", **least, "additionalProperties": self.item.schema(definitions)}

    def plain(self, value: Mapping[str, Any]) -> Schema:
        """A dict."""
        return {str(name): self.item.plain(item) for name, item in value.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def schema(self, definitions: Schema) -> Schema:
        """An enumeration, or a constant."""
        return {"enum": list(self.words)} if len(self.words) > 1 else {"const": self.words[0]}

    def plain(self, value: str) -> str:
        """The word."""
        return value


@dataclass(frozen=True, slots=True)
class Anything:
    """A value that is not described further, or an object with only some keys described."""

    required: tuple[str, ...] = ()

    def schema(self, definitions: Schema) -> Schema:
        """No restriction, or an object with these keys."""
        return {"type": "object", "required": list(self.required)} if self.required else {}

    def plain(self, value: Any) -> Any:
        """The value."""
        return units.plain(value)


def schema_of(shape: Object, about: Mapping[str, str]) -> Schema:
    """The JSON schema of a whole document; `about`: its $id, title and description."""
    definitions: Schema = {}
    body = shape.schema(definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **about,
        **body,
        "$defs": dict(sorted(definitions.items())),
    }
