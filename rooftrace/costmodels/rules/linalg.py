"""Rules of dense factorisations and solves, Fourier transforms, and sparse products."""

from __future__ import annotations

import math
from collections.abc import Callable

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import axes, extent, vector, whole_number_of
from rooftrace.hardware.precisions import storage_bytes

# -- factorisations --------------------------------------------------------------------------------
# Factorisations and solves of dense matrices: leading terms of Golub & van Loan, 4th edition.
#
# All of it is vector work here: small batched factorisations do not reach the matrix engine.


def _matrix(op: OpView) -> tuple[int, int, int, TensorView]:
    """(batch, m, n) of the first operand."""
    x = op.needed("A", "self", "input", "LU")
    return math.prod(x.shape[:-2]), x.shape[-2], x.shape[-1], x


def _factorisation(*names: str, flop: Callable[[int, int], float], why: str) -> None:
    @builtin(*(name if "." in name else f"aten.{name}" for name in names))
    def price(op: OpView) -> Cost:
        batch, m, n, _ = _matrix(op)
        return vector(op, batch * round(flop(max(m, n), min(m, n)))) + op.streamed()

    price.__doc__ = why


_factorisation("linalg_cholesky_ex", "linalg_cholesky", "cholesky", "linalg_ldl_factor_ex",
               flop=lambda m, n: n**3 / 3, why="n^3 / 3 (algorithm 4.2.1).")
_factorisation("linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet",
               flop=lambda m, n: m * n**2 - n**3 / 3, why="2 n^3 / 3 if square (section 3.2).")
_factorisation("linalg_inv_ex", "linalg_inv", "inverse", "cholesky_inverse",
               flop=lambda m, n: 2 * n**3, why="LU and n solves: 2 n^3.")
_factorisation("linalg_qr", "geqrf", "linalg_householder_product",
               flop=lambda m, n: 4 * (m * n**2 - n**3 / 3),
               why="R: 2 n^2 (m - n / 3); Q explicitly: the same again (section 5.2).")
_factorisation("_linalg_svd", "linalg_svdvals", "prims.svd",
               flop=lambda m, n: 4 * m**2 * n + 8 * m * n**2 + 9 * n**3,
               why="U, S, V by Golub-Reinsch (section 8.6): an upper bound if only S is needed.")
_factorisation("_linalg_eigh", flop=lambda m, n: 9 * n**3, why="Values and vectors (section 8.3).")
_factorisation("linalg_eig", flop=lambda m, n: 25 * n**3, why="Values and vectors (section 7.5).")
_factorisation("linalg_matrix_exp", flop=lambda m, n: 2 * 7 * n**3,
               why="Scaling and squaring, some seven products (section 9.3).")


