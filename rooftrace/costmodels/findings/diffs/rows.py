"""The rows of a diff: one for each cause, with what it costs before and after.

The rows of a phase add up to the difference of its totals.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from rooftrace.costmodels.findings.diffs import changes
from rooftrace.costmodels.findings.diffs.causes import (
    RECOMPUTE,
    by_weight,
    cause_of,
    change_words,
    layer_of,
    layers_of,
    leading,
    tied,
)
from rooftrace.costmodels.findings.diffs.clusters import (
    OPTIMIZER,
    ROUNDING,
    Cluster,
    clusters_of,
    site,
)
from rooftrace.costmodels.findings.diffs.communication import hidden, mesh_words
from rooftrace.costmodels.findings.diffs.edits import Edit, edits_of, op_of
from rooftrace.costmodels.findings.diffs.modules import Whereabouts
from rooftrace.costmodels.findings.diffs.sides import Side, Sides
from rooftrace.tracer.changes import Change
from rooftrace.tracer.paths import pattern_of

_COUNT = re.compile(r" x\d+")


def diff_rows(
    sides: Sides, places: Whereabouts, edits: Sequence[Edit], eager: Sides | None
) -> tuple[changes.DiffRow, ...]:
    """The rows of a phase, the largest change of time first; waiting for the host comes last.

    eager: the same two steps in eager mode.  It runs the ops that the code calls, so its edits are
    named in the causes, and its times stand beside.
    """
    clusters = _folded(sides, clusters_of(sides, edits))
    if eager is None:
        rows = [_row(sides, places, cluster, sides, cluster.edits) for cluster in clusters]
    else:
        rows = _with_eager(sides, places, clusters, eager)
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
    own = [each for each in left if each.edits and not _is_optimizer(sides, each)]
    if len(own) == 1:
        follow = [each for each in left if _is_optimizer(sides, each)]
        left = [each for each in left if each not in follow]
        for each in follow:
            place = left.index(own[0])
            left[place] = own[0] = _one(left[place], each)
    return left


def _alike(sides: Sides, clusters: Sequence[Cluster]) -> list[Cluster]:
    """The clusters, those of which the code's change has the same words as one."""
    groups: dict[Hashable, list[Cluster]] = defaultdict(list)
    for number, cluster in enumerate(clusters):
        words: Hashable = number
        if cluster.edits and not _is_optimizer(sides, cluster):
            structure, parts = change_words(sides, cluster.edits)
            # Other counts and other names of parameters are the same change elsewhere.
            kinds = [_COUNT.sub("", part) for part in parts if "parameter " not in part]
            words = (*structure, *kinds) or number
        groups[words].append(cluster)
    return [reduce(_one, members) for members in groups.values()]


def _only(sides: Sides, cluster: Cluster, number: int) -> Hashable:
    """What a cluster does if it is on one side alone; None for another one."""
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


def _row(
    sides: Sides, places: Whereabouts, cluster: Cluster, code: Sides, edits: Sequence[Edit]
) -> changes.DiffRow:
    """The row of a cluster; places, code and edits are of the step as the code runs it."""
    first = by_weight(code, leading(code, edits))
    if layers := layers_of(code, first):
        modules: Mapping[str, int] = {each.pattern: len(each.alone) for each in layers}
        before, after = (code[n].graph.calls.get(layers[0].pattern) for n in range(2))
    else:
        modules = _modules(code, places, first) if first else _modules_of_rows(sides, cluster)
        before, after = _lines(code, first)
    return changes.DiffRow(
        cause=cause_of(sides, cluster, code, edits),
        modules=tuple(modules),
        count=sum(modules.values()),
        before=before,
        after=after,
        **sides.costs(cluster.before, cluster.after),
    )


def _modules(sides: Sides, places: Whereabouts, edits: Sequence[Edit]) -> Mapping[str, int]:
    """The modules that edits are in by their pattern, and how many there are of each."""
    paths: dict[str, dict[str, None]] = defaultdict(dict)
    for edit in edits:
        number = int(edit.after is not None)
        op = op_of(sides, edit)
        for path in places.left(number, op, edit.times):
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
    """The line of the first edit on either side: its own, or that of what stands in its line."""
    lines: list[str | None] = [None, None]
    for edit in edits:
        for number, op in edit.ops:
            if lines[number] is None:
                lines[number] = _line(sides[number], op)
    for number in range(2):
        line = lines[1 - number]
        if lines[number] is None and line is not None:
            lines[number] = _beside(sides, 1 - number, line)
    return lines[0], lines[1]


def _line(side: Side, number: int) -> str | None:
    """The line of an op; of a recomputed one the line that calls its layer."""
    op = side.graph.ops[number]
    if op.part == RECOMPUTE:
        return side.graph.calls.get(layer_of(op.module)) or op.source or None
    return op.source or None


def _beside(sides: Sides, number: int, line: str) -> str | None:
    """The line on the other side of a matched kernel that stands in this line."""
    partners, ops = sides.partners[number], sides[number].graph.ops
    for op, partner in partners.items():
        if ops[op].source == line:
            return sides[1 - number].graph.ops[partner].source or None
    return None


# -- beside eager mode; the host -------------------------------------------------------------------


def _with_eager(
    sides: Sides, places: Whereabouts, clusters: Sequence[Cluster], eager: Sides
) -> list[changes.DiffRow]:
    """A row for each cluster with the time that the same change takes in eager mode.

    A change that only eager mode pays for has a row of its own.
    """
    owners: dict[Hashable, int] = {}
    for number, cluster in enumerate(clusters):
        for place in _sites(sides, cluster):
            owners.setdefault(place, number)
    called = Whereabouts(eager)
    beside: dict[int, Cluster] = {}
    rows = []
    for cluster in _folded(eager, clusters_of(eager, edits_of(eager))):
        owner = next((owners[p] for p in _sites(eager, cluster) if p in owners), None)
        if owner is None:
            row = _row(eager, called, cluster, eager, cluster.edits)
            none = Change(0, 0)
            rows.append(
                replace(row, eager=row.time, time=none, bytes=none, flops=none, kernels=none)
            )
        else:
            beside[owner] = _one(beside[owner], cluster) if owner in beside else cluster
    for number, cluster in enumerate(clusters):
        other = beside.get(number, Cluster((), (), ()))
        if other.edits:
            row = _row(sides, called, cluster, eager, other.edits)
        else:
            row = _row(sides, places, cluster, sides, cluster.edits)
        time = eager.costs(other.before, other.after)["time"]
        is_free = abs(row.time.delta) <= ROUNDING * row.time.before and not row.kernels.delta
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
    """A row for the time in which exchanges run beside computing, where that differs."""
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
    return _without_kernels(sides, change, f"the device waits {longer} for the host")


def _without_kernels(sides: Sides, change: Change, cause: str) -> list[changes.DiffRow]:
    """A row of time alone; none where it is the rounding of a sum."""
    if abs(change.delta) <= ROUNDING * max(sides.before.estimate.t_est, sides.after.estimate.t_est):
        return []
    nothing = Change(0, 0)
    return [
        changes.DiffRow(
            cause=cause,
            time=change,
            bytes=nothing,
            flops=nothing,
            kernels=nothing,
        )
    ]
