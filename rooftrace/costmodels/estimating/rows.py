"""The rows of an estimate: what each kernel group costs on a chip, and sums of them by a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import visible
from rooftrace.costmodels.costs import MATRIX, Cost
from rooftrace.costmodels.fusion import FusionGroup, runs
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.timings import Timing
from rooftrace.costmodels.traffic import bytes_by_role
from rooftrace.hardware import Chip
from rooftrace.tracer.graph import Op
from rooftrace.tracer.vocabulary import ROLES

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
    flops_causal: int  # of what the mask lets through
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
