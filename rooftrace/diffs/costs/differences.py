"""The difference of two revisions: totals, modules matched by path, ops behind a change."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.memory import Held, Memory
from rooftrace.diffs import Change
from rooftrace.diffs.changes import union
from rooftrace.diffs.costs import changes
from rooftrace.diffs.costs.causes import (
    RECOMPUTE,
    by_weight,
    cause_of,
    change_words,
    layer_of,
    layers_of,
    leading,
    ops_words,
    tied,
)
from rooftrace.diffs.costs.changes import hidden, mesh_words, module_changes, network_totals
from rooftrace.diffs.costs.clusters import (
    OPTIMIZER,
    Cluster,
    Edit,
    clusters_of,
    edits_of,
    op_of,
    site,
)
from rooftrace.diffs.costs.sides import Side, Sides
from rooftrace.graph import OpGraph, pattern_of


def compare_sources(before: Mapping[str, str], after: Mapping[str, str]) -> changes.Sources | None:
    """Compare the digests of two sides' source files by path; None unless both have files.

    Files are matched by their path below the folder that all of their side are in.
    """
    if not before or not after:
        return None
    files = union(_below(before), _below(after), None)
    return changes.Sources(
        (len(before), len(after)),
        tuple(name for name, old, new in files if old != new),
        list(before) == list(after),
    )


def _below(files: Mapping[str, str]) -> dict[str, str]:
    folder = os.path.commonpath([os.path.dirname(path) for path in files])
    return {os.path.relpath(path, folder): content for path, content in files.items()}


def diff_estimates(
    before: Mapping[str, Estimate],
    after: Mapping[str, Estimate],
    names: tuple[str, str] = ("before", "after"),
    eager: tuple[Mapping[str, Estimate], Mapping[str, Estimate]] | None = None,
) -> changes.Diff:
    """Compare estimates by phase.  Phases that only one side has are listed, not compared.

    eager: the same steps in eager mode, whose times are added to each cause.  Raises ValueError
    without estimates, and where those of one side are on several chips or execution models.
    """
    shared = [phase for phase in before if phase in after]
    sides = [tuple(side.values()) for side in (before, after)]
    priced = tuple(_priced(side or sides[1 - number]) for number, side in enumerate(sides))
    return changes.Diff(
        names=names,
        chips=(priced[0][0], priced[1][0]),
        executions=(priced[0][1], priced[1][1]),
        expected=all(each.expected for side in sides for each in side),
        phases=tuple(
            _phase(
                before[phase],
                after[phase],
                (eager[0][phase], eager[1][phase]) if eager is not None else None,
            )
            for phase in shared
        ),
        only_before=tuple(p for p in before if p not in after),
        only_after=tuple(p for p in after if p not in before),
    )


def _priced(estimates: tuple[Estimate, ...]) -> tuple[str, str]:
    """The chip and the execution model of all estimates of a side."""
    priced = {(each.chip.name, each.execution): None for each in estimates}
    if len(priced) != 1:
        listed = ", ".join(f"{model.name} on {chip}" for chip, model in priced) or "no estimates"
        raise ValueError(f"expected estimates on one chip under one execution model, got {listed}")
    ((chip, model),) = priced
    return chip, model.name


def _phase(
    before: Estimate, after: Estimate, eager: tuple[Estimate, Estimate] | None
) -> changes.PhaseDiff:
    first, second = before.totals, after.totals
    if before.exchanges or after.exchanges:
        first, second = first | network_totals(before), second | network_totals(after)
    sides = Sides(before, after)
    edits = edits_of(sides)
    rows = diff_rows(sides, edits, Sides(*eager) if eager else None)
    held = held_changes(before.memory, after.memory, sides.renamed)
    return changes.PhaseDiff(
        phase=before.phase,
        totals={name: Change(first[name], second[name]) for name in first},
        # Without rows, whatever differs module by module is the same work in another place, and
        # with equal peaks whatever is held is the same under other names.
        modules=module_changes(sides, edits) if rows else (),
        rows=rows,
        held=held if rows or first["memory"] != second["memory"] else (),
        assumed=_assumed(before.graph, after.graph),
        meshes=(before.graph.mesh, after.graph.mesh),
    )


def _assumed(before: OpGraph, after: OpGraph) -> tuple[str, ...]:
    """Assumptions that only one side makes."""
    first, second = (dict.fromkeys(a.text for a in graph.assumptions) for graph in (before, after))
    new = [f"+ {text}" for text in second if text not in first]
    return (*new, *(f"- {text}" for text in first if text not in second))


# -- held ------------------------------------------------------------------------------------------


def held_changes(
    before: Memory, after: Memory, renamed: Mapping[str, str]
) -> tuple[changes.HeldChange, ...]:
    """Tensors of which more or less is held at the peak, the largest change first.

    Together they are the difference of the peaks.  renamed: paths of the second side (indices
    starred) by those of the first.
    """
    sums: list[Counter[Hashable]] = [Counter(), Counter()]
    tensors_of: dict[Hashable, Held] = {}
    moved = [_renamed(held, renamed) for held in before.tensors]
    for side, tensors in enumerate((moved, after.tensors)):
        for held in tensors:
            key = held.role, held.module, held.op, held.part, held.name, held.saved
            sums[side][key] += held.bytes
            tensors_of[key] = held
    differing = [
        changes.HeldChange(held=held, bytes=Change(sums[0][key], sums[1][key]))
        for key, held in tensors_of.items()
        if sums[0][key] != sums[1][key]
    ]
    kept = _without_moved(differing)
    return tuple(
        sorted(kept, key=lambda row: (-abs(row.bytes.delta), row.held.module, row.held.name))
    )


def _renamed(held: Held, renamed: Mapping[str, str]) -> Held:
    new = renamed.get(held.module)
    if new is None:
        return held
    name = held.name
    if name.startswith(f"{held.module}."):
        name = f"{new}{name[len(held.module) :]}"
    return replace(held, module=new, name=name)


def _without_moved(differing: Sequence[changes.HeldChange]) -> list[changes.HeldChange]:
    """The changes without tensors that another module makes now, as many and as large."""
    groups: dict[Hashable, list[changes.HeldChange]] = defaultdict(list)
    for row in differing:
        name = row.held.name.rpartition(".")[2]
        groups[replace(row.held, module="", name=name, shape=(), count=1, bytes=0)].append(row)
    return [
        row
        for members in groups.values()
        if sum(each.bytes.delta for each in members)
        for row in members
    ]


# -- rows ------------------------------------------------------------------------------------------
# One row for each cause, with its costs before and after; the rows of a phase add up to the
# difference of its totals.


_COUNT = re.compile(r" x\d+")


def diff_rows(
    sides: Sides, edits: Sequence[Edit], eager: Sides | None
) -> tuple[changes.DiffRow, ...]:
    """The rows of a phase, the largest change of time first; waiting for the host comes last.

    eager: the same two steps in eager mode.  It runs the ops that the code calls, so its edits are
    named in the causes, and its times are added.
    """
    clusters = _folded(sides, clusters_of(sides, edits))
    if eager is None:
        rows = [_row(sides, cluster, sides, cluster.edits) for cluster in clusters]
    else:
        rows = _with_eager(sides, clusters, eager)
    rows.sort(key=_first)
    meshes = mesh_words(sides.before.graph.mesh, sides.after.graph.mesh)
    if rows and (shared := [*filter(None, [meshes]), *tied(sides)]):
        rows[0] = replace(rows[0], cause="; ".join([*shared, rows[0].cause]))
    return (*rows, *_hiding(sides), *_waiting(sides))


def _first(row: changes.DiffRow) -> tuple[float, float, float, str]:
    eager = 0.0 if row.eager is None else row.eager.delta
    return -abs(row.time.delta), -abs(row.bytes.delta), -abs(eager), row.cause


# -- clusters that are one change ------------------------------------------------------------------


def _folded(sides: Sides, clusters: Sequence[Cluster]) -> list[Cluster]:
    """The clusters; work that moved, and an optimizer that follows its parameters, are in one."""
    left = list(clusters)
    moved: dict[Hashable, Cluster] = {}
    for cluster in clusters:
        key = _only(sides, cluster, 0)
        if key is not None:
            moved[key] = cluster
    for cluster in clusters:
        key = _only(sides, cluster, 1)
        if key is not None and key in moved:
            other = moved.pop(key)
            left.remove(other)
            left[left.index(cluster)] = _one(other, cluster)
    left = _alike(sides, left)
    unexplained = [each for each in left if not each.edits]
    if len(unexplained) > 1:
        left = [each for each in left if each.edits]
        left.append(reduce(_one, unexplained))
    others = [each for each in left if each.edits and not _is_optimizer(sides, each)]
    if len(others) == 1:
        follow = [each for each in left if _is_optimizer(sides, each)]
        left = [each for each in left if each not in follow]
        for each in follow:
            place = left.index(others[0])
            left[place] = others[0] = _one(left[place], each)
    return left


def _alike(sides: Sides, clusters: Sequence[Cluster]) -> list[Cluster]:
    """The clusters, those of which the code's change has the same words as one."""
    groups: dict[Hashable, list[Cluster]] = defaultdict(list)
    for number, cluster in enumerate(clusters):
        words: Hashable = number
        if cluster.edits:
            structure, parts = change_words(sides, cluster.edits)
            # Other counts and other names of parameters are the same change elsewhere.
            kinds = [_COUNT.sub("", part) for part in parts if "parameter " not in part]
            words = (*structure, *kinds) or number
        groups[words].append(cluster)
    return [reduce(_one, members) for members in groups.values()]


