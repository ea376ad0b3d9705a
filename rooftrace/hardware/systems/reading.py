"""Reads systems from TOML files by name, alias or path, writes them as TOML, and lints such files.

name = "dgx-h100"
chip = "h100-sxm"                # a chip by name, or a path relative to this file

[sources]                        # long sources once, like those of a chip

[power]                          # of the chips of the innermost level and all with them
value = "10.2 kW"
kind = "datasheet"
source = "dgx"

[[level]]                        # from the inside out
name = "nvlink"
kind = "nvswitch"
size = 8                         # left out: any number
bandwidth = { value = "450 GB/s", kind = "datasheet", source = "datasheet" }
latency = { value = "2 us", kind = "guess", source = "usual time of a small message" }

[[collective]]                   # one for each (library, op, level)
library = "nccl"
op = "all_reduce"
level = "nvlink"
alpha = "5 us"
step = "1 us"
efficiency = 0.7
p = 2.0
ranks = 8                        # measured up to
nbytes = "256 MiB"               # measured up to
kind = "measured"
source = "nccl"
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rooftrace._outputs import TOML_MARK
from rooftrace._writing import write_bytes
from rooftrace.errors import one_of
from rooftrace.hardware import units
from rooftrace.hardware.chip import KINDS, Chip, Fact
from rooftrace.hardware.chipfile import (
    FactFileError,
    FactTable,
    Finding,
    available_chips,
    bundled_files,
    bundled_name,
    fact_rows,
    lint_spelling,
    load_chip,
    spelling,
    toml_sections,
)
from rooftrace.hardware.systems.records import (
    COLLECTIVES,
    EXCHANGE_MODES,
    EXCHANGE_WAYS,
    LEVEL_KINDS,
    LIBRARIES,
    CollectiveFit,
    ExchangeFit,
    Level,
    System,
)

Readers: TypeAlias = "Mapping[str, Callable[[str], Any]]"
"""By key of a table: the function that reads it."""


class SystemFileError(FactFileError):
    """A system file that cannot be read as a system.  `problems` has each of its mistakes."""


class UnknownSystemError(LookupError):
    """A name that is no bundled system."""


def load_system(name_or_path: str | os.PathLike[str] | System) -> System:
    """A system by name or alias ("dgx-h100"), by path (ending in .toml), or as it is."""
    if isinstance(name_or_path, System):
        return name_or_path
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise UnknownSystemError(
            f"system {name_or_path!r:.60}: expected a name, path or System, such as 'dgx-h100'"
        )
    name = os.fspath(name_or_path)
    if name.lower().endswith(".toml"):
        root = FactTable.of_user(Path(name), "system", available_systems(), SystemFileError)
        return _read(root, Path(name).parent)
    is_chip = spelling(name) in available_chips()
    chips = f"; {name} is a chip, and a system joins some" if is_chip else ""
    aliases = {system: _bundled(system).aliases for system in available_systems()}
    return _bundled(bundled_name(name, "system", aliases, UnknownSystemError, chips))


def available_systems() -> tuple[str, ...]:
    """The names of the bundled systems."""
    return tuple(bundled_files("systems"))


@functools.cache
def _bundled(name: str) -> System:
    file = bundled_files("systems")[name]
    return _read(FactTable.of_file(file, name, "system file", SystemFileError), None)


def _read(root: FactTable, folder: Path | None) -> System:
    values = root.values(
        {
            "name": root.text,
            "title": root.text,
            "chip": lambda key: _chip(root, folder),
            "aliases": root.texts,
            "power": partial(_inner_fact, root, unit="watt", needed=False),
            "level": partial(root.each, _level),
            "collective": partial(root.each, _collective),
            "exchange": partial(root.each, _exchange),
        },
        "sources",
    )
    many = {f"{key}s": values.pop(key) for key in ("level", "collective", "exchange")}
    system = System(**values, **many)
    mistakes = list(_mistakes(system, root.file))
    if mistakes:
        raise SystemFileError(*mistakes)
    return system


def _chip(root: FactTable, folder: Path | None) -> Chip:
    name = root.text("chip")
    place = folder / name if folder is not None and name.lower().endswith(".toml") else name
    try:
        return load_chip(place)
    except (LookupError, ValueError) as problem:
        raise root.error("chip", name, str(problem.args[0])) from None


def _level(table: FactTable) -> Level:
    few = partial(_inner_fact, table, unit="count", needed=False)
    values = table.values(
        {
            "name": table.text,
            "kind": partial(table.choice, allowed=LEVEL_KINDS),
            "size": partial(_whole, table, default=0),
            "bandwidth": partial(_inner_fact, table, unit="byte/s"),
            "latency": partial(_inner_fact, table, unit="second"),
            "nics": few,
            "rails": partial(_flag, table),
            "oversubscription": few,
        }
    )
    for key in ("bandwidth", "nics", "oversubscription"):
        if values[key] is not None and values[key].value <= 0:
            raise table.error(key, values[key].text, "expected more than 0")
    return Level(**values)


def _flag(table: FactTable, key: str) -> bool:
    value = table.rest.pop(key, False)
    if not isinstance(value, bool):
        raise table.error(key, value, "expected true or false")
    return value


def _inner_fact(table: FactTable, key: str, unit: str, needed: bool = True) -> Fact | None:
    """The fact in the inner table at `key`."""
    fact = table.inner_fact(key, unit)
    if fact is None and needed:
        raise SystemFileError(
            f"{table.file}: {table.place}: {key} is missing: expected "
            f'{{ value = "...", kind = "...", source = "..." }} in {unit}'
        )
    return fact


_LARGEST = 1 << 40
"""Chips, links or bytes: more of them is a slip."""


def _whole(table: FactTable, key: str, default: int | None = None) -> int:
    if key not in table.rest and default is not None:
        return default
    value = table.rest.pop(key, None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise table.error(key, "" if value is None else value, "expected a whole number above 0")
    return value


def _number(
    table: FactTable, key: str, low: float, high: float, default: float | None = None
) -> float:
    if key not in table.rest and default is not None:
        return default
    value = table.rest.pop(key, None)
    fits = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        expected = f"expected a number from {low:g} to {high:g}"
        raise table.error(key, "" if value is None else value, expected)
    return float(value)


def _seconds(table: FactTable, key: str) -> float:
    """Seconds that may be left out."""
    return table.quantity(key, "second")[0] if key in table.rest else 0.0


def _of_fits(table: FactTable) -> Readers:
    """The readers of constants that fits of both kinds have."""
    optional = partial(table.text, default="")
    return {
        "alpha": lambda key: table.quantity(key, "second")[0],
        "step": lambda key: table.quantity(key, "second")[0],
        "efficiency": partial(_number, table, low=1e-6, high=2.0),
        "p": partial(_number, table, low=0.2, high=20.0),
        "ranks": partial(_whole, table),
        "kind": partial(table.choice, allowed=KINDS),
        "source": lambda key: table.source(),
        "version": optional,
        "note": optional,
    }


def _collective(table: FactTable) -> CollectiveFit:
    readers: Readers = {
        "library": partial(table.choice, allowed=LIBRARIES),
        "op": partial(table.choice, allowed=tuple(COLLECTIVES)),
        "level": table.text,
        **_of_fits(table),
        "fall": partial(_number, table, low=-2.0, high=4.0, default=0.0),
        "direct": partial(_number, table, low=0.0, high=2.0, default=0.0),
        "turn": partial(_seconds, table),
        "nbytes": lambda key: table.quantity(key, "byte")[0],
    }
    return CollectiveFit(**table.values(readers))


def _exchange(table: FactTable) -> ExchangeFit:
    readers: Readers = {
        "mode": partial(table.choice, allowed=EXCHANGE_MODES),
        "way": partial(table.choice, allowed=EXCHANGE_WAYS),
        **_of_fits(table),
        "outer": partial(_number, table, low=0.0, high=2.0, default=0.0),
        **dict.fromkeys(("each", "size", "turn"), partial(_seconds, table)),
        "tokens": partial(_whole, table),
    }
    return ExchangeFit(**table.values(readers))


def _mistakes(system: System, file: str) -> Iterator[str]:
    """Contradictions between the tables of a file."""
    names = [level.name for level in system.levels]
    if not names:
        yield f"{file}: [[level]] is missing: expected what joins the chips, from the inside out"
    elif system.power is not None and not system.per_node:
        yield f"{file}: [power]: it is of the chips of {names[0]}: expected the size of {names[0]}"
    for number, level in enumerate(system.levels, start=1):
        if names.index(level.name) + 1 < number:
            yield f'{file}: [[level]] #{number}: name = "{level.name}" stands twice'
        if not level.size and number < len(names):
            yield f"{file}: [[level]] #{number}: size is missing: only the outermost may be open"
    keys = [(fit.library, fit.op, fit.level) for fit in system.collectives]
    for number, key in enumerate(keys, start=1):
        if key[2] not in names:
            expected = one_of(key[2], names)
            yield f'{file}: [[collective]] #{number}: level = "{key[2]}": {expected}'
        if keys.index(key) + 1 < number:
            first = keys.index(key) + 1
            said = f"({', '.join(key)}) stands already in [[collective]] #{first}"
            yield f"{file}: [[collective]] #{number}: {said}: expected it once"
    pairs = [(fit.mode, fit.way) for fit in system.exchanges]
    for number, pair in enumerate(pairs, start=1):
        if pairs.index(pair) + 1 < number:
            yield f"{file}: [[exchange]] #{number}: ({', '.join(pair)}) stands twice"


# -- writing ---------------------------------------------------------------------------------------

_UNITS = {
    "bandwidth": "byte/s",
    "latency": "second",
    "nics": "count",
    "oversubscription": "count",
}


def dump_system(system: System, path: str | os.PathLike[str] | None = None) -> str:
    """TOML text from which `load_system` builds the system again, also written to `path`.

    Constants are rounded to four digits.
    """
    head: dict[str, object] = {"name": system.name, "title": system.title}
    sections: list[tuple[str, Mapping[str, object]]] = [
        ("", {**head, "chip": system.chip.name, "aliases": system.aliases})
    ]
    if system.power is not None:
        watts = fact_rows(system.power, "value", "watt", "power", SystemFileError)
        sections.append(("[power]", watts))
    for level in system.levels:
        rows: dict[str, object] = {"name": level.name, "kind": level.kind}
        if level.size:
            rows["size"] = level.size
        for key, unit in _UNITS.items():
            fact: Fact | None = getattr(level, key)
            if fact is not None:
                place = f"level {level.name} {key}"
                rows[key] = fact_rows(fact, "value", unit, place, SystemFileError)
        if level.rails:
            rows["rails"] = True
        sections.append(("[[level]]", rows))
    sections += [("[[collective]]", collective_rows(fit)) for fit in system.collectives]
    sections += [("[[exchange]]", exchange_rows(fit)) for fit in system.exchanges]
    text = toml_sections(sections)
    if path is not None:
        write_bytes(Path(path), f"{TOML_MARK}{text}".encode())
    return text


def collective_rows(fit: CollectiveFit) -> dict[str, object]:
    """The keys of a [[collective]] table."""
    rows: dict[str, object] = {"library": fit.library, "op": fit.op, "level": fit.level}
    rows |= _constants(fit)
    if fit.fall:
        rows["fall"] = round(fit.fall, 3)
    if fit.direct:
        rows["direct"] = float(f"{fit.direct:.4g}")
        rows["turn"] = units.write(fit.turn, "second")
    rows |= {"ranks": fit.ranks, "nbytes": _buffer(fit.nbytes)}
    return rows | _origin(fit)


def exchange_rows(fit: ExchangeFit) -> dict[str, object]:
    """The keys of an [[exchange]] table."""
    rows: dict[str, object] = {"mode": fit.mode, "way": fit.way}
    rows |= _constants(fit)
    if fit.outer:
        rows["outer"] = float(f"{fit.outer:.4g}")
    for key in ("each", "size", "turn"):
        if getattr(fit, key):
            rows[key] = units.write(getattr(fit, key), "second")
    return rows | {"ranks": fit.ranks, "tokens": fit.tokens} | _origin(fit)


def _buffer(nbytes: float) -> str:
    """A size, in MiB where that is a whole number."""
    mebibytes, rest = divmod(nbytes, 1 << 20)
    return units.write(nbytes, "byte", 12) if rest else f"{mebibytes:.0f} MiB"


def _constants(fit: CollectiveFit | ExchangeFit) -> dict[str, object]:
    return {
        "alpha": units.write(fit.alpha, "second"),
        "step": units.write(fit.step, "second"),
        "efficiency": float(f"{fit.efficiency:.4g}"),
        "p": round(fit.p, 3),
    }


def _origin(fit: CollectiveFit | ExchangeFit) -> dict[str, object]:
    rows = {"kind": fit.kind, "source": fit.source, "version": fit.version, "note": fit.note}
    return {key: value for key, value in rows.items() if value}


# -- linting ---------------------------------------------------------------------------------------


def lint_system(path: str | os.PathLike[str]) -> list[Finding]:
    """Suspicious values in a system file: rates, sizes, names; if it does not load, its mistakes.

    `path` may also be the name of a bundled system.
    """
    try:
        system = load_system(path)
    except SystemFileError as error:
        return [Finding("error", "file", problem) for problem in error.problems]
    findings = [*_names(system, os.fspath(path)), *_rates(system), *_odd_constants(system)]
    for place, fact in system.facts():
        if fact.kind == "guess":
            findings.append(Finding("note", place, f"{fact.text} is a guess: {fact.source}"))
    for fit in system.collectives:
        if fit.kind == "guess":
            place = f"{fit.library} {fit.op} {fit.level}"
            findings.append(Finding("note", place, f"not measured: {fit.source}"))
    return findings


def _names(system: System, path: str) -> Iterator[Finding]:
    yield from lint_spelling(system.name, *system.aliases)
    if path.lower().endswith(".toml"):
        if Path(path).stem != system.name:
            message = (
                f'reports call this system "{system.name}"; ask for it by the path of its file'
            )
            yield Finding("note", "name", message)
        return
    for other in available_systems():
        bundled = _bundled(other)
        clash = {system.name, *system.aliases} & {bundled.name, *bundled.aliases}
        if clash and bundled is not system:
            yield Finding("error", "aliases", f'"{min(clash)}" is a name of {other} too')


def _rates(system: System) -> Iterator[Finding]:
    memory = system.chip.memory_bandwidth
    for level in system.levels:
        if level.bandwidth.value > memory.value:
            message = f"{level.bandwidth.text} is more than the memory's: is it of all chips?"
            yield Finding("warning", f"{level.name} bandwidth", message)
        if not 1e-7 <= level.latency.value <= 1e-2:
            message = f"{level.latency.text}: expected 0.1 us to 10 ms"
            yield Finding("warning", f"{level.name} latency", message)
        if level.kind == "fabric" and level.nics is None:
            message = "a fabric without `nics` gives each chip a card of its own"
            yield Finding("warning", f"{level.name} nics", message)
    for inner, outer in zip(system.levels, system.levels[1:], strict=False):
        chips = system.size_of(system.levels.index(inner))
        total = inner.bandwidth.value * chips
        if outer.rate_of(chips, chips) > total:
            has = units.format_bandwidth(outer.rate_of(chips, chips))
            message = f"{has} of a node, more than all of {inner.name}"
            yield Finding("warning", f"{outer.name} bandwidth", message)


def _odd_constants(system: System) -> Iterator[Finding]:
    for fit in system.collectives:
        place = f"{fit.library} {fit.op} {fit.level}"
        if fit.efficiency > 1:
            yield Finding("warning", place, f"{fit.efficiency:g} of the bandwidth of two ranks")
        if fit.alpha > 1e-3 or fit.step > 1e-3:
            yield Finding("warning", place, "a fixed time of more than a millisecond")
