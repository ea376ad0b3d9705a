"""Which kernels of a profiled step are off: far slower than expected, most seconds lost first."""

from __future__ import annotations

from collections.abc import Sequence

from rooftrace.costmodels.estimating import Row
from rooftrace.measured.live.results import OffKernel
from rooftrace.measured.validate import NodeCheck, Validation
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.paths import pattern_of

FAR = 1.5
"""Measured over expected seconds from which a kernel is off, where kernels typically keep to it."""
LEAST = 0.005
"""Share of a step's measured seconds that it must lose."""


def typical_ratio(validation: Validation) -> float | None:
    """Measured over expected seconds of a typical kernel; None where none was measured.

    It is the median, each kernel weighing as much as it was expected to take: few kernels that are
    far off do not move it.
    """
    ratios = sorted(
        (check.node.measured / check.node.predicted, check.node.predicted)
        for check in validation.nodes
        if check.node.measured and check.node.predicted > 0
    )
    half = sum(weight for _, weight in ratios) / 2
    for ratio, weight in ratios:
        half -= weight
        if half <= 0:
            return ratio
    return None


def off_kernels(validation: Validation) -> tuple[OffKernel, ...]:
    """The kernels that are off, equal ones in similar modules as one.

    Where kernels typically take longer than expected, one is off that is far beyond that.
    """
    typical = max(1.0, typical_ratio(validation) or 1.0)
    least = LEAST * validation.op_seconds
    graph = validation.estimate.graph if validation.estimate is not None else None
    off = [
        _off(check, graph)
        for check in validation.alike
        if check.node.measured is not None
        and check.node.measured > FAR * typical * check.node.predicted
        and check.node.miss > least
    ]
    return tuple(sorted(off, key=lambda kernel: (-kernel.lost, kernel.name, kernel.module)))


def _off(check: NodeCheck, graph: OpGraph | None) -> OffKernel:
    node = check.node
    return OffKernel(
        name=node.row.name,
        module=pattern_of(node.row.module),
        source=_source(node.row, graph),
        part=node.row.part,
        launches=node.row.count,
        measured=node.measured or 0.0,
        expected=node.predicted,
        reason=node.reason,
    )


def _source(row: Row, graph: OpGraph | None) -> str:
    """The line of the first op of a row that has one."""
    ops: Sequence[int] = row.ops if graph is not None else ()
    lines = (graph.ops[op].source for op in ops if graph is not None)
    return next(filter(None, lines), "")
