"""A step as torch.compile breaks it beside the same step in one graph; all are estimates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.studies import Compared
from rooftrace.hardware.units import format_time, plural
from rooftrace.tracer.dynamo import PlacedStep
from rooftrace.tracer.dynamo.records import Cause, Recompiled

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, kw_only=True)
class BreakCost(Compared):
    """One line at which compiled code ends: the step as it breaks, and without this line's breaks.

    All other breaks stay; both steps are estimates.
    """

    cause: Cause
    cuts: int  # how many stretches of the module's call begin for it
    singles: int  # kernels of the module's call that Python runs one by one for it

    @property
    def launch(self) -> float:
        """Seconds of launching that it exposes."""
        return self.regime_seconds["launch"]

    def to_dict(self) -> dict[str, Any]:
        """By the columns of `GraphBreaks.to_frame`."""
        cause = self.cause
        return {
            "kind": cause.kind,
            "reason": cause.reason,
            "source": cause.source,
            "module": cause.module,
            "times": cause.times,
            "cuts": self.cuts,
            "singles": self.singles,
            "gain": self.gain,
            "share": self.share,
            "kernels": self.kernels,
            "bytes": self.bytes,
            "launch": self.launch,
        }


@dataclass(frozen=True, kw_only=True)
class GraphBreaks(Shown):
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

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the step in three ways, the lines, what is assumed."""
        ways = {"eager": self.eager, "as it breaks": self.broken, "without breaks": self.whole}
        return {
            "title": self.title,
            "steps": {
                name: {
                    "t_est": way.t_est,
                    "kernels": way.kernels,
                    "bytes_hbm": way.bytes_hbm,
                    "launch": way.times.regime_seconds["launch"],
                }
                for name, way in ways.items()
            },
            "graphs": self.graphs,
            "calls": self.calls,
            "graph_breaks": self.graph_breaks,
            "together": self.together,
            "sum": self.total,
            "breaks": [
                {**row.to_dict(), "hints": list(row.cause.hints), "detail": row.cause.detail}
                for row in self.rows
            ],
            "recompiled": [
                {"source": r.source, "name": r.name, "times": r.times, "reason": r.reason}
                for r in self.recompiled
            ],
            "unplaced": self.placement.unplaced,
            "shared": self.placement.shared,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        lines = plural(len(self.rows), "line") if self.rows else "no line"
        return short(
            self,
            f"{self.title}: {lines} with graph breaks, which cost {format_time(self.together)} of "
            f"{format_time(self.broken.t_est)}",
        )


COLUMNS = (
    "kind",
    "reason",
    "source",
    "module",
    "times",
    "cuts",
    "singles",
    "gain",
    "share",
    "kernels",
    "bytes",
    "launch",
)
"""The columns of `GraphBreaks.to_frame`."""
