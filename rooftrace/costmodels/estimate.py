"""From an op graph to an estimate: price every op, group, place on a chip, add up.

`plan` is chip-free and done once per execution model; `estimate` puts a plan on a chip.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.cost import NOTHING, Cost
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.fuse import FusionGroup, fuse
from rooftrace.costmodels.price import price_ops
from rooftrace.costmodels.rewrite import rewrite
from rooftrace.costmodels.timing import (
    Launch,
    StepTimes,
    Timing,
    compute_seconds,
    engine_of,
    schedule,
    step_times,
)
from rooftrace.costmodels.traffic import bytes_by_role, compulsory_bytes, group_costs
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.chipfile import load_chip
from rooftrace.tracer.graph import ROLES, Op, OpGraph, pattern_of

if TYPE_CHECKING:
    import pandas

MATRIX = ("matmul", "convolution")


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes through HBM in one step, by role (see rooftrace.tracer.graph.ROLES)."""

    weights: int = 0
    activations: int = 0
    kv: int = 0
    gradients: int = 0
    optimizer: int = 0
    temporary: int = 0
    constants: int = 0

    @property
    def total(self) -> int:
        """All roles together: bytes_hbm."""
        return sum(self.to_dict().values())

    def to_dict(self) -> dict[str, int]:
        """Bytes by role name."""
        return {role: getattr(self, role) for role in ROLES}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An op without a rule: only the bytes of its inputs and outputs are counted."""

    target: str
    count: int
    bytes: int
    shapes: str
    modules: tuple[str, ...]

    @property
    def stub(self) -> str:
        """A rule to paste and fill in."""
        name = self.target.rsplit(".", 1)[0]
        function = name.replace(".", "_").strip("_")
        return (f'@rooftrace.rule("{name}")\ndef {function}(op):\n'
                f"    return rooftrace.Cost.of(vector=...) + op.streamed()")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a total rests on explicit rules."""

    ops: int
    ops_with_rule: int
    bytes: int
    bytes_with_rule: int
    unsupported: tuple[Unsupported, ...]

    @property
    def bytes_with_rule_share(self) -> float:
        """Share of the priced bytes that a rule accounts for (1 when nothing moves)."""
        return self.bytes_with_rule / self.bytes if self.bytes else 1.0


@dataclass(frozen=True)
class Plan:
    """A graph priced under one execution model; still without a chip.

    graph: after rewriting (naive attention stands as its matrix products).  op_costs: one per op,
    bound to storages.  groups and costs: kernels in launch order and what each costs.
    """

    source: OpGraph
    graph: OpGraph
    execution: ExecutionModel
    op_costs: tuple[Cost, ...]
    groups: tuple[FusionGroup, ...]
    costs: tuple[Cost, ...]
    launches: tuple[Launch, ...]
    coverage: Coverage
    compulsory: int
    notes: tuple[str, ...] = ()

    @cached_property
    def total(self) -> Cost:
        """Work over all ops; traffic over all groups."""
        work: Counter[Any] = Counter()
        traffic: Counter[Any] = Counter()
        for cost in self.costs:
            work.update(cost.work)
            traffic.update(cost.traffic)
        return Cost(work, traffic)

    @cached_property
    def bytes(self) -> Bytes:
        """HBM bytes by role."""
        return Bytes(**bytes_by_role(self.graph, self.total))

    @cached_property
    def precision(self) -> str:
        """The matrix precision that most matrix FLOPs compute in ("fp32" where there are none)."""
        flops: Counter[str] = Counter()
        for work, flop in self.total.work.items():
            if work.operation in MATRIX:
                flops[work.precision] += flop
        return flops.most_common(1)[0][0] if flops else "fp32"


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel group on one chip.

    name: pattern name for a fused group, else the op's.  ops: indices into `graph.ops`.  module,
    family, part: those of the op that moves or computes most.
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
    bytes: int
    bytes_by_role: Mapping[str, int]
    bytes_net: int
    precision: str
    known: bool
    timing: Timing


