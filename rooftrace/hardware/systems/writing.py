"""Writes a system as a TOML file that reads like those that ship."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rooftrace._outputs import TOML_MARK
from rooftrace._writing import write_bytes
from rooftrace.hardware import units
from rooftrace.hardware.chip import Fact
from rooftrace.hardware.facttables import fact_rows, toml_sections
from rooftrace.hardware.systems.reading import SystemFileError
from rooftrace.hardware.systems.records import CollectiveFit, ExchangeFit, System

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
    """A size, in MiB where it is a whole number of them."""
    whole, rest = divmod(nbytes, 1 << 20)
    return units.write(nbytes, "byte", 12) if rest else f"{whole:.0f} MiB"


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
