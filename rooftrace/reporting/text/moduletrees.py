"""A tree of modules in words: as torchinfo prints it, and as fvcore's table of FLOPs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.findings import moduletree
from rooftrace.hardware.units import (
    format_capacity,
    format_count,
    format_flops,
    format_time,
    format_traffic,
)
from rooftrace.reporting.view import model as view, units, words

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating.breakdowns import Breakdown, BreakdownRow
    from rooftrace.costmodels.findings.moduletree import ModuleNode, Summary
    from rooftrace.tracer.graph import OpGraph

GRAPH_DEPTH = 3
"""How far down the modules of a graph are shown."""
_LEAST = 44
"""Letters of a module in the tree that stay on a narrow screen."""
_MOST = 25
"""Rows of a breakdown that are shown."""

_COUNT = units.Unit("", "integer", format_count)
_EXACT = units.Unit("", "integer", lambda number: f"{number:,}")


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
    "num_params": view.Column("params", _EXACT, "parameters"),
    "params_percent": view.Column("params_share", units.SHARE, "of all"),
    "kernel_size": view.Column("kernel_size", _SIZES, "kernel"),
    "mult_adds": view.Column("macs", _EXACT, "mult-adds", of=lambda node: node.macs),
    "flops": view.Column("flops", units.FLOP, "FLOP"),
    "bytes": view.Column("bytes", units.BYTE, "HBM"),
    "time": view.Column("seconds", units.SECOND, "kernels"),
    "trainable": view.Column("trainable", units.TEXT, "trainable", of=lambda n: _trainable(n)),
}
"""What can stand beside each module, by the names that torchinfo has, and three more."""


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
    own = [column for column in columns if column.key != "params_share"]  # it is of the root's
    return {column.key: column.read(node) for column in own}


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
    trainable = result.trainable_params
    asked = "" if trainable is None else f", {trainable:,} of them trainable"
    yield view.Note(f"{result.total_params:,}{asked}", label="parameters  ")
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
    from rooftrace.costmodels.estimating import estimate

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
    """The modules under their whole paths: a table for a page."""
    columns = [COLUMNS[name] for name in result.col_names]
    rows = []
    for node in result.tree.walk(result.depth):
        times = f" x{node.count}" if node.count > 1 else ""
        if node.flops or node.params or not node.depth:
            rows.append({"layer": f"{node.path or node.kind}{times}", **_cells(node, columns)})
    layer = view.Column("layer", units.TEXT, "module")
    return view.Table(columns=[layer, *columns], rows=rows)
