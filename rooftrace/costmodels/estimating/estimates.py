"""A plan on a chip: seconds of every kernel, when the step ends, and the totals a report shows."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, MATRIX, Cost
from rooftrace.costmodels.estimating.executions import ExecutionModel
from rooftrace.costmodels.estimating.plans import Bytes, Coverage, Plan, Unsupported, plan
from rooftrace.costmodels.fusion import FusionGroup, runs
from rooftrace.costmodels.memory import Memory, memory as liveness_of
from rooftrace.costmodels.timing import (
    Knobs,
    StepTimes,
    Timing,
    compute_seconds,
    copies_layouts,
    engine_of,
    group_class,
    host_waits,
    kernel_seconds,
    kernel_table,
    launch_seconds,
    schedule,
    step_times,
)
from rooftrace.costmodels.traffic import bytes_by_role
from rooftrace.hardware import Chip, MissingPeakError, compute_family, format_traffic, load_chip
from rooftrace.tracer.graph import ROLES, Op, OpGraph, pattern_of

if TYPE_CHECKING:
    import pandas

    from rooftrace.costmodels.findings import Headroom


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel group on one chip.  Quantities are totals over the kernels that it stands for.

    name: pattern name for a fused group, else the op's.  ops: indices into `graph.ops`.  module,
    family, part: those of the op that computes most (or moves most, where none computes).  count:
    how many kernels.  modules: where they run, as many in each; `module` is the first.
    """

    index: int
    name: str
    pattern: str
    ops: tuple[int, ...]
    module: str
    family: str
    part: str
    flops: int
    flops_causal: int
    flops_recompute: int
    bytes: int
    bytes_by_role: Mapping[str, int]
    bytes_net: int
    precision: str
    known: bool
    timing: Timing
    count: int = 1
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.modules:
            object.__setattr__(self, "modules", (self.module,))


_NINETY_PERCENT = 1.645
"""Standard deviations to both sides that hold nine tenths of a normal distribution."""
_NO_SUMS: Mapping[str, Any] = {
    "calls": 0,
    "flops": 0,
    "flops_recompute": 0,
    "bytes": 0,
    "t_comp": 0.0,
    "t_hbm": 0.0,
    "t_net": 0.0,
    "t_device": 0.0,
}


