"""Rows of an estimate: costs of kernel groups on a chip, sums by a key, and exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, overload

from rooftrace._escapes import visible
from rooftrace._plain import Plain, Positive
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.fusion import FusionGroup, Plan, bytes_by_role, runs
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import MATRIX, Cost
from rooftrace.costmodels.timing import timings
from rooftrace.costmodels.timing.queue import Communication
from rooftrace.costmodels.timing.timings import StepTimes, Timing
from rooftrace.graph import ROLES, Op, OpGraph, pattern_of, replicas_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_flops, format_time, format_traffic

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel group on one chip.  Quantities are totals over the kernels that it stands for.

    module, family and part are those of the op that computes most (or moves most bytes, where none
    computes).
    """

    index: int  # in `Plan.groups`
    name: str  # of the pattern for a fused group, else of the op
    pattern: str
    ops: tuple[int, ...]  # indices into `graph.ops`
    module: str  # the first of `modules`
    family: str
    part: str
    flops: int  # dense, without recomputation
    flops_causal: int  # without masked attention scores
    flops_recompute: int
    bytes: int  # through HBM
    bytes_by_role: Mapping[str, int]
    bytes_net: int  # over links
    precision: str  # of most of its work
    known: bool  # whether every op has a rule
    timing: Timing
    count: int = 1  # kernels that it stands for
    modules: tuple[str, ...] = ()  # where they run, as many in each

    def __post_init__(self) -> None:
        if not self.modules:
            object.__setattr__(self, "modules", (self.module,))


def row_of(planned: Plan, index: int, timing: Timing, chip: Chip | None = None) -> Row:
    """The row of a kernel group of a plan; on a chip, in the precision that it has for the work."""
    group, cost = planned.groups[index], planned.costs[index]
    lead, n = lead_op(planned, group), group.times
    modules = runs.kernel_modules(planned.graph, group.ops, lead)
    return Row(
        index=index,
        name=group.name,
        pattern=group.pattern,
        ops=group.ops,
        module=modules[0],
        family=lead.family,
        part=lead.part,
        flops=n * cost.flops(),
        flops_causal=n * cost.flops(counts=("useful",)),
        flops_recompute=n * cost.flops(counts=("recompute",)),
        bytes=n * cost.bytes(),
        bytes_by_role={r: n * size for r, size in bytes_by_role(planned.graph, cost).items()},
        bytes_net=n * cost.bytes("link"),
        precision=_precision(cost, chip),
        known=group.known,
        timing=timing,
        count=n,
        modules=modules,
    )


def _precision(cost: Cost, chip: Chip | None) -> str:
    """The precision of most matrix FLOPs, else of most vector FLOPs; "" without any."""
    flops: dict[tuple[bool, str], int] = {}
    for work, flop in cost.work.items():
        key = (work.operation in MATRIX, work.precision)
        flops[key] = flops.get(key, 0) + flop
    name = max(flops, key=lambda key: (key[0], flops[key]))[1] if flops else ""
    return engines.precision_on(chip, name) if name and chip is not None else name


def lead_op(planned: Plan, group: FusionGroup) -> Op:
    """The op of a group that stands for it: most FLOPs, then most bytes, then the first."""
    ops = [planned.graph.ops[i] for i in group.ops]
    if len(ops) == 1:
        return ops[0]
    costs = planned.op_costs
    return max(ops, key=lambda op: (costs[op.id].flops(), costs[op.id].bytes(), -op.id))


def frame_of(planned: Plan, rows: Sequence[Row]) -> pandas.DataFrame:
    """A pandas frame with a line for each row of a plan, in launch order."""
    import pandas

    return pandas.DataFrame.from_records(list(map(_seen, records_of(planned, rows))))


