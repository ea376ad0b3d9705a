"""TOML tables of facts: their keys as checked values, with errors that say where they stand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rooftrace._escapes import to_toml, toml_key
from rooftrace._reading import FileKind, text_of, toml_of
from rooftrace.errors import hint
from rooftrace.hardware import units
from rooftrace.hardware.chip import KINDS, Fact, FactKind

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Value = TypeVar("Value")

ORIGIN = ("source", "kind", "note")
"""Keys that stand beside a quantity."""
LEAST, MOST = 1e-15, 1e24
"""Bounds of a quantity in SI units, unless it is 0: far from where floats end."""
MOST_SHOWN = 20
"""Mistakes of one file that an error lists."""
WIDEST = 190
"""Characters of each where there are several."""


def spelling(name: str) -> str:
    """A name as it is looked up: in lower case, with hyphens for blanks and underscores."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


@functools.cache
def bundled_files(folder: str) -> Mapping[str, Traversable]:
    """The TOML files in a folder of `rooftrace.hardware`, by name, in order."""
    files = resources.files("rooftrace.hardware").joinpath(folder).iterdir()
    by_name = {file.name.removesuffix(".toml"): file for file in files if file.name[-5:] == ".toml"}
    return dict(sorted(by_name.items()))


def bundled_name(
    name: str, record: str, of: Mapping[str, Iterable[str]], failure: type[LookupError], more: str
) -> str:
    """The name of the bundled "host" or "system" that a name or an alias stands for.

    of: the aliases of each, by name.  more: words for the end of the error.  Raises `failure`.
    """
    key, spellings = spelling(name), {each: each for each in of}
    spellings |= {spelling(alias): each for each, some in of.items() for alias in some}
    if key not in spellings:
        raise failure(
            f'{record} "{name:.60}": expected a path ending in .toml or one of '
            f"{', '.join(of)}{hint(key, spellings)}{more}"
        )
    return spellings[key]


