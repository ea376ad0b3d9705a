"""Views of the chips and systems that come with rooftrace, and of the inventory of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from rooftrace.graph import pattern_of
from rooftrace.hardware import Chip, available_chips, load_chip
from rooftrace.hardware.chip import Fact
from rooftrace.hardware.chipfile import ChipFileError
from rooftrace.hardware.systems import System, available_systems, load_system
from rooftrace.hardware.systems.records import CollectiveFit, ExchangeFit
from rooftrace.hardware.units import (
    MISSING,
    arrow,
    format_bandwidth,
    format_capacity,
    format_intensity,
    format_share,
    format_time,
    plural,
)
from rooftrace.reporting.renderers import units, view
from rooftrace.reporting.views.folding import cut, labelled, left_out
from rooftrace.weights import inventory

if TYPE_CHECKING:
    from rooftrace.weights import ParameterDiff
    from rooftrace.weights.inventory import LayerInfo, ModelInfo, WeightStatistics


def list_of(kind: Literal["chips", "systems"]) -> view.View:
    """The table of all chips, or of all systems."""
    return chip_list() if kind == "chips" else system_list()


# -- chips -----------------------------------------------------------------------------------------

_MARKS = {"measured": "good", "derived": "name", "guess": "warn"}
_LIST = (
    view.Column("chip", units.TEXT, "chip"),
    view.Column("bf16", units.FLOP_RATE, "bf16 dense"),
    view.Column("fp8", units.FLOP_RATE, "fp8 dense"),
    view.Column("fp32", units.FLOP_RATE, "fp32 vector"),
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
    rows = [_fact(label, fact.text, fact, fact.source) for label, fact in chip.facts()]
    title = f"{chip.title}  [{chip.name}]"
    parts: list[view.Part] = [
        view.Note(title, "strong", on="screen"),
        view.Table(columns=_FACTS, rows=rows),
    ]
    return view.View((view.Section(parts=parts),), title)


def _fact(
    label: str, value: str, fact: Fact | CollectiveFit | ExchangeFit, source: str
) -> dict[str, Any]:
    """The row of a fact or a fit."""
    return {
        "fact": label,
        "value": value,
        "kind": view.Cell(fact.kind, _MARKS.get(fact.kind, "")),
        "source": source + (f" ({fact.note})" if fact.note else ""),
    }


# -- systems ---------------------------------------------------------------------------------------

_SYSTEMS = (
    view.Column("system", units.TEXT, "system"),
    view.Column("chip", units.TEXT, "chip"),
    view.Column("levels", units.WORDS, "joined by", folded=True),
    view.Column("measured", units.WORDS, "measured"),
)
_SYSTEM_FACTS = (
    view.Column("fact", units.TEXT, "fact"),
    view.Column("value", units.WORDS, "value", folded=True),
    view.Column("kind", units.TEXT, "kind"),
    view.Column("source", units.TEXT, "source", folded=True),
)


def system_list() -> view.View:
    """A line for each system that comes with rooftrace."""
    rows = []
    for name in available_systems():
        system = load_system(name)
        fits: tuple[CollectiveFit | ExchangeFit, ...]
        fits = (*system.collectives, *system.exchanges)
        measured = sum(fit.kind == "measured" for fit in fits)
        row = {"system": name, "chip": system.chip.name, "levels": system.headline()}
        rows.append({**row, "measured": f"{measured} of {len(fits)} fits"})
    table = view.Table(columns=_SYSTEMS, rows=rows)
    return view.View((view.Section(parts=[table]),), "Systems")


def system_view(system: System, output: view.Output) -> view.View:
    """Every fact and every fitted constant with its kind, source and note."""
    rows = [_fact(label, fact.text, fact, fact.source) for label, fact in system.facts()]
    fits: tuple[CollectiveFit | ExchangeFit, ...] = (*system.collectives, *system.exchanges)
    for fit in fits:
        source = " ".join(part for part in (fit.source, fit.version) if part)
        rows.append(_fact(_label(fit), _constants(fit), fit, source))
    title = f"{system.title}  [{system.name}]"
    parts: list[view.Part] = [
        view.Note(title, "strong", on="screen"),
        view.Note(system.headline()),
        view.Table(columns=_SYSTEM_FACTS, rows=rows),
    ]
    return view.View((view.Section(parts=parts),), title)


def _label(fit: CollectiveFit | ExchangeFit) -> str:
    if isinstance(fit, CollectiveFit):
        return f"{fit.library} {fit.op} {fit.level}"
    return f"experts {fit.mode} {fit.way}"


def _constants(fit: CollectiveFit | ExchangeFit) -> str:
    if isinstance(fit, CollectiveFit):
        most = format_capacity(fit.nbytes)
    else:
        most = f"{fit.tokens:,} tokens"
    return (
        f"{format_time(fit.alpha)} + {format_time(fit.step)} a step, {fit.efficiency:.3g} of the "
        f"bandwidth, p {fit.p:.3g}; up to {fit.ranks} ranks, {most}"
    )


# -- inventories -----------------------------------------------------------------------------------

MOST_ROWS = 60
"""Tensors on a screen; of more, those that differ in indices only share a row."""

VALUE = units.Unit("", "number", lambda value: _number(value))


def _number(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.4g}"


_TENSORS = (
    view.Column("name", units.MODULE, "tensor", folded=True),
    view.Column("class", units.TEXT, "class", clipped=12),
    view.Column("shape", units.TEXT, "shape"),
    view.Column("dtype", units.TEXT, "dtype"),
    view.Column("params", units.EXACT, "parameters"),
    view.Column("bytes", units.CAPACITY, "memory"),
    view.Column("grad", units.TEXT, "grad"),
)
_VALUES = (
    view.Column("name", units.MODULE, "values", folded=True),
    view.Column("mean", VALUE, "mean"),
    view.Column("std", VALUE, "std"),
    view.Column("min", VALUE, "min"),
    view.Column("max", VALUE, "max"),
    view.Column("zeros", units.SHARE, "zeros"),
    view.Column("bad", units.EXACT, "NaN, inf"),
)
_GRADS = {True: "yes", False: "frozen", None: MISSING}


def inventory_view(result: ModelInfo, output: view.Output) -> view.View:
    """Sums, and a row for each tensor, with statistics where values were read."""
    screen = output == "screen"
    rows = list(_rows(result.layers, folded=screen and len(result.layers) > MOST_ROWS))
    buffers = list(_rows(result.buffers, folded=screen and len(result.buffers) > MOST_ROWS // 4))
    sections = [
        view.Section(parts=list(_sums(result)), place=1),
        view.Section(title="Parameters", parts=[_table(_TENSORS, rows)], place=2),
    ]
    if buffers:
        sections.append(view.Section(title="Buffers", parts=[_table(_BUFFERS, buffers)], place=3))
    read = [row for row in rows if row["mean"] is not view.BLANK]
    if read:
        sections.append(view.Section(title="Weights", parts=[_table(_VALUES, read)], place=4))
    sections.append(view.Section(parts=list(_remarks(result)), place=5))
    return view.View(tuple(s for s in sections if s.parts), f"Inventory of {result.name}")


_BUFFERS = (
    view.Column("name", units.MODULE, "buffer", folded=True),
    *(replace(c, head="elements") if c.key == "params" else c for c in _TENSORS[1:-1]),
)


def _table(columns: Sequence[view.Column], rows: Sequence[dict[str, Any]]) -> view.Table:
    """A table without its empty columns: a file has neither classes nor gradients."""
    telling = [c for c in columns if any(row[c.key] not in ("", MISSING) for row in rows)]
    return view.Table(columns=telling or columns, rows=rows, padded=False)


def _sums(result: ModelInfo) -> Iterator[view.Note]:
    least = "at least " if result.uninitialized else ""
    tensors = plural(result.num_layers, "tensor")
    if result.modules is not None:
        tensors += f" of parameters, {plural(result.modules, 'module')} without others inside"
    name = result.name if result.name == result.kind else f"{result.name} ({result.kind})"
    yield view.Note(f"{name}: {tensors}", "strong")
    text = f"{least}{result.total_params:,}"
    if result.trainable_params is not None:
        text += f": {result.trainable_params:,} trainable, {result.non_trainable_params:,} frozen"
    if result.shared_params:
        text += f"; {result.shared_params:,} under several names, counted once"
    yield from labelled("parameters", text)
    text = f"{least}{format_capacity(result.bytes_parameters)}"
    if result.bytes_buffers:
        text += f" of parameters, {format_capacity(result.bytes_buffers)} of buffers and others"
    yield from labelled("memory", text)


def _remarks(result: ModelInfo) -> Iterator[view.Note]:
    """Notes on shared names, on tensors that wrappers store otherwise, and on unread ones."""
    for layer in result.tensors:
        if layer.shared and layer.bytes:
            yield view.Note(f"{layer.name} is also {', '.join(layer.shared)}", "faint", bullet=1)
    for pattern, layer in {pattern_of(layer.name): layer for layer in result.tensors}.items():
        if layer.stored:
            parts = ", ".join(
                f"{p.name or 'values'} {p.dtype}{list(p.shape)}" for p in layer.stored
            )
            yield view.Note(f"{pattern} is stored as {parts}", "faint", bullet=1)
    said: dict[str, list[str]] = {}
    for layer in result.tensors:
        if layer.note:
            said.setdefault(layer.note, []).append(layer.name)
    for note, names in said.items():
        more = f" and {plural(len(names) - 1, 'other tensor')}" if len(names) > 1 else ""
        yield view.Note(f"{names[0]}{more}: {note}", "warn", bullet=1)
    for note in result.notes:
        yield view.Note(note, "warn", bullet=1)


def _rows(layers: Sequence[LayerInfo], folded: bool) -> Iterator[dict[str, Any]]:
    groups: dict[Any, list[LayerInfo]] = {}
    for number, layer in enumerate(layers):
        look = (layer.kind, layer.shape, layer.dtype, layer.requires_grad, bool(layer.shared))
        groups.setdefault((pattern_of(layer.name), *look) if folded else number, []).append(layer)
    for group in groups.values():
        layer, several = group[0], len(group) > 1
        name = f"{pattern_of(layer.name)} x{len(group)}" if several else layer.name
        grad = _GRADS[layer.requires_grad] + (", shared" if layer.shared else "")
        has_shape = layer.shape is not None
        yield {
            "name": name,
            "class": layer.kind,
            "shape": str(list(layer.shape)) if layer.shape is not None else "not known yet",
            "dtype": layer.dtype,
            "params": sum(each.num_params for each in group) if has_shape else None,
            "bytes": sum(each.bytes for each in group) if has_shape else None,
            "grad": grad,
            **_values([each.statistics for each in group if each.statistics is not None]),
        }


def _values(parts: Sequence[WeightStatistics]) -> dict[str, Any]:
    if not parts:
        return {"mean": view.BLANK}
    merged = inventory.merged(parts)
    bad = merged.nans + merged.infs
    return {
        **{name: getattr(merged, name) for name in ("mean", "std", "min", "max")},
        "zeros": merged.zeros / merged.count if merged.count else None,
        "bad": view.Cell(bad, "bad" if bad else ""),
    }


_CHANGES = (
    view.Column("path", units.MODULE, "module", folded=True),
    view.Column("modules", units.TEXT, "how many", of=lambda row: arrow(*row.modules)),
    view.Column(
        "shapes",
        units.TEXT,
        "shapes",
        folded=True,
        drop=1,
        of=lambda row: arrow(*map(", ".join, row.shapes)),
    ),
    view.Column("before", units.EXACT, "before", of=lambda row: row.params[0]),
    view.Column("after", units.EXACT, "after", of=lambda row: row.params[1]),
    view.Column("delta", units.signed(units.EXACT), "change"),
)


def parameters_view(result: ParameterDiff, output: view.Output) -> view.View:
    """Parameters before and after, and the modules whose parameters differ."""
    return view.View(
        (view.Section(parts=list(parameter_parts(result)), place=1),),
        f"Parameters of {result.names[0]} and {result.names[1]}",
    )


def parameter_parts(result: ParameterDiff) -> Iterator[view.Part]:
    """The sums of a comparison of parameters, and its rows."""
    yield view.Note(f"{result.names[0]} -> {result.names[1]}", "strong", on="screen")
    yield from labelled("parameters", change_words(result.params))
    yield from labelled("memory", change_words(result.bytes, capacity=True))
    if not result.modules:
        yield view.Note("the same parameters in every module", "good", bullet=1)
        return
    yield from cut(_CHANGES, result.modules, MOST_ROWS)
    yield from left_out(len(result.modules) - MOST_ROWS, "more modules")
    if result.unchanged:
        text = f"{plural(result.unchanged, 'path')} with the same parameters on both sides"
        yield view.Note(text, "faint", bullet=1)


def change_words(pair: tuple[int, int], capacity: bool = False) -> str:
    """ "100 -> 110 (+10, +10.0 %)": a number before and after."""
    before, after = pair
    write = format_capacity if capacity else lambda number: f"{number:,.0f}"
    if before == after:
        return f"{write(after)}, as before"
    sign, delta = ("+" if after > before else "-"), abs(after - before)
    share = f", {sign}{format_share(delta / before)}" if before else ""
    return f"{write(before)} -> {write(after)} ({sign}{write(delta)}{share})"
