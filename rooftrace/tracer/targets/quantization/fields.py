"""One record of a file on quantisation, with its fields read by type."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rooftrace.errors import TargetError
from rooftrace.tracer.targets.quantization import schemes

SKIPPED = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "exclude")
"""Fields with the modules that stay as they are."""


class Fields:
    """A record of a file and where it stands, for errors.  Fields have several names in the wild.

    Each reader takes the names of one field, and raises TargetError for a value of another type.
    """

    def __init__(self, data: Any, where: str) -> None:
        if hasattr(data, "to_dict"):
            data = data.to_dict()
        if not isinstance(data, Mapping):
            raise TargetError(f"{where}: {data!r:.60}: expected a record")
        self.data, self.where = data, where

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def of(self, *names: str) -> Any:
        """The first field that is there, of any type; None without."""
        return next((self.data[n] for n in names if self.data.get(n) is not None), None)

    def whole(self, *names: str, default: int = 0) -> int:
        """A whole number."""
        value = self.of(*names)
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**31:
            raise TargetError(f"{self.where}.{names[0]}: {value!r:.60}: expected a whole number")
        return value

    def word(self, *names: str, default: str = "") -> str:
        """A word, in lower case."""
        value = self.of(*names)
        value = default if value is None else getattr(value, "value", value)
        if not isinstance(value, str):
            raise TargetError(f"{self.where}.{names[0]}: {value!r:.60}: expected a word")
        return value.lower().removeprefix("torch.")

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        value = self.of(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TargetError(f"{self.where}.{names[0]}: {value!r:.60}: expected true or false")
        return value

    def skipped(self, *names: str) -> tuple[schemes.ModuleRule, ...]:
        """The rule for modules that are not quantised; none without."""
        skipped = [p for n in names for p in schemes.patterns(self.of(n), f"{self.where}.{n}")]
        return (schemes.ModuleRule(tuple(skipped), None),) if skipped else ()

    def record(self, *names: str) -> Fields | None:
        """A record inside; None without."""
        value = self.of(*names)
        name = next((n for n in names if n in self), names[0])
        return None if value is None else Fields(value, f"{self.where}.{name}")

    def records(self, *names: str) -> Iterator[tuple[str, Fields]]:
        """The records of a record or a list inside, each with its name."""
        value, where = self.of(*names), f"{self.where}.{names[0]}"
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        for name, item in {} if inner is None else Fields(inner, where).data.items():
            yield str(name), Fields(item, f"{where}.{name}")
