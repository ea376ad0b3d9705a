"""What looks wrong in a system file that loads: rates, sizes and names that no system has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rooftrace.hardware import units
from rooftrace.hardware.facttables import Finding
from rooftrace.hardware.systems.reading import (
    SystemFileError,
    available_systems,
    load_system,
)
from rooftrace.hardware.systems.records import System


def lint_system(path: str | os.PathLike[str]) -> list[Finding]:
    """What looks wrong in a system file.  Of one that does not load: what keeps it from loading.

    `path` may also be the name of a bundled system.
    """
    try:
        system = load_system(path)
    except SystemFileError as error:
        return [Finding("error", "file", problem) for problem in error.problems]
    findings = [*_names(system, os.fspath(path)), *_rates(system), *_constants(system)]
    for place, fact in system.facts():
        if fact.kind == "guess":
            findings.append(Finding("note", place, f"{fact.text} is a guess: {fact.source}"))
    for fit in system.collectives:
        if fit.kind == "guess":
            place = f"{fit.library} {fit.op} {fit.level}"
            findings.append(Finding("note", place, f"not measured: {fit.source}"))
    return findings


def _names(system: System, path: str) -> Iterator[Finding]:
    for name in (system.name, *system.aliases):
        if name != name.lower() or not name or set(name) & set(" _/\\"):
            expected = 'expected lower case, with "-" between words: names are looked up that way'
            yield Finding("warning", "aliases", f'"{name}": {expected}')
    if path.lower().endswith(".toml"):
        if Path(path).stem != system.name:
            message = (
                f'reports call this system "{system.name}"; ask for it by the path of its file'
            )
            yield Finding("note", "name", message)
        return
    for other in available_systems():
        known = load_system(other)
        clash = {system.name, *system.aliases} & {known.name, *known.aliases}
        if clash and known is not system:
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
            has, of = units.format_bandwidth(outer.rate_of(chips, chips)), f"{inner.name}"
            message = f"{has} of a node, more than all of {of}"
            yield Finding("warning", f"{outer.name} bandwidth", message)


def _constants(system: System) -> Iterator[Finding]:
    for fit in system.collectives:
        place = f"{fit.library} {fit.op} {fit.level}"
        if fit.efficiency > 1:
            yield Finding("warning", place, f"{fit.efficiency:g} of the bandwidth of two ranks")
        if fit.alpha > 1e-3 or fit.step > 1e-3:
            yield Finding("warning", place, "a fixed time of more than a millisecond")
