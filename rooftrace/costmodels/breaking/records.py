"""A step as torch.compile breaks it beside the same step in one graph; all are estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._plain import Plain, plain_record
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.studies import Compared
from rooftrace.hardware.units import format_time, plural
from rooftrace.tracer.dynamo import PlacedStep
from rooftrace.tracer.dynamo.records import Cause, Recompiled

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class BreakCost(Plain, Compared):
    """One line at which compiled code ends: the step as it breaks, and without this line's breaks.

    All other breaks stay; both steps are estimates.
    """

    cause: Cause
    cuts: int  # how many stretches of the module's call begin for it
    singles: int  # kernels of the module's call that Python runs one by one for it

    KEYS = (
        "kind=cause.kind reason=cause.reason source=cause.source module=cause.module "
        "times=cause.times cuts singles gain share kernels bytes launch"
    )

    @property
    def launch(self) -> float:
        """Seconds of launching that it exposes."""
        return self.regime_seconds["launch"]


@dataclass(frozen=True, kw_only=True)
class GraphBreaks(Plain, Shown):
    """The graph breaks of a step, most seconds first, and the step in three ways.

    Gains of rows are each of one line alone; they do not add up to `together`, all lines at once.
    """

    rows: tuple[BreakCost, ...]
    eager: Estimate  # op by op
    broken: Estimate  # compiled, as it breaks
    whole: Estimate  # compiled, without any break
    graphs: int  # different compiled graphs
    calls: int  # calls of them in the forward of a step
    graph_breaks: int  # as torch counts them while it compiles
    recompiled: tuple[Recompiled, ...]
    placement: PlacedStep
    notes: tuple[str, ...] = ()

    KEYS = (
        "title steps=_steps graphs calls graph_breaks together sum=total breaks=_breaks recompiled "
        "unplaced=placement.unplaced shared=placement.shared notes"
    )

    @property
    def together(self) -> float:
        """Seconds that all breaks cost together."""
        return self.broken.t_est - self.whole.t_est

    @property
    def total(self) -> float:
        """The sum of what each line costs alone."""
        return sum(row.gain for row in self.rows)

    @property
    def title(self) -> str:
        """Which step, on which chip, how."""
        whole = self.whole
        return f"{whole.graph.title} on {whole.chip.name}, {whole.execution.name}"

    def to_rows(self) -> list[dict[str, Any]]:
        """One mapping a line, in order."""
        return [row.to_dict() for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row a line, in order; seconds and bytes."""
        import pandas

        return pandas.DataFrame.from_records(self.to_rows(), columns=COLUMNS)

    @property
    def _steps(self) -> dict[str, Any]:
        ways = {"eager": self.eager, "as it breaks": self.broken, "without breaks": self.whole}
        keys = "t_est kernels bytes_hbm launch=times.regime_seconds.launch"
        return {name: plain_record(way, keys) for name, way in ways.items()}

    @property
    def _breaks(self) -> list[dict[str, Any]]:
        keys = f"{BreakCost.KEYS} hints=cause.hints detail=cause.detail"
        return [plain_record(row, keys) for row in self.rows]

    def __repr__(self) -> str:
        lines = plural(len(self.rows), "line") if self.rows else "no line"
        return short(
            self,
            f"{self.title}: {lines} with graph breaks, which cost {format_time(self.together)} of "
            f"{format_time(self.broken.t_est)}",
        )


COLUMNS = [key.partition("=")[0] for key in BreakCost.KEYS.split()]
"""The columns of `GraphBreaks.to_frame`."""