def _seen(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without lone surrogates in its texts, which no column of pandas can hold."""
    texts = {name: visible(text) for name, text in record.items() if isinstance(text, str)}
    return {**record, **texts}


def records_of(planned: Plan, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The numbers of each row by the names of their columns, in launch order."""
    for row in rows:
        timing = row.timing
        yield (
            {
                "kernel": row.index,
                "name": row.name,
                "pattern": row.pattern,
                "joins": "; ".join(planned.groups[row.index].joins),
                "count": row.count,
                "ops": len(row.ops),
                "module": row.module,
                "module_last": row.modules[-1],
                "family": row.family,
                "part": row.part,
                "precision": row.precision,
                "flops": row.flops,
                "flops_causal": row.flops_causal,
                "bytes": row.bytes,
                **{f"bytes_{role}": row.bytes_by_role.get(role, 0) for role in ROLES},
                "bytes_net": row.bytes_net,
                "t_comp": timing.t_comp,
                "t_hbm": timing.t_hbm,
                "t_net": timing.t_net,
                "t_device": timing.t_device,
                "start": timing.start,
                "regime": timing.regime,
                "margin": timing.margin,
                "has_rule": row.known,
            }
        )


# -- communication ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Equal exchanges of one process over one axis of the mesh, added up."""

    axis: str  # of the mesh; without a mesh the name of the group
    kind: str  # all_gather, all_reduce ...
    ranks: Positive  # processes of a group
    level: str  # the outermost level of links that they use
    calls: Positive
    bytes: int  # of all buffers, as nccl-tests counts them
    bytes_sent: float  # by one process over its links
    seconds: float
    exposed: float  # seconds for which computing waits
    beyond: str  # a phrase on what exceeds the measurements, "" for nothing


def added_up(exchanges: Iterable[Communication]) -> tuple[Exchanged, ...]:
    """Exchanges by axis, kind, size of the group and level, longest first."""
    groups: dict[tuple[str, str, int, str], list[Communication]] = defaultdict(list)
    for item in exchanges:
        if item.ranks > 1:
            groups[item.axis, item.kind, item.ranks, item.level].append(item)
    rows = [
        Exchanged(
            axis=axis,
            kind=kind,
            ranks=ranks,
            level=level,
            calls=sum(item.calls for item in items),
            bytes=sum(item.calls * item.nbytes for item in items),
            bytes_sent=sum(item.calls * item.sent for item in items),
            seconds=sum(item.calls * item.seconds for item in items),
            exposed=sum(item.exposed for item in items),
            beyond=next((item.beyond for item in items if item.beyond), ""),
        )
        for (axis, kind, ranks, level), items in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


class Together:
    """Totals over all processes of the mesh; a part of `Estimate`."""

    exchanges: tuple[Communication, ...]
    times: StepTimes

    @property
    def graph(self) -> OpGraph:
        """The graph that was priced."""
        raise NotImplementedError

    @cached_property
    def communication(self) -> tuple[Exchanged, ...]:
        """Exchanges of this process by axis and kind, longest first."""
        return added_up(self.exchanges)

    @property
    def processes(self) -> int:
        """Number of processes that run the step together, a chip each."""
        return self.graph.processes

    @property
    def replicas(self) -> int | None:
        """Number of batches that they work on at a time; None if unknown from the mesh."""
        if not self.graph.mesh:
            return 1 if self.processes == 1 else None
        return replicas_of(self.graph.mesh)

    @property
    def item(self) -> str:
        """The item that a step produces: token or sample."""
        return str(self.graph.workload.get("item", "sample"))

    @property
    def items(self) -> int:
        """Number of items (tokens or samples) of one step."""
        return int(self.graph.workload.get("items", 1))

    @property
    def items_per_s(self) -> float | None:
        """Items per second of t_est, of all replicas; of one where the mesh does not say."""
        seconds = self.times.t_est
        return self.items * (self.replicas or 1) / seconds if seconds else None

    @property
    def items_per_s_per_chip(self) -> float | None:
        """Items per second of t_est of all processes, divided by their number."""
        seconds = self.times.t_est
        if self.replicas is None or not seconds:
            return None
        return self.items * self.replicas / (seconds * self.processes)

    @property
    def exposed_axis(self) -> str:
        """The axis whose exchanges computing waits for longest; "" without any."""
        seconds: dict[str, float] = {}
        for row in self.communication:
            seconds[row.axis] = seconds.get(row.axis, 0.0) + row.exposed
        longest = max(seconds, key=seconds.__getitem__, default="")
        return longest if seconds.get(longest) else ""


# -- breakdowns ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BreakdownRow(Plain, Mapping[str, Any]):
    """The sums of some kernels.  Fields can also be read by name: row["t_device"] is row.t_device.

    Kernels of several modules count in equal parts.
    """

    key: str  # a module path, the name of an operator, a family, a part
    calls: int = 0  # kernels launched
    flops: int = 0  # FLOP, attention counted dense, without recomputation
    flops_recompute: int = 0  # FLOP done a second time in backward
    bytes: int = 0  # through HBM
    t_comp: float = 0.0  # s of the engines
    t_hbm: float = 0.0  # s of HBM
    t_net: float = 0.0  # s of links
    t_device: float = 0.0  # s of the kernels, one after another
    regime: Annotated[str, ("enum", timings.REGIMES)] = "launch"  # of most of them
    share: float = 0.0  # t_device over t_serial of the step
    instances: int | None = None  # modules of a starred path (`by_pattern` alone)

    KEYS = "calls flops flops_recompute bytes t_comp t_hbm t_net t_device regime share instances?"

    @property
    def name(self) -> str:
        """The name that the kernels share: `key`."""
        return self.key

    @property
    def seconds(self) -> float:
        """Seconds of the kernels, one after another: `t_device`."""
        return self.t_device

    def __getitem__(self, name: str) -> Any:
        if name not in _FIELDS or (name == "instances" and self.instances is None):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in _FIELDS if name != "instances" or self.instances is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


_FIELDS = tuple(field.name for field in fields(BreakdownRow))


class Breakdown(Shown, Mapping[str, BreakdownRow]):
    """Sums of kernels by name, most seconds first: a mapping from each name to its BreakdownRow.

    A number or a slice in place of a name takes rows by their place.
    """

    def __init__(self, by: str, rows: Sequence[BreakdownRow]) -> None:
        self.by = by  # module, operator, family, part
        self.rows = tuple(rows)
        self._by_name = {row.key: row for row in self.rows}

    @overload
    def __getitem__(self, name: str | int) -> BreakdownRow: ...
    @overload
    def __getitem__(self, name: slice) -> tuple[BreakdownRow, ...]: ...
    def __getitem__(self, name: str | int | slice) -> BreakdownRow | tuple[BreakdownRow, ...]:
        return self._by_name[name] if isinstance(name, str) else self.rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self.rows)

    def total(self) -> BreakdownRow:
        """The sum of all rows, under the name "total"."""
        return summed("total", self.rows)

    def __repr__(self) -> str:
        rows = (
            f"{row.key or '(root)'} {format_time(row.t_device)}, {format_flops(row.flops)}, "
            f"{format_traffic(row.bytes)}"
            for row in self.rows
        )
        return short(self, f"{len(self)} by {self.by}: {some(rows)}")


def summed(
    key: str, rows: Sequence[BreakdownRow], step_seconds: float | None = None
) -> BreakdownRow:
    """One row with the sums of several; step_seconds: those of the share, else shares add up."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        seconds[row.regime] += row.t_device
    t_device = sum(row.t_device for row in rows)
    share = sum(row.share for row in rows)
    if step_seconds is not None:
        share = t_device / step_seconds if step_seconds else 0.0
    return BreakdownRow(
        key=key,
        calls=sum(row.calls for row in rows),
        flops=sum(row.flops for row in rows),
        flops_recompute=sum(row.flops_recompute for row in rows),
        bytes=sum(row.bytes for row in rows),
        t_comp=sum(row.t_comp for row in rows),
        t_hbm=sum(row.t_hbm for row in rows),
        t_net=sum(row.t_net for row in rows),
        t_device=t_device,
        regime=max(seconds, key=lambda regime: seconds[regime], default="launch"),
        share=share,
    )


class Breakdowns:
    """The breakdowns of an estimate by operator, family, part or module."""

    rows: tuple[Row, ...]
    times: StepTimes

    def by_operator(self) -> Breakdown:
        """Calls, FLOP, bytes, seconds and share of t_serial by kernel name, most time first."""
        return self._sums("operator", lambda row: (row.name,))

    def by_family(self) -> Breakdown:
        """Calls, FLOP, bytes and seconds by family of ops (attention, dense, moe, norm ...)."""
        return self._sums("family", lambda row: (row.family,))

    def by_part(self) -> Breakdown:
        """Calls, FLOP, bytes and seconds by part: forward, backward, recompute, optimizer."""
        return self._sums("part", lambda row: (row.part,))

    def by_module(self, depth: int | None = None) -> Breakdown:
        """Calls, FLOP, bytes and seconds by module path, cut after `depth` names (None: never).

        A kernel counts in the module whose code called it, and in none around that; `summary` has
        sums that include the modules inside.
        """

        def keys(row: Row) -> Sequence[str]:
            if depth is None:
                return row.modules
            return [".".join(path.split(".")[:depth]) for path in row.modules]

        return self._sums("module", keys)

    def by_pattern(self) -> Breakdown:
        """Sums by module path with starred indices; `instances` is the number of paths."""
        groups = self._sums("module", lambda row: (pattern_of(row.module),))
        paths: dict[str, set[str]] = defaultdict(set)
        for row in self.rows:
            paths[pattern_of(row.module)].update(row.modules)
        rows = [replace(row, instances=len(paths[row.key])) for row in groups.rows]
        return Breakdown("module", rows)

    def _sums(self, by: str, keys: Callable[[Row], Sequence[str]]) -> Breakdown:
        return Breakdown(by, sums_by(self.rows, keys, self.times.t_serial))


def _part(row: Row, parts: int) -> BreakdownRow:
    """One of `parts` equal parts of a row."""
    timing = row.timing
    return BreakdownRow(
        key="",
        calls=row.count // parts,
        flops=row.flops // parts,
        flops_recompute=row.flops_recompute // parts,
        bytes=row.bytes // parts,
        t_comp=timing.t_comp / parts,
        t_hbm=timing.t_hbm / parts,
        t_net=timing.t_net / parts,
        t_device=timing.t_device / parts,
        regime=timing.regime,
    )


def sums_by(
    rows: Sequence[Row], keys: Callable[[Row], Sequence[str]], total: float
) -> list[BreakdownRow]:
    """Calls, FLOP, bytes and seconds by key, most seconds first, with the share of `total` seconds.

    The kernels of a row belong to its keys in equal parts.
    """
    parts: defaultdict[str, list[BreakdownRow]] = defaultdict(list)
    for row in rows:
        names = keys(row)
        part = _part(row, len(names))
        for name in names:
            parts[name].append(part)
    sums = [summed(name, each, total) for name, each in parts.items()]
    return sorted(sums, key=lambda row: (-row.t_device, row.key))
