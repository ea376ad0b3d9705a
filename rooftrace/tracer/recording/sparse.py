"""Sparse tensors while recording: an op on one runs as ops on its indices and its values.

A sparse tensor is no value of the graph, its pieces are: they have the bytes, and the ops on them
are the ones that CUDA's kernels for sparse tensors run (SparseCUDATensorMath.cu,
SparseCUDATensor.cpp).  An op without a kernel here reads the full tensor: the pieces are put
together by a constructor that moves nothing.  Of a sparse tensor whose count of elements nobody
knows (of `to_sparse` on meta) there are no pieces: it is a dense value, by assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rooftrace.graph import Tensor as Value
from rooftrace.graph.formulas import polynomials
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording.ops import COMPOSITE, Call, entering
from rooftrace.tracer.recording.serving import own_ops
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.values import trees

_aten: Any = torch.ops.aten
_JOIN = _aten._sparse_coo_tensor_unsafe.default
_JOIN_COMPRESSED = _aten._sparse_compressed_tensor_unsafe.default
_ACCUMULATES = "torch::autograd::AccumulateGrad"
"""The autograd node that keeps the gradient of a parameter."""

On = Callable[[], AbstractContextManager[None]]
"""Switches the recorder's mode on: ops inside are recorded."""
Kernel = Callable[[Tape, Call, On], Any]
"""Runs an op on sparse tensors; NotImplemented where it cannot."""

KERNELS: dict[str, Kernel] = {}
"""The ops on sparse tensors that run as ops on their pieces, by name."""


def kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Register a function that runs in place of the ops of these names."""
    return entering(KERNELS, *(f"aten.{name}" for name in names))


def run_sparse(tape: Tape, call: Call, on: On) -> Any:
    """The result of an op on sparse tensors, or that makes one; NotImplemented of any other.

    Where it is NotImplemented, a product reads the pieces of its sparse tensors, put together; any
    other op reads dense tensors of their shapes, by assumption.  Raises NotImplementedError for an
    op that PyTorch cannot run on sparse tensors either.
    """
    if call.name not in _MAKE and all(t.layout is torch.strided for t in call.tensors):
        return NotImplemented
    function = KERNELS.get(call.name)
    if function is None and call.name.startswith("aten._foreach_"):
        function = _one_by_one
    out = NotImplemented if function is None else function(tape, call, on)
    if out is NotImplemented:
        for tensor in call.tensors:
            if trees.is_sparse(tensor):
                _check_kernel(call, tensor)
                _join(tape, call, tensor)
    return out


_PRODUCTS = {f"aten.{name}" for name in (
    "mm", "mv", "_sparse_addmm", "sspaddmm", "hspmm", "_sparse_mm", "_sparse_mm_reduce_impl",
    "_sparse_sparse_matmul", "sparse_sampled_addmm", "_sparse_softmax", "_sparse_log_softmax",
)}  # fmt: skip
"""Ops whose rules count the stored elements of a sparse tensor."""
_KEYS = torch_private.DispatchKey


def _check_kernel(call: Call, tensor: Tensor) -> None:
    keys = (
        _KEYS.SparseCPU if tensor.layout is torch.sparse_coo else _KEYS.SparseCsrCPU,
        _KEYS.CompositeExplicitAutograd,
        COMPOSITE,
    )
    if call.func.namespace == "aten" and not any(map(call.func.has_kernel_for_dispatch_key, keys)):
        raise NotImplementedError(
            f"{call.name} has no kernel for tensors of layout {tensor.layout} in PyTorch"
        )


def _pieces(tape: Tape, tensor: Tensor) -> list[Tensor] | None:
    """The tensors that store a sparse one; None where nobody knows how many elements it has."""
    if not trees.is_sparse(tensor):
        return None
    pieces = [piece for piece, _ in reversed(trees.named_pieces(tensor))]
    if len(pieces) == 1:
        return None
    tape.tags.recognise(pieces)
    return pieces


def _stands_for(tape: Tape, tensor: Tensor, sources: Sequence[Tensor]) -> None:
    """The pieces of a tensor that was made of these are the same values."""
    with torch_private.AutoDispatchBelowAutograd():
        pieces = trees.pieces_of(tensor)
    for piece, other in zip(pieces, sources, strict=True):
        tape.tags.same_as(piece, other)
        entry = tape.values.known(other)
        if entry is not None and piece.device.type == "meta":
            tape.values.learn(piece, entry.value, entry.taint)


def _made(
    tape: Tape, indices: Tensor, values: Tensor, size: Sequence[int], coalesced: bool
) -> Tensor:
    made: Tensor = _JOIN(indices, values, size, is_coalesced=coalesced)
    _stands_for(tape, made, (indices, values))
    return made


def _join(tape: Tape, call: Call, tensor: Tensor) -> None:
    """Record that the pieces of a sparse tensor are put together, for a product that reads it."""
    pieces = _pieces(tape, tensor)
    if pieces is None or not tape.recording:
        return
    if call.name not in _PRODUCTS:
        tape.tags.mark(tensor, None)
        return
    if tensor.layout is torch.sparse_coo:
        joined = Call.of(_JOIN, *pieces, list(tensor.shape), is_coalesced=tensor.is_coalesced())
    else:
        joined = Call.of(
            _JOIN_COMPRESSED, *pieces, list(tensor.shape), dtype=tensor.dtype, layout=tensor.layout
        )
    tape.record(joined, [tensor], single=True)


# -- made of its pieces, and taken apart -----------------------------------------------------------

_MAKERS = {
    "aten._sparse_coo_tensor_with_dims_and_tensors": ("indices", "values"),
    "aten._sparse_coo_tensor_unsafe": ("indices", "values"),
    "aten._sparse_compressed_tensor_unsafe": ("compressed_indices", "plain_indices", "values"),
}
"""Ops that put pieces together, and their arguments that are pieces."""


_MAKE = {*_MAKERS, "aten._embedding_bag_backward"}
"""Ops on dense tensors that make a sparse one."""


@kernel(*(name.removeprefix("aten.") for name in _MAKERS))
def _put_together(tape: Tape, call: Call, on: On) -> Any:
    names = [argument.name for argument in call.func._schema.arguments]
    pieces = [call.args[names.index(name)] for name in _MAKERS[call.name]]
    if any(piece.device.type != "meta" for piece in pieces):
        pieces = [_brought(tape, piece) for piece in pieces]
        args = list(call.args)
        for name, piece in zip(_MAKERS[call.name], pieces, strict=True):
            args[names.index(name)] = piece
        call = Call.of(call.func, *args, **call.kwargs)
    made = call.run()
    _stands_for(tape, made, pieces)
    return made


def _brought(tape: Tape, piece: Tensor) -> Tensor:
    """A meta tensor for a piece on the host."""
    if piece.device.type != "cpu":
        return piece
    moved = torch.empty_like(piece, device="meta")
    if tape.recording:
        tape.node_of(piece)
        tape.tags.same_as(moved, piece)
    tape.values.learn(moved, piece.detach())
    return moved


@kernel("_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices",
        "row_indices")  # fmt: skip
def _taken_out(tape: Tape, call: Call, on: On) -> Any:
    if _pieces(tape, call.args[0]) is None:
        return NotImplemented
    with torch_private.AutoDispatchBelowAutograd():
        return call.run()


@kernel("is_coalesced", "_nnz", "sparse_dim", "dense_dim", "_dimI", "_dimV", "_coalesced_")
def _property(tape: Tape, call: Call, on: On) -> Any:
    return call.run()


@kernel("detach", "alias")
def _same(tape: Tape, call: Call, on: On) -> Any:
    (x,) = call.args
    made = call.run()
    if trees.STORES_NOTHING in vars(x):
        made.__dict__[trees.STORES_NOTHING] = True
    return made


# -- copies ----------------------------------------------------------------------------------------


@kernel("clone", "_to_copy")
def _copied(tape: Tape, call: Call, on: On) -> Any:
    """The pieces are copied, unless a parameter keeps its gradient, whose pieces it takes over.

    (AccumulateGrad copies a sparse gradient only if somebody else holds its pieces, which on a
    device nobody does; while a mode looks on, it always asks for a copy.)
    """
    (x,) = call.args
    pieces = _pieces(tape, x)
    if pieces is None:
        return NotImplemented
    node: Any = torch_private.current_autograd_node()
    if call.name != "aten.clone" or node is None or node.name() != _ACCUMULATES:
        place = {name: item for name, item in call.kwargs.items() if name == "device"}
        options = {name: item for name, item in call.kwargs.items() if name == "dtype"} | place
        with on():
            moved = [call.func(piece, **place) for piece in pieces[:-1]]
            pieces = [*moved, call.func(pieces[-1], **options)]
    if x.layout is torch.sparse_coo:
        return _made(tape, pieces[0], pieces[1], x.shape, x.is_coalesced())
    dtype, device = pieces[-1].dtype, pieces[-1].device
    made: Tensor = _JOIN_COMPRESSED(*pieces, x.shape, dtype=dtype, layout=x.layout, device=device)
    _stands_for(tape, made, pieces)
    return made


@kernel("t", "transpose")
def _transposed(tape: Tape, call: Call, on: On) -> Any:
    """Copies of both pieces, with two rows of the indices exchanged (transpose_sparse_)."""
    x, *dims = call.args
    pieces = _pieces(tape, x)
    if pieces is None:
        return NotImplemented
    if x.layout is not torch.sparse_coo:  # of rows it is one of columns, with the same pieces
        return call.run()
    first, second = [dim % x.dim() for dim in dims] or [0, 1]
    if max(first, second) >= x.sparse_dim():
        return NotImplemented
    size = list(x.shape)
    size[first], size[second] = size[second], size[first]
    with on():
        indices, values = pieces[0].clone(), pieces[1].clone()
        row, other = indices[first], indices[second]
        kept = torch.zeros_like(row).copy_(row)
        row.copy_(other)
        other.copy_(kept)
    return _made(tape, indices, values, size, False)


def _becomes(tensor: Tensor, other: Tensor) -> Tensor:
    """A sparse tensor gets other pieces."""
    with torch_private.AutoDispatchBelowAutograd():
        tensor.data = other
    return tensor


@kernel("copy_")
def _copied_into(tape: Tape, call: Call, on: On) -> Any:
    to, x = call.args[:2]
    pieces = _pieces(tape, x)
    if pieces is None or to.layout is not torch.sparse_coo or x.layout is not torch.sparse_coo:
        return NotImplemented
    with on():
        indices, values = pieces[0].clone(), pieces[1].to(to.dtype, copy=True)
    return _becomes(to, _made(tape, indices, values, x.shape, x.is_coalesced()))


@kernel("zero_")
def _zeroed(tape: Tape, call: Call, on: On) -> Any:
    """Nothing is stored any more."""
    (x,) = call.args
    pieces = _pieces(tape, x)
    if pieces is None or x.layout is not torch.sparse_coo:
        return NotImplemented
    with on():
        indices = torch.empty_like(pieces[0][:, :0])
        values = torch.empty_like(pieces[1][:0])
    x.__dict__[trees.STORES_NOTHING] = True
    return _becomes(x, _made(tape, indices, values, x.shape, False))


@kernel("_embedding_bag_backward")
def _bags_backward(tape: Tape, call: Call, on: On) -> Any:
    """The gradient of a table of which bags read rows, where it is to be sparse."""
    arguments = call.named
    if not arguments.pop("sparse"):
        return NotImplemented
    arguments.pop("maximum_indices")
    with on():
        return _aten._embedding_bag_sparse_backward(**arguments)


# -- arithmetic ------------------------------------------------------------------------------------


@kernel("mul", "mul_", "div", "div_", "neg", "neg_")
def _scaled(tape: Tape, call: Call, on: On) -> Any:
    """Apply a number to the values of a sparse tensor; the indices are the same."""
    x, *others = call.args
    if any(isinstance(other, Tensor) and (other.dim() or trees.is_sparse(other))
           for other in others):  # fmt: skip
        return NotImplemented
    pieces = _pieces(tape, x) if isinstance(x, Tensor) else None
    if pieces is None or x.layout is not torch.sparse_coo:
        return NotImplemented
    with on():
        values = call.func(pieces[1], *others, **call.kwargs)
    if call.info.mutated:
        _stands_for(tape, x, (pieces[0], values))
        return x
    return _made(tape, pieces[0], values, x.shape, x.is_coalesced())


@kernel("abs", "sqrt", "pow", "square", "sign", "sgn", "sin", "tan", "tanh", "asin", "atan", "sinh",
        "asinh", "expm1", "log1p", "relu", "ceil", "floor", "round", "trunc", "erf")  # fmt: skip
def _kept_zeros(tape: Tape, call: Call, on: On) -> Any:
    """A function that is 0 at 0, of the values of a tensor that is coalesced before."""
    x, *others = call.args
    pieces = None if x.layout is not torch.sparse_coo else _pieces(tape, x)
    if pieces is None or any(isinstance(other, Tensor) for other in others):
        return NotImplemented
    with on():
        coalesced = x.coalesce()
    indices, values = _pieces(tape, coalesced) or pieces
    with on():
        indices, values = indices.clone(), call.func(values, *others, **call.kwargs)
    return _made(tape, indices, values, x.shape, True)


@kernel("sum", "norm")
def _reduced(tape: Tape, call: Call, on: On) -> Any:
    """The sum, or the norm, of everything that is stored."""
    x, *others = call.args
    full = all(other in ([], False, None) or isinstance(other, (int, float)) for other in others)
    if not full or not trees.is_sparse(x) or _pieces(tape, x) is None:
        return NotImplemented
    if "norm" in call.name:
        with on():
            x = x.coalesce()
    pieces = _pieces(tape, x)
    if pieces is None:
        return NotImplemented
    with on():
        return call.func(pieces[-1], *others, **call.kwargs)


@kernel("_to_dense")
def _dense(tape: Tape, call: Call, on: On) -> Any:
    """Zeros, to which the stored elements are added."""
    x = call.args[0]
    pieces = _pieces(tape, x)
    if pieces is None or x.layout is not torch.sparse_coo:
        return NotImplemented
    with on():
        zeros = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return zeros.add_(x)


def _rows(indices: Tensor, sizes: Sequence[int]) -> Tensor:
    """One number for each place that several indices name: of its row, counted row by row."""
    if len(sizes) == 1:
        return indices.squeeze(0)
    row, *others = [i * n for i, n in zip(indices.unbind(0), Value.contiguous(sizes), strict=True)]
    for other in others:
        row = row + other
    return row


@kernel("add", "add_", "sub", "sub_")
def _added(tape: Tape, call: Call, on: On) -> Any:
    """Add to a dense tensor at the stored rows, or to a sparse one behind its elements."""
    base, x = call.args[:2]
    if trees.is_sparse(base) and isinstance(x, Tensor) and x.layout is torch.strided:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    pieces = _pieces(tape, x) if isinstance(x, Tensor) else None
    if pieces is None or base.shape != x.shape or x.layout is not torch.sparse_coo:
        return NotImplemented
    alpha = call.kwargs.get("alpha", 1) * (-1 if "sub" in call.name else 1)
    indices, values = pieces
    if base.layout is torch.strided:
        return _added_to_dense(call, indices, values, alpha, on)
    first = _pieces(tape, base)
    if first is None or base.layout is not torch.sparse_coo:
        return NotImplemented
    with on():
        scaled = values if alpha == 1 else values * alpha
        joined = torch.cat([first[0], indices], 1), torch.cat([first[1], scaled])
    made = _made(tape, joined[0], joined[1], x.shape, False)
    return _becomes(base, made) if call.info.mutated else made


def _added_to_dense(call: Call, indices: Tensor, values: Tensor, alpha: Any, on: On) -> Tensor:
    """base[row] += alpha values, for each row that is stored.

    The values of a tensor that is not coalesced are scaled beforehand, into new memory.
    """
    base, x = call.args[:2]
    sizes = x.shape[: x.sparse_dim()]
    with on():
        if alpha != 1 and not x.is_coalesced():
            values, alpha = values * alpha, 1
        out: Tensor = base if call.info.mutated else base.clone()
        rows = _rows(indices, sizes)
        lines = out if len(sizes) == 1 else out.view(-1, *x.shape[len(sizes) :])
        lines.index_add_(0, rows, values.to(base.dtype), alpha=alpha)
    return out


@kernel("_coalesce")
def _coalesced(tape: Tape, call: Call, on: On) -> Any:
    """Rows of one index become one: one for each distinct index, where these are known."""
    (x,) = call.args
    pieces = _pieces(tape, x)
    if pieces is None:
        return NotImplemented
    indices, values = pieces
    entry, count = tape.values.known(indices), indices.shape[1]
    draw = tape.values.uniform.of(indices) if len(indices) == 1 else None
    distinct = None if entry is None else torch.unique(entry.value, dim=1)
    if draw is not None:
        count = round(polynomials.expected_distinct(count, 1, draw.becomes.numel()))
    elif distinct is not None:
        count = distinct.shape[1]
    elif count > 1:
        tape.values.assume(
            "sparse",
            f"how many of the {count} rows of a sparse tensor repeat is not known: coalesce() is "
            "taken to keep all of them",
            count,
        )
    with on():
        made = own_ops().coalesce(indices, values, x.shape[: x.sparse_dim()], count)
    if draw is None and entry is not None and distinct is not None:
        tape.values.learn(made[0], distinct, entry.taint)
    return _made(tape, made[0], made[1], x.shape, True)


@kernel("sparse_mask")
def _masked(tape: Tape, call: Call, on: On) -> Any:
    """The rows of a dense tensor that a coalesced mask stores, times ones; its indices copied."""
    x, mask = call.args[:2]
    pieces = _pieces(tape, mask)
    plain = x.layout is torch.strided and mask.layout is torch.sparse_coo
    if pieces is None or not plain or not mask.is_coalesced():
        return NotImplemented
    with on():
        ones = torch.ones((), dtype=x.dtype, device=x.device)
        rows = x[tuple(pieces[0].unbind(0))]
        indices, values = pieces[0].clone(), rows * ones.expand_as(rows)
    return _made(tape, indices, values, x.shape, True)


# -- many at once ----------------------------------------------------------------------------------

_NORM = "aten._foreach_norm"


def _one_by_one(tape: Tape, call: Call, on: On) -> Any:
    """An op on lists, as CUDA's slow path runs it where its one kernel takes no such tensors."""
    name = call.name.removeprefix("aten._foreach_")
    alone = _aten.linalg_vector_norm if call.name == _NORM else getattr(_aten, name)
    count = len(call.args[0])
    lists = [x if isinstance(x, (list, tuple)) else [x] * count for x in call.args]
    with on():
        made = [alone(*each, **call.kwargs) for each in zip(*lists, strict=True)]
    return None if call.info.mutated else made