def _only(sides: Sides, cluster: Cluster, number: int) -> Hashable:
    """Key of the kernels of a cluster that is on one side alone; None for another one."""
    if not cluster.edits or (cluster.before, cluster.after)[1 - number]:
        return None
    kernels: Counter[Hashable] = Counter()
    for edit in cluster.edits:
        op = (edit.before, edit.after)[number]
        if op is None or edit.is_pair:
            return None
        kernels[sides[number].flow.exact(op)] += edit.times
    return frozenset(kernels.items())


def _one(first: Cluster, second: Cluster) -> Cluster:
    return Cluster(
        first.before + second.before, first.after + second.after, first.edits + second.edits
    )


def _is_optimizer(sides: Sides, cluster: Cluster) -> bool:
    return bool(cluster.edits) and all(
        op_of(sides, edit).part == OPTIMIZER for edit in cluster.edits
    )


# -- one row ---------------------------------------------------------------------------------------


def _row(sides: Sides, cluster: Cluster, code: Sides, edits: Sequence[Edit]) -> changes.DiffRow:
    """The row of a cluster; code and edits are of the step as the code runs it."""
    first = by_weight(code, leading(code, edits))
    if layers := layers_of(code, first):
        modules: Mapping[str, int] = {each.pattern: len(each.alone) for each in layers}
        before, after = (code[n].graph.calls.get(layers[0].pattern) for n in range(2))
    else:
        modules = _modules(code, first) if first else _modules_of_rows(sides, cluster)
        before, after = _lines(code, first)
    return changes.DiffRow(
        cause=cause_of(sides, cluster, code, edits),
        modules=tuple(modules),
        count=sum(modules.values()),
        before=before,
        after=after,
        **sides.costs(cluster.before, cluster.after),
    )


