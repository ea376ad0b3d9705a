"""An inventory in words: sums, a row for each tensor, statistics; and two beside each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import MISSING, arrow, format_capacity, format_share, plural
from rooftrace.reporting.text.changed import cut, labelled, left_out
from rooftrace.reporting.view import model as view, units
from rooftrace.tracer.inventory import values
from rooftrace.tracer.paths import pattern_of

if TYPE_CHECKING:
    from rooftrace.tracer.inventory import ParameterDiff
    from rooftrace.tracer.inventory.records import LayerInfo, ModelInfo
    from rooftrace.tracer.inventory.values import WeightStatistics

MOST_ROWS = 60
"""Tensors on a screen; of more, those that differ in indices only stand in one row."""

EXACT = units.Unit("", "integer", lambda number: f"{number:,}")
VALUE = units.Unit("", "number", lambda value: _number(value))
SHAPE = units.Unit("", "string", str, left="both")


def _number(value: float) -> str:
    return MISSING if math.isnan(value) else f"{value:.4g}"


_TENSORS = (
    view.Column("name", units.MODULE, "tensor", folded=True),
    view.Column("class", units.TEXT, "class", clipped=12),
    view.Column("shape", SHAPE, "shape"),
    view.Column("dtype", units.TEXT, "dtype"),
    view.Column("params", EXACT, "parameters"),
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
    view.Column("bad", EXACT, "NaN, inf"),
)
_GRADS = {True: "yes", False: "frozen", None: MISSING}


def inventory_view(result: ModelInfo, output: view.Output) -> view.View:
    """Sums, and a row for each tensor, with statistics where values were read."""
    screen = output == "screen"
    rows = list(_rows(result.layers, folded=screen and len(result.layers) > MOST_ROWS))
    beside = list(_rows(result.buffers, folded=screen and len(result.buffers) > MOST_ROWS // 4))
    sections = [
        view.Section(parts=list(_sums(result)), place=1),
        view.Section(title="Parameters", parts=[_table(_TENSORS, rows)], place=2),
    ]
    if beside:
        sections.append(view.Section(title="Buffers", parts=[_table(_BUFFERS, beside)], place=3))
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
    """A table without the columns that say nothing: a file knows neither classes nor gradients."""
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
    """What the tables do not show: shared names, what wrappers store, what was not read."""
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
        known = layer.shape is not None
        yield {
            "name": name,
            "class": layer.kind,
            "shape": str(list(layer.shape)) if layer.shape is not None else "not known yet",
            "dtype": layer.dtype,
            "params": sum(each.num_params for each in group) if known else None,
            "bytes": sum(each.bytes for each in group) if known else None,
            "grad": grad,
            **_values([each.statistics for each in group if each.statistics is not None]),
        }


def _values(parts: Sequence[WeightStatistics]) -> dict[str, Any]:
    if not parts:
        return {"mean": view.BLANK}
    whole = values.merged(parts)
    bad = whole.nans + whole.infs
    return {
        "mean": whole.mean,
        "std": whole.std,
        "min": whole.min,
        "max": whole.max,
        "zeros": whole.zeros / whole.count if whole.count else None,
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
    view.Column("before", EXACT, "before", of=lambda row: row.params[0]),
    view.Column("after", EXACT, "after", of=lambda row: row.params[1]),
    view.Column("delta", units.signed(EXACT), "change"),
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
