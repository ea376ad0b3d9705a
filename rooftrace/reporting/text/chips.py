"""Chips as tables: the list, and the facts of one chip with their sources."""

from __future__ import annotations

from typing import Any

from rooftrace.hardware import Chip, available_chips, load_chip
from rooftrace.hardware.chipfile import ChipFileError
from rooftrace.hardware.units import format_bandwidth, format_flop_rate, format_intensity
from rooftrace.reporting.view import model as view, units

_MARKS = {"measured": "good", "derived": "name", "guess": "warn"}
_RATE = units.Unit("FLOP/s", "number", format_flop_rate)
_LIST = (
    view.Column("chip", units.TEXT, "chip"),
    view.Column("bf16", _RATE, "bf16 dense"),
    view.Column("fp8", _RATE, "fp8 dense"),
    view.Column("fp32", _RATE, "fp32 vector"),
    view.Column("memory", units.CAPACITY, "memory"),
    view.Column("bandwidth", units.Unit("byte/s", "number", format_bandwidth), "bandwidth"),
    view.Column("ridge", units.Unit("FLOP/byte", "number", format_intensity), "ridge (bf16)"),
)
_FACTS = (
    view.Column("fact", units.TEXT, "fact"),
    view.Column("value", units.WORDS, "value"),
    view.Column("kind", units.TEXT, "kind"),
    view.Column("source", units.TEXT, "source", folded=True),
)


def chip_list() -> view.View:
    """A line for each chip, and a note on each file that cannot be read."""
    rows, unreadable = [], []
    for name in available_chips():
        try:
            rows.append(_row(load_chip(name)))
        except ChipFileError as error:
            first, *others = error.problems
            more = f" (and {len(others)} more: rooftrace chips lint {name})" if others else ""
            unreadable.append(view.Note(f"not listed: {first}{more}", "bad"))
    table = view.Table(columns=_LIST, rows=rows)
    return view.View((view.Section(parts=[table, *unreadable]),), "Chips")


def _row(chip: Chip) -> dict[str, Any]:
    def rate(engine: str, precision: str) -> float | None:
        return chip.peak(engine, precision) if chip.has_peak(engine, precision) else None

    bf16 = rate("matrix", "bf16")
    return {
        "chip": chip.name,
        "bf16": bf16,
        "fp8": rate("matrix", "fp8"),
        "fp32": rate("vector", "fp32"),
        "memory": chip.memory_capacity.value,
        "bandwidth": chip.memory_bandwidth.value,
        "ridge": None if bf16 is None else chip.ridge("matrix", "bf16"),
    }


def chip_view(chip: Chip, output: view.Output) -> view.View:
    """Every fact with its kind, source and note."""
    rows = [
        {
            "fact": label,
            "value": fact.text,
            "kind": view.Cell(fact.kind, _MARKS.get(fact.kind, "")),
            "source": fact.source + (f" ({fact.note})" if fact.note else ""),
        }
        for label, fact in chip.facts()
    ]
    title = f"{chip.title}  [{chip.name}]"
    parts: list[view.Part] = [
        view.Note(title, "strong", on="screen"),
        view.Table(columns=_FACTS, rows=rows),
    ]
    return view.View((view.Section(parts=parts),), title)
