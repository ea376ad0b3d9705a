"""Reads chips from TOML files: those that ship, by name or alias, and any other by its path.

name = "h200-sxm"

[sources]                        # long sources once; a fact then says source = "datasheet"
datasheet = "NVIDIA H200 Tensor Core GPU datasheet ..."

[memory_bandwidth]               # one section for each single fact (see `chip.FACT_UNITS`)
value = "4.8 TB/s"
kind = "datasheet"
source = "datasheet"

[[peak]]                         # one for each (engine, precision)
engine = "matrix"
precision = "bf16"
rate = "989.4 TFLOP/s"           # dense
quoted = "1979 TFLOP/s"          # the datasheet's 2:4-sparse headline, if it has one
kind = "datasheet"
source = "datasheet"
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast, get_args

from rooftrace._extensions import failures
from rooftrace.errors import hint
from rooftrace.hardware import units
from rooftrace.hardware.chip import (
    ENGINES,
    FACT_UNITS,
    Chip,
    ChipKind,
    Engine,
    Fact,
    Link,
    LinkName,
    Peak,
)
from rooftrace.hardware.chipfile.folders import chip_files
from rooftrace.hardware.chipfile.tables import SPARSE, ChipFileError, ChipTable, read_chip_file
from rooftrace.hardware.precisions import PrecisionError, compute_family


class UnknownChipError(LookupError):
    """A name that is no bundled chip."""


def load_chip(name_or_path: str | os.PathLike[str] | Chip) -> Chip:
    """A chip by name or alias ("h200"), by path (ending in .toml), or as it is."""
    if isinstance(name_or_path, Chip):
        return name_or_path
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise UnknownChipError(
            f"chip {name_or_path!r:.60}: expected one name, path or Chip, for example 'h200-sxm'"
        )
    name = os.fspath(name_or_path)
    if name.lower().endswith(".toml"):
        return _load_file(Path(name))
    key = _spelling(name)
    bundled = {_spelling(chip): chip for chip in available_chips()}
    if key in bundled:
        return _bundled(bundled[key])  # whatever stands in the other files
    names, unreadable = bundled_aliases()
    owners = names.get(key, ())
    if len(owners) > 1:
        raise ChipFileError(f'chip "{name}": an alias of {" and of ".join(owners)}; name one')
    if owners:
        return _bundled(owners[0])
    spellings = {name: name for name in available_chips()}
    spellings |= {alias: chips[0] for alias, chips in names.items()}
    skipped = f" (Not read for aliases: {', '.join(unreadable)}.)" if unreadable else ""
    skipped += "".join(f" ({failure}.)" for failure in failures("rooftrace.chips"))
    raise UnknownChipError(
        f'chip "{name}": expected a path ending in .toml or one of '
        f"{', '.join(available_chips())}{hint(key, spellings)}{skipped}"
    )


def _spelling(name: str) -> str:
    """A chip's name as it is compared: in lower case, with hyphens for blanks and underscores."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def available_chips() -> tuple[str, ...]:
    """The names of the bundled chips, and of those that third-party packages bring."""
    return tuple(sorted(chip_files()))


@functools.cache
def _bundled(name: str) -> Chip:
    file = f"{name}.toml"
    try:
        table = read_chip_file(chip_files()[name], file)
    except OSError as problem:
        raise ChipFileError(f"{file}: cannot be read: {problem}") from problem
    return _read(table, file)


