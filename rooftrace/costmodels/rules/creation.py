"""Tensors made from nothing: written once; `empty` writes nothing."""

from __future__ import annotations

from rooftrace.costmodels.cost import NOTHING, Cost, OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import reading, write_all, written


@builtin("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided",
         "aten.new_empty", "aten.new_empty_strided", "aten._empty_affine_quantized",
         "aten.empty_quantized", fusion="free")
def empty(op: OpView) -> Cost:
    """An allocation: no kernel."""
    return NOTHING


@builtin("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten._efficientzerotensor",
         "aten.ones", "aten.ones_like", "aten.new_ones", "aten.full", "aten.full_like",
         "aten.new_full", "aten.arange", "aten.range", "aten.linspace", "aten.logspace",
         "aten.eye", "aten.scalar_tensor", "aten.tril_indices", "aten.triu_indices",
         "aten.hann_window", "aten.hamming_window", "aten.blackman_window", "aten.bartlett_window",
         "aten.kaiser_window", "aten.zero", "aten.zero_", "aten._foreach_zero",
         "aten._foreach_zero_", fusion="pointwise")
def filled(op: OpView) -> Cost:
    """Every element written; what was there (or the tensor it is like) is not read.

    The arithmetic of arange and of windows is on indices, and not counted.
    """
    return write_all(op, written(op))


@builtin("aten.fill", "aten.fill_", "aten.fill_diagonal_", fusion="pointwise")
def fill(op: OpView) -> Cost:
    """The value read (where it is a tensor), every element written."""
    return reading(op, "value")
