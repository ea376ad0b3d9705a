"""What changed module by module; a module that moved or was renamed is one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from rooftrace.costmodels.findings.diffs import changes
from rooftrace.costmodels.findings.diffs.clusters import ROUNDING
from rooftrace.costmodels.findings.diffs.edits import Edit
from rooftrace.costmodels.findings.diffs.sides import Sides
from rooftrace.tracer.changes import Change
from rooftrace.tracer.changes.aligning import union
from rooftrace.tracer.paths import pattern_of


@dataclass(slots=True)
class _Sums:
    flops: float = 0
    bytes: float = 0
    time: float = 0.0
    ops: Counter[str] = field(default_factory=Counter)


def module_changes(sides: Sides, edits: Sequence[Edit]) -> tuple[changes.ModuleChange, ...]:
    """Modules whose ops or costs differ, the largest change of time first."""
    sums = [_sums(sides, number) for number in range(2)]
    op_changes: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for path, kind, name, times in _op_changes(sides, edits):
        op_changes[path][kind][name] += times
    single = []
    rounding = ROUNDING * max(sum(each.time for each in side.values()) for side in sums)
    for path, a, b in union(sums[0], sums[1], _Sums()):
        own = op_changes.get(path, {})
        same = a.flops == b.flops and a.bytes == b.bytes and abs(a.time - b.time) <= rounding
        if same and not own:
            continue
        status = "added" if not a.ops else "removed" if not b.ops else "changed"
        graph = sides[int(status != "removed")].graph
        single.append(
            changes.ModuleChange(
                path=path,
                count=1,
                status=status,
                kind=graph.modules.get(path, ""),
                flops=Change(a.flops, b.flops),
                bytes=Change(a.bytes, b.bytes),
                time=Change(a.time, b.time),
                ops_added=dict(sorted(own.get("added", {}).items())),
                ops_removed=dict(sorted(own.get("removed", {}).items())),
                resized=tuple(own.get("resized", ())),
            )
        )
    return tuple(
        sorted(_collapsed(single), key=lambda m: (-abs(m.time.delta), -abs(m.bytes.delta), m.path))
    )


def _sums(sides: Sides, number: int) -> dict[str, _Sums]:
    """FLOPs by the op's own module; bytes and time by the module that leads the kernel."""
    sums: dict[str, _Sums] = defaultdict(_Sums)
    side, graph = sides[number], sides[number].graph
    for op in graph.kernels():
        paths = sides.modules(number, op)
        flops = side.cost(op.id).flops()
        for path in paths:
            sums[path].ops[op.name] += 1
            sums[path].flops += graph.times(op) * flops / len(paths)
    for row in side.estimate.rows:
        lead = next((op for op in row.ops if graph.ops[op].module == row.module), row.ops[0])
        paths = row.modules
        if not number and sides.modules(0, graph.ops[lead]) != side.paths(graph.ops[lead]):
            paths = sides.modules(0, graph.ops[lead])
        for path in paths:
            sums[path].bytes += row.bytes / len(paths)
            sums[path].time += row.timing.t_device / len(paths)
    return sums


def _op_changes(sides: Sides, edits: Sequence[Edit]) -> Iterator[tuple[str, str, str, int]]:
    """Module, kind of change, name of the op, and how many there are in one module."""
    for edit in edits:
        for number, op_id in edit.ops:
            if edit.is_pair and not number:
                continue
            op = sides[number].graph.ops[op_id]
            kind = ("removed", "added")[number]
            if edit.is_pair:
                for path in sides.modules(number, op):
                    yield path, "resized", op.name, 1
            else:
                paths = sides.left(number, op, edit.times)
                for path in paths:
                    yield path, kind, op.name, max(1, edit.times // len(paths))


def _collapsed(single: Sequence[changes.ModuleChange]) -> list[changes.ModuleChange]:
    """The changes, with equal ones of modules whose paths differ only in indices as one."""
    groups: dict[Any, list[changes.ModuleChange]] = defaultdict(list)
    for change in single:
        key = (
            pattern_of(change.path),
            change.status,
            change.kind,
            change.flops.delta,
            change.bytes.delta,
            tuple(change.ops_added.items()),
            tuple(change.ops_removed.items()),
            tuple(change.resized),
        )
        groups[key].append(change)
    return [
        replace(reduce(_added, members), path=key[0]) if len(members) > 1 else members[0]
        for key, members in groups.items()
    ]


def _added(first: changes.ModuleChange, other: changes.ModuleChange) -> changes.ModuleChange:
    return replace(
        first,
        count=first.count + other.count,
        flops=first.flops + other.flops,
        bytes=first.bytes + other.bytes,
        time=first.time + other.time,
    )
