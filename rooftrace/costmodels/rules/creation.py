"""Tensors made from nothing: written once; `empty` writes nothing."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import vector
from rooftrace.costmodels.rules.elementwise import flop_per_element


@builtin("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided",
         "aten.new_empty", "aten.new_empty_strided", "aten._empty_affine_quantized",
         "aten.empty_quantized", fusion="free")
def empty(op: OpView) -> Cost:
    """An allocation: no kernel."""
    return Cost()


@builtin("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten._efficientzerotensor",
         "aten._new_zeros_with_same_feature_meta",
         "aten.ones", "aten.ones_like", "aten.new_ones", "aten.full", "aten.full_like",
         "aten.new_full", "aten.eye", "aten.scalar_tensor", "aten.tril_indices",
         "aten.triu_indices", "aten.zero", "aten.zero_", "aten._foreach_zero",
         "aten._foreach_zero_", fusion="pointwise")
def filled(op: OpView) -> Cost:
    """Every element written; what was there (or the tensor it is like) is not read."""
    return op.write_all(op.written())


SERIES: dict[str, str] = {  # i: the index of the element
    "arange": "START + STEP * i", "range": "START + STEP * i", "linspace": "START + STEP * i",
    "logspace": "pow(BASE, START + STEP * i)",
    "bartlett_window": "1 - abs(i * C - 1)", "hann_window": "A - B * cos(i * C)",
    "hamming_window": "A - B * cos(i * C)",
    "blackman_window": "A - B * cos(x := i * C) + D * cos(2 * x)",
    "kaiser_window": "i0(BETA * sqrt(1 - (x := i * C - 1) * x)) / D",
}


def _series(name: str, formula: str) -> None:
    @builtin(f"aten.{name}", fusion="pointwise")
    def price(op: OpView) -> Cost:
        flop = flop_per_element(formula) * op.outputs[0].elements
        return vector(op, flop) + op.write_all(op.outputs)

    price.__doc__ = f"{formula} for every element i; of integers bytes only."


for _name, _formula in SERIES.items():
    _series(_name, _formula)


@builtin("aten.fill", "aten.fill_", "aten.fill_diagonal_", fusion="pointwise")
def fill(op: OpView) -> Cost:
    """The value read (where it is a tensor), every element written."""
    return op.reading("value")