def _right_sides(op: OpView, n: int) -> int:
    """Columns of the right-hand side."""
    b = op.needed("B", "b", "self")
    return max(b.elements // n, 1) if n else 0


@builtin("aten.linalg_solve_triangular", "aten.triangular_solve")
def solve_triangular(op: OpView) -> Cost:
    """n^2 flop per right-hand side."""
    a = op.needed("self", "A") if "linalg" in op.target else op.needed("A")
    n = a.shape[-1]
    return vector(op, n * n * _right_sides(op, n)) + op.streamed()


@builtin("aten.linalg_lu_solve", "aten.cholesky_solve", "aten.linalg_ldl_solve")
def factored_solve(op: OpView) -> Cost:
    """Two triangular solves: 2 n^2 per right-hand side."""
    n = op.needed("LU", "input2", "LD").shape[-1]
    return vector(op, 2 * n * n * _right_sides(op, n)) + op.streamed()


@builtin("aten._linalg_solve_ex", "aten.linalg_solve")
def solve(op: OpView) -> Cost:
    """LU, then two triangular solves per right-hand side."""
    batch, _, n, _ = _matrix(op)
    return vector(op, batch * round(2 * n**3 / 3) + 2 * n * n * _right_sides(op, n)) + op.streamed()


@builtin("aten.ormqr")
def reflected(op: OpView) -> Cost:
    """k Householder reflections of C[m, n]: 4 m n flop each, less the zeros (section 5.1)."""
    k, c = op.needed("input2").shape[-1], op.needed("input3")
    m = c.shape[-2] if op.attribute("left", True) else c.shape[-1]
    return vector(op, 2 * (c.elements // max(m, 1)) * k * (2 * m - k)) + op.streamed()


@builtin("aten.linalg_pinv", "aten.pinverse")
def pseudo_inverse(op: OpView) -> Cost:
    """The SVD (see `_linalg_svd`), V scaled by 1 / S, and V U^T."""
    batch, m, n, _ = _matrix(op)
    m, n = max(m, n), min(m, n)
    factor = 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    return vector(op, batch * (factor + n + n * n + 2 * m * n * n)) + op.streamed()


@builtin("aten.linalg_lstsq")
def least_squares(op: OpView) -> Cost:
    """Householder QR: 2 n^2 (m - n / 3), and 4 m n per right-hand side (section 5.3)."""
    batch, m, n, _ = _matrix(op)
    factor = batch * round(2 * n * n * (m - n / 3))
    return vector(op, factor + 4 * n * op.needed("b").elements) + op.streamed()


# -- fourier ---------------------------------------------------------------------------------------
# Fast Fourier transforms: 5 N log2 N flop (van Loan 1992; the convention of fftw.org/speed).

def fft_flop(transforms: int, n: int) -> int:
    """`transforms` complex transforms of n points."""
    return round(transforms * 5 * n * math.log2(n)) if n > 1 else 0


@builtin("aten._fft_c2c")
def fft(op: OpView) -> Cost:
    """Complex to complex over all of `dim` together: elements / n transforms of n points.

    One pass over memory, as of a transform that fits on chip.
    """
    x = op.needed("self")
    n = extent(x.shape, axes(op, x.dim))
    return vector(op, fft_flop(x.elements // n if n else 0, n)) + op.streamed()


@builtin("aten._fft_r2c", "aten._fft_c2r")
def real_fft(op: OpView) -> Cost:
    """Real on one side: half of the complex transform of the real side's size."""
    real = op.outputs[0] if "c2r" in op.target else op.needed("self")
    n = extent(real.shape, axes(op, real.dim))
    return vector(op, fft_flop(real.elements // n if n else 0, n) // 2) + op.streamed()


# -- sparse ----------------------------------------------------------------------------------------
# Products and sums over the stored elements of a sparse tensor.
#
# A graph has indices and values, and a sparse tensor that is made of them for a product, with the
# shape of a dense one and no bytes; how many elements it stores is the fact `stored` (of the
# first sparse operand).  Where that is unknown (the result of `to_sparse`) every element
# counts: an upper bound.  Products run on the vector engine, as cuSPARSE's do.  Bytes: a stored
# element moves with its indices, 8 bytes each.

INDEX = 8
"""Bytes of an index (int64)."""


def stored(op: OpView, tensor: TensorView) -> int:
    """Stored elements of the sparse operand, all if unknown."""
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
    """Softmax over stored elements: 5 flop each, as in `softmax`."""
    x = op.needed("self")
    size = stored_bytes(op, x)
    return vector(op, 5 * stored(op, x)) + op.read(x, size) + op.write(op.outputs[0], size)


@builtin("aten._to_sparse", "aten._to_sparse_csr", "aten._to_sparse_csc", "aten._to_sparse_bsr",
         "aten._to_sparse_bsc", "aten.to_sparse", "aten.to_sparse_csr")
def to_sparse(op: OpView) -> Cost:
    """Every element compared with zero; stored elements, at most all, are written."""
    x = op.needed("self")
    return vector(op, x.elements) + op.read(x) + op.write_all(op.outputs)


@builtin("aten._to_dense", "aten.to_dense", "aten.sparse_mask", "aten._sparse_mask_projection")
def to_dense(op: OpView) -> Cost:
    """Stored elements read, the result written."""
    x = op.needed("self")
    return op.read(x, stored_bytes(op, x)) + op.write_all(op.outputs)


@builtin("aten._sparse_coo_tensor_with_dims_and_tensors", "aten._sparse_coo_tensor_unsafe",
         "aten._sparse_coo_tensor_with_dims", "aten._sparse_compressed_tensor_unsafe",
         "aten._sparse_csr_tensor_unsafe", "aten._coalesced_", fusion="free")
def sparse_tensor(op: OpView) -> Cost:
    """Indices and values put together: nothing moves."""
    return Cost()
