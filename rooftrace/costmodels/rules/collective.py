"""Rules of collectives between devices, and of products fused with an exchange."""

from __future__ import annotations

from collections.abc import Iterable

from rooftrace.costmodels.ops import Access, Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import over_link, total, vector
from rooftrace.costmodels.rules.matmul import product
from rooftrace.hardware.systems.records import torch_ops

# -- collectives -----------------------------------------------------------------------------------
# Collectives between devices: bytes that one device sends over its links, as ring algorithms do.
#
# n is the size of the group: an argument of the op, or a fact of the tracer (`group_size`).  Where
# it is unknown, (n - 1) / n is taken as 1, its limit for large groups, and a note of the estimate
# says so.  (Thakur et al. 2005, section 4.)  A group of one sends nothing.  Memory is read and
# written once.  In the schemas of c10d results are arguments; the tensors that an op sends are
# found by the names of arguments.

RESULTS = ("output", "outputs", "output_tensor", "output_tensors", "output_lists", "out")
"""Arguments that are written and not read."""


def group_size(op: OpView) -> int | None:
    """How many devices are in the group; None where unknown."""
    size = op.attribute("group_size", op.fact("group_size"))
    return int(size) if size is not None else None


def sent_of(op: OpView, size: int) -> int:
    """(n - 1) / n of a size, rounded: what belongs to the other devices; all where unknown."""
    n = group_size(op)
    if not n:
        return size if n is None else 0
    whole, rest = divmod(size * (n - 1), n)
    return whole + (2 * rest >= n)


def _sources(op: OpView) -> tuple[TensorView, ...]:
    """The tensors that a device sends."""
    return tuple(tensor for _, tensor in op.operands(but=RESULTS))


def _results(op: OpView) -> tuple[TensorView, ...]:
    """The tensors that a device has afterwards; for ops that return handles, their buffers.
    """
    buffers = tuple(tensor for _, tensor in op.operands(only=RESULTS))
    return buffers or op.written() or _sources(op)


def _moved(op: OpView) -> Cost:
    """Memory traffic: sent tensors are read once, received ones written once."""
    return op.read_all(_sources(op)) + op.write_all(_results(op))


def _sent(op: OpView, tensors: Iterable[TensorView], times: int = 1) -> Cost:
    """Link traffic: `times` (n - 1) / n of the bytes of these tensors."""
    return sum((over_link(t, sent_of(op, times * t.nbytes)) for t in tensors), Cost())


@builtin(*torch_ops("all_reduce"), family="communication")
def all_reduce(op: OpView) -> Cost:
    """Reduce-scatter, then all-gather: 2 (n - 1) / n of the buffer, and (n - 1) / n adds."""
    sources = _sources(op)
    return vector(op, sent_of(op, total(sources))) + _sent(op, sources, 2) + _moved(op)


@builtin("symm_mem.one_shot_all_reduce", "symm_mem.one_shot_all_reduce_out",
         "symm_mem.one_shot_all_reduce_copy", "symm_mem.one_shot_all_reduce_copy_out",
         family="communication")
def one_shot_all_reduce(op: OpView) -> Cost:
    """Every device reads the buffers of the n - 1 others, and adds all: n - 1 of each (n = 2 where
    unknown)."""
    sources, others = _sources(op), (group_size(op) or 2) - 1
    links = sum((over_link(t, others * t.nbytes) for t in sources), Cost())
    return vector(op, others * total(sources)) + links + _moved(op)


@builtin(*torch_ops("reduce_scatter", "reduce"), family="communication")
def reduce_scatter(op: OpView) -> Cost:
    """(n - 1) / n of the input is sent, and as much added.  A reduction to one root sends as much
    in a ring, per device."""
    sources = _sources(op)
    return vector(op, sent_of(op, total(sources))) + _sent(op, sources) + _moved(op)


@builtin(*torch_ops("all_gather"), family="communication")
def all_gather(op: OpView) -> Cost:
    """(n - 1) / n of the output passes through each device."""
    return _sent(op, _results(op)) + _moved(op)


