"""An exploration in words: intensities, least batches, and what stands in the way."""

from __future__ import annotations

import math
from typing import Any

from rooftrace.costmodels.exploring import formsteps
from rooftrace.hardware.units import format_bandwidth, format_flop_rate
from rooftrace.reporting.view import model as view, units


def _intensity(ratio: float) -> str:
    return "no end" if math.isinf(ratio) else f"{ratio:,.1f}"


_INTENSITY = units.Unit("FLOP/byte", "number", _intensity)


def _batch(cell: Any) -> Any:
    return view.Cell("none", "plain") if cell.batch is None else cell.batch


def _global(cell: Any) -> Any:
    return view.BLANK if cell.batch is None else cell.global_batch


_COLUMNS = (
    view.Column("devices", units.COUNT, "devices"),
    view.Column("kv", units.COUNT, "kv"),
    view.Column("flop_per_kv_byte", _INTENSITY, "FLOP per cache byte", short="OI_inf"),
    view.Column("flop_per_link_byte", _INTENSITY, "FLOP per link byte", short="OI_net"),
    view.Column("batch", units.COUNT, "least batch of a device", short="batch", of=_batch),
    view.Column("global_batch", units.COUNT, "of all devices", short="B_g", of=_global),
    view.Column("limiter", units.TEXT, "limited by"),
    view.Column("t_comp", units.SECOND, "computing", drop=1),
    view.Column("t_hbm", units.SECOND, "HBM", drop=1),
    view.Column("t_net", units.SECOND, "link", drop=1),
)


def exploration_view(result: formsteps.Exploration, output: view.Output) -> view.View:
    """A row for each number of devices and length of the cache."""
    rates = result.rates
    told = ", ".join(
        f"{name} {value}"
        for name, value in zip(("dtype", "weights", "cache"), result.precisions, strict=True)
        if value
    )
    head = f"{result.title}, decode; {result.chip}, {result.execution}" + (
        f"; {told}" if told else ""
    )
    how = (
        f"{format_flop_rate(rates.peak)}, {format_bandwidth(rates.memory)}, link "
        f"{format_bandwidth(rates.link)}; {result.experts:,} routed experts in a layer; computing "
        f"limits at {result.alpha:g} of the slower of HBM and link"
    )
    what = (
        "OI_inf: FLOP over bytes of cache that a further sequence adds; OI_net: over bytes of the "
        "link; B_g: the least batch of all devices together"
    )
    table = view.Table(columns=_COLUMNS, rows=result.cells, padded=False)
    notes = (view.Note(head, "strong"), view.Note(how), view.Note(what, "faint"))
    return view.View(
        (view.Section(parts=[*notes, table]),), f"When computing limits decode: {result.title}"
    )