def _modules(sides: Sides, edits: Sequence[Edit]) -> Mapping[str, int]:
    """The modules that edits are in by their pattern, and how many there are of each."""
    paths: dict[str, dict[str, None]] = defaultdict(dict)
    for edit in edits:
        number = int(edit.after is not None)
        op = op_of(sides, edit)
        for path in sides.left(number, op, edit.times):
            paths[pattern_of(path)][path] = None
    # A lone module keeps its index.
    return {
        pattern if len(members) > 1 else next(iter(members)): len(members)
        for pattern, members in paths.items()
    }


def _modules_of_rows(sides: Sides, cluster: Cluster) -> Mapping[str, int]:
    paths: dict[str, dict[str, None]] = defaultdict(dict)
    for row in cluster.after:
        for path in sides.after.estimate.rows[row].modules:
            paths[pattern_of(path)][path] = None
    return {pattern: len(members) for pattern, members in paths.items()}


def _lines(sides: Sides, edits: Sequence[Edit]) -> tuple[str | None, str | None]:
    """The line of the first edit on either side, or that of a matched kernel in its line."""
    lines: list[str | None] = [None, None]
    for edit in edits:
        for number, op in edit.ops:
            if lines[number] is None:
                lines[number] = _line(sides[number], op)
    for number in range(2):
        line = lines[1 - number]
        if lines[number] is None and line is not None:
            lines[number] = _partner_line(sides, 1 - number, line)
    return lines[0], lines[1]


