"""A chip whose facts tell when they are read: so it is known which of them times depend on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from rooftrace.hardware import Chip
from rooftrace.hardware.chip import Fact


class _WatchedFact(Fact):
    """A fact that adds its name to a set when its value is read; equal to itself alone, so that
    nothing that was kept for an equal chip stands in for reading it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            object.__getattribute__(self, "read").add(object.__getattribute__(self, "own_name"))
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def watched(chip: Chip) -> tuple[Chip, set[str]]:
    """The chip with facts that tell, and the names of those that were read so far.

    Names are those of `NamedNumbers.facts`.
    """
    read: set[str] = set()

    def telling(fact: Fact, name: str) -> Fact:
        plain = {column.name: getattr(fact, column.name) for column in fields(Fact)}
        result = _WatchedFact(**plain)
        object.__setattr__(result, "read", read)
        object.__setattr__(result, "own_name", f"chip.{name}")
        return result

    facts = chip.facts_by_name()
    return chip.with_facts({name: telling(fact, name) for name, fact in facts.items()}), read