@dataclass(frozen=True)
class Estimate:
    """What a step costs on a chip.  Quantities: FLOP, byte, second, FLOP/byte.

    print() shows the table; `to_frame()` is a pandas frame with one row per kernel.  peak,
    peak_precision: the dense rate of the engine that runs most of the matrix FLOPs, and what it
    computes in ("tf32" where fp32 convolutions run there).
    """

    plan: Plan
    chip: Chip
    rows: tuple[Row, ...]
    times: StepTimes
    peak: float
    peak_precision: str

    # -- what was estimated ---------------------------------------------------------------------

    @property
    def graph(self) -> OpGraph:
        """The graph that was priced (after rewriting)."""
        return self.plan.graph

    @property
    def execution(self) -> ExecutionModel:
        """The execution model."""
        return self.plan.execution

    @property
    def phase(self) -> str:
        """forward, training, prefill or decode."""
        return self.graph.phase

    @property
    def coverage(self) -> Coverage:
        """How much of the totals rests on rules."""
        return self.plan.coverage

    @property
    def lower_bound(self) -> bool:
        """Whether something ran out of sight of the trace, so that all totals are too low."""
        return bool(self.plan.source.unrecorded)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was rewritten, and what about the structure is worth knowing."""
        return self.plan.notes

    def unsupported_ops(self) -> tuple[Unsupported, ...]:
        """Ops without a rule, most bytes first."""
        return self.coverage.unsupported

    @cached_property
    def assumption_seconds(self) -> Mapping[int, float]:
        """Device seconds of the kernels that rest on each assumption, by its id.

        Kernels whose own sizes, values or facts came from it; what follows from them is not traced.
        """
        seconds: dict[int, float] = defaultdict(float)
        for row in self.rows:
            for assumption, share in runs.resting_shares(self.graph, row.ops).items():
                seconds[assumption] += share * row.timing.t_device
        return dict(seconds)

    @cached_property
    def memory(self) -> Memory:
        """Bytes alive over the step as captured: the peak, what it is made of, the timeline."""
        return liveness_of(self.plan.source)

    # -- totals ---------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """FLOP, attention counted dense, without recomputation."""
        return self.plan.total.flops()

    @property
    def flops_causal(self) -> int:
        """FLOP of what the mask lets through, without recomputation."""
        return self.plan.total.flops(counts=("useful",))

    @property
    def flops_recompute(self) -> int:
        """FLOP done a second time in backward."""
        return self.plan.total.flops(counts=("recompute",))

    @property
    def flops_matrix(self) -> int:
        """FLOP in matrix products and convolutions, attention dense, without recomputation."""
        return self.plan.total.flops(MATRIX)

    @property
    def macs(self) -> int:
        """Multiply-adds in matrix products and convolutions: flops_matrix / 2."""
        return self.flops_matrix // 2

    @property
    def flops_realizable(self) -> float:
        """t_comp times the headline peak: the work in units of the best engine's FLOPs."""
        return self.times.t_comp * self.peak

    @property
    def bytes(self) -> Bytes:
        """HBM bytes by role."""
        return self.plan.bytes

    @property
    def bytes_hbm(self) -> int:
        """All HBM bytes."""
        return self.plan.bytes.total

    @property
    def bytes_net(self) -> int:
        """Bytes over links."""
        return self.plan.total.bytes("link")

    @property
    def bytes_compulsory(self) -> int:
        """Bytes that any execution has to move: inputs and weights in, results out, once each."""
        return self.plan.compulsory

    @property
    def below_floor(self) -> bool:
        """True where the knobs promise fewer bytes than are compulsory."""
        return self.bytes_hbm < self.bytes_compulsory

    @property
    def ai_hbm(self) -> float | None:
        """Arithmetic intensity: flops_causal per HBM byte."""
        return _ratio(self.flops_causal, self.bytes_hbm)

    @property
    def ai_total(self) -> float | None:
        """flops_causal per HBM and link byte."""
        return _ratio(self.flops_causal, self.bytes_hbm + self.bytes_net)

    @property
    def ridge(self) -> float:
        """FLOP/byte at which this chip's headline peak and bandwidth meet."""
        return self.peak / self.chip.memory_bandwidth.value

    @property
    def kernels(self) -> int:
        """Kernels launched."""
        return sum(row.count for row in self.rows)

    @property
    def t_est(self) -> float:
        """Estimated seconds of the step."""
        return self.times.t_est

    @cached_property
    def t_interval(self) -> tuple[float, float] | None:
        """Seconds that 90 % of measured steps like this fell between; None without fitted knobs.

        From how far the measurements that the knobs were fitted to were off, by class of kernel.
        """
        knobs = self.execution.knobs
        if knobs is None or not self.times.t_serial:
            return None
        variance = 0.0
        for row in self.rows:
            kind = group_class(self.graph, row.ops, costs=self.plan.op_costs)
            spread = knobs.share(kind).spread or knobs.spread
            variance += row.timing.t_device / self.times.t_serial * spread**2
        if not variance:
            return None
        factor = math.exp(_NINETY_PERCENT * math.sqrt(variance))
        return self.t_est / factor, self.t_est * factor

    @property
    def mfu(self) -> float | None:
        """Matrix FLOP without recomputation (masked blocks left out) per second of t_est over the
        dense peak of the dominant matrix precision."""
        return _ratio(self.plan.total.flops(MATRIX, ("useful",)), self.t_est * self.peak)

    @property
    def hfu(self) -> float | None:
        """As mfu, with recomputation and masked blocks that were computed anyway."""
        return _ratio(self.plan.total.flops(MATRIX, COMPUTED), self.t_est * self.peak)

    @property
    def item(self) -> str:
        """What a step produces: token or sample."""
        return str(self.graph.workload.get("item", "sample"))

    @property
    def items(self) -> int:
        """How many of them one step produces."""
        return int(self.graph.workload.get("items", 1))

    @property
    def items_per_s(self) -> float | None:
        """Items per second of t_est."""
        return _ratio(self.items, self.t_est)

    def headroom(self) -> Headroom:
        """What fusing saves: by group that was found, and what could be saved beyond them."""
        from rooftrace.costmodels.findings import headroom  # which prices by `estimate`

        return headroom(self)

    # -- breakdowns -----------------------------------------------------------------------------

    def by_operator(self) -> list[dict[str, Any]]:
        """Calls, FLOP, bytes, seconds and share of t_serial by kernel name, most time first."""
        return self._group(lambda row: (row.name,))

    def by_family(self) -> dict[str, dict[str, Any]]:
        """The same by family (attention, dense, moe, norm ...)."""
        return {entry.pop("key"): entry for entry in self._group(lambda row: (row.family,))}

    def by_part(self) -> dict[str, dict[str, Any]]:
        """The same by part (forward, backward, recompute, optimizer)."""
        return {entry.pop("key"): entry for entry in self._group(lambda row: (row.part,))}

    def by_module(self, depth: int | None = None) -> list[dict[str, Any]]:
        """The same by module path, `depth` components deep (None: the full path)."""

        def keys(row: Row) -> Sequence[str]:
            if depth is None:
                return row.modules
            return [".".join(path.split(".")[:depth]) for path in row.modules]

        return self._group(keys)

    def by_pattern(self) -> list[dict[str, Any]]:
        """The same by module path with starred indices; `instances` is the number of paths."""
        groups = self._group(lambda row: (pattern_of(row.module),))
        paths: dict[str, set[str]] = defaultdict(set)
        for row in self.rows:
            paths[pattern_of(row.module)].update(row.modules)
        for entry in groups:
            entry["instances"] = len(paths[entry["key"]])
        return groups

    def _group(self, keys: Callable[[Row], Sequence[str]]) -> list[dict[str, Any]]:
        """Sums by key; the kernels of a row belong to its keys in equal parts."""
        sums: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            timing, regime, names = row.timing, row.timing.regime, keys(row)
            parts = len(names)
            for name in names:
                entry = sums.get(name)
                if entry is None:
                    entry = sums[name] = {"key": name, **_NO_SUMS, "regimes": Counter()}
                entry["calls"] += row.count // parts
                entry["flops"] += row.flops // parts
                entry["flops_recompute"] += row.flops_recompute // parts
                entry["bytes"] += row.bytes // parts
                entry["t_comp"] += timing.t_comp / parts
                entry["t_hbm"] += timing.t_hbm / parts
                entry["t_net"] += timing.t_net / parts
                entry["t_device"] += timing.t_device / parts
                entry["regimes"][regime] += timing.t_device / parts
        total = self.times.t_serial
        result = sorted(sums.values(), key=lambda entry: (-entry["t_device"], entry["key"]))
        for entry in result:
            regimes = entry.pop("regimes")
            entry["regime"] = regimes.most_common(1)[0][0] if regimes else "launch"
            entry["share"] = entry["t_device"] / total if total else 0.0
        return result

    def to_frame(self) -> pandas.DataFrame:
        """One row per kernel in launch order: sums of `count`, from `module` to `module_last`."""
        import pandas

        records = []
        for row in self.rows:
            timing = row.timing
            records.append(
                {
                    "kernel": row.index,
                    "name": row.name,
                    "pattern": row.pattern,
                    "joins": "; ".join(self.plan.groups[row.index].joins),
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
        return pandas.DataFrame.from_records(records)

    def __str__(self) -> str:
        from rooftrace import _render  # the table lives in reporting, which imports this module

        return str(_render([self]))


def estimate(
    graph: OpGraph | Plan,
    chip: str | Chip = "h200-sxm",
    execution: str | ExecutionModel = "efficient",
) -> Estimate:
    """What the captured step costs on `chip` when run as `execution` says (a Plan has its own).

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in.
    """
    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    target = load_chip(chip)
    engine, precision = _headline(planned, target)
    headline = target.peak(engine, precision)
    unplaced = _timings(planned, target, headline)
    starts, end = schedule(
        [t.t_device for t in unplaced],
        planned.launches,
        dispatch_seconds(planned.execution, target),
        [repeat.count for repeat in planned.graph.repeats],
        host_waits(target),
    )
    timings = [
        Timing(n * t.t_comp, n * t.t_hbm, n * t.t_net, n * t.gap, start, n * t.more)
        for n, t, start in zip((g.times for g in planned.groups), unplaced, starts, strict=True)
    ]
    rows = tuple(
        _row(planned, index, group, cost, timing)
        for index, (group, cost, timing) in enumerate(
            zip(planned.groups, planned.costs, timings, strict=True)
        )
    )
    times = step_times(timings, end)
    return Estimate(planned, target, rows, times, headline, compute_family(precision))


def _timings(planned: Plan, chip: Chip, headline: float) -> list[Timing]:
    """What one kernel of each group takes; groups with equal work are computed once."""
    bandwidth, gap = chip.memory_bandwidth.value, chip.kernel_gap.value
    moved = planned.total.bytes("link")
    if moved and not chip.links:
        raise MissingPeakError(
            f"{chip.name} has no link, and the step moves {format_traffic(moved)} over one: "
            "add a [[link]] to its TOML file"
        )
    link = max((link.bandwidth.value for link in chip.links), default=math.inf)
    if planned.execution.knobs:
        return _calibrated(planned, planned.execution.knobs, chip, link)
    memo: dict[tuple[Any, ...], float] = {}
    timings = []
    for cost in planned.costs:
        key = tuple(cost.work.items())
        t_comp = memo.get(key)
        if t_comp is None:
            t_comp = memo[key] = compute_seconds(cost, chip, planned.execution, headline)
        timings.append(Timing(t_comp, cost.bytes() / bandwidth, cost.bytes("link") / link, gap))
    return timings


def _calibrated(planned: Plan, knobs: Knobs, chip: Chip, link: float) -> list[Timing]:
    """The same by fitted knobs: equal kernels at once, and engines that overlap as was measured."""
    rows, place = kernel_table(planned, chip, reuse=knobs.cache != 1)
    seconds = kernel_seconds(rows, knobs, copies_layouts(planned))
    gap = launch_seconds(knobs, chip)
    compute, memory, device = (
        part.tolist() for part in (seconds.compute, seconds.memory, seconds.device)
    )
    timings = []
    for row, cost in zip(place, planned.costs, strict=True):
        t_net = cost.bytes("link") / link
        more = max(0.0, device[row] - max(compute[row], memory[row]))
        timings.append(Timing(compute[row], memory[row], t_net, gap, more=more))
    return timings


def dispatch_seconds(execution: ExecutionModel, chip: Chip) -> float:
    """Host seconds for one thing that is enqueued: an op, a kernel or a whole graph."""
    if execution.knobs and execution.knobs.dispatch is not None and execution.dispatch == "eager":
        return execution.knobs.dispatch
    return {
        "eager": chip.dispatch_eager,
        "compiled": chip.dispatch_compiled,
        "graph": chip.graph_launch,
    }[execution.dispatch].value


def _headline(planned: Plan, chip: Chip) -> tuple[str, str]:
    """The engine and precision that run most of the matrix FLOPs; theirs is the headline peak."""
    flops: Counter[tuple[str, str]] = Counter()
    for work, flop in planned.total.work.items():
        if work.operation in MATRIX:
            flops[engine_of(work, chip, planned.execution)] += flop
    return flops.most_common(1)[0][0] if flops else ("vector", "fp32")


def _row(planned: Plan, index: int, group: FusionGroup, cost: Cost, timing: Timing) -> Row:
    lead, n = _lead(planned, group), group.times
    modules = runs.kernel_modules(planned.graph, group.ops, lead)
    return Row(
        index,
        group.name,
        group.pattern,
        group.ops,
        modules[0],
        lead.family,
        lead.part,
        n * cost.flops(),
        n * cost.flops(counts=("useful",)),
        n * cost.flops(counts=("recompute",)),
        n * cost.bytes(),
        {role: n * size for role, size in bytes_by_role(planned.graph, cost).items()},
        n * cost.bytes("link"),
        _precision(cost),
        group.known,
        timing,
        n,
        modules,
    )


def _precision(cost: Cost) -> str:
    """The precision of most matrix FLOPs, else of most vector FLOPs; "" without any."""
    flops: dict[tuple[bool, str], int] = {}
    for work, flop in cost.work.items():
        key = (work.operation in MATRIX, work.precision)
        flops[key] = flops.get(key, 0) + flop
    return max(flops, key=lambda key: (key[0], flops[key]))[1] if flops else ""


def _lead(planned: Plan, group: FusionGroup) -> Op:
    """The op of a group that stands for it: most FLOPs, then most bytes, then the first."""
    ops = [planned.graph.ops[i] for i in group.ops]
    if len(ops) == 1:
        return ops[0]
    costs = planned.op_costs
    return max(ops, key=lambda op: (costs[op.id].flops(), costs[op.id].bytes(), -op.id))


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