def _line(side: Side, number: int) -> str | None:
    """The line of an op; of a recomputed one the line that calls its layer."""
    op = side.graph.ops[number]
    if op.part == RECOMPUTE:
        return side.graph.calls.get(layer_of(op.module)) or op.source or None
    return op.source or None


def _partner_line(sides: Sides, number: int, line: str) -> str | None:
    """The line on the other side of a matched kernel that stands in this line."""
    partners, ops = sides.partners[number], sides[number].graph.ops
    for op, partner in partners.items():
        if ops[op].source == line:
            return sides[1 - number].graph.ops[partner].source or None
    return None


# -- eager mode; the host --------------------------------------------------------------------------


def _with_eager(sides: Sides, clusters: Sequence[Cluster], eager: Sides) -> list[changes.DiffRow]:
    """A row for each cluster with the time that the same change takes in eager mode.

    A change that only eager mode pays for has a separate row.
    """
    owners: dict[Hashable, int] = {}
    for number, cluster in enumerate(clusters):
        for place in _sites(sides, cluster):
            owners.setdefault(place, number)
    in_eager: dict[int, Cluster] = {}
    rows = []
    for cluster in _folded(eager, clusters_of(eager, edits_of(eager))):
        owner = next((owners[p] for p in _sites(eager, cluster) if p in owners), None)
        if owner is None:
            row = _row(eager, cluster, eager, cluster.edits)
            none = changes.NONE
            rows.append(
                replace(row, eager=row.time, time=none, bytes=none, flops=none, kernels=none)
            )
        else:
            in_eager[owner] = _one(in_eager[owner], cluster) if owner in in_eager else cluster
    for number, cluster in enumerate(clusters):
        other = in_eager.get(number, Cluster((), (), ()))
        code, edits = (eager, other.edits) if other.edits else (sides, cluster.edits)
        row = _row(sides, cluster, code, edits)
        time = eager.costs(other.before, other.after)["time"]
        is_free = not row.time.delta and not row.kernels.delta
        fused = "; fused away" if is_free and time.delta else ""
        rows.append(replace(row, cause=row.cause + fused, eager=time))
    return rows


def _sites(sides: Sides, cluster: Cluster) -> dict[Hashable, None]:
    """The places of the edits of a cluster, those of its roots first."""
    sites: dict[Hashable, None] = {}
    for edit in sorted(cluster.edits, key=lambda edit: not edit.is_root):
        for number, op in edit.ops:
            sites[number, site(sides[number], op)] = None
    return sites


def _hiding(sides: Sides) -> list[changes.DiffRow]:
    """A row for the time in which exchanges overlap with computing, where that differs."""
    change = Change(*(-hidden(side.estimate) for side in (sides.before, sides.after)))
    amount = "less" if change.delta > 0 else "more"
    return _without_kernels(sides, change, f"{amount} communication is hidden behind computing")


def _waiting(sides: Sides) -> list[changes.DiffRow]:
    """A row for the time in which the device waits for the host, where that differs."""
    waits = []
    for side in (sides.before, sides.after):
        busy = sum(row.timing.t_device for row in side.estimate.rows)
        waits.append(side.estimate.t_est - busy + hidden(side.estimate))
    change = Change(*waits)
    longer = "longer" if change.delta > 0 else "less long"
    edits = [*_synchronising(sides, 1), *_synchronising(sides, 0)]
    cause = "; ".join([f"the device waits {longer} for the host", *ops_words(sides, edits)])
    modules, (before, after) = _modules(sides, edits), _lines(sides, edits)
    names, count = tuple(modules), sum(modules.values())
    rows = _without_kernels(sides, change, cause)
    return [replace(row, modules=names, count=count, before=before, after=after) for row in rows]


def _synchronising(sides: Sides, number: int) -> Iterator[Edit]:
    """The ops of one side at which the host waits, and on the other side does not."""
    partners, there = sides.partners[number], sides[1 - number].waits
    for kernel, op in sides[number].waits.items():
        if kernel >= 0 and partners.get(kernel) not in there:
            times = sides[number].graph.times(sides[number].graph.ops[op])
            yield Edit(None, op, times) if number else Edit(op, None, times)


def _without_kernels(sides: Sides, change: Change, cause: str) -> list[changes.DiffRow]:
    """A row of time alone; none where it is the rounding of a sum."""
    time = sides.seconds(change.before, change.after)
    return [changes.DiffRow(cause=cause, time=time)] if time.delta else []
