"""Sums of an estimate's kernels by module, operator, family or part, as mappings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, overload

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.estimating.rows import Row
from rooftrace.costmodels.timing import timings
from rooftrace.costmodels.timing.timings import StepTimes
from rooftrace.hardware.units import format_flops, format_time, format_traffic
from rooftrace.tracer.paths import pattern_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BreakdownRow(Plain, Mapping[str, Any]):
    """The sums of some kernels.  Fields can also be read by name: row["t_device"] is row.t_device.

    Kernels of several modules count in equal parts.
    """

    key: str  # what they share: a module path, the name of an operator, a family, a part
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
        """What the kernels share: `key`."""
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
        self.by = by  # what the names are: module, operator, family, part
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


def summed(key: str, rows: Sequence[BreakdownRow]) -> BreakdownRow:
    """One row with the sums of several."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        seconds[row.regime] += row.t_device
    return BreakdownRow(
        key=key,
        calls=sum(row.calls for row in rows),
        flops=sum(row.flops for row in rows),
        flops_recompute=sum(row.flops_recompute for row in rows),
        bytes=sum(row.bytes for row in rows),
        t_comp=sum(row.t_comp for row in rows),
        t_hbm=sum(row.t_hbm for row in rows),
        t_net=sum(row.t_net for row in rows),
        t_device=sum(row.t_device for row in rows),
        regime=max(seconds, key=lambda regime: seconds[regime], default="launch"),
        share=sum(row.share for row in rows),
    )


class Breakdowns:
    """The breakdowns of an estimate, by what its kernels share."""

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


class _Sums:
    """Sums of kernels while they are added up."""

    __slots__ = ("bytes", "calls", "flops", "recompute", "regimes", "t")

    def __init__(self) -> None:
        self.calls = self.flops = self.recompute = self.bytes = 0
        self.t = [0.0, 0.0, 0.0, 0.0]  # s: of engines, HBM, links, and of the kernels
        self.regimes: dict[str, float] = {}  # seconds by what limits them

    def add(self, row: Row, parts: int) -> None:
        """Add one of `parts` equal parts of a row."""
        timing = row.timing
        self.calls += row.count // parts
        self.flops += row.flops // parts
        self.recompute += row.flops_recompute // parts
        self.bytes += row.bytes // parts
        for index, seconds in enumerate(
            (timing.t_comp, timing.t_hbm, timing.t_net, timing.t_device)
        ):
            self.t[index] += seconds / parts
        regime = timing.regime
        self.regimes[regime] = self.regimes.get(regime, 0.0) + timing.t_device / parts


def sums_by(
    rows: Sequence[Row], keys: Callable[[Row], Sequence[str]], total: float
) -> list[BreakdownRow]:
    """Calls, FLOP, bytes and seconds by key, most seconds first, with the share of `total` seconds.

    The kernels of a row belong to its keys in equal parts.
    """
    sums: defaultdict[str, _Sums] = defaultdict(_Sums)
    for row in rows:
        names = keys(row)
        for name in names:
            sums[name].add(row, len(names))
    entries = sorted(sums.items(), key=lambda entry: (-entry[1].t[3], entry[0]))
    return [_row(key, entry, total) for key, entry in entries]


def _row(key: str, entry: _Sums, total: float) -> BreakdownRow:
    t_comp, t_hbm, t_net, t_device = entry.t
    return BreakdownRow(
        key=key,
        calls=entry.calls,
        flops=entry.flops,
        flops_recompute=entry.recompute,
        bytes=entry.bytes,
        t_comp=t_comp,
        t_hbm=t_hbm,
        t_net=t_net,
        t_device=t_device,
        regime=max(entry.regimes, key=lambda regime: entry.regimes[regime]),
        share=t_device / total if total else 0.0,
    )
