"""Products and sums over the stored elements of a sparse tensor.

A graph has indices and values, and a sparse tensor that is made of them for a product, with the
shape of a dense one and no bytes; how many elements it stores is the fact `stored` (of the first
sparse operand).  Where that is not known (the result of `to_sparse`) every element counts: an upper
bound.  Products run on the vector engine, as cuSPARSE's do.  Bytes: a stored element moves with its
indices, 8 bytes each.
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import vector, whole_number_of
from rooftrace.hardware.precisions import storage_bytes

INDEX = 8
"""Bytes of an index (int64)."""


def stored(op: OpView, tensor: TensorView) -> int:
    """Stored elements of the sparse operand, all if that is not known."""
    return min(whole_number_of(op, "stored", tensor.elements), tensor.elements)


def stored_bytes(op: OpView, tensor: TensorView) -> int:
    """The stored elements with their indices (one per dimension), at most the dense tensor."""
    count = stored(op, tensor)
    return min(storage_bytes(tensor.dtype, count) + INDEX * tensor.dim * count,
               storage_bytes(tensor.dtype, tensor.elements))


def _others(op: OpView, *names: str) -> Cost:
    return op.read_all((t for _, t in op.operands(but=names))) + op.write_all(op.outputs)


def sparse_product(op: OpView, name: str, columns: int) -> Cost:
    """C[M, N] = A[M, K] B[K, N] with Z stored elements in A: 2 Z N flop."""
    a = op.needed(name)
    return (vector(op, 2 * stored(op, a) * columns) + op.read(a, stored_bytes(op, a))
            + _others(op, name))


@builtin("aten._sparse_addmm", "aten.sspaddmm", "aten.hspmm")
def sparse_addmm(op: OpView) -> Cost:
    """C[M, N] = beta D[M, N] + alpha A[M, K] B[K, N], A sparse: 2 Z N flop and M N adds.

    With beta = 0 there is nothing to add.
    """
    alpha, beta = op.attribute("alpha", 1), op.attribute("beta", 1)
    each = (alpha != 1) + (0 if beta == 0 else 1 + (beta != 1))
    return (sparse_product(op, "mat1", op.needed("mat2").shape[-1])
            + vector(op, each * op.outputs[0].elements))


@builtin("aten._sparse_mm", "aten._sparse_mm_reduce_impl")
def sparse_mm(op: OpView) -> Cost:
    """C[M, N] = A[M, K] B[K, N], A sparse: 2 Z N flop."""
    name = "sparse" if op.tensor("sparse") is not None else "self"
    return sparse_product(op, name, op.outputs[0].shape[-1])


@builtin("aten._sparse_sparse_matmul")
def sparse_sparse_matmul(op: OpView) -> Cost:
    """Both sparse.  An element of A meets a row of B: counted as one of all its columns."""
    return sparse_product(op, "self", op.needed("other").shape[-1])


@builtin("aten.sparse_sampled_addmm")
def sampled_addmm(op: OpView) -> Cost:
    """beta S + alpha (A[M, K] B[K, N]) where S stores: 2 Z K flop, a product and a sum each."""
    a, s = op.needed("mat1"), op.needed("self")
    return (vector(op, stored(op, s) * (2 * a.shape[-1] + 2)) + op.read(s, stored_bytes(op, s))
            + _others(op, "self"))


@builtin("aten._coalesce", "aten.coalesce")
def coalesce(op: OpView) -> Cost:
    """Indices sorted, elements of one place added: up to one add per stored element."""
    x = op.needed("self")
    size = stored_bytes(op, x)
    return vector(op, stored(op, x)) + op.read(x, size) + op.write(op.outputs[0], size)


@builtin("rooftrace.coalesce")
def coalesce_pieces(op: OpView) -> Cost:
    """Z values become Y: those of one place are added, Z - Y adds of a row each."""
    values, out = op.needed("values"), op.outputs[1]
    return vector(op, max(values.elements - out.elements, 0)) + op.streamed()


@builtin("aten._sparse_softmax", "aten._sparse_log_softmax", kind="softmax")
def sparse_softmax(op: OpView) -> Cost:
    """Softmax over what is stored: 5 flop each, as in `softmax`."""
    x = op.needed("self")
    size = stored_bytes(op, x)
    return vector(op, 5 * stored(op, x)) + op.read(x, size) + op.write(op.outputs[0], size)


@builtin("aten._to_sparse", "aten._to_sparse_csr", "aten._to_sparse_csc", "aten._to_sparse_bsr",
         "aten._to_sparse_bsc", "aten.to_sparse", "aten.to_sparse_csr")
def to_sparse(op: OpView) -> Cost:
    """Every element compared with zero; what is stored, at most all, is written."""
    x = op.needed("self")
    return vector(op, x.elements) + op.read(x) + op.write_all(op.outputs)


@builtin("aten._to_dense", "aten.to_dense", "aten.sparse_mask", "aten._sparse_mask_projection")
def to_dense(op: OpView) -> Cost:
    """What is stored read, the result written."""
    x = op.needed("self")
    return op.read(x, stored_bytes(op, x)) + op.write_all(op.outputs)


@builtin("aten._sparse_coo_tensor_with_dims_and_tensors", "aten._sparse_coo_tensor_unsafe",
         "aten._sparse_coo_tensor_with_dims", "aten._sparse_compressed_tensor_unsafe",
         "aten._sparse_csr_tensor_unsafe", "aten._coalesced_", fusion="free")
def sparse_tensor(op: OpView) -> Cost:
    """Indices and values put together: nothing moves."""
    return Cost()
