"""An argument as it is declared: once, for the command line, for Python and for the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Option:
    """An argument of Python with the option that says it on a command line.

    read: makes the value of what was typed (of all texts together, where it `repeats`).  kind: the
    type of what is typed; bool is a switch.  words: all that may be typed.  shown: the default, as
    help says it.
    """

    help: str
    name: str = ""  # of the argument; of a field, the field's
    flag: str = ""  # "--what-if", or "-o/--out"; "": made of the name
    metavar: str | None = None
    kind: type = str
    read: Callable[[Any], Any] | None = None
    repeats: bool = False
    words: Sequence[str] = ()
    shown: str = ""
    required: bool = False
    least: int | None = None  # of a whole number
    most: int | None = None

    @property
    def spelled(self) -> str:
        """The option as it is typed."""
        return self.flag or "--" + self.name.replace("_", "-")

    @property
    def kept(self) -> Any:
        """The type of its values in a file: what its reader makes of a text."""
        return self.kind if self.read is None else get_type_hints(self.read)["return"]

    def value(self, typed: Any) -> Any:
        """The argument that was typed.  Raises RequestError, which quotes it."""
        return typed if self.read is None else self.read(typed)


def option(default: Any = None, *, help: str, **how: Any) -> Any:
    """A field of a record that is an argument, and an option of every command that has the record.

    how: fields of Option.
    """
    return field(default=default, metadata={"option": Option(help=help, **how)})


def options_of(record: type) -> tuple[Option, ...]:
    """The options of a record's fields."""
    declared = {each.name: each.metadata.get("option") for each in fields(record)}
    return tuple(replace(option, name=name) for name, option in declared.items() if option)