@functools.cache
def bundled_aliases() -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The bundled chips that each alias means, and the files whose aliases cannot be read.

    It checks nothing else in a file, so a mistake in one chip's file cannot break another chip.
    """
    names: dict[str, tuple[str, ...]] = {}
    unreadable = []
    for name in available_chips():
        file = f"{name}.toml"
        try:
            table = read_chip_file(chip_files()[name], file)
        except (ChipFileError, OSError):
            unreadable.append(file)
            continue
        aliases = table.get("aliases", [])
        for alias in aliases if isinstance(aliases, list) else []:
            if isinstance(alias, str):
                names[_spelling(alias)] = (*names.get(_spelling(alias), ()), name)
    return names, tuple(unreadable)


def _load_file(path: Path) -> Chip:
    try:
        table = read_chip_file(path, path.name)
    except FileNotFoundError:
        raise ChipFileError(
            f'chip "{path}": no such file; expected a chip TOML, or one of the names '
            f"{', '.join(available_chips())}"
        ) from None
    except OSError as problem:
        raise ChipFileError(f'chip "{path}": cannot be read: {problem}') from problem
    return _read(table, path.name)


FACT_KEYS = ("value", "source", "kind", "note")
PEAK_KEYS = ("engine", "precision", "rate", "quoted", "source", "kind", "note")
LINK_KEYS = ("name", "bandwidth", "latency", "source", "kind", "note")
CHIP_KEYS = ("name", "title", "vendor", "kind", "aliases", "sources", "peak", "link", "measured")


def _read(table: dict[str, Any], file: str) -> Chip:
    sources = table.pop("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(item, str) for item in sources.values()):
        raise ChipFileError(f"{file}: [sources]: expected names with one text each")
    root = ChipTable(table, "", file, sources)
    name = root.text("name")
    title = root.text("title")
    vendor = root.text("vendor")
    kind = cast(ChipKind, root.choice("kind", get_args(ChipKind)))
    aliases = root.texts("aliases")
    facts = {key: _single_fact(root, key, unit) for key, unit in FACT_UNITS.items()}
    required = {item.name for item in fields(Chip) if item.default is MISSING}
    for key in FACT_UNITS:
        if facts[key] is None and key in required:
            raise ChipFileError(
                f"{file}: [{key}] is missing: expected a section with value "
                f'(for example "{units.EXAMPLES[FACT_UNITS[key]]}"), kind and source'
            )
    peaks = tuple(_peak(item) for item in root.tables("peak"))
    _no_duplicates(file, "peak", [f"({peak.engine}, {peak.precision})" for peak in peaks])
    links = tuple(_link(item) for item in root.tables("link"))
    _no_duplicates(file, "link", [link.name for link in links])
    measured = _measured(root)
    root.finish((*CHIP_KEYS, *FACT_UNITS))
    build = cast(Callable[..., Chip], Chip)
    return build(
        name=name,
        title=title,
        vendor=vendor,
        kind=kind,
        aliases=aliases,
        peaks=peaks,
        links=links,
        measured=measured,
        **facts,
    )


def _single_fact(root: ChipTable, key: str, unit: str) -> Fact | None:
    table = root.table(key)
    if table is None:
        return None
    fact = table.fact("value", unit)
    table.finish(FACT_KEYS)
    return fact


def _peak(table: ChipTable) -> Peak:
    engine = cast(Engine, table.choice("engine", ENGINES))
    precision = table.text("precision")
    try:
        family = compute_family(precision)
    except PrecisionError as problem:
        raise ChipFileError(f"{table.file}: {table.place}: {problem}") from problem
    if family != precision:
        raise table.error("precision", precision, f'expected the compute precision, "{family}"')
    quoted = _quoted(table)
    rate = table.fact("rate", "FLOP/s")
    table.finish(PEAK_KEYS)
    if rate.value <= 0:
        raise table.error("rate", rate.text, "expected a rate above 0; leave out what is not there")
    if isinstance(quoted, tuple):
        quoted = Fact(*quoted, rate.source, "datasheet", SPARSE)
    return Peak(engine, precision, rate, quoted)


def _quoted(table: ChipTable) -> Fact | tuple[float, str] | None:
    """The sparse headline: a text takes the source of the rate; a table stands for itself."""
    if "quoted" not in table.rest:
        return None
    if not isinstance(table.rest["quoted"], dict):
        return table.quantity("quoted", "FLOP/s")
    inner = table.table("quoted")
    if inner is None:
        return None
    fact = inner.fact("value", "FLOP/s")
    inner.finish(FACT_KEYS)
    return fact


def _link(table: ChipTable) -> Link:
    name = cast(LinkName, table.choice("name", get_args(LinkName)))
    inner = table.table("latency")
    latency = inner.fact("value", "second") if inner else None
    if inner:
        inner.finish(FACT_KEYS)
    bandwidth = table.fact("bandwidth", "byte/s")
    table.finish(LINK_KEYS)
    return Link(name, bandwidth, latency)


def _measured(root: ChipTable) -> dict[str, Fact]:
    block = root.table("measured")
    if block is None:
        return {}
    facts = {}
    for key in list(block.rest):
        inner = block.table(key)
        if inner is not None:
            facts[key] = inner.fact("value", None)
            inner.finish(FACT_KEYS)
    return facts


def _no_duplicates(file: str, what: str, keys: list[str]) -> None:
    for position, key in enumerate(keys):
        if key in keys[:position]:
            first = keys.index(key) + 1
            raise ChipFileError(
                f"{file}: [[{what}]] #{position + 1}: {key} stands already in [[{what}]] #{first}: "
                "expected it once"
            )
