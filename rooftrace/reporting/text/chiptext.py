"""Chips as tables: the list, and one chip's facts with their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.hardware import Chip, available_chips, load_chip
from rooftrace.hardware.chipfile import ChipFileError
from rooftrace.hardware.units import (
    format_bandwidth,
    format_capacity,
    format_flop_rate,
    format_intensity,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_KIND_STYLES = {"datasheet": "", "measured": "green", "derived": "cyan", "guess": "yellow"}


def render_chip_list() -> RenderableType:
    """One line per chip, and one for each file that cannot be read."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("chip")
    for column in ("bf16 dense", "fp8 dense", "fp32 vector", "memory", "bandwidth", "ridge (bf16)"):
        table.add_column(column, justify="right")
    unreadable = []
    for name in available_chips():
        try:
            chip = load_chip(name)
        except ChipFileError as problem:
            unreadable.append(Text(f"not listed: {problem}", style="red"))
            continue

        def rate(engine: str, precision: str, chip: Chip = chip) -> str:
            return (
                format_flop_rate(chip.peak(engine, precision))
                if chip.has_peak(engine, precision)
                else "–"
            )

        ridge = (
            format_intensity(chip.ridge("matrix", "bf16"))
            if chip.has_peak("matrix", "bf16")
            else "–"
        )
        table.add_row(
            name,
            rate("matrix", "bf16"),
            rate("matrix", "fp8"),
            rate("vector", "fp32"),
            format_capacity(chip.memory_capacity.value),
            format_bandwidth(chip.memory_bandwidth.value),
            ridge,
        )
    return Group(table, *unreadable)


def render_chip(chip: Chip) -> RenderableType:
    """Every fact with its kind, source and note."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("fact", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("source", overflow="fold")
    for label, fact in _facts(chip):
        source = fact.source + (f" ({fact.note})" if fact.note else "")
        table.add_row(label, fact.text, Text(fact.kind, _KIND_STYLES.get(fact.kind, "")), source)
    return Group(Text(f"{chip.title}  [{chip.name}]", style="bold"), table)


def _facts(chip: Chip) -> list[tuple[str, Any]]:
    return list(chip.facts())
