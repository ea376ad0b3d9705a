"""What changed between two revisions: totals, modules matched by path, ops behind a change."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.memory import memory
from rooftrace.hardware import (
    UnitError,
    format_capacity,
    format_count,
    format_flops,
    format_time,
    format_traffic,
    parse,
)
from rooftrace.tracer.graph import Op, OpGraph, pattern_of

METRICS = ("time", "flops", "bytes", "memory", "params", "kernels")
_UNITS = {
    "time": "second",
    "flops": "count",
    "bytes": "byte",
    "memory": "byte",
    "params": "count",
    "kernels": "count",
}
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "time": format_time,
    "flops": format_flops,
    "bytes": format_traffic,
    "memory": format_capacity,
    "params": format_count,
    "kernels": format_count,
}


_ROUNDING = 1e-12
"""Seconds are sums of floats; repeats are added up in another order than layer by layer."""


class FailOnError(ValueError):
    """A --fail-on condition that cannot be read."""


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity before and after (SI units)."""

    before: float
    after: float

    @property
    def delta(self) -> float:
        """after - before; 0 where sums of the same parts differ by rounding only."""
        delta = self.after - self.before
        return 0.0 if abs(delta) <= _ROUNDING * abs(self.before) else delta

    @property
    def relative(self) -> float | None:
        """delta / before; None where before is 0 and after is not."""
        if self.before:
            return self.delta / self.before
        return 0.0 if not self.after else None


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """A module, or `count` equal modules whose paths differ only in indices.

    status: added, removed or changed.  ops_added, ops_removed: operator names with their number,
    over one of the modules; this is the cause.  resized: operators whose sizes or precisions
    changed.  Quantities are over all of the modules.
    """

    path: str
    count: int
    status: str
    kind: str
    flops: Change
    bytes: Change
    time: Change
    ops_added: Mapping[str, int]
    ops_removed: Mapping[str, int]
    resized: Sequence[str] = ()


@dataclass(frozen=True)
class PhaseDiff:
    """What changed in one phase.  totals: by name in METRICS."""

    phase: str
    totals: Mapping[str, Change]
    modules: tuple[ModuleChange, ...]


@dataclass(frozen=True)
class Sources:
    """The source files of two revisions.

    files: how many there are of each.  differing: names of those whose content differs, or that one
    side alone has.  same_place: whether both were read from the very same files.
    """

    files: tuple[int, int]
    differing: tuple[str, ...] = ()
    same_place: bool = False


def compare_sources(before: Mapping[str, str], after: Mapping[str, str]) -> Sources | None:
    """Two sides' digests of source files by path; None unless both have files.

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


@dataclass(frozen=True)
class Diff:
    """The difference of two revisions on one chip under one execution model.

    sources: the files that the two were made of, where that is known.
    """

    names: tuple[str, str]
    chip: str
    execution: str
    phases: tuple[PhaseDiff, ...]
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()
    sources: Sources | None = None

    @property
    def unchanged(self) -> bool:
        """True where no phase, no total and no module differs."""
        return (
            not self.only_before
            and not self.only_after
            and all(
                not p.modules and not any(c.delta for c in p.totals.values()) for p in self.phases
            )
        )

    def violations(self, conditions: Sequence[str]) -> list[str]:
        """A sentence for each condition ("time>5%", "memory>1 GiB") that some phase breaks.

        Raises FailOnError for a condition that cannot be read.
        """
        found = []
        for metric, limit, relative, text in map(parse_condition, conditions):
            for phase in self.phases:
                change = phase.totals[metric]
                growth = change.delta
                if relative:
                    growth = math.inf if change.relative is None else change.relative
                if growth > limit:
                    amount = f"{growth:+.2%}" if relative else f"+{_FORMATS[metric](growth)}"
                    found.append(
                        f"{phase.phase}: {metric} grew by {amount}, more than {text!r} allows"
                    )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data: SI numbers, relative changes as fractions."""
        return {
            "schema": "rooftrace.diff/1",
            "before": self.names[0],
            "after": self.names[1],
            "chip": self.chip,
            "execution": self.execution,
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
            "sources": None
            if self.sources is None
            else {
                "files": list(self.sources.files),
                "differing": list(self.sources.differing),
                "same_place": self.sources.same_place,
            },
            "phases": {
                p.phase: {
                    "totals": {name: _change(c) for name, c in p.totals.items()},
                    "modules": [
                        {
                            "path": m.path,
                            "count": m.count,
                            "status": m.status,
                            "class": m.kind,
                            "flops": _change(m.flops),
                            "bytes": _change(m.bytes),
                            "time": _change(m.time),
                            "ops_added": dict(m.ops_added),
                            "ops_removed": dict(m.ops_removed),
                            "resized": list(m.resized),
                        }
                        for m in p.modules
                    ],
                }
                for p in self.phases
            },
        }


def _change(change: Change) -> dict[str, Any]:
    return {
        "before": change.before,
        "after": change.after,
        "delta": change.delta,
        "relative": change.relative,
    }


_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*([0-9.eE+-]+)\s*(.*?)\s*")


def parse_condition(text: str) -> tuple[str, float, bool, str]:
    """("time", 0.05, True, text) for "time>5%"; an absolute limit takes a unit ("memory>1 GiB")."""
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in METRICS:
        raise FailOnError(
            f"--fail-on {text!r}: expected METRIC>LIMIT with METRIC one of {', '.join(METRICS)}, "
            'for example "time>5%" or "memory>1 GiB"'
        )
    metric, number, unit = match.groups()
    try:
        if unit == "%":
            return metric, float(number) / 100, True, text
        if not unit and _UNITS[metric] == "count":
            return metric, float(number), False, text
        return metric, parse(f"{number} {unit}", _UNITS[metric]), False, text
    except (UnitError, ValueError) as error:
        raise FailOnError(f"--fail-on {text!r}: {error}") from None


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
    priced = {(one.chip.name, one.execution): None for one in everything}
    if len(priced) != 1:
        listed = ", ".join(f"{model.name} on {chip}" for chip, model in priced) or "no estimates"
        raise ValueError(f"expected estimates on one chip under one execution model, got {listed}")
    some = everything[0]
    return Diff(
        names,
        some.chip.name,
        some.execution.name,
        tuple(_phase(phase, before[phase], after[phase]) for phase in shared),
        tuple(p for p in before if p not in after),
        tuple(p for p in after if p not in before),
    )


def _phase(phase: str, before: Estimate, after: Estimate) -> PhaseDiff:
    def totals(estimate: Estimate) -> dict[str, float]:
        return {
            "time": estimate.t_est,
            "flops": estimate.flops,
            "bytes": estimate.bytes_hbm,
            "memory": memory(estimate.plan.source).peak,
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
                path,
                1,
                status,
                kinds.get(path, ""),
                Change(a.flops, b.flops),
                Change(a.bytes, b.bytes),
                Change(a.time, b.time),
                added,
                removed,
                resized,
            )
        )
    return tuple(
        sorted(_collapsed(single), key=lambda m: (-abs(m.time.delta), -abs(m.bytes.delta), m.path))
    )


def _collapsed(changes: Sequence[ModuleChange]) -> list[ModuleChange]:
    """Equal changes of modules whose paths differ only in indices, as one."""
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
    found: dict[str, list[_Kernel]] = defaultdict(list)
    for op in graph.kernels():
        for path, times in _calls(graph, op).items():
            found[path].append((op.name, _sizes(graph, op), times))
    return found


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
