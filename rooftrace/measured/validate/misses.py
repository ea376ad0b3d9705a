"""Each kernel as predicted beside what was measured, and a likely reason where the two differ.

A reason comes from the numbers (a share of the bandwidth, kernels that were not fused), never from
a fit.  Predicted seconds are `t_device`, the gap between kernels included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rooftrace.costmodels.costs import COMPUTED, MATRIX
from rooftrace.costmodels.estimating import Estimate, Row
from rooftrace.costmodels.kernels import engines
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.alignment import Alignment

CLOSE = 0.2
"""A measurement this near to the prediction, as a share of it, needs no reason."""
SHORT = 10e-6
"""Seconds: below this a kernel is mostly its launch."""
FEW_TILES = 0.7
"""Share of the tiles' work that is useful, below which the shape is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One row of an estimate beside its measurement."""

    row: Row
    predicted: float  # s, all launches that the row stands for
    measured: float | None  # s, of the same launches; None where the run has none of its ops
    measured_ops: int  # how many of its ops the run has
    kernels: float | None  # that the run launched for one of ours; None where it does not say
    reason: str  # why the two differ, as far as the numbers show; "" where they are close

    @property
    def miss(self) -> float:
        """measured - predicted [s]; a kernel that is not in the run counts as measured 0."""
        return (self.measured or 0.0) - self.predicted


def nodes(estimate: Estimate, measured: Alignment | Mapping[int, float]) -> tuple[Node, ...]:
    """Every kernel of `estimate` beside what was measured, in the order of its rows.

    measured: an alignment with `estimate.graph`, or seconds by op id of that graph, all iterations
    together (a run that timed op by op).
    """
    seconds = measured.seconds if isinstance(measured, Alignment) else measured
    launched: Mapping[int, float] = {}
    if isinstance(measured, Alignment) and measured.trace.on_device:
        launched = {op: measurement.kernels for op, measurement in measured.measured.items()}
    standing: Counter[int] = Counter()  # an op may stand in two rows: at the edge of iterations
    for row in estimate.rows:
        standing.update(dict.fromkeys(row.ops, row.count))
    return tuple(_node(estimate, row, seconds, launched, standing) for row in estimate.rows)


def worst(kernels: tuple[Node, ...], count: int = 20) -> tuple[Node, ...]:
    """The nodes with the largest |measured - predicted|, largest first."""
    return tuple(sorted(kernels, key=lambda node: (-abs(node.miss), node.row.index))[:count])


def _node(
    estimate: Estimate,
    row: Row,
    seconds: Mapping[int, float],
    launched: Mapping[int, float],
    standing: Mapping[int, int],
) -> Node:
    predicted = row.timing.t_device
    here = [op for op in row.ops if op in seconds]
    if not here:
        return Node(
            row=row,
            predicted=predicted,
            measured=None,
            measured_ops=0,
            kernels=None,
            reason="not in the run",
        )
    measured = sum(seconds[op] * row.count / standing[op] for op in here)
    kernels = sum(launched[op] for op in here) if all(op in launched for op in here) else None
    reason = _reason(estimate, row, measured, kernels)
    if len(here) < len(row.ops):
        part = f"{len(here)} of its {len(row.ops)} ops are in the run"
        reason = f"{part}; {reason}" if reason else part
    return Node(
        row=row,
        predicted=predicted,
        measured=measured,
        measured_ops=len(here),
        kernels=kernels,
        reason=reason,
    )


def _reason(estimate: Estimate, row: Row, measured: float, kernels: float | None) -> str:
    predicted = row.timing.t_device
    if measured <= 0:
        return "no time in the run: it launches nothing"
    if abs(measured - predicted) <= CLOSE * predicted:
        return ""
    if not row.known:
        return "no rule: only its bytes are counted"
    slower = measured > predicted
    if slower and len(row.ops) > 1 and kernels is not None and kernels >= 2:
        return f"not fused in the run: {kernels:.0f} kernels for one"
    each, work = measured / row.count, (predicted - row.timing.gap) / row.count
    if slower and each < SHORT and work < 0.5 * each:
        return f"launch bound: {format_time(each)} kernel with {format_time(work)} of work"
    regime = row.timing.regime
    if regime == "launch":
        return f"launch bound: {format_time(each)}, predicted {format_time(predicted / row.count)}"
    if regime == "hbm":
        share = row.bytes / measured / estimate.chip.memory_bandwidth.value
        if share > 1:
            return f"{format_share(share)} of HBM bandwidth: caches hold what is counted as moved"
        return f"predicted HBM-bound, achieved {format_share(share)} of bandwidth"
    if regime == "network":
        share = row.timing.t_net / measured
        return f"predicted network-bound, achieved {format_share(share)} of the link"
    return _compute_reason(estimate, row, measured)


def _compute_reason(estimate: Estimate, row: Row, measured: float) -> str:
    """The reason for a compute-bound kernel: a shape that wastes tiles, or a share of the peak."""
    cost, chip = estimate.plan.costs[row.index], estimate.chip
    at_peak = 0.0  # seconds
    shapes: list[tuple[int, tuple[float, int, float]]] = []
    for work, flop in cost.work.items():
        if work.count in COMPUTED:
            at_peak += (
                row.count * flop / chip.peak(*engines.engine_of(work, chip, estimate.execution))
            )
            if work.operation in MATRIX and work.shape is not None:
                shapes.append((flop, work.shape))
    achieved = format_share(at_peak / measured)
    used = at_peak / row.timing.t_comp if row.timing.t_comp else 1.0
    if at_peak > measured:
        return f"{achieved} of the peak: the run skips work that is counted"
    if shapes and used < FEW_TILES:
        m, n, k = max(shapes)[1]
        name, size = min(("M", m), ("N", n), ("K", k), key=lambda pair: pair[1])
        return (
            f"small {name} = {size:g}: {format_share(used)} of the tiles used, achieved {achieved} "
            "of the peak"
        )
    return f"predicted compute-bound, achieved {achieved} of the peak"