@dataclass(frozen=True)
class Estimate:
    """What a step costs on a chip.  Quantities: FLOP, byte, second, FLOP/byte.

    print() shows the table; `to_dict()` is the report.json entry; `to_frame()` is a pandas frame with
    one row per kernel.
    """

    plan: Plan
    chip: Chip
    rows: tuple[Row, ...]
    times: StepTimes
    peak: float
    notes: tuple[str, ...] = field(default=())

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

    def unsupported_ops(self) -> tuple[Unsupported, ...]:
        """Ops without a rule, most bytes first."""
        return self.coverage.unsupported

    # -- totals ---------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """FLOP, attention counted dense, without recomputation."""
        return self.plan.total.flops()

    @property
    def flops_causal(self) -> int:
        """FLOP that kernels knowing the mask compute, without recomputation."""
        return self.plan.total.flops(counts=("useful",))

    @property
    def flops_recompute(self) -> int:
        """FLOP done a second time in backward."""
        recomputed = sum(
            self.plan.op_costs[op.id].flops(counts=("useful", "masked_executed"))
            for op in self.graph.ops if op.part == "recompute")
        return self.plan.total.flops(counts=("recompute",)) + recomputed

    @property
    def flops_matrix(self) -> int:
        """FLOP in matrix products and convolutions, attention dense, without recomputation."""
        recomputed = sum(self.plan.op_costs[op.id].flops(MATRIX)
                         for op in self.graph.ops if op.part == "recompute")
        return self.plan.total.flops(MATRIX) - recomputed

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
        """Unique bytes that any execution has to move: inputs and weights in, results out."""
        return self.plan.compulsory

    @property
    def below_floor(self) -> bool:
        """True where the knobs promise fewer bytes than are compulsory."""
        return self.bytes_hbm < self.bytes_compulsory

    @property
    def ai_hbm(self) -> float | None:
        """Arithmetic intensity: computed FLOP per HBM byte."""
        return _ratio(self.flops_causal, self.bytes_hbm)

    @property
    def ai_total(self) -> float | None:
        """Computed FLOP per HBM and link byte."""
        return _ratio(self.flops_causal, self.bytes_hbm + self.bytes_net)

    @property
    def ridge(self) -> float:
        """FLOP/byte at which this chip's headline peak and bandwidth meet."""
        return self.peak / self.chip.memory_bandwidth.value

    @property
    def kernels(self) -> int:
        """Kernels launched."""
        return len(self.rows)

    @property
    def t_est(self) -> float:
        """Estimated seconds of the step."""
        return self.times.t_est

    @property
    def mfu(self) -> float | None:
        """Matrix FLOP without recomputation (masked blocks left out) per second of t_est over the
        dense peak of the dominant matrix precision."""
        counts = self.plan.total.flops(MATRIX, ("useful",)) - self._recomputed_matrix
        return _ratio(counts, self.t_est * self.peak)

    @property
    def hfu(self) -> float | None:
        """As mfu, with recomputation and masked blocks that were computed anyway."""
        counts = self.plan.total.flops(MATRIX, ("useful", "recompute", "masked_executed"))
        return _ratio(counts, self.t_est * self.peak)

    @property
    def _recomputed_matrix(self) -> int:
        return sum(self.plan.op_costs[op.id].flops(MATRIX, ("useful",))
                   for op in self.graph.ops if op.part == "recompute")

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

    # -- breakdowns -----------------------------------------------------------------------------

    def by_operator(self) -> list[dict[str, Any]]:
        """Calls, FLOP, bytes and seconds by kernel name, most time first."""
        return self._group(lambda row: row.name)

    def by_family(self) -> dict[str, dict[str, Any]]:
        """The same by family (attention, dense, moe, norm ...), shares of t_serial included."""
        return {entry.pop("key"): entry for entry in self._group(lambda row: row.family)}

    def by_part(self) -> dict[str, dict[str, Any]]:
        """The same by part (forward, backward, recompute, optimizer)."""
        return {entry.pop("key"): entry for entry in self._group(lambda row: row.part)}

    def by_module(self, depth: int | None = None) -> list[dict[str, Any]]:
        """The same by module path, `depth` components deep (None: the full path)."""
        def key(row: Row) -> str:
            return row.module if depth is None else ".".join(row.module.split(".")[:depth])
        return self._group(key)

    def by_pattern(self) -> list[dict[str, Any]]:
        """The same by module path with starred indices; `instances` is the number of paths."""
        groups = self._group(lambda row: pattern_of(row.module))
        paths: dict[str, set[str]] = defaultdict(set)
        for row in self.rows:
            paths[pattern_of(row.module)].add(row.module)
        for entry in groups:
            entry["instances"] = len(paths[entry["key"]])
        return groups

    def _group(self, key: Any) -> list[dict[str, Any]]:
        sums: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            name = key(row)
            entry = sums.setdefault(name, {
                "key": name, "calls": 0, "flops": 0, "bytes": 0, "t_comp": 0.0, "t_hbm": 0.0,
                "t_net": 0.0, "t_device": 0.0, "regimes": Counter()})
            entry["calls"] += 1
            entry["flops"] += row.flops
            entry["bytes"] += row.bytes
            timing = row.timing
            entry["t_comp"] += timing.t_comp
            entry["t_hbm"] += timing.t_hbm
            entry["t_net"] += timing.t_net
            entry["t_device"] += timing.t_device
            entry["regimes"][timing.regime] += timing.t_device
        total = self.times.t_serial
        result = sorted(sums.values(), key=lambda entry: (-entry["t_device"], entry["key"]))
        for entry in result:
            regimes = entry.pop("regimes")
            entry["regime"] = regimes.most_common(1)[0][0] if regimes else "launch"
            entry["share"] = entry["t_device"] / total if total else 0.0
        return result

    def to_frame(self) -> pandas.DataFrame:
        """One row per kernel, in launch order."""
        import pandas

        records = []
        for row in self.rows:
            timing = row.timing
            records.append({
                "kernel": row.index, "name": row.name, "pattern": row.pattern, "ops": len(row.ops),
                "module": row.module, "family": row.family, "part": row.part,
                "precision": row.precision, "flops": row.flops, "flops_causal": row.flops_causal,
                "bytes": row.bytes,
                **{f"bytes_{role}": row.bytes_by_role.get(role, 0) for role in ROLES},
                "bytes_net": row.bytes_net, "t_comp": timing.t_comp, "t_hbm": timing.t_hbm,
                "t_net": timing.t_net, "t_device": timing.t_device, "start": timing.start,
                "regime": timing.regime, "margin": timing.margin, "has_rule": row.known})
        return pandas.DataFrame.from_records(records)

    def __str__(self) -> str:
        from rooftrace import _render  # the table lives in reporting, which imports this module

        return _render([self])


