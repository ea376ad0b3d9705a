"""Collectives between devices: bytes that one device sends over its links, as ring algorithms do.

n is the size of the group: an argument of the op, or a fact of the tracer (`group_size`).  Where it
is not known, n - 1 over n is taken as 1: the bound for large groups.  (Thakur et al. 2005, section
4.) Memory is read and written once.
"""

from __future__ import annotations

from fractions import Fraction

from rooftrace.costmodels.cost import NOTHING, Cost, OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import over_link, streamed, total, vector


def _group(op: OpView) -> int | None:
    size = op.attribute("group_size", op.fact("group_size"))
    return int(size) if size is not None else None


def _share(op: OpView) -> Fraction:
    """(n - 1) / n: what of a buffer belongs to the others."""
    n = _group(op)
    return Fraction(1) if n is None else Fraction(n - 1, n) if n else Fraction(0)


def _sent(op: OpView, times: int, of_output: bool = False) -> Cost:
    tensors = op.outputs if of_output else op.inputs
    return sum((over_link(t, round(times * _share(op) * t.nbytes)) for t in tensors), NOTHING)


@builtin("_c10d_functional.all_reduce", "_c10d_functional.all_reduce_",
         "_c10d_functional.all_reduce_coalesced", "_c10d_functional.all_reduce_coalesced_")
def all_reduce(op: OpView) -> Cost:
    """Reduce-scatter, then all-gather: 2 (n - 1) / n of the buffer, and (n - 1) / n adds."""
    adds = round(_share(op) * total(op.inputs))
    return vector(op, adds) + _sent(op, 2) + streamed(op)


@builtin("_c10d_functional.reduce_scatter_tensor",
         "_c10d_functional.reduce_scatter_tensor_coalesced")
def reduce_scatter(op: OpView) -> Cost:
    """(n - 1) / n of the input is sent, and as much added."""
    adds = round(_share(op) * total(op.inputs))
    return vector(op, adds) + _sent(op, 1) + streamed(op)


@builtin("_c10d_functional.all_gather_into_tensor", "_c10d_functional.all_gather_into_tensor_out",
         "_c10d_functional.all_gather_into_tensor_coalesced")
def all_gather(op: OpView) -> Cost:
    """(n - 1) / n of the output passes through each device."""
    return _sent(op, 1, of_output=True) + streamed(op)


@builtin("_c10d_functional.all_to_all_single")
def all_to_all(op: OpView) -> Cost:
    """(n - 1) / n of the input is for others."""
    return _sent(op, 1) + streamed(op)


@builtin("_c10d_functional.broadcast", "_c10d_functional.broadcast_")
def broadcast(op: OpView) -> Cost:
    """The buffer passes through each device once."""
    return sum((over_link(t, t.nbytes) for t in op.inputs), NOTHING) + streamed(op)


@builtin("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd", fusion="free")
def wait(op: OpView) -> Cost:
    """Waiting moves nothing."""
    return NOTHING
