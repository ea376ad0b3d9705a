"""Changes between two revisions: records of quantities, phases, communication, and modules."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.memory import Held
from rooftrace.diffs import Change
from rooftrace.diffs.changes import TOTALS, Limited, union
from rooftrace.diffs.costs.clusters import Edit, pairs_of
from rooftrace.diffs.costs.sides import ExchangeFacts, Sides
from rooftrace.diffs.git.origins import DiffOrigins
from rooftrace.graph import pattern_of
from rooftrace.hardware.units import arrow, format_time, format_traffic

NONE = Change(0, 0)
"""No change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChange(Plain):
    """A module, or `count` equal modules whose paths differ only in indices.

    Quantities are over all of the modules.
    """

    path: str
    count: int
    status: str  # added, removed or changed
    kind: str  # name of the module's class
    flops: Change
    bytes: Change
    time: Change
    ops_added: Mapping[str, int]  # operator names with their number, in one of the modules
    ops_removed: Mapping[str, int]
    resized: Sequence[str] = ()  # operators whose sizes or precisions changed

    KEYS = "path count status class=kind flops bytes time ops_added ops_removed resized"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """The changes by one cause.  Quantities are over all kernels that it touches.

    modules: where it is, with indices starred, in the order of the step; `count` of them in all.
    before, after: the line of the code ("net.py:12") on either side, None where there is none.
    eager: seconds of the same change in eager mode; None if not requested.
    """

    cause: str
    modules: tuple[str, ...] = ()
    count: int = 0
    before: str | None = None
    after: str | None = None
    time: Change = NONE
    bytes: Change = NONE
    flops: Change = NONE
    kernels: Change = NONE
    eager: Change | None = None

    @property
    def line(self) -> str | None:
        """The line to look at: of the second side, or of the first where it is gone."""
        return self.after or self.before

    @property
    def where(self) -> str:
        """The modules: "layers.*.norm x4", "layers.*.attention.k and 3 more (12)"."""
        if not self.modules:
            return ""
        first = self.modules[0] or "(root)"
        if len(self.modules) > 1:
            return f"{first} and {len(self.modules) - 1} more ({self.count:,})"
        return f"{first} x{self.count:,}" if self.count > 1 else first

    @property
    def lines(self) -> str:
        """The line on either side: "net.py:12 -> net.py:14", one where equal; "" for none."""
        return arrow(self.before or "", self.after or "")

    @property
    def place(self) -> str:
        """The modules and the lines."""
        return ", ".join(filter(None, (self.where, self.lines)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldChange(Plain):
    """Tensors of one kind of which more or less is held at the peak of memory (byte)."""

    held: Held  # of the second side, or of the first where it is gone
    bytes: Change

    KEYS = (
        "role=held.role module=held.module op=held.op part=held.part name=held.name "
        "dtype=held.dtype saved=held.saved bytes"
    )


@dataclass(frozen=True)
class PhaseDiff(Plain):
    """The changes of one phase.

    rows: one for each cause, the largest change of time first; they add up to the totals of time,
    bytes, flops and kernels.  modules: the same by module.  held: the difference of the memory
    peaks by tensor.  assumed: assumptions that only one side makes, with "+" or "-" before them.
    meshes: processes along each axis, of either side.
    """

    phase: str
    totals: Mapping[str, Change]  # by name in TOTALS, and for several processes in `network_totals`
    modules: tuple[ModuleChange, ...]
    rows: tuple[DiffRow, ...] = ()
    held: tuple[HeldChange, ...] = ()
    assumed: tuple[str, ...] = ()
    meshes: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})

    KEYS = "totals rows held assumed meshes=_meshes? modules"

    @property
    def _meshes(self) -> Sequence[Mapping[str, int]]:
        return self.meshes if any(self.meshes) else ()

    @property
    def mesh_changed(self) -> bool:
        """Whether the two are steps on other meshes."""
        first, second = self.meshes
        return list(first.items()) != list(second.items())

    def __repr__(self) -> str:
        return short(self, f"{self.phase}: {_in_short(self)}; {len(self.modules):,} modules differ")


