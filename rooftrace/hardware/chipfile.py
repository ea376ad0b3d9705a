"""Knows how chips stand in TOML files: loads, checks and writes them; knows no number itself.

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
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rooftrace.errors import hint
from rooftrace.hardware import units
from rooftrace.hardware.chip import (
    ENGINES,
    FACT_UNITS,
    KINDS,
    Chip,
    ChipKind,
    Engine,
    Fact,
    FactKind,
    Link,
    LinkName,
    Peak,
)
from rooftrace.hardware.precisions import PrecisionError, compute_family

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "ChipFileError",
    "Finding",
    "Severity",
    "UnknownChipError",
    "available_chips",
    "dump_chip",
    "lint_chip",
    "load_chip",
    "write_chip",
]

CHIPS = "rooftrace.hardware"
Severity = Literal["error", "warning", "note"]


class ChipFileError(ValueError):
    """A chip file that cannot be read as a chip."""


class UnknownChipError(LookupError):
    """A name that is no bundled chip."""


@dataclass(frozen=True)
class Finding:
    """One remark of `lint_chip`. A note asks for nothing; a warning wants a second look."""

    severity: Severity
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.field}: {self.message}"


# Loading


def load_chip(name_or_path: str | os.PathLike[str] | Chip) -> Chip:
    """A chip by name or alias ("h200"), by path (ending in .toml), or as it is."""
    if isinstance(name_or_path, Chip):
        return name_or_path
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise UnknownChipError(
            f"chip {name_or_path!r:.60}: expected one name, path or Chip, for example 'h200-sxm'"
        )
    given = os.fspath(name_or_path)
    if given.lower().endswith(".toml"):
        return _load_file(Path(given))
    key = _spelling(given)
    bundled = {_spelling(name): name for name in available_chips()}
    if key in bundled:
        return _bundled(bundled[key])  # whatever stands in the other files
    names, unreadable = _aliases()
    owners = names.get(key, ())
    if len(owners) > 1:
        raise ChipFileError(f'chip "{given}": an alias of {" and of ".join(owners)}; name one')
    if owners:
        return _bundled(owners[0])
    spellings = {name: name for name in available_chips()}
    spellings |= {alias: chips[0] for alias, chips in names.items()}
    skipped = f" (Not read for aliases: {', '.join(unreadable)}.)" if unreadable else ""
    raise UnknownChipError(
        f'chip "{given}": expected a path ending in .toml or one of '
        f"{', '.join(available_chips())}{hint(key, spellings)}{skipped}"
    )


def _spelling(name: str) -> str:
    """A name of a chip as it is compared: case, blanks and underscores make no difference."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _folder() -> Traversable:
    """Where the bundled chips lie."""
    return resources.files(CHIPS).joinpath("chips")


@functools.cache
def available_chips() -> tuple[str, ...]:
    """The names of the bundled chips."""
    files = (item.name for item in _folder().iterdir() if item.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in files))


