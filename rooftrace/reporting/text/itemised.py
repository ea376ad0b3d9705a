"""What a step consists of, in words: its matrix products, its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import (
    format_capacity,
    format_flops,
    format_time,
    format_traffic,
    plural,
)
from rooftrace.reporting.view import model as view, units

if TYPE_CHECKING:
    from rooftrace.costmodels.itemising import Census, NodeTable, Product

_ROWS = 15
"""Products, odd sizes and nodes that a screen shows."""


def _size(number: float | None) -> str:
    """A size; a mean, which is no whole number, with three digits."""
    if number is None:
        return "?"
    return f"{number:.3g}" if number != int(number) else str(int(number))


def _shape(shape: Sequence[float | None]) -> str:
    return " x ".join(map(_size, shape))


def _product(product: Product) -> str:
    return _shape((product.rows, product.columns, product.inner))


def _tile(product: Product) -> str:
    if product.tile is None:
        return "not modelled"
    split = f", K in {product.split}" if product.split != 1 else ""
    return f"{product.tile[0]} x {product.tile[1]}{split}"


_COUNTED = units.Unit("", "number", _size)
_MODULES = view.Column(
    "modules", units.CODE, "modules", flexible=True, of=lambda product: ", ".join(product.modules)
)


def census_view(result: Census, output: view.Output) -> view.View:
    """The products, most seconds first, what whole tiles waste, and the sizes that are odd."""
    head = f"{result.title} on {result.chip}, {result.execution}"
    sections = [
        view.Section(parts=[view.Note(head, "strong"), *_sums(result)], place=1),
        view.Section(title="Products", parts=list(_products(result, output)), place=2),
        view.Section(title="Odd sizes", parts=list(_odd(result, output)), place=3),
    ]
    return view.View(tuple(sections), "Census of matrix products")


def _sums(result: Census) -> Iterator[view.Note]:
    parts = [f"{format_flops(result.flops)} in {plural(len(result.products), 'kind')} of product"]
    if result.calls_attention:
        calls = plural(result.calls_attention, "attention kernel")
        parts.append(f"{format_flops(result.flops_attention)} in {calls}")
    yield view.Note(f"{format_flops(result.flops_matrix)} of matrix work: {', '.join(parts)}")
    tiled = [p for p in result.products if p.seconds_wasted is not None]
    seconds = sum(p.seconds_wasted or 0.0 for p in tiled)
    flop = sum(p.flops_wasted or 0 for p in tiled)
    if tiled:
        yield view.Note(
            f"tiles and waves that are not full: {format_time(seconds)}, of which "
            f"{format_flops(flop)} is padding inside of tiles"
        )


def _products(result: Census, output: view.Output) -> Iterator[view.Part]:
    columns = (
        view.Column("shape", units.WORDS, "M x N x K", of=_product),
        view.Column("batch", _COUNTED, "batch"),
        view.Column("kind", units.TEXT, "kind", drop=2),
        view.Column("precision", units.TEXT, "precision", short="in", drop=1),
        view.Column("calls", units.COUNT, "calls"),
        view.Column("flops", units.FLOP, "FLOP"),
        view.Column("seconds", units.SECOND, "expected" if result.expected else "bound"),
        view.Column("share", units.SHARE, "share"),
        view.Column("tile", units.WORDS, "tile", of=_tile, on="page"),
        view.Column("tile_efficiency", units.SHARE, "tiles"),
        view.Column("wave_efficiency", units.SHARE, "waves"),
        view.Column("seconds_wasted", units.SECOND, "wasted"),
        _MODULES,
    )
    yield from _table(columns, result.products, output)
    yield view.Note(
        "tiles: the share of what whole tiles compute that the product has.  waves: the share of "
        "the multiprocessors that has a tile.  wasted: what full ones, fed at once, would save.  "
        "A dash: the kernel model has no tiles for it",
        "faint",
    )


def _odd(result: Census, output: view.Output) -> Iterator[view.Part]:
    if not result.odd:
        yield view.Note(f"no odd sizes: all rows in memory are multiples of {result.align} bytes")
        return
    columns = (
        view.Column("shape", units.WORDS, "M x N x K", of=_product),
        view.Column("odd", units.WORDS, "odd", of=lambda product: ", ".join(product.odd)),
        view.Column("aligned", units.WORDS, "aligned", of=lambda p: _shape(p.aligned or ())),
        view.Column("calls", units.COUNT, "calls"),
        view.Column("aligned_flops", units.FLOP, "FLOP more"),
        view.Column("aligned_seconds", units.signed(units.SECOND), "seconds more", short="time"),
        _MODULES,
    )
    yield from _table(columns, result.odd, output)
    yield view.Note(
        f"rows in memory that are no multiple of {result.align} bytes; padded, they take so much "
        "more.  What loads that are not aligned cost is not modelled: measure it",
        "faint",
    )


def _table(
    columns: Sequence[view.Column], rows: Sequence[Any], output: view.Output
) -> Iterator[view.Part]:
    """A table, on a screen with the first rows."""
    shown = rows if output == "page" else rows[:_ROWS]
    yield view.Table(columns=columns, rows=shown)
    if len(shown) < len(rows):
        yield view.Note(f"and {len(rows) - len(shown):,} more", "faint")


def nodes_view(result: NodeTable, output: view.Output) -> view.View:
    """The nodes, most seconds first, and what the step stores."""
    head = f"{result.title} on {result.chip}, {result.execution}"
    stored = ", ".join(f"{role} {format_capacity(size)}" for role, size in result.storage.items())
    notes = [
        view.Note(head, "strong"),
        view.Note(
            f"{format_flops(result.flops)} and {format_traffic(result.bytes)} of HBM traffic in "
            f"{plural(len(result.nodes), 'kind')} of node"
        ),
        view.Note(f"stored at least: {stored or 'nothing'}"),
    ]
    if result.weights_unread:
        unread = format_capacity(result.weights_unread)
        notes.append(view.Note(f"weights that the step does not read: {unread}"))
    columns = (
        view.Column("name", units.KERNEL, "node"),
        view.Column("calls", units.COUNT, "calls"),
        view.Column("flops", units.FLOP, "FLOP"),
        view.Column("weights", units.BYTE, "weights"),
        view.Column("inputs", units.BYTE, "inputs"),
        view.Column("outputs", units.BYTE, "outputs"),
        view.Column("intensity", units.INTENSITY, "FLOP/byte", short="FLOP/B"),
        view.Column("seconds", units.SECOND, "expected" if result.expected else "bound"),
        view.Column("module", units.MODULE, "module", flexible=True),
    )
    table = list(_table(columns, result.nodes, output))
    sections = (view.Section(parts=notes, place=1), view.Section(parts=table, place=2))
    return view.View(sections, "Nodes of a step")