@dataclass(frozen=True)
class Sources:
    """The source files of two revisions."""

    files: tuple[int, int]  # how many there are of each
    differing: tuple[str, ...] = ()  # names of those that differ, or that one side alone has
    same_place: bool = False  # whether both were read from the very same files


@dataclass(frozen=True, kw_only=True)
class Diff(Plain, Shown, Limited):
    """The difference of two revisions on one chip under one execution model."""

    names: tuple[str, str]
    chips: tuple[str, str]
    executions: tuple[str, str]
    phases: tuple[PhaseDiff, ...]
    only_before: tuple[str, ...] = ()  # phases that only one side has
    only_after: tuple[str, ...] = ()
    sources: Sources | None = None  # the files of the two, if known
    expected: bool = True  # whether times are expected ones, by knobs; else bounds
    origins: DiffOrigins | None = None  # revisions, options and versions of the sides
    # The estimates of both sides, by title, for a timeline.
    steps: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    METRICS = TOTALS
    EXAMPLE = "memory>1 GiB"
    schema = "rooftrace.diff/1"
    KEYS = (
        "schema before=names.0 after=names.1 chip chips execution executions time_is only_before "
        "only_after sources origins phases=_by_phase"
    )

    @property
    def chip(self) -> str:
        """The chip, or both: "h100-sxm -> h200-sxm"."""
        return arrow(*self.chips)

    @property
    def execution(self) -> str:
        """The execution model, or both: "eager -> compiled"."""
        return arrow(*self.executions)

    @property
    def unchanged(self) -> bool:
        """True where no phase, no total and no module differs."""
        return (
            not self.only_before
            and not self.only_after
            and all(
                not p.modules
                and not p.rows
                and not p.held
                and not p.mesh_changed
                and not any(c.delta for c in p.totals.values())
                for p in self.phases
            )
        )

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The totals of each phase."""
        return [(f"{phase.phase}: ", phase.totals) for phase in self.phases]

    def __repr__(self) -> str:
        kind = "expected" if self.expected else "bound"
        before, after = self.names
        changes = [f"{phase.phase} {kind} {_in_short(phase)}" for phase in self.phases]
        names = f"{before} -> {after} on {self.chip}, {self.execution}"
        return short(self, f"{names}: {some(changes)}" if changes else names)

    @property
    def time_is(self) -> str:
        """ "expected" for seconds by knobs, or "bound"."""
        return "expected" if self.expected else "bound"

    @property
    def _by_phase(self) -> dict[str, PhaseDiff]:
        return {phase.phase: phase for phase in self.phases}


def _in_short(phase: PhaseDiff) -> str:
    """ "738.2 us -> 1.08 ms (+46.6 %)": the time of a step before and after."""
    time = phase.totals["time"]
    relative = "" if time.relative is None else f" ({time.relative:+.1%})"
    return f"{format_time(time.before)} -> {format_time(time.after)}{relative}"


# -- communication ---------------------------------------------------------------------------------

_SHOWN = 4
"""Ranks of a group that a sentence names."""


def mesh_words(first: Mapping[str, int], second: Mapping[str, int]) -> str:
    """A mesh: "mesh dp=8 instead of dp=4"; "" where both have the same."""
    if list(first.items()) == list(second.items()):
        return ""
    before, after = (
        ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "none"
        for mesh in (first, second)
    )
    return f"mesh {after} instead of {before}"


def exchange_words(sides: Sides, edits: Sequence[Edit]) -> Iterator[str]:
    """Differences of exchanges in words: in kind, axis, group, and else in bytes."""
    kinds: dict[str, dict[str, None]] = defaultdict(dict)
    moved: dict[tuple[str, str], list[int]] = {}
    for edit, op, partner in pairs_of(edits):
        first, second = sides[0].exchange(op), sides[1].exchange(partner)
        if first is None or second is None or first == second:
            continue
        text = _group(first, second)
        if text:
            kinds[text][second.kind] = None
        elif first.bytes != second.bytes:
            sums = moved.setdefault((second.kind, second.axis), [0, 0])
            sums[0] += edit.times * first.bytes
            sums[1] += edit.times * second.bytes
        else:
            kinds[f"over {second.axis}: waited for, cut or cast otherwise"][second.kind] = None
    for text, names in kinds.items():
        yield f"{', '.join(names)} {text}"
    for (kind, axis), (before, after) in moved.items():
        yield f"{kind} over {axis}: {format_traffic(after)} instead of {format_traffic(before)}"


def _group(first: ExchangeFacts, second: ExchangeFacts) -> str:
    """The difference of two exchanges in kind and group, in words; "" for none."""
    if first.kind != second.kind:
        return f"over {second.axis} instead of {first.kind} over {first.axis}"
    if first.size != second.size:
        other = "" if first.axis == second.axis else f" over {first.axis}"
        return f"over {second.axis}: group of {second.size} instead of {first.size}{other}"
    if first.axis != second.axis:
        return f"over {second.axis} instead of {first.axis}"
    if first.ranks != second.ranks:
        ranks = (f"{_ranks(exchange.ranks)}" for exchange in (second, first))
        return f"over {second.axis}: ranks {' instead of '.join(ranks)} of the group's first"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(f"+{rank}" for rank in ranks[:_SHOWN])
    return f"{shown} ..." if len(ranks) > _SHOWN else shown


def hidden(estimate: Estimate) -> float:
    """Seconds of exchanges that run while the main stream computes."""
    totals = network_totals(estimate)
    return totals["communication"] - totals["exposed"]


def network_totals(estimate: Estimate) -> dict[str, float]:
    """Seconds of all exchanges of a step, and of those that computing waits for."""
    return {
        "communication": sum(each.calls * each.seconds for each in estimate.exchanges),
        "exposed": sum(each.exposed for each in estimate.exchanges),
    }


# -- modules ---------------------------------------------------------------------------------------
# A module that moved or was renamed is one.


@dataclass(slots=True)
class _ModuleCosts:
    flops: float = 0
    bytes: float = 0
    time: float = 0.0
    ops: Counter[str] = field(default_factory=Counter)


def module_changes(sides: Sides, edits: Sequence[Edit]) -> tuple[ModuleChange, ...]:
    """Modules whose ops or costs differ, the largest change of time first."""
    sums = [_sums(sides, number) for number in range(2)]
    op_changes: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for path, kind, name, times in _op_changes(sides, edits):
        op_changes[path][kind][name] += times
    single = []
    for path, a, b in union(sums[0], sums[1], _ModuleCosts()):
        ops = op_changes.get(path, {})
        costs = {
            "flops": Change(a.flops, b.flops),
            "bytes": Change(a.bytes, b.bytes),
            "time": sides.seconds(a.time, b.time),
        }
        if not ops and not any(cost.delta for cost in costs.values()):
            continue
        status = "added" if not a.ops else "removed" if not b.ops else "changed"
        graph = sides[int(status != "removed")].graph
        single.append(
            ModuleChange(
                path=path,
                count=1,
                status=status,
                kind=graph.modules.get(path, ""),
                **costs,
                ops_added=dict(sorted(ops.get("added", {}).items())),
                ops_removed=dict(sorted(ops.get("removed", {}).items())),
                resized=tuple(ops.get("resized", ())),
            )
        )
    return tuple(
        sorted(_collapsed(single), key=lambda m: (-abs(m.time.delta), -abs(m.bytes.delta), m.path))
    )


def _sums(sides: Sides, number: int) -> dict[str, _ModuleCosts]:
    """FLOPs by the module of the op; bytes and time by the module that leads the kernel."""
    sums: dict[str, _ModuleCosts] = defaultdict(_ModuleCosts)
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


def _collapsed(single: Sequence[ModuleChange]) -> list[ModuleChange]:
    """The changes, with equal ones of modules whose paths differ only in indices as one."""
    groups: dict[Any, list[ModuleChange]] = defaultdict(list)
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


def _added(first: ModuleChange, other: ModuleChange) -> ModuleChange:
    return replace(
        first,
        count=first.count + other.count,
        flops=first.flops + other.flops,
        bytes=first.bytes + other.bytes,
        time=first.time + other.time,
    )