@functools.cache
def _bundled(name: str) -> Chip:
    file = f"{name}.toml"
    try:
        text = _folder().joinpath(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ChipFileError(f"{file}: cannot be read: {problem}") from problem
    return _read(text, file)


@functools.cache
def _aliases() -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """The bundled chips that each alias means, and files that cannot be read for theirs.

    Nothing else in a file is looked at, so that a mistake in one chip is none of another's.
    """
    names: dict[str, tuple[str, ...]] = {}
    unreadable = []
    for name in available_chips():
        file = f"{name}.toml"
        try:
            table = _toml(_folder().joinpath(file).read_text(encoding="utf-8"), file)
        except (ChipFileError, OSError, UnicodeDecodeError):
            unreadable.append(file)
            continue
        aliases = table.get("aliases", [])
        for alias in aliases if isinstance(aliases, list) else []:
            if isinstance(alias, str):
                names[_spelling(alias)] = (*names.get(_spelling(alias), ()), name)
    return names, tuple(unreadable)


def _load_file(path: Path) -> Chip:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ChipFileError(
            f'chip "{path}": no such file; expected a chip TOML, or one of the names '
            f"{', '.join(available_chips())}"
        ) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ChipFileError(f'chip "{path}": cannot be read: {problem}') from problem
    return _read(text, path.name)


def _toml(text: str, file: str) -> dict[str, Any]:
    # Imported here, so that importing the package stays cheap.
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml
    try:
        loaded: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as problem:
        raise ChipFileError(f"{file}: not valid TOML: {problem}") from problem
    return loaded


class _Table:
    """One TOML table: hands out its keys, knows where it stands, and complains of leftovers."""

    def __init__(self, table: object, place: str, file: str, sources: Mapping[str, str]) -> None:
        self.place = place
        self.file = file
        self.sources = sources
        if not isinstance(table, dict):
            raise ChipFileError(f"{self._where()}expected a table, found {_toml_value(table)}")
        self.rest = dict(table)

    def _where(self, key: str = "") -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{self.file}: {place}{key}"

    def error(self, key: str, value: object, expected: str) -> ChipFileError:
        return ChipFileError(f"{self._where(key)} = {_toml_value(value)}: {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        if key not in self.rest:
            if default is not None:
                return default
            raise ChipFileError(f"{self._where()}{key} is missing: expected a text")
        value = self.rest.pop(key)
        if not isinstance(value, str) or not (value.strip() or default is not None):
            raise self.error(key, value, "expected a text")
        return value

    def choice(self, key: str, allowed: Iterable[str]) -> str:
        value = self.text(key)
        if value not in allowed:
            raise self.error(key, value, f"expected one of {', '.join(allowed)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.rest.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, value, "expected a list of texts")
        return tuple(value)

    def tables(self, key: str) -> Iterator[_Table]:
        value = self.rest.pop(key, [])
        if not isinstance(value, list):
            raise self.error(key, value, f"expected [[{key}]] tables")
        for number, item in enumerate(value, start=1):
            yield _Table(item, f"[[{key}]] #{number}", self.file, self.sources)

    def table(self, key: str) -> _Table | None:
        if key not in self.rest:
            return None
        inside = not self.place
        place = f"[{key}]" if inside else f"{self.place}: {key}"
        return _Table(self.rest.pop(key), place, self.file, self.sources)

    def quantity(self, key: str, unit: str | None) -> tuple[float, str]:
        """The SI value and the text of a quantity; `unit` None takes whatever unit stands there."""
        if key not in self.rest:
            example = f', for example "{units.EXAMPLES[unit]}"' if unit else ""
            expected = f"a quantity in {unit}" if unit else "a quantity"
            raise ChipFileError(f"{self._where()}{key} is missing: expected {expected}{example}")
        value = self.rest.pop(key)
        if unit == "count" and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            example = units.EXAMPLES[unit] if unit else units.EXAMPLES["byte/s"]
            raise self.error(key, value, f'expected a text with a unit, for example "{example}"')
        try:
            return (units.parse(value, unit), value) if unit else (units.parse_any(value)[0], value)
        except units.UnitError as problem:
            raise ChipFileError(f"{self._where(key)} = {problem}") from problem

    def source(self) -> str:
        if "source" not in self.rest:
            raise ChipFileError(
                f"{self._where()}source is missing: a number without a source does not load; "
                "say which document or measurement it comes from"
            )
        value = self.text("source")
        if value in self.sources:
            return self.sources[value]
        if " " not in value.strip():
            known = ", ".join(self.sources) or "nothing"
            expected = f"expected a sentence, or a key of [sources], which has: {known}"
            raise self.error("source", value, expected)
        return value

    def fact(self, key: str, unit: str | None) -> Fact:
        """The fact whose quantity stands at `key`, with source, kind and note beside it."""
        value, text = self.quantity(key, unit)
        source = self.source()
        kind = cast(FactKind, self.choice("kind", KINDS))
        return Fact(value, text, source, kind, self.text("note", ""))

    def finish(self, allowed: Iterable[str]) -> None:
        """Complain of the first key that nobody asked for."""
        for key in self.rest:
            raise ChipFileError(
                f"{self._where()}unknown key {key}: expected one of {', '.join(allowed)}"
                f"{hint(key, list(allowed))}"
            )


FACT_KEYS = ("value", "source", "kind", "note")
PEAK_KEYS = ("engine", "precision", "rate", "quoted", "source", "kind", "note")
LINK_KEYS = ("name", "bandwidth", "latency", "source", "kind", "note")
CHIP_KEYS = ("name", "title", "vendor", "kind", "aliases", "sources", "peak", "link", "measured")


def _read(text: str, file: str) -> Chip:
    table = _toml(text, file)
    sources = table.pop("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(item, str) for item in sources.values()):
        raise ChipFileError(f"{file}: [sources]: expected names with one text each")
    root = _Table(table, "", file, sources)
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


def _single_fact(root: _Table, key: str, unit: str) -> Fact | None:
    table = root.table(key)
    if table is None:
        return None
    fact = table.fact("value", unit)
    table.finish(FACT_KEYS)
    return fact


def _peak(table: _Table) -> Peak:
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


SPARSE = "with 2:4 sparsity"


def _quoted(table: _Table) -> Fact | tuple[float, str] | None:
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


def _link(table: _Table) -> Link:
    name = cast(LinkName, table.choice("name", get_args(LinkName)))
    inner = table.table("latency")
    latency = inner.fact("value", "second") if inner else None
    if inner:
        inner.finish(FACT_KEYS)
    bandwidth = table.fact("bandwidth", "byte/s")
    table.finish(LINK_KEYS)
    return Link(name, bandwidth, latency)


def _measured(root: _Table) -> dict[str, Fact]:
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


# Writing


def _toml_value(value: object) -> str:
    """`value` as TOML would write it."""
    if isinstance(value, str):
        # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items())
        return f"{{ {inside} }}"
    return str(value)


def _toml_key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _toml_value(key)


def _fact_rows(fact: Fact, key: str, unit: str | None, place: str) -> dict[str, str]:
    """The keys of a fact; refuses a text that would not read back as the value."""
    value = units.parse(fact.text, unit) if unit else units.parse_any(fact.text)[0]
    if value != fact.value:
        raise ChipFileError(
            f"{place}: text {_toml_value(fact.text)} is {value!r}, but the value is "
            f"{fact.value!r}: expected a text that says the value (see Fact.of and units.write)"
        )
    rows = {key: fact.text, "kind": fact.kind, "source": fact.source}
    return {**rows, "note": fact.note} if fact.note else rows


def dump_chip(chip: Chip) -> str:
    """TOML text from which `load_chip` builds an equal chip."""
    head = {"name": chip.name, "title": chip.title, "vendor": chip.vendor, "kind": chip.kind}
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
        key = f"[measured.{_toml_key(name)}]"
        sections.append((key, _fact_rows(fact, "value", None, f"measured {name}")))
    return "\n".join(
        "".join(
            [f"{title}\n" if title else ""]
            + [f"{key} = {_toml_value(value)}\n" for key, value in rows.items()]
        )
        for title, rows in sections
    )


def write_chip(chip: Chip, path: str | os.PathLike[str]) -> None:
    """Write `chip` as TOML; a reader sees the old file or the whole new one, never a part."""
    text = dump_chip(chip)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


# Linting


def lint_chip(path: str | os.PathLike[str]) -> list[Finding]:
    """What looks wrong in a chip file. A file that does not load is one error, and nothing else.

    `path` may also be the name of a bundled chip.
    """
    try:
        chip = load_chip(path)
    except ChipFileError as problem:
        return [Finding("error", "file", str(problem))]
    findings = [finding for check in CHECKS for finding in check(chip)]
    bundled = not os.fspath(path).lower().endswith(".toml")
    if bundled and os.fspath(path) in available_chips() and os.fspath(path) != chip.name:
        message = f'"{chip.name}" stands in {path}.toml: a chip is found by the name of its file'
        findings.append(Finding("error", "name", message))
    own = os.fspath(path) if bundled else chip.name
    findings += _clashes(chip, own, "error" if bundled else "note")
    if os.fspath(path).lower().endswith(".toml") and Path(path).stem != chip.name:
        message = f'"{chip.name}" stands in {Path(path).name}: the file is found by its name'
        findings.append(Finding("note", "name", message))
    for place, fact in chip.facts():
        if fact.kind == "guess":
            findings.append(Finding("note", place, f"{fact.text} is a guess: {fact.source}"))
    return findings


def _clashes(chip: Chip, own: str, severity: Severity) -> Iterator[Finding]:
    """Names of this chip that mean another bundled one too.  own: the name of its file."""
    names, _ = _aliases()
    for alias in dict.fromkeys((chip.name, *chip.aliases)):
        owners = [alias] if alias in available_chips() else []
        others = [name for name in (*owners, *names.get(alias, ())) if name != own]
        for other in dict.fromkeys(others):
            message = f'"{alias}" is {"the name" if other == alias else "an alias"} of {other} too'
            yield Finding(severity, "aliases", f"{message} ({other}.toml)")
    for alias in chip.aliases:
        if chip.aliases.count(alias) > 1:
            yield Finding("warning", "aliases", f'"{alias}" is there twice')
            return


def _lint_names(chip: Chip) -> Iterator[Finding]:
    for name in (chip.name, *chip.aliases):
        if name != name.lower() or not name or set(name) & set(" _/\\"):
            expected = 'expected lower case, with "-" between words: names are looked up that way'
            yield Finding("warning", "aliases", f'"{name}": {expected}')
    if not chip.peaks:
        yield Finding("warning", "peak", "there is none: nothing can be priced on this chip")
    elif not chip.has_peak("vector", "fp32"):
        message = "vector fp32 is missing: elementwise work computes in it"
        yield Finding("warning", "peak", message)


def _lint_sparsity(chip: Chip) -> Iterator[Finding]:
    for peak in chip.peaks:
        if peak.quoted is None:
            continue
        place = f"{peak.engine} {peak.precision}"
        ratio = peak.quoted.value / peak.rate.value
        if ratio < 1.05:
            message = (
                f"rate {peak.rate.text} equals the quoted {peak.quoted.text}: the dense rate is "
                "expected, half of what counts on 2:4 sparsity"
            )
            yield Finding("warning", place, message)
        elif not 1.9 <= ratio <= 2.1:
            message = (
                f"quoted {peak.quoted.text} is {ratio:.2f} x the rate {peak.rate.text}: "
                "2:4 sparsity gives 2 x"
            )
            yield Finding("warning", place, message)


# precision -> how often the bf16 rate it may be. GeForce cards halve bf16 with fp32 accumulation,
# so that their int8 and fp4 are 4 x and 8 x. Ada's data-center sheets list int4 at the int8 rate.
RATIOS: Mapping[str, tuple[float, ...]] = {
    "fp16": (1,),
    "tf32": (0.5,),
    "fp8": (2,),
    "fp6": (2, 4),
    "int8": (2, 4),
    "fp4": (4, 8),
    "int4": (2, 4, 8),
}


def _lint_ratios(chip: Chip) -> Iterator[Finding]:
    """Datasheet rates of one engine stand in ratios of two; a sparse rate among them does not."""
    base = chip.find_peak("matrix", "bf16")
    if base is None or base.rate.kind == "measured":
        return
    for precision, allowed in RATIOS.items():
        peak = chip.find_peak("matrix", precision)
        if peak is None or peak.rate.kind == "measured":
            continue
        ratio = peak.rate.value / base.rate.value
        if not any(abs(ratio / expected - 1) <= 0.05 for expected in allowed):
            wanted = " or ".join(f"{expected:g}" for expected in allowed)
            message = (
                f"{peak.rate.text} is {ratio:.2f} x bf16 ({base.rate.text}), expected {wanted} x: "
                "is one of them a 2:4-sparse rate?"
            )
            yield Finding("warning", f"matrix {precision}", message)


def _lint_arithmetic(chip: Chip) -> Iterator[Finding]:
    """vector fp32 = SMs x lanes x 2 x clock, with 64 lanes (A100) or 128."""
    peak = chip.find_peak("vector", "fp32")
    if chip.kind != "gpu" or peak is None or peak.rate.kind == "measured":
        return
    if chip.sm_count is None or chip.clock is None:
        return
    lanes = peak.rate.value / (chip.sm_count.value * 2 * chip.clock.value)
    if not any(abs(lanes / expected - 1) <= 0.02 for expected in (64, 128)):
        message = (
            f"{peak.rate.text} needs {lanes:.1f} lanes in each of {chip.sm_count.text} SMs at "
            f"{chip.clock.text}: expected 64 or 128"
        )
        yield Finding("warning", "vector fp32", message)


def _lint_memory(chip: Chip) -> Iterator[Finding]:
    text = chip.memory_capacity.text
    if chip.memory_capacity.kind == "datasheet" and not text.rstrip().endswith("iB"):
        message = (
            f'"{text}" is read as decimal: memory comes in powers of two, so the datasheet\'s GB '
            f'is most likely GiB; write "{text.split()[0]} GiB", or what the driver reports'
        )
        yield Finding("warning", "memory_capacity", message)
    if chip.l2_capacity is not None and chip.l2_capacity.value > chip.memory_capacity.value / 10:
        message = f"{chip.l2_capacity.text} of cache beside {text} of memory"
        yield Finding("warning", "l2_capacity", message)
    if chip.memory_bus is not None and chip.memory_pin is not None:
        product = chip.memory_bus.value * chip.memory_pin.value
        if abs(product / chip.memory_bandwidth.value - 1) > 0.02:
            message = (
                f"{chip.memory_bandwidth.text}, but {chip.memory_bus.text} pins x "
                f"{chip.memory_pin.text} are {units.format_bandwidth(product)}"
            )
            yield Finding("warning", "memory_bandwidth", message)


# What one GPU of today can be, with room on both sides; a slip of a prefix falls outside.
GPU_RANGES: Mapping[str, tuple[str, str]] = {
    "memory_capacity": ("4 GB", "1 TB"),
    "memory_bandwidth": ("100 GB/s", "40 TB/s"),
    "l2_capacity": ("1 MB", "1 GB"),
    "sm_count": ("8", "1024"),
    "clock": ("0.5 GHz", "4 GHz"),
    "power": ("30 W", "4 kW"),
    "price": ("0.05 dollar/hour", "50 dollar/hour"),
    "kernel_gap": ("100 ns", "20 us"),
    "dispatch_eager": ("1 us", "100 us"),
    "dispatch_compiled": ("0.5 us", "50 us"),
    "graph_launch": ("0.5 us", "200 us"),
}


def _lint_ranges(chip: Chip) -> Iterator[Finding]:
    if chip.kind != "gpu":
        return
    for name, (low, high) in GPU_RANGES.items():
        fact = getattr(chip, name)
        unit = FACT_UNITS[name]
        if fact is not None and not units.parse(low, unit) <= fact.value <= units.parse(high, unit):
            yield Finding("warning", name, f"{fact.text}: expected {low} to {high} for a GPU")
    for link in chip.links:
        if link.bandwidth.value > chip.memory_bandwidth.value:
            message = f"{link.bandwidth.text} is more than the memory's: is it of all chips?"
            yield Finding("warning", f"link {link.name}", message)
    for peak in chip.peaks:
        ridge = peak.rate.value / chip.memory_bandwidth.value
        if not math.isfinite(ridge) or ridge > 3000:
            message = f"{peak.rate.text} is {ridge:.0f} FLOP per byte of memory bandwidth"
            yield Finding("warning", f"{peak.engine} {peak.precision}", message)


CHECKS: tuple[Callable[[Chip], Iterator[Finding]], ...] = (
    _lint_names,
    _lint_sparsity,
    _lint_ratios,
    _lint_arithmetic,
    _lint_memory,
    _lint_ranges,
)
