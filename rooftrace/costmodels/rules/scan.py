"""Running sums, products and extremes along one dimension: output i depends on inputs 0..i."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import axes, extent, is_complex, vector


def _steps(op: OpView) -> int:
    """Combinations done: n - 1 per row of n."""
    x = op.needed("self")
    n = extent(x.shape, axes(op, x.dim, "dim", 0)) if x.dim else 1
    return x.elements - x.elements // n if n else 0


@builtin("aten.cumsum", "aten.cumsum_", "aten.cumprod", "aten.cumprod_", "aten.cummax",
         "aten.cummin", "aten._cummax_helper", "aten._cummin_helper", kind="reduction")
def scan(op: OpView) -> Cost:
    """n - 1 adds, products or comparisons per row of n.

    A parallel scan does up to twice as many; the count is of the sums, not of an algorithm.
    """
    product = 6 if "cumprod" in op.target else 2
    each = product if is_complex(op.inputs[0]) else 1
    return vector(op, each * _steps(op)) + op.streamed()


@builtin("aten.logcumsumexp", "aten._logcumsumexp")
def logcumsumexp(op: OpView) -> Cost:
    """Per step max(x, y) + log1p(exp(-|x - y|)): 7 flop."""
    return vector(op, 7 * _steps(op)) + op.streamed()
