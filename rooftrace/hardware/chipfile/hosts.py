"""The host of a chip: what its CPU, driver and Python take to enqueue work, from TOML files.

name = "typical"

[dispatch_eager]                 # one section for each of `HOST_FACTS`
value = "8 us"
kind = "derived"
source = "..."

[spread]                         # how far such hosts lie apart, relative standard deviation
value = "50 %"
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rooftrace.hardware import units
from rooftrace.hardware.chip import FACT_UNITS, HOST_FACTS, Chip, Fact
from rooftrace.hardware.chipfile.tables import (
    FactFileError,
    FactTable,
    Problems,
    bundled_files,
    bundled_name,
)

TYPICAL_HOST = "typical"
_KEYS = ("name", "title", "aliases", "sources", "spread", *HOST_FACTS)


class HostFileError(FactFileError):
    """A host file that cannot be read as a host.  `problems` has each of its mistakes."""


class UnknownHostError(LookupError):
    """A name that is no bundled host."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Host:
    """Seconds that a host takes to enqueue work on its chips."""

    name: str
    title: str
    facts: Mapping[str, Fact]  # second, by the names of `HOST_FACTS`
    spread: Fact | None = None  # of such hosts: relative standard deviation; None: unknown
    aliases: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Host({self.name}: {self.title})"

    def under(self, chip: Chip) -> Chip:
        """The chip in a machine with this host."""
        return replace(chip.with_facts(self.facts), host_spread=self.spread)


def load_host(name_or_path: str | os.PathLike[str] | Host) -> Host:
    """A host by name or alias ("typical"), by path (ending in .toml), or as it is.

    The file of a chip that `rooftrace measure --chip-only` wrote is read for the host's facts in
    it.  Raises UnknownHostError and HostFileError.
    """
    if isinstance(name_or_path, Host):
        return name_or_path
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise UnknownHostError(
            f"host {name_or_path!r:.60}: expected a name, path or Host, such as {TYPICAL_HOST!r}"
        )
    name = os.fspath(name_or_path)
    if name.lower().endswith(".toml"):
        root = FactTable.of_user(Path(name), "host", available_hosts(), HostFileError)
        return _read(root)
    aliases = {host: bundled_host(host).aliases for host in available_hosts()}
    return bundled_host(bundled_name(name, "host", aliases, UnknownHostError, ""))


def available_hosts() -> tuple[str, ...]:
    """The names of the bundled hosts."""
    return tuple(bundled_files("hosts"))


@functools.cache
def bundled_host(name: str) -> Host:
    """The bundled host of this name."""
    file = f"{name}.toml"
    return _read(FactTable.of_file(bundled_files("hosts")[name], file, "host file", HostFileError))


_OF_PYTHON = ("dispatch_view", "module_call")
"""Facts that are at the pace of `dispatch_eager`: one core runs them all."""


def host_facts(stated: Mapping[str, Fact]) -> dict[str, Fact]:
    """Every fact of a host, the typical ones where a file states none.

    Views and calls of modules are then at the pace of the dispatch that it states.
    """
    usual = bundled_host(TYPICAL_HOST).facts
    facts = {**usual, **stated}
    pace = facts["dispatch_eager"].value / usual["dispatch_eager"].value
    for name in _OF_PYTHON if pace != 1 else ():
        if name not in stated:
            text = units.write(pace * usual[name].value, "second")
            source = "that of a typical server, at the pace of dispatch_eager here"
            facts[name] = Fact.of(text, "second", source, "derived")
    return facts


def host_spread_of(chip: Chip) -> float:
    """How far hosts like that of a chip lie apart, relative standard deviation.

    That of the host that was named, or else 0 where `dispatch_eager` was measured, or else typical.
    """
    if chip.host_spread is None and chip.dispatch_eager.kind == "measured":
        return 0.0
    usual = chip.host_spread or bundled_host(TYPICAL_HOST).spread
    return usual.value if usual else 0.0


def _read(root: FactTable) -> Host:
    """The host of a file, or of a chip's file, whose other facts are not read."""
    problems = Problems()
    of_chip = "vendor" in root.rest
    name, title = (problems.of(root.text, key) for key in ("name", "title"))
    aliases = problems.of(root.texts, "aliases")
    facts, spread = {}, None
    for key in (*HOST_FACTS, "spread"):
        table = problems.of(root.table, key)
        fact = table and problems.of(table.whole_fact, FACT_UNITS.get(key, "share"))
        if table and fact and fact.value < 0:
            problems.of(table.refuse, "value", fact.text, "expected 0 or more")
        if fact and key == "spread":
            spread = fact
        elif fact:
            facts[key] = fact
    if not of_chip:
        problems.of(root.finish, _KEYS)
    problems.raise_any()
    if name != TYPICAL_HOST:
        facts = host_facts(facts)
    return Host(name=name, title=title, facts=facts, spread=spread, aliases=aliases)
