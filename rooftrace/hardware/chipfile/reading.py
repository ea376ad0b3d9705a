"""Reads chips from TOML files by name, alias or path, finds those files, and writes chips as TOML.

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

The file of a host has `name`, one section for each of `HOST_FACTS`, and

[spread]                         # how far such hosts lie apart, relative standard deviation
value = "50 %"
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rooftrace._escapes import toml_key
from rooftrace._extensions import failures, load
from rooftrace.errors import Worded
from rooftrace.hardware import units
from rooftrace.hardware.chip import (
    ENGINES,
    FACT_UNITS,
    HOST_FACTS,
    Chip,
    ChipKind,
    Fact,
    Link,
    LinkName,
    Peak,
)
from rooftrace.hardware.chipfile.tables import (
    ORIGIN,
    FactFileError,
    FactTable,
    Problems,
    bundled_files,
    bundled_name,
    fact_rows,
    spelling,
    toml_sections,
)
from rooftrace.hardware.precisions import PrecisionError, compute_family

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


class ChipFileError(FactFileError):
    """A chip file that cannot be read as a chip.  `problems` has each of its mistakes."""


class UnknownChipError(LookupError, Worded):
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
        return _read(FactTable.of_user(Path(name), "chip", available_chips(), ChipFileError))
    owners = _owners(name)
    if len(owners) > 1:
        raise ChipFileError(f'chip "{name}": an alias of {" and of ".join(owners)}; name one')
    if owners:
        return _bundled(owners[0])
    unreadable = bundled_aliases()[1]
    skipped = f" (Not read for aliases: {', '.join(unreadable)}.)" if unreadable else ""
    skipped += "".join(f" ({failure}.)" for failure in failures("rooftrace.chips"))
    near = [repr(chip) for chip in relatives(name)]
    meant = f"did you mean {' or '.join(near)}? Else " if near else ""
    raise UnknownChipError(
        f'chip "{name:.60}": {meant}expected a path ending in .toml or one of '
        f"{', '.join(available_chips())}{skipped}"
    )


_MAKERS = ("nvidia-", "amd-", "geforce-", "instinct-", "tesla-")
"""Prefixes of names, as drivers and shops write them."""


def _owners(name: str) -> tuple[str, ...]:
    """The bundled chips of a name or alias, with or without who makes it; one as a rule."""
    key = spelling(name)
    bundled = {spelling(chip): chip for chip in available_chips()}
    if key in bundled:
        return (bundled[key],)  # whatever aliases the other files have
    aliases, _ = bundled_aliases()
    plain = key
    while start := next((maker for maker in _MAKERS if plain.startswith(maker)), ""):
        plain = plain.removeprefix(start)
    return aliases.get(key) or ((bundled[plain],) if plain in bundled else aliases.get(plain, ()))


def chips_called(device: str) -> tuple[str, ...]:
    """The names of the chips that a device may be, by the name that its driver reports.

    The chip of this name; else, for "NVIDIA A100-SXM-80GB", the chips of the model A100 that have
    most of its words ("sxm" and "80" begin two of them) and lack none: no bundled chip is an
    "H100 CNX".  "VF" ends the names of AMD's GPUs in virtual machines.
    """
    device = device.removesuffix(" VF")
    words = set(_words(device))
    scores = {
        name: score
        for name, score in _of_a_model(device, lambda model, word: model == word).items()
        if words <= {word for said in _names()[name] for word in _words(said)}
    }
    best = max(scores.values(), default=0)
    return _owners(device) or tuple(name for name, score in scores.items() if score == best)


MOST_RELATIVES = 6
"""Chips that an error names before the list of them all."""


def relatives(name: str) -> tuple[str, ...]:
    """The chips that someone who wrote `name` may have meant, the likeliest first."""
    same = _of_a_model(name, lambda model, word: model == word)
    like = same or _of_a_model(
        name, lambda model, word: model.startswith(word) or word.startswith(model)
    )
    if like:
        near = difflib.SequenceMatcher(None, b=spelling(name))

        def rank(chip: str) -> tuple[float, float]:
            near.set_seq1(spelling(chip))
            return like[chip], near.ratio()

        return tuple(sorted(like, key=rank, reverse=True)[:MOST_RELATIVES])
    spellings = {chip: chip for chip in available_chips()}
    spellings |= {alias: chips[0] for alias, chips in bundled_aliases()[0].items()}
    close = difflib.get_close_matches(spelling(name), spellings, n=3)
    return tuple(dict.fromkeys(spellings[each] for each in close))


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _names() -> dict[str, list[str]]:
    """Every bundled chip with its name and its aliases."""
    names = {chip: [chip] for chip in available_chips()}
    for alias, chips in bundled_aliases()[0].items():
        for chip in chips:
            names[chip].append(alias)
    return names


def _of_a_model(device: str, fits: Callable[[str, str], bool]) -> dict[str, float]:
    """The share of each chip's name that a device's has, for chips whose model fits a word of it.

    The model is the first word with a digit, of the name or of an alias: h100 of h100-sxm.
    """
    words = _words(device)
    models = [word for word in words if any(map(str.isdigit, word))]
    scores: dict[str, float] = {}
    for chip, names in _names().items():
        for name in names:
            parts = _words(name)
            model = next((part for part in parts if any(map(str.isdigit, part))), "")
            if len(model) > 1 and any(fits(model, word) for word in models):
                shared = sum(any(word.startswith(part) for word in words) for part in parts)
                share = shared / len(parts) if name == chip else 0.0
                scores[chip] = max(scores.get(chip, 0.0), share)
    return scores


def available_chips() -> tuple[str, ...]:
    """The names of the bundled chips, and of chips from third-party packages."""
    return tuple(sorted(chip_files()))


@functools.cache
def _bundled(name: str) -> Chip:
    file = f"{name}.toml"
    try:
        table = _root(chip_files()[name], file)
    except OSError as problem:
        raise ChipFileError(f"{file}: cannot be read: {problem}") from problem
    return _read(table)


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
            table = _root(chip_files()[name], file)
        except (ChipFileError, OSError):
            unreadable.append(file)
            continue
        aliases = table.rest.get("aliases", [])
        for alias in aliases if isinstance(aliases, list) else []:
            if isinstance(alias, str):
                names[spelling(alias)] = (*names.get(spelling(alias), ()), name)
    return names, tuple(unreadable)


SPARSE = "with 2:4 sparsity"
REQUIRED = frozenset(
    item.name for item in fields(Chip) if item.default is MISSING and item.name not in HOST_FACTS
)


def _root(path: Path | Traversable, file: str) -> FactTable:
    return FactTable.of_file(path, file, "chip file", ChipFileError)


def _read(root: FactTable) -> Chip:
    values = root.values(
        {
            **dict.fromkeys(("name", "title", "vendor"), root.text),
            "kind": partial(root.choice, allowed=get_args(ChipKind)),
            "architecture": partial(_architecture, root),
            "aliases": root.texts,
            **dict.fromkeys(FACT_UNITS, partial(_single_fact, root)),
            "peak": partial(root.each, _peak),
            "link": partial(root.each, _link),
            "measured": partial(_measured, root),
        },
        "sources",
    )
    peaks, links = (values.pop(key) for key in ("peak", "link"))
    _no_duplicates(root.file, "peak", [f"({peak.engine}, {peak.precision})" for peak in peaks])
    _no_duplicates(root.file, "link", [link.name for link in links])
    stated = {name: value for name, value in values.items() if value is not None}
    hosts = host_facts({name: stated[name] for name in HOST_FACTS if name in stated})
    return Chip(**{**stated, **hosts, "peaks": peaks, "links": links})


def _architecture(root: FactTable, key: str) -> str:
    text = root.text(key, "")
    if text and not re.fullmatch(r"sm_\d{2,3}|gfx\d{2,3}[0-9a-f]", text):
        raise root.error(key, text, "expected sm_90 and its like, gfx942, or none")
    return text


_ABOVE_ZERO = frozenset(
    {"memory_capacity", "memory_bandwidth", "sustained_compute", "sustained_memory"}
)
"""Facts that other numbers are divided by."""


def _single_fact(root: FactTable, key: str) -> Fact | None:
    table, unit = root.table(key), FACT_UNITS[key]
    if table is not None:
        fact = table.whole_fact(unit)
        if key in _ABOVE_ZERO and fact.value <= 0:
            raise table.error("value", fact.text, "expected more than 0")
        return fact
    if key in REQUIRED:
        raise ChipFileError(
            f"{root.file}: [{key}] is missing: expected a section with value "
            f'(for example "{units.EXAMPLES[unit]}"), kind and source'
        )
    return None


def _peak(table: FactTable) -> Peak:
    values = table.values(
        {
            "engine": partial(table.choice, allowed=ENGINES),
            "precision": partial(_precision, table),
            "rate": partial(table.fact, unit="FLOP/s"),
            "quoted": partial(_quoted, table),
        },
        *ORIGIN,
    )
    rate, quoted = values["rate"], values["quoted"]
    if rate.value <= 0:
        raise table.error("rate", rate.text, "expected a rate above 0; leave out what is not there")
    if isinstance(quoted, tuple):
        number, text = quoted
        values["quoted"] = Fact(number, text, rate.source, "datasheet", SPARSE)
    return Peak(**values)


def _precision(table: FactTable, key: str) -> str:
    precision = table.text(key)
    try:
        family = compute_family(precision)
    except PrecisionError as problem:
        raise ChipFileError(f"{table.file}: {table.place}: {problem}") from problem
    if family != precision:
        raise table.error(key, precision, f'expected the compute precision, "{family}"')
    return precision


def _quoted(table: FactTable, key: str) -> Fact | tuple[float, str] | None:
    """The sparse headline: a text takes the source of the rate; a table stands for itself."""
    if isinstance(table.rest.get(key, {}), dict):
        return table.inner_fact(key, "FLOP/s")
    return table.quantity(key, "FLOP/s")


def _link(table: FactTable) -> Link:
    readers: Mapping[str, Callable[[str], object]] = {
        "name": partial(table.choice, allowed=get_args(LinkName)),
        "bandwidth": partial(table.fact, unit="byte/s"),
        "latency": partial(table.inner_fact, unit="second"),
    }
    return Link(**table.values(readers, *ORIGIN))


def _measured(root: FactTable, key: str) -> dict[str, Fact]:
    block = root.table(key)
    if block is None:
        return {}
    return block.values(dict.fromkeys(block.rest, partial(block.inner_fact, unit=None)))


def _no_duplicates(file: str, table: str, keys: list[str]) -> None:
    for position, key in enumerate(keys):
        if key in keys[:position]:
            first = keys.index(key) + 1
            raise ChipFileError(
                f"{file}: [[{table}]] #{position + 1}: {key} stands already in [[{table}]] "
                f"#{first}: expected it once"
            )


@functools.cache
def chip_files() -> Mapping[str, Traversable]:
    """Chip files by name: bundled ones first, then those in folders of third-party packages."""
    brought = (resources.files(package) for _, package in load("rooftrace.chips"))
    files: dict[str, Traversable] = {}
    for folder in (resources.files("rooftrace.hardware").joinpath("chips"), *brought):
        for item in folder.iterdir():
            if item.name.endswith(".toml"):
                files.setdefault(item.name.removesuffix(".toml"), item)
    return files


def dump_chip(chip: Chip) -> str:
    """TOML text from which `load_chip` builds an equal chip."""
    rows_of = partial(fact_rows, failure=ChipFileError)
    head = {"name": chip.name, "title": chip.title, "vendor": chip.vendor, "kind": chip.kind}
    if chip.architecture:
        head["architecture"] = chip.architecture
    sections: list[tuple[str, Mapping[str, object]]] = [("", {**head, "aliases": chip.aliases})]
    for name, unit in FACT_UNITS.items():
        fact = getattr(chip, name)
        if fact is not None:
            sections.append((f"[{name}]", rows_of(fact, "value", unit, name)))
    for link in chip.links:
        place = f"link {link.name}"
        rows: dict[str, object] = {"name": link.name}
        rows.update(rows_of(link.bandwidth, "bandwidth", "byte/s", place))
        if link.latency is not None:
            rows["latency"] = rows_of(link.latency, "value", "second", place)
        sections.append(("[[link]]", rows))
    for peak in chip.peaks:
        place = f"peak ({peak.engine}, {peak.precision})"
        rows = {"engine": peak.engine, "precision": peak.precision}
        rows.update(rows_of(peak.rate, "rate", "FLOP/s", place))
        if peak.quoted is not None:
            quoted = rows_of(peak.quoted, "value", "FLOP/s", place)
            plain = (peak.quoted.source, peak.quoted.kind, peak.quoted.note)
            inherits = plain == (peak.rate.source, "datasheet", SPARSE)
            rows["quoted"] = peak.quoted.text if inherits else quoted
        sections.append(("[[peak]]", rows))
    for name, fact in chip.measured.items():
        key = f"[measured.{toml_key(name)}]"
        sections.append((key, rows_of(fact, "value", None, f"measured {name}")))
    return toml_sections(sections)


# -- hosts of chips, from files of their own -------------------------------------------------------

TYPICAL_HOST = "typical"
_HOST_KEYS = ("name", "title", "aliases", "sources", "spread", *HOST_FACTS)


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
        return _read_host(root)
    aliases = {host: bundled_host(host).aliases for host in available_hosts()}
    return bundled_host(bundled_name(name, "host", aliases, UnknownHostError, ""))


def available_hosts() -> tuple[str, ...]:
    """The names of the bundled hosts."""
    return tuple(bundled_files("hosts"))


@functools.cache
def bundled_host(name: str) -> Host:
    """The bundled host of this name."""
    file = f"{name}.toml"
    return _read_host(
        FactTable.of_file(bundled_files("hosts")[name], file, "host file", HostFileError)
    )


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


def _read_host(root: FactTable) -> Host:
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
        problems.of(root.finish, _HOST_KEYS)
    problems.raise_any()
    if name != TYPICAL_HOST:
        facts = host_facts(facts)
    return Host(name=name, title=title, facts=facts, spread=spread, aliases=aliases)
