"""Writes a chip as a TOML file that reads like those that ship: a section for each fact.

The text is made here and not by a library: this layer needs the standard library only, and a
library writes short tables of `[[peak]]` and `[[link]]` into one line.
"""

from __future__ import annotations

from collections.abc import Mapping

from rooftrace._escapes import toml_key
from rooftrace.hardware.chip import FACT_UNITS, Chip, Fact
from rooftrace.hardware.chipfile.reading import SPARSE, ChipFileError
from rooftrace.hardware.facttables import fact_rows as rows_of, toml_sections


def _fact_rows(fact: Fact, key: str, unit: str | None, place: str) -> dict[str, str]:
    return rows_of(fact, key, unit, place, ChipFileError)


def dump_chip(chip: Chip) -> str:
    """TOML text from which `load_chip` builds an equal chip."""
    head = {"name": chip.name, "title": chip.title, "vendor": chip.vendor, "kind": chip.kind}
    if chip.architecture:
        head["architecture"] = chip.architecture
    sections: list[tuple[str, Mapping[str, object]]] = [("", {**head, "aliases": chip.aliases})]
    for name, unit in FACT_UNITS.items():
        fact = getattr(chip, name)
        if fact is not None:
            sections.append((f"[{name}]", _fact_rows(fact, "value", unit, name)))
    for link in chip.links:
        place = f"link {link.name}"
        rows: dict[str, object] = {"name": link.name}
        rows.update(_fact_rows(link.bandwidth, "bandwidth", "byte/s", place))
        if link.latency is not None:
            rows["latency"] = _fact_rows(link.latency, "value", "second", place)
        sections.append(("[[link]]", rows))
    for peak in chip.peaks:
        place = f"peak ({peak.engine}, {peak.precision})"
        rows = {"engine": peak.engine, "precision": peak.precision}
        rows.update(_fact_rows(peak.rate, "rate", "FLOP/s", place))
        if peak.quoted is not None:
            quoted = _fact_rows(peak.quoted, "value", "FLOP/s", place)
            plain = (peak.quoted.source, peak.quoted.kind, peak.quoted.note)
            inherits = plain == (peak.rate.source, "datasheet", SPARSE)
            rows["quoted"] = peak.quoted.text if inherits else quoted
        sections.append(("[[peak]]", rows))
    for name, fact in chip.measured.items():
        key = f"[measured.{toml_key(name)}]"
        sections.append((key, _fact_rows(fact, "value", None, f"measured {name}")))
    return toml_sections(sections)
