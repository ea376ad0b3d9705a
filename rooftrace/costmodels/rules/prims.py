"""torch's primitive ops, which forward-mode derivatives and decompositions are written in.

Each does what an op of aten does, whose formula counts (`elementwise`).
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import axes, extent, is_complex, vector
from rooftrace.costmodels.rules.elementwise import FORMULAS, pointwise
from rooftrace.costmodels.rules.fourier import fft_flop

AS_IN_ATEN: tuple[str, ...] = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma",
    "erf", "erfc", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2",
    "neg", "reciprocal", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
    "atan2", "fmax", "fmin", "fmod", "igamma", "igammac", "maximum", "minimum", "nextafter",
    "remainder", "mul", "eq", "ne", "lt", "le", "gt", "ge", "hypot", "isfinite", "signbit",
)
OTHERS: dict[str, str] = {  # a function by another name, or one that aten has no formula for
    "add": "x + y", "sub": "x - y", "div": "x / y", "pow": "pow(x, y)",
    "bessel_i0": "i0(x)", "bessel_i0e": "i0e(x)", "bessel_i1": "i1(x)", "bessel_i1e": "i1e(x)",
    "bessel_j0": "j0(x)", "bessel_j1": "j1(x)", "spherical_bessel_j0": "j0(x)",
    "cbrt": "cbrt(x)", "erf_inv": "erfinv(x)", "erfcx": "erfcx(x)", "ndtri": "ndtri(x)",
    "zeta": "zeta(x, y)",
}


def _register(name: str, formula: str) -> None:
    @builtin(f"prims.{name}", fusion="pointwise")
    def price(op: OpView) -> Cost:
        return pointwise(op, formula)

    price.__doc__ = f"{formula} for every element."


for _name in AS_IN_ATEN:
    _register(_name, FORMULAS[_name])
for _name, _formula in OTHERS.items():
    _register(_name, _formula)


@builtin("prims.bitwise_and", "prims.bitwise_not", "prims.bitwise_or", "prims.bitwise_xor",
         "prims.shift_left", "prims.shift_right_arithmetic", "prims.gcd", "prims.where",
         "prims.conj_physical", fusion="pointwise")
def logical(op: OpView) -> Cost:
    """Bits, truth values and choices: bytes only."""
    return op.streamed()


@builtin("prims.sum", "prims.prod", "prims.amax", "prims.amin", "prims.xor_sum",
         fusion="reduction", fused="reduction")
def reduction(op: OpView) -> Cost:
    """n - 1 adds, products or comparisons for rows of n."""
    x, rows = op.inputs[0], op.outputs[0].elements
    parts = 2 if is_complex(x) else 1
    return vector(op, parts * max(x.elements - rows, 0)) + op.streamed()


@builtin("prims.var", fusion="reduction", fused="reduction")
def variance(op: OpView) -> Cost:
    """Mean (n), differences (n), squares (n), n - 1 adds and a division."""
    return vector(op, 4 * op.inputs[0].elements) + op.streamed()


@builtin("prims.clone", "prims.device_put", "prims.cat", "prims.rev", "prims.collapse",
         "prims.reshape", "prims.copy_strided", "prims.as_strided_scatter", "prims.frexp",
         fusion="pointwise", kind="copy")
def copied(op: OpView) -> Cost:
    """Read once, written once; free where the output is the input's bytes."""
    if op.inputs and all(t.storage == op.inputs[0].storage for t in op.outputs):
        return Cost()
    return op.streamed()


@builtin("prims.convert_element_type", fusion="pointwise", kind="cast", fused="cast")
def converted(op: OpView) -> Cost:
    """A copy in another type."""
    return op.streamed()


@builtin("prims.copy_to", fusion="pointwise", kind="cast")
def copy_to(op: OpView) -> Cost:
    """The source is read, the destination written."""
    return op.reading("b")


@builtin("prims.full", "prims.full_like", "prims.fill", "prims.scalar_tensor", fusion="pointwise")
def filled(op: OpView) -> Cost:
    """Every element written."""
    return op.write_all(op.written())


@builtin("prims.iota", "prims.normal", "prims.uniform", fusion="pointwise")
def made(op: OpView) -> Cost:
    """A scale and an offset for every element; of whole numbers bytes only."""
    return vector(op, 2 * op.outputs[0].elements) + op.write_all(op.outputs)


@builtin("prims.fft_c2c", "prims.fft_r2c", "prims.fft_c2r")
def fft(op: OpView) -> Cost:
    """5 N log2 N flop for each transform, half of it where one side is real."""
    name = op.target.split(".")[1]
    x = op.outputs[0] if name == "fft_c2r" else op.needed("self")
    n = extent(x.shape, axes(op, x.dim))
    flop = fft_flop(x.elements // n if n else 0, n)
    return vector(op, flop if name == "fft_c2c" else flop // 2) + op.streamed()


@builtin("prims.item")
def item(op: OpView) -> Cost:
    """A value that the host waits for."""
    return op.reading("a")


@builtin("prims.as_strided", "prims.broadcast_in_dim", "prims.collapse_view", "prims.conj",
         "prims.real", "prims.imag", "prims.split_dim", "prims.squeeze", "prims.transpose",
         "prims.view_of", "prims.view_of_dtype", "prims.view_element_type", "prims.slice",
         "prims.select", "prims.resize", "prims.empty", "prims.empty_strided",
         "prims.empty_permuted", "prims.maximum_value", "prims.minimum_value", "prims._make_token",
         "prims._sink_tokens", fusion="free")
def free(op: OpView) -> Cost:
    """Views, allocations and bookkeeping."""
    return Cost()