@builtin(*torch_ops("all_to_all", "gather"), family="communication")
def all_to_all(op: OpView) -> Cost:
    """(n - 1) / n of the input is for others.  Over all devices this also holds for a gather.
    A step around a ring sends all of it to the next device."""
    if sum(map(bool, op.attribute("input_split_sizes") or ())) == 1 and group_size(op) != 1:
        return sum((over_link(t, t.nbytes) for t in _sources(op)), _moved(op))
    return _sent(op, _sources(op)) + _moved(op)


@builtin(*torch_ops("broadcast"), family="communication")
def broadcast(op: OpView) -> Cost:
    """In a pipeline all devices but the last pass the buffer on: (n - 1) / n of it each."""
    return _sent(op, _sources(op)) + _moved(op)


@builtin(*torch_ops("scatter"), family="communication")
def scatter(op: OpView) -> Cost:
    """The root sends n - 1 of n equal parts; every device gets one."""
    return _sent(op, _sources(op)) + _moved(op)


@builtin(*torch_ops("send", "recv"), "_c10d_functional.batch_p2p_ops", family="communication")
def between_two(op: OpView) -> Cost:
    """All of the tensors goes over the link, and through memory once."""
    return sum((over_link(t, t.nbytes) for t in _sources(op)), Cost()) + op.read_all(_sources(op))


@builtin("c10d.check_for_nan", family="communication")
def check_for_nan(op: OpView) -> Cost:
    """A comparison per value."""
    return vector(op, total(op.inputs)) + op.streamed()


@builtin("rooftrace.to_host", kind="copy", label="copy to the host")
@builtin("rooftrace.from_host", kind="copy", label="copy from the host")
def host_copy(op: OpView) -> Cost:
    """A copy between the memories of device and host: through each once, and all of it between."""
    here = op.inputs[0] if op.target.startswith("rooftrace.to_host") else op.outputs[0]
    between = Cost({}, {Access(here.storage, False, "host"): here.nbytes})
    return op.streamed() + (between if here.nbytes else Cost())


@builtin(*torch_ops("barrier"), "_c10d_functional.wait_tensor", "_c10d_functional.wait_tensors",
         "_c10d_functional._wrap_tensor_autograd", "rooftrace.record_event",
         "rooftrace.wait_event", "rooftrace.resize_storage", "rooftrace.free_storages",
         "rooftrace.bring_storages", fusion="free", family="communication")
def wait(op: OpView) -> Cost:
    """Waiting moves nothing, nor does freeing."""
    return Cost()


# -- fused collective ------------------------------------------------------------------------------
# Products that exchange their operand or their result with other devices while they compute.
#
# They cost as much as the exchange and the product, but nothing between the two goes through memory
# again.  (Wang et al. 2023, Overlap Communication with Dependent Computation.)

def _made(op: OpView, a: TensorView, b: TensorView, rows: int) -> Cost:
    k = a.shape[-1]
    columns = b.elements // k if k else 0
    return product(1, rows, k, columns, a, b)


@builtin("symm_mem.fused_all_gather_matmul", "symm_mem.fused_all_gather_scaled_matmul",
         family="communication")
def all_gather_matmul(op: OpView) -> Cost:
    """A of all devices, times each B: (n - 1) / n of the gathered A over the links."""
    a = op.needed("A")
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
    return cost + over_link(a, sent_of(op, gathered))


@builtin("symm_mem.fused_matmul_reduce_scatter", "symm_mem.fused_scaled_matmul_reduce_scatter",
         family="communication")
def matmul_reduce_scatter(op: OpView) -> Cost:
    """A B of each device, added up; a device has its part of the sum: (n - 1) / n is sent."""
    a, b, out = op.needed("A"), op.needed("B"), op.outputs[0]
    width = a.shape[-1]
    rows = a.elements // width if width else 0
    columns = b.elements // width if width else 0
    sent = sent_of(op, rows * columns)
    each = out.nbytes // out.elements if out.elements else 0
    return (_made(op, a, b, rows) + op.streamed() + vector(op, sent)
            + over_link(out, sent * each))