class FactFileError(ValueError):
    """A file of facts that cannot be read.  `problems` has each of its mistakes."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        shown = (p if len(p) <= WIDEST else f"{p[: WIDEST - 3]}..." for p in problems)
        lines = [f"\n  {problem}" for problem in islice(shown, MOST_SHOWN)]
        if len(problems) > MOST_SHOWN:
            lines.append(f"\n  and {len(problems) - MOST_SHOWN} more")
        super().__init__(
            problems[0] if len(problems) == 1 else f"{len(problems)} problems:{''.join(lines)}"
        )


class Problems:
    """Gathers the mistakes of a file while it is read, so that one error names them all."""

    def __init__(self) -> None:
        self._gathered: list[str] = []
        self._error: type[FactFileError] = FactFileError

    def of(self, read: Callable[..., Value], *arguments: object) -> Value:
        """The value of `read(*arguments)`; None after a mistake, until `raise_any`."""
        try:
            return read(*arguments)
        except FactFileError as error:
            self._gathered += error.problems
            self._error = type(error)
            return cast(Value, None)

    def raise_any(self) -> None:
        """Raise the error of the file if there was a mistake."""
        if self._gathered:
            raise self._error(*self._gathered)


class FactTable:
    """One TOML table: its keys are taken one by one; `finish` refuses the rest."""

    def __init__(
        self,
        table: object,
        place: str,
        file: str,
        sources: Mapping[str, str],
        failure: type[FactFileError],
    ) -> None:
        self.place = place
        self.file = file
        self.sources = sources
        self.failure = failure
        if not isinstance(table, dict):
            raise failure(f"{self._where()}expected a table, found {to_toml(table):.200}")
        self.rest = dict(table)

    @classmethod
    def of_user(
        cls, path: Path, record: str, names: Iterable[str], failure: type[FactFileError]
    ) -> FactTable:
        """The root table of a file of the user.  record: "chip", "system"; names: of bundled ones.

        Raises `failure`.
        """
        try:
            return cls.of_file(path, path.name, f"{record} file", failure)
        except FileNotFoundError:
            raise failure(
                f'{record} "{path}": no such file; expected a {record} TOML, or one of the names '
                f"{', '.join(names)}"
            ) from None
        except OSError as problem:
            raise failure(f'{record} "{path}": cannot be read: {problem}') from problem

    @classmethod
    def of_file(
        cls, path: Path | Traversable, file: str, words: str, failure: type[FactFileError]
    ) -> FactTable:
        """The root table of a TOML file, called `file` in errors, its [sources] taken out.

        words: "chip file", "system file".  Raises OSError, or `failure`.
        """
        kind = FileKind(words, failure)
        table = toml_of(text_of(path, kind, file), file, kind)
        sources = table.pop("sources", {})
        texts = isinstance(sources, dict) and all(
            isinstance(item, str) for item in sources.values()
        )
        if not texts:
            raise failure(f"{file}: [sources]: expected names with one text each")
        return cls(table, "", file, sources, failure)

    def _where(self, key: str = "") -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{self.file}: {place}{key}"

    def error(self, key: str, value: object, expected: str) -> FactFileError:
        """The error about one value: its place, the value itself, and the expected one."""
        return self.failure(f"{self._where(key)} = {to_toml(value):.200}: {expected}")

    def refuse(self, key: str, value: object, expected: str) -> None:
        """Raise the error about one value."""
        raise self.error(key, value, expected)

    def text(self, key: str, default: str | None = None) -> str:
        """The text at `key`; without a default it must be there, and not be blank."""
        if key not in self.rest:
            if default is not None:
                return default
            raise self.failure(f"{self._where()}{key} is missing: expected a text")
        value = self.rest.pop(key)
        if not isinstance(value, str) or not (value.strip() or default is not None):
            raise self.error(key, value, "expected a text")
        return value

    def choice(self, key: str, allowed: Iterable[str]) -> str:
        """The text at `key`, which must be one of `allowed`."""
        if key not in self.rest:
            raise self.failure(
                f"{self._where()}{key} is missing: expected one of {', '.join(allowed)}"
            )
        value = self.text(key)
        if value not in allowed:
            raise self.error(key, value, f"expected one of {', '.join(allowed)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of texts at `key`; empty where there is none."""
        value = self.rest.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "expected a list of texts")
        return tuple(value)

    def tables(self, key: str) -> list[FactTable]:
        """The [[key]] tables, in order."""
        value = self.rest.pop(key, [])
        if not isinstance(value, list):
            raise self.error(key, value, f"expected [[{key}]] tables")
        return [
            FactTable(item, f"[[{key}]] #{number}", self.file, self.sources, self.failure)
            for number, item in enumerate(value, start=1)
        ]

    def each(self, read: Callable[[FactTable], Value], key: str) -> tuple[Value, ...]:
        """The values of `read` for the [[key]] tables."""
        problems = Problems()
        made = tuple(problems.of(read, table) for table in self.tables(key))
        problems.raise_any()
        return made

    def table(self, key: str) -> FactTable | None:
        """The table at `key`, None where there is none."""
        if key not in self.rest:
            return None
        inside = not self.place
        place = f"[{key}]" if inside else f"{self.place}: {key}"
        return FactTable(self.rest.pop(key), place, self.file, self.sources, self.failure)

    def quantity(self, key: str, unit: str | None) -> tuple[float, str]:
        """The SI value and the text of a quantity; `unit` None takes whatever unit stands there."""
        if key not in self.rest:
            example = f', for example "{units.EXAMPLES[unit]}"' if unit else ""
            expected = f"a quantity in {unit}" if unit else "a quantity"
            raise self.failure(f"{self._where()}{key} is missing: expected {expected}{example}")
        value = self.rest.pop(key)
        if unit == "count" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            example = units.EXAMPLES[unit] if unit else units.EXAMPLES["byte/s"]
            raise self.error(key, value, f'expected a text with a unit, for example "{example}"')
        try:
            number = units.parse(value, unit) if unit else units.parse_any(value)[0]
        except units.UnitError as problem:
            raise self.failure(f"{self._where(key)} = {problem}") from problem
        if number and not LEAST <= abs(number) <= MOST:
            raise self.error(key, value, f"expected 0, or {LEAST:g} to {MOST:g} in SI units")
        return number, value

    def source(self) -> str:
        """The source of a fact in full, looked up in [sources] where it is a key of that table."""
        if "source" not in self.rest:
            raise self.failure(
                f"{self._where()}source is missing: a number without a source does not load; "
                "say which document or measurement it comes from"
            )
        value = self.text("source")
        if value in self.sources:
            return self.sources[value]
        if " " not in value.strip():
            keys = ", ".join(self.sources) or "nothing"
            expected = f"expected a sentence, or a key of [sources], which has: {keys}"
            raise self.error("source", value, expected)
        return value

    def fact(self, key: str, unit: str | None) -> Fact:
        """The fact whose quantity stands at `key`, with source, kind and note in this table."""
        problems = Problems()
        quantity = problems.of(self.quantity, key, unit)
        source = problems.of(self.source)
        kind = cast(FactKind, problems.of(self.choice, "kind", KINDS))
        note = problems.of(self.text, "note", "")
        problems.raise_any()
        return Fact(*quantity, source, kind, note)

    def whole_fact(self, unit: str | None) -> Fact:
        """The fact of a table that holds nothing else."""
        fact: Fact = self.values({"value": lambda key: self.fact(key, unit)}, *ORIGIN)["value"]
        return fact

    def inner_fact(self, key: str, unit: str | None) -> Fact | None:
        """The fact of the table at `key`; None where there is none."""
        inner = self.table(key)
        return None if inner is None else inner.whole_fact(unit)

    def values(self, readers: Mapping[str, Callable[[str], Any]], *others: str) -> dict[str, Any]:
        """The values of keys by their readers; a key that has none is refused.

        others: keys that these readers take, too.  One error names all mistakes.
        """
        problems = Problems()
        made = {key: problems.of(read, key) for key, read in readers.items()}
        problems.of(self.finish, (*readers, *others))
        problems.raise_any()
        return made

    def finish(self, allowed: Iterable[str]) -> None:
        """Raise the error of the file for the keys that nothing has read."""
        if self.rest:
            names = list(allowed)
            unknown = ", ".join(map(str, self.rest))
            hints = "".join([hint(key, names) for key in self.rest][:3])
            keys = "keys" if len(self.rest) > 1 else "key"
            raise self.failure(
                f"{self._where()}unknown {keys} {unknown:.300}: expected one of {', '.join(names)}"
                f"{hints}"
            )


def fact_rows(
    fact: Fact, key: str, unit: str | None, place: str, failure: type[FactFileError]
) -> dict[str, str]:
    """The keys of a fact.  Raises `failure` if its text would not read back as its value."""
    value = units.parse(fact.text, unit) if unit else units.parse_any(fact.text)[0]
    if value != fact.value:
        raise failure(
            f"{place}: text {to_toml(fact.text)} is {value!r}, but the value is "
            f"{fact.value!r}: expected a text that says the value (see Fact.of and units.write)"
        )
    rows = {key: fact.text, "kind": fact.kind, "source": fact.source}
    return {**rows, "note": fact.note} if fact.note else rows


def toml_sections(sections: Iterable[tuple[str, Mapping[str, object]]]) -> str:
    """TOML text of sections, each with its head ("[[link]]", "" for none) and its keys.

    The text is made here and not by a library: this layer needs the standard library only, and a
    library writes short tables into one line.
    """
    return "\n".join(
        "".join(
            [f"{title}\n" if title else ""]
            + [f"{toml_key(key)} = {to_toml(value)}\n" for key, value in rows.items()]
        )
        for title, rows in sections
    )
