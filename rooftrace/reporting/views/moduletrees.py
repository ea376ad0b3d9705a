"""Views of module trees, of a step's products and nodes, and of FLOPs against other counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimates import moduletree
from rooftrace.hardware.units import (
    format_capacity,
    format_flops,
    format_time,
    format_traffic,
    plural,
)
from rooftrace.reporting.renderers import units, view, words
from rooftrace.reporting.views.folding import first_rows, times

if TYPE_CHECKING:
    from rooftrace.costmodels.estimates import Census, Comparison, NodeTable, Product
    from rooftrace.costmodels.estimates.moduletree import ModuleNode, Summary
    from rooftrace.costmodels.estimates.rows import Breakdown, BreakdownRow
    from rooftrace.graph import OpGraph


# -- trees -----------------------------------------------------------------------------------------

GRAPH_DEPTH = 3
"""Depth of the modules of a graph that are shown."""
_LEAST = 44
"""Letters of a module in the tree that stay on a narrow screen."""
_MOST = 25
"""Rows of a breakdown that are shown."""


def _sizes(shape: Any) -> str:
    return "--" if shape is None else f"[{', '.join(map(str, shape))}]"


_SIZES = units.Unit("", "string", _sizes, left="both")
COLUMNS: Mapping[str, view.Column] = {
    "input_size": view.Column(
        "input", _SIZES, "input shape", of=lambda node: node.input and node.input.shape
    ),
    "output_size": view.Column(
        "output", _SIZES, "output shape", of=lambda node: node.output and node.output.shape
    ),
    "num_params": view.Column("params", units.EXACT, "parameters"),
    "params_percent": view.Column("params_share", units.SHARE, "of all"),
    "kernel_size": view.Column("kernel_size", _SIZES, "kernel"),
    "mult_adds": view.Column("macs", units.EXACT, "mult-adds"),
    "flops": view.Column("flops", units.FLOP, "FLOP"),
    "bytes": view.Column("bytes", units.BYTE, "HBM"),
    "time": view.Column("seconds", units.SECOND, "kernels"),
    "trainable": view.Column("trainable", units.TEXT, "trainable", of=lambda n: _trainable(n)),
}
"""The columns of a tree by the names that torchinfo has, and three more."""


def _trainable(node: ModuleNode) -> str:
    if not node.params:
        return "--"
    if node.trainable is None:
        return "not known"
    return {node.params: "True", 0: "False"}.get(node.trainable, "Partial")


def summary_view(result: Summary, output: view.Output) -> view.View:
    """The tree, down to the depth of the summary, and the totals; on a page, paths alone."""
    if output == "page":
        return view.View((view.Section(parts=[_by_path(result)]),))
    return view.View(
        (
            view.Section(parts=[_tree(result.tree, result.depth, result.col_names)], place=1),
            view.Section(parts=list(_totals(result)), place=2),
        ),
        "Summary",
    )


def _tree(root: ModuleNode, depth: int | None, names: Sequence[str]) -> view.Table:
    columns = [COLUMNS[name] for name in names]
    if tuple(names) == moduletree.USUAL:  # on a narrow screen the names of modules matter more
        columns = [replace(c, drop=1) if c.key == "input" else c for c in columns]
    layer = view.Column("layer", units.TEXT, "module", clipped=_LEAST)
    rows = []
    for label, node in _labelled(root, depth):
        share = node.params / root.params if root.params else None
        rows.append({"layer": label, **_cells(node, columns), "params_share": share})
    return view.Table(columns=[layer, *columns], rows=rows, padded=False)


def _cells(node: ModuleNode, columns: Sequence[view.Column]) -> dict[str, Any]:
    return {c.key: c.read(node) for c in columns if c.key != "params_share"}  # it needs the root


def _labelled(
    node: ModuleNode, depth: int | None, before: str = "", branch: str = ""
) -> Iterator[tuple[str, ModuleNode]]:
    """Nodes with the branches that lead to them: "├─ 0-31 x32 (Block)"."""
    times = f" x{node.count}" if node.count > 1 else ""
    kind = node.kind or "not a module"
    label = f"{node.name}{times} ({kind})" if node.name else kind
    yield f"{before}{branch}{label}", node
    children = node.children if depth is None or node.depth < depth else ()
    below = before + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    for number, child in enumerate(children, start=1):
        last = number == len(children)
        yield from _labelled(child, depth, below, "└─ " if last else "├─ ")


def _totals(result: Summary) -> Iterator[view.Note]:
    text = f"{result.total_params:,}"
    if result.trainable_params is not None:
        text += f", {result.trainable_params:,} of them trainable"
    yield view.Note(text, label="parameters  ")
    more = result.tree.params - result.total_params
    if more > 0:  # where only the graph is at hand, it cannot tell them apart
        yield view.Note(f"{more:,} numbers in buffers count as parameters above", "warn")
    yield view.Note(
        f"{result.macs:,} ({format_flops(result.flops)} with vector work; a multiply-add is 2)",
        label="mult-adds   ",
    )
    memory = result.memory
    yield view.Note(
        f"peak {format_capacity(memory.peak)}, weights {format_capacity(memory.weights)}; "
        f"{format_traffic(result.bytes_hbm)} through HBM",
        label="memory      ",
    )
    times = f"{words.time_word([result])} {format_time(result.t_est)}"
    bound = f", bound {format_time(result.t_bound)}" if result.expected else ""
    yield view.Note(
        f"{times}{bound} ({result.phase} on {result.chip.name}, {result.execution.name}); "
        "print(result.estimate) has the table",
        label="time        ",
    )
    yield view.Note(
        "sums include the modules inside; of folded modules (x2 ...) they are over all of them",
        "faint",
    )


_SUMS = (
    view.Column("calls", units.COUNT, "kernels"),
    view.Column("flops", units.FLOP, "FLOP"),
    view.Column("bytes", units.BYTE, "HBM"),
    view.Column("t_device", units.SECOND, "kernels take"),
    view.Column("share", units.SHARE, "share"),
    view.Column("limit", units.LIMITS, "limit"),
)


def breakdown_view(result: Breakdown, output: view.Output) -> view.View:
    """The rows of a breakdown, and their sum."""
    name = view.Column("name", units.TEXT, result.by, folded=True)
    shown = [*result.rows[:_MOST], result.total()] if result.rows else []
    parts: list[view.Part] = [view.Table(columns=(name, *_SUMS), rows=[_row(r) for r in shown])]
    if len(result) > _MOST:
        text = f"{len(result) - _MOST:,} more rows are in the total; .rows has them all"
        parts.append(view.Note(text, "faint"))
    if not result.rows:
        parts.append(view.Note(f"no kernels, by {result.by}"))
    return view.View((view.Section(parts=parts),), f"By {result.by}")


def _name(row: BreakdownRow) -> str:
    return words.kernel_name(row.key) or "(root)"


def _row(row: BreakdownRow) -> dict[str, Any]:
    return {**row, "name": _name(row), "limit": words.LIMITS[row.regime]}


def graph_view(graph: OpGraph, output: view.Output) -> view.View:
    """How large a graph is, and its modules with their sizes and FLOP; no chip, no times."""
    from rooftrace.costmodels.estimates import estimate

    root = moduletree.module_tree(estimate(graph, execution="eager"))
    head = [
        view.Note(words.model_words(graph.model, graph.workload), label=f"{graph.phase}  "),
        view.Note(words.workload_words(graph.phase, graph.workload)),
    ]
    total = sum(map(graph.times, graph.ops))
    text = f"{total:,} ops"
    if graph.repeats:
        text += f"; equal iterations stand once, in {len(graph.ops):,} ops"
    if graph.assumptions:
        text += f"; assumptions: {words.assumption_words(graph.assumptions)}"
    table = _tree(root, GRAPH_DEPTH, (*moduletree.USUAL, "flops"))
    parts: list[view.Part] = [note for note in head if note.text]
    parts += [view.Note(text), table]
    return view.View((view.Section(parts=parts),), graph.title)


def _by_path(result: Summary) -> view.Table:
    """The modules under their full paths: a table for a page."""
    columns = [COLUMNS[name] for name in result.col_names]
    rows = []
    for node in result.tree.walk(result.depth):
        times = f" x{node.count}" if node.count > 1 else ""
        if node.flops or node.params or not node.depth:
            rows.append({"layer": f"{node.path or node.kind}{times}", **_cells(node, columns)})
    layer = view.Column("layer", units.TEXT, "module")
    return view.Table(columns=[layer, *columns], rows=rows)


# -- products and nodes ----------------------------------------------------------------------------

_ROWS = 15
"""Products, odd sizes and nodes on a screen."""


def _size(number: float | None) -> str:
    """A size; a mean that is no integer has three digits."""
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
    """The products, most seconds first, the waste of partly filled tiles, and the odd sizes."""
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
    yield from first_rows(columns, result.products, _ROWS, output)
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
    yield from first_rows(columns, result.odd, _ROWS, output)
    yield view.Note(
        f"rows in memory that are no multiple of {result.align} bytes; padded, they take so much "
        "more.  What loads that are not aligned cost is not modelled: measure it",
        "faint",
    )


def nodes_view(result: NodeTable, output: view.Output) -> view.View:
    """The nodes, most seconds first, and the bytes that the step stores."""
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
    table = list(first_rows(columns, result.nodes, _ROWS, output))
    sections = (view.Section(parts=notes, place=1), view.Section(parts=table, place=2))
    return view.View(sections, "Nodes of a step")


# -- comparisons -----------------------------------------------------------------------------------

SHOWN = 12
_COLUMNS = (
    view.Column("module", units.CODE, "module"),
    view.Column("ours", units.TEXT, "ours"),
    view.Column("theirs", units.TEXT, "theirs"),
    view.Column("gap", units.WORDS, "we count"),
    view.Column("reason", units.TEXT, "reason"),
)


def verdict(comparison: Comparison) -> str:
    """One sentence: equal, how far apart, or why there is no count."""
    if comparison.error:
        return f"no count: {comparison.error}"
    where = f"on {comparison.device}"
    if not comparison.flops_matrix and not comparison.peer_matrix:
        return f"neither counts any matrix FLOPs ({where})"
    if comparison.flops_matrix == comparison.peer_matrix:
        return f"equal: {format_flops(comparison.peer_matrix)} ({where})"
    share = "" if comparison.ratio is None else f", {comparison.ratio:.4f} of ours"
    gap = signed(comparison.flops_matrix - comparison.peer_matrix)
    return f"{format_flops(comparison.peer_matrix)} ({where}){share}; we count {gap}"


def notes(comparison: Comparison) -> list[str]:
    """Sentences on how the two counts differ in kind: units, vector work, unexplained FLOP."""
    if comparison.error:
        return []
    lines = [comparison.note] if comparison.note else []
    if comparison.peer_unit == "MAC":
        macs = (comparison.peer_matrix + comparison.peer_vector) // 2
        lines.append(
            f"{comparison.peer} counts a multiply-add as 1: its own total is "
            f"{format_flops(macs).replace('FLOP', 'MAC')}, and it calls them flops"
        )
    if comparison.flops_vector or comparison.peer_vector:
        theirs = format_flops(comparison.peer_vector) if comparison.peer_vector else "none"
        lines.append(
            "left out: vector work (norms, activations ...), ours "
            f"{format_flops(comparison.flops_vector)}, theirs {theirs}"
        )
    if comparison.differences and comparison.unexplained:
        unexplained = format_flops(comparison.unexplained)
        lines.append(f"{unexplained} of the differences have no reason we know")
    return lines


def signed(flops: int) -> str:
    """A difference with its sign, and in words: "2.10 GFLOP more"."""
    return f"{format_flops(abs(flops))} {'more' if flops > 0 else 'less'}"


def counts(ops: Mapping[str, int]) -> str:
    """ "mm 2.10 GFLOP, bmm 1.00 GFLOP"; "none" for nothing."""
    return ", ".join(f"{words.op_name(op)} {format_flops(n)}" for op, n in ops.items()) or "none"


def comparisons_view(name: str, comparisons: Sequence[Comparison]) -> view.View:
    """Other counters on a model, phase by phase.  name: of the model."""
    head = view.Note(f"{name}, matrix FLOPs", on="screen", label="compare  ")
    sections = [view.Section(parts=[head], place=0)]
    for place, phase in enumerate(dict.fromkeys(comparison.phase for comparison in comparisons), 1):
        counters = [comparison for comparison in comparisons if comparison.phase == phase]
        ours = f"rooftrace: {format_flops(counters[0].flops_matrix)} (a multiply-add is 2)"
        parts = [view.Note(ours, on="page"), view.Note(ours, on="screen", label=f"{phase}  ")]
        for comparison in counters:
            parts += _counter(comparison)
        sections.append(view.Section(title=phase, parts=parts, place=place))
    return view.View(tuple(sections), f"Matrix FLOPs of `{name}`, counted by others")


def _counter(comparison: Comparison) -> list[Any]:
    """The count of one counter, and each difference: a table on a page, lines on a screen."""
    text, version = verdict(comparison), f"{comparison.peer} {comparison.version}".rstrip()
    equal = not comparison.error and comparison.flops_matrix == comparison.peer_matrix
    mark = "warn" if comparison.error else "good" if equal else "bad"
    parts: list[view.Part] = [
        view.Note(f"**{comparison.peer}** {comparison.version}: {text}", on="page", bullet=1),
        view.Note(text, mark, on="screen", label=f"  {version}  "),
    ]
    for line in notes(comparison):
        parts.append(view.Note(line, on="page", bullet=2))
        parts.append(view.Note(f"    {line}", "faint", on="screen"))
    rows = [
        {
            "module": times(d.module, d.instances),
            "ours": counts(d.ours),
            "theirs": counts(d.theirs),
            "gap": signed(d.delta),
            "reason": d.reason or "not explained",
        }
        for d in comparison.differences
    ]
    parts.append(view.Table(columns=_COLUMNS, rows=rows, padded=False, on="page"))
    for d, row in zip(comparison.differences[:SHOWN], rows, strict=False):
        reason = view.Note(
            f"{row['gap']}: {row['reason']}",
            "" if d.reason else "bad",
            on="screen",
            label=f"    {row['module']}  ",
        )
        counted = f"      ours {row['ours']}; theirs {row['theirs']}"
        parts += [reason, view.Note(counted, "faint", on="screen")]
    if len(rows) > SHOWN:
        more = f"    ... and {len(rows) - SHOWN} more (--format json has all)"
        parts.append(view.Note(more, "faint", on="screen"))
    return parts
