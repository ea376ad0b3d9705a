"""Products that exchange their operand or their result with other devices while they compute.

They cost what the exchange and the product cost, but that nothing between the two goes through
memory a second time.  (Wang et al. 2023, Overlap Communication with Dependent Computation.)
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.collective import sent_share
from rooftrace.costmodels.rules.common import over_link, vector
from rooftrace.costmodels.rules.matmul import product


def _made(op: OpView, a: TensorView, b: TensorView, rows: int) -> Cost:
    k = a.shape[-1]
    columns = b.elements // k if k else 0
    return product(1, rows, k, columns, a, b)


@builtin("symm_mem.fused_all_gather_matmul", "symm_mem.fused_all_gather_scaled_matmul",
         family="communication")
def all_gather_matmul(op: OpView) -> Cost:
    """A of all devices, times each B: (n - 1) / n of the gathered A over the links."""
    a, share = op.needed("A"), sent_share(op)
    weights = [tensor for name, tensor in op.operands(only=("Bs",))]
    width = a.shape[-1]
    results = [out for out in op.outputs if out.elements]
    products = results[-len(weights):] if weights else []
    cost = op.streamed()
    rows = 0
    for b, result in zip(weights, products, strict=True):
        columns = b.elements // width if width else 0
        rows = result.elements // columns if columns else 0
        cost += _made(op, a, b, rows)
    gathered = rows * width * a.nbytes // a.elements if a.elements else 0
    return cost + over_link(a, round(share * gathered))


@builtin("symm_mem.fused_matmul_reduce_scatter", "symm_mem.fused_scaled_matmul_reduce_scatter",
         family="communication")
def matmul_reduce_scatter(op: OpView) -> Cost:
    """A B of each device, added up; a device has its part of the sum: (n - 1) / n is sent."""
    a, b, out = op.needed("A"), op.needed("B"), op.outputs[0]
    share = sent_share(op)
    width = a.shape[-1]
    rows = a.elements // width if width else 0
    columns = b.elements // width if width else 0
    sent = round(share * rows * columns)
    each = out.nbytes // out.elements if out.elements else 0
    return (_made(op, a, b, rows) + op.streamed() + vector(op, sent)
            + over_link(out, sent * each))