def plan(graph: OpGraph, execution: str | ExecutionModel = "efficient") -> Plan:
    """Price `graph` under an execution model: rewrite, price each op, fuse, add up traffic."""
    model = execution_model(execution)
    rewritten, notes = rewrite(graph, model)
    op_costs, known = price_ops(rewritten)
    groups = fuse(rewritten, model)
    costs = group_costs(rewritten, groups, op_costs, model)
    return Plan(graph, rewritten, model, op_costs, groups, costs, _launches(rewritten, groups, model),
                _coverage(rewritten, op_costs, known), compulsory_bytes(rewritten, op_costs), notes)


def estimate(graph: OpGraph | Plan, chip: str | Chip = "h200-sxm",
             execution: str | ExecutionModel = "efficient") -> Estimate:
    """What the captured step costs on `chip` when run as `execution` says.

    Raises UnknownChipError, ExecutionError, and MissingPeakError where the chip has no rate for a
    precision that the step computes in.
    """
    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    target = load_chip(chip)
    headline = _headline(planned, target)
    bandwidth = target.memory_bandwidth.value
    link = max((lk.bandwidth.value for lk in target.links), default=math.inf)
    timings = []
    memo: dict[tuple[Any, ...], float] = {}
    for cost in planned.costs:
        key = tuple(cost.work.items())
        t_comp = memo.get(key)
        if t_comp is None:
            t_comp = memo[key] = compute_seconds(cost, target, planned.execution, headline)
        timings.append(Timing(t_comp, cost.bytes() / bandwidth, cost.bytes("link") / link,
                              target.kernel_gap.value))
    starts, end = _run(timings, planned, target)
    rows = tuple(_row(planned, index, group, cost, timing, start)
                 for index, (group, cost, timing, start)
                 in enumerate(zip(planned.groups, planned.costs, timings, starts, strict=True)))
    notes = list(planned.notes)
    result = Estimate(planned, target, rows, step_times((row.timing for row in rows), end), headline,
                      tuple(notes))
    return result


def _run(timings: Sequence[Timing], planned: Plan, chip: Chip) -> tuple[list[float], float]:
    """Starts of the groups on the device and the end of the step."""
    dispatch = {"eager": chip.dispatch_eager, "compiled": chip.dispatch_compiled,
                "graph": chip.dispatch_compiled}[planned.execution.dispatch].value
    padded: list[Timing | None] = []
    kernels = iter(timings)
    for launch in planned.launches:
        padded.append(next(kernels) if launch.on_device else None)
    first = chip.graph_launch.value if planned.execution.dispatch == "graph" else 0.0
    starts, end = schedule(padded, planned.launches, dispatch)
    on_device = [start + first for start, launch in zip(starts, planned.launches, strict=True)
                 if launch.on_device]
    return on_device, end + first


