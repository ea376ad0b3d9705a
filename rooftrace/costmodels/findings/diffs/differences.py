"""What changed between two revisions: totals, modules matched by path, ops behind a change."""

from __future__ import annotations

import difflib
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.findings.diffs.changes import (
    Change,
    Diff,
    ModuleChange,
    PhaseDiff,
    Sources,
)
from rooftrace.costmodels.findings.diffs.conditions import METRICS
from rooftrace.costmodels.fusion import runs
from rooftrace.tracer.graph import Op, OpGraph
from rooftrace.tracer.paths import pattern_of


def compare_sources(before: Mapping[str, str], after: Mapping[str, str]) -> Sources | None:
    """Compare the digests of two sides' source files by path; None unless both have files.

    Files are matched by their path below the folder that all of their side are in.
    """
    if not before or not after:
        return None
    first, second = _below(before), _below(after)
    names = dict.fromkeys([*first, *second])
    return Sources(
        (len(before), len(after)),
        tuple(name for name in names if first.get(name) != second.get(name)),
        list(before) == list(after),
    )


def _below(files: Mapping[str, str]) -> dict[str, str]:
    folder = os.path.commonpath([os.path.dirname(path) for path in files])
    return {os.path.relpath(path, folder): content for path, content in files.items()}


def diff_estimates(
    before: Mapping[str, Estimate],
    after: Mapping[str, Estimate],
    names: tuple[str, str] = ("before", "after"),
) -> Diff:
    """Compare estimates by phase.  Phases that only one side has are listed, not compared.

    Raises ValueError unless all are on the same chip under the same execution model.
    """
    shared = [phase for phase in before if phase in after]
    everything = (*before.values(), *after.values())
    priced = {(each.chip.name, each.execution): None for each in everything}
    if len(priced) != 1:
        listed = ", ".join(f"{model.name} on {chip}" for chip, model in priced) or "no estimates"
        raise ValueError(f"expected estimates on one chip under one execution model, got {listed}")
    some = everything[0]
    return Diff(
        names=names,
        chip=some.chip.name,
        execution=some.execution.name,
        expected=some.expected,
        phases=tuple(_phase(phase, before[phase], after[phase]) for phase in shared),
        only_before=tuple(p for p in before if p not in after),
        only_after=tuple(p for p in after if p not in before),
    )


def _phase(phase: str, before: Estimate, after: Estimate) -> PhaseDiff:
    def totals(estimate: Estimate) -> dict[str, float]:
        return {
            "time": estimate.t_est,
            "flops": estimate.flops,
            "bytes": estimate.bytes_hbm,
            "memory": estimate.memory.peak,
            "params": int(estimate.graph.model.get("params", 0)),
            "kernels": estimate.kernels,
        }

    first, second = totals(before), totals(after)
    return PhaseDiff(
        phase,
        {name: Change(first[name], second[name]) for name in METRICS},
        _modules(before, after),
    )


@dataclass
class _Sums:
    flops: int = 0
    bytes: int = 0
    time: float = 0.0


def _modules(before: Estimate, after: Estimate) -> tuple[ModuleChange, ...]:
    ops = (_ops_by_module(before.plan.source), _ops_by_module(after.plan.source))
    sums = (_sums(before), _sums(after))
    paths = dict.fromkeys([*ops[0], *ops[1], *sums[0], *sums[1]])
    single: list[ModuleChange] = []
    empty = _Sums()
    for path in paths:
        a, b = sums[0].get(path, empty), sums[1].get(path, empty)
        added, removed, resized = _op_changes(ops[0].get(path, []), ops[1].get(path, []))
        same = not added and not removed and not resized
        if same and a.flops == b.flops and a.bytes == b.bytes:
            continue
        status = "added" if path not in ops[0] else "removed" if path not in ops[1] else "changed"
        kinds = after.graph.modules if status != "removed" else before.graph.modules
        single.append(
            ModuleChange(
                path=path,
                count=1,
                status=status,
                kind=kinds.get(path, ""),
                flops=Change(a.flops, b.flops),
                bytes=Change(a.bytes, b.bytes),
                time=Change(a.time, b.time),
                ops_added=added,
                ops_removed=removed,
                resized=resized,
            )
        )
    return tuple(
        sorted(_collapsed(single), key=lambda m: (-abs(m.time.delta), -abs(m.bytes.delta), m.path))
    )


