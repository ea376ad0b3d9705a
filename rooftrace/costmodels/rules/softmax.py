"""Softmax and log-softmax over rows, and their gradients.

Their kernels load whole rows, so that their work says how long rows are (`along_rows`).
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import along_rows, axes, extent


def _rows(op: OpView, x: TensorView) -> tuple[int, int]:
    """(rows, n): how many rows are normalised and how long each is."""
    n = extent(x.shape, axes(op, x.dim, "dim", -1)) if x.dim else 1
    return (x.elements // n if n else 0), n


@builtin("aten._softmax", "aten._safe_softmax", fusion="reduction", kind="softmax", fused="softmax")
@builtin("aten.softmax", "aten.special_softmax",
         fusion="reduction", kind="softmax")
def softmax(op: OpView) -> Cost:
    """y = exp(x - max x) / sum exp(x - max x) over n values.

    n - 1 comparisons, n differences, n exponentials, n - 1 adds, n divisions: 5 n - 2.
    """
    x = op.needed("self")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (5 * n - 2), x, n) + op.streamed()


@builtin("aten._log_softmax", fusion="reduction", kind="softmax", family="loss",
         fused="cross entropy")
@builtin("aten.log_softmax", "aten.special_log_softmax", fusion="reduction", kind="softmax")
def log_softmax(op: OpView) -> Cost:
    """y = (x - m) - log sum exp(x - m), m = max x, over n values.

    n - 1 comparisons, n differences, n exponentials, n - 1 adds, a log, n differences: 5 n - 1.
    """
    x = op.needed("self")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (5 * n - 1), x, n) + op.streamed()


@builtin("aten._softmax_backward_data", fusion="reduction", kind="softmax",
         fused="softmax backward")
def softmax_backward(op: OpView) -> Cost:
    """dx = y (dy - sum dy y): n products, n - 1 adds, n differences, n products: 4 n - 1."""
    x = op.needed("output")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.reading("grad_output", "output")


@builtin("aten._log_softmax_backward_data", fusion="reduction", kind="softmax", family="loss",
         fused="cross entropy")
def log_softmax_backward(op: OpView) -> Cost:
    """dx = dy - exp(y) sum dy: n - 1 adds, n exponentials, n products, n differences: 4 n - 1."""
    x = op.needed("output")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.reading("grad_output", "output")


@builtin("aten._masked_softmax", fusion="reduction", kind="softmax")
def masked_softmax(op: OpView) -> Cost:
    """Softmax over n values, 5 n - 2 per row; selecting by the mask is free."""
    x = op.needed("self")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (5 * n - 2), x, n) + op.streamed()


@builtin("aten._masked_softmax_backward", fusion="reduction", kind="softmax")
def masked_softmax_backward(op: OpView) -> Cost:
    """dx = y (dy - sum dy y): 4 n - 1 per row; selecting by the mask is free."""
    x = op.needed("output")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.streamed()
