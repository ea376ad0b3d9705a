"""Lint of a chip file: the remarks that it makes, and rates, units and names that look wrong."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rooftrace.hardware import units
from rooftrace.hardware.chip import FACT_UNITS, Chip
from rooftrace.hardware.chipfile.reading import (
    ChipFileError,
    available_chips,
    bundled_aliases,
    load_chip,
)

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One remark of a lint. A note asks for nothing; a warning wants a second look."""

    severity: Severity
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.field}: {self.message}"


def lint_chip(path: str | os.PathLike[str]) -> list[Finding]:
    """Suspicious values in a chip file: rates, units, names; if it does not load, its mistakes.

    `path` may also be the name of a bundled chip.
    """
    try:
        chip = load_chip(path)
    except ChipFileError as error:
        return [Finding("error", "file", problem) for problem in error.problems]
    findings = [finding for check in CHECKS for finding in check(chip)]
    bundled = not os.fspath(path).lower().endswith(".toml")
    if bundled and os.fspath(path) in available_chips() and os.fspath(path) != chip.name:
        message = f'"{chip.name}" stands in {path}.toml: a chip is found by the name of its file'
        findings.append(Finding("error", "name", message))
    file = os.fspath(path) if bundled else chip.name
    findings += _clashes(chip, file, "error" if bundled else "note")
    if os.fspath(path).lower().endswith(".toml") and Path(path).stem != chip.name:
        message = (
            f'reports call this chip "{chip.name}"; ask for it by the path of its file, as in '
            f"--chip {os.fspath(path)}"
        )
        findings.append(Finding("note", "name", message))
    for place, fact in chip.facts():
        if fact.kind == "guess":
            findings.append(Finding("note", place, f"{fact.text} is a guess: {fact.source}"))
    return findings


def _clashes(chip: Chip, file: str, severity: Literal["error", "note"]) -> Iterator[Finding]:
    """Names of this chip that mean another bundled one too.  file: the name of its file."""
    names, _ = bundled_aliases()
    for alias in dict.fromkeys((chip.name, *chip.aliases)):
        owners = [alias] if alias in available_chips() else []
        others = [name for name in (*owners, *names.get(alias, ())) if name != file]
        for other in dict.fromkeys(others):
            message = f'"{alias}" is {"the name" if other == alias else "an alias"} of {other} too'
            yield Finding(severity, "aliases", f"{message} ({other}.toml)")
    for alias in chip.aliases:
        if chip.aliases.count(alias) > 1:
            yield Finding("warning", "aliases", f'"{alias}" is there twice')
            return


def lint_spelling(*names: str) -> Iterator[Finding]:
    """A warning on each name or alias that a lookup cannot find."""
    for name in names:
        if name != name.lower() or not name or set(name) & set(" _/\\"):
            expected = 'expected lower case, with "-" between words: names are looked up that way'
            yield Finding("warning", "aliases", f'"{name}": {expected}')


def _lint_names(chip: Chip) -> Iterator[Finding]:
    yield from lint_spelling(chip.name, *chip.aliases)
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
# Blackwell Ultra has fp4 at 6 x, and gave up most of int8.
RATIOS: Mapping[str, tuple[float, ...]] = {
    "fp16": (1,),
    "tf32": (0.5,),
    "fp8": (2,),
    "fp6": (2, 4),
    "int8": (2, 4, 1 / 15),
    "fp4": (4, 6, 8),
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
    cycles = chip.sm_count.value * 2 * chip.clock.value
    lanes = peak.rate.value / cycles if cycles else math.inf
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


# Values of one GPU of today, with room on both sides; a slip of a prefix falls outside.
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
    "dispatch_view": ("0.1 us", "20 us"),
    "module_call": ("0.1 us", "100 us"),
    "dispatch_compiled": ("0.5 us", "50 us"),
    "graph_launch": ("0.5 us", "200 us"),
    "graph_entry": ("1 us", "1 ms"),
    "read_back": ("1 us", "1 ms"),
    "blas_workspace": ("1 MiB", "1 GiB"),
    "context": ("50 MiB", "4 GiB"),
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