def _collapsed(changes: Sequence[ModuleChange]) -> list[ModuleChange]:
    """The changes, with equal ones of modules whose paths differ only in indices as one."""
    groups: dict[Any, list[ModuleChange]] = defaultdict(list)
    for change in changes:
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
        members[0] if len(members) == 1 else _together(key[0], members)
        for key, members in groups.items()
    ]


def _together(path: str, members: Sequence[ModuleChange]) -> ModuleChange:
    def total(name: str) -> Change:
        parts = [getattr(m, name) for m in members]
        return Change(sum(p.before for p in parts), sum(p.after for p in parts))

    return replace(
        members[0],
        path=path,
        count=len(members),
        flops=total("flops"),
        bytes=total("bytes"),
        time=total("time"),
    )


def _sums(estimate: Estimate) -> dict[str, _Sums]:
    """FLOPs by the op's own module; bytes and time by the module that leads the kernel."""
    sums: dict[str, _Sums] = defaultdict(_Sums)
    for op, cost in zip(estimate.graph.ops, estimate.plan.op_costs, strict=True):
        if cost.work:
            for path, times in _calls(estimate.graph, op).items():
                sums[path].flops += times * cost.flops()
    for row in estimate.rows:
        for path in row.modules:
            entry = sums[path]
            entry.bytes += row.bytes // len(row.modules)
            entry.time += row.timing.t_device / len(row.modules)
    return sums


_Kernel = tuple[str, str, int]
"""Name, sizes, how many of them one after the other."""


def _ops_by_module(graph: OpGraph) -> dict[str, list[_Kernel]]:
    """Each module's kernels in order."""
    kernels: dict[str, list[_Kernel]] = defaultdict(list)
    for op in graph.kernels():
        for path, times in _calls(graph, op).items():
            kernels[path].append((op.name, _sizes(graph, op), times))
    return kernels


def _calls(graph: OpGraph, op: Op) -> dict[str, int]:
    """How often an op runs in each module."""
    paths = runs.kernel_modules(graph, (op.id,), op)
    return dict.fromkeys(paths, graph.times(op) // len(paths))


def _sizes(graph: OpGraph, op: Op) -> str:
    tensors = (graph.values[i] for i in (*op.inputs[:3], *op.outputs[:1]))
    return " ".join(f"{t.dtype}{list(t.shape)}" for t in tensors)


def _op_changes(
    before: Sequence[_Kernel],
    after: Sequence[_Kernel],
) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
    """Ops added, ops removed, and names of ops whose sizes or precisions changed in place."""
    if before == after:
        return {}, {}, ()
    names = [kernel[0] for kernel in before], [kernel[0] for kernel in after]
    added, removed = Counter[str](), Counter[str]()
    resized: dict[str, None] = {}
    matcher = difflib.SequenceMatcher(None, names[0], names[1], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(before[i1:i2], after[j1:j2], strict=True)
            for (name, sizes, times), (_, other_sizes, other_times) in pairs:
                if sizes != other_sizes:
                    resized[name] = None
                removed[name] += max(times - other_times, 0)
                added[name] += max(other_times - times, 0)
        else:
            for name, _, times in before[i1:i2]:
                removed[name] += times
            for name, _, times in after[j1:j2]:
                added[name] += times
    return (
        dict(sorted((added - removed).items())),
        dict(sorted((removed - added).items())),
        tuple(resized),
    )
