"""Savings by fusing: by the kernels of a plan, and by larger ones beyond that.

Both are differences between two estimates of one graph on one chip.  The first compares a kernel
for every op with the kernels of the plan.  The second compares these with the larger kernels that
the joins that are off would make.  So the savings add up to the difference of the totals.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rooftrace._plain import Positive
from rooftrace._shown import short
from rooftrace.costmodels.estimates import Estimate, Row, estimate
from rooftrace.costmodels.fusion import ExecutionModel, Plan, beyond, fuse, plan
from rooftrace.graph import OpGraph, pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_share, format_time, format_traffic

if TYPE_CHECKING:
    import pandas

EPILOGUE, ATTENTION, CHAIN = BEYOND = ("epilogue", "attention", "chain")
"""The joins that are off by default (docs/fusion.md), which would make larger kernels."""


@dataclass(frozen=True, slots=True)
class Saving:
    """The saving by putting these ops into one kernel, over all `count` equal groups.

    kind: fused (a kernel of several ops), unread (results of one op that nobody reads, and a
    compiler leaves out), or one of EPILOGUE, ATTENTION, CHAIN.  ops: their names.
    module: path with starred indices.  launches: kernels that are not launched.  bytes: through
    HBM.  seconds: of the device.  share: seconds over t_est of the step without it.
    """

    kind: str
    name: str
    ops: tuple[str, ...]
    module: str
    part: str
    count: Positive
    launches: Positive
    bytes: int
    seconds: float
    share: float

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        times = f", {self.count:,} times" if self.count > 1 else ""
        return (
            f"{self.name}{where}: {len(self.ops)} ops{times}, {format_traffic(self.bytes)} less, "
            f"{format_time(self.seconds)}, {format_share(self.share)}"
        )


@dataclass(frozen=True)
class Headroom:
    """An estimate after fusing, before it (every op a kernel), and with larger kernels beyond that.

    The host dispatches in all three as the execution model says.
    """

    after: Estimate

    @cached_property
    def before(self) -> Estimate:
        """The step with a kernel for every op."""
        return estimate(self.after.plan.unfused, self.after.chip)

    @cached_property
    def beyond(self) -> Estimate:
        """The step with the kernels that the joins that are off would make."""
        plan = self.after.plan
        groups = beyond(plan.graph, plan.groups, plan.op_costs, plan.costs)
        return estimate(plan.regrouped(groups), self.after.chip)

    @cached_property
    def fused(self) -> tuple[Saving, ...]:
        """Savings by the kernels of the plan, most seconds first."""
        return _savings(self.before, self.after)

    @cached_property
    def left(self) -> tuple[Saving, ...]:
        """Savings by larger kernels beyond them, most seconds first.

        An upper bound: work of one kernel is added up as if its engines did not overlap, and no
        kernel is slower for doing more.
        """
        return _savings(self.after, self.beyond)

    def to_frame(self) -> pandas.DataFrame:
        """One row per saving: those of the plan, then those that are left."""
        import pandas

        return pandas.DataFrame.from_records(
            [
                {name: getattr(saving, name) for name in Saving.__slots__}
                | {"ops": " ".join(saving.ops)}
                for saving in (*self.fused, *self.left)
            ],
            columns=list(Saving.__slots__),
        )

    def __repr__(self) -> str:
        after = self.after
        seconds = [each.times.t_serial for each in (self.before, after, self.beyond)]
        return short(
            self,
            f"{after.graph.title} on {after.chip.name}, {after.execution.name}: kernels take "
            f"{format_time(seconds[0])} unfused, {format_time(seconds[1])} fused, "
            f"{format_time(seconds[2])} with all larger kernels",
        )

    def __str__(self) -> str:
        lines = [*map(str, self.fused[:10])]
        lines += ["left:", *map(str, self.left[:5])] if self.left else []
        return "\n".join(lines)


def headroom(
    graph: OpGraph | Plan | Estimate,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
) -> Headroom:
    """Savings by fusing a step on `chip` (an Estimate has its chip and execution).

    If the execution model does not fuse, the ops of its graph are fused nevertheless.  Factors on
    bytes describe the same effect and are left out.
    """
    if isinstance(graph, Estimate):
        return headroom(graph.plan, graph.chip)
    planned = (graph if isinstance(graph, Plan) else plan(graph, execution)).by_rules
    model = planned.execution
    if model.fusion != "detected":
        model = replace(model, fusion="detected", activation_fusion=1.0, elementwise=1.0)
        planned = replace(planned, execution=model).regrouped(fuse(planned.graph, model))
    return Headroom(estimate(planned, chip))


def _savings(before: Estimate, after: Estimate) -> tuple[Saving, ...]:
    """The saving of each kernel of `after` that replaces several of `before`; equal ones as one."""
    row_of = {op: row for row in before.rows for op in row.ops}
    kernels: dict[tuple[str, ...], list[tuple[Row, int, int, float]]] = defaultdict(list)
    ops = after.graph.ops
    for row in after.rows:
        parts = list({row_of[op].index: row_of[op] for op in row.ops}.values())
        if len(parts) == 1 and parts[0].bytes == row.bytes:
            continue
        # A group stands for as many kernels as its first op, also if it crosses iterations.
        size = sum(part.bytes // part.count for part in parts) * row.count - row.bytes
        seconds = sum(part.timing.t_device / part.count for part in parts) * row.count
        seconds -= row.timing.t_device
        names = [ops[op].name for op in row.ops]
        key = (row.pattern, row.name, pattern_of(row.module), row.part, *names)
        kernels[key].append((row, (len(parts) - 1) * row.count, size, seconds))
    savings = []
    for (pattern, name, module, part, *members), entries in kernels.items():
        seconds = sum(entry[3] for entry in entries)
        savings.append(
            Saving(
                # A compiler leaves out results of one op that nobody reads.
                kind=pattern if pattern in BEYOND else ("fused" if members[1:] else "unread"),
                name=name,
                ops=tuple(members),
                module=module,
                part=part,
                count=sum(entry[0].count for entry in entries),
                launches=sum(entry[1] for entry in entries),
                bytes=sum(entry[2] for entry in entries),
                seconds=seconds,
                share=seconds / before.t_est if before.t_est else 0.0,
            )
        )
    return tuple(sorted(savings, key=lambda s: (-s.seconds, -s.bytes, s.module, s.name, s.ops)))
