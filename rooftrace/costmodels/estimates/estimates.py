"""A plan on a chip: seconds of every kernel, when the step ends, and the totals a report shows."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates.census import Census, census
from rooftrace.costmodels.estimates.nodes import NodeTable, node_table
from rooftrace.costmodels.estimates.rows import Breakdowns, Row, Together, frame_of, row_of
from rooftrace.costmodels.fusion import (
    Bytes,
    Coverage,
    ExecutionModel,
    Plan,
    Unsupported,
    plan,
    runs,
)
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.intervals import LEVEL
from rooftrace.costmodels.memory import Memory, Reserved, reserve
from rooftrace.costmodels.ops import COMPUTED, MATRIX
from rooftrace.costmodels.timing.queue import Communication
from rooftrace.costmodels.timing.timings import StepTimes
from rooftrace.graph import Assumption, OpGraph, assumptions
from rooftrace.hardware import Chip, Host, load_host
from rooftrace.hardware.systems import System, load_system
from rooftrace.hardware.units import format_flops, format_share, format_time, format_traffic

if TYPE_CHECKING:
    import pandas

    from rooftrace.studies.advice import Headroom

# -- itemised --------------------------------------------------------------------------------------


class Itemised:
    """The tables of an estimate whose rows add up to it, and whose constants its times have."""

    plan: Plan
    chip: Chip
    rows: tuple[Row, ...]
    times: StepTimes
    knobs: Knobs | None
    peak: float

    @property
    def borrowed(self) -> str:
        """A sentence that these times have constants of other chips; "" where they do not."""
        return self.plan.execution.borrowed_on(self.chip)

    @property
    def interval_grounds(self) -> str:
        """A sentence on the measured steps that the interval rests on; "" without knobs."""
        return self.times.grounds(self.knobs)

    def chance(self, seconds: float) -> float | None:
        """The chance that a measured step takes at most so long; None without knobs."""
        return self.times.chance(self.knobs, seconds)

    def by_node(self) -> NodeTable:
        """Every kernel with the bytes of weights, of other reads, and of writes.

        Equal kernels of equal modules stand once; nodes add up to `flops` and `bytes_hbm`.
        """
        return node_table(self.plan, self.chip.name, self.rows, expected=self.knobs is not None)

    def census(self, align: int = 16) -> Census:
        """Every matrix product by M, N, K and precision, with its tiles and odd sizes.

        Rows and the attention kernels add up to `flops_matrix`.  align: bytes; sizes are odd whose
        rows in memory are no multiple of them.
        """
        return census(
            self.plan,
            self.chip,
            self.rows,
            knobs=self.knobs,
            headline=self.peak,
            t_serial=self.times.t_serial,
            clock=self.times.clock,
            align=align,
        )


# -- estimates -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Estimate(Shown, Together, Breakdowns, Itemised):
    """The cost of a step on a chip.  Quantities: FLOP, byte, second, FLOP/byte.

    print() shows the table; `to_frame()` is a pandas frame with one row per kernel; `by_module()`
    and the like are mappings with sums of kernels.
    """

    plan: Plan
    chip: Chip
    rows: tuple[Row, ...]  # one per kernel group, in launch order
    times: StepTimes
    knobs: Knobs | None  # None: the peaks of the datasheet
    peak: float  # FLOP/s, dense, of the engine that runs most of the matrix FLOPs
    peak_precision: str  # of that engine ("tf32" where fp32 convolutions run there)
    exchanges: tuple[Communication, ...] = ()  # with other processes, in launch order

    # -- the step -------------------------------------------------------------------------------

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
    def step(self) -> str:
        """The phase, and of a pipeline the stages: "training stages 2-3 of 4"."""
        return self.graph.step

    @property
    def coverage(self) -> Coverage:
        """The share of ops and bytes that have a rule."""
        return self.plan.coverage

    @property
    def lower_bound(self) -> bool:
        """Whether something ran out of sight of the trace, so that all totals are too low."""
        return bool(self.plan.source.unrecorded)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on rewrites, missing rules and assumptions."""
        return (*self.plan.notes, *self.resting_notes)

    @property
    def resting_notes(self) -> tuple[str, ...]:
        """The notes on shares of the step that rest on assumptions."""
        return resting_notes(self.graph.assumptions, lambda: self.assumption_seconds, self.t_est)

    @property
    def own_notes(self) -> tuple[str, ...]:
        """The notes on rules and joins which users and packages add."""
        return self.plan.own_notes

    def unsupported_ops(self) -> tuple[Unsupported, ...]:
        """Ops without a rule, most bytes first."""
        return self.coverage.unsupported

    @cached_property
    def assumption_seconds(self) -> Mapping[int, float]:
        """Device seconds of the kernels whose sizes, values or facts come from each assumption, by
        its id."""
        seconds: dict[int, float] = defaultdict(float)
        for row in self.rows:
            for assumption, share in runs.resting_shares(self.graph, row.ops).items():
                seconds[assumption] += share * row.timing.t_device
        return dict(seconds)

    @cached_property
    def memory(self) -> Memory:
        """Bytes alive over the step as it is run: the peak, its tensors, the timeline."""
        return self.plan.memory

    @cached_property
    def reserved(self) -> Reserved | None:
        """GPU memory by PyTorch's allocator, with libraries' workspaces; None on a CPU."""
        if self.chip.kind != "gpu":
            return None
        return reserve(self.plan.graph, self.chip, self.memory.peak, self.plan.unmade)

    # -- totals ---------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """FLOP, attention counted dense, without recomputation."""
        return self.plan.total.flops()

    def total(self) -> int:
        """FLOP of the step, `flops`, under the name that fvcore's FlopCountAnalysis has for it.

        A multiply-add is 2 FLOP; fvcore counts it as 1, like `macs`.
        """
        return self.flops

    @property
    def flops_causal(self) -> int:
        """FLOP without masked attention scores and without recomputation."""
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
        """Bytes that any execution moves: inputs and weights in, results out, once each."""
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
        """Expected seconds of the step; with knobs=None a lower bound."""
        return self.times.t_est

    @property
    def t_bound(self) -> float:
        """Seconds that the step takes at least: datasheet rates, engines that overlap perfectly."""
        return self.times.t_bound

    @property
    def expected(self) -> bool:
        """Whether times are expected ones, by knobs; False where they are bounds."""
        return self.knobs is not None

    @cached_property
    def t_interval(self) -> tuple[float, float] | None:
        """Seconds between which 90 % of such steps were measured; None without knobs.

        The width comes from steps that no fit had seen; see `StepTimes.within`.
        """
        return self.within()

    def within(self, level: float = LEVEL) -> tuple[float, float] | None:
        """Seconds between which this share of such steps were measured, as `t_interval` of 90 %.

        Raises ResidualsError for a level that the knobs say nothing of (0.5 to 0.95 as a rule).
        """
        return self.times.within(self.knobs, level)

    @property
    def totals(self) -> dict[str, float]:
        """Totals by the names that diffs, budgets and locks limit: second, FLOP, byte through HBM,
        byte at the peak of memory, parameters, kernels."""
        return {
            "time": self.t_est,
            "flops": self.flops,
            "bytes": self.bytes_hbm,
            "memory": self.memory.peak,
            "params": int(self.graph.model.get("params", 0)),
            "kernels": self.kernels,
        }

    @property
    def mfu(self) -> float | None:
        """Matrix FLOP without recomputation (masked blocks left out) per second of t_est over the
        dense peak of the dominant matrix precision."""
        return _ratio(self.plan.total.flops(MATRIX, ("useful",)), self.t_est * self.peak)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP utilization: mfu, with recomputation and masked blocks counted too."""
        return _ratio(self.plan.total.flops(MATRIX, COMPUTED), self.t_est * self.peak)

    def to_frame(self) -> pandas.DataFrame:
        """One row per kernel, in launch order; `count` equal ones, of `module` up to `module_last`,
        are one row with the sums of them all."""
        return frame_of(self.plan, self.rows)

    def headroom(self) -> Headroom:
        """Savings by fusing, as a `Headroom`; `rooftrace.tools.headroom` takes graphs too."""
        from rooftrace.studies.advice import headroom  # above this package, as it prices estimates

        return headroom(self)

    def __repr__(self) -> str:
        bound = f"bound {format_time(self.t_bound)}"
        times = f"expected {format_time(self.t_est)}, {bound}" if self.expected else bound
        return short(
            self,
            f"{self.graph.title} on {self.chip.name}, {self.execution.name}: {times}; "
            f"{format_flops(self.flops)}, {format_traffic(self.bytes_hbm)} of HBM, "
            f"{self.kernels:,} kernels",
        )


def estimate(
    graph: OpGraph | Plan,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    system: str | System | None = None,
    host: str | os.PathLike[str] | Host | None = None,
) -> Estimate:
    """The cost of the captured step on `chip` under `execution` (a Plan has its execution).

    chip: default the one that the knobs of the execution were fitted on, else h200-sxm.

    system: how chips are joined, for a step of several processes: a name (`rooftrace systems
    list`), a file, or a System.  Its chip then takes the place of `chip`.  host: whose facts take
    the place of the chip's: a name, a file, or a Host.  Raises UnknownChipError, UnknownHostError,
    ExecutionError, and MissingPeakError where the chip has no rate for a precision that the step
    computes in.
    """
    from rooftrace.costmodels.timing.steps import time_plan  # loads numpy

    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    if system is not None:
        chip = load_system(system).joined_chip
    target = ExecutionModel.chip_of(chip, [planned.execution])
    if host is not None:
        target = load_host(host).under(target)
    times = time_plan(planned, target)
    return Estimate(
        plan=planned,
        chip=target,
        rows=tuple(
            row_of(planned, index, timing, target) for index, timing in enumerate(times.groups)
        ),
        times=times.step,
        knobs=times.knobs,
        peak=times.peak,
        peak_precision=times.peak_precision,
        exchanges=times.exchanges,
    )


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


# -- resting ---------------------------------------------------------------------------------------


_VERBS = {
    assumptions.FALLBACK: "runs in place of a kernel",
    "mask": "rests on",
    "lengths": "rests on",
}
"""The verb of a note, by the kind of assumption."""


def resting_notes(
    assumed: Iterable[Assumption], seconds_of: Callable[[], Mapping[int, float]], t_est: float
) -> tuple[str, ...]:
    """A sentence for each such assumption that time rests on; a fallback that a rewrite took has
    none.

    seconds_of: gives the seconds that rest on each assumption, by its id.  t_est: of the step.
    """
    together: defaultdict[tuple[str, str], float] = defaultdict(float)
    for item in assumed:
        if item.kind in _VERBS:
            together[_VERBS[item.kind], item.text] += seconds_of().get(item.id, 0.0)
    return tuple(
        f"{format_share(seconds / t_est)} of the step {does}: {text}"
        for (does, text), seconds in together.items()
        if seconds
    )
