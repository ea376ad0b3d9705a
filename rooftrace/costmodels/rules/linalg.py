"""Factorisations and solves of dense matrices: leading terms of Golub & van Loan, 4th edition.

All of it is vector work here: small batched factorisations do not reach the matrix engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import vector


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
               why="U, S, V by Golub-Reinsch (section 8.6): an upper bound if only S is asked for.")
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