def _launches(graph: OpGraph, groups: Sequence[FusionGroup], execution: ExecutionModel,
              ) -> tuple[Launch, ...]:
    """Host work per kernel in launch order, with an entry of its own for each wait.

    Eager: every op up to the kernel's, views too, is one dispatch.  Compiled: one per group.  Graph: none.
    """
    eager, graphed = execution.dispatch == "eager", execution.dispatch == "graph"
    syncs = [op.id for op in graph.ops if op.kind == "sync"]
    launches: list[Launch] = []
    done = 0
    for group in groups:
        last = group.ops[-1]
        while syncs and syncs[0] < last:
            sync = syncs.pop(0)
            launches.append(Launch(sync - done + 1 if eager else 0, False, sync=True))
            done = sync + 1
        dispatches = max(last + 1 - done, 0) if eager else (0 if graphed else 1)
        done = max(done, last + 1)
        launches.append(Launch(dispatches, True))
    for sync in syncs:
        launches.append(Launch(max(sync + 1 - done, 0) if eager else 0, False, sync=True))
        done = max(done, sync + 1)
    if eager and done < len(graph.ops):
        launches.append(Launch(len(graph.ops) - done, False))
    return tuple(launches)


def _headline(planned: Plan, chip: Chip) -> float:
    """The dense peak of the dominant matrix precision, FLOP/s."""
    from rooftrace.costmodels.cost import Work

    has_matrix = any(work.operation in MATRIX for work in planned.total.work)
    operation = "vector"
    if has_matrix:
        flops: Counter[str] = Counter()
        for work, flop in planned.total.work.items():
            if work.operation in MATRIX:
                flops[work.operation] += flop
        operation = flops.most_common(1)[0][0]
    engine, precision = engine_of(Work(operation, planned.precision), chip, planned.execution)
    return chip.peak(engine, precision)


def _row(planned: Plan, index: int, group: FusionGroup, cost: Cost, timing: Timing, start: float) -> Row:
    graph = planned.graph
    lead = _lead(planned, group)
    matrix: Counter[str] = Counter()
    for work, flop in cost.work.items():
        matrix[work.precision] += flop * (1000 if work.operation in MATRIX else 1)
    known = all(planned.op_costs[i] is not None for i in group.ops)
    return Row(index, group.name, group.pattern, group.ops, lead.module, lead.family, lead.part,
               cost.flops(), cost.flops(counts=("useful",)), cost.bytes(),
               bytes_by_role(graph, cost), cost.bytes("link"),
               matrix.most_common(1)[0][0] if matrix else "", known and group.known,
               Timing(timing.t_comp, timing.t_hbm, timing.t_net, timing.gap, start))


def _lead(planned: Plan, group: FusionGroup) -> Op:
    """The op of a group that stands for it: most FLOPs, then most bytes, then the first."""
    ops = [planned.graph.ops[i] for i in group.ops]
    if len(ops) == 1:
        return ops[0]
    return max(ops, key=lambda op: (planned.op_costs[op.id].flops(), planned.op_costs[op.id].bytes(), -op.id))


def _coverage(graph: OpGraph, costs: Sequence[Cost], known: Sequence[bool]) -> Coverage:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    where: dict[str, dict[str, None]] = defaultdict(dict)
    shapes: dict[str, str] = {}
    total = with_rule = ops = ops_with_rule = 0
    for op, cost, has_rule in zip(graph.ops, costs, known, strict=True):
        if op.kind != "kernel":
            continue
        size = cost.bytes() + cost.bytes("link")
        ops += 1
        total += size
        if has_rule:
            ops_with_rule += 1
            with_rule += size
            continue
        counts[op.target] += 1
        sizes[op.target] += size
        where[op.target][pattern_of(op.module)] = None
        shapes.setdefault(op.target, ", ".join(
            f"{graph.values[i].dtype}[{', '.join(map(str, graph.values[i].shape))}]" for i in op.inputs[:3]))
    unsupported = tuple(Unsupported(target, counts[target], sizes[target], shapes[target], tuple(where[target]))
                        for target in sorted(counts, key=lambda t: (-sizes[t], t)))
    return Coverage(ops, ops_with_rule, total, with_rule, unsupported)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


__all__ = ["NOTHING", "Bytes", "Coverage", "Estimate", "Plan", "Row", "Unsupported", "estimate", "plan"]
